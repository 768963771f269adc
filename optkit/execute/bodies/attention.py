"""Paged attention: the new row into the cache, then softmax over a request's tokens in whole 64-token chunks.

Caches are reached through the block table only. A row whose slot_mapping is negative is padding: no write, zero out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optkit.execute.bodies.common import class_rows, row_blocks
from optkit.execute.memory import Memory
from optkit.models.ops import rms_scale
from optkit.models.ops.attention import attention_combine, attention_part, rotate, split_ranges
from optkit.plan.bodies import PARTIAL_EXTRA
from optkit.plan.types import Stage


def _new_token(mem: Memory, row: int, block_size: int) -> tuple[int, int] | None:
    """(block, offset) of the new token of `row`, None for padding."""
    slot = int(mem.input("slot_mapping")[row])
    return None if slot < 0 else divmod(slot, block_size)


def mla_insert(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """kva [lora + rope] -> cache row [RMS(c; weight, eps) | k_p]; the last part is neither normalised nor rotated."""
    lora, kv = stage.param("lora"), mem.cache(stage.param("kv"))
    for r0, r1, _, _ in row_blocks(units, 1, mem.rows):
        a = class_rows(mem, stage.param("kva"), (r0, r1))
        c = a[:, :lora]
        row = torch.cat(
            [c * rms_scale(c, stage.param("eps")) * mem.weights.dense(stage.param("weight")), a[:, lora:]], -1
        ).to(kv.dtype)
        for r in range(r0, r1):
            if (where := _new_token(mem, r, kv.shape[1])) is not None:
                kv[where] = row[r]


def rope_insert(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """q, k, v -> rotated q in `out`; rotated k, and v, in the cache. Position = seq_len - 1."""
    dim, (keys, values) = stage.param("dim"), mem.cache_pair(stage.param("kv"))
    for r0, r1, _, _ in row_blocks(units, 1, mem.rows):
        position = (mem.input("seq_len")[r0:r1] - 1).clamp(min=0)
        q, k, v = (mem.load(stage.param(n), (r0, r1)).float().reshape(r1 - r0, -1, dim) for n in ("q", "k", "v"))
        q, k = (rotate(t, position, stage.param("theta"), stage.param("scaling")) for t in (q, k))
        for r in range(r0, r1):
            if (where := _new_token(mem, r, keys.shape[1])) is not None:
                keys[where], values[where] = k[r - r0].to(keys.dtype), v[r - r0].to(values.dtype)
            else:
                q[r - r0] = 0
        mem.store(stage.param("out"), q.flatten(1), (r0, r1))


def _query(stage: Stage, mem: Memory, row: int, group: int) -> torch.Tensor:
    """Queries of one row and group, float32 [heads_per_group, dqk]; MLA: [absorbed latent query | last rope columns]."""
    hpg, dqk, dv = (stage.param(k) for k in ("heads_per_group", "dqk", "dv"))
    if stage.param("kind") == "gqa":
        return (
            mem.load(stage.param("q"), (row, row + 1), group * hpg * dqk, (group + 1) * hpg * dqk)
            .float()
            .view(hpg, dqk)
        )
    heads = hpg * stage.param("groups")
    q = stage.param("q")
    per_head = mem.buffer(q).width // heads
    latent = mem.load(stage.param("ql"), (row, row + 1), group * hpg * dv, (group + 1) * hpg * dv)
    full = mem.load(q, (row, row + 1), group * hpg * per_head, (group + 1) * hpg * per_head)
    return torch.cat([latent.reshape(hpg, dv), full.reshape(hpg, per_head)[:, per_head - (dqk - dv) :]], -1).float()


def _tokens(stage: Stage, mem: Memory, row: int, group: int, tokens: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [t, dqk] and values [t, dv] of a token range, float32."""
    pos = torch.arange(tokens.start, tokens.stop, device=mem.device)
    table = mem.input("block_table")[row]
    if stage.param("kind") == "gqa":
        keys, values = mem.cache_pair(stage.param("kv"))
        block, offset = table[pos // keys.shape[1]].long(), pos % keys.shape[1]
        return keys[block, offset, group].float(), values[block, offset, group].float()
    kv = mem.cache(stage.param("kv"))
    rows = kv[table[pos // kv.shape[1]].long(), pos % kv.shape[1]].float()
    return rows, rows[:, : stage.param("dv")]


def _length(mem: Memory, row: int) -> int:
    """Tokens of the request in `row`, 0 for padding."""
    return int(mem.input("seq_len")[row]) if int(mem.input("slot_mapping")[row]) >= 0 else 0


def _part(stage: Stage, mem: Memory, row: int, group: int, tokens: range) -> torch.Tensor:
    """What one unit stores: o [hpg, dv] of a whole row, or (m, l, 0, 0, unnormalised o) per head of one split."""
    hpg, dv, whole = stage.param("heads_per_group"), stage.param("dv"), stage.param("splits") == 1
    if not tokens:  # padding, or fewer chunks than splits: m = -inf, l = 0, o = 0 weighs nothing in the combination
        part = torch.zeros((hpg, dv if whole else dv + PARTIAL_EXTRA), device=mem.device)
        if not whole:
            part[:, 0] = -torch.inf
        return part
    k, v = _tokens(stage, mem, row, group, tokens)
    m, total, o = attention_part(_query(stage, mem, row, group), k, v, stage.param("scale"))
    if whole:
        return o / total[:, None]
    return torch.cat([torch.stack([m, total], -1), o.new_zeros(hpg, PARTIAL_EXTRA - 2), o], -1)


def attn(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """Units (row, group, split): bf16 output if there is one split, else partials for `attn_combine`."""
    splits = stage.param("splits")
    for r0, r1, j0, j1 in row_blocks(units, stage.param("groups") * splits, mem.rows):
        for row in range(r0, r1):
            ranges = split_ranges(_length(mem, row), splits)
            parts = [_part(stage, mem, row, j // splits, ranges[j % splits]).flatten() for j in range(j0, j1)]
            mem.store(stage.param("out"), torch.cat(parts)[None], (row, row + 1), j0 * len(parts[0]))


def attn_combine(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """Units (row, group): the splits that hold tokens, combined in order; zero for padding."""
    splits, hpg, dv = stage.param("splits"), stage.param("heads_per_group"), stage.param("dv")
    head = dv + PARTIAL_EXTRA
    for r0, r1, g0, g1 in row_blocks(units, stage.param("groups"), mem.rows):
        for row in range(r0, r1):
            held = [s for s, tokens in enumerate(split_ranges(_length(mem, row), splits)) if tokens]
            out = torch.zeros((1, (g1 - g0) * hpg * dv), device=mem.device)
            if held:
                lo, hi = (g * splits * hpg * head for g in (g0, g1))
                p = mem.load(stage.param("partial"), (row, row + 1), lo, hi).view(g1 - g0, splits, hpg, head)
                parts = (
                    (x[..., 0].flatten(), x[..., 1].flatten(), x[..., PARTIAL_EXTRA:].flatten(0, 1))
                    for x in (p[:, s] for s in held)
                )
                out[0] = attention_combine(list(parts)).flatten()
            mem.store(stage.param("out"), out, (row, row + 1), g0 * hpg * dv)
