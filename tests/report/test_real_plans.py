"""Pictures of the plans that the planner makes: every kind of layer is drawn, every switch can be seen."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from optkit.models.families import family_of, named_config
from optkit.models.graph import Graph
from optkit.plan.build import build_plan
from optkit.plan.choices import FUSIONS, OVERLAPS, PlanChoices
from optkit.plan.cost import Load, step_cost
from optkit.plan.timeline import simulate
from optkit.plan.types import Plan
from optkit.report.inputs import cost_rows, slices
from optkit.report.plan_picture import kinds, layer_picture
from optkit.report.timeline import timeline
from optkit.report.trace import trace


def graph(config: str) -> Graph:
    raw = named_config(config)
    family = family_of(raw)
    return family.build(family.Config.from_hf(raw), rows=8)


@pytest.fixture(scope="module")
def k3() -> Graph:
    return graph("kimi_k3_tiny")


def pictures(plan: Plan) -> list[str]:
    return [layer_picture(plan, k) for k in kinds(plan)]


def choices(**changes: object) -> PlanChoices:
    return PlanChoices(name="picture", recipe_digest="0" * 64).but(**changes)


def test_every_layer_belongs_to_one_kind(k3: Graph) -> None:
    plan = build_plan(k3, choices())
    found = kinds(plan)
    assert sorted(layer for k in found for layer in k.layers) == sorted({s.layer for s in plan.stages})
    assert {"before the layers", "after the layers", "layer 0"} <= {k.title for k in found}
    assert len(found) == 5, "start, dense KDA, KDA with experts, MLA with experts, end"


def test_exchanges_do_not_split_kinds() -> None:
    """With tensor parallelism, stages are named after prefix values that carry their layer ("P.3m")."""
    raw = named_config("kimi_k3_tiny")
    family = family_of(raw)
    split = build_plan(family.build(family.Config.from_hf(raw), rows=8, tp=2), choices(parallel__tp=2))
    titles = [k.title for k in kinds(split)]
    assert titles[2] == "layer 1, which stands for 4 layers (1, 2, 5, 6)"
    assert len(titles) == 7, "layers 4 and 8 start a block of the residual mix: a reduce without an add"


@pytest.mark.parametrize("switch", [*(f"fusion__{f}" for f in FUSIONS), *(f"overlap__{o}" for o in OVERLAPS)])
def test_every_switch_can_be_seen(k3: Graph, switch: str) -> None:
    assert pictures(build_plan(k3, choices())) != pictures(build_plan(k3, choices(**{switch: False})))


def test_mechanisms_have_their_colours(k3: Graph) -> None:
    for mechanism, colour in (("counter", "var(--m-counter)"), ("tagged", "var(--m-tagged)"),
                              ("grid_barrier", "var(--m-barrier)")):
        drawn = "".join(pictures(build_plan(k3, choices(sync__mechanism=mechanism))))
        assert f'stroke="{colour}"' in drawn


def test_llama_is_drawn_too() -> None:
    for picture in pictures(build_plan(graph("llama_tiny"), choices())):
        assert ET.fromstring(picture).attrib["role"] == "img"


def test_simulation_becomes_trace_and_picture(k3: Graph) -> None:
    plan = build_plan(k3, choices())
    simulated = simulate(plan, Load(batch=4, context=256))
    data = trace(simulated, plan)
    bars = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(bars) == len(simulated.events)
    assert max(e["ts"] + e["dur"] for e in bars) == pytest.approx(simulated.step_us, abs=0.01)
    drawn = timeline(slices(simulated, plan), plan)
    assert drawn.shown.startswith("the whole step, ")
    assert set(drawn.colours) <= {s.body for s in plan.stages}


def test_cost_table_of_a_real_plan(k3: Graph) -> None:
    plan = build_plan(k3, choices())
    cost = step_cost(plan, Load(batch=8, context=256))
    rows = cost_rows(cost, plan)
    assert sum(r.bytes for r in rows) == pytest.approx(cost.bytes)
    assert all(r.roofline_us > 0 for r in rows)
