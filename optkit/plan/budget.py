"""Shared memory and registers: what the bodies declare against what the GPU has; the ring gets what is left."""

from __future__ import annotations

from optkit.plan.bodies import FIXED_SMEM, SLOT_BYTES, THREADS
from optkit.plan.choices import PlanChoices
from optkit.plan.types import Stage

MIN_RING = 2  # one tile being used, one under way


def ring(stages: tuple[Stage, ...], choices: PlanChoices, problems: list[str]) -> int:
    """Ring slots of 18432 bytes; adds one line to `problems` for each budget that does not hold."""
    hw = choices.hardware
    largest = max(stages, key=lambda s: s.smem)
    left = hw.smem - FIXED_SMEM - largest.smem
    fit = left // SLOT_BYTES
    if fit < MIN_RING:
        asked_bytes = largest.smem + MIN_RING * SLOT_BYTES + FIXED_SMEM
        problems.append(
            f"shared memory: stage {largest.name} ({largest.body}) needs {largest.smem} bytes beside a ring of "
            f"at least {MIN_RING} x {SLOT_BYTES} and {FIXED_SMEM} fixed: {asked_bytes} bytes asked, "
            f"{hw.smem} there on {hw.name}"
        )
    asked = choices.overlap.ring_slots
    if asked and asked > fit >= MIN_RING:
        problems.append(
            f"overlap.ring_slots = {asked}: {asked * SLOT_BYTES} bytes asked, {left} left on {hw.name} beside stage "
            f"{largest.name} ({largest.smem}): at most {fit}"
        )
    worst = max(stages, key=lambda s: s.regs)
    if worst.regs * THREADS > hw.registers:
        problems.append(
            f"registers: body {worst.body} declares {worst.regs} a thread x {THREADS} threads = "
            f"{worst.regs * THREADS} asked, {hw.registers} there on {hw.name}"
        )
    return asked or max(fit, 0)
