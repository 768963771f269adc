"""Edges: derived from overlapping accesses, never written by hand.

RAW edges come from every read and the writes it sees. WAR and WAW edges come from every write over something older;
they are listed only where no chain of RAW edges proves the order already.

What a chain proves. A node is a stage, or one part of a packed stage (units that write different buffers finish
independently). "Full" a -> b: no unit of b stores anything before all units of a have done their reads and stores.

* A counter edge (or grid barrier) waits for all tasks: full.
* A tagged edge waits only for the words the unit reads. It is full where every unit of b reads all that a wrote to that
  buffer; otherwise it is "covering" if all units of b together do. A tagged word proves that the loads it was computed
  from had returned; it publishes no other memory, so RAW is never proven by it but for its own words.
* full after covering is full; anything after full is full.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from optkit.plan.choices import Sync
from optkit.plan.errors import PlanError, did_you_mean
from optkit.plan.types import Access, Buffer, Edge, Stage


@dataclass(frozen=True)
class Range:
    """Columns [lo, hi) of a buffer touched by `stage` through access `a`."""

    lo: int
    hi: int
    stage: int
    a: Access


def extent(a: Access, stage: Stage, width: int) -> tuple[int, int]:
    """Columns that all units of the stage together touch through this access."""
    if a.step == 0:
        return a.columns(0, width)
    parts = stage.units // stage.row_units if stage.row_units > 1 else (a.count or stage.units)
    return min(a.base, width), a.columns(parts - 1, width)[1]


@dataclass
class Hazards:
    """All ordered pairs that the accesses demand, before chains are considered."""

    raw: list[tuple[Range, Range]] = field(default_factory=list)  # write, read
    war: list[tuple[Range, Range]] = field(default_factory=list)  # read, write
    waw: list[tuple[Range, Range]] = field(default_factory=list)  # write, write


def _cut(live: list[Range], lo: int, hi: int) -> list[Range]:
    """What stays of the live ranges when [lo, hi) is overwritten."""
    out: list[Range] = []
    for r in live:
        if r.hi <= lo or hi <= r.lo:
            out.append(r)
            continue
        if r.lo < lo:
            out.append(replace(r, hi=lo))
        if hi < r.hi:
            out.append(replace(r, lo=hi))
    return out


def hazards(stages: Sequence[Stage], buffers: dict[str, Buffer]) -> Hazards:
    """Walk the stages in order and pair every access with what it must follow.

    Strided accesses (column blocks of a state) are treated as the range they span: exact within one buffer here,
    because no two stages of a step write different strides of one buffer.
    """
    out = Hazards()
    written: dict[str, list[Range]] = defaultdict(list)
    read: dict[str, list[Range]] = defaultdict(list)
    for i, s in enumerate(stages):
        for a in s.reads:
            b = buffers[a.buffer]
            if b.klass == "input":
                continue
            lo, hi = extent(a, s, b.width)
            me = Range(lo, hi, i, a)
            out.raw += [(w, me) for w in written[a.buffer] if w.lo < hi and lo < w.hi]
            read[a.buffer].append(me)
        for a in s.writes:
            lo, hi = extent(a, s, buffers[a.buffer].width)
            me = Range(lo, hi, i, a)
            out.war += [(r, me) for r in read[a.buffer] if r.lo < hi and lo < r.hi and r.stage != i]
            out.waw += [(w, me) for w in written[a.buffer] if w.lo < hi and lo < w.hi and w.stage != i]
        for a in s.writes:
            lo, hi = extent(a, s, buffers[a.buffer].width)
            read[a.buffer] = _cut(read[a.buffer], lo, hi)  # a later writer meets this write instead
            written[a.buffer] = [*_cut(written[a.buffer], lo, hi), Range(lo, hi, i, a)]
    return out


# -- mechanisms -------------------------------------------------------------------------------------------------------


def own_region(src: Stage, w: Access, dst: Stage, r: Access, sms: int) -> bool:
    """Whether task t of dst, on the SM of task t of src, reads only what that task wrote."""
    same_place = (src.units, src.row_units, src.tasks, src.first_sm % sms, src.assign) == (
        dst.units, dst.row_units, dst.tasks, dst.first_sm % sms, dst.assign)
    same_words = (w.rows, w.base, w.step, w.span, w.first, w.count) == (r.rows, r.base, r.step, r.span, r.first, r.count)
    return same_place and same_words and (w.step > 0 or w.rows == "unit" or src.tasks == 1) and not (w.by or r.by)


def buffer_mechanisms(stages: Sequence[Stage], buffers: dict[str, Buffer], found: Hazards, sync: Sync, sms: int,
                      leaves: frozenset[str]) -> dict[str, str]:
    """The mechanism of the RAW edges of every buffer that has one. Raises PlanError for impossible overrides.

    `leaves` are buffers that vLLM reads after the launch: plain layout.
    """
    problems: list[str] = []
    out: dict[str, str] = {}
    same: dict[str, bool] = {}
    for w, r in found.raw:
        name = w.a.buffer
        ok = own_region(stages[w.stage], w.a, stages[r.stage], r.a, sms)
        same[name] = same.get(name, True) and ok
    hit = dict.fromkeys((glob for glob, _ in sync.overrides), False)
    for name in same:
        b = buffers[name]
        can_tag = b.klass in ("activation", "scratch") and b.dtype in ("bf16", "f32") and name not in leaves
        wanted = sync.mechanism
        for glob, mechanism in sync.overrides:
            if fnmatchcase(name, glob):
                hit[glob] = True
                if mechanism == "tagged" and not can_tag and not any(c in glob for c in "*?["):
                    problems.append(f"sync.overrides.{glob} = tagged: {name} is {b.klass} of {b.dtype}; expected counter "
                                    "(only bf16 or f32 activations that stay inside the step can carry tags)")
                wanted = mechanism
        if sync.mechanism == "grid_barrier" and wanted == "grid_barrier":
            out[name] = "grid_barrier"
        elif b.klass == "mailbox":
            out[name] = "peer_mailbox"
        elif same[name] and b.klass != "state":
            out[name] = "same_sm"
        else:
            out[name] = "tagged" if wanted == "tagged" and can_tag else "counter"
    for glob, seen in hit.items():
        if not seen:
            problems.append(f"sync.overrides.{glob}: no buffer with a reader has such a name{did_you_mean(glob, same)}")
    if problems:
        raise PlanError(problems)
    return out


# -- chains -----------------------------------------------------------------------------------------------------------


class Order:
    """Which nodes are finished before which; grows as edges are added in stage order.

    Node = (stage, part) for packed stages. Sets of nodes are Python ints used as bit sets.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.nodes: list[list[tuple[int, int]]] = []  # per stage: (first, count) of each part; (0, 0) = whole stage
        self.bit: list[int] = []
        n = 0
        for s in stages:
            parts = sorted({(w.first, w.count) for w in s.writes if w.count}) or [(0, 0)]
            self.nodes.append(parts)
            self.bit.append(n)
            n += len(parts)
        self.full = [0] * n
        self.cover = [0] * n

    def of(self, stage: int, a: Access) -> list[int]:
        """Nodes of the stage that make this access."""
        return [self.bit[stage] + k for k, (first, count) in enumerate(self.nodes[stage])
                if not a.count or not count or (first, count) == (a.first, a.count)]

    def add(self, src: list[int], dst: list[int], how: str) -> None:
        """how: full | covering | partial."""
        for d in dst:
            for s in src:
                if how == "full":
                    self.full[d] |= 1 << s | self.full[s] | self.cover[s]
                else:
                    self.full[d] |= self.full[s]
                    if how == "covering":
                        self.cover[d] |= 1 << s | self.cover[s]

    def proven(self, src: list[int], dst: list[int]) -> bool:
        return all(self.full[d] >> s & 1 for d in dst for s in src)


