"""What a task on one SM knows of the tasks on all others: the vector clocks behind the ordering proof.

Two clocks, because two different things can be known. Both are [SM, SM] arrays of stage indices: row m says what a
task on SM m knows of the tasks on every SM.

* `visible[m, m']` = s: everything that SM m' wrote in stages <= s is visible to m. Only release/acquire makes it grow:
  a `counter` or `grid_barrier` edge (all tasks of the source stage arrive after a CTA barrier, so an arrival covers
  the SM's earlier tasks too; transitive), and `same_sm` (a CTA barrier) for the own SM.
* `done[m, m']` = s: SM m' has finished all reads of its stages <= s before any store of the task at hand. The edges
  above make it grow, and tagged words too: whoever polls a tag has seen a store, which comes after (1) all tasks that
  the writing SM ran before, (2) whatever that task knew before any of its stores, (3) if all words of all its units are
  polled, the whole task. So `done` = stage - 1, or (3) = stage. What the tasks of one stage hear together (heads hear
  their columns of a projection) is known to whoever hears that whole stage: `Clocks.together`. A tagged word
  makes no *other* memory visible: `visible` never grows by it.

A step may have fewer rows than the class: units of the last rows are then empty, poll nothing and tell nothing, and a
routed stage may have no units at all on some SM. The clocks claim only what holds for every number of rows (`surely`).
What would hold for the rows that exist is kept apart, stage by stage: `over`, all reads that a stage has made are over.

Which polls come before which stores of a unit depends on the body: where x is staged in shared memory, all of them
(clocks take the maximum over the writers heard); where a thread polls and stores its own columns, only its own, so of
the writers heard by the unit only what all of them knew counts (the minimum).
"""

from __future__ import annotations

from bisect import insort
from functools import reduce
from operator import and_

import numpy as np

from optkit.plan.types import Edge, Plan, Stage
from optkit.verify import regions as R

ACQUIRE = ("counter", "grid_barrier")
BY_VALUE = ("tagged", "peer_mailbox")


