"""The plain records that pictures are drawn from, and how the cost model's rows become them.

A timeline row is (sm, stage, start_us, end_us, what) with `stage` a stage name or its index in the Plan; a cost row
has `stage`, `bytes`, `roofline_us` and, where known, `flops`. Tuples, mappings and objects with these attributes are
all taken, so that nothing here depends on how the cost model stores them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

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


class StageCost(NamedTuple):
    """What one stage costs on one GPU: distinct DRAM bytes, the least time they take, and floating-point operations."""

    stage: str
    bytes: float
    roofline_us: float
    flops: float = 0.0


class Ablation(NamedTuple):
    """What one choice is worth: the step with everything on, and with this one off, in microseconds."""

    choice: str
    with_us: float
    without_us: float
    measured: bool = False


def _fields(row: Any, names: tuple[str, ...], defaults: Mapping[str, Any]) -> list[Any]:
    if isinstance(row, tuple | list):
        if len(row) < len(names) - len(defaults):
            raise ValueError(f"expected {', '.join(names)}, got a row of {len(row)}: {row!r}")
        return [*row[:len(names)], *(defaults[n] for n in names[len(row):])]
    if isinstance(row, Mapping):
        return [row[n] if n in row or n not in defaults else defaults[n] for n in names]
    return [getattr(row, n, defaults[n]) if n in defaults else getattr(row, n) for n in names]


def slices(rows: Iterable[Any], plan: Plan | None = None) -> list[Slice]:
    """Timeline rows as Slices, sorted by start. Errors: ValueError for a row that ends before it starts."""
    out = []
    for row in rows:
        s = Slice(*_fields(row, Slice._fields, {}))
        s = s._replace(stage=_stage_name(s.stage, plan))
        if not s.end_us >= s.start_us >= 0:
            raise ValueError(f"timeline: {s.stage} on SM {s.sm} runs from {s.start_us} to {s.end_us} us; "
                             "expected 0 <= start <= end")
        out.append(s)
    return sorted(out, key=lambda s: (s.start_us, s.sm, s.end_us))


def costs(rows: Iterable[Any], plan: Plan | None = None) -> list[StageCost]:
    """Cost rows as StageCosts, in the order given."""
    out = [StageCost(*_fields(row, StageCost._fields, StageCost._field_defaults)) for row in rows]
    return [c._replace(stage=_stage_name(c.stage, plan)) for c in out]


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