def tagged_strength(w: Range, r: Range, width: int, dst: Stage) -> str:
    """full if each unit of the reader reads all that was written, covering if together they do."""
    lo, hi = extent(r.a, dst, width)
    if not (lo <= w.lo and w.hi <= hi):
        return "partial"
    return "full" if r.a.step == 0 and r.a.rows == "all" and not r.a.count else "covering"


def derive(stages: Sequence[Stage], buffers: dict[str, Buffer], sync: Sync, sms: int,
           leaves: frozenset[str] = frozenset()) -> tuple[tuple[Edge, ...], dict[str, str]]:
    """All edges of a plan, sorted by (dst, src, buffer), and the RAW mechanism of every buffer."""
    found = hazards(stages, buffers)
    mechanism = buffer_mechanisms(stages, buffers, found, sync, sms, leaves)
    fallback = "grid_barrier" if sync.mechanism == "grid_barrier" else "counter"
    order = Order(stages)
    edges: dict[tuple[int, int, str, str], Edge] = {}
    raw_of: dict[int, list[tuple[Range, Range]]] = defaultdict(list)
    old_of: dict[int, list[tuple[str, Range, Range]]] = defaultdict(list)
    for w, r in found.raw:
        raw_of[r.stage].append((w, r))
    for kind, pairs in (("war", found.war), ("waw", found.waw)):
        for old, new in pairs:
            old_of[new.stage].append((kind, old, new))
    for i in range(len(stages)):
        for w, r in raw_of[i]:
            name = w.a.buffer
            m = mechanism[name]
            edges[i, w.stage, name, "raw"] = Edge(w.stage, i, name, "raw", m)
            if m in ("counter", "grid_barrier"):  # waits for all tasks, so for all parts of both ends
                order.add(_all(order, w.stage), _all(order, i), "full")
            elif m == "same_sm":
                order.add(order.of(w.stage, w.a), order.of(i, r.a), "covering")
            else:
                order.add(order.of(w.stage, w.a), order.of(i, r.a), tagged_strength(w, r, buffers[name].width, stages[i]))
        for kind, old, new in old_of[i]:
            if not order.proven(order.of(old.stage, old.a), order.of(i, new.a)):
                edges[i, old.stage, new.a.buffer, kind] = Edge(old.stage, i, new.a.buffer, kind, fallback)
                order.add(_all(order, old.stage), _all(order, i), "full")
    return tuple(edges[k] for k in sorted(edges)), mechanism


def _all(order: Order, stage: int) -> list[int]:
    return [order.bit[stage] + k for k in range(len(order.nodes[stage]))]
