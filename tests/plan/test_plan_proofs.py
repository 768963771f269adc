"""The planner's edges against the verifier's own proofs (another writing, task by task), over random choices."""

from __future__ import annotations

import random

import pytest
from plan_cases import choices, graph

from optkit.plan.build import build_plan
from optkit.plan.choices import FUSIONS, OVERLAPS, PlanChoices
from optkit.verify.proofs import failed, prove

GLOBS = ("P@*", "*_raw@*", "og@*", "y*@*", "x_?.stats*@*")


def random_choices(seed: int, tp: int, routed: bool) -> PlanChoices:
    """Switches, mechanism, overrides, SMs and splits at random."""
    pick = random.Random(seed)
    flags = {k: pick.random() < 0.6 for k in (*FUSIONS, *OVERLAPS)}
    base = choices(
        tp,
        pick.choice(["counter", "tagged", "tagged", "grid_barrier"]),
        fusion={k: flags[k] for k in FUSIONS},
        overlap={k: flags[k] for k in OVERLAPS},
        tune={"sms": pick.choice([None, 1, 7, 40, 131]), "kv_splits": pick.choice([None, 1, 3])},
    )
    globs = [g for g in GLOBS if routed and (flags["early_block_stats"] or "stats" not in g)]
    overrides = {g: pick.choice(["counter", "tagged"]) for g in globs if pick.random() < 0.3}
    return base.but(sync__overrides=tuple(overrides.items()))


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("config", ["kimi_k3_tiny", "llama_tiny"])
def test_whatever_is_chosen_is_proven(config, seed):
    tp = 1 + seed % 2
    plan = build_plan(graph(config, tp), random_choices(seed, tp, config == "kimi_k3_tiny"))
    assert failed(prove(plan)) == []


@pytest.mark.parametrize("layers", [(0, 46), (46, 93)])
def test_full_kimi_k3_is_proven(layers):
    c = choices(mechanism="tagged", context=8192, parallel={"tp": 8, "pp": 2})
    assert failed(prove(build_plan(graph("kimi_k3", 8, layers), c))) == []
