"""Errors per stage as a picture: median and maximum against the stage's limits, on a log scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from optkit.evidence import StageNumerics
from optkit.report import svg

HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300.0, 52.0, 16.0, 14.0, 34.0
MIN_WIDTH = 1040.0
PITCH = 7.0
"""Pixels per stage: 135 stages of the 9-layer model fit in 1,000 px, and hover targets stay apart."""


def numerics_plot(rows: Sequence[StageNumerics]) -> Markup:
    """One column per stage, layer by layer (in the plan, stages of neighbouring layers may interleave), otherwise in
    the order given. Errors of exactly 0 sit on the bottom line. Raises ValueError if empty."""
    if not rows:
        raise ValueError("numerics: no stages to draw")
    rows = sorted(rows, key=lambda r: r.layer)
    width = max(MIN_WIDTH, LEFT + RIGHT + PITCH * len(rows))
    pitch = (width - LEFT - RIGHT) / len(rows)
    shown = [v for r in rows for v in (r.median, r.maximum, r.median_limit, r.max_limit) if math.isfinite(v) and v > 0]
    low, high = min(shown) / 1.6, max(shown) * 1.6

    def y(v: float) -> float:
        v = high if not math.isfinite(v) else min(max(v, low), high)
        return TOP + (HEIGHT - TOP - BOTTOM) * math.log(high / v) / math.log(high / low)

    out: list[str] = []
    for d in svg.decades(low, high):
        out.append(svg.element("line", x1=LEFT, x2=width - RIGHT, y1=y(d), y2=y(d), cls="grid"))
        out.append(svg.text(LEFT - 8, y(d) + 4, f"{d:.0e}".replace("e-0", "e-"), text_anchor="end", cls="tick"))
    layer = None
    for i, r in enumerate(rows):
        x = LEFT + pitch * i
        if r.layer != layer:
            layer = r.layer
            out.append(svg.element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, cls="grid"))
            out.append(svg.text(x + 2, HEIGHT - BOTTOM + 16, f"L{layer}" if layer >= 0 else "", cls="tick"))
    for which, cls in (("max_limit", "limit-max"), ("median_limit", "limit-median")):
        points = [(LEFT + pitch * (i + k), y(getattr(r, which))) for i, r in enumerate(rows) for k in (0, 1)]
        out.append(svg.element("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in points), cls=cls))
    for i, r in enumerate(rows):
        x = LEFT + pitch * (i + 0.5)
        tip = (f"{r.stage}: median {r.median:.3g} (limit {r.median_limit:.3g}), maximum {r.maximum:.3g} "
               f"(limit {r.max_limit:.3g}), {r.samples} samples")
        marks = [svg.title(tip),
                 svg.element("line", x1=x, x2=x, y1=y(r.maximum), y2=y(r.median), cls="stem"),
                 svg.element("circle", cx=x, cy=y(r.median), r=2.6, cls="median"),
                 svg.element("circle", cx=x, cy=y(r.maximum), r=2.6, cls="maximum")]
        out.append(svg.element("g", "".join(marks), cls="stage" if r.passed else "stage outside"))
    return svg.frame(width, HEIGHT, out, f"Error of each of {len(rows)} stages against its limits, log scale")
