"""Ordering of every read and write of a Plan, task by task, with the vector clocks of clocks.py.

Rules. RAW on a plain buffer: `visible`. RAW through a tagged edge: by value, for exactly the words that the edge's
source stage writes; never for state; a tag of another stage is no match, so older writers need only their WAW.
WAR: `done`, since a read that has returned cannot see a later store. WAW: `visible`, or every overwritten word was read
by a reader that must see it, so the store had reached the point of coherence, and whose read is ordered before the
overwriting store. `program`: reader and writer unit are the same unit of the same task shape, so that one thread owns
the words.

The producer warp runs apart from its consumers: it reads the index of routed tiles, and if none of its SM's units exist
no consumer waits for it. Such an index read counts as done only when the SM has finished a later stage whose tiles come
through the same FIFO ring (`_Use.due`).

Assumed of the kernel: the consumer warps of a CTA meet between two tasks, every value that a task loads is used before
its last store, and loads of activations are strong at gpu scope, so that they return what has reached L2 (the audit
checks the loads).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from optkit.plan.types import Access, Edge, Plan, Stage
from optkit.verify import regions as R
from optkit.verify.clocks import BY_VALUE, Clocks

READ_ONLY = ("weight", "table", "input")
STAGED = ("gemv", "expert_gate_up", "expert_down")
"""Bodies whose reads of whole buffers go through shared memory, with a CTA barrier before the first store."""


@dataclass(frozen=True)
class Violation:
    """Two accesses that nothing orders. Stages by index; tasks are examples."""

    kind: str  # raw | war | waw | within
    buffer: str
    first: int
    first_task: int
    then: int
    then_task: int
    text: str


@dataclass
class _Use:
    """One stage's accesses to one buffer."""

    stage: int
    foot: R.Footprint  # rows as declared
    flat: R.Footprint  # as compared with other stages: rows of vLLM's state cannot be told apart statically
    due: np.ndarray | int  # stage that must be done for this use to be over, per task
    polls: bool  # as a reader: every word is read by some unit that exists
    observed: list[R.Footprint] = field(default_factory=list)  # ordered reads of these words


@dataclass(frozen=True)
class MailboxEvent:
    """A stage that writes ("w") or reads ("r") a mailbox; `known`: stages all of whose reads of any mailbox are over
    before any store of a writing stage."""

    stage: int
    kind: str
    mailbox: str
    known: frozenset[int]


@dataclass
class OrderResult:
    """All violations, how many pairs of accesses were compared, and the exchanges in stage order."""

    violations: list[Violation]
    unwritten: list[str]
    pairs: int
    exchanges: list[MailboxEvent]


def check_order(plan: Plan) -> OrderResult:
    """Walk the stages in global order and compare each access with the live accesses before it."""
    return _Walk(plan).run()


