"""Faults of the Plan: a base is a right Plan, a site's product a wrong one. The static proofs must refuse each.

Sites are chosen so that the fault really breaks the Plan: dropping an edge that a chain of others implies is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from optkit.plan.types import Access, Buffer, Edge, IndexSet, Plan, Stage
from optkit.verify.planted.registry import Fault, Site

ORDER = ("proof.raw", "proof.war", "proof.waw")


def stage(plan: Plan, i: int, **changes: Any) -> Plan:
    """The Plan with one stage changed."""
    return replace(plan, stages=tuple(replace(s, **changes) if j == i else s for j, s in enumerate(plan.stages)))


def renamed(plan: Plan, old: str, new: str, first: int = 0) -> Plan:
    """Accesses and edges on buffer `old` go to `new`, from stage `first` on."""

    def ren(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(replace(a, buffer=new) if a.buffer == old else a for a in accesses)

    return replace(
        plan,
        stages=tuple(
            replace(s, reads=ren(s.reads), writes=ren(s.writes)) if i >= first else s for i, s in enumerate(plan.stages)
        ),
        edges=tuple(replace(e, buffer=new) if e.buffer == old and e.src >= first else e for e in plan.edges),
    )


def without(plan: Plan, gone: Callable[[Edge], bool]) -> Plan:
    """The Plan without some edges."""
    return replace(plan, edges=tuple(e for e in plan.edges if not gone(e)))


def where(plan: Plan, e: Edge) -> str:
    """An edge in words."""
    return f"{plan.stages[e.src].name} -> {plan.stages[e.dst].name} ({e.kind} on {e.buffer}, {e.mechanism})"


def places(plan: Plan, i: int) -> frozenset[int]:
    """SMs of a stage's tasks."""
    s = plan.stages[i]
    return frozenset(s.sm_of(t, plan.sms) for t in range(s.tasks))


def chained(plan: Plan, e: Edge) -> bool:
    """Whether other counter edges lead from e.src to e.dst, or from a later stage that runs on all SMs of e.src: an SM
    runs its tasks in order, so that stage's arrivals tell of e.src as well."""
    todo, seen = [e.dst], {e.dst}
    here = places(plan, e.src)
    while todo:
        at = todo.pop()
        mine = places(plan, at)
        before = [
            v for v in range(e.src + 1, at) if v not in seen and mine <= places(plan, v)
        ]  # the same SMs did these first
        seen.update(before)
        todo += before
        for w in plan.waits[at]:
            if w.mechanism not in ("counter", "grid_barrier") or (w.src, w.dst) == (e.src, e.dst):
                continue
            if w.src == e.src or (w.src > e.src and here <= places(plan, w.src)):
                return True
            if w.src > e.src and w.src not in seen:
                seen.add(w.src)
                todo.append(w.src)
    return False


def pick(
    plan: Plan,
    kind: str = "",
    mechanism: str = "",
    klass: str = "",
    alone: bool = True,
    test: Callable[[Edge], bool] = lambda e: True,
) -> list[Edge]:
    """Edges of a kind; `alone`: nothing else orders their ends (counters)."""
    return [
        e
        for e in plan.edges
        if (not kind or e.kind == kind)
        and (not mechanism or e.mechanism == mechanism)
        and (not klass or plan.buffer[e.buffer].klass == klass)
        and test(e)
        and not (alone and e.mechanism == "counter" and chained(plan, e))
    ]


def edges(change: Callable[[Plan, Edge], Plan], **kw: Any) -> Callable[[Plan], Iterable[Site]]:
    """Sites: every edge that `pick` finds, changed."""

    def sites(plan: Plan) -> list[Site]:
        return [(where(plan, e), lambda e=e: change(plan, e)) for e in pick(plan, **kw)]  # type: ignore[misc]

    return sites


