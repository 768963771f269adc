"""What each choice is worth: the same graph planned with one fusion or overlap switched off, and both simulated.

An estimate from `plan.timeline`, for the report and for pruning; nothing here is measured.
"""

from __future__ import annotations

from dataclasses import fields, replace

from optkit.models.graph import Graph
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices
from optkit.plan.cost import Load
from optkit.plan.timeline import simulate

GROUPS = ("fusion", "overlap")


def ablate(graph: Graph, choices: PlanChoices, load: Load) -> list[tuple[str, float, float]]:
    """(group.key, step with everything chosen, step with this one off), both in microseconds of the simulation.

    One row for each switch that is on and changes this graph's Plan; and one for a mechanism other than counters, for
    which "off" is `counter`. Costs one Plan and one simulation a row. Raises PlanError where a variant has no Plan.
    """
    base = build_plan(graph, choices)
    with_us = simulate(base, load).step_us
    variants: list[tuple[str, PlanChoices]] = []
    for group in GROUPS:
        switches = getattr(choices, group)
        on = (f.name for f in fields(switches) if getattr(switches, f.name) is True)
        variants += [(f"{group}.{k}", replace(choices, **{group: replace(switches, **{k: False})})) for k in on]
    if choices.sync.mechanism != "counter":
        sync = replace(choices.sync, mechanism="counter")
        variants.append((f"sync.mechanism {choices.sync.mechanism}, not counter", replace(choices, sync=sync)))
    rows = []
    for name, other in variants:
        plan = build_plan(graph, other)
        if (plan.stages, plan.edges) != (base.stages, base.edges):
            rows.append((name, with_us, simulate(plan, load).step_us))
    return rows
