"""The Plan as a picture: for one layer of each kind, its stages in order, what each fuses, where it runs and what it
waits for.

A kind is a list of (stage, body) that layers share; the first layer of each kind stands for all of them. Edges
within the layer are brackets on the left, coloured by mechanism; edges from earlier layers are short stubs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from optkit.plan.types import Edge, Plan, Stage
from optkit.report import svg
from optkit.report.inputs import short_name, stream_bytes, without_layer

ROW, BOX, LANE, STUB = 44.0, 34.0, 9.0, 16.0
BOX_WIDTH, STRIP = 372.0, 132.0
"""A fused stage's operation list is clipped to its box; the tooltip has it all. One pixel per SM of an H200."""
WEIGHTLESS = "–"


class Kind(NamedTuple):
    """Layers that share one list of stages. `stages` are indices into the Plan, of the first of `layers`; `guests` are
    stages of neighbouring layers that run among them: an overlap can be seen there."""

    title: str
    layers: tuple[int, ...]
    stages: tuple[int, ...]
    guests: tuple[int, ...] = ()


def kinds(plan: Plan) -> list[Kind]:
    """The distinct kinds of layers, in order of first appearance; what precedes and follows the layers is one each."""
    by_layer: dict[int, list[int]] = {}
    for i, s in enumerate(plan.stages):
        by_layer.setdefault(s.layer, []).append(i)
    found: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for layer, members in by_layer.items():
        found.setdefault(tuple((_abstract(plan.stages[i]), plan.stages[i].body) for i in members), []).append(layer)
    out = []
    for layers in found.values():
        own = by_layer[layers[0]]
        guests = tuple(i for i in range(own[0], own[-1]) if plan.stages[i].layer != layers[0])
        out.append(Kind(_title(plan, layers), tuple(layers), tuple(own), guests))
    return out


def _abstract(stage: Stage) -> str:
    """The stage's name with "@" for its layer: "L3.qkv" -> "L@.qkv", "P.3m" (a prefix value) -> "P.@m"."""
    return re.sub(rf"(?<=^L){stage.layer}(?=\.)|(?<=^P\.){stage.layer}(?=[am]$)", "@", stage.name)


def _title(plan: Plan, layers: Sequence[int]) -> str:
    if len(layers) == 1:
        last = max(s.layer for s in plan.stages)
        tail = layers[0] == last and "logits" in (o.rpartition(".")[2] for s in plan.stages if s.layer == last
                                                  for o in s.ops)
        return "before the layers" if layers[0] < 0 else "after the layers" if tail else f"layer {layers[0]}"
    listed = ", ".join(map(str, layers[:8])) + (", …" if len(layers) > 8 else "")
    return f"layer {layers[0]}, which stands for {len(layers)} layers ({listed})"


def layer_picture(plan: Plan, kind: Kind) -> Markup:
    """Stages of `kind` from top to bottom."""
    rows = sorted((*kind.stages, *kind.guests))
    position = {stage: row for row, stage in enumerate(rows)}
    inside, stubs = _edges(plan, position)
    lanes, lane_count = _lanes(inside)
    gutter = STUB + 14 + LANE * max(lane_count, 1)
    height = 26 + ROW * len(rows)
    columns = (gutter + BOX_WIDTH + 14, gutter + BOX_WIDTH + 178, gutter + BOX_WIDTH + 196)
    out = [svg.text(gutter, 14, "stage, body, operations fused into it", cls="tick"),
           svg.text(columns[0], 14, "tasks / units", cls="tick"),
           svg.text(columns[1], 14, "weights", text_anchor="end", cls="tick"),
           svg.text(columns[2], 14, f"on which of {plan.sms} SMs", cls="tick")]
    for (src, dst, mechanism), names in inside.items():
        out.append(_bracket(gutter, lanes[(src, dst, mechanism)], src, dst, mechanism, names))
    for row, mechanism, names in stubs:
        y = _centre(row)
        shape = svg.element("path", svg.title("from an earlier layer: " + ", ".join(names)),
                            d=f"M {gutter - STUB:.1f} {y:.1f} H {gutter - 4:.1f}", cls="edge stub",
                            stroke=svg.MECHANISM[mechanism])
        out.append(shape + _arrow(gutter, y, mechanism))
    for row, index in enumerate(rows):
        out += _stage_row(plan, plan.stages[index], gutter, row, columns, index in kind.guests)
    return svg.frame(columns[2] + STRIP + 8, height, out, f"Stages of {kind.title}")


