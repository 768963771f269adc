"""Edges: derived from overlapping accesses, never written by hand.

RAW edges come from every read and the writes it sees. WAR and WAW edges come from every write over something older;
they are listed only where the edges so far do not prove the order already.

WAR is proven when all old reads are over before the new store; WAW when the old store is visible, or when every old
word was polled by a reader (then its coherence order is fixed) whose own WAR is proven. The proof is `plan.clocks`;
a tagged wait orders nothing but its own words for RAW.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from optkit.plan.choices import Sync
from optkit.plan.clocks import Clocks
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
        dst.units,
        dst.row_units,
        dst.tasks,
        dst.first_sm % sms,
        dst.assign,
    )
    same_words = (w.rows, w.base, w.step, w.span, w.first, w.count) == (
        r.rows,
        r.base,
        r.step,
        r.span,
        r.first,
        r.count,
    )
    return same_place and same_words and (w.step > 0 or w.rows == "unit" or src.tasks == 1) and not (w.by or r.by)


def buffer_mechanisms(
    stages: Sequence[Stage],
    buffers: dict[str, Buffer],
    found: Hazards,
    sync: Sync,
    sms: int,
    leaves: frozenset[str],
) -> dict[str, str]:
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
    whole_words = tagged_words(stages, buffers)
    for name in same:
        b = buffers[name]
        can_tag = b.klass in ("activation", "scratch") and name in whole_words and name not in leaves
        wanted = sync.mechanism
        for glob, mechanism in reversed(sync.overrides):  # the first match counts
            if fnmatchcase(name, glob):
                hit[glob] = True
                if mechanism == "tagged" and not can_tag and not any(c in glob for c in "*?["):
                    problems.append(
                        f"sync.overrides.{glob} = tagged: {name} is {b.klass} of {b.dtype}; expected counter "
                        "(tags need bf16 or f32 inside the step, written in whole 8-byte words at fixed columns)"
                    )
                wanted = mechanism
        if b.klass == "mailbox":  # a peer passes no barrier of this grid, and device code writes mailboxes in tagged words
            out[name] = "peer_mailbox"
        elif wanted == "grid_barrier":
            out[name] = "grid_barrier"
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


def tagged_words(stages: Sequence[Stage], buffers: dict[str, Buffer]) -> frozenset[str]:
    """Buffers that can be written in whole tagged words (8 payload bytes), at columns known from the Plan."""
    per_word = {"bf16": 4, "f32": 2}
    able = {n for n, b in buffers.items() if b.dtype in per_word and b.width % per_word[b.dtype] == 0}
    for s in stages:
        for a in s.writes:
            if a.by:  # no reader could know from the Plan alone which words will come
                able.discard(a.buffer)
            if a.buffer in able and any(x % per_word[buffers[a.buffer].dtype] for x in (a.base, a.step, a.span)):
                able.discard(a.buffer)
    return frozenset(able)


# -- all edges --------------------------------------------------------------------------------------------------------


def polled(
    found: Hazards, stages: Sequence[Stage], buffers: dict[str, Buffer]
) -> dict[tuple[int, Access], list[Range]]:
    """For every write, the ranges that readers certainly poll (routed readers may have nothing to read)."""
    out: dict[tuple[int, Access], list[Range]] = defaultdict(list)
    for w, r in found.raw:
        s = stages[r.stage]
        if not r.a.by and s.assign != "cyclic":
            out[w.stage, w.a].append(r)
    return out


def derive(
    stages: Sequence[Stage],
    buffers: dict[str, Buffer],
    sync: Sync,
    sms: int,
    leaves: frozenset[str] = frozenset(),
) -> tuple[tuple[Edge, ...], dict[str, str]]:
    """All edges of a plan, sorted by (dst, src, buffer), and the RAW mechanism of every buffer."""
    found = hazards(stages, buffers)
    mechanism = buffer_mechanisms(stages, buffers, found, sync, sms, leaves)
    fallback = "grid_barrier" if sync.mechanism == "grid_barrier" else "counter"
    edges: dict[tuple[int, int, str, str], Edge] = {}
    raw_of: dict[int, list[tuple[Range, Range]]] = defaultdict(list)
    war_of: dict[int, list[tuple[Range, Range]]] = defaultdict(list)
    waw_of: dict[int, list[tuple[Range, Range]]] = defaultdict(list)
    heard_last: dict[int, int] = {}
    for w, r in found.raw:
        raw_of[r.stage].append((w, r))
        heard_last[w.stage] = max(heard_last.get(w.stage, 0), r.stage)
    for old, new in found.war:
        war_of[new.stage].append((old, new))
    for old, new in found.waw:
        waw_of[new.stage].append((old, new))
    polls = polled(found, stages, buffers)
    clocks = Clocks(stages, sms, heard_last)

    def add(src: int, dst: int, buffer: str, kind: str, how: str) -> None:
        edges[dst, src, buffer, kind] = Edge(src, dst, buffer, kind, how)

    for i in range(len(stages)):
        clocks.enter(i)
        for w, _ in raw_of[i]:
            how = mechanism[w.a.buffer]
            add(w.stage, i, w.a.buffer, "raw", how)
            if how in ("counter", "grid_barrier"):
                clocks.acquire(w.stage)
            elif how == "same_sm":
                clocks.own(w.stage)
        for w, r in raw_of[i]:  # after all acquires: what a word's writer may know of is then complete
            if mechanism[w.a.buffer] in ("tagged", "peer_mailbox"):
                clocks.hear(w.stage, w.a, r.a)
        for old, new in war_of[i]:
            if not clocks.has_read(old.stage):
                add(old.stage, i, new.a.buffer, "war", fallback)
                clocks.acquire(old.stage)
        for old, new in waw_of[i]:
            name = new.a.buffer
            by_value = mechanism.get(name) in ("tagged", "peer_mailbox") and _covered(
                old, polls[old.stage, old.a], stages, buffers
            )
            if not by_value and not clocks.sees(old.stage):
                add(old.stage, i, name, "waw", fallback)
                clocks.acquire(old.stage)
        clocks.leave()
    return tuple(edges[k] for k in sorted(edges)), mechanism


def _covered(old: Range, readers: list[Range], stages: Sequence[Stage], buffers: dict[str, Buffer]) -> bool:
    """Whether readers together poll every word of a write (each of them has its own WAR proof)."""
    width = buffers[old.a.buffer].width
    lo, hi = extent(old.a, stages[old.stage], width)
    for r in sorted(readers, key=lambda r: r.lo):
        if r.lo <= lo:
            lo = max(lo, r.hi)
    return lo >= hi
