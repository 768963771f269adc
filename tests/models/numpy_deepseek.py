"""DeepSeek-V4.1's text decode step in numpy float64, written from the formulas alone: a second opinion for the op math.

Weights are a dict keyed by released checkpoint names, matrices [out, in] expanded, routed experts stacked under
`layers.l.ffn.w1` and so on. One token at a time, one request; caches are lists. `c` holds the constants.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6.0])
MIDDLE = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def rms(x: Array, w: Array | float, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w


def power(v: Array) -> Array:
    return 2.0 ** np.ceil(np.log2(v))


def e4m3(v: Array) -> Array:
    a = np.abs(v)
    q = 2.0 ** (np.floor(np.log2(np.maximum(a, 2.0**-6))) - 3)
    return np.sign(v) * np.minimum(np.round(a / q) * q, 448.0)


def e2m1(v: Array) -> Array:
    a = np.abs(v)
    k = (a[..., None] > MIDDLE).sum(-1)
    t = (a[..., None] == MIDDLE) & (np.arange(7) % 2 == 1)
    return np.copysign(GRID[k + t.sum(-1)], v)


def groups(x: Array, size: int) -> tuple[Array, Array]:
    g = x.reshape(*x.shape[:-1], -1, size)
    return g, np.abs(g).max(-1, keepdims=True)


def fp8(x: Array, size: int) -> Array:
    g, a = groups(x, size)
    s = power(np.maximum(a, 1e-4) / 448)
    return (e4m3(g / s) * s).reshape(x.shape)


def mx4(x: Array) -> Array:
    g, a = groups(x, 32)
    s = power(np.maximum(a, 6 * 2.0**-126) / 6)
    return (e2m1(g / s) * s).reshape(x.shape)


def nv4(x: Array) -> Array:
    g, a = groups(x, 16)
    s = e4m3(np.maximum(a, 6 * 2.0**-9) / 6)
    return (e2m1(g / s) * s).reshape(x.shape)


def bf16(x: Array) -> Array:
    """Round to nearest even on eight significant bits."""
    m, e = np.frexp(x)
    return np.ldexp(np.round(m * 256) / 256, e)


def quantisers(name: str, tail: int) -> dict[str, Any]:
    if name == "official":
        return {"window": lambda x: fp8(x, 32), "compressed": nv4, "keys": mx4, "query": mx4}
    if name == "h200":

        def record(x: Array) -> Array:
            return np.concatenate([fp8(x[..., :-tail], 64), bf16(x[..., -tail:])], -1)

        row = lambda x: fp8(x, x.shape[-1])  # noqa: E731
        return {"window": record, "compressed": record, "keys": row, "query": row}
    return dict.fromkeys(("window", "compressed", "keys", "query"), lambda x: x)


def sig(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array, axis: int) -> Array:
    y = np.exp(x - x.max(axis, keepdims=True))
    return y / y.sum(axis, keepdims=True)


class NumpyDeepseek:
    """c: a deepseek_v41.Config; w: whole-model weights in float64; `clamped` counts how often the clamp bit."""

    def __init__(self, c: Any, w: dict[str, Array], cache_format: str) -> None:
        self.c, self.w, self.q = c, w, quantisers(cache_format, c.rope_dim)
        self.layers: list[dict[str, list[Any]]] = [
            {"window": [], "compressed": [], "keys": [], "pending": []} for _ in c.ratios
        ]
        self.tokens: list[int] = []
        self.clamped = self.activations = 0

    def rope(self, x: Array, position: int, layer: int, inverse: bool = False) -> Array:
        c = self.c
        rd, half = c.rope_dim, np.arange(c.rope_dim // 2)
        theta = c.compressed_rope_theta if c.ratios[layer] else c.rope_theta
        f = theta ** (-2.0 * half / rd)
        if c.ratios[layer]:
            _, factor, fast, slow, original = c.compressed_rope_scaling
            turns = [rd * math.log(original / (r * 2 * math.pi)) / (2 * math.log(theta)) for r in (fast, slow)]
            low, high = max(math.floor(turns[0]), 0), min(math.ceil(turns[1]), rd - 1)
            ramp = np.clip((half - low) / max(high - low, 1e-3), 0, 1)
            f = f / factor * ramp + f * (1 - ramp)
        angle = position * f * (-1 if inverse else 1)
        y, even, odd = x.copy(), x[..., -rd::2], x[..., -rd + 1 :: 2]
        y[..., -rd::2] = even * np.cos(angle) - odd * np.sin(angle)
        y[..., -rd + 1 :: 2] = even * np.sin(angle) + odd * np.cos(angle)
        return y

    def mixes(self, x: Array, n: str) -> tuple[Array, Array, Array]:
        c, k = self.c, self.c.streams
        v = x.reshape(-1)
        m = (self.w[n + "fn"] @ v) / np.sqrt((v * v).mean() + c.rms_norm_eps)
        s, b = self.w[n + "scale"], self.w[n + "base"]
        pre = sig(m[:k] * s[0] + b[:k]) + c.stream_eps
        post = 2 * sig(m[k : 2 * k] * s[1] + b[k : 2 * k])
        mix = softmax((m[2 * k :] * s[2] + b[2 * k :]).reshape(k, k), -1) + c.stream_eps
        mix = mix / (mix.sum(0, keepdims=True) + c.stream_eps)
        for _ in range(c.sinkhorn_iterations - 1):
            mix = mix / (mix.sum(1, keepdims=True) + c.stream_eps)
            mix = mix / (mix.sum(0, keepdims=True) + c.stream_eps)
        return pre, post, mix

    def compress(self, layer: int, x: Array, n: str, position: int) -> None:
        c, w, state, ratio = self.c, self.w, self.layers[layer], self.c.ratios[layer]
        a = w[n + "compressor.wkv.weight"] @ x
        if ratio > 1:
            state["pending"].append((a, w[n + "compressor.wgate.weight"] @ x))
            if len(state["pending"]) < ratio:
                return
            values, gates = (np.stack(t) for t in zip(*state["pending"], strict=True))
            state["pending"] = []
            a = (values * softmax(gates, 0)).sum(0)
        latent = rms(a, w[n + "compressor.norm.weight"], c.rms_norm_eps)
        first = position + 1 - ratio
        key = rms(w[n + "indexer.wk.weight"] @ latent, w[n + "indexer.k_norm.weight"], c.rms_norm_eps)
        state["keys"].append(self.q["keys"](self.rope(key, first, layer)))
        state["compressed"].append(self.q["compressed"](self.rope(latent, first, layer)))

    def select(self, layer: int, x: Array, qr: Array, n: str, position: int) -> None:
        c, w, source = self.c, self.w, self.layers[self.c.source_of(layer)]
        count = (position + 1) // c.ratios[layer]
        self.chosen = np.array([], int)
        if not count:
            return
        q = (w[n + "wq_b.weight"] @ qr).reshape(c.index_heads, c.index_dim)
        q = self.q["query"](self.rope(q, position, layer))
        weight = (w[n + "weights_proj.weight"] @ x) * c.index_dim**-0.5 * c.index_heads**-0.5
        score = (np.maximum(q @ np.stack(source["keys"]).T, 0) * weight[:, None]).sum(0)
        size = c.candidate_block_size
        if layer == c.candidate_source:
            blocks = -(-count // size)
            best = np.full(blocks * size, -np.inf)
            best[:count] = score
            best = best.reshape(blocks, size).max(1)
            best[(count - 1) // size] = np.inf
            keep = np.argsort(-best, kind="stable")[: c.candidate_blocks]
            self.candidates = np.isin(np.arange(count) // size, keep)
        elif 0 <= c.candidate_source < layer:
            score = np.where(self.candidates, score, -np.inf)
        order = np.argsort(-score, kind="stable")[: c.index_topk]
        self.chosen = np.sort(order[np.isfinite(score[order])])

    def attention(self, layer: int, x: Array, n: str) -> Array:
        c, w, state, position = self.c, self.w, self.layers[layer], len(self.tokens) - 1
        qr = rms(w[n + "wq_a.weight"] @ x, w[n + "q_norm.weight"], c.rms_norm_eps)
        q = self.rope((w[n + "wq_b.weight"] @ qr).reshape(c.num_heads, c.head_dim), position, layer)
        kv = rms(w[n + "wkv.weight"] @ x, w[n + "kv_norm.weight"], c.rms_norm_eps)
        state["window"].append(self.q["window"](self.rope(kv, position, layer)))
        rows = state["window"][-c.window :]
        if c.ratios[layer]:
            if layer in c.kv_sources:
                self.compress(layer, x, n, position)
            if layer in c.index_sources:
                self.select(layer, x, qr, n + "indexer.", position)
            rows = rows + [self.layers[c.source_of(layer)]["compressed"][t] for t in self.chosen]
        k = np.stack(rows)
        logits = np.concatenate([q @ k.T * c.head_dim**-0.5, w[n + "attn_sink"][:, None]], 1)
        o = self.rope(softmax(logits, 1)[:, :-1] @ k, position, layer, True).reshape(c.o_groups, -1)
        wo_a = w[n + "wo_a.weight"].reshape(c.o_groups, c.o_lora_rank, -1)
        return w[n + "wo_b.weight"] @ np.einsum("gmk,gk->gm", wo_a, o).reshape(-1)

    def expert(self, x: Array, w1: Array, w3: Array, w2: Array) -> Array:
        gate, up, limit = w1 @ x, w3 @ x, self.c.swiglu_limit
        self.clamped += int((gate > limit).sum() + (np.abs(up) > limit).sum())
        self.activations += gate.size
        gate = np.minimum(gate, limit)
        return w2 @ (gate * sig(gate) * np.clip(up, -limit, limit))

    def moe(self, layer: int, x: Array, n: str) -> Array:
        c, w = self.c, self.w
        s = np.sqrt(np.log1p(np.exp(w[n + "gate.weight"] @ x)))
        ids = np.argsort(-(s + w[n + "gate.bias"]), kind="stable")[: c.experts_per_token]
        share = s[ids] / (s[ids].sum() + 1e-20) * c.routed_scaling_factor
        y = self.expert(x, *(w[f"{n}shared_experts.w{i}.weight"] for i in (1, 3, 2)))
        for e, a in zip(ids, share, strict=True):
            y = y + a * self.expert(x, *(w[f"{n}w{i}"][e] for i in (1, 3, 2)))
        return y

    def engram(self, layer: int, x: Array, n: str) -> Array:
        c, w = self.c, self.w
        h, pad = c.hashes()[layer], int(w["engram.token_classes"][c.engram_pad_token])
        last = [int(w["engram.token_classes"][t]) for t in self.tokens[::-1][: c.engram_ngram]]
        last += [pad] * (c.engram_ngram - len(last))
        value, rows = last[0] * h.multipliers[0], []
        for i in range(1, c.engram_ngram):
            value ^= last[i] * h.multipliers[i]
            for j in range((i - 1) * c.engram_heads, i * c.engram_heads):
                rows.append(value % h.moduli[j] + h.offsets[j])
        kv = w[n + "wkv.weight"] @ w[n + "embed.weight"][rows].reshape(-1)
        keys, memory = kv[: x.size].reshape(x.shape), kv[x.size :]
        normed = rms(x, 1.0, c.rms_norm_eps) * rms(keys, 1.0, c.rms_norm_eps)
        d = (w[n + "q_weight"] * w[n + "k_weight"] * normed).sum(-1) * c.hidden_size**-0.5
        return x + sig(np.sign(d) * np.sqrt(np.maximum(np.abs(d), 1e-6)))[:, None] * memory

    def step(self, token: int) -> Array:
        c, w = self.c, self.w
        self.tokens.append(token)
        x = np.repeat(w["embed.weight"][token][None], c.streams, 0)
        pre = np.eye(c.streams)[0]
        for layer in range(c.num_layers):
            n = f"layers.{layer}."
            if layer in c.engram_layers:
                x = self.engram(layer, x, n + "engram.")
            for sub, run, part in (("attn", self.attention, "attn."), ("ffn", self.moe, "ffn.")):
                following, post, mix = self.mixes(x, f"{n}hc_{sub}_")
                y = run(layer, rms(pre @ x, w[f"{n}{sub}_norm.weight"], c.rms_norm_eps), n + part)
                x, pre = post[:, None] * y[None] + mix.T @ x, following
        return w["head.weight"] @ rms(pre @ x, w["norm.weight"], c.rms_norm_eps)