def stages(
    test: Callable[[Stage], bool], change: Callable[[Plan, int, Stage], Plan]
) -> Callable[[Plan], Iterable[Site]]:
    """Sites: every stage that passes `test`, changed."""

    def sites(plan: Plan) -> list[Site]:
        return [(s.name, lambda i=i, s=s: change(plan, i, s)) for i, s in enumerate(plan.stages) if test(s)]  # type: ignore[misc]

    return sites


def whole(change: Callable[[Plan], Plan | None]) -> Callable[[Plan], Iterable[Site]]:
    """One site: the Plan as a whole, if there is anything to break."""

    def sites(plan: Plan) -> list[Site]:
        broken = change(plan)
        return [] if broken is None else [("plan", lambda: broken)]

    return sites


def drop(plan: Plan, e: Edge) -> Plan:
    """No edge between these two stages through this buffer any more; counters between them go too."""
    return without(
        plan, lambda x: (x.src, x.dst) == (e.src, e.dst) and (x.buffer == e.buffer or x.mechanism == "counter")
    )


def move_src(step: int) -> Callable[[Plan, Edge], Plan]:
    """Waits for the stage `step` further in the list."""
    return lambda plan, e: replace(plan, edges=tuple(replace(x, src=x.src + step) if x == e else x for x in plan.edges))


def swap(plan: Plan, e: Edge, **changes: Any) -> Plan:
    """One edge changed."""
    return replace(plan, edges=tuple(replace(x, **changes) if x == e else x for x in plan.edges))


def mechanism(to: str) -> Callable[[Plan, Edge], Plan]:
    """All edges between the two stages on that buffer by another mechanism."""
    return lambda plan, e: replace(
        plan,
        edges=tuple(
            replace(x, mechanism=to) if (x.src, x.dst, x.buffer) == (e.src, e.dst, e.buffer) else x for x in plan.edges
        ),
    )


def later_reader(plan: Plan, e: Edge) -> Plan:
    """The wait sits one stage too late: after the reader."""
    return swap(plan, e, dst=e.dst + 1)


def tagged_reader_of(plan: Plan, e: Edge) -> bool:
    """Whether e's reader has the tag of e's source as its only guard."""
    return plan.buffer[e.buffer].layout == "tagged"


def slots_for(plan: Plan) -> int:
    """Ring slots that fit beside the largest body, and one more."""
    free = dict(plan.hardware)["smem_kib"] * 1024 - max(s.smem for s in plan.stages) - 6 * 1024
    return free // plan.ring_slot_bytes + 1


def same_kind(plan: Plan, a: Buffer, b: Buffer) -> bool:
    return (a.klass, a.dtype, a.layout, a.width) == (b.klass, b.dtype, b.layout, b.width)


def merged(klass: str) -> Callable[[Plan], Iterable[Site]]:
    """Two values alive at the same time get one buffer: `other` is written between an edge's ends."""

    def sites(plan: Plan) -> list[Site]:
        out: list[Site] = []
        for e in pick(plan, kind="raw", klass=klass, alone=False):
            b = plan.buffer[e.buffer]
            mine = {a.buffer for a in plan.stages[e.src].writes}
            other = next(
                (
                    a.buffer
                    for s in plan.stages[e.src + 1 : e.dst]
                    for a in s.writes
                    if a.buffer not in mine and same_kind(plan, plan.buffer[a.buffer], b)
                ),
                None,
            )
            if other is not None:
                out.append((f"{other} into {e.buffer}", lambda e=e, other=other: renamed(plan, other, e.buffer)))  # type: ignore[misc]
        return out

    return sites


