"""Rollout, boundary cases and repetition: green on a right runner, red on broken ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from micro import body, edit, graph, plan, runner, weights

from optkit.checks import Check
from optkit.execute.bodies import BODIES, attention, experts
from optkit.plan.types import Plan
from optkit.validate import boundaries, make, repeat, rollout, validate
from optkit.validate.boundaries import cases
from optkit.validate.rollout import Trace
from optkit.validate.scenario import Scenario, tensors
from optkit.validate.threads import one_thread

LENGTHS = SimpleNamespace(rollout_steps=8, rollout_batch=4, order_seeds=8, order_steps=2, samples=256, seed=0)


def rolled(name: str, p: Plan | None = None, steps: int = 6) -> dict[str, Check]:
    """Few steps: a fault shows in the value (share of the gate) long before 256 samples."""
    scenario = Scenario(graph(name), 8, steps)
    checks, _ = rollout(runner(name, scenario, p), graph(name), weights(name), scenario)
    return {c.name.removeprefix("rollout."): c for c in checks}


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_right_plan_passes(name: str) -> None:
    checks = rolled(name, steps=32)
    assert {n: c.status for n, c in checks.items()} == {"logits": "pass", "choices": "pass", "state": "pass"}, checks


def test_short_rollout_lacks_samples() -> None:
    checks = rolled("llama", steps=2)
    assert checks["logits"].status == "fail" and "16 samples" in checks["logits"].reason
    assert checks["logits"].value <= 1


@pytest.mark.parametrize(("stage", "key", "factor"), [("kda", "lower_bound", 0.9), ("attn", "scale", 1.2)])
def test_a_small_error_in_every_step_is_seen(stage: str, key: str, factor: float) -> None:
    checks = rolled("k3", edit(plan("k3"), body(stage), lambda d: {key: factor * d[key]}))
    assert checks["logits"].value > 1


def test_wrong_choices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = experts.top_k
    monkeypatch.setattr(experts, "top_k", lambda logits, bias, topk, scale: original(logits, -bias, topk, scale))
    checks = rolled("k3", steps=4)
    assert checks["choices"].status == "fail" and "score gap" in checks["choices"].reason


def test_repeated_expert_stops_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    original = experts.top_k
    monkeypatch.setattr(experts, "top_k", lambda *a: (original(*a)[0][:, :1].expand(-1, a[2]), original(*a)[1]))
    checks = rolled("k3", steps=2)
    assert checks["logits"].status == "fail" and "distinct expert ids" in checks["logits"].reason


def test_choices_within_twice_the_score_error_are_allowed() -> None:
    got = Trace(score_error=0.01, adopted=[("here", 0.019), ("there", 0.021)])
    assert got.refused() == ["there: score gap 0.021"]


def test_state_lost_between_steps_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the recurrent state is not written back; one step alone looks right."""
    original = BODIES["kda"]

    def forgetful(stage: Any, units: Any, mem: Any) -> None:
        kept = mem.caches[stage.param("recurrent")].clone()
        original(stage, units, mem)
        mem.caches[stage.param("recurrent")].copy_(kept)

    monkeypatch.setitem(BODIES, "kda", forgetful)
    assert rolled("k3", steps=1)["logits"].value <= 1
    assert rolled("k3")["logits"].value > 1


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_boundary_cases_pass(name: str) -> None:
    suite = make(graph(name), LENGTHS)
    r = runner(name, suite.per_stage)
    checks = boundaries(r, graph(name), weights(name), suite.boundaries)
    assert [c.name for c in checks] == [f"boundary.{n}" for n in cases(graph(name))]
    assert all(c.status == "pass" for c in checks), checks


@pytest.mark.parametrize(
    ("name", "stage", "key"), [("k3", "kda", "state_slot"), ("llama", "rope_insert", "slot_mapping")]
)
def test_padding_that_writes_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, stage: str, key: str) -> None:
    original = BODIES[stage]

    def unmasked(s: Any, units: Any, mem: Any) -> None:
        kept = mem.inputs[key]
        spare = next(i for i in range(1, 10) if i not in kept.tolist()) if key == "state_slot" else 0
        mem.inputs[key] = torch.where(kept < (key == "state_slot"), spare, kept)
        original(s, units, mem)
        mem.inputs[key] = kept

    monkeypatch.setitem(BODIES, stage, unmasked)
    suite = make(graph(name), LENGTHS)
    checks = {
        c.name: c for c in boundaries(runner(name, suite.per_stage), graph(name), weights(name), suite.boundaries)
    }
    for case in ("padded rows", "padding first"):
        assert checks[f"boundary.{case}"].status == "fail" and "no live row owns" in checks[f"boundary.{case}"].reason
    assert checks["boundary.batch 1"].status == "pass"


def test_page_edge_off_by_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: attention leaves out the newest token where it is the first of its page."""
    original = attention._length
    monkeypatch.setattr(
        attention, "_length", lambda mem, row: n - 1 if (n := original(mem, row)) % 16 == 1 and n > 1 else n
    )
    suite = make(graph("llama"), LENGTHS)
    checks = {
        c.name: c.status
        for c in boundaries(runner("llama", suite.per_stage), graph("llama"), weights("llama"), suite.boundaries)
    }
    assert checks["boundary.page edges"] == "fail" and checks["boundary.batch 1"] == "pass"


def test_repeat_sees_a_runner_that_is_not_deterministic() -> None:
    scenario = Scenario(graph("llama"), 2, 1)
    r = runner("llama", scenario)
    assert repeat(r, scenario).status == "pass"
    calls = iter(range(100))
    step = r.step

    def noisy(inputs: Any) -> torch.Tensor:
        logits = step(inputs)
        next(iter(tensors(r.caches["L0.kv"])))[0, 0, 0, 0] = next(calls)
        return logits

    r.step = noisy  # type: ignore[method-assign]
    assert repeat(r, scenario).status == "fail"


def test_suite_runs_everything_on_one_set_of_caches() -> None:
    g = graph("llama")
    suite = make(g, SimpleNamespace(**{**vars(LENGTHS), "rollout_steps": 64}))
    r = runner("llama", suite.per_stage)
    told: list[str] = []
    checks, rows = validate(r, weights("llama"), suite, "optkit run x", told.append)
    assert all(c.status == "pass" for c in checks), checks
    assert {c.name for c in checks} == {
        "numerics.per_stage",
        "numerics.probes",
        "numerics.exact",
        "rollout.logits",
        "rollout.choices",
        "rollout.state",
        *(f"boundary.{n}" for n in cases(g)),
        "repeat.bits",
        "groups.bits",
        "orders.bits",
    }
    assert len(told) == 4 and rows[-1].stage == "rollout:logits"


def test_scenario_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="batch: 9: expected 1..8"):
        Scenario(graph("llama"), 9, 1)
    with pytest.raises(ValueError, match="starts: .*: expected 2 lengths"):
        Scenario(graph("llama"), 2, 1, starts=(1,))
    with pytest.raises(ValueError, match="blocks, slots: 2, 1: expected at least"):
        Scenario(graph("llama"), 2, 1, blocks=2, slots=1)


def test_scenario_pages_are_disjoint_and_spare_nobody_s() -> None:
    s = Scenario(graph("k3"), 8, 40)
    pages = s.block_table.flatten().tolist()
    assert len(set(pages)) == len(pages) and 0 not in pages
    assert len(set(s.state_slot.tolist())) == 8 and 0 not in s.state_slot.tolist()
    written = {int(x) for t in range(s.steps) for x in s.inputs(t)["slot_mapping"]}
    assert len(written) == 8 * 40


def test_one_thread_is_for_the_body_only() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)
