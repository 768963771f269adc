"""Kimi K3's text decode step in numpy float64, written from the formulas alone: a second opinion for the op math.

Weights are a dict keyed by checkpoint names without wrapper prefix, matrices [out, in], experts dequantised
(`dequantise`). One token at a time, one request; caches are dense. `c` holds the constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def sig(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def rms(x: Array, w: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def situ(g: Array, u: Array, beta: float, linear_beta: float) -> Array:
    return beta * np.tanh(g / beta) * sig(g) * (linear_beta * np.tanh(u / linear_beta))


def dequantise(packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Array:
    """packed [.., K/2] (low nibble first), scale [.., K/32] -> [.., K]."""
    code = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    value = E2M1[code & 7] * np.where(code & 8, -1.0, 1.0)
    return value * np.repeat(np.exp2(scale.astype(np.float64) - 127), 32, -1)


class NumpyK3:
    """c: a kimi_k3.Config; w: whole-model weights in float64."""

    def __init__(self, c: Any, w: dict[str, Array]) -> None:
        self.c, self.w = c, w

    def mix(self, rows: list[Array], pre: str) -> Array:
        if len(rows) == 1:
            return rows[0]
        u = self.w[pre + "_norm.weight"] * self.w[pre + "_proj.weight"].reshape(-1)
        v = np.stack(rows)
        s = (v @ u) / np.sqrt(np.mean(v * v, -1) + self.c.rms_norm_eps)
        a = np.exp(s - s.max())
        return (a / a.sum()) @ v

    def kda(self, x: Array, st: dict[str, Array], p: str) -> Array:
        c, w = self.c, self.w
        heads, dim = c.kda_heads, c.kda_head_dim
        raw = np.concatenate([w[p + f"{n}_proj.weight"] @ x for n in "qkv"])
        taps = np.concatenate([w[p + f"{n}_conv1d.weight"].reshape(-1, c.conv_taps) for n in "qkv"])
        window = np.concatenate([st["conv"], raw[None]])
        st["conv"] = window[1:]
        y = (window * taps.T).sum(0)
        q, k, v = (y * sig(y)).reshape(3, heads, dim)
        q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) * dim**-0.5
        k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
        f = w[p + "f_b_proj.weight"] @ (w[p + "f_a_proj.weight"] @ x) + w[p + "dt_bias"]
        alpha = np.exp(c.gate_lower_bound * sig(np.exp(w[p + "A_log"][:heads])[:, None] * f.reshape(heads, dim)))
        beta = sig(w[p + "b_proj.weight"] @ x)
        s = st["S"] * alpha[:, None, :]
        d = beta[:, None] * (v - np.einsum("hvk,hk->hv", s, k))
        st["S"] = s = s + d[:, :, None] * k[:, None, :]
        o = rms(np.einsum("hvk,hk->hv", s, q), w[p + "o_norm.weight"], c.rms_norm_eps).reshape(-1)
        return w[p + "o_proj.weight"] @ (o * sig(w[p + "g_proj.weight"] @ x))

    def mla(self, x: Array, st: dict[str, Array], p: str) -> Array:
        c, w = self.c, self.w
        heads, nope, rope, lora = c.num_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
        qc = rms(w[p + "q_a_proj.weight"] @ x, w[p + "q_a_layernorm.weight"], c.qk_lora_norm_eps)
        q = (w[p + "q_b_proj.weight"] @ qc).reshape(heads, nope + rope)
        a = w[p + "kv_a_proj_with_mqa.weight"] @ x
        row = np.concatenate([rms(a[:lora], w[p + "kv_a_layernorm.weight"], c.qk_lora_norm_eps), a[lora:]])
        st["kv"] = np.vstack([st["kv"], row])
        kvb = w[p + "kv_b_proj.weight"].reshape(heads, -1, lora)
        ql = np.einsum("hd,hdl->hl", q[:, :nope], kvb[:, :nope])
        s = np.concatenate([ql, q[:, nope:]], -1) @ st["kv"].T * (nope + rope) ** -0.5
        e = np.exp(s - s.max(-1, keepdims=True))
        o = (e / e.sum(-1, keepdims=True)) @ st["kv"][:, :lora]
        o = np.einsum("hl,hdl->hd", o, kvb[:, nope:]).reshape(-1)
        return w[p + "o_proj.weight"] @ (o * sig(w[p + "g_proj.weight"] @ x))

    def mlp(self, x: Array, p: str) -> Array:
        w, c = self.w, self.c
        gate, up = w[p + "gate_proj.weight"] @ x, w[p + "up_proj.weight"] @ x
        return w[p + "down_proj.weight"] @ situ(gate, up, c.situ_beta, c.situ_linear_beta)

    def moe(self, x: Array, p: str) -> Array:
        c, w = self.c, self.w
        s = sig(w[p + "gate.weight"] @ x)
        chosen = np.argsort(-(s + w[p + "gate.e_score_correction_bias"]), kind="stable")[: c.experts_per_token]
        share = s[chosen] / (s[chosen].sum() + 1e-20) * c.routed_scaling_factor
        z = w[p + "routed_expert_down_proj.weight"] @ x
        y = np.zeros_like(z)
        for e, weight in zip(chosen, share, strict=True):
            w1, w3, w2 = (w[f"{p}experts.{e}.{n}.weight"] for n in ("w1", "w3", "w2"))
            y = y + weight * (w2 @ situ(w1 @ z, w3 @ z, c.situ_beta, c.situ_linear_beta))
        y = rms(y, w[p + "routed_expert_norm.weight"], c.rms_norm_eps)
        return w[p + "routed_expert_up_proj.weight"] @ y + self.mlp(x, p + "shared_experts.")

    def new_state(self) -> list[dict[str, Array]]:
        c = self.c
        mla = {"kv": np.zeros((0, c.kv_lora_rank + c.qk_rope_head_dim))}
        width, dim = c.kda_heads * c.kda_head_dim, c.kda_head_dim
        kda = {"conv": np.zeros((c.conv_taps - 1, 3 * width)), "S": np.zeros((c.kda_heads, dim, dim))}
        return [dict(mla if i in c.full_attn_layers else kda) for i in range(c.num_layers)]

    def step(self, token: int, state: list[dict[str, Array]]) -> Array:
        c, w = self.c, self.w
        prefix, blocks = w["model.embed_tokens.weight"][token], []
        for i in range(c.num_layers):
            n = f"model.layers.{i}."
            h = self.mix([*blocks, prefix], n + "self_attention_res")
            x = rms(h, w[n + "input_layernorm.weight"], c.rms_norm_eps)
            y = (self.mla if i in c.full_attn_layers else self.kda)(x, state[i], n + "self_attn.")
            if i % c.block_size == 0:
                blocks.append(prefix)
                prefix = y
            else:
                prefix = prefix + y
            h = self.mix([*blocks, prefix], n + "mlp_res")
            x = rms(h, w[n + "post_attention_layernorm.weight"], c.rms_norm_eps)
            ffn = self.mlp(x, n + "mlp.") if i < c.first_k_dense else self.moe(x, n + "block_sparse_moe.")
            prefix = prefix + ffn
        h = self.mix([*blocks, prefix], "model.output_attn_res")
        return w["lm_head.weight"] @ rms(h, w["model.norm.weight"], c.rms_norm_eps)
