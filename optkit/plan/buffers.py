"""Values -> buffers: what lives where, and when a buffer may be used again.

Value `L{l}.q` prefers buffer `q@{l%2}`: two layers apart is far enough that the reuse is almost always proven by the
chain of the layer between (plan.edges adds an edge where it is not). Any other value `P.3a` takes a free buffer of the
pool `P@0, P@1, …`; a value still read far ahead (a saved row) keeps its buffer. No value ever updates another in
place. Buffers of values that leave the graph, of values that enter it, and of those that choose weights (a producer warp
whose SM turns out to have no routed work reads the choice at a time that nobody waits for) are never used again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from optkit.models.graph import Graph, Value
from optkit.plan.bodies import Shape
from optkit.plan.types import Buffer

STEP_INPUTS = {"token": "i32", "seq_len": "i32", "block_table": "i32", "slot_mapping": "i64", "state_slot": "i32"}
POOL_REST = 24  # stages, about two layers: reuse is then proven by the stages between, without an edge of its own
_LAYER = re.compile(r"^L(\d+)\.(.+)$")


@dataclass
class Names:
    """`of` maps every value, state and input to its buffer name; `buffers` in order of first use."""

    of: dict[str, str] = field(default_factory=dict)
    buffers: dict[str, Buffer] = field(default_factory=dict)


def assign(
    graph: Graph,
    order: list[int],
    shapes: list[Shape],
    extra: dict[str, Value],
    mailboxes: dict[str, int],
    blocks_per_row: int,
    copies: int,
) -> Names:
    """Give every value that crosses a stage boundary a buffer.

    `order` is the global order of `shapes`. `blocks_per_row` is the width of the block table at the recipe's context.
    `copies` is the number of epochs a mailbox is buffered for.
    """
    names = Names()
    states = {s.name: s for s in graph.states}
    last: dict[str, int] = {}
    for at, i in enumerate(order):
        for a in (*shapes[i].reads, *shapes[i].writes):
            last[a.buffer] = at
    free_at: dict[str, int] = {}  # buffer -> position of the last access of its newest value
    pools: dict[str, list[str]] = {}
    shape_of: dict[str, tuple[int, str, int]] = {}

    def fresh(value: str, at: int) -> None:
        v = extra.get(value) or (graph.value(value) if value in values else _input(graph, value, blocks_per_row))
        ranks = mailboxes.get(value, 0)
        dtype = "f32" if ranks else v.dtype
        if value in graph.inputs:
            rows = graph.rows
            names.of[value] = value
            names.buffers[value] = Buffer(value, "input", dtype, rows, v.width)
            return
        key = (v.width, dtype, ranks)
        match = _LAYER.match(value)
        pooled = not match and not ranks and value not in extra
        stem = match[2] if match else value.rpartition(".")[0] if pooled and "." in value else value
        if shape_of.setdefault(stem, key) != key:
            stem = f"{stem}.{v.width}{dtype}{'r' if ranks else ''}"
            shape_of.setdefault(stem, key)
        if value in graph.outputs or value in index_values:
            name = value
        elif match:
            name = f"{stem}@{int(match[1]) % 2}"
            k = 2
            while free_at.get(name, -1) >= at:
                name, k = f"{stem}@{k}", k + 1
        else:
            pool = pools.setdefault(stem, [])
            idle = [n for n in pool if free_at[n] + POOL_REST < at]
            name = min(idle, key=lambda n: free_at[n]) if idle else f"{stem}@{len(pool)}"
            if not idle:
                pool.append(name)
        names.of[value] = name
        free_at[name] = last[value]
        if name not in names.buffers:
            one_row = value in extra and dtype == "i32"  # lists of the whole step, not of a row
            names.buffers[name] = Buffer(
                name,
                "mailbox" if ranks else "scratch" if value in extra else "activation",
                dtype,
                1 if one_row else graph.rows,
                v.width,
                ranks=ranks,
                copies=copies if ranks else 1,
            )

    values = {v.name for v in graph.values}
    index_values = {s.index for shape in shapes for s in shape.streams if s.index}
    for at, i in enumerate(order):
        for a in (*shapes[i].writes, *shapes[i].reads):
            if a.buffer in names.of:
                continue
            if a.buffer in states:
                s = states[a.buffer]
                width = 1
                for n in s.shape:
                    width *= n
                names.of[a.buffer] = s.name
                names.buffers[s.name] = Buffer(s.name, "state", s.dtype, graph.rows, width)
            else:
                fresh(a.buffer, at)
    return names


def _input(graph: Graph, name: str, blocks_per_row: int) -> Value:
    """Width and dtype of a step input."""
    if name in STEP_INPUTS:
        return Value(name, blocks_per_row if name == "block_table" else 1, STEP_INPUTS[name])
    reader = next(op for op in graph.ops if name in op.inputs)  # a row handed over by the stage before: as wide as p
    return Value(name, graph.value(reader.outputs[0]).width, "bf16")
