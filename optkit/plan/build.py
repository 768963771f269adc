"""`build_plan`: Graph and choices in, Plan out. The only place that calls the parts of the planner in order.

fuse (ops -> stages) -> bodies (units, accesses, streams) -> order -> buffers -> placement -> edges -> budget, memory.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from math import ceil
from typing import Any

from optkit.models.graph import Graph
from optkit.plan import budget, memory
from optkit.plan.bodies import SLOT_BYTES, THREADS, Context, Shape, V, shape_of
from optkit.plan.buffers import assign
from optkit.plan.choices import TOKEN_CLASS, PlanChoices
from optkit.plan.compress import segments_of
from optkit.plan.edges import derive, own_region
from optkit.plan.errors import PlanError
from optkit.plan.fuse import Proto, fuse
from optkit.plan.order import sort
from optkit.plan.types import Access, IndexSet, Plan, Record, Stage


def build_plan(graph: Graph, choices: PlanChoices) -> Plan:
    """Plan one decode step of one rank. Deterministic: same graph and choices, same bytes of `Plan.to_json()`.

    Raises PlanError with one line for every reason why these choices cannot work on this hardware.
    """
    problems = choices.problems() + _mismatches(graph, choices)
    if problems:
        raise PlanError(problems)
    sms = choices.sms
    fused = fuse(graph, choices)
    ctx = Context(graph.rows)
    shapes = [shape_of(p.body, p.params, ctx) for p in fused.protos]
    order = sort(fused.protos, shapes, frozenset(s.name for s in graph.states), choices)
    blocks_per_row = ceil(choices.decode.context / choices.cache.block_size)
    copies = 2 if choices.parallel.peers == "real" else 1
    names = assign(graph, order, shapes, fused.extra, fused.mailboxes, blocks_per_row, copies)
    stages = place([(fused.protos[i], shapes[i]) for i in order], names.of, choices, sms)
    leaves = frozenset(names.of[v] for v in graph.outputs)
    edges, mechanism = derive(stages, names.buffers, choices.sync, sms, leaves)
    buffers = tuple(
        replace(
            b,
            layout="tagged" if mechanism.get(b.name) in ("tagged", "peer_mailbox") else "plain",
        )
        for b in names.buffers.values()
    )
    ring_slots = budget.ring(stages, choices, problems)
    sizes = memory.account(graph, buffers, choices)
    problems += memory.problems(sizes, graph, choices)
    if problems:
        raise PlanError(problems)
    return Plan(
        name=choices.name,
        recipe_digest=choices.recipe_digest,
        hardware=_pairs({**asdict(choices.hardware), "smem": choices.hardware.smem, "memory": choices.hardware.memory}),
        sms=sms,
        rows=graph.rows,
        parallel=_pairs({**asdict(choices.parallel), "layers": graph.layers}),
        stages=stages,
        segments=segments_of(stages, graph.family),
        buffers=buffers,
        edges=edges,
        index_sets=index_sets(stages, graph),
        ring_slots=ring_slots,
        ring_slot_bytes=SLOT_BYTES,
        threads=THREADS,
        choices=_pairs(
            {k: Record(asdict(getattr(choices, k))) for k in ("fusion", "overlap", "sync", "decode", "cache", "tune")}
        ),
        memory=sizes,
    )


def _pairs(d: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(d.items()))


def _mismatches(graph: Graph, choices: PlanChoices) -> list[str]:
    """Where the graph was built for something else than the choices say."""
    out = []
    if graph.rows != TOKEN_CLASS:
        out.append(f"graph {graph.name}: built for {graph.rows} rows, the kernel's token class is {TOKEN_CLASS}")
    for op in graph.ops:
        if op.kind in ("all_reduce", "all_gather"):
            have = {
                "tp": op.attr("ranks"),
                "rank": op.attr("rank"),
                "peers": dict(op.attrs).get("peers", choices.parallel.peers),
            }
            out += [
                f"parallel.{k} = {getattr(choices.parallel, k)}: the graph was built for {v}"
                for k, v in have.items()
                if v != getattr(choices.parallel, k)
            ]
            break
    return out


def place(items: list[tuple[Proto, Shape]], names: dict[str, str], choices: PlanChoices, sms: int) -> tuple[Stage, ...]:
    """Tasks and SMs for every stage; values become buffer names.

    Stages start where the one before ended, so that small stages load different SMs; a stage whose tasks read only what
    equal tasks of the newest producer wrote stays on their SMs.
    """
    stages: list[Stage] = []
    writer: dict[str, int] = {}
    next_sm = 0
    for proto, shape in items:
        tasks = min(shape.units, sms)
        streams = tuple(replace(s, index=names[s.index] if s.index else "") for s in shape.streams)
        params = {k: _named(v, names) for k, v in proto.params.items()}
        if streams:
            ahead = choices.overlap.weight_stream and not any(s.index for s in streams)
            params["stream"] = "ahead" if ahead else "after_wait"
        stage = Stage(
            proto.name,
            proto.body,
            proto.ops,
            proto.layer,
            shape.units,
            shape.row_units,
            tasks,
            next_sm,
            shape.assign,
            _accesses(shape.reads, names),
            _accesses(shape.writes, names),
            streams,
            _pairs(params),
            shape.smem,
            shape.regs,
        )
        at = _stay(stage, stages, writer, sms)
        if at is None:
            next_sm = (next_sm + tasks) % sms
        else:
            stage = replace(stage, first_sm=at)
        for a in stage.writes:
            writer[a.buffer] = len(stages)
        stages.append(stage)
    return tuple(stages)


def _stay(stage: Stage, stages: list[Stage], writer: dict[str, int], sms: int) -> int | None:
    """First SM of the newest producer if the stage can read its words from the same SM."""
    made = [(writer[a.buffer], a) for a in stage.reads if a.buffer in writer]
    if not made:
        return None
    newest, read = max(made, key=lambda x: x[0])
    src = stages[newest]
    moved = replace(stage, first_sm=src.first_sm)
    if any(w.buffer == read.buffer and own_region(src, w, moved, read, sms) for w in src.writes):
        return src.first_sm
    return None


def _accesses(accesses: tuple[Access, ...], names: dict[str, str]) -> tuple[Access, ...]:
    return tuple(dict.fromkeys(replace(a, buffer=names[a.buffer], by=names[a.by] if a.by else "") for a in accesses))


def _named(value: Any, names: dict[str, str]) -> Any:
    """Params with every V replaced by its buffer."""
    if isinstance(value, V):
        return names[value]
    if isinstance(value, Record):
        return Record({k: _named(v, names) for k, v in value.items()})
    if isinstance(value, tuple):
        return tuple(_named(v, names) for v in value)
    return value


def index_sets(stages: tuple[Stage, ...], graph: Graph) -> tuple[IndexSet, ...]:
    """The data-dependent sets of the step, and what proofs may assume of them.

    `partition`: the (row, k) pairs are split among the listed experts, each in exactly one. `injective`: no two live
    rows share an element.
    """
    out: list[IndexSet] = []
    for s in stages:
        if s.body == "route":
            rows, topk = graph.rows, s.param("topk")
            out.append(IndexSet(s.param("ids"), s.name, topk, ("distinct_in_row", "in_range")))
            out.append(IndexSet(s.param("uniq"), s.name, rows * topk, ("partition", "in_range")))
    kinds = {s.kind for s in graph.states}
    if kinds & {"kv", "kv_heads"}:
        out.append(IndexSet("slot_mapping", "contract:vllm", graph.rows, ("injective", "negative_is_padding")))
        out.append(IndexSet("block_table", "contract:vllm", graph.rows, ("injective_blocks_of_live_rows",)))
    if kinds & {"conv", "recurrent"}:
        out.append(IndexSet("state_slot", "contract:vllm", graph.rows, ("injective", "nonpositive_is_padding")))
    return tuple(out)