class _Walk:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.clocks = Clocks(plan)
        self.writers: dict[str, list[_Use]] = defaultdict(list)
        self.readers: dict[str, list[_Use]] = defaultdict(list)
        self.due = _index_reads_due(plan, self.clocks.sms)
        self.partition = {x.value for x in plan.index_sets if "partition" in x.facts}
        self.open_reads: dict[str, list[int]] = {}
        self.out = OrderResult([], [], 0, [])

    def run(self) -> OrderResult:
        plan = self.plan
        for i, stage in enumerate(plan.stages):
            waits = tuple(e for e in plan.waits[i] if e.src < i)
            reads, writes = _by_buffer(stage.reads), _by_buffer(stage.writes)
            uses = {b: self._use(i, b, acc) for b, acc in reads.items() if b in plan.buffer}
            made = {b: self._use(i, b, acc) for b, acc in writes.items() if b in plan.buffer}
            self.clocks.enter(i, waits, self._tagged(i, waits, uses))
            for b, use in uses.items():
                self._read(b, use, waits)
            for b, use in made.items():
                self._write(b, use)
            for b, use in uses.items():
                self.readers[b].append(use)
            self._exchanges(i, uses, made)
        return self.out

    def _exchanges(self, i: int, uses: dict[str, _Use], made: dict[str, _Use]) -> None:
        """Note the mailboxes that stage i touches; only reads since a mailbox's last write are still of interest."""
        boxes = self.plan.buffer
        for b in (b for b in uses if boxes[b].klass == "mailbox"):
            self.out.exchanges.append(MailboxEvent(i, "r", b, frozenset()))
            self.open_reads.setdefault(b, []).append(i)
        sent = [b for b in made if boxes[b].klass == "mailbox"]
        if sent:
            over = (r for b, reads in self.open_reads.items() for r in reads if r < i)
            known = frozenset(
                r for r in over if self._is_over(r, i) or bool((self.clocks.before[:, self.clocks.sms[r]] >= r).all())
            )
            for b in sent:
                self.out.exchanges.append(MailboxEvent(i, "w", b, known))
                self.open_reads[b] = []

    def _use(self, i: int, buffer: str, accesses: tuple[Access, ...]) -> _Use:
        b = self.plan.buffer[buffer]
        stage = self.plan.stages[i]
        return _Use(
            i,
            R.footprint(stage, accesses, b.width),
            R.footprint(stage, accesses, b.width, rows_matter=b.klass != "state"),
            self.due.get((i, buffer), i),
            self._all_polled(stage, accesses),
        )

    def _all_polled(self, stage: Stage, accesses: tuple[Access, ...]) -> bool:
        """Units of a routed stage exist for every row if its index is a partition of the rows' choices."""
        if any(a.by for a in accesses):
            return False
        if stage.assign != "cyclic":
            return True
        return {s.index for s in stage.streams} <= self.partition and all(a.step == 0 for a in accesses)

    def _tagged(self, i: int, waits: tuple[Edge, ...], uses: dict[str, _Use]) -> dict[int, R.Heard]:
        pairs: dict[int, dict[str, R.Polled]] = defaultdict(dict)
        for e in waits:
            if e.mechanism in BY_VALUE and e.kind == "raw" and e.buffer in uses:
                w = next((w for w in self.writers[e.buffer] if w.stage == e.src), None)
                if w is not None:
                    reader = uses[e.buffer].foot
                    staged = self.plan.stages[i].body in STAGED and all(
                        a.step == 0 and a.rows == "all" for a in reader.accesses
                    )
                    pairs[e.src][e.buffer] = R.Polled(w.foot, reader, staged)
        single = len(self._besides(i, frozenset())) == 1
        return {src: R.heard(tuple(p.values()), self._besides(src, frozenset(p)), single) for src, p in pairs.items()}

    def _besides(self, src: int, heard: frozenset[str]) -> tuple[R.Footprint, ...]:
        """What a stage writes beside the polled buffers; state that it updates in place follows the same reads."""
        stage = self.plan.stages[src]
        own_state = {
            a.buffer
            for a in stage.reads
            if a.buffer in self.plan.buffer and self.plan.buffer[a.buffer].klass == "state"
        }
        return tuple(
            R.footprint(stage, acc, self.plan.buffer[b].width)
            for b, acc in _by_buffer(stage.writes).items()
            if b in self.plan.buffer and b not in heard and b not in own_state
        )

    def _read(self, name: str, use: _Use, waits: tuple[Edge, ...]) -> None:
        buffer = self.plan.buffer[name]
        if buffer.klass in READ_ONLY:
            return
        writers = self.writers[name]
        if buffer.klass != "state":
            gap = R.missing(_distinct(w.flat for w in writers), use.flat)
            if gap:
                self.out.unwritten.append(
                    f"{self.plan.stages[use.stage].name} reads {gap} columns of {name} that no earlier stage wrote"
                )
        fed = {e.src for e in waits if e.buffer == name and e.kind == "raw"}
        for e in waits:
            if e.buffer == name and e.kind == "raw" and e.src not in {w.stage for w in writers}:
                self._stale(e)
        if fed and buffer.klass != "state":  # a word of the buffer's previous value has been written too, long ago
            gap = R.missing(_distinct(w.flat for w in writers if w.stage in fed), use.flat)
            if gap:
                self.out.unwritten.append(
                    f"{self.plan.stages[use.stage].name} reads {gap} columns of {name} that none of "
                    f"{', '.join(self.plan.stages[i].name for i in sorted(fed))} writes: an older value's"
                )
        polled: tuple[R.Footprint, ...] = ()
        for w in reversed(writers):
            self.out.pairs += 1
            mech = {e.mechanism for e in waits if e.src == w.stage and e.buffer == name and e.kind == "raw"}
            by_value = bool(mech & set(BY_VALUE))
            if by_value and buffer.klass != "state":
                polled = (*polled, w.flat)
                w.observed += [use.flat] * use.polls
                continue
            if polled and not R.missing(_distinct(polled), use.flat):
                continue
            if "program" in mech and R.same_units(w.foot, use.foot) and self._same_place(w.stage, use.stage):
                continue
            bad = self._unordered(w, use, self.clocks.visible[self.clocks.sms[use.stage]])
            if bad:
                why = (
                    "a tagged edge carries no release: state needs counter or grid_barrier"
                    if by_value
                    else f"no edge makes it visible{self._hint(mech)}"
                )
                self._report("raw", name, w.stage, use.stage, bad, why)
            else:
                w.observed += [use.flat] * use.polls

    def _write(self, name: str, use: _Use) -> None:
        i, buffer = use.stage, self.plan.buffer[name]
        if buffer.klass in READ_ONLY:
            self.out.violations.append(
                Violation(
                    "waw",
                    name,
                    i,
                    0,
                    i,
                    0,
                    f"{self.plan.stages[i].name} writes {name}, "
                    f"which is of class {buffer.klass}: never written in a launch",
                )
            )
        kept_r, kept_w = [], []
        full = use.flat.exact and buffer.klass != "state"
        for r in self.readers[name]:
            self.out.pairs += 1
            lagging = isinstance(r.due, np.ndarray)  # read by the producer warp, which no word tells of
            bad = None if self._is_over(r.stage, i) and not lagging else self._unordered(r, use, self.clocks.before)
            if bad:
                self._report("war", name, r.stage, i, bad, "the slot is reused while it may still be read")
            if not (full and self._replaced(r, use, name)):
                kept_r.append(r)
        for w in self.writers[name]:
            self.out.pairs += 1
            if not self._overwritten_after_reads(w, use):
                bad = self._unordered(w, use, self.clocks.visible[self.clocks.sms[i]])
                if bad:
                    self._report(
                        "waw", name, w.stage, i, bad, "neither release/acquire nor reads of every word lie between"
                    )
            if not (full and self._replaced(w, use, name)):
                kept_w.append(w)
        self.readers[name], self.writers[name] = kept_r, [*kept_w, use]

    def _unordered(self, first: _Use, then: _Use, clock: np.ndarray) -> tuple[int, int] | None:
        """A pair of tasks that share a word and are not ordered: clock[task of then, SM of first] < stage of first."""
        late = clock[:, self.clocks.sms[first.stage]] < first.due  # [tasks then, tasks first]
        if not late.any():
            return None
        hits = np.argwhere(late.T & R.overlap(first.flat, then.flat))
        return (int(hits[0][0]), int(hits[0][1])) if len(hits) else None

    def _overwritten_after_reads(self, w: _Use, then: _Use) -> bool:
        """Every word of w was read back by loads that must see it; that they precede `then` is their own WAR."""
        return bool(w.observed) and R.missing(_distinct(w.observed), w.flat) == 0

    def _replaced(self, old: _Use, new: _Use, name: str) -> bool:
        """Every word of `old` has been overwritten since: by `new`, or by writes already ordered after `old`."""
        later = (w.flat for w in self.writers[name] if w.stage > old.stage and w.flat.exact)
        return R.missing(_distinct((*later, new.flat)), old.flat) == 0

    def _is_over(self, stage: int, i: int) -> bool:
        return bool(self.clocks.over[i] >> stage & 1)

    def _same_place(self, a: int, b: int) -> bool:
        return np.array_equal(self.clocks.sms[a], self.clocks.sms[b])

    def _stale(self, e: Edge) -> None:
        """The words an edge hands over are not there: two values share the buffer, or the source never wrote it."""
        src, dst = self.plan.stages[e.src], self.plan.stages[e.dst]
        now = ", ".join(self.plan.stages[w.stage].name for w in self.writers[e.buffer]) or "nobody"
        self.out.violations.append(
            Violation(
                "raw",
                e.buffer,
                e.src,
                0,
                e.dst,
                0,
                f"{e.buffer}: {dst.name} waits for the "
                f"words of {src.name}, but when it reads, the buffer holds those of {now}",
            )
        )

    def _hint(self, mech: set[str]) -> str:
        return f" ({', '.join(sorted(mech))} does not reach this pair)" if mech else ""

    def _report(self, kind: str, buffer: str, first: int, then: int, tasks: tuple[int, int], why: str) -> None:
        a, b = self.plan.stages[first], self.plan.stages[then]
        verb = {"raw": ("write", "read"), "war": ("read", "write"), "waw": ("write", "write")}[kind]
        sms = self.plan.sms
        self.out.violations.append(
            Violation(
                kind,
                buffer,
                first,
                tasks[0],
                then,
                tasks[1],
                f"{buffer}: {verb[0]} by {a.name} task {tasks[0]} (SM {a.sm_of(tasks[0], sms)}) is not ordered before "
                f"the {verb[1]} by {b.name} task {tasks[1]} (SM {b.sm_of(tasks[1], sms)}); "
                f"missing edge {a.name} -> {b.name} ({kind} on {buffer}): {why}",
            )
        )


