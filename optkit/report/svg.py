"""A few lines of SVG: escaped elements, a frame with a view box, scales and axis ticks. Colours are CSS variables
of the report's style sheet, so that one picture serves light and dark screens.
"""

from __future__ import annotations

import math
from html import escape

from markupsafe import Markup

PALETTE = tuple(f"var(--c{i})" for i in range(10))
MECHANISM = {"same_sm": "var(--m-same)", "program": "var(--m-same)", "counter": "var(--m-counter)",
             "tagged": "var(--m-tagged)", "grid_barrier": "var(--m-barrier)", "peer_mailbox": "var(--m-peer)"}


def element(tag: str, inner: str = "", /, **attrs: object) -> str:
    """``<tag a="b">inner</tag>``; attribute values are escaped, `inner` is taken as markup. Names: stroke_width ->
    stroke-width, cls -> class."""
    parts = [f'{"class" if k == "cls" else k.replace("_", "-")}="{escape(_number(v))}"' for k, v in attrs.items()]
    return f"<{' '.join([tag, *parts])}>{inner}</{tag}>" if inner else f"<{' '.join([tag, *parts])}/>"


def text(x: float, y: float, content: str, /, **attrs: object) -> str:
    """Escaped text with its baseline at (x, y)."""
    return element("text", escape(content), x=x, y=y, **attrs)


def title(content: str) -> str:
    """The tooltip of the element it is put into."""
    return element("title", escape(content))


def frame(width: float, height: float, inner: list[str], label: str) -> Markup:
    """The whole picture; `label` describes it to those who cannot see it. It keeps its size and its box scrolls."""
    return Markup(element("svg", title(label) + "".join(inner), xmlns="http://www.w3.org/2000/svg", role="img",
                          viewBox=f"0 0 {_number(width)} {_number(height)}", width=_number(width),
                          height=_number(height)))


def decades(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high]; where fewer than three fit, 2 and 5 times powers of ten as well."""
    span = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [10.0 ** e for e in span if low <= 10.0 ** e <= high]
    if len(inside) < 3:
        inside = [m * 10.0 ** e for e in span for m in (1, 2, 5) if low <= m * 10.0 ** e <= high]
    return inside


def ticks(high: float, target: int = 8) -> list[float]:
    """Round numbers from 0 to `high`, about `target` of them."""
    if high <= 0:
        return [0.0]
    raw = high / target
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(m * base for m in (1, 2, 5, 10) if m * base >= raw)
    return [i * step for i in range(int(high / step) + 1)]


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
