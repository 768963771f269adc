"""Router and routed experts with MXFP4 weights (LatentMoE: experts work on a latent of the token).

DeepSeek-V3 style router (sigmoid, or the square root of softplus): the bias steers the choice and is not part of the
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, activation, cast, register
from optkit.models.ops.choices import adopt
from optkit.models.ops.mxfp4 import dequantise

Weights = Mapping[str, WeightTensor]
CHUNK_ELEMENTS = 1 << 26
"""Experts are expanded in chunks of at most this many elements, 512 MiB in float64."""


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) without overflow and without the linear shortcut for large x."""
    return torch.logaddexp(x, torch.zeros_like(x))


@register("route")
def route(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """logits [R, E] -> ids [R, topk] by falling s + bias (ties: lower id), wts = shares of the chosen s.

    s = sigmoid(logit), or sqrt(softplus(logit)) where attr `score` says "sqrt_softplus".
    """
    topk, score = op.attr("topk"), dict(op.attrs).get("score", "sigmoid")
    s = torch.sigmoid(ins[0]) if score == "sigmoid" else torch.sqrt(softplus(ins[0]))
    biased = s + cast(weights, "bias", ctx)
    ids = torch.sort(biased, dim=-1, descending=True, stable=True).indices[:, :topk]
    if ctx.choices is not None and op.outputs[0] in ctx.choices.ids:
        ids = adopt(op.outputs[0], ids, biased, ctx.choices.score_error, ctx)
    chosen = s.gather(-1, ids)
    wts = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * op.attr("scale")
    return [ids.int(), wts]


def _chunks(w: WeightTensor, experts: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(range of `experts`, their weights [u, out, in] in dtype), chunk by chunk."""
    per = w[0][0].numel() * 2 if isinstance(w, tuple) else w[0].numel()
    size = max(1, CHUNK_ELEMENTS // per)
    for start in range(0, experts.shape[0], size):
        part = slice(start, start + size)
        e = experts[part]
        yield part, dequantise(w[0][e], w[1][e], dtype) if isinstance(w, tuple) else w[e].to(dtype)


def _slots(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct experts [U] and, per (row, k), the index into them [R, topk]."""
    return torch.unique(ids.long(), return_inverse=True)


@register("expert_gate_up")
def expert_gate_up(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """z [R, L], ids -> ea [R, topk * I] = act(W1_e z, W3_e z) of every chosen expert; W1, W3 [E, I, L]."""
    z, ids = ins
    experts, where = _slots(ids)
    row = torch.arange(ids.shape[0], device=ids.device)[:, None]
    gate, up = (
        torch.cat([torch.einsum("uil,rl->uri", w, z) for _, w in _chunks(weights[role], experts, ctx.math)])[where, row]
        for role in ("w1", "w3")
    )
    out = activation(op.attr("act"), gate, up, op.attr("beta"), op.attr("linear_beta"))
    return [out.flatten(1)]


@register("expert_down")
def expert_down(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """ea [R, topk * I], ids, wts -> y [R, L] = sum over k, in ids order, of wts_k W2_e ea_k; W2 [E, L, I]."""
    ea, ids, wts = ins
    rows, topk = ids.shape
    experts, where = _slots(ids)
    row = torch.arange(rows, device=ids.device)[:, None]
    x = ea.new_zeros(experts.shape[0], rows, ea.shape[1] // topk)
    x[where, row] = ea.reshape(rows, topk, -1)  # an expert is chosen at most once by a row
    parts = [torch.einsum("uli,uri->url", w, x[part]) for part, w in _chunks(weights["w2"], experts, ctx.math)]
    each = torch.cat(parts)[where, row] * wts[..., None]
    y = each[:, 0]
    for k in range(1, topk):
        y = y + each[:, k]
    return [y]
