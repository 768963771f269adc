"""Where each constant of a stage comes from in config.json: a second writing of what `Config.from_hf` and `build` do.

The graph carries a constant from config.json through Config, attributes and stage params to the descriptor table. Here it
is looked up in config.json directly, by the stage's body, the field's name and, for norms, the name of the norm's weight.
No torch, no Plan: plain data, a table a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

Lookup = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True)
class Origin:
    """`field` of bodies that match `body`, where the field's weight matches `weight`: its value, and where that is said."""

    body: str
    field: str
    value: Lookup
    said: str
    weight: str = "*"


def key(*path: str, default: Any = None) -> Lookup:
    """config.json[path...], or the default that the published modelling code uses."""

    def look(config: Mapping[str, Any]) -> Any:
        here: Any = config
        for p in path:
            if p not in here:
                return default
            here = here[p]
        return here

    return look


def _text(*path: str, default: Any = None) -> Lookup:
    """A key of text_config where there is one (the published wrapper), else of the config itself."""
    return lambda c: key(*path, default=default)(c.get("text_config", c))


def _score_scale(c: Mapping[str, Any]) -> float:
    t = c.get("text_config", c)
    return (t["qk_nope_head_dim"] + t["qk_rope_head_dim"]) ** -0.5


def _llama_scaling(c: Mapping[str, Any]) -> tuple[float, ...]:
    r = c.get("rope_parameters") or c.get("rope_scaling") or {}
    if r.get("rope_type", r.get("type")) != "llama3":
        return ()
    return tuple(
        float(r[k]) for k in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )


def _llama_theta(c: Mapping[str, Any]) -> float:
    return float((c.get("rope_parameters") or {}).get("rope_theta", c.get("rope_theta", 10000.0)))


def _llama_head(c: Mapping[str, Any]) -> int:
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


_LORA_EPS = _text("qk_lora_norm_eps", default=1e-6)
ORIGINS: dict[str, tuple[Origin, ...]] = {
    "kimi_k3": (
        Origin("*", "x.eps", _LORA_EPS, "qk_lora_norm_eps, 1e-6 in the modelling code", "*q_a_layernorm*"),
        Origin("*", "x.eps", _text("rms_norm_eps"), "rms_norm_eps"),
        Origin("*", "x.mix_eps", _text("rms_norm_eps"), "rms_norm_eps"),
        Origin("mla_insert", "eps", _LORA_EPS, "qk_lora_norm_eps, 1e-6 in the modelling code"),
        Origin("kda", "eps", _text("rms_norm_eps"), "rms_norm_eps"),
        Origin("kda", "l2_eps", lambda c: 1e-6, "1e-6 in the delta-rule kernel"),
        Origin(
            "kda", "lower_bound", _text("linear_attn_config", "gate_lower_bound"), "linear_attn_config.gate_lower_bound"
        ),
        Origin("kda", "dim", _text("linear_attn_config", "head_dim"), "linear_attn_config.head_dim"),
        Origin(
            "kda",
            "taps",
            _text("linear_attn_config", "short_conv_kernel_size"),
            "linear_attn_config.short_conv_kernel_size",
        ),
        Origin("mla_insert", "lora", _text("kv_lora_rank"), "kv_lora_rank"),
        Origin("mla_insert", "rope", _text("qk_rope_head_dim"), "qk_rope_head_dim"),
        Origin("attn*", "scale", _score_scale, "(qk_nope_head_dim + qk_rope_head_dim)^-1/2"),
        Origin("attn*", "dv", _text("kv_lora_rank"), "kv_lora_rank"),
        Origin("attn*", "rope", _text("qk_rope_head_dim"), "qk_rope_head_dim"),
        Origin("route", "scale", _text("routed_scaling_factor"), "routed_scaling_factor"),
        Origin("route", "topk", _text("num_experts_per_token"), "num_experts_per_token"),
        Origin("route", "experts", _text("num_experts"), "num_experts"),
        Origin("expert_*", "topk", _text("num_experts_per_token"), "num_experts_per_token"),
        Origin("expert_*", "act", _text("hidden_act"), "hidden_act"),
        Origin("*", "act", _text("hidden_act"), "hidden_act"),
        Origin("*", "beta", _text("activation_situ_beta"), "activation_situ_beta"),
        Origin("*", "linear_beta", _text("activation_situ_linear_beta"), "activation_situ_linear_beta"),
    ),
    "llama": (
        Origin("*", "x.eps", key("rms_norm_eps"), "rms_norm_eps"),
        Origin("rope_insert", "theta", _llama_theta, "rope_theta"),
        Origin("rope_insert", "scaling", _llama_scaling, "rope_scaling"),
        Origin("rope_insert", "dim", _llama_head, "head_dim"),
        Origin("attn*", "scale", lambda c: _llama_head(c) ** -0.5, "head_dim^-1/2"),
        Origin("attn*", "dv", _llama_head, "head_dim"),
        Origin("*", "act", key("hidden_act"), "hidden_act"),
    ),
}


def origin(family: str, body: str, field: str, weight: str = "") -> Origin | None:
    """The first origin that fits, None where nothing says where the field comes from."""
    for o in ORIGINS.get(family, ()):
        if o.field == field and fnmatch(body, o.body) and fnmatch(weight, o.weight):
            return o
    return None
