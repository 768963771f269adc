"""Task orders that the Plan's edges and the per-SM program order allow, chosen to hurt.

An SM runs its tasks in stage order and blocks at the first one whose waits are not satisfied, exactly as the
persistent kernel does. `counter` waits for every task of the source stage; so does `grid_barrier` here, which really
waits for more: a plan must be right without that. `tagged` and `peer_mailbox` wait only for the tasks that write words
the reader reads (of active rows); `same_sm` and `program` for nothing: program order alone must do, and the tag checks
of `memory` see when it does not.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from optkit.execute.memory import ExecutionError, memo, touched
from optkit.plan.types import Edge, Plan

POLICIES = ("inverted", "greedy")
"""Adversarial policies: `inverted` runs the latest ready stage first, `greedy` lets one SM run as far as it can before
any other moves, one task at a time. `starve:N` runs tasks of stage N only when nothing else can run."""
STARVED = 0.3
"""Share of stages that a random order with an odd seed runs only when nothing else can run: uniform choices alone rarely
let one task fall far behind all others."""
COMPLETE = ("counter", "grid_barrier")
ALONE = 0.25
"""Share of picks of a random order that run one task alone; the others take a random part of the ready tasks of the same
stage along, back to back in one call (a tiny K3 step has 6936 tasks)."""


@dataclass(frozen=True)
class Schedule:
    """A task order written down as decisions, so that a failure can be repeated by hand and made smaller.

    Without decisions the earliest stage that can run goes next, which is the order in which a missing edge never shows;
    every decision is one departure from it, and fewer decisions are a simpler order.

    held: (stage, task) that run only when nothing else can; of several that is the case for, the first named goes first.
    picks: for the first len(picks) turns, which of the tasks that can run goes next, alone; tasks are counted by stage
        and SM from 0, modulo their number.
    """

    held: tuple[tuple[int, int], ...] = ()
    picks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.held) + len(self.picks)

    def describe(self, plan: Plan) -> str:
        """The decisions in words, with stage names."""
        words = [f"hold task {t} of stage {s} {plan.stages[s].name!r}" for s, t in self.held]
        words += [f"turns go to tasks {', '.join(map(str, self.picks))} of those that can run"] if self.picks else []
        return "; ".join(words) or "stage by stage"


Order = int | str | Schedule


class Deadlock(ExecutionError):
    """No task can proceed; the message lists blocked tasks and the edges they wait on."""


@dataclass(frozen=True)
class Task:
    """Task `index` of stage `stage` on SM `sm`."""

    stage: int
    index: int
    sm: int


def programs(plan: Plan, first: int, last: int) -> tuple[tuple[Task, ...], ...]:
    """Each SM's tasks of stages [first, last), in the order it runs them."""

    def make() -> tuple[tuple[Task, ...], ...]:
        out: list[list[Task]] = [[] for _ in range(plan.sms)]
        for s in range(first, last):
            stage = plan.stages[s]
            for t in range(stage.tasks):
                sm = stage.sm_of(t, plan.sms)
                out[sm].append(Task(s, t, sm))
        return tuple(tuple(x) for x in out)

    return memo(plan, ("programs", first, last), make)


def _spans(plan: Plan, stage: int, buffer: str, rows: int, *, writes: bool) -> np.ndarray:
    """All (task, row, lo, hi) that `stage` touches of `buffer`, rows < `rows`; row -1 = all rows."""
    st, width = plan.stages[stage], plan.buffer[buffer].width
    out = [
        (t, -1 if row is None else row, lo, hi)
        for t in range(st.tasks)
        for row, spans in touched(st, st.writes if writes else st.reads, st.units_of(t), buffer, width).items()
        if row is None or row < rows
        for lo, hi in spans
    ]
    return np.array(out, dtype=np.int64).reshape(-1, 4)


def tagged_sources(plan: Plan, edge: Edge, rows: int) -> tuple[frozenset[int], ...]:
    """For each task of edge.dst: the tasks of edge.src that write words it reads, at this run-time row count."""
    return memo(plan, ("tagged", edge, rows), lambda: _tagged_sources(plan, edge, rows))


def _tagged_sources(plan: Plan, edge: Edge, rows: int) -> tuple[frozenset[int], ...]:
    wrote = _spans(plan, edge.src, edge.buffer, rows, writes=True)
    read = _spans(plan, edge.dst, edge.buffer, rows, writes=False)
    out: list[set[int]] = [set() for _ in range(plan.stages[edge.dst].tasks)]
    for task, row, lo, hi in read:
        hit = (wrote[:, 2] < hi) & (lo < wrote[:, 3])
        if row >= 0:
            hit &= (wrote[:, 1] < 0) | (wrote[:, 1] == row)
        out[task].update(wrote[hit, 0].tolist())
    return tuple(frozenset(x) for x in out)