def _index_reads_due(plan: Plan, sms: list[np.ndarray]) -> dict[tuple[int, str], np.ndarray]:
    """Stage by whose end the producer warp has read the index of a routed stage, per (stage, buffer): [tasks]."""
    never = np.iinfo(np.int32).max
    following = np.full(plan.sms, never, np.int64)
    out: dict[tuple[int, str], np.ndarray] = {}
    for i in range(len(plan.stages) - 1, -1, -1):
        stage = plan.stages[i]
        for index in {s.index for s in stage.streams if s.index}:
            out[i, index] = following[sms[i]].copy()
        static = [s for s in stage.streams if not s.index]
        if static and stage.assign != "cyclic" and stage.row_units <= 1:
            units = np.zeros(stage.units, bool)
            for s in static:
                units[s.first : s.first + s.count if s.count else stage.units] = True
            pulls = np.unique(R.task_of_unit(R.shape_of(stage))[units])
            following[sms[i][pulls]] = i
    return out


def _distinct(feet: Iterable[R.Footprint]) -> tuple[R.Footprint, ...]:
    """Equal layers have equal footprints: asked once."""
    return tuple(dict.fromkeys(feet))


def _by_buffer(accesses: tuple[Access, ...]) -> dict[str, tuple[Access, ...]]:
    out: dict[str, list[Access]] = defaultdict(list)
    for a in accesses:
        out[a.buffer].append(a)
    return {b: tuple(v) for b, v in out.items()}


