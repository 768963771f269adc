"""A simulated timeline of one step: who streams, who waits, who works. An estimate for pruning and for pictures.

Model, per SM: tiles arrive in order at 1/sms of the read ceiling, at most `ring_slots` ahead of what has been consumed
(stages with `stream` "after_wait" only from the end of their wait); a task starts when its SM is free and every edge
into its stage is paid: the source's last task plus the cost of the mechanism's hop. KV and state bytes are read after
the wait. Deterministic; no queueing inside the memory system.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import ceil

from optkit.plan.cost import Load, step_cost
from optkit.plan.types import Plan, Stage

TASK_US = 0.25  # entering a stage: descriptor, barriers of the CTA
L2_BYTES_PER_US = 100e3  # what one SM reads from L2
MIX_PASSES = 1.5  # a mix without early statistics goes over its rows once more, without keeping them
TILE_US = 0.01  # a 16 KiB tile through eight warps


@dataclass(frozen=True)
class Event:
    """One bar of the picture: SM, stage index, start and end in microseconds, what ("wait" or the body)."""

    sm: int
    stage: int
    start_us: float
    end_us: float
    what: str


@dataclass(frozen=True)
class Timeline:
    """All events, sorted by (SM, start), and the end of the last one."""

    events: tuple[Event, ...]
    step_us: float


class _Ring:
    """One SM's FIFO of tiles: when the last tile of the next n is there."""

    def __init__(self, slots: int, tile_us: float) -> None:
        self.slots, self.tile_us = slots, tile_us
        self.fetched_us = 0.0  # the last tile asked for so far has arrived
        self.tiles = 0
        self.used: deque[tuple[int, float, float]] = deque()  # (tiles consumed so far, first and last consumption)

    def freed(self, tile: int) -> float:
        """When the slot that `tile` needs was released by the tile `slots` before it."""
        old = tile - self.slots
        if old < 0:
            return 0.0
        while len(self.used) > 1 and self.used[0][0] <= old:
            self.used.popleft()
        return self.used[0][2] if self.used and self.used[0][0] > old else self.used[-1][2] if self.used else 0.0

    def take(self, n: int, work_us: float, gate_us: float) -> float:
        """Consume n tiles from `work_us` on, none of them asked for before `gate_us`; returns when the last is used."""
        first = max(self.fetched_us, gate_us, self.freed(self.tiles)) + self.tile_us
        last = first + (n - 1) * self.tile_us
        if n > self.slots:  # the ring is full until the task starts to consume
            last = max(last, work_us + (n - self.slots) * self.tile_us)
        else:
            last = max(last, self.freed(self.tiles + n - 1) + self.tile_us)
        end = max(last + TILE_US, work_us + n * TILE_US)
        self.fetched_us = last
        self.tiles += n
        self.used.append((self.tiles, max(work_us, first), end))
        return end


def simulate(plan: Plan, load: Load) -> Timeline:
    """The timeline of one step. Cost: about a microsecond of Python a task."""
    hw = dict(plan.hardware)
    hop = {
        "counter": hw["hop_us"],
        "grid_barrier": hw["hop_us"],
        "tagged": hw["tagged_hop_us"],
        "peer_mailbox": hw["exchange_us"],
    }
    bytes_per_us = hw["read_gbs"] * 1e3 / plan.sms
    rings = [_Ring(plan.ring_slots, plan.ring_slot_bytes / bytes_per_us) for _ in range(plan.sms)]
    free = [0.0] * plan.sms
    finished: list[float] = []
    hit = {  # distinct experts, rounded up
        s.param("uniq"): ceil(load.experts(s.param("experts"), s.param("topk")) - 1e-9)
        for s in plan.stages
        if s.body == "route"
    }
    events: list[Event] = []
    for i, (s, cost) in enumerate(zip(plan.stages, step_cost(plan, load).stages, strict=True)):
        ready = max((finished[e.src] + hop.get(e.mechanism, 0.0) for e in plan.waits[i]), default=0.0)
        busy = _active(s, load, hit)
        tiles = _tiles(s, load, hit)
        other_us = (cost.kv + cost.state) / max(sum(busy), 1) / bytes_per_us
        enter_us = TASK_US + _prologue_us(s, load)
        ahead = s.param("stream") == "ahead"
        end_of_stage = ready
        for t in range(s.tasks):
            sm = s.sm_of(t, plan.sms)
            start = max(free[sm], ready)
            end = start
            if busy[t]:
                work = start + enter_us
                end = work + other_us
                if tiles[t]:
                    end = max(end, rings[sm].take(tiles[t], work, 0.0 if ahead else start))
                if start > free[sm]:
                    events.append(Event(sm, i, round(free[sm], 3), round(start, 3), "wait"))
                events.append(Event(sm, i, round(start, 3), round(end, 3), s.body))
            free[sm] = end
            end_of_stage = max(end_of_stage, end)
        finished.append(end_of_stage)
    return Timeline(tuple(sorted(events, key=lambda e: (e.sm, e.start_us, e.stage))), max(finished, default=0.0))


def _prologue_us(s: Stage, load: Load) -> float:
    """Rows of x from L2 into shared memory, for stages that mix or norm."""
    x = s.param("x")
    if not x:
        return 0.0
    passes = MIX_PASSES if x["prologue"] == "mixnorm" and not x["stats"] else 1.0
    return float(passes * len(x["inputs"]) * x["width"] * 2 * load.batch / L2_BYTES_PER_US)


def _active(s: Stage, load: Load, hit: dict[str, int]) -> list[bool]:
    """Which tasks have any unit with work to do."""
    if s.body == "expert_gate_up":
        units = hit[s.param("uniq")] * ceil(s.param("inter") / 8)
        return [t < units for t in range(s.tasks)]
    if s.row_units > 1:
        units = load.batch * (s.units // s.row_units)
        return [s.units_of(t).start < units for t in range(s.tasks)]
    return [True] * s.tasks


def _tiles(s: Stage, load: Load, hit: dict[str, int]) -> list[int]:
    """Tiles that every task pulls through its ring."""
    if not s.streams:
        return [0] * s.tasks
    if s.body == "expert_gate_up":
        units = hit[s.param("uniq")] * ceil(s.param("inter") / 8)
        return [len(range(t, units, s.tasks)) * s.streams[0].tiles for t in range(s.tasks)]
    if s.body == "expert_down":
        each = hit[s.param("uniq")] * s.streams[0].tiles
        return [len(s.units_of(t)) * each for t in range(s.tasks)]
    out = []
    for t in range(s.tasks):
        r = s.units_of(t)
        out.append(
            sum(
                x.tiles * max(0, min(r.stop, x.first + (x.count or s.units)) - max(r.start, x.first)) for x in s.streams
            )
        )
    return out
