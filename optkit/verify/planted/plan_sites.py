"""Where and how a Plan is broken: the sites of plan_faults.py, a function each, and the edits they make.

Assumes a right Plan. Sites are chosen so that the fault really breaks it: dropping an edge that a chain of others implies is
harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from optkit.plan.types import Access, Buffer, Edge, IndexSet, Plan, Stage
from optkit.verify.planted.registry import Site


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
    """Whether two buffers could be one: class, dtype, layout, width."""
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
                        lambda v=victim, n=name: renamed(plan, v[1], n, v[0]),  # type: ignore[misc]
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
                    (x.value, lambda kept=kept: replace(plan, index_sets=tuple(y for y in kept if y is not None)))  # type: ignore[misc]
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
                lambda i=i, s=s, a=a: stage(plan, i, writes=tuple(change(w) if w == a else w for w in s.writes)),  # type: ignore[misc]
            )  # type: ignore[misc]
            for i, s in enumerate(plan.stages)
            for a in s.writes
            if test(s, a)
        ]

    return sites


def local(plan: Plan, a: Access) -> bool:
    """Whether an access is to a buffer of this step."""
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
            lambda b=b: replace(plan, buffers=tuple(replace(x, layout="plain") if x == b else x for x in plan.buffers)),  # type: ignore[misc]
        )  # type: ignore[misc]
        for b in plan.buffers
        if b.layout == "tagged" and b.klass != "mailbox"
    ]


def columns(s: Stage, a: Access) -> bool:
    """Whether a stage cuts this access by columns."""
    return a.step > 0 and s.row_units == 1 and s.tasks > 1 and s.assign == "block" and a.count in (0, s.units)


def route_edge(plan: Plan) -> list[Site]:
    """Routed tiles are queued without the edge from the router."""
    keys = {(i, t.index) for i, s in enumerate(plan.stages) for t in s.streams if t.index}
    return [
        (plan.stages[i].name, lambda k=(i, n): without(plan, lambda e: (e.dst, e.buffer) == k))  # type: ignore[misc]
        for i, n in sorted(keys)  # type: ignore[misc]
    ]  # type: ignore[misc]


def grow(plan: Plan, n: int) -> Plan:
    """More stages than a tag has room for."""
    return replace(plan, stages=tuple(replace(plan.stages[0], name=f"s{i}") for i in range(n)), edges=())


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


def next_mailbox(plan: Plan) -> list[Site]:
    """An exchange uses the mailbox of the exchange before it."""
    boxes = [b for b in plan.buffers if b.klass == "mailbox"]
    made = {
        b.name: min(i for i, s in enumerate(plan.stages) if any(a.buffer == b.name for a in s.writes)) for b in boxes
    }
    row = sorted((b.name for b in boxes), key=lambda n: made[n])
    return [
        (f"{b} into {a}", lambda a=a, b=b: renamed(plan, b, a))  # type: ignore[misc]
        for a, b in zip(row[:4], row[1:4], strict=False)
        if same_kind(plan, plan.buffer[a], plan.buffer[b])
    ]


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
                    lambda b=b: replace(  # type: ignore[misc]
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
                                lambda w=w, t=t, a=a: stage(  # type: ignore[misc]
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
