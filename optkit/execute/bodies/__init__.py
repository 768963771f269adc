"""One function per stage body: `BODIES[body](stage, units, mem)` computes those units as the kernel does.

A body reads only what the stage's Accesses declare, computes in float32 from stored values and rounds only when it
stores, at the rounding points of the contract. Its bits do not depend on how units are grouped into calls: products
have one shape per unit (class rows x tile rows), everything else is elementwise or per unit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optkit.execute.bodies import attention, elementwise, experts, gemv, kda, rows
from optkit.execute.memory import Memory
from optkit.plan.types import Stage

Body = Callable[[Stage, Sequence[int], Memory], None]

BODIES: dict[str, Body] = {
    "gemv": gemv.gemv,
    "mixnorm": rows.mixnorm,
    "blockstats": rows.blockstats,
    "embed": rows.embed,
    "kda": kda.kda,
    "mla_insert": attention.mla_insert,
    "rope_insert": attention.rope_insert,
    "attn": attention.attn,
    "attn_combine": attention.attn_combine,
    "ew": elementwise.ew,
    "route": experts.route,
    "expert_gate_up": experts.expert_gate_up,
    "expert_down": experts.expert_down,
}

__all__ = ["BODIES", "Body"]
