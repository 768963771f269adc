"""Graphs and plans that the planner's tests share. Plans are cached: they are frozen."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from optkit.models import families
from optkit.models.graph import Graph
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices
from optkit.plan.types import Edge, Plan, Stage

ROWS = 8
H200: dict[str, Any] = {}
GB300 = {"name": "gb300", "arch": "sm_103a", "sms": 152, "memory_gb": 279.0, "read_gbs": 8000.0}


@cache
def graph(config: str, tp: int = 1, layers: tuple[int, int] | None = None, peers: str = "emulated") -> Graph:
    """One rank's graph of a packaged configuration."""
    data = families.named_config(config)
    family = families.family_of(data)
    return family.build(family.Config.from_hf(data), rows=ROWS, tp=tp, layers=layers, peers=peers)


def choices(tp: int = 1, mechanism: str = "counter", context: int = 256, **groups: Any) -> PlanChoices:
    """Choices for a test; `groups` are further groups as dicts."""
    groups.setdefault("parallel", {"tp": tp})
    return PlanChoices.from_dicts(name="test", decode={"context": context}, sync={"mechanism": mechanism}, **groups)


@cache
def tiny(tp: int = 1, mechanism: str = "counter") -> Plan:
    """Tiny Kimi K3."""
    return build_plan(graph("kimi_k3_tiny", tp), choices(tp, mechanism))


@cache
def llama(tp: int = 1, mechanism: str = "counter") -> Plan:
    """Tiny Llama."""
    return build_plan(graph("llama_tiny", tp), choices(tp, mechanism))


def tiny_with(**changes: Any) -> Plan:
    """Tiny Kimi K3 with some choices changed (`group__key=value`)."""
    tp = changes.pop("tp", 1)
    return build_plan(graph("kimi_k3_tiny", tp), choices(tp).but(**changes))


def stage(plan: Plan, name: str) -> Stage:
    return plan.stages[plan.index[name]]


def names(plan: Plan, body: str = "") -> list[str]:
    return [s.name for s in plan.stages if not body or s.body == body]


def edges_between(plan: Plan, src: str, dst: str) -> list[Edge]:
    return [e for e in plan.edges if (e.src, e.dst) == (plan.index[src], plan.index[dst])]


def touched(s: Stage, writes: bool, width: dict[str, int]) -> dict[str, np.ndarray]:
    """Which columns of every buffer any unit of the stage touches, marked one by one."""
    out: dict[str, np.ndarray] = {}
    for a in s.writes if writes else s.reads:
        marks = out.setdefault(a.buffer, np.zeros(width[a.buffer], bool))
        for j in {s.column_part(u, a.first) for u in range(s.units) if a.applies(u)} if a.step else {0}:
            marks[slice(*a.columns(j, width[a.buffer]))] = True
    return out


def check_order(plan: Plan) -> None:
    """Every read has its data: written before, with a RAW edge from each stage whose columns it sees."""
    width = {b.name: b.width for b in plan.buffers}
    klass = {b.name: b.klass for b in plan.buffers}
    writer = {b.name: np.full(b.width, -1) for b in plan.buffers}
    wanted: set[tuple[int, int, str]] = set()
    for i, s in enumerate(plan.stages):
        for buffer, marks in touched(s, False, width).items():
            if klass[buffer] == "input":
                continue
            sources = set(writer[buffer][marks].tolist())
            assert klass[buffer] == "state" or -1 not in sources, (
                f"{s.name} reads columns of {buffer} that nothing wrote"
            )
            wanted |= {(src, i, buffer) for src in sources if src >= 0}
        for buffer, marks in touched(s, True, width).items():
            writer[buffer][marks] = i
    assert {(e.src, e.dst, e.buffer) for e in plan.edges if e.kind == "raw"} == wanted
    assert all(e.src < e.dst for e in plan.edges)