def check_within(plan: Plan) -> list[str]:
    """Tasks of one stage run at the same time: what one writes no other may read or write, unless a fact says so."""
    out: list[str] = []
    injective = {x.value for x in plan.index_sets if "injective" in x.facts}
    partition = {x.value for x in plan.index_sets if "partition" in x.facts}
    for stage in plan.stages:
        reads, writes = _by_buffer(stage.reads), _by_buffer(stage.writes)
        for name, made in writes.items():
            if name not in plan.buffer:
                continue
            b = plan.buffer[name]
            if b.klass == "state" and any(a.rows == "unit" for a in made) and stage.row_units > 1:
                keys = [a.buffer for a in stage.reads if a.buffer in ("slot_mapping", "state_slot")]
                if not any(k in injective for k in keys):
                    out.append(
                        f"{stage.name} writes rows of {name} by {keys or 'no index'}: no index set states that "
                        "different token rows have different slots (injective)"
                    )
            for foot_r, foot_w, verb in _pairs_within(stage, reads.get(name, ()), made, b.width):
                hit = R.clash(foot_w, foot_r)
                if hit and not (any(a.by in partition for a in made if a.by) and verb == "write"):
                    out.append(
                        f"{name}: {stage.name} task {hit[0]} writes words that task {hit[1]} of the same stage "
                        f"may {verb}"
                    )
    return out


def _pairs_within(
    stage: Stage, read: tuple[Access, ...], made: tuple[Access, ...], width: int
) -> list[tuple[R.Footprint, R.Footprint, str]]:
    w = R.footprint(stage, made, width)
    out = [(w, w, "write")]
    if read:
        out.append((R.footprint(stage, read, width), w, "read"))
    return out