class Clocks:
    """The vector clocks of one walk over the stages."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        n = plan.sms
        self.visible = np.full((n, n), -1, np.int32)
        self.done = np.full((n, n), -1, np.int32)
        self.sms = [np.array([s.sm_of(t, n) for t in range(s.tasks)]) for s in plan.stages]
        self.surely = [_surely(s) for s in plan.stages]  # [task]: has work however few rows the step has
        self.released: list[np.ndarray] = []  # [SM]: what all arrivals of a stage make visible
        self.arrived: list[np.ndarray] = []  # [SM]: the same for `done`
        self.spoken: list[np.ndarray] = []  # [SM]: for `done`, what the stage's words tell if all are polled
        self.before = np.empty((0, n), np.int32)  # [task, SM] of the stage at hand: known before any of its stores
        self.before_store: dict[int, np.ndarray] = {}  # the same, kept while a later stage hears this one's tags
        self.at_end: dict[int, np.ndarray] = {}  # [task, SM]: known at the end of the task
        self.together: dict[int, dict[int, np.ndarray]] = {}  # per stage: units of older stages heard in part
        self.over: list[int] = []  # bit set of the stages over before any store of a stage
        self.over_after: list[int] = []  # over when the whole stage is
        self.over_on = [0] * n  # over for whatever the SM stores from now on
        self.last_hearer: dict[int, int] = {}
        for e in plan.edges:
            if e.mechanism in BY_VALUE:
                self.last_hearer[e.src] = max(e.dst, self.last_hearer.get(e.src, -1))

    def enter(self, i: int, waits: tuple[Edge, ...], tagged: dict[int, R.Heard]) -> None:
        """Apply the edges into stage i."""
        sm, surely = self.sms[i], self.surely[i]
        over = reduce(and_, (self.over_on[m] for m in sm))
        for e in waits:
            if e.mechanism in ACQUIRE:
                self.visible[sm] = np.maximum(self.visible[sm], self.released[e.src])
                self.done[sm] = np.maximum(self.done[sm], self.arrived[e.src])
                over |= self.over_after[e.src] | 1 << e.src
            elif e.mechanism == "same_sm":
                own = np.intersect1d(sm, self.sms[e.src])
                self.visible[own, own] = np.maximum(self.visible[own, own], e.src)
        self.done[sm, sm] = i - 1
        waited, before, end = over, self.done[sm], self.done[sm]
        for src, h in tagged.items():
            lower = np.maximum(
                self._told(h.every, self.before_store[src], src, False),
                self._told(h.every_whole, self.at_end[src], src, True),
            )
            for told in h.each:
                lower = np.maximum(lower, self._least(told, self.before_store[src], src))
            before = np.maximum(before, lower)
            end = np.maximum(end, np.maximum(lower, self._told(h.whole, self.at_end[src], src, True)))
            over |= self.over[src] if h.every.all or h.each else 0
            over |= self.over_after[src] | 1 << src if h.every_whole.all else 0
        self.before = before
        if i in self.last_hearer:
            self.before_store[i], self.at_end[i] = before, end
        self.done[sm[surely]] = end[surely]  # a task without rows polls nothing
        together, over_after = self._hear_together(i, tagged)
        self.over.append(over)
        self.over_after.append(over | over_after)
        for t, m in enumerate(sm):
            self.over_on[m] |= over if surely[t] else waited
        for src in [x for x in tagged if self.last_hearer[x] <= i]:
            del self.before_store[src], self.at_end[src]
        self._publish(i, np.maximum(together, end[surely].max(axis=0, initial=-1)))

    def _publish(self, i: int, heard: np.ndarray) -> None:
        """What stage i passes on: through arrivals (every task's) and through its words (those that surely exist)."""
        sm = self.sms[i]
        released = self.visible[sm].max(axis=0, initial=-1)
        arrived = np.maximum(heard, self.done[sm].max(axis=0, initial=-1))
        spoken = heard.copy()
        released[sm] = arrived[sm] = i
        spoken[sm[self.surely[i]]] = i
        self.released.append(released)
        self.arrived.append(arrived)
        self.spoken.append(spoken)

    def _hear_together(self, i: int, tagged: dict[int, R.Heard]) -> tuple[np.ndarray, int]:
        """What all tasks of stage i know together: clock [SM] and stages over.

        Keeps the units of incompletely heard stages for the next stage that hears all of this one.
        """
        known: dict[int, np.ndarray] = {src: h.units.copy() for src, h in tagged.items()}
        out, over = np.full(self.plan.sms, -1, np.int32), 0
        todo = sorted(known)
        while todo:
            src = todo.pop()
            heard = self.surely[src].copy()  # tasks all of whose units are heard
            np.logical_and.at(heard, R.task_of_unit(R.shape_of(self.plan.stages[src])), known[src])
            sm = self.sms[src][heard]
            out[sm] = np.maximum(out[sm], src)
            if known[src].all():
                out = np.maximum(out, self.spoken[src])
                over |= self.over_after[src] | 1 << src
                for older, units in self.together.get(src, {}).items():
                    if older in known:
                        known[older] |= units
                    else:
                        known[older] = units.copy()
                        insort(todo, older)
        self.together[i] = {s: u for s, u in known.items() if not u.all() and (out[self.sms[s]] < s).any()}
        for old in [x for x in self.together if self.last_hearer.get(x, -1) <= i and x != i]:
            del self.together[old]
        return out, over

    def _told(self, told: R.Told, known: np.ndarray, src: int, whole: bool) -> np.ndarray:
        """[reader tasks, SM]: maximum of `known` over the writer tasks that are heard, and what their SMs finished."""
        own, sm = src if whole else src - 1, self.sms[src]
        rows = np.full((len(told.patterns), self.plan.sms), -1, np.int32)
        for k, pattern in enumerate(told.patterns):
            if pattern.all():
                rows[k] = self.spoken[src] if whole else known.max(axis=0, initial=-1)
            elif pattern.any():
                rows[k] = known[pattern].max(axis=0)
            rows[k, sm[pattern]] = np.maximum(rows[k, sm[pattern]], own)
        return rows[told.which]

    def _least(self, told: R.Told, known: np.ndarray, src: int) -> np.ndarray:
        """[reader tasks, SM]: what every one of the heard writer tasks knew before its stores."""
        known = known.copy()
        task, sm = np.arange(len(known)), self.sms[src]
        known[task, sm] = np.maximum(known[task, sm], src - 1)
        rows = np.full((len(told.patterns), self.plan.sms), -1, np.int32)
        for k, pattern in enumerate(told.patterns):
            if pattern.any():
                rows[k] = known[pattern].min(axis=0)
        return rows[told.which]


def _surely(stage: Stage) -> R.Bool:
    """Tasks with a unit that exists in every step: one of the first row or of all rows; none where work is routed."""
    out = np.zeros(stage.tasks, bool)
    shape = R.shape_of(stage)
    if stage.assign != "cyclic":
        out[R.task_of_unit(shape)[R.row_of_unit(shape) <= 0]] = True
    return out
