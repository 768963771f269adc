"""The teacher-forced gates pass on a right plan, and every planted fault turns one of them red."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from micro import body, edit, edit_parts, graph, plan, runner, weights

from optkit.checks import Check
from optkit.execute import Executor
from optkit.execute.bodies import BODIES, experts
from optkit.models.ops import WeightTensor
from optkit.plan.types import Plan, Record
from optkit.validate import Numerics, per_stage
from optkit.validate.gates import MIN_SAMPLES
from optkit.validate.scenario import Scenario


def judged(name: str, p: Plan | None = None, steps: int = 4, **kw: Any) -> tuple[dict[str, Check], list[Numerics]]:
    """Few steps: enough for layers that repeat; faults show long before 256 samples."""
    scenario = Scenario(graph(name), 8, steps)
    checks, rows = per_stage(runner(name, scenario, p, **kw), graph(name), weights(name), scenario, samples=8 * steps)
    return {c.name.removeprefix("numerics."): c for c in checks}, rows


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_right_plan_passes_with_enough_samples(name: str) -> None:
    scenario = Scenario(graph(name), 8, 32)
    checks, rows = per_stage(runner(name, scenario), graph(name), weights(name), scenario, "optkit run x")
    assert {c.name: c.status for c in checks} == {
        "numerics.per_stage": "pass",
        "numerics.probes": "pass",
        "numerics.exact": "pass",
    }, checks
    assert all(r.n >= MIN_SAMPLES and r.status == "pass" for r in rows)
    assert all(c.repeat == "optkit run x" for c in checks)
    parts = {
        "gemv",
        "embed",
        "attn_combine",
        *(
            ("kda", "mla_insert", "route", "expert_gate_up", "expert_down", "blockstats")
            if name == "k3"
            else ("rope_insert",)
        ),
    }
    assert {r.stage.split(":")[0] for r in rows} == parts


def test_few_samples_fail_and_say_so() -> None:
    checks, _ = judged("llama", steps=1)
    assert checks["per_stage"].status == "fail"
    assert "fewer than 256 samples" in checks["per_stage"].reason and "x its gate" not in checks["per_stage"].reason


def red(checks: dict[str, Check]) -> set[str]:
    """Gates that are red for more than the number of samples."""
    return {n for n, c in checks.items() if c.status == "fail" and not c.reason.startswith("fewer than")}


def test_the_short_run_used_below_is_green_on_a_right_plan() -> None:
    assert red(judged("k3")[0]) == red(judged("llama")[0]) == set()


CONSTANTS = [
    ("k3", "gemv", "x.eps"),
    ("k3", "gemv", "x.mix_eps"),
    ("k3", "gemv", "act:beta"),
    ("k3", "gemv", "act:linear_beta"),
    ("k3", "kda", "lower_bound"),
    ("k3", "kda", "l2_eps"),
    ("k3", "kda", "eps"),
    ("k3", "mla_insert", "eps"),
    ("k3", "attn", "scale"),
    ("k3", "route", "scale"),
    ("k3", "expert_gate_up", "beta"),
    ("k3", "expert_gate_up", "linear_beta"),
    ("llama", "gemv", "x.eps"),
    ("llama", "rope_insert", "theta"),
    ("llama", "attn", "scale"),
]


@pytest.mark.parametrize(("name", "stage", "key"), CONSTANTS)
def test_every_constant_matters(name: str, stage: str, key: str) -> None:
    """Planted fault: one constant of one kind of stage is ten times too large."""
    p = plan(name)
    if key.startswith("x."):
        short = key[2:]
        wrong = edit(
            p,
            lambda s: s.body == stage and s.param("x")[short] != 0.0,
            lambda d: {"x": Record({**d["x"], short: 10 * d["x"][short]})},
        )
    elif key.startswith("act:"):
        short = key[4:]
        wrong = edit_parts(p, lambda x: x["epilogue"] == "act", lambda x: {short: 10 * x[short]})
    else:
        wrong = edit(p, body(stage), lambda d: {key: 10 * d[key]})
    checks, _ = judged(name, wrong, steps=1)
    assert red(checks) & {"per_stage", "probes"}
    assert any(f"{stage if stage != 'attn' else 'attn_combine'}:" in checks[c].reason for c in red(checks))


def test_constants_above_are_all_there_are() -> None:
    """A new float param of a stage must be added to CONSTANTS."""
    found = set()
    for name in ("k3", "llama"):
        for s in plan(name).stages:
            flat = {**dict(s.params), **{f"x.{k}": v for k, v in (s.param("x") or {}).items()}}
            acts = [x for x in s.param("parts", ()) if x["epilogue"] == "act" and x["act"] == "situ"]
            flat |= {f"act:{k}": v for x in acts for k, v in x.items()}
            found |= {(name, s.body, k) for k, v in flat.items() if isinstance(v, float) and v != 0.0}
    found -= {(n, "attn_combine", "scale") for n in ("k3", "llama")}  # carried along, used by attn alone
    assert found == set(CONSTANTS)


def test_rope_scaling_matters() -> None:
    wrong = edit(plan("llama"), body("rope_insert"), lambda _: {"scaling": ()})
    assert "per_stage" in red(judged("llama", wrong)[0])


@pytest.mark.parametrize(("name", "swap"), [("k3", "part"), ("llama", "part"), ("k3", "experts")])
def test_swapped_gate_and_up(name: str, swap: str) -> None:
    p = plan(name)
    if swap == "experts":
        wrong = edit(p, body("expert_gate_up"), lambda d: {"w1": d["w3"], "w3": d["w1"]})
    else:
        wrong = edit_parts(
            p, lambda x: x["epilogue"] == "act", lambda x: {"weight": x["weight2"], "weight2": x["weight"]}
        )
    assert "per_stage" in red(judged(name, wrong, steps=1)[0])


@pytest.mark.parametrize(
    ("stage", "key", "value"),
    [
        ("attn", "scale", 1.0),  # scores not scaled
        ("route", "scale", 1.01),  # 1 % on the experts' weights
    ],
)
def test_missing_scale(stage: str, key: str, value: float) -> None:
    assert "per_stage" in red(judged("k3", edit(plan("k3"), body(stage), lambda _: {key: value}), steps=1)[0])


def free(slots: torch.Tensor) -> int:
    """A state slot that no row uses."""
    return next(i for i in range(1, 10) if i not in slots.tolist())


def patched(monkeypatch: pytest.MonkeyPatch, stage: str, fault: Any) -> None:
    """Replaces one body by `fault(original)`."""
    monkeypatch.setitem(BODIES, stage, fault(BODIES[stage]))


def test_top_k_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def second_to_last(
        logits: torch.Tensor, bias: torch.Tensor, topk: int, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s = torch.sigmoid(logits)
        ids = torch.sort(s + bias, dim=-1, descending=True, stable=True).indices[:, 1 : topk + 1]
        chosen = s.gather(-1, ids)
        return ids, chosen / chosen.sum(-1, keepdim=True) * scale

    monkeypatch.setattr(experts, "top_k", second_to_last)
    checks, _ = judged("k3", steps=1)
    assert "exact" in red(checks)
    assert "score gap" in checks["exact"].reason


def test_expert_table_with_a_lost_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    original = experts.distinct
    monkeypatch.setattr(experts, "distinct", lambda ids, rows: [original(ids, rows)[0] - 1, *original(ids, rows)[1:]])
    checks, _ = judged("k3", steps=1)
    assert "exact" in red(checks) and "table of distinct experts" in checks["exact"].reason


@pytest.mark.parametrize(
    ("name", "stage", "key"),
    [("k3", "kda", "state_slot"), ("k3", "mla_insert", "slot_mapping"), ("llama", "rope_insert", "slot_mapping")],
)
def test_state_to_wrong_slot(monkeypatch: pytest.MonkeyPatch, name: str, stage: str, key: str) -> None:
    """Planted fault: rows 0 and 1 write to each other's slot, or one row to a slot of nobody."""
    for swap in (True, False):

        def wrong(original: Any, swap: bool = swap) -> Any:
            def run(s: Any, units: Any, mem: Any) -> None:
                kept = mem.inputs[key]
                moved = kept.clone()
                if swap:
                    moved[[0, 1]] = kept[[1, 0]]
                else:
                    moved[0] = free(kept) if key == "state_slot" else 3  # a slot of nobody, a token of block 0
                mem.inputs[key] = moved
                original(s, units, mem)
                mem.inputs[key] = kept

            return run

        with monkeypatch.context() as m:
            patched(m, stage, wrong)
            checks, _ = judged(name, steps=1)
        assert ("per_stage" if swap else "exact") in red(checks), checks
        if not swap:
            assert "that no active row owns" in checks["exact"].reason


