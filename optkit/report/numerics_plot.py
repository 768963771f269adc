"""Errors per stage as a picture: median and maximum against the stage's limits, on a log scale, a row per stage."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from optkit.evidence import StageNumerics
from optkit.report import svg

ROW, TOP, BOTTOM, LEFT, RIGHT, WIDTH = 17.0, 8.0, 26.0, 190.0, 20.0, 860.0
MAX_ROWS = 150
"""A tall picture scrolls well, but 150 rows are 2,500 pixels; beyond them only the stages closest to their limits."""


def drawn(rows: Sequence[StageNumerics]) -> list[StageNumerics]:
    """The rows that the picture has room for, in the order given."""
    if len(rows) <= MAX_ROWS:
        return list(rows)
    closest = sorted(range(len(rows)), key=lambda i: -rows[i].share)[:MAX_ROWS]
    return [rows[i] for i in sorted(closest)]


def numerics_plot(rows: Sequence[StageNumerics]) -> Markup:
    """A row per stage in the order given. Errors of exactly 0 sit on the left edge. Raises ValueError if empty."""
    if not rows:
        raise ValueError("numerics: no stages to draw")
    shown = [v for r in rows for v in (r.median, r.max, r.median_limit, r.max_limit) if math.isfinite(v) and v > 0]
    low, high = min(shown) / 1.6, max(shown) * 1.6
    height = TOP + ROW * len(rows) + BOTTOM

    def x(v: float) -> float:
        v = high if not math.isfinite(v) else min(max(v, low), high)
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(v / low) / math.log(high / low)

    out: list[str] = []
    for d in svg.decades(low, high):
        out.append(svg.element("line", x1=x(d), x2=x(d), y1=TOP, y2=height - BOTTOM, cls="grid"))
        out.append(svg.text(x(d), height - 8, f"{d:.0e}".replace("e-0", "e-"), text_anchor="middle", cls="tick"))
    for which, cls in (("max_limit", "limit-max"), ("median_limit", "limit-median")):
        points = [(x(getattr(r, which)), TOP + ROW * (i + k)) for i, r in enumerate(rows) for k in (0, 1)]
        out.append(svg.element("polyline", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in points), cls=cls))
    for i, r in enumerate(rows):
        y = TOP + ROW * (i + 0.5)
        name = r.stage if len(r.stage) <= 28 else r.stage[:27] + "…"
        tip = (f"{r.stage}: median {r.median:.3g} (limit {r.median_limit:.3g}), maximum {r.max:.3g} "
               f"(limit {r.max_limit:.3g}), {r.n} samples")
        marks = [svg.title(tip), svg.text(LEFT - 10, y + 4, name, text_anchor="end", cls="label"),
                 svg.element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, cls="row"),
                 svg.element("line", x1=x(r.median), x2=x(r.max), y1=y, y2=y, cls="stem"),
                 svg.element("circle", cx=x(r.median), cy=y, r=3.2, cls="median"),
                 svg.element("circle", cx=x(r.max), cy=y, r=3.2, cls="maximum")]
        out.append(svg.element("g", "".join(marks), cls="stage" if r.status == "pass" else "stage outside"))
    return svg.frame(WIDTH, height, out, f"Error of each of {len(rows)} stages against its limits, log scale")
