"""Conditional memory: rows of a large table, addressed by a hash of the last tokens, gated into the residual streams.

Engram (arXiv 2601.07372) as DeepSeek-V4.1's inference code has it. Tokens are first mapped to classes (equal up to case,
accents and spacing). The hash of the last n classes starts with class_p * m_0 and XORs class_{p-i} * m_i; each column
takes it modulo its own prime, plus the column's offset in the table.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, cast, register, rms_scale
from optkit.models.ops.quantised import expand

Weights = Mapping[str, WeightTensor]


@register("ngram_hash")
def ngram_hash(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """token [R] -> rows i32 [R, orders * columns]: table rows of the grams of 2, 3, ... last tokens.

    `multipliers` [n], `moduli` and `offsets` [orders * columns]; products stay below 2^63, so nothing wraps. A token
    before the sequence, and all before it, count as `pad_token`.
    """
    assert ctx.lookback is not None, "ngram_hash needs the step input lookback"
    table = weights["classes"]
    assert isinstance(table, Tensor)
    multipliers = op.attr("multipliers")
    window = torch.cat([ins[0][:, None], ctx.lookback[:, : len(multipliers) - 1]], 1).long()
    gone = (window < 0).cumsum(1) > 0
    classes = table.long()[torch.where(gone, op.attr("pad_token"), window)]
    products = classes * torch.tensor(multipliers, device=classes.device)
    moduli = torch.tensor(op.attr("moduli"), device=classes.device).reshape(len(multipliers) - 1, -1)
    rolling, rows = products[:, 0], []
    for i in range(1, len(multipliers)):
        rolling = rolling ^ products[:, i]
        rows.append(rolling[:, None] % moduli[i - 1])
    return [(torch.cat(rows, 1) + torch.tensor(op.attr("offsets"), device=classes.device)).int()]


@register("table_gather")
def table_gather(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """rows i32 [R, c] -> [R, c * width]: the table's rows side by side."""
    index, table = ins[0].long(), weights["w"]
    flat = index.flatten()
    rows = table[flat] if isinstance(table, Tensor) else (table[0][flat], table[1][flat])
    return [expand(rows, ctx.math).reshape(index.shape[0], -1)]


@register("memory_gate")
def memory_gate(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """X [R, n*H], kv [R, (n+1)*H] = keys and one value -> gates [R, n] = sigmoid(sgn(d) sqrt(max(|d|, floor))).

    d_k = sum_i (wq wk)_k,i X_k,i key_k,i / (rms X_k * rms key_k * sqrt(H)); wq, wk [n, H].
    """
    n, eps = op.attr("streams"), op.attr("eps")
    x = ins[0].unflatten(-1, (n, -1))
    key = ins[1][:, : ins[0].shape[1]].unflatten(-1, (n, -1))
    w = cast(weights, "q", ctx) * cast(weights, "k", ctx)
    scale = rms_scale(x, eps)[..., 0] * rms_scale(key, eps)[..., 0] * x.shape[-1] ** -0.5
    d = (x * w * key).sum(-1) * scale
    return [torch.sigmoid(torch.copysign(d.abs().clamp(min=op.attr("floor")).sqrt(), d))]
