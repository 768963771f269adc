"""The plain records that pictures and tables are made from, and how the cost model's results become them.

A timeline row is (sm, stage, start_us, end_us, what) with `stage` a stage name or its index in the Plan: a tuple, a
mapping or an object with these attributes, so that nothing here depends on how the simulation stores them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from optkit.plan.cost import StepCost
from optkit.plan.types import Plan, Stage


class Slice(NamedTuple):
    """One simulated activity on one SM; times in microseconds from the start of the step."""

    sm: int
    stage: str
    start_us: float
    end_us: float
    what: str


STREAM_WORDS = ("dram", "stream", "load", "fetch")
"""Slices whose `what` begins with one of these are memory traffic, all others are work or waiting of the SM."""


def is_stream(s: Slice) -> bool:
    """Whether a slice is weight traffic into the SM's ring."""
    return s.what.lower().startswith(STREAM_WORDS)


class CostRow(NamedTuple):
    """What one stage costs on one GPU: distinct DRAM bytes by kind, FLOPs, and the least time in microseconds."""

    stage: str
    weights: float
    experts: float
    kv: float
    state: float
    bytes: float
    flops: float
    roofline_us: float
    body: str = ""


class Ablation(NamedTuple):
    """What one choice is worth: the step with everything on, and with this one off, in microseconds."""

    choice: str
    with_us: float
    without_us: float
    measured: bool = False


def _fields(row: Any, names: tuple[str, ...]) -> list[Any]:
    if isinstance(row, tuple | list):
        if len(row) != len(names):
            raise ValueError(f"expected {', '.join(names)}, got a row of {len(row)}: {row!r}")
        return list(row)
    return [row[n] if isinstance(row, Mapping) else getattr(row, n) for n in names]


def slices(rows: Any, plan: Plan | None = None) -> list[Slice]:
    """Timeline rows, or a simulation's `events`, as Slices sorted by start.

    Raises ValueError for a row that ends before it starts.
    """
    out = []
    for row in getattr(rows, "events", rows):
        s = Slice(*_fields(row, Slice._fields))
        s = s._replace(stage=_stage_name(s.stage, plan))
        if not s.end_us >= s.start_us >= 0:
            raise ValueError(f"timeline: {s.stage} on SM {s.sm} runs from {s.start_us} to {s.end_us} us; "
                             "expected 0 <= start <= end")
        out.append(s)
    return sorted(out, key=lambda s: (s.start_us, s.sm, s.end_us))


def cost_rows(cost: StepCost, plan: Plan) -> list[CostRow]:
    """One row per stage, in plan order; stages that read nothing from DRAM and compute next to nothing are left out."""
    rows = []
    for stage, c in zip(plan.stages, cost.stages, strict=True):
        least = max(c.bytes / cost.read_gbs / 1e3, c.flops / cost.tflops / 1e6)
        if c.bytes or c.flops:
            rows.append(CostRow(stage.name, c.weights, c.experts, c.kv, c.state, c.bytes, c.flops, least, stage.body))
    return rows


def _stage_name(stage: Any, plan: Plan | None) -> str:
    return plan.stages[stage].name if isinstance(stage, int) and plan is not None else str(stage)


def stream_bytes(stage: Stage) -> tuple[int, bool]:
    """Bytes a stage pulls through the weight rings of all SMs, and whether that is only a bound (routed experts)."""
    total = sum((s.count or stage.units) * s.tiles * s.repeat * s.tile_bytes for s in stage.streams)
    return total, any(s.index for s in stage.streams)


def without_layer(name: str) -> str:
    """A stage's or op's name without its layer: "L3.in_proj" -> "in_proj"; names of another form stay."""
    return re.sub(r"^L\d+\.", "", name)


def short_name(stage: Stage) -> str:
    """The stage's name without its layer."""
    return without_layer(stage.name)
