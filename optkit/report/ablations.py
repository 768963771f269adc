"""What each choice of a recipe is worth: the simulated step with everything as chosen, and with one switch off.

Assumes the cost model's simulation (plan.timeline): an estimate that ranks choices, never a measurement; every row says
so. Only switches that are on, and only where switching one off changes the Plan: a row of no meaning is left out.
"""

from __future__ import annotations

from optkit.models.graph import Graph
from optkit.plan.build import build_plan
from optkit.plan.choices import FUSIONS, OVERLAPS, PlanChoices
from optkit.plan.cost import Load
from optkit.plan.errors import PlanError
from optkit.plan.timeline import simulate
from optkit.plan.types import Plan
from optkit.report.inputs import Ablation

MAX_STAGES = 300
"""Plans beyond it are not ablated: eight plans and simulations of a 93-layer model (1,700 stages) take minutes."""


def ablations(graph: Graph, choices: PlanChoices, plan: Plan, load: Load) -> list[Ablation]:
    """One row per fusion and overlap that is on, the most valuable first; times in simulated microseconds of `load`.

    `plan` is the one that `choices` make of `graph`. A switch whose absence makes the recipe impossible has no row.
    """
    if len(plan.stages) > MAX_STAGES:
        return []
    whole = simulate(plan, load).step_us
    rows = []
    for group, names in (("fusion", FUSIONS), ("overlap", OVERLAPS)):
        for name in names:
            if not getattr(getattr(choices, group), name):
                continue
            try:
                other = build_plan(graph, choices.but(**{f"{group}__{name}": False}))
            except PlanError:
                continue
            if (other.stages, other.edges) != (plan.stages, plan.edges):
                rows.append(Ablation(f"{group}.{name}", whole, simulate(other, load).step_us))
    return sorted(rows, key=lambda r: r.with_us - r.without_us)