def _edges(plan: Plan, position: dict[int, int]
           ) -> tuple[dict[tuple[int, int, str], list[str]], list[tuple[int, str, list[str]]]]:
    """Edges between stages drawn here, by (row, row, mechanism) with their buffers, and those from outside."""
    inside: dict[tuple[int, int, str], list[str]] = {}
    outside: dict[tuple[int, str], list[str]] = {}
    for stage, row in position.items():
        for e in plan.waits[stage]:
            if e.src in position:
                inside.setdefault((position[e.src], row, e.mechanism), []).append(_describe(e))
            else:
                outside.setdefault((row, e.mechanism), []).append(f"{plan.stages[e.src].name} {_describe(e)}")
    return inside, [(row, mechanism, names) for (row, mechanism), names in outside.items()]


def _describe(e: Edge) -> str:
    return f"{e.buffer} ({e.kind})"


def _lanes(edges: dict[tuple[int, int, str], list[str]]) -> tuple[dict[tuple[int, int, str], int], int]:
    """A lane for each bracket such that brackets in one lane do not overlap; short ones nearest to the boxes."""
    lanes: list[list[tuple[int, int]]] = []
    chosen = {}
    for key in sorted(edges, key=lambda k: (k[1] - k[0], k[0], k[2])):
        src, dst, _ = key
        free = next((i for i, used in enumerate(lanes) if all(dst <= a or src >= b for a, b in used)), len(lanes))
        if free == len(lanes):
            lanes.append([])
        lanes[free].append((src, dst))
        chosen[key] = free
    return chosen, len(lanes)


def _centre(row: int) -> float:
    return 26 + ROW * row + BOX / 2


def _bracket(gutter: float, lane: int, src: int, dst: int, mechanism: str, names: list[str]) -> str:
    x, top, bottom = gutter - 14 - LANE * lane, _centre(src) + 7, _centre(dst) - 7
    path = (f"M {gutter:.1f} {top:.1f} H {x + 5:.1f} Q {x:.1f} {top:.1f} {x:.1f} {top + 5:.1f} "
            f"V {bottom - 5:.1f} Q {x:.1f} {bottom:.1f} {x + 5:.1f} {bottom:.1f} H {gutter - 4:.1f}")
    line = svg.element("path", svg.title(f"{mechanism}: {', '.join(names)}"), d=path, cls="edge",
                       stroke=svg.MECHANISM[mechanism])
    return line + _arrow(gutter, bottom, mechanism)


def _arrow(x: float, y: float, mechanism: str) -> str:
    return svg.element("path", d=f"M {x - 6:.1f} {y - 3:.1f} L {x:.1f} {y:.1f} L {x - 6:.1f} {y + 3:.1f} Z",
                       fill=svg.MECHANISM[mechanism])


def _stage_row(plan: Plan, stage: Stage, gutter: float, row: int, columns: tuple[float, float, float],
               guest: bool) -> list[str]:
    y = 26 + ROW * row
    operations = ", ".join(without_layer(o) for o in stage.ops)
    limit = 58
    clipped = operations if len(operations) <= limit else operations[:limit - 1] + "…"
    total, bound = stream_bytes(stage)
    weights = f"{'≤ ' if bound else ''}{total / 1e6:.2f} MB" if total else WEIGHTLESS
    ahead = "queued ahead" if stage.streams and stage.param("stream") == "ahead" else ""
    tip = f"{stage.name}: {operations}; {stage.tasks} tasks, {stage.units} units ({stage.assign}), " \
          f"{stage.smem} bytes of shared memory, at most {stage.regs} registers"
    first, middle = gutter + 10, y + 14
    out = [svg.element("rect", svg.title(tip), x=gutter, y=y, width=BOX_WIDTH, height=BOX, rx=5,
                       cls="box guest" if guest else "box"),
           svg.text(first, middle, stage.name if guest else short_name(stage), cls="name"),
           svg.text(gutter + BOX_WIDTH - 10, middle, stage.body, text_anchor="end", cls="body"),
           svg.text(first, y + 28, clipped, cls="ops"),
           svg.text(columns[0], y + 21, f"{stage.tasks} / {stage.units}", cls="figure"),
           svg.text(columns[1], y + (15 if ahead else 21), weights, text_anchor="end", cls="figure"),
           svg.text(columns[1], y + 28, ahead, text_anchor="end", cls="ops"),
           svg.element("rect", x=columns[2], y=y + 12, width=STRIP, height=10, rx=2, cls="strip")]
    for a, b in _intervals(stage, plan.sms):
        out.append(svg.element("rect", x=columns[2] + STRIP * a / plan.sms, y=y + 12,
                               width=max(STRIP * (b - a) / plan.sms, 1.0), height=10, rx=1, cls="used"))
    return out


def _intervals(stage: Stage, sms: int) -> list[tuple[int, int]]:
    """SMs that run the stage, as half-open ranges."""
    first, end = stage.first_sm % sms, stage.first_sm % sms + min(stage.tasks, sms)
    return [(first, end)] if end <= sms else [(first, sms), (0, end - sms)]
