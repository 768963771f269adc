"""The simulated step as a picture: time to the right, a row for each shown SM, coloured by stage body.

The full timeline is in trace.json; the picture shows a sample of SMs, and of a long step only its first part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from optkit.plan.types import Plan
from optkit.report import inputs, svg
from optkit.report.inputs import Slice

MAX_SMS, MAX_SLICES = 12, 3000
"""3,000 rectangles are some 400 kB of SVG; a report must open on a phone."""
WIDTHS, ROW, LEFT, TOP = (1040.0, 3000.0), 18.0, 58.0, 8.0
US = 7.0
"""Pixels per microsecond where the picture may grow: a task of 0.3 us stays visible."""
IDLE = ("wait", "idle", "stall")


class Timeline(NamedTuple):
    """The picture, the colour of each body, one phrase on what part of the step it shows, whether weight traffic is
    drawn, and the length of the whole step."""

    picture: Markup
    colours: dict[str, str]
    shown: str
    streams: bool
    step_us: float


def timeline(slices: Sequence[Slice], plan: Plan) -> Timeline:
    """Draw `slices` (sorted by start). Raises ValueError if there are none."""
    if not slices:
        raise ValueError("timeline: nothing to draw")
    total = max(s.end_us for s in slices)
    present = sorted({s.sm for s in slices})
    rows = present[::max(1, -(-len(present) // MAX_SMS))]
    row_of = {sm: i for i, sm in enumerate(rows)}
    chosen = [s for s in slices if s.sm in row_of and s.end_us > s.start_us]
    drawn = chosen[:MAX_SLICES]
    end = max((s.end_us for s in drawn), default=total) if len(drawn) < len(chosen) else total
    bodies = {s.name: s.body for s in plan.stages}
    colours = _colours(drawn, bodies)
    width = min(max(WIDTHS[0], US * end), WIDTHS[1])
    scale = (width - LEFT - 12) / end if end > 0 else 1.0
    height = TOP + ROW * len(rows) + 26
    out = []
    for t in svg.ticks(end, round(width / 130)):
        x = LEFT + t * scale
        out.append(svg.element("line", x1=x, x2=x, y1=TOP, y2=height - 22, cls="grid"))
        out.append(svg.text(x, height - 8, f"{t:g} µs", text_anchor="middle", cls="tick"))
    out += [svg.text(LEFT - 8, TOP + ROW * i + 11, f"SM {sm}", text_anchor="end", cls="tick")
            for sm, i in row_of.items()]
    for s in drawn:
        tip = svg.title(f"{s.stage} ({s.what}), SM {s.sm}: {s.start_us:.2f}–{s.end_us:.2f} µs")
        idle = s.what.startswith(IDLE)
        top, thick = (ROW - 4, 3.0) if inputs.is_stream(s) else (1.0, ROW - 6)
        out.append(svg.element("rect", tip, x=LEFT + s.start_us * scale, y=TOP + ROW * row_of[s.sm] + top,
                               width=max((s.end_us - s.start_us) * scale, 0.4), height=thick,
                               fill="var(--idle)" if idle else colours[bodies.get(s.stage, s.stage)]))
    part = "the whole step" if len(drawn) == len(chosen) else f"the first {end:.1f} of {total:.1f} µs"
    return Timeline(svg.frame(width, height, out, f"Simulated timeline, {part}"), colours,
                    f"{part}, {len(rows)} of {len(present)} SMs", any(inputs.is_stream(s) for s in drawn), total)


def _colours(slices: Sequence[Slice], bodies: Mapping[str, str]) -> dict[str, str]:
    names = dict.fromkeys(bodies.get(s.stage, s.stage) for s in slices if not s.what.startswith(IDLE))
    names.update(dict.fromkeys(bodies.get(s.stage, s.stage) for s in slices))
    return {name: svg.PALETTE[i % len(svg.PALETTE)] for i, name in enumerate(names)}
