"""Faults of the Plan: a base is a right Plan, a site's product a wrong one. The static proofs must refuse each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from optkit.plan.types import Plan
from optkit.verify.planted.plan_sites import (
    behind,
    columns,
    drop,
    early_prefix,
    edges,
    ghost_read,
    grow,
    hardware,
    in_place,
    index_set,
    later_reader,
    lost_part,
    mechanism,
    merged,
    move_src,
    next_mailbox,
    one_mailbox,
    plain_tag,
    previous_user,
    route_edge,
    shared,
    slots_for,
    stage,
    stages,
    stray_write,
    stream,
    swap,
    swapped,
    whole,
    wider,
    writes,
    written_input,
)
from optkit.verify.planted.registry import Fault, Site

ORDER = ("proof.raw", "proof.war", "proof.waw")


def F(
    name: str, kind: str, gates: tuple[str, ...], sites: Callable[[Plan], Iterable[Site]], variant: str = "own"
) -> Fault:
    """A fault of the Plan: name, kind, gates of which one must be red, sites, the variant it is planted in."""
    return Fault(name, kind, "plan", gates, sites, variant)


RAW, WAR, WAW = ("proof.raw",), ("proof.war",), ("proof.waw",)
ARR, RING, SETS = ("proof.arrivals",), ("proof.ring",), ("proof.index_sets",)
LIVE, TAGS, EDGES, WITHIN = ("proof.liveness",), ("proof.tags",), ("proof.edges",), ("proof.within_stage",)


FAULTS: tuple[Fault, ...] = (
    # ---- dropped and misplaced waits
    F(
        "dropped wait: counter, activation",
        "dropped wait",
        RAW,
        edges(drop, kind="raw", mechanism="counter", klass="activation"),
        "counter",
    ),
    F(
        "dropped wait: counter, scratch",
        "dropped wait",
        RAW,
        edges(drop, kind="raw", mechanism="counter", klass="scratch"),
        "counter",
    ),
    F(
        "dropped wait: counter, experts' activations",
        "dropped wait",
        (*RAW, *LIVE),
        edges(drop, kind="raw", mechanism="counter", klass="activation"),
        "tagged",
    ),
    F("dropped wait: cache row", "dropped wait", RAW, edges(drop, kind="raw", klass="state"), "counter"),
    F("dropped wait: cache row among tags", "dropped wait", RAW, edges(drop, kind="raw", klass="state"), "tagged"),
    F(
        "dropped wait: tagged activation",
        "dropped wait",
        LIVE,
        edges(drop, kind="raw", mechanism="tagged", klass="activation"),
        "tagged",
    ),
    F(
        "dropped wait: tagged scratch",
        "dropped wait",
        LIVE,
        edges(drop, kind="raw", mechanism="tagged", klass="scratch"),
        "tagged",
    ),
    F(
        "dropped wait: mailbox",
        "dropped wait",
        (*LIVE, *RAW),
        edges(drop, kind="raw", mechanism="peer_mailbox"),
        "ranks",
    ),
    F("dropped wait: grid barrier", "dropped wait", RAW, whole(lambda p: replace(p, edges=())), "barrier"),
    F("dropped wait: index of routed tiles", "dropped wait", RING, route_edge),
    F(
        "dropped wait: partial attention",
        "dropped wait",
        (*RAW, *LIVE),
        edges(drop, kind="raw", test=lambda e: "part" in e.buffer or "@" in e.buffer),
        "splits",
    ),
    F(
        "dropped wait: split projection",
        "dropped wait",
        RAW,
        edges(drop, kind="raw", mechanism="counter", klass="activation"),
        "unfused",
    ),
    F(
        "wait on the stage before the writer",
        "wrong wait",
        (*EDGES, *RAW),
        edges(move_src(-1), kind="raw", test=lambda e: e.src > 0),
        "counter",
    ),
    F(
        "wait on the stage after the writer",
        "wrong wait",
        (*EDGES, *RAW),
        edges(move_src(1), kind="raw", test=lambda e: e.src + 1 < e.dst),
        "counter",
    ),
    F(
        "tagged wait on the stage before the writer",
        "tag off by one",
        (*EDGES, *RAW),
        edges(move_src(-1), kind="raw", mechanism="tagged", test=lambda e: e.src > 0),
        "tagged",
    ),
    F(
        "tagged wait on the stage after the writer",
        "tag off by one",
        (*EDGES, *RAW),
        edges(move_src(1), kind="raw", mechanism="tagged", test=lambda e: e.src + 1 < e.dst),
        "tagged",
    ),
    F(
        "wait one stage too late",
        "wrong wait",
        (*EDGES, *RAW),
        edges(later_reader, kind="raw", mechanism="counter"),
        "counter",
    ),
    F(
        "tagged wait one stage too late",
        "wrong wait",
        (*EDGES, *LIVE),
        edges(later_reader, kind="raw", mechanism="tagged"),
        "tagged",
    ),
    F("wait for the previous user of the buffer", "epoch reused", RAW, lambda p: previous_user(p), "tagged"),
    F(
        "dropped wait: tagged words long since visible",
        "dropped wait",
        LIVE,
        edges(drop, kind="raw", mechanism="tagged", test=lambda e: e.dst - e.src > 60),
        "tagged",
    ),
    # ---- mechanisms
    F(
        "counter edge said to be same SM",
        "wrong mechanism",
        RAW,
        edges(mechanism("same_sm"), kind="raw", mechanism="counter"),
        "counter",
    ),
    F(
        "counter edge said to be one program",
        "wrong mechanism",
        RAW,
        edges(mechanism("program"), kind="raw", mechanism="counter"),
        "counter",
    ),
    F(
        "tag on plain words",
        "wrong mechanism",
        EDGES,
        edges(mechanism("tagged"), kind="raw", mechanism="counter", klass="activation"),
        "counter",
    ),
    F(
        "tag on cache rows",
        "wrong mechanism",
        (*EDGES, *RAW),
        edges(mechanism("tagged"), kind="raw", klass="state"),
        "tagged",
    ),
    F("tag for a WAR", "wrong mechanism", EDGES, edges(mechanism("tagged"), kind="war"), "tagged"),
    F("tag for a WAW", "wrong mechanism", EDGES, edges(mechanism("tagged"), kind="waw"), "tagged"),
    F(
        "same SM for tagged words",
        "wrong mechanism",
        RAW,
        edges(mechanism("same_sm"), kind="raw", mechanism="tagged"),
        "tagged",
    ),
    F(
        "mailbox edge on an activation",
        "wrong mechanism",
        EDGES,
        edges(mechanism("peer_mailbox"), kind="raw", mechanism="counter", klass="activation"),
        "counter",
    ),
    F(
        "counter on a real peer's mailbox",
        "wrong mechanism",
        EDGES,
        edges(mechanism("counter"), kind="raw", mechanism="peer_mailbox"),
        "real",
    ),
    F("words without a tag polled by tag", "wrong mechanism", EDGES, plain_tag, "tagged"),
    F("mechanism nobody knows", "wrong mechanism", EDGES, edges(mechanism("flag"), kind="raw"), "counter"),
    F(
        "edge of an unknown kind",
        "wrong mechanism",
        EDGES,
        edges(lambda p, e: swap(p, e, kind="rar"), kind="raw"),
        "counter",
    ),
    F(
        "edge on a buffer that is not there",
        "wrong operand",
        EDGES,
        edges(lambda p, e: swap(p, e, buffer="nobody"), kind="raw"),
        "counter",
    ),
    F(
        "RAW edge labelled WAR",
        "wrong mechanism",
        (*EDGES, *LIVE),
        edges(lambda p, e: swap(p, e, kind="war"), kind="raw", mechanism="tagged"),
        "tagged",
    ),
    # ---- order and liveness
    F(
        "edge turned round",
        "deadlock",
        LIVE,
        edges(lambda p, e: swap(p, e, src=e.dst, dst=e.src), kind="raw"),
        "counter",
    ),
    F(
        "edge added backwards",
        "deadlock",
        LIVE,
        edges(lambda p, e: replace(p, edges=(*p.edges, replace(e, src=e.dst, dst=e.src))), kind="raw"),
        "counter",
    ),
    F("stage waits for itself", "deadlock", LIVE, edges(lambda p, e: swap(p, e, src=e.dst), kind="raw"), "tagged"),
    F(
        "edge from a stage that is not there",
        "wrong wait",
        EDGES,
        edges(lambda p, e: swap(p, e, src=len(p.stages)), kind="raw"),
        "counter",
    ),
    F(
        "reader and writer swapped in the order",
        "signal before write",
        (*LIVE, *EDGES),
        lambda p: swapped(p),
        "counter",
    ),
    F("tagged reader moved before its writer", "signal before write", (*LIVE, *EDGES), lambda p: swapped(p), "tagged"),
    # ---- work
    F(
        "one task more than SMs",
        "wait on a wrong count",
        ARR,
        stages(lambda s: s.tasks > 1, lambda p, i, s: stage(p, i, tasks=p.sms + 1)),
    ),
    F("stage without tasks", "dropped signal", ARR, stages(lambda s: True, lambda p, i, s: stage(p, i, tasks=0))),
    F("stage without units", "lost work", ARR, stages(lambda s: True, lambda p, i, s: stage(p, i, units=0))),
    F(
        "one unit too many for its rows",
        "wrong work",
        ARR,
        stages(lambda s: s.row_units > 1, lambda p, i, s: stage(p, i, units=s.units + 1)),
    ),
    F(
        "units for one row less",
        "wrong work",
        ARR,
        stages(
            lambda s: s.row_units > 1,
            lambda p, i, s: stage(p, i, row_units=s.row_units - 1, units=s.units // s.row_units * (s.row_units - 1)),
        ),
    ),
    F(
        "first SM beyond the last",
        "wrong work",
        ARR,
        stages(lambda s: True, lambda p, i, s: stage(p, i, first_sm=p.sms)),
    ),
    F(
        "assignment nobody knows",
        "wrong work",
        ARR,
        stages(lambda s: True, lambda p, i, s: stage(p, i, assign="random")),
    ),
    F(
        "last unit dropped",
        "split-K partial",
        ("proof.never_written", *ORDER),
        stages(
            lambda s: (
                s.body == "gemv"
                and s.name != "logits"
                and s.tasks > 8
                and not any(a.count and a.first for a in s.writes)
            ),
            lambda p, i, s: stage(p, i, units=s.units - 1, tasks=min(s.tasks, s.units - 1)),
        ),
    ),
    F(
        "tasks of a stage write the same columns",
        "overlapping buffers",
        WITHIN,
        writes(lambda a: replace(a, step=0, span=0), columns),
    ),
    F(
        "tiles overlap by one column",
        "overlapping buffers",
        (*WITHIN, *TAGS),
        writes(lambda a: replace(a, span=a.span + 1), columns),
    ),
    F(
        "tiles overlap by one tagged word",
        "overlapping buffers",
        WITHIN,
        writes(lambda a: replace(a, span=a.span + 4), columns),
        "tagged",
    ),
    F(
        "tiles overlap by half",
        "split-K partial",
        WITHIN,
        writes(lambda a: replace(a, step=a.step // 2), lambda s, a: columns(s, a) and a.step % 8 == 0),
        "counter",
    ),
    F(
        "rows of one unit said to be all",
        "overlapping buffers",
        WITHIN,
        writes(
            lambda a: replace(a, rows="all"),
            lambda s, a: s.row_units > 1 and a.rows == "unit" and s.tasks > 1 and not a.by,
        ),
    ),
    F("stage reads what its neighbour task writes", "overlapping buffers", WITHIN, lambda p: in_place(p), "counter"),
    # ---- tags
    F(
        "two stages of one name",
        "tag off by one",
        TAGS,
        stages(lambda s: True, lambda p, i, s: stage(p, i, name=p.stages[i - 1].name)),
    ),
    F(
        "two buffers of one name",
        "overlapping buffers",
        TAGS,
        whole(lambda p: replace(p, buffers=(*p.buffers, p.buffers[0]))),
    ),
    F("more stages than a tag can name", "tag off by one", TAGS, whole(lambda p: grow(p, 1 << 16))),
    F(
        "tagged rows of a broken word",
        "tag off by one",
        TAGS,
        lambda p: [
            (
                b.name,
                lambda b=b: replace(  # type: ignore[misc]
                    p, buffers=tuple(replace(x, width=x.width + 1) if x == b else x for x in p.buffers)
                ),
            )
            for b in p.buffers
            if b.layout == "tagged" and b.klass == "activation"
        ],
        "tagged",
    ),  # type: ignore[misc]
    F(
        "two writers in one tagged word",
        "tag off by one",
        TAGS,
        writes(
            lambda a: replace(a, step=a.step + 1, span=a.span + 1), lambda s, a: columns(s, a) and s.name != "logits"
        ),
        "tagged",
    ),
    F(
        "memory class nobody knows",
        "wrong mechanism",
        TAGS,
        lambda p: [
            (
                b.name,
                lambda b=b: replace(p, buffers=tuple(replace(x, klass="global") if x == b else x for x in p.buffers)),  # type: ignore[misc]
            )
            for b in p.buffers
            if b.klass == "activation"
        ],
    ),  # type: ignore[misc]
    # ---- buffers
    F("two live values in one buffer", "overlapping buffers", ORDER, merged("activation"), "counter"),
    F("two live tagged values in one buffer", "overlapping buffers", ORDER, merged("activation"), "tagged"),
    F("prefix slot released early", "slot released early", ORDER, early_prefix, "counter"),
    F("tagged prefix slot released early", "slot released early", ORDER, early_prefix, "tagged"),
    F(
        "layers share one table of experts",
        "unordered reuse",
        (*ORDER, *RING),
        shared(lambda b: b.name.endswith(".uniq")),
    ),
    F("all exchanges in one mailbox", "unordered reuse", ("proof.mailbox_reuse",), lambda p: one_mailbox(p), "ranks"),
    F("real peers share one mailbox", "unordered reuse", ("proof.mailbox_reuse",), lambda p: one_mailbox(p), "real"),
    F("stage writes what another still reads", "unordered reuse", WAR, stray_write(True), "counter"),
    F(
        "stage writes what another reads for the last time",
        "slot released early",
        WAR,
        stray_write(True, last=True),
        "counter",
    ),
    F("stage writes what another still reads, among tags", "unordered reuse", WAR, stray_write(True), "tagged"),
    F("two unordered stages write one buffer", "unordered reuse", (*WAW, *WAR), stray_write(False), "counter"),
    F(
        "two unordered stages write one buffer, among tags",
        "unordered reuse",
        (*WAW, *RAW),
        stray_write(False),
        "tagged",
    ),
    F(
        "two exchanges in a row through one mailbox",
        "unordered reuse",
        ("proof.mailbox_reuse",),
        next_mailbox,
        "ranks",
    ),
    F(
        "value read that nobody writes",
        "lost work",
        ("proof.never_written",),
        stages(lambda s: s.body == "gemv", ghost_read),
    ),
    F("columns read that nobody writes", "lost work", ("proof.never_written",), lambda p: wider(p)),
    F("part of a packed projection lost", "split-K partial", ("proof.never_written",), lambda p: lost_part(p)),
    F(
        "first columns of a value not written",
        "split-K partial",
        ("proof.never_written", *ORDER),
        writes(
            lambda a: replace(a, base=a.base + a.step),
            lambda s, a: columns(s, a) and s.body == "gemv" and s.name != "logits",
        ),
    ),
    F("weights written", "overlapping buffers", WAW, lambda p: written_input(p)),
    # ---- ring
    F("ring of one slot", "ring one stage short", RING, whole(lambda p: replace(p, ring_slots=1))),
    F("ring without slots", "ring one stage short", RING, whole(lambda p: replace(p, ring_slots=0))),
    F(
        "slot half a tile",
        "ring one stage short",
        RING,
        whole(
            lambda p: replace(p, ring_slot_bytes=max(t.tile_bytes for s in p.stages for t in s.streams) // 2 // 16 * 16)
        ),
    ),
    F(
        "slot that bulk copies cannot fill",
        "ring one stage short",
        RING,
        whole(lambda p: replace(p, ring_slot_bytes=p.ring_slot_bytes + 8)),
    ),
    F("tile larger than a slot", "ring one stage short", RING, stream(lambda t: replace(t, tile_bytes=20000))),
    F("stream of no tiles", "lost work", RING, stream(lambda t: replace(t, tiles=0))),
    F("static tiles behind routed ones", "deadlock", RING, lambda p: behind(p)),
    F(
        "index handed over by tag to the producer warp",
        "wrong mechanism",
        RING,
        edges(mechanism("tagged"), kind="raw", test=lambda e: e.buffer.endswith("uniq")),
    ),
    F(
        "index on the same SM only",
        "wrong mechanism",
        RING,
        edges(mechanism("same_sm"), kind="raw", test=lambda e: e.buffer.endswith("uniq")),
    ),
    F(
        "one ring slot more than fits",
        "budget",
        ("proof.shared_memory",),
        whole(lambda p: replace(p, ring_slots=slots_for(p))),
    ),
    F(
        "body too large for the shared memory beside the ring",
        "budget",
        ("proof.shared_memory",),
        stages(lambda s: s.smem > 0, lambda p, i, s: stage(p, i, smem=dict(p.hardware)["smem_kib"] * 1024)),
    ),
    F("GPU with less shared memory", "budget", ("proof.shared_memory",), whole(hardware(smem_kib=100))),
    F("shared memory of the GPU unknown", "budget", ("proof.shared_memory",), whole(hardware(smem_kib=None))),
    # ---- registers, residency
    F(
        "register ceiling beyond the file",
        "budget",
        ("proof.registers",),
        stages(lambda s: True, lambda p, i, s: stage(p, i, regs=232)),
    ),
    F(
        "register ceiling beyond an instruction",
        "budget",
        ("proof.registers",),
        stages(lambda s: True, lambda p, i, s: stage(p, i, regs=256)),
    ),
    F(
        "body without a register ceiling",
        "budget",
        ("proof.registers",),
        stages(lambda s: True, lambda p, i, s: stage(p, i, regs=0)),
    ),
    F(
        "threads that are no whole warps",
        "budget",
        ("proof.registers",),
        whole(lambda p: replace(p, threads=p.threads - 16)),
    ),
    F("twice the consumer warps", "budget", ("proof.registers",), whole(lambda p: replace(p, threads=p.threads + 256))),
    F(
        "more CTAs than SMs",
        "residency exceeded",
        ("proof.placement",),
        whole(lambda p: replace(p, hardware=tuple((k, p.sms - 1 if k == "sms" else v) for k, v in p.hardware))),
    ),
    F("SMs of the GPU unknown", "residency exceeded", ("proof.placement",), whole(hardware(sms=None))),
    F("two CTAs an SM", "residency exceeded", ("proof.placement",), whole(lambda p: replace(p, sms=2 * p.sms))),
    # ---- index sets
    F("index set without facts", "wrong index facts", SETS, index_set(lambda x: replace(x, facts=()), lambda x: True)),
    F(
        "experts' table not a partition",
        "wrong index facts",
        (*WITHIN, *ORDER),
        index_set(
            lambda x: replace(x, facts=tuple(f for f in x.facts if f != "partition")), lambda x: "partition" in x.facts
        ),
    ),
    F(
        "slots of requests not injective",
        "state in the wrong slot",
        WITHIN,
        lambda p: (
            [
                (
                    "all",
                    lambda: replace(
                        p,
                        index_sets=tuple(
                            replace(x, facts=tuple(f for f in x.facts if f != "injective"))
                            if x.producer.startswith("contract")
                            else x
                            for x in p.index_sets
                        ),
                    ),
                )
            ]
            if any("injective" in x.facts for x in p.index_sets)
            else []
        ),
    ),
    F("index set bound zero", "wrong index facts", SETS, index_set(lambda x: replace(x, bound=0), lambda x: True)),
    F(
        "index set bound one slot short",
        "top-k off by one",
        SETS,
        index_set(lambda x: replace(x, bound=x.bound - 1), lambda x: "partition" in x.facts),
    ),
    F(
        "index set of nobody",
        "wrong index facts",
        SETS,
        index_set(lambda x: replace(x, producer="nobody"), lambda x: not x.producer.startswith("contract")),
    ),
    F(
        "index set made later",
        "wrong index facts",
        SETS,
        lambda p: [
            (
                x.value,
                lambda x=x: replace(  # type: ignore[misc]
                    p, index_sets=tuple(replace(y, producer=p.stages[-1].name) if y == x else y for y in p.index_sets)
                ),
            )
            for x in p.index_sets
            if "partition" in x.facts
        ],
    ),  # type: ignore[misc]
    F(
        "index set missing",
        "wrong index facts",
        (*SETS, *WITHIN),
        index_set(lambda x: None, lambda x: "partition" in x.facts),
    ),
    F(
        "fewer experts pulled than chosen",
        "top-k off by one",
        SETS,
        stream(lambda t: replace(t, repeat=t.repeat - 4), lambda t: t.repeat > 4),
    ),
)
