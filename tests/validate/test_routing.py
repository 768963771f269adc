"""Routing extremes pass on a right plan, are what they say, and every way of getting them wrong is seen; exact ties."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from micro import graph, plan, runner, weights

from optkit.checks import Check
from optkit.execute.bodies import experts
from optkit.execute.bodies.experts import distinct, top_k
from optkit.models import interpret
from optkit.models.graph import Op
from optkit.models.ops import OPS, StepContext
from optkit.validate.routing import BODIES, distinct_of, extremes, logits_of, routing
from optkit.validate.scenario import Scenario

EXPERTS, TOPK, ROWS = 8, 3, 8  # of the micro K3


def judged() -> dict[str, Check]:
    scenario = Scenario(graph("k3"), ROWS, 1)
    checks = routing(runner("k3", scenario), graph("k3"), weights("k3"), scenario, "again")
    return {c.name.removeprefix("routing."): c for c in checks}


def red(checks: dict[str, Check]) -> set[str]:
    return {n for n, c in checks.items() if c.status == "fail"}


def test_extremes_are_what_they_say() -> None:
    for rows, count, topk in ((8, 32, 4), (8, 8, 3), (3, 896, 16)):
        cases = extremes(rows, count, topk)
        assert all(len(set(row)) == topk for ids in cases.values() for row in ids)
        assert distinct_of(cases["one set for all"]) == topk < count, "most experts have no token"
        assert distinct_of(cases["all different"]) == min(count, rows * topk), "the bound on distinct experts"
        assert all(row[0] == 0 for row in cases["one expert for all"])
        assert {e for ids in cases.values() for row in ids for e in row} >= {0, count - 1}


def test_right_plan_passes() -> None:
    checks = judged()
    assert set(checks) == set(extremes(ROWS, EXPERTS, TOPK)) and not red(checks), checks
    assert checks["one set for all"].reason == "3 of 8 experts have a token, 8 rows"
    assert checks["all different"].reason == "8 of 8 experts have a token, 8 rows"
    assert all(0 < c.value <= 1 and c.repeat == "again" for c in checks.values())


def test_the_bound_of_the_table_is_reached() -> None:
    """As many slots as the plan has room for, each with one row: the table is full to its last element."""
    ids = extremes(8, 32, 4)["all different"]
    table = distinct(ids, 8)
    assert table[0] == 32 and len(table) == 1 + 32 * 9 and table.count(-1) == 32 * 7


def test_no_experts_no_checks() -> None:
    scenario = Scenario(graph("llama"), 2, 1)
    assert routing(runner("llama", scenario), graph("llama"), weights("llama"), scenario) == []


def test_the_last_slot_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the last of the slots is not worked on: harmless while fewer experts are chosen."""
    original = experts.slots_of
    monkeypatch.setattr(experts, "slots_of", lambda mem, name: original(mem, name)[: EXPERTS - 1])
    assert red(judged()) == {"one expert for all", "all different"}


def test_an_expert_of_many_rows_cut_short_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: an expert takes seven rows at most."""
    original = experts.slots_of

    def short(mem: Any, name: str) -> Any:
        return [experts.Slot(s.expert, s.pairs[:7]) for s in original(mem, name)]

    monkeypatch.setattr(experts, "slots_of", short)
    assert red(judged()) == {"one set for all", "one expert for all"}


def test_the_last_expert_out_of_reach_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the router looks at one expert too few."""
    original = experts.top_k
    monkeypatch.setattr(experts, "top_k", lambda logits, bias, k, scale: original(logits[:, :-1], bias[:-1], k, scale))
    assert red(judged()) >= {"one set for all", "all different"}


def test_ids_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: choices in rising order. The sum is the same, the order of the output is not."""
    original = experts.top_k

    def rising(*a: Any) -> Any:
        ids, wts = original(*a)
        return ids.flip(-1), wts.flip(-1)

    monkeypatch.setattr(experts, "top_k", rising)
    checks = judged()
    assert red(checks) == set(checks) and "its scores say" in checks["all different"].reason


TIES = torch.tensor([[0.5, 2.0, 0.5, 2.0, 0.5, 2.0, -1.0, 2.0], [1.0] * 8, [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 3.0],
                     [-200.0] * 8, [200.0, -200.0, 200.0, -200.0, 200.0, 200.0, 200.0, 200.0]])  # fmt: skip
LOWER = [[1, 3, 5], [0, 1, 2], [6, 7, 0], [0, 1, 2], [0, 2, 4]]
"""The three of every row by falling score, of equal ones those with the lower ids; saturated sigmoids tie too."""


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exact_ties_go_to_the_lower_id_in_the_reference(dtype: torch.dtype) -> None:
    op = Op("r", "route", ("logits",), ("ids", "wts"), (("bias", "bias"),), (), (("topk", TOPK), ("scale", 1.0)))
    none = torch.zeros(5, dtype=torch.int32)
    ctx = StepContext(none, none[:, None], none.long(), none, 16, {}, dtype, None, None)
    ids = OPS["route"].ref(op, [TIES.to(dtype)], {"bias": torch.zeros(EXPERTS, dtype=dtype)}, ctx)[0]
    assert ids.tolist() == LOWER


def test_exact_ties_go_to_the_lower_id_in_the_executor() -> None:
    assert top_k(TIES, torch.zeros(EXPERTS), TOPK, 1.0)[0].tolist() == LOWER


def test_exact_ties_through_whole_stages() -> None:
    """With a bias of zero, tied logits go through the route stage as through float64 and the plain implementation; a
    runner that takes the higher id is seen although the gap is zero."""
    w = {k: torch.zeros_like(v) if k.endswith("e_score_correction_bias") else v for k, v in weights("k3").items()}
    assert any(k.endswith("e_score_correction_bias") for k in w)
    from optkit.execute import Executor

    scenario = Scenario(graph("k3"), 5, 1)
    r = Executor(plan("k3"), graph("k3"), w, scenario.caches("bf16"))
    p, g = plan("k3"), graph("k3")
    for i, stage in enumerate(p.stages):
        if stage.body == "route":
            out = r.run_stages(i, i + 1, scenario.inputs(0), {stage.param("logits"): TIES})
            assert out[stage.param("ids")][:5].tolist() == LOWER
    for precision in ("f64", "bf16"):
        cast = interpret.cast_weights(g, w, precision)
        assert all(not bool(cast[k].any()) for k in cast if k.endswith("e_score_correction_bias"))


def test_unequal_scores_are_the_rule_of_the_extremes() -> None:
    """The made logits decide by far more than a rounding: no bias of random weights changes a choice."""
    ids = extremes(ROWS, EXPERTS, TOPK)["one expert for all"]
    bias = next(v for k, v in weights("k3").items() if k.endswith("e_score_correction_bias"))
    for b in (bias, 4 * (bias - bias.mean()) / (bias.max() - bias.min()) / 5 + 3):  # as drawn; 0.8 apart and far from 0
        logits = logits_of(ids)(b)
        assert top_k(logits.float(), b, TOPK, 1.0)[0].tolist() == ids
        s = torch.sort(torch.sigmoid(logits) + b, descending=True).values[:, : TOPK + 1]
        assert float((s[:, :-1] - s[:, 1:]).min()) > 1e-2
    assert set(BODIES) <= {s.body for s in plan("k3").stages}
