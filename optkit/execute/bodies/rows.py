"""Row bodies, one unit per token row: embedding, residual mix + norm, early block statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optkit.execute.bodies.common import class_rows, mix_direction, prologue, row_blocks
from optkit.execute.memory import Memory
from optkit.models.ops.attnres import block_statistics
from optkit.plan.types import Stage


def embed(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """token -> row of this rank's vocabulary shard; zeros for a token of another shard; mailbox slot p: coeffs[p] *."""
    table = mem.weights.dense(stage.param("weight"))
    out, coeffs = stage.param("out"), stage.param("coeffs")
    for r0, r1, _, _ in row_blocks(units, 1, mem.rows):
        local = mem.input("token")[r0:r1].long() - stage.param("vocab_start")
        mine = (local >= 0) & (local < stage.param("vocab_rows"))
        value = table[torch.where(mine, local, 0)] * mine[:, None]
        if coeffs:
            value = torch.stack([c * value for c in coeffs])
        mem.store(out, value, (r0, r1))


def mixnorm(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """The row prologue alone, stored as bf16."""
    x = dict(stage.param("x"))
    for r0, r1, _, _ in row_blocks(units, 1, mem.rows):
        mem.store(stage.param("out"), prologue(mem, x, (r0, r1))[r0:r1], (r0, r1))


def blockstats(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """(v . v, v . u) of every saved row, f32 [2n]; needs no prefix."""
    u = mix_direction(mem, stage.param("mix_norm"), stage.param("mix_proj"))
    for r0, r1, _, _ in row_blocks(units, 1, mem.rows):
        saved = [class_rows(mem, name, (r0, r1)) for name in stage.param("inputs")]
        mem.store(stage.param("out"), block_statistics(saved, u)[r0:r1], (r0, r1))
