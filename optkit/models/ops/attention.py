"""Paged attention: MLA without positions in absorbed form, and grouped-query attention with rotary positions.

Caches are reached through the block table only. A row whose slot_mapping is negative is padding: no write, zero out.
The split-KV decomposition is the online-softmax identity: parts (m, l, o) over disjoint token ranges combine exactly.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, cast, register, rms_scale
from optkit.models.rope import inverse_frequencies

Weights = Mapping[str, WeightTensor]
Part = tuple[Tensor, Tensor, Tensor]
CHUNK_TOKENS = 64
"""A split takes whole chunks of 64 tokens, the tile of the kernel's attention body."""


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [h, dqk], k [t, dqk], v [t, dv] -> softmax(q k^T * scale) v, [h, dv]."""
    return torch.softmax(q @ k.T * scale, -1) @ v


def attention_part(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Part:
    """The same over a (possibly empty) range of tokens: m [h] maximum, l [h] sum of exp, o [h, dv] unnormalised."""
    if k.shape[0] == 0:
        return q.new_full((q.shape[0],), -torch.inf), q.new_zeros(q.shape[0]), q.new_zeros(q.shape[0], v.shape[1])
    s = q @ k.T * scale
    m = s.max(-1).values
    e = torch.exp(s - m[:, None])
    return m, e.sum(-1), e @ v


def attention_combine(parts: list[Part]) -> Tensor:
    """Parts over disjoint token ranges, in order -> [h, dv]."""
    m = torch.stack([p[0] for p in parts]).max(0).values
    scale = [torch.exp(p[0] - m) for p in parts]
    total = sum(p[1] * s for p, s in zip(parts, scale, strict=True))
    out = sum(p[2] * s[:, None] for p, s in zip(parts, scale, strict=True))
    assert isinstance(total, Tensor) and isinstance(out, Tensor)
    return out / total[:, None]


def split_ranges(tokens: int, splits: int, chunk: int = CHUNK_TOKENS) -> list[range]:
    """Token range of every split: of n = ceil(tokens / chunk) chunks, s takes [s n // splits, (s+1) n // splits)."""
    n = -(-tokens // chunk)
    return [
        range(min(s * n // splits * chunk, tokens), min((s + 1) * n // splits * chunk, tokens)) for s in range(splits)
    ]


def split_kv(q: Tensor, k: Tensor, v: Tensor, scale: float, splits: int) -> Tensor:
    """`attend` cut into `splits` token ranges."""
    ranges = split_ranges(k.shape[0], splits)
    return attention_combine([attention_part(q, k[r.start : r.stop], v[r.start : r.stop], scale) for r in ranges])


def unabsorbed_mla(q: Tensor, latent: Tensor, w_uk: Tensor, w_uv: Tensor, nope: int, scale: float) -> Tensor:
    """MLA by expanding keys and values of every token with kv_b, as prefill does.

    q [h, nope+rope], latent rows [t, lora+rope], w_uk [h*lora, nope] (transposed per head), w_uv [h*v, lora]
    -> o [h, v]; the absorbed form is w_uv applied to `attend` over the latent rows with queries w_uk q.
    """
    heads, lora = q.shape[0], w_uv.shape[1]
    c, position = latent[:, :lora], latent[:, lora:]
    k = torch.einsum("tl,hln->htn", c, w_uk.reshape(heads, lora, nope))
    v = torch.einsum("tl,hvl->htv", c, w_uv.reshape(heads, -1, lora))
    s = (torch.einsum("hn,htn->ht", q[:, :nope], k) + q[:, nope:] @ position.T) * scale
    return torch.einsum("ht,htv->hv", torch.softmax(s, -1), v)


@register("mla_insert")
def mla_insert(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """kva [R, lora + rope] -> writes [RMS(c; w) | k_p] at slot_mapping; k_p is neither normalised nor rotated."""
    lora, kv = op.attr("lora"), ctx.state(op.state("kv"))
    c = ins[0][:, :lora]
    row = torch.cat([c * rms_scale(c, op.attr("eps")) * cast(weights, "w", ctx), ins[0][:, lora:]], -1).to(kv.dtype)
    for r in range(row.shape[0]):
        if (where := ctx.new_token(r)) is not None:
            kv[where] = row[r]
    return []


@register("mla_attention", part=attention_part, combine=attention_combine, split_kv=split_kv, unabsorbed=unabsorbed_mla)
def mla_attention(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """ql [R, heads*lora], q [R, heads*(nope+rope)] -> ol [R, heads*lora]: one latent head shared by all queries."""
    heads, lora, nope, rope = (op.attr(a) for a in ("heads", "lora", "nope", "rope"))
    kv = ctx.state(op.state("kv"))
    rows = ins[0].shape[0]
    q = torch.cat([ins[0].reshape(rows, heads, lora), ins[1].reshape(rows, heads, nope + rope)[..., nope:]], -1)
    out = torch.zeros_like(ins[0])
    for r in range(rows):
        if ctx.new_token(r) is not None:
            latent = kv[ctx.token_rows(r)].to(ctx.math)
            out[r] = attend(q[r], latent, latent[:, :lora], op.attr("scale")).flatten()
    return [out]


def rotate(x: Tensor, position: Tensor, theta: float, scaling: tuple[float, ...]) -> Tensor:
    """x [R, heads, dim] rotated at position [R]; halves paired as (i, i + dim/2)."""
    half = x.shape[-1] // 2
    freq = torch.tensor(inverse_frequencies(2 * half, theta, scaling), dtype=x.dtype, device=x.device)
    angle = (position.to(x.dtype)[:, None] * freq)[:, None]
    a, b, cos, sin = x[..., :half], x[..., half:], torch.cos(angle), torch.sin(angle)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@register("rope_insert")
def rope_insert(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """q [R, heads*dim], k, v [R, kv_heads*dim] -> qr; rotated k and v are written at slot_mapping. Padding: zeros."""
    rows, dim = ins[0].shape[0], op.attr("dim")
    keys, values = ctx.kv_pair(op.state("kv_heads"))
    position = (ctx.seq_len - 1).clamp(min=0)
    q, k = (rotate(t.reshape(rows, -1, dim), position, op.attr("theta"), op.attr("scaling")) for t in ins[:2])
    v = ins[2].reshape(rows, -1, dim)
    out = torch.zeros_like(ins[0])
    for r in range(rows):
        if (where := ctx.new_token(r)) is not None:
            keys[where], values[where] = k[r].to(keys.dtype), v[r].to(values.dtype)
            out[r] = q[r].flatten()
    return [out]


@register("gqa_attention", part=attention_part, combine=attention_combine, split_kv=split_kv)
def gqa_attention(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """qr [R, heads*dim] -> o [R, heads*dim]; query head h reads kv head h // (heads / kv_heads)."""
    heads, groups, dim = op.attr("heads"), op.attr("kv_heads"), op.attr("dim")
    keys, values = ctx.kv_pair(op.state("kv_heads"))
    q = ins[0].reshape(-1, groups, heads // groups, dim)
    out = torch.zeros_like(q)
    for r in range(q.shape[0]):
        if ctx.new_token(r) is not None:
            where = ctx.token_rows(r)
            k, v = keys[where].to(ctx.math), values[where].to(ctx.math)
            for g in range(groups):
                out[r, g] = attend(q[r, g], k[:, g], v[:, g], op.attr("scale"))
    return [out.reshape(ins[0].shape)]
