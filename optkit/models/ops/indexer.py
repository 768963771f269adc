"""Choosing which compressed keys a token attends to: scores of a small index head set, top-k, candidate blocks.

score_t = scale * sum_h w_h max(0, q_h . k_t) over visible groups t < n = seq_len // ratio (the group that the new token
closes included). Source: DeepSeek-V4.1's inference code. Equal scores: the lower t. A selection is a set; it is listed
in rising order and padded with -1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, register
from optkit.models.ops.choices import adopt

Weights = Mapping[str, WeightTensor]
Part = tuple[Tensor, Tensor]


def index_scores(q: Tensor, w: Tensor, keys: Tensor, scale: float) -> Tensor:
    """q [h, d], w [h], keys [n, d] -> [n]."""
    return scale * (w[:, None] * (q @ keys.T).clamp(min=0)).sum(0)


def top(scores: Tensor, k: int) -> Tensor:
    """Indices of the k largest in rising order; ties: the lower index; fewer if there are fewer finite scores."""
    order = torch.sort(scores, descending=True, stable=True).indices[:k]
    return order[torch.isfinite(scores[order])].sort().values


def top_part(scores: Tensor, start: int, k: int) -> Part:
    """(scores, indices) of the k largest of one range of keys that begins at `start`, best first, ties: lower index."""
    order = torch.sort(scores, descending=True, stable=True).indices[:k]
    order = order[torch.isfinite(scores[order])]
    return scores[order], order + start


def top_combine(parts: list[Part], k: int) -> Tensor:
    """The k best of parts over disjoint rising ranges, in rising order of index: equal to `top` over all keys."""
    scores, ids = torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    return ids[torch.sort(scores, descending=True, stable=True).indices[:k]].sort().values


def split_top(scores: Tensor, k: int, splits: int, align: int = 1) -> Tensor:
    """`top` cut into `splits` ranges of whole multiples of `align` keys."""
    n = -(-scores.shape[0] // align)
    cuts = [min(s * n // splits * align, scores.shape[0]) for s in range(splits + 1)]
    return top_combine([top_part(scores[a:b], a, k) for a, b in zip(cuts, cuts[1:], strict=False)], k)


def block_maxima(scores: Tensor, size: int) -> Tensor:
    """[n] -> [ceil(n / size)]: the best score of every block; the newest block always wins (+inf)."""
    padded = torch.full((-(-scores.shape[0] // size) * size,), -torch.inf, dtype=scores.dtype, device=scores.device)
    padded[: scores.shape[0]] = scores
    best = padded.reshape(-1, size).amax(-1)
    best[-1] = torch.inf
    return best


def _top_blocks(best: Tensor, k: int) -> Tensor:
    """Block ids in rising order; +inf counts as a score here."""
    return torch.sort(best, descending=True, stable=True).indices[:k].sort().values


def _padded(ids: Tensor, width: int) -> Tensor:
    out = torch.full((width,), -1, dtype=torch.int64, device=ids.device)
    out[: ids.shape[0]] = ids
    return out


@register("index_select", top_part=top_part, top_combine=top_combine, split_top=split_top)
def index_select(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """iq [R, heads*dim], iw [R, heads][, blocks [R, keep]] -> sel i32 [R, topk][, blocks i32 [R, keep]].

    With `blocks` as an input only keys of those blocks (of `block_size` groups) compete; as an output, the `keep_blocks`
    blocks with the best maxima over all keys are published. sel holds group numbers of the request. Padding rows: -1.
    """
    heads, topk, ratio, size = (op.attr(a) for a in ("heads", "topk", "ratio", "block_size"))
    publishes, keep = len(op.outputs) == 2, op.attr("keep_blocks")
    state, ctx = ctx.state(op.state("keys")), ctx.of(op.state("keys"), ratio)
    rows = ins[0].shape[0]
    q = ins[0].unflatten(-1, (heads, -1))
    groups = [int(ctx.seq_len[r]) // ratio if int(ctx.slot_mapping[r]) >= 0 else 0 for r in range(rows)]
    scores = ins[0].new_full((rows, max(groups)), -torch.inf)
    for r, n in enumerate(groups):
        t = torch.arange(n, device=state.device)
        if len(ins) == 3:
            t = t[torch.isin(t // size, ins[2][r])]
        if t.numel():
            keys = state[ctx.group_rows(r, t, ratio)].to(ctx.math)
            scores[r, t] = index_scores(q[r], ins[1][r], keys, op.attr("scale"))
    sel = torch.stack([_padded(top(scores[r], topk), topk) for r in range(rows)])
    best = torch.full((rows, -(-scores.shape[1] // size)), -torch.inf, dtype=scores.dtype, device=scores.device)
    for r, n in enumerate(groups if publishes else ()):
        if n:
            best[r, : -(-n // size)] = block_maxima(scores[r, :n], size)
    results = [sel]
    if publishes:
        results.append(
            torch.stack([_padded(_top_blocks(best[r, : -(-n // size)], keep), keep) for r, n in enumerate(groups)])
        )
    if (choices := ctx.choices) is not None:
        results = [
            adopt(name, own, by, choices.key_score_error, ctx, what) if name in choices.ids else own
            for name, own, by, what in zip(op.outputs, results, (scores, best), ("key", "block"), strict=False)
        ]
    return [ids.int() for ids in results]