class Scheduler:
    """Yields groups of tasks of one stage among [first, last); the caller runs each group before asking for the next.

    Tasks of a group are all ready and independent of each other: running them together is one of the orders in which
    they run back to back.

    order: an int seeds a random order, a name of POLICIES or "starve:N" picks an adversarial one, a Schedule says it all.
    """

    def __init__(self, plan: Plan, rows: int, order: Order, first: int = 0, last: int | None = None) -> None:
        starve = isinstance(order, str) and re.fullmatch(r"starve:(\d+)", order)
        if isinstance(order, str) and order not in POLICIES and not starve:
            raise ValueError(f"order={order!r}: expected an int seed, starve:N or one of {', '.join(POLICIES)}")
        self.plan, self.rows, self.order = plan, rows, order
        self.first, self.last = first, len(plan.stages) if last is None else last
        self.programs = programs(plan, self.first, self.last)
        self.position = [0] * plan.sms  # of the task after each SM's head
        self.done: list[set[int]] = [set() for _ in plan.stages]
        self.random = random.Random(order if isinstance(order, int) else 0)
        self.picks = iter(order.picks if isinstance(order, Schedule) else ())
        self.starved = frozenset(
            {int(starve[1])}
            if starve
            else ()
            if not isinstance(order, int) or order % 2 == 0
            else {s for s in range(len(plan.stages)) if self.random.random() < STARVED}
        )

    def blocking(self, task: Task) -> Edge | None:
        """The first edge that `task` still waits on, None if it may run."""
        for edge in self.plan.waits[task.stage]:
            if edge.src < self.first or edge.mechanism in ("same_sm", "program"):
                continue
            if edge.mechanism in COMPLETE:
                ready = len(self.done[edge.src]) == self.plan.stages[edge.src].tasks
            else:
                ready = tagged_sources(self.plan, edge, self.rows)[task.index] <= self.done[edge.src]
            if not ready:
                return edge
        return None

    def _pick(self, ready: dict[int, Task], previous: int) -> list[Task]:
        """The tasks to run next, all of one stage."""
        if self.order == "greedy":
            return [ready.get(previous) or ready[min(ready)]]
        if isinstance(self.order, Schedule):
            return self._decide(ready, self.order)
        if self.order == "inverted":
            stage = max(t.stage for t in ready.values())
            return [t for t in ready.values() if t.stage == stage]
        fed = [t for t in ready.values() if t.stage not in self.starved]
        if not fed:  # let go of the starved task whose SM has the most urgent work behind it, so that others starve on
            return [min(ready.values(), key=lambda t: (self._behind(t), self.random.random()))]
        chosen = self.random.choice(fed)
        if self.random.random() < ALONE:
            return [chosen]
        share = self.random.random()
        return [t for t in ready.values() if t is chosen or t.stage == chosen.stage and self.random.random() < share]

    def _decide(self, ready: dict[int, Task], order: Schedule) -> list[Task]:
        """The next tasks by the decisions of `order`, then the earliest stage."""
        free = [t for t in ready.values() if (t.stage, t.index) not in order.held]
        if not free:
            return [min(ready.values(), key=lambda t: order.held.index((t.stage, t.index)))]
        pick = next(self.picks, None)
        if pick is not None:
            free.sort(key=lambda t: (t.stage, t.sm))
            return [free[pick % len(free)]]
        stage = min(t.stage for t in free)
        return [t for t in free if t.stage == stage]

    def _behind(self, task: Task) -> int:
        """Stage of the next task on the same SM."""
        program, at = self.programs[task.sm], self.position[task.sm]
        return program[at].stage if at < len(program) else len(self.plan.stages)

    def __iter__(self) -> Iterator[list[Task]]:
        ready: dict[int, Task] = {}
        # blocked heads by (needs all of it, source stage): a counter opens once, when its stage is complete; tagged words
        # open task by task
        parked: dict[tuple[bool, int], list[Task]] = {}

        def settle(task: Task) -> None:
            edge = self.blocking(task)
            if edge is None:
                ready[task.sm] = task
            else:
                parked.setdefault((edge.mechanism in COMPLETE, edge.src), []).append(task)

        def advance(sm: int) -> None:
            at = self.position[sm]
            if at < len(self.programs[sm]):
                self.position[sm] += 1
                settle(self.programs[sm][at])

        for sm in range(self.plan.sms):
            advance(sm)
        previous = -1
        while ready:
            group = self._pick(ready, previous)
            yield group
            stage = group[0].stage
            for task in group:
                del ready[task.sm]
                self.done[stage].add(task.index)
                previous = task.sm
            wake = parked.pop((False, stage), [])
            if len(self.done[stage]) == self.plan.stages[stage].tasks:
                wake += parked.pop((True, stage), [])
            for blocked in wake:
                settle(blocked)
            for task in group:
                advance(task.sm)
        if parked:
            raise Deadlock(self._report([t for tasks in parked.values() for t in tasks]))

    def _report(self, blocked: list[Task]) -> str:
        lines = []
        for task in sorted(blocked, key=lambda t: (t.stage, t.index))[:8]:
            edge = self.blocking(task)
            assert edge is not None
            src = self.plan.stages[edge.src]
            lines.append(
                f"SM {task.sm} at task {task.index} of stage {task.stage} "
                f"{self.plan.stages[task.stage].name!r} waits by {edge.mechanism} on {edge.buffer!r} of stage "
                f"{edge.src} {src.name!r} ({len(self.done[edge.src])} of {src.tasks} tasks done)"
            )
        return f"deadlock: {len(blocked)} SMs blocked: " + "; ".join(lines)