def early_prefix(plan: Plan) -> list[Site]:
    """A prefix buffer is handed to the next value while a reader of the old one is still to come."""
    out: list[Site] = []
    pool = sorted({b.name for b in plan.buffers if b.name.startswith("P@")})
    for name in pool:
        made = [i for i, s in enumerate(plan.stages) if any(a.buffer == name for a in s.writes)]
        for i, end in zip(made, [*made[1:], len(plan.stages)], strict=True):
            read = [j for j in range(i, end) if any(a.buffer == name for a in plan.stages[j].reads)]
            victim = next(
                (
                    (j, a.buffer)
                    for j in range(i + 1, max(read, default=i))
                    for a in plan.stages[j].writes
                    if a.buffer in pool and a.buffer != name
                ),
                None,
            )
            if victim:
                out.append(
                    (
                        f"{victim[1]} of {plan.stages[victim[0]].name} into {name}",
                        lambda v=victim, n=name: renamed(plan, v[1], n, v[0]),
                    )
                )  # type: ignore[misc]
    return out


def shared(kind: Callable[[Buffer], bool]) -> Callable[[Plan], Iterable[Site]]:
    """Two buffers (of layers, as a rule) become the first one."""

    def sites(plan: Plan) -> list[Site]:
        names = [b.name for b in plan.buffers if kind(b)]
        return [(f"{b} into {a}", lambda a=a, b=b: renamed(plan, b, a)) for a, b in zip(names, names[1:], strict=False)]  # type: ignore[misc]

    return sites


def index_set(
    change: Callable[[IndexSet], IndexSet | None], test: Callable[[IndexSet], bool]
) -> Callable[[Plan], Iterable[Site]]:
    """Sites: index sets that pass `test`, changed (None: removed)."""

    def sites(plan: Plan) -> list[Site]:
        out: list[Site] = []
        for x in plan.index_sets:
            if test(x):
                kept = [change(y) if y == x else y for y in plan.index_sets]
                out.append(
                    (x.value, lambda kept=kept: replace(plan, index_sets=tuple(y for y in kept if y is not None)))
                )  # type: ignore[misc]
        return out

    return sites


def writes(
    change: Callable[[Access], Access], test: Callable[[Stage, Access], bool]
) -> Callable[[Plan], Iterable[Site]]:
    """Sites: one write access of a stage, changed."""

    def sites(plan: Plan) -> list[Site]:
        return [
            (
                f"{s.name} on {a.buffer}",
                lambda i=i, s=s, a=a: stage(plan, i, writes=tuple(change(w) if w == a else w for w in s.writes)),
            )  # type: ignore[misc]
            for i, s in enumerate(plan.stages)
            for a in s.writes
            if test(s, a)
        ]

    return sites


def local(plan: Plan, a: Access) -> bool:
    return plan.buffer[a.buffer].klass in ("activation", "scratch")


def ghost_read(plan: Plan, i: int, s: Stage) -> Plan:
    """Reads a buffer that nobody writes."""
    ghost = Buffer("nobody", "activation", "bf16", plan.rows, 64)
    return replace(stage(plan, i, reads=(*s.reads, Access("nobody"))), buffers=(*plan.buffers, ghost))


def stream(
    change: Callable[[Any], Any], test: Callable[[Any], bool] = lambda t: True
) -> Callable[[Plan], Iterable[Site]]:
    """Sites: stages with a weight stream that passes `test`; all of its streams changed."""

    def sites(plan: Plan) -> list[Site]:
        return [
            (s.name, lambda i=i, s=s: stage(plan, i, streams=tuple(change(t) for t in s.streams)))  # type: ignore[misc]
            for i, s in enumerate(plan.stages)
            if s.streams and test(s.streams[0])
        ]

    return sites


def plain_tag(plan: Plan) -> list[Site]:
    """A buffer whose words carry no tag is polled by tag."""
    return [
        (
            b.name,
            lambda b=b: replace(plan, buffers=tuple(replace(x, layout="plain") if x == b else x for x in plan.buffers)),
        )  # type: ignore[misc]
        for b in plan.buffers
        if b.layout == "tagged" and b.klass != "mailbox"
    ]