@pytest.mark.parametrize(
    "weight",
    [
        "model.layers.1.self_attn.f_b_proj.weight",
        "model.layers.1.self_attn.k_conv1d.weight",
        "model.layers.2.mlp_res_proj.weight",
        "model.layers.3.block_sparse_moe.experts.w2",
    ],
)
def test_a_wrong_weight_is_seen(weight: str) -> None:
    w: dict[str, WeightTensor] = dict(weights("k3"))
    t = w[weight]
    w[weight] = (t[0].roll(1, 0), t[1]) if isinstance(t, tuple) else t.roll(1, -1)
    scenario = Scenario(graph("k3"), 8, 1)
    r = Executor(plan("k3"), graph("k3"), w, scenario.caches("bf16"))
    checks, _ = per_stage(r, graph("k3"), weights("k3"), scenario, samples=8)
    assert red({c.name.removeprefix("numerics."): c for c in checks}) & {"per_stage", "exact"}


def test_a_runner_that_fails_is_a_failed_check() -> None:
    p = plan("llama")
    wrong = replace(
        p,
        stages=tuple(
            replace(s, params=tuple(x for x in s.params if x[0] != "weight")) if s.body == "embed" else s
            for s in p.stages
        ),
    )
    checks, rows = judged("llama", wrong, steps=1)
    assert checks["per_stage"].status == "fail" and "stage 0 'embed'" in checks["per_stage"].reason and not rows
