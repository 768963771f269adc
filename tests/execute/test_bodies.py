"""Every stage body against the float64 math of the ops it computes, on its own, under every fusion and overlap."""

from __future__ import annotations

from statistics import median

import pytest
from micro import graph, plan, runner, weights

from optkit.execute.bodies import BODIES
from optkit.plan.choices import FUSIONS, OVERLAPS
from optkit.validate.forced import TeacherForced
from optkit.validate.scenario import Scenario

ONE_ROUNDING = 2.0**-8
"""Largest relative error of one value rounded to bf16."""
VARIANTS = {
    "k3": {},
    "llama": {},
    "k3, one split": {"tune__kv_splits": 1},
    "llama, one split": {"tune__kv_splits": 1},
    **{f"k3, no {f}": {f"fusion__{f}": False} for f in FUSIONS},
    **{f"llama, no {f}": {f"fusion__{f}": False} for f in FUSIONS[:4]},
    **{f"k3, no {o}": {f"overlap__{o}": False} for o in OVERLAPS},
    "k3, tp 2": {"parallel__tp": 2},
    "llama, tp 2": {"parallel__tp": 2},
    "k3, tp 2, no residual_add": {"parallel__tp": 2, "fusion__residual_add": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_match_float64(variant: str) -> None:
    name, changes = variant.split(",")[0], VARIANTS[variant]
    tp = changes.get("parallel__tp", 1)
    scenario = Scenario(graph(name, tp), 4, 1)
    forced = TeacherForced(
        runner(name, scenario, plan(name, tp, None, **changes), tp), graph(name, tp), weights(name, tp), scenario
    )
    forced.step(0, scenario.caches("f64"))
    assert not forced.samples.wrong
    # fused stages round up to four times: x, then y, y * gate or the sum; single rows of two columns may nearly cancel
    worst = {k: e for k, e in forced.samples.errors.items() if median(e) > 4 * ONE_ROUNDING or max(e) > 0.1}
    assert not worst
    assert forced.samples.errors.keys() == {k for i in range(len(forced.plan.stages)) for k in forced.keys(i)}


def test_variants_reach_every_body_and_mode() -> None:
    plans = [plan(v.split(",")[0], c.get("parallel__tp", 1), None, **c) for v, c in VARIANTS.items()]
    assert {s.body for p in plans for s in p.stages} == BODIES.keys()
    assert {s.param("mode") for p in plans for s in p.stages if s.body == "ew"} == {
        "add",
        "act_mul",
        "sigmoid_mul",
        "reduce",
        "gather",
    }
    assert {x["epilogue"] for p in plans for s in p.stages for x in s.param("parts", ())} == {
        "store",
        "act",
        "add",
        "gate",
        "mailbox",
    }
    assert {s.param("x")["prologue"] for p in plans for s in p.stages if s.param("x")} == {"copy", "rmsnorm", "mixnorm"}


def test_exact_outputs_are_exact() -> None:
    """f32 outputs and copies carry no bf16 rounding at all."""
    scenario = Scenario(graph("k3"), 4, 1)
    forced = TeacherForced(runner("k3", scenario), graph("k3"), weights("k3"), scenario)
    forced.step(0, scenario.caches("f64"))
    for key in ("route:wts", "expert_down:y", "kda:recurrent state", "blockstats:stats"):
        assert max(forced.samples.errors[key]) < 2e-6, key
    for key in ("embed:P.in", "kda:conv state"):
        assert max(forced.samples.errors[key]) == 0.0, key