def columns(s: Stage, a: Access) -> bool:
    """Whether a stage cuts this access by columns."""
    return a.step > 0 and s.row_units == 1 and s.tasks > 1 and s.assign == "block" and a.count in (0, s.units)


def F(
    name: str, kind: str, gates: tuple[str, ...], sites: Callable[[Plan], Iterable[Site]], variant: str = "own"
) -> Fault:
    return Fault(name, kind, "plan", gates, sites, variant)


def route_edge(plan: Plan) -> list[Site]:
    """Routed tiles are queued without the edge from the router."""
    keys = {(i, t.index) for i, s in enumerate(plan.stages) for t in s.streams if t.index}
    return [
        (plan.stages[i].name, lambda k=(i, n): without(plan, lambda e: (e.dst, e.buffer) == k)) for i, n in sorted(keys)
    ]  # type: ignore[misc]


def grow(plan: Plan, n: int) -> Plan:
    """More stages than a tag has room for."""
    return replace(plan, stages=tuple(replace(plan.stages[0], name=f"s{i}") for i in range(n)), edges=())


RAW, WAR, WAW = ("proof.raw",), ("proof.war",), ("proof.waw",)
ARR, RING, SETS = ("proof.arrivals",), ("proof.ring",), ("proof.index_sets",)
LIVE, TAGS, EDGES, WITHIN = ("proof.liveness",), ("proof.tags",), ("proof.edges",), ("proof.within_stage",)


def hardware(**changes: Any) -> Callable[[Plan], Plan]:
    """The Plan for other hardware figures (None: missing)."""
    return lambda plan: replace(
        plan,
        hardware=tuple((k, changes.get(k, v)) for k, v in plan.hardware if changes.get(k, v) is not None)
        if None not in changes.values()
        else tuple((k, v) for k, v in plan.hardware if k not in changes),
    )


def previous_user(plan: Plan) -> list[Site]:
    """The tag is that of the buffer's previous value: an old word passes for the new one."""
    out: list[Site] = []
    for e in pick(plan, kind="raw", mechanism="tagged"):
        old = max((j for j in range(e.src) if any(a.buffer == e.buffer for a in plan.stages[j].writes)), default=None)
        if old is not None:
            out.append((where(plan, e), lambda e=e, old=old: swap(plan, e, src=old)))  # type: ignore[misc]
    return out


def swapped(plan: Plan) -> list[Site]:
    """A reader is placed before the stage that writes what it reads (edges follow the stages)."""
    out: list[Site] = []
    for e in pick(plan, kind="raw", test=lambda e: e.dst == e.src + 1):

        def make(e: Edge = e) -> Plan:
            order = list(range(len(plan.stages)))
            order[e.src], order[e.dst] = e.dst, e.src
            at = {old: new for new, old in enumerate(order)}
            return replace(
                plan,
                stages=tuple(plan.stages[i] for i in order),
                edges=tuple(replace(x, src=at[x.src], dst=at[x.dst]) for x in plan.edges),
            )

        out.append((where(plan, e), make))
    return out


def in_place(plan: Plan) -> list[Site]:
    """A projection reads its own output buffer as a whole."""
    return [
        (s.name, lambda i=i, s=s, a=a: stage(plan, i, reads=(*s.reads, Access(a.buffer))))  # type: ignore[misc]
        for i, s in enumerate(plan.stages)
        for a in s.writes[:1]
        if s.body == "gemv" and s.tasks > 1 and plan.buffer[a.buffer].klass == "activation"
    ]


def one_mailbox(plan: Plan) -> list[Site]:
    """Every exchange goes through the widest mailbox."""
    boxes = [b for b in plan.buffers if b.klass == "mailbox"]
    if len(boxes) < 2:
        return []
    to = max(boxes, key=lambda b: b.width).name

    def make() -> Plan:
        out = plan
        for b in boxes:
            out = renamed(out, b.name, to)
        return out

    return [("all", make)]


