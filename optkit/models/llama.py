"""Llama's decode step: grouped-query attention with rotary positions, SwiGLU, pre-norm residuals.

Source: Hugging Face transformers' `LlamaForCausalLM` (names, halves-paired rotation, Llama 3's frequency scaling).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optkit.models.config import ConfigError, Reader, divides
from optkit.models.graph import Graph, Weight
from optkit.models.step import StepBuilder

FAMILY = "llama"
MODEL_TYPES = ("llama",)
WRAPPER_PREFIX = "language_model."


def ignores(name: str, constants: Mapping[str, Any]) -> bool:
    """True for tensors that HF does not read either: old files' rotary table, and a tied head that is stored again."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and constants["tie_word_embeddings"])


def unused_weights(config: Config) -> tuple[Weight, ...]:
    """Tensors that a checkpoint holds and no step reads: none."""
    return ()


@dataclass(frozen=True)
class Config:
    """Every constant of the decode step; widths are of the whole model.

    `rope_scaling` is () or (factor, low_freq_factor, high_freq_factor, original_max_position) of rope_type llama3.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: tuple[float, ...]
    tie_word_embeddings: bool
    vocab_size: int
    max_position: int

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any]) -> Config:
        """From a HF config.json (rope_scaling + rope_theta, or rope_parameters). ConfigError names every key."""
        if config_json.get("model_type") not in MODEL_TYPES:
            raise ConfigError(f"config.json: model_type: {config_json.get('model_type')!r}: expected llama")
        t = Reader(config_json)
        t.only("hidden_act", "silu")
        t.only("attention_bias", False, False)
        t.only("mlp_bias", False, False)
        heads, hidden = t.integer("num_attention_heads"), t.integer("hidden_size")
        rope = t.sub("rope_parameters") if config_json.get("rope_parameters") else t.sub("rope_scaling", {})
        theta = rope.number("rope_theta") if "rope_theta" in rope.data else t.number("rope_theta", 10000.0)
        rope_type = rope.data.get("rope_type", rope.data.get("type", "default"))
        rope.require(rope_type in ("default", "llama3"), "rope_type", rope_type, "default or llama3")
        scaling: tuple[float, ...] = ()
        if rope_type == "llama3":
            scaling = (
                rope.number("factor"),
                rope.number("low_freq_factor"),
                rope.number("high_freq_factor"),
                rope.number("original_max_position_embeddings"),
            )
            rope.require(
                scaling[1] < scaling[2] or bool(t.mistakes), "low_freq_factor", scaling[1], "less than high_freq_factor"
            )
        config = cls(
            hidden_size=hidden,
            num_layers=t.integer("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=t.integer("num_key_value_heads", heads),
            head_dim=t.integer("head_dim", max(hidden // heads, 1), low=2),
            intermediate_size=t.integer("intermediate_size"),
            rms_norm_eps=t.number("rms_norm_eps"),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=t.boolean("tie_word_embeddings", False),
            vocab_size=t.integer("vocab_size"),
            max_position=t.integer("max_position_embeddings"),
        )
        t.require(
            config.num_heads % config.num_kv_heads == 0,
            "num_key_value_heads",
            config.num_kv_heads,
            f"a divisor of num_attention_heads = {config.num_heads}",
        )
        t.require(config.head_dim % 2 == 0, "head_dim", config.head_dim, "an even number (rotary halves)")
        t.check()
        return config


def build(
    config: Config,
    *,
    rows: int,
    tp: int = 1,
    rank: int = 0,
    layers: tuple[int, int] | None = None,
    peers: str = "emulated",
    seed: int = 0,
) -> Graph:
    """One rank's graph of one decode step for up to `rows` token rows; arguments as for every family.

    `layers` (a, b) is a pipeline stage: a > 0 takes "in.p", b < num_layers ends with the prefix. Raises ValueError in
    words if tp does not divide heads, kv heads, intermediate or vocabulary (kv heads are not replicated).
    """
    divides(
        FAMILY,
        tp,
        attention_heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        vocabulary=config.vocab_size,
        intermediate=config.intermediate_size,
    )
    return _Step(config, rows=rows, tp=tp, rank=rank, layers=layers, peers=peers, seed=seed).build()


class _Step(StepBuilder):
    """`p` is the current prefix (residual) value."""

    def __init__(self, config: Config, **kw: Any) -> None:
        super().__init__(FAMILY, config, **kw)
        self.c = config

    def build(self) -> Graph:
        c, (first, last) = self.c, self.layers
        p = self.embed() if first == 0 else "in.p"
        carried = () if first == 0 else (p,)
        for layer in range(first, last):
            p = self.layer(layer, p)
        if last < c.num_layers:
            return self.graph(carried, (p,))
        x = self.norm("x_out", p, "model.norm.weight", c.hidden_size, c.num_layers)
        head = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
        return self.graph(
            carried, (self.linear("logits", x, head, c.vocab_size // self.tp, c.hidden_size, c.num_layers, "f32", 0),)
        )

    def layer(self, layer: int, p: str) -> str:
        c, b, v, n = self.c, self.b, f"L{layer}.", f"model.layers.{layer}."
        hidden, dim, heads, kv_heads = c.hidden_size, c.head_dim, c.num_heads // self.tp, c.num_kv_heads // self.tp
        x = self.norm(v + "x_a", p, n + "input_layernorm.weight", hidden, layer)
        q, k, val = (
            self.linear(v + s, x, f"{n}self_attn.{s}_proj.weight", h * dim, hidden, layer, shard=0)
            for s, h in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        kv = {"kv_heads": b.state(v + "kv", "kv_heads", (kv_heads, dim), "bf16", layer)}
        qr = b.add(
            v + "qr",
            "rope_insert",
            (q, k, val),
            ((v + "qr", heads * dim, "bf16"),),
            states=kv,
            layer=layer,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            theta=c.rope_theta,
            scaling=c.rope_scaling,
        )[0]
        o = b.add(
            v + "o",
            "gqa_attention",
            (qr,),
            ((v + "o", heads * dim, "bf16"),),
            states=kv,
            layer=layer,
            heads=heads,
            kv_heads=kv_heads,
            dim=dim,
            scale=dim**-0.5,
        )[0]
        ya = self.linear(v + "ya", o, n + "self_attn.o_proj.weight", hidden, heads * dim, layer, self.partial, 1)
        p = self.add(f"P.{layer}a", (p, self.exchange("all_reduce", v + "ra", ya, hidden, "bf16", layer)), layer)
        x = self.norm(v + "x_m", p, n + "post_attention_layernorm.weight", hidden, layer)
        inter = c.intermediate_size // self.tp
        gate, up = (
            self.linear(v + s, x, f"{n}mlp.{s}_proj.weight", inter, hidden, layer, shard=0) for s in ("gate", "up")
        )
        act = b.add(
            v + "act",
            "act_mul",
            (gate, up),
            ((v + "act", inter, "bf16"),),
            layer=layer,
            act="silu",
            beta=1.0,
            linear_beta=1.0,
        )[0]
        ym = self.linear(v + "ym", act, n + "mlp.down_proj.weight", hidden, inter, layer, self.partial, 1)
        return self.add(f"P.{layer}m", (p, self.exchange("all_reduce", v + "rm", ym, hidden, "bf16", layer)), layer)
