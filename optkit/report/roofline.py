"""The roofline as a picture: what each stage moves against the time it takes, and the least time the GPU allows.

Assumes the cost model's bytes and FLOPs, and its simulated timeline where one is given; nothing here is measured. Every
stage is a ring at its least time (bytes at the read ceiling or FLOPs at the arithmetic peak, whichever is longer), so a
ring above the diagonal is bound by arithmetic; a dot above it is when the simulation has the stage's tasks at work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from optkit.report import inputs, svg
from optkit.report.inputs import CostRow, Slice

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860.0, 420.0, 78.0, 24.0, 14.0, 46.0
MAX_POINTS = 400
"""More points than that hide each other; the stages that move most are kept."""


class Roofline(NamedTuple):
    """The picture, how many of the stages are in it, and how many of them arithmetic bounds."""

    picture: Markup
    shown: int
    total: int
    by_arithmetic: int


def busy_us(slices: Sequence[Slice]) -> dict[str, float]:
    """Stage -> microseconds from the first to the last moment at which one of its tasks works."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for s in slices:
        if not (s.what.startswith("wait") or inputs.is_stream(s)):
            first[s.stage] = min(first.get(s.stage, math.inf), s.start_us)
            last[s.stage] = max(last.get(s.stage, 0.0), s.end_us)
    return {name: last[name] - first[name] for name in first}


def roofline(rows: Sequence[CostRow], read_gbs: float, slices: Sequence[Slice] = ()) -> Roofline | None:
    """The picture of cost rows at a read ceiling in GB/s; None where no stage moves anything."""
    moving = sorted((r for r in rows if r.bytes > 0 and r.roofline_us > 0), key=lambda r: -r.bytes)
    if not moving:
        return None
    drawn, busy = moving[:MAX_POINTS], busy_us(slices)
    times = [r.roofline_us for r in drawn] + [t for r in drawn if (t := busy.get(r.stage, 0.0)) > 0]
    x0, x1 = drawn[-1].bytes / 1.6, drawn[0].bytes * 1.6
    y0, y1 = min(times) / 1.6, max(times) * 1.6

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / x0) / math.log(x1 / x0)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(value / y0) / math.log(y1 / y0)

    out: list[str] = []
    for d in svg.decades(x0, x1):
        out.append(svg.element("line", x1=x(d), x2=x(d), y1=TOP, y2=HEIGHT - BOTTOM, cls="grid"))
        out.append(svg.text(x(d), HEIGHT - BOTTOM + 16, _bytes(d), text_anchor="middle", cls="tick"))
    for d in svg.decades(y0, y1):
        out.append(svg.element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(d), y2=y(d), cls="grid"))
        out.append(svg.text(LEFT - 8, y(d) + 4, f"{d:g} µs", text_anchor="end", cls="tick"))
    out.append(svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "distinct DRAM bytes of the stage", text_anchor="middle",
                        cls="tick"))
    low, high = max(x0, y0 * read_gbs * 1e3), min(x1, y1 * read_gbs * 1e3)
    if low < high:
        out.append(svg.element("line", x1=x(low), y1=y(low / read_gbs / 1e3), x2=x(high), y2=y(high / read_gbs / 1e3),
                               cls="ceiling", stroke="var(--fail)", stroke_width=1.4))
    colours = {b: svg.PALETTE[i % len(svg.PALETTE)] for i, b in enumerate(dict.fromkeys(r.body for r in drawn))}
    for r in drawn:
        took = busy.get(r.stage, 0.0)
        tip = f"{r.stage} ({r.body}): {_bytes(r.bytes)}, at least {r.roofline_us:.3g} µs"
        marks = [svg.title(tip + (f", simulated {took:.3g} µs" if took > 0 else "")),
                 svg.element("circle", cx=x(r.bytes), cy=y(r.roofline_us), r=3.4, fill="none", stroke=colours[r.body],
                             cls="least")]
        if took > 0:
            marks.append(svg.element("line", x1=x(r.bytes), x2=x(r.bytes), y1=y(r.roofline_us), y2=y(took), cls="stem"))
            marks.append(svg.element("circle", cx=x(r.bytes), cy=y(took), r=3.0, fill=colours[r.body], cls="simulated"))
        out.append(svg.element("g", "".join(marks), cls="roof"))
    arithmetic = sum(r.roofline_us > 1.001 * r.bytes / read_gbs / 1e3 for r in moving)
    label = f"Roofline: bytes and least time of {len(drawn)} stages at {read_gbs:,.0f} GB/s, both logarithmic"
    return Roofline(svg.frame(WIDTH, HEIGHT, out, label), len(drawn), len(moving), arithmetic)


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} B"