def wider(plan: Plan) -> list[Site]:
    """A buffer is said to be wider than what its writer writes: readers of whole rows read the rest too."""
    out: list[Site] = []
    for e in pick(plan, kind="raw", klass="activation", alone=False):
        b = plan.buffer[e.buffer]
        cut = all(
            a.step and a.count in (0, plan.stages[e.src].units) for a in plan.stages[e.src].writes if a.buffer == b.name
        )
        read = any(a.buffer == b.name and not a.span for a in plan.stages[e.dst].reads)
        s = plan.stages[e.src]
        if cut and read and s.body == "gemv" and s.row_units == 1:
            out.append(
                (
                    b.name,
                    lambda b=b: replace(
                        plan, buffers=tuple(replace(x, width=x.width + 64) if x == b else x for x in plan.buffers)
                    ),
                )
            )  # type: ignore[misc]
    return out


def lost_part(plan: Plan) -> list[Site]:
    """A packed projection does not write one of its outputs."""
    return [
        (f"{s.name}: {a.buffer}", lambda i=i, s=s, a=a: stage(plan, i, writes=tuple(w for w in s.writes if w != a)))  # type: ignore[misc]
        for i, s in enumerate(plan.stages)
        for a in s.writes
        if len(s.writes) > 1
        and s.body == "gemv"
        and not any(x.buffer == a.buffer for t in plan.stages[:i] for x in t.writes)
    ]


def written_input(plan: Plan) -> list[Site]:
    """A stage writes a step input of vLLM."""
    inputs = [b.name for b in plan.buffers if b.klass == "input"]
    return [
        (f"{s.name} writes {inputs[0]}", lambda i=i, s=s: stage(plan, i, writes=(*s.writes, Access(inputs[0]))))  # type: ignore[misc]
        for i, s in enumerate(plan.stages)
        if inputs and s.body == "gemv"
    ]


def read_again(plan: Plan, i: int, name: str) -> bool:
    """Whether a stage after i reads the buffer before another writes it."""
    for s in plan.stages[i:]:
        if any(a.buffer == name for a in s.reads):
            return True
        if any(a.buffer == name for a in s.writes):
            return False
    return False


def stray_write(reader: bool, last: bool = False) -> Callable[[Plan], Iterable[Site]]:
    """A stage also writes a buffer that an earlier stage, unordered with it, reads (`reader`) or writes; `last`: nobody
    reads the old value after that."""

    def sites(plan: Plan) -> list[Site]:
        out: list[Site] = []
        for i, s in enumerate(plan.stages):
            for w in range(i + 1, min(i + 4, len(plan.stages))):
                t = plan.stages[w]
                if t.assign == "cyclic" or any(e.src >= i for e in plan.waits[w]) or places(plan, i) & places(plan, w):
                    continue
                for a in (s.reads if reader else s.writes)[:1]:
                    if last and read_again(plan, w, a.buffer):
                        continue
                    if local(plan, a) and not any(x.buffer == a.buffer for x in (*t.reads, *t.writes)):
                        out.append(
                            (
                                f"{t.name} writes {a.buffer} beside {s.name}",
                                lambda w=w, t=t, a=a: stage(
                                    plan, w, writes=(*t.writes, replace(t.writes[0], buffer=a.buffer))
                                ),
                            )
                        )  # type: ignore[misc]
        return out

    return sites


def behind(plan: Plan) -> list[Site]:
    """A static stream behind a routed one of the same stage."""
    return [
        (s.name, lambda i=i, s=s: stage(plan, i, streams=(*s.streams, replace(s.streams[0], index="", repeat=1))))  # type: ignore[misc]
        for i, s in enumerate(plan.stages)
        if s.streams and s.streams[0].index
    ]


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
                lambda b=b: replace(
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
                lambda b=b: replace(p, buffers=tuple(replace(x, klass="global") if x == b else x for x in p.buffers)),
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
                lambda x=x: replace(
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
