"""An exhaustive model of the weight ring: mbarrier parities, one producer, consumer warps, copies landing out of order.

Credits are not enough: a wait compares one parity bit, so a warp that reaches lap n + 1 of a slot before lap n has
landed there finds the bit it asks for and reads stale bytes. The model keeps for each slot the phase count of its
`full` and `empty` barriers, what the slot holds and what is in flight, and explores all interleavings.

Protocols: "every_warp" (all warps wait for every tile in order; a slot is free when all have released it) and "owner"
(warp w takes tiles w, w + warps, ...; a slot is free after one release). Slots are independent and warps symmetric, so
a counterexample needs no more than 3 slots and 2 warps.
"""

from __future__ import annotations

from typing import NamedTuple


class _State(NamedTuple):
    queued: int  # tiles the producer has put in flight
    flying: tuple[int, ...]  # tiles in flight, any of which may land next
    holds: tuple[int, ...]  # tile whose bytes a slot holds, -1 = none
    full: tuple[int, ...]  # completed phases of the slot's full barrier
    empty: tuple[int, ...]  # completed phases of the slot's empty barrier
    released: tuple[int, ...]  # arrivals in the current phase of the empty barrier
    at: tuple[int, ...]  # tile each warp waits for next; warps without more tiles stand at `tiles`
    reading: tuple[bool, ...]  # the warp has passed its wait and reads


class Explored(NamedTuple):
    """`safe`: no interleaving reads wrong bytes, overwrites a tile in use, or hangs; `trace` says which one does."""

    safe: bool
    states: int
    trace: str


def explore(slots: int, warps: int, laps: int, protocol: str = "every_warp") -> Explored:
    """All interleavings of `slots * laps` tiles. Cost: some thousand states for 3 slots, 2 warps, 3 laps."""
    tiles = slots * laps
    need, stride = (warps, 1) if protocol == "every_warp" else (1, warps)
    start = _State(
        0,
        (),
        (-1,) * slots,
        (0,) * slots,
        (0,) * slots,
        (0,) * slots,
        tuple(range(warps)) if protocol == "owner" else (0,) * warps,
        (False,) * warps,
    )
    seen, todo = {start}, [start]
    while todo:
        s = todo.pop()
        moved = False
        for nxt in _moves(s, slots, tiles, need, stride):
            if isinstance(nxt, str):
                return Explored(False, len(seen), nxt)
            moved = True
            if nxt not in seen:
                seen.add(nxt)
                todo.append(nxt)
        if not moved and (s.queued < tiles or any(a < tiles for a in s.at)):
            return Explored(False, len(seen), f"hangs with {s.queued} of {tiles} tiles queued")
    return Explored(True, len(seen), "")


def _passes(completed: int, parity: int) -> bool:
    """mbarrier.try_wait.parity: true when the phase with this parity has completed, i.e. the current one differs."""
    return completed % 2 != parity


def _moves(s: _State, slots: int, tiles: int, need: int, stride: int) -> list[_State | str]:
    out: list[_State | str] = []
    if s.queued < tiles:
        k, lap = s.queued % slots, s.queued // slots
        if _passes(s.empty[k], (lap & 1) ^ 1):
            if any(r and s.at[w] % slots == k for w, r in enumerate(s.reading)):
                out.append(f"slot {k} is refilled with tile {s.queued} while a warp reads it")
            out.append(s._replace(queued=s.queued + 1, flying=(*s.flying, s.queued)))
    for i, tile in enumerate(s.flying):
        k = tile % slots
        out.append(
            s._replace(
                flying=s.flying[:i] + s.flying[i + 1 :],
                holds=_set(s.holds, k, tile),
                full=_set(s.full, k, s.full[k] + 1),
            )
        )
    for w, tile in enumerate(s.at):
        if tile >= tiles:
            continue
        k = tile % slots
        if s.reading[w]:
            released = s.released[k] + 1
            done = released == need
            out.append(
                s._replace(
                    at=_set(s.at, w, min(tile + stride, tiles)),
                    reading=_set(s.reading, w, False),
                    released=_set(s.released, k, 0 if done else released),
                    empty=_set(s.empty, k, s.empty[k] + 1) if done else s.empty,
                )
            )
        elif _passes(s.full[k], (tile // slots) & 1):
            if s.holds[k] != tile:
                out.append(
                    f"warp {w} waits for tile {tile} (slot {k}, lap {tile // slots}) and reads tile {s.holds[k]}: "
                    "the parity it asks for is that of an older lap"
                )
            out.append(s._replace(reading=_set(s.reading, w, True)))
    return out


def _set(t: tuple, i: int, value: int | bool) -> tuple:
    return (*t[:i], value, *t[i + 1 :])
