"""Cache rows that are key and value at once, one per token or one per closed group of tokens.

A group of `ratio` tokens closes with its last one; its row stands at the rotary position of its first token. The
pooled latent of a group weighs its tokens channel by channel (DeepSeek-V4.1's compressor). What a group needs of
earlier tokens is kept in a ring by position, so that a step of several rows, some of them rejected later, needs no undo:
position p overwrites what a rejected row left at p.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, cast, register, rms_scale
from optkit.models.ops.cache_formats import round_rows
from optkit.models.ops.rotary import rotate_tail

Weights = Mapping[str, WeightTensor]


@register("latent_insert")
def latent_insert(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """x [R, width] -> writes quantise(rope([rms](x; w))) where the new token closes a group of `ratio` tokens.

    The norm is there if there is a weight "w". Position: the group's first token, seq_len - ratio. Row: slot_mapping
    // ratio in flat rows.
    """
    ratio, rope, x = op.attr("ratio"), op.attr("rope"), ins[0]
    state, group = ctx.state(op.state("kv")), ctx.of(op.state("kv"), ratio)
    if "w" in weights:
        x = x * rms_scale(x, op.attr("eps")) * cast(weights, "w", ctx)
    position = (ctx.seq_len - ratio).clamp(min=0)
    row = rotate_tail(x, position, rope, op.attr("theta"), op.attr("scaling"))
    row = round_rows(row, op.attr("format"), rope).to(state.dtype)
    for r in range(row.shape[0]):
        if (where := group.closed_group(r, ratio)) is not None:
            state[where] = row[r]
    return []


def pool(values: Tensor, gates: Tensor) -> Tensor:
    """values, gates [ratio, D] -> [D]: softmax over the group, channel by channel."""
    return (torch.softmax(gates, 0) * values).sum(0)


def pool_pair(values: Tensor, gates: Tensor) -> Tensor:
    """The same for two tokens: a_1 + sigmoid(g_0 - g_1) (a_0 - a_1), one exponential per channel."""
    return values[1] + torch.sigmoid(gates[0] - gates[1]) * (values[0] - values[1])


@register("gated_pool", pool_pair=pool_pair)
def gated_pool(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """a, g [R, D] -> pooled [R, D], zeros where the new token closes no group.

    State ring [slots, capacity, 2D]: [a | g] of position p at p mod capacity. All rows are written before any is
    read, so the rows of one request in one step see one another. capacity >= rows of a request in a step + ratio - 1.
    """
    ratio, state, ctx = op.attr("ratio"), ctx.state(op.state("ring")), ctx.of(op.state("ring"))
    capacity, width = state.shape[1], ins[0].shape[1]
    both = torch.cat(ins, -1).to(state.dtype)
    live = [r for r in range(both.shape[0]) if int(ctx.state_slot[r]) > 0 and int(ctx.slot_mapping[r]) >= 0]
    for r in live:
        state[int(ctx.state_slot[r]), (int(ctx.seq_len[r]) - 1) % capacity] = both[r]
    out = torch.zeros_like(ins[0])
    for r in live:
        length = int(ctx.seq_len[r])
        if length % ratio == 0:
            group = state[int(ctx.state_slot[r]), [p % capacity for p in range(length - ratio, length)]].to(ctx.math)
            out[r] = pool(group[:, :width], group[:, width:])
    return [out]
