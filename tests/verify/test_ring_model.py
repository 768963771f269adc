"""The ring's parity rule, exhaustively: the rule in use is safe, the tempting one is not."""

from __future__ import annotations

import pytest

from optkit.verify.ring_model import explore


@pytest.mark.parametrize(("slots", "warps"), [(1, 2), (2, 2), (3, 2), (2, 3), (4, 2)])
def test_every_warp_waits_for_every_lap_is_safe(slots: int, warps: int) -> None:
    out = explore(slots, warps, laps=3)
    assert out.safe, out.trace
    assert out.states > slots * warps


@pytest.mark.parametrize(("slots", "safe"), [(2, True), (4, True), (3, False)])
def test_owned_tiles_are_safe_only_if_each_slot_keeps_its_warp(slots: int, safe: bool) -> None:
    out = explore(slots, warps=2, laps=3, protocol="owner")
    assert out.safe is safe
    assert safe or "parity" in out.trace
