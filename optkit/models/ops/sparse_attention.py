"""Attention over a sliding window and a selection of compressed rows, with a sink; rows are key and value at once.

All query heads share the rows. The sink is one more logit per head that takes weight and gives no value; it is not
scaled. Source: DeepSeek-V4.1's inference code. The parts and their combination are those of paged attention, the sink
being one more part (m = sink, l = 1, o = 0).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.attention import Part, attention_combine, attention_part
from optkit.models.ops.base import StepContext, WeightTensor, cast, register

Weights = Mapping[str, WeightTensor]


def attend_with_sink(q: Tensor, rows: Tensor, sink: Tensor, scale: float) -> Tensor:
    """q [h, d], rows [t, d], sink [h] -> [h, d]."""
    logits = torch.cat([q @ rows.T * scale, sink[:, None]], -1)
    return torch.softmax(logits, -1)[:, :-1] @ rows


def sink_part(sink: Tensor, width: int) -> Part:
    """The sink as a part of its own."""
    return sink, torch.ones_like(sink), sink.new_zeros(sink.shape[0], width)


def split_rows(q: Tensor, rows: Tensor, sink: Tensor, scale: float, splits: int) -> Tensor:
    """`attend_with_sink` cut into `splits` ranges of rows, combined in order after the sink."""
    n = rows.shape[0]
    cuts = [rows[s * n // splits : (s + 1) * n // splits] for s in range(splits)]
    return attention_combine([sink_part(sink, rows.shape[1]), *(attention_part(q, k, k, scale) for k in cuts)])


@register("sparse_attention", part=attention_part, combine=attention_combine, sink=sink_part, split_rows=split_rows)
def sparse_attention(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """q [R, heads*dim][, sel i32 [R, topk]] -> o [R, heads*dim]; padding rows give zeros.

    States: "window" (the last `window` tokens are read, the new one included) and, with `sel`, "compressed" (rows of
    `ratio` tokens; the selected ones are read, -1 is none). Tokens covered by both count twice, by design.
    """
    heads, window, ratio = (op.attr(a) for a in ("heads", "window", "ratio"))
    recent, near = ctx.state(op.state("window")), ctx.of(op.state("window"))
    sink = cast(weights, "sink", ctx)
    q = ins[0].unflatten(-1, (heads, -1))
    out = torch.zeros_like(q)
    for r in range(q.shape[0]):
        if near.new_token(r) is None:
            continue
        length = int(ctx.seq_len[r])
        t = torch.arange(max(0, length - window), length, device=recent.device)
        rows = recent[near.group_rows(r, t, 1)]
        if len(ins) == 2:
            chosen = ins[1][r][ins[1][r] >= 0].long()
            far, state = ctx.of(op.state("compressed"), ratio), ctx.state(op.state("compressed"))
            rows = torch.cat([rows, state[far.group_rows(r, chosen, ratio)]])
        out[r] = attend_with_sink(q[r], rows.to(ctx.math), sink, op.attr("scale"))
    return [out.flatten(-2)]
