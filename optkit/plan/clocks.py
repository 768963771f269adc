"""What the tasks of a stage know when they store: the planner's proof that reuse of a buffer is already ordered.

Two arrays [SM, SM] of stage indices, one row per SM. SM m knows that everything SM m' did up to stage `done[m, m']`
has finished reading, and that its stores up to `visible[m, m']` are visible to m. One index per pair is enough because
every SM runs its tasks in stage order.

* A counter edge (or grid barrier) waits for all tasks of the source, and an arrival comes after all that its SM did
  before: both arrays grow, also by what the source tasks knew.
* `same_sm` makes the SM's own earlier stores visible.
* A tagged word proves only that the loads before the store of that word have returned: `done` grows. It is counted only
  where every unit of the reader polls every word of the access, and no unit of either side may be empty (routed units,
  rows beyond the run-time count). If these are all words the source stage writes, its tasks are over; otherwise only
  what their SMs did before is.

Conservative on purpose: what it cannot see costs one counter edge that has long been satisfied when it is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from optkit.plan.types import Access, Stage

Array = npt.NDArray[np.int32]


def may_be_empty(stage: Stage) -> bool:
    """Whether some unit may have nothing to do at run time."""
    return stage.row_units > 1 or stage.assign == "cyclic" or any(s.index for s in stage.streams)


class Clocks:
    """Walks the stages once, in order: `enter`, any number of `acquire` and `hear`, questions, `leave`."""

    def __init__(self, stages: Sequence[Stage], sms: int, heard_last: dict[int, int]) -> None:
        """`heard_last`: for every stage whose tags are polled, the last stage that polls them."""
        self.stages = stages
        self.visible: Array = np.full((sms, sms), -1, np.int32)
        self.done: Array = np.full((sms, sms), -1, np.int32)
        self.sms = [(s.first_sm + np.arange(s.tasks)) % sms for s in stages]
        self.released: list[Array] = []
        self.arrived: list[Array] = []
        self.heard_last = heard_last
        self.kept: dict[int, Array] = {}
        self.at = -1
        self.known: Array = self.done[:0]  # [task, SM]: `done` of the stage at hand, before any of its stores

    def enter(self, stage: int) -> None:
        self.at = stage
        sm = self.sms[stage]
        self.done[sm, sm] = stage - 1
        self.known = self.done[sm]

    def acquire(self, src: int) -> None:
        """All tasks of `src` have arrived."""
        sm = self.sms[self.at]
        self.visible[sm] = np.maximum(self.visible[sm], self.released[src])
        self.known = np.maximum(self.known, self.arrived[src])

    def own(self, src: int) -> None:
        """A CTA barrier between the task of `src` and this one on every common SM."""
        both = np.intersect1d(self.sms[self.at], self.sms[src])
        self.visible[both, both] = np.maximum(self.visible[both, both], src)

    def hear(self, src: int, write: Access, read: Access) -> None:
        """The tasks poll tagged words of `src`."""
        s, me = self.stages[src], self.stages[self.at]
        if (
            read.step
            or read.span
            or read.base
            or read.count
            or read.rows != "all"
            or write.by
            or may_be_empty(s)
            or may_be_empty(me)
        ):
            return
        tasks = np.arange(s.tasks)
        if write.count:
            tasks = np.array([t for t in range(s.tasks) if any(write.applies(u) for u in s.units_of(t))])
        whole = not write.count and len({w.buffer for w in s.writes}) == 1
        told = self.kept[src][tasks].max(axis=0)
        sm = self.sms[src][tasks]
        told[sm] = np.maximum(told[sm], src if whole else src - 1)
        self.known = np.maximum(self.known, told)

    def has_read(self, stage: int) -> bool:
        """Whether all reads of `stage` are over before any store of the stage at hand."""
        return bool((self.known[:, self.sms[stage]] >= stage).all())

    def sees(self, stage: int) -> bool:
        """Whether all stores of `stage` are visible to the stage at hand."""
        return bool((self.visible[np.ix_(self.sms[self.at], self.sms[stage])] >= stage).all())

    def leave(self) -> None:
        i, sm = self.at, self.sms[self.at]
        self.done[sm] = self.known
        released, arrived = self.visible[sm].max(axis=0), self.known.max(axis=0)
        released[sm] = arrived[sm] = i
        self.released.append(released)
        self.arrived.append(arrived)
        if i in self.heard_last:
            self.kept[i] = self.known
        for src in [k for k in self.kept if self.heard_last[k] <= i]:
            del self.kept[src]
