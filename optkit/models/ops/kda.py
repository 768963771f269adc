"""Kimi Delta Attention: short convolution, gated delta rule with a decay per key channel, gated output norm.

Kimi Linear (arXiv 2510.26692) with K3's lower-bounded decay. State layouts are vLLM's: conv [slot, taps-1, 3D],
rows oldest first, channels q | k | v; recurrent [slot, head, V, K]. Slot <= 0 is padding: no write, output zero.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, cast, register, rms_scale

Weights = Mapping[str, WeightTensor]


@register("kda_conv")
def kda_conv(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """q_raw, k_raw, v_raw [R, D] -> q, k, v [R, D]: SiLU of the causal depthwise window; keeps the last raw rows."""
    state = ctx.state(op.state("conv"))
    raw = torch.cat(ins, -1)
    taps = torch.cat([cast(weights, role, ctx) for role in ("q", "k", "v")])  # [3D, taps], oldest first
    live = torch.nonzero(ctx.state_slot > 0).flatten()
    slots = ctx.state_slot[live].long()
    window = torch.cat([state[slots].to(ctx.math), raw[live, None]], 1)
    state[slots] = window[:, 1:].to(state.dtype)
    y = (window * taps.T).sum(1)
    out = torch.zeros_like(raw)
    out[live] = y * torch.sigmoid(y)
    return list(out.chunk(3, -1))


def decay(f: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """alpha [R, heads, dim] = exp(lower_bound * sigmoid(exp(A_log) * (f + dt_bias))), one per key channel."""
    heads = a_log.shape[0]
    gate = (f + dt_bias).reshape(f.shape[0], heads, f.shape[1] // heads) * torch.exp(a_log)[:, None]
    return torch.exp(lower_bound * torch.sigmoid(gate))


def delta_step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the gated delta rule.

    state [R, heads, V, K]; q, k, alpha [R, heads, K]; v [R, heads, V]; beta [R, heads]. Decay first, then
    the delta rule, then the read-out of the updated state. Returns (new state, o [R, heads, V]).
    """
    state = state * alpha[:, :, None, :]
    delta = beta[..., None] * (v - torch.einsum("rhvk,rhk->rhv", state, k))
    state = state + delta[..., None] * k[:, :, None, :]
    return state, torch.einsum("rhvk,rhk->rhv", state, q)


@register("kda_recurrence")
def kda_recurrence(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """q, k, v, f [R, D], b [R, heads] -> o [R, D]."""
    store = ctx.state(op.state("recurrent"))
    heads, dim, eps = op.attr("heads"), op.attr("dim"), op.attr("l2_eps")
    live = torch.nonzero(ctx.state_slot > 0).flatten()
    slots = ctx.state_slot[live].long()
    q, k, v = (t[live].reshape(-1, heads, dim) for t in ins[:3])
    q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + eps) * dim**-0.5
    k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + eps)
    alpha = decay(ins[3][live], cast(weights, "A_log", ctx), cast(weights, "dt_bias", ctx), op.attr("lower_bound"))
    state, o = delta_step(store[slots].to(ctx.math), q, k, v, alpha, torch.sigmoid(ins[4][live]))
    store[slots] = state.to(store.dtype)
    out = torch.zeros_like(ins[0])
    out[live] = o.reshape(-1, heads * dim)
    return [out]


@register("gated_norm")
def gated_norm(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """o, g [R, D] -> RMSNorm per head of o, times sigmoid(g)."""
    o = ins[0].reshape(-1, op.attr("heads"), op.attr("dim"))
    o = o * rms_scale(o, op.attr("eps")) * cast(weights, "w", ctx)
    return [o.reshape(ins[0].shape) * torch.sigmoid(ins[1])]
