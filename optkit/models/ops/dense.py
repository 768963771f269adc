"""Embedding, norms, projections and elementwise ops."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, activation, cast, register, rms_scale

Weights = Mapping[str, WeightTensor]


@register("embed")
def embed(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """token -> p: the row of this rank's vocabulary shard; zeros for a token of another shard."""
    table = weights["w"]
    assert isinstance(table, Tensor)
    local = ins[0].long() - op.attr("vocab_start")
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[torch.where(mine, local, 0)].to(ctx.math)
    return [rows * mine[:, None].to(ctx.math)]


@register("rmsnorm")
def rmsnorm(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """x -> x * w / sqrt(mean(x^2) + eps)."""
    x = ins[0]
    return [x * rms_scale(x, op.attr("eps")) * cast(weights, "w", ctx)]


def split_k(x: Tensor, w: Tensor, splits: int) -> Tensor:
    """Linear as `splits` partial sums over contiguous column ranges, added in order."""
    k = w.shape[1]
    y = torch.zeros(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    for s in range(splits):
        cols = slice(s * k // splits, (s + 1) * k // splits)
        y = y + x[:, cols] @ w[:, cols].T
    return y


def deferred_norm(x: Tensor, norm: Tensor, eps: float, w: Tensor) -> Tensor:
    """Linear after RMSNorm, with the scalar 1/rms applied to the product: (W (x * norm)) / rms(x).

    The projection can start before the mean square of x is known.
    """
    return ((x * norm) @ w.T) * rms_scale(x, eps)


@register("linear", split_k=split_k, deferred_norm=deferred_norm)
def linear(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """x [R, K] -> W x [R, M], W [M, K]."""
    return [ins[0] @ cast(weights, "w", ctx).T]


@register("grouped_linear")
def grouped_linear(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """Group g: y_g = W_g x[g * x_stride + x_offset : + K]; W [G * M, K]."""
    w, groups = cast(weights, "w", ctx), op.attr("groups")
    w = w.reshape(groups, -1, w.shape[1])
    start = op.attr("x_offset")
    x = ins[0].reshape(ins[0].shape[0], groups, op.attr("x_stride"))[..., start : start + w.shape[2]]
    return [torch.einsum("rgk,gmk->rgm", x, w).reshape(x.shape[0], -1)]


@register("sigmoid_mul")
def sigmoid_mul(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """a, g -> a * sigmoid(g)."""
    return [ins[0] * torch.sigmoid(ins[1])]


@register("act_mul")
def act_mul(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """g, u -> act(g, u)."""
    return [activation(op.attr("act"), ins[0], ins[1], op.attr("beta"), op.attr("linear_beta"))]


@register("add")
def add(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """p, a[, b...] -> p + delta; outside the reference delta = a + b + ... is rounded to bf16 before it is added."""
    delta = ins[1]
    for extra in ins[2:]:
        delta = delta + extra
    if ctx.math != torch.float64:
        delta = delta.to(torch.bfloat16).to(ctx.math)
    return [ins[0] + delta]


@register("sum")
def sum_terms(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """a, b, ... -> a + b + ..., added in order; one rounding, to the output's dtype."""
    total = ins[0]
    for term in ins[1:]:
        total = total + term
    return [total]
