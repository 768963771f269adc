"""Several residual streams per token, mixed by doubly stochastic coefficients (manifold-constrained hyper-connections).

X is [R, streams*H], stream k at columns k*H. A site's coefficients come from X at its entry: `pre` weighs the streams
into a sub-layer's input, `post` spreads its output, `mix` [j, k] carries stream j over to stream k. mHC (arXiv
2512.24880); DeepSeek-V4.1 reads every input with the `pre` of the site before, which is the graph's wiring, not the ops'.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, cast, register, rms_scale

Weights = Mapping[str, WeightTensor]


@register("repeat")
def repeat(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """p [R, H] -> X [R, times*H], every stream p."""
    return [ins[0].repeat(1, op.attr("times"))]


def split_scores(x: Tensor, w: Tensor, eps: float, splits: int) -> Tensor:
    """`stream_scores` from `splits` column ranges: m and the sum of squares add up, the division comes last."""
    n = x.shape[1]
    cuts = [slice(s * n // splits, (s + 1) * n // splits) for s in range(splits)]
    m = torch.stack([x[:, c] @ w[:, c].T for c in cuts]).sum(0)
    square = torch.stack([(x[:, c] * x[:, c]).sum(-1) for c in cuts]).sum(0)
    return m * torch.rsqrt(square / n + eps)[:, None]


def equal_streams(p: Tensor, w: Tensor, eps: float, streams: int) -> Tensor:
    """`stream_scores` where every stream is p [R, H] (before the first layer): the weight summed over streams."""
    return p @ w.unflatten(1, (streams, -1)).sum(1).T * rms_scale(p, eps)


@register("stream_scores", split_scores=split_scores, equal_streams=equal_streams)
def stream_scores(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """X [R, n*H] -> m [R, n*(n+2)] = (W X) / rms(X), W [n*(n+2), n*H] in f32."""
    return [ins[0] @ cast(weights, "w", ctx).T * rms_scale(ins[0], op.attr("eps"))]


def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """[R, n, n] -> nearly doubly stochastic: row softmax, then columns and rows normalised in turn."""
    c = torch.softmax(logits, -1) + eps
    c = c / (c.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        c = c / (c.sum(-1, keepdim=True) + eps)
        c = c / (c.sum(-2, keepdim=True) + eps)
    return c


@register("stream_gates")
def stream_gates(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """m [R, n*(n+2)] -> pre [R, n], post [R, n], mix [R, n*n]; scale [3] and base [n*(n+2)] in f32.

    pre = sigmoid(.) + eps, post = post_factor * sigmoid(.), mix = sinkhorn(.).
    """
    n, eps = op.attr("streams"), op.attr("eps")
    scale = cast(weights, "scale", ctx).repeat_interleave(torch.tensor([n, n, n * n], device=ins[0].device))
    logits = ins[0] * scale + cast(weights, "base", ctx)
    pre, post = torch.sigmoid(logits[:, :n]) + eps, op.attr("post_factor") * torch.sigmoid(logits[:, n : 2 * n])
    mix = sinkhorn(logits[:, 2 * n :].unflatten(-1, (n, n)), op.attr("iterations"), eps)
    return [pre, post, mix.flatten(-2)]


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """X [R, n*H], pre [R, n] -> sum_k pre_k X_k [R, H]."""
    return torch.einsum("rk,rkh->rh", pre, x.unflatten(-1, (pre.shape[1], -1)))


def expand(y: Tensor, x: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """y [R, H], X [R, n*H] -> X'_k = post_k y + sum_j mix[j, k] X_j."""
    n = post.shape[1]
    carried = torch.einsum("rjk,rjh->rkh", mix.unflatten(-1, (n, n)), x.unflatten(-1, (n, -1)))
    return (post[..., None] * y[:, None] + carried).flatten(-2)


def collapse_ahead(y: Tensor, x: Tensor, pre: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """collapse(expand(y, ...), pre) = a y + base with a and base known before y is: one axpy behind the exchange."""
    n = post.shape[1]
    a = (pre * post).sum(-1, keepdim=True)
    carry = torch.einsum("rjk,rk->rj", mix.unflatten(-1, (n, n)), pre)
    return a * y + collapse(x, carry)


@register("stream_collapse", collapse_ahead=collapse_ahead)
def stream_collapse(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """X, pre -> h [R, H]."""
    return [collapse(ins[0], ins[1])]


@register("stream_expand")
def stream_expand(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """y, X, post, mix -> X'."""
    return [expand(*ins)]


@register("stream_add")
def stream_add(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """X [R, n*H], v [R, >= H] (its last H columns), g [R, n] -> X_k + g_k v."""
    x, g = ins[0].unflatten(-1, (ins[2].shape[1], -1)), ins[2]
    return [(x + g[..., None] * ins[1][:, None, -x.shape[-1] :]).flatten(-2)]
