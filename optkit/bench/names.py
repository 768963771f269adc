"""Names of the checks that only a GPU can run: a run registers them as not run, a hardware record answers them."""

from __future__ import annotations

from collections.abc import Sequence

CHECKPOINT = "checkpoint"
"""Folder of a run directory that holds the weights, where the run made them."""


def name(check: str, batch: int | None = None) -> str:
    """ "hardware.<check>" or "hardware.<check>@batch<n>"."""
    return f"hardware.{check}" + ("" if batch is None else f"@batch{batch}")


def hardware_checks(batches: Sequence[int], stage_batches: Sequence[int]) -> tuple[str, ...]:
    """Every check of `bench.hardware` for rollouts at `batches` and teacher-forced stages at `stage_batches`."""
    return (
        name("registers"),
        *(name(c, b) for b in stage_batches for c in ("numerics.per_stage", "numerics.probes", "numerics.exact")),
        *(name(c, b) for b in batches for c in ("rollout.logits", "rollout.choices", "rollout.state")),
        name("repeat.bits", batches[-1]),
        *(name(c) for c in ("transitions.bits", "epochs.bits", "disturbed.bits", "groups.bits", "lifetimes.bits")),
        name("abort.named"),
    )
