"""Which graph value every buffer holds, before and after each stage.

Buffers are reused between layers, so a name alone says little; walking the stages in order and looking at what each
one's params write says it exactly. Teacher-forced checks inject by it.
"""

from __future__ import annotations

from dataclasses import dataclass

from optkit.execute.memory import LOCAL, memo
from optkit.models.graph import Graph
from optkit.plan.types import Plan, Stage


@dataclass(frozen=True)
class Source:
    """What a buffer holds.

    kind "value": graph value `value`; "mailbox": slot p holds coeffs[p] * `value`; "stats": (v.v, v.u) of the saved rows
    `rows` with u = norm * proj; "partial": split attention whose combination is `value`; "uniq": table of the ids
    `value`.
    """

    kind: str
    value: str
    coeffs: tuple[float, ...] = ()
    rows: tuple[str, ...] = ()
    norm: str = ""
    proj: str = ""


@dataclass(frozen=True)
class Contents:
    """Buffers around one stage: what it reads holds `reads`, what it writes then holds `writes`."""

    reads: dict[str, Source]
    writes: dict[str, Source]
    after: dict[str, Source]


def _leaving(stage: Stage, graph: Graph, value: str) -> str:
    """The value that leaves the stage at the end of the fused chain that starts with `value`."""
    for name in stage.ops:
        op = graph.op(name)
        if value in op.inputs and op.outputs:
            value = op.outputs[0]
    return value


def _writes(stage: Stage, graph: Graph, held: dict[str, Source]) -> dict[str, Source]:
    """buffer -> Source of everything `stage` stores."""

    def source(value: str, coeffs: tuple[float, ...] = ()) -> Source:
        return Source("mailbox", value, tuple(coeffs)) if coeffs else Source("value", value)

    body, out = stage.body, stage.param("out")
    if body == "gemv":
        made = {}
        for part in stage.param("parts"):
            first = graph.op(part["op"]).outputs[0]
            made[part["out"]] = source(
                _leaving(stage, graph, first), part["coeffs"] if part["epilogue"] == "mailbox" else ()
            )
        return made
    if body == "blockstats":
        return {
            out: Source(
                "stats",
                "",
                rows=tuple(_value_of(held, b) for b in stage.param("inputs")),
                norm=stage.param("mix_norm"),
                proj=stage.param("mix_proj"),
            )
        }
    if body == "mla_insert":
        return {}
    if body == "attn" and stage.param("splits") > 1:
        return {out: Source("partial", graph.op(stage.ops[-1]).outputs[0])}
    if body == "attn_combine":
        return {out: Source("value", held[stage.param("partial")].value)}
    if body == "route":
        ids, wts = graph.op(stage.ops[0]).outputs
        return {
            stage.param("ids"): Source("value", ids),
            stage.param("wts"): Source("value", wts),
            stage.param("uniq"): Source("uniq", ids),
        }
    return {out: source(graph.op(stage.ops[-1]).outputs[0], stage.param("coeffs") or ())}


def _value_of(held: dict[str, Source], buffer: str) -> str:
    """Graph value in a buffer; step inputs of a pipeline stage hold themselves."""
    return held[buffer].value if buffer in held else buffer


def contents(plan: Plan, graph: Graph) -> tuple[Contents, ...]:
    """Contents of every stage, in order."""
    return memo(plan, ("contents", id(graph)), lambda: _contents(plan, graph))


def _contents(plan: Plan, graph: Graph) -> tuple[Contents, ...]:
    local = {b.name for b in plan.buffers if b.klass in LOCAL}
    held: dict[str, Source] = {}
    out = []
    for stage in plan.stages:
        reads = {a.buffer: held[a.buffer] for a in stage.reads if a.buffer in local and a.buffer in held}
        reads |= {a.buffer: Source("value", a.buffer) for a in stage.reads if a.buffer.startswith("in.")}
        writes = _writes(stage, graph, held)
        held |= writes
        out.append(Contents(reads, writes, dict(held)))
    return tuple(out)
