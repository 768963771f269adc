"""Kimi Delta Attention per (row, head): conv + SiLU + delta rule + gated norm, float32 inside, one rounding at the end.

State slot <= 0 is padding: the output is zero and no state is written (vLLM's convention).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optkit.execute.bodies.common import elementwise, row_blocks
from optkit.execute.memory import Memory
from optkit.models.ops import rms_scale
from optkit.models.ops.kda import decay
from optkit.plan.types import Stage


def kda(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """Units (row, head); states conv [slots, taps-1, 3D] and recurrent [slots, heads, V, K] are updated in place."""
    heads = stage.param("heads")
    for r0, r1, h0, h1 in row_blocks(units, heads, mem.rows):
        _block(stage, mem, (r0, r1), h0, h1)


def _convolve(
    stage: Stage, mem: Memory, rows: tuple[int, int], h0: int, h1: int, live: torch.Tensor, slots: torch.Tensor
) -> list[torch.Tensor]:
    """SiLU of the causal window for q, k, v of heads [h0, h1): each [live rows, heads * dim]; keeps the raw rows."""
    dim, total = stage.param("dim"), stage.param("heads") * stage.param("dim")
    state = mem.cache(stage.param("conv"))
    out = []
    for i, role in enumerate("qkv"):
        raw = mem.load(stage.param(role), rows, h0 * dim, h1 * dim)[live].float()
        columns = slice(i * total + h0 * dim, i * total + h1 * dim)
        window = torch.cat([state[slots, :, columns].float(), raw[:, None]], 1)
        state[slots, :, columns] = window[:, 1:].to(state.dtype)
        y = (window * mem.weights.dense(stage.param(f"{role}_conv"))[h0 * dim : h1 * dim].T).sum(1)
        out.append(y * torch.sigmoid(y))
    return out


def _delta(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """models.ops.kda.delta_step as one product of fixed shape per head: [R, heads, V, K] -> (new state, o [R, heads, V])."""

    def product(s: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x.flatten(0, 1)[:, None], s.flatten(0, 1).transpose(1, 2)).view(v.shape)

    state = state * alpha[:, :, None, :]
    state = state + (beta[..., None] * (v - product(state, k)))[..., None] * k[:, :, None, :]
    return state, product(state, q)


def _block(stage: Stage, mem: Memory, rows: tuple[int, int], h0: int, h1: int) -> None:
    """Heads [h0, h1) of rows [r0, r1)."""
    dim, eps, n = stage.param("dim"), stage.param("l2_eps"), h1 - h0
    dense = mem.weights.dense
    out = torch.zeros((rows[1] - rows[0], n * dim), device=mem.device)
    all_slots = mem.input("state_slot")[rows[0] : rows[1]]
    live = torch.nonzero(all_slots > 0).flatten()
    slots = all_slots[live].long()
    if len(live):
        q, k, v = (t.reshape(-1, n, dim) for t in _convolve(stage, mem, rows, h0, h1, live, slots))
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + eps) * dim**-0.5
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + eps)
        f = mem.load(stage.param("f"), rows, h0 * dim, h1 * dim)[live].float()
        alpha = decay(
            f,
            dense(stage.param("A_log"))[h0:h1],
            dense(stage.param("dt_bias"))[h0 * dim : h1 * dim],
            stage.param("lower_bound"),
        )
        beta = elementwise(torch.sigmoid, mem.load(stage.param("b"), rows, h0, h1)[live].float())
        store = mem.cache(stage.param("recurrent"))
        state, o = _delta(store[slots, h0:h1].float(), q, k, v, alpha, beta)
        store[slots, h0:h1] = state.to(store.dtype)
        o = o * rms_scale(o, stage.param("eps")) * dense(stage.param("o_norm"))
        g = mem.load(stage.param("g"), rows, h0 * dim, h1 * dim)[live].float()
        out[live] = o.reshape(-1, n * dim) * torch.sigmoid(g)
    mem.store(stage.param("out"), out, rows, h0 * dim)
