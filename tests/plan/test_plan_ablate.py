"""What each choice is worth: a row for every switch that changes the Plan, none for one that does not."""

from __future__ import annotations

from plan_cases import choices, graph

from optkit.plan.ablate import ablate
from optkit.plan.build import build_plan
from optkit.plan.cost import Load
from optkit.plan.timeline import simulate

LOAD = Load(batch=1, context=256)


def test_every_switch_of_kimi_k3_has_a_row_and_the_figures_are_the_simulations() -> None:
    chosen = choices(mechanism="tagged")
    rows = {name: (with_us, without_us) for name, with_us, without_us in ablate(graph("kimi_k3_tiny"), chosen, LOAD)}
    assert set(rows) == {
        "fusion.norm_projection", "fusion.packed_projections", "fusion.gate_up_act", "fusion.residual_add", "fusion.value_gate",
        "overlap.weight_stream", "overlap.shared_expert_early", "overlap.early_block_stats", "sync.mechanism tagged, not counter",
    }  # fmt: skip
    off = build_plan(graph("kimi_k3_tiny"), chosen.but(fusion__residual_add=False))
    on = build_plan(graph("kimi_k3_tiny"), chosen)
    assert rows["fusion.residual_add"] == (simulate(on, LOAD).step_us, simulate(off, LOAD).step_us)
    assert rows["fusion.norm_projection"][1] > rows["fusion.norm_projection"][0]


def test_a_switch_that_changes_nothing_and_one_that_is_off_have_no_row() -> None:
    names = [name for name, _, _ in ablate(graph("llama_tiny"), choices(fusion={"residual_add": False}), LOAD)]
    assert "overlap.early_block_stats" not in names, "Llama has no residual mix"
    assert "fusion.residual_add" not in names and "fusion.gate_up_act" in names
    assert not any("sync" in n for n in names), "counters are what others are compared with"
