"""Kimi K3's text decode step: KDA and gated MLA layers, attention residuals, LatentMoE with MXFP4 experts.

Sources: the published config.json and checkpoint names of moonshotai/Kimi-K3 and its modelling code; Kimi Linear
(arXiv 2510.26692) for KDA. One rank's graph has the shapes of that rank: heads, the dense and shared intermediate,
the experts' intermediate, the router, the latent down and up projections and the vocabulary are cut across ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optkit.models.config import ConfigError, Reader, divides
from optkit.models.graph import MX_GROUP, Graph, Weight
from optkit.models.step import StepBuilder

FAMILY = "kimi_k3"
MODEL_TYPES = ("kimi_k3", "kimi_linear")
WRAPPER_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "vision_model.", "mm_projector.", "multi_modal_projector.")


def ignores(name: str, constants: Mapping[str, Any]) -> bool:
    """True for checkpoint tensors that text decode has no part for: the wrapper's vision tower."""
    return name.startswith(VISION_PREFIXES)


def unused_weights(config: Config) -> tuple[Weight, ...]:
    """Tensors that a checkpoint holds and no step reads: layer 0 has residual-mix weights but no row to mix yet."""
    n = "model.layers.0.self_attention_res"
    shapes = {n + "_norm.weight": (config.hidden_size,), n + "_proj.weight": (1, config.hidden_size)}
    return tuple(Weight(name, shape, "bf16", (name,)) for name, shape in shapes.items())


@dataclass(frozen=True)
class Config:
    """Every constant of the text decode step. Layers are 0-based; widths are of the whole model."""

    hidden_size: int
    num_layers: int
    full_attn_layers: tuple[int, ...]
    num_heads: int
    kda_heads: int
    kda_head_dim: int
    conv_taps: int
    gate_lower_bound: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    block_size: int
    first_k_dense: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    latent_size: int
    moe_intermediate_size: int
    num_shared_experts: int
    routed_scaling_factor: float
    situ_beta: float
    situ_linear_beta: float
    rms_norm_eps: float
    qk_lora_norm_eps: float
    vocab_size: int
    max_position: int
    l2_eps: float = 1e-6

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any]) -> Config:
        """From the published wrapper config (text_config) or a plain text config. Raises ConfigError naming every key.

        `qk_lora_norm_eps`, the epsilon of the q_a and kv_a norms, is absent from published files: 1e-6 is the class
        default that the checkpoint's own modelling code uses there, unlike `rms_norm_eps` elsewhere.
        """
        model_type = config_json.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"config.json: model_type: {model_type!r}: expected one of {', '.join(MODEL_TYPES)}")
        top = Reader(config_json)
        t = top.sub("text_config") if model_type == "kimi_k3" else top
        top.check()
        if model_type == "kimi_k3":
            t.only("model_type", "kimi_linear")
        linear = t.sub("linear_attn_config")
        layers = t.integer("num_hidden_layers")
        full = linear.integers("full_attn_layers")
        kda = linear.integers("kda_layers")
        both = sorted(full + kda)
        linear.require(
            bool(t.mistakes) or both == list(range(1, layers + 1)),
            "full_attn_layers + kda_layers",
            both,
            f"each of the layers 1..{layers} once",
        )
        for key, allowed in (
            ("hidden_act", "situ"),
            ("mla_use_nope", True),
            ("mla_use_output_gate", True),
            ("latent_moe_use_norm", True),
            ("moe_layer_freq", 1),
            ("moe_renormalize", True),
            ("moe_router_activation_func", "sigmoid"),
            ("num_expert_group", 1),
            ("topk_group", 1),
            ("tie_word_embeddings", False),
        ):
            t.only(key, allowed)
        t.only("num_nextn_predict_layers", 0, 0)
        linear.only("use_full_rank_gate", True)
        quant = t.sub("quantization_config")
        quant.only("quant_method", "compressed-tensors")
        quant.only("format", "mxfp4-pack-quantized")
        config = cls(
            hidden_size=t.integer("hidden_size"),
            num_layers=layers,
            full_attn_layers=tuple(i - 1 for i in sorted(full)),
            num_heads=t.integer("num_attention_heads"),
            kda_heads=linear.integer("num_heads"),
            kda_head_dim=linear.integer("head_dim"),
            conv_taps=linear.integer("short_conv_kernel_size", low=2),
            gate_lower_bound=linear.number("gate_lower_bound", positive=False),
            q_lora_rank=t.integer("q_lora_rank"),
            kv_lora_rank=t.integer("kv_lora_rank"),
            qk_nope_head_dim=t.integer("qk_nope_head_dim"),
            qk_rope_head_dim=t.integer("qk_rope_head_dim"),
            v_head_dim=t.integer("v_head_dim"),
            block_size=t.integer("attn_res_block_size"),
            first_k_dense=t.integer("first_k_dense_replace", low=0),
            intermediate_size=t.integer("intermediate_size"),
            num_experts=t.integer("num_experts"),
            experts_per_token=t.integer("num_experts_per_token"),
            latent_size=t.integer("routed_expert_hidden_size"),
            moe_intermediate_size=t.integer("moe_intermediate_size"),
            num_shared_experts=t.integer("num_shared_experts"),
            routed_scaling_factor=t.number("routed_scaling_factor"),
            situ_beta=t.number("activation_situ_beta"),
            situ_linear_beta=t.number("activation_situ_linear_beta"),
            rms_norm_eps=t.number("rms_norm_eps"),
            qk_lora_norm_eps=t.number("qk_lora_norm_eps", 1e-6),
            vocab_size=t.integer("vocab_size"),
            max_position=t.integer("max_position_embeddings"),
        )
        t.require(
            config.num_experts >= config.experts_per_token,
            "num_experts_per_token",
            config.experts_per_token,
            f"at most num_experts = {config.num_experts}",
        )
        for key in ("routed_expert_hidden_size", "moe_intermediate_size"):
            t.require(
                bool(t.mistakes) or t.integer(key) % MX_GROUP == 0,
                key,
                t.data.get(key),
                f"a multiple of the MX group, {MX_GROUP}",
            )
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
    """One rank's graph of one decode step for up to `rows` token rows.

    `layers` (a, b) is a pipeline stage: a > 0 takes "in.p" and "in.block{j}" (the rows saved by earlier layers), b <
    num_layers ends with the prefix and all saved rows as outputs. `peers` "emulated" or "real" labels the exchanges
    (tp > 1). Raises ValueError in words if tp does not divide heads, experts' intermediate or vocabulary.
    """
    divides(
        FAMILY,
        tp,
        attention_heads=config.num_heads,
        KDA_heads=config.kda_heads,
        vocabulary=config.vocab_size,
        dense_intermediate=config.intermediate_size,
        router_experts=config.num_experts,
        latent_size=config.latent_size,
        shared_expert_intermediate=config.num_shared_experts * config.moe_intermediate_size,
        MX_groups_of_the_experts_intermediate=config.moe_intermediate_size // MX_GROUP,
        hidden_size=config.hidden_size,
    )
    return _Step(config, rows=rows, tp=tp, rank=rank, layers=layers, peers=peers, seed=seed).build()


class _Step(StepBuilder):
    """`p` is the current prefix value, `blocks` the saved rows."""

    def __init__(self, config: Config, **kw: Any) -> None:
        super().__init__(FAMILY, config, **kw)
        self.c = config
        self.p = ""
        self.blocks: list[str] = []

    def build(self) -> Graph:
        c, (first, last) = self.c, self.layers
        carried: tuple[str, ...] = ()
        if first == 0:
            self.p = self.embed()
        else:
            self.p = "in.p"
            self.blocks = [f"in.block{j}" for j in range(-(-first // c.block_size))]
            carried = (self.p, *self.blocks)
        for layer in range(first, last):
            self.layer(layer)
        return self.graph(carried, (self.p, *self.blocks) if last < c.num_layers else (self.tail(),))

    def mixed_norm(self, pre: str, short: str, residual: str, norm: str, layer: int) -> str:
        """AttnRes over the saved rows and the prefix (if any row is saved), then RMSNorm -> the sub-layer's input."""
        h, width = self.p, self.c.hidden_size
        if self.blocks:
            w = {
                "norm": self.b.weight(residual + "_norm.weight", (width,)),
                "proj": self.b.weight(residual + "_proj.weight", (1, width)),
            }
            h = self.b.add(
                f"{pre}h_{short}",
                "attnres",
                (*self.blocks, self.p),
                ((f"{pre}h_{short}", width, "bf16"),),
                weights=w,
                layer=layer,
                eps=self.c.rms_norm_eps,
            )[0]
        return self.norm(f"{pre}x_{short}", h, norm, width, layer)

    def situ(self, name: str, gate: str, up: str, width: int, layer: int) -> str:
        return self.b.add(
            name,
            "act_mul",
            (gate, up),
            ((name, width, "bf16"),),
            layer=layer,
            act="situ",
            beta=self.c.situ_beta,
            linear_beta=self.c.situ_linear_beta,
        )[0]

    def layer(self, layer: int) -> None:
        c, v, n = self.c, f"L{layer}.", f"model.layers.{layer}."
        x = self.mixed_norm(v, "a", n + "self_attention_res", n + "input_layernorm.weight", layer)
        saves = layer % c.block_size == 0
        if saves:  # the mix above still sees the row only as the prefix
            self.blocks.append(self.p)
        y = (self.mla if layer in c.full_attn_layers else self.kda)(x, v, n + "self_attn.", layer)
        y = self.exchange("all_reduce", v + "ra", y, c.hidden_size, "bf16", layer)
        self.p = y if saves else self.add(f"P.{layer}a", (self.p, y), layer)
        x = self.mixed_norm(v, "m", n + "mlp_res", n + "post_attention_layernorm.weight", layer)
        terms = (
            self.dense(x, v, n + "mlp.", layer)
            if layer < c.first_k_dense
            else self.moe(x, v, n + "block_sparse_moe.", layer)
        )
        self.p = self.add(f"P.{layer}m", (self.p, *terms), layer)

    def kda(self, x: str, v: str, n: str, layer: int) -> str:
        c, b = self.c, self.b
        heads, dim = c.kda_heads // self.tp, c.kda_head_dim
        width = heads * dim
        raw = tuple(
            self.linear(f"{v}{s}_raw", x, f"{n}{s}_proj.weight", width, c.hidden_size, layer, shard=0) for s in "qkv"
        )
        g = self.linear(v + "g", x, n + "g_proj.weight", width, c.hidden_size, layer, shard=0)
        fa = self.linear(v + "fa", x, n + "f_a_proj.weight", dim, c.hidden_size, layer)
        beta = self.linear(v + "b", x, n + "b_proj.weight", heads, c.hidden_size, layer, shard=0)
        f = self.linear(v + "f", fa, n + "f_b_proj.weight", width, dim, layer, shard=0)
        conv = {
            s: b.weight(f"{n}{s}_conv1d.weight", (width, c.conv_taps), "f32", pack="depthwise", shard=0) for s in "qkv"
        }
        state = b.state(v + "conv", "conv", (c.conv_taps - 1, 3 * width), "bf16", layer)
        q, k, val = b.add(
            v + "conv",
            "kda_conv",
            raw,
            tuple((v + s, width, "f32") for s in "qkv"),
            weights=conv,
            states={"conv": state},
            layer=layer,
        )
        w = {
            "A_log": b.weight(n + "A_log", (heads,), "f32", pack="padded_tail", shard=0),
            "dt_bias": b.weight(n + "dt_bias", (width,), "f32", shard=0),
        }
        state = b.state(v + "recurrent", "recurrent", (heads, dim, dim), "f32", layer)
        o = b.add(
            v + "o",
            "kda_recurrence",
            (q, k, val, f, beta),
            ((v + "o", width, "f32"),),
            weights=w,
            states={"recurrent": state},
            layer=layer,
            heads=heads,
            dim=dim,
            lower_bound=c.gate_lower_bound,
            l2_eps=c.l2_eps,
        )[0]
        w = {"w": b.weight(n + "o_norm.weight", (dim,), "f32")}
        og = b.add(
            v + "og",
            "gated_norm",
            (o, g),
            ((v + "og", width, "bf16"),),
            weights=w,
            layer=layer,
            heads=heads,
            dim=dim,
            eps=c.rms_norm_eps,
        )[0]
        return self.linear(v + "ya", og, n + "o_proj.weight", c.hidden_size, width, layer, self.partial, 1)

    def mla(self, x: str, v: str, n: str, layer: int) -> str:
        c, b = self.c, self.b
        heads, lora, nope, rope = c.num_heads // self.tp, c.kv_lora_rank, c.qk_nope_head_dim, c.qk_rope_head_dim
        width, qk = heads * c.v_head_dim, nope + rope
        qa = self.linear(v + "qa", x, n + "q_a_proj.weight", c.q_lora_rank, c.hidden_size, layer)
        kva = self.linear(v + "kva", x, n + "kv_a_proj_with_mqa.weight", lora + rope, c.hidden_size, layer)
        g = self.linear(v + "g", x, n + "g_proj.weight", width, c.hidden_size, layer, shard=0)
        qc = self.norm(v + "qc", qa, n + "q_a_layernorm.weight", c.q_lora_rank, layer, c.qk_lora_norm_eps)
        q = self.linear(v + "q", qc, n + "q_b_proj.weight", heads * qk, c.q_lora_rank, layer, shard=0)
        kv = b.state(v + "kv", "kv", (lora + rope,), "bf16", layer)
        b.add(
            v + "insert",
            "mla_insert",
            (kva,),
            (),
            weights={"w": b.weight(n + "kv_a_layernorm.weight", (lora,))},
            states={"kv": kv},
            layer=layer,
            lora=lora,
            rope=rope,
            eps=c.qk_lora_norm_eps,
        )
        source, split = (n + "kv_b_proj.weight",), {"heads": c.num_heads, "nope": nope, "v": c.v_head_dim}
        w_uk = b.weight(n + "w_uk", (heads * lora, nope), source=source, pack="kv_b_uk", shard=0, pack_args=split)
        ql = b.add(
            v + "ql",
            "grouped_linear",
            (q,),
            ((v + "ql", heads * lora, "bf16"),),
            weights={"w": w_uk},
            layer=layer,
            groups=heads,
            x_stride=qk,
            x_offset=0,
        )[0]
        ol = b.add(
            v + "ol",
            "mla_attention",
            (ql, q),
            ((v + "ol", heads * lora, "bf16"),),
            states={"kv": kv},
            layer=layer,
            heads=heads,
            lora=lora,
            rope=rope,
            nope=nope,
            scale=qk**-0.5,
        )[0]
        w_uv = b.weight(n + "w_uv", (width, lora), source=source, pack="kv_b_uv", shard=0, pack_args=split)
        ov = b.add(
            v + "ov",
            "grouped_linear",
            (ol,),
            ((v + "ov", width, "bf16"),),
            weights={"w": w_uv},
            layer=layer,
            groups=heads,
            x_stride=lora,
            x_offset=0,
        )[0]
        og = b.add(v + "og", "sigmoid_mul", (ov, g), ((v + "og", width, "bf16"),), layer=layer)[0]
        return self.linear(v + "ya", og, n + "o_proj.weight", c.hidden_size, width, layer, self.partial, 1)

    def dense(self, x: str, v: str, n: str, layer: int) -> tuple[str, ...]:
        width, hidden = self.c.intermediate_size // self.tp, self.c.hidden_size
        gate = self.linear(v + "gate", x, n + "gate_proj.weight", width, hidden, layer, shard=0)
        up = self.linear(v + "up", x, n + "up_proj.weight", width, hidden, layer, shard=0)
        act = self.situ(v + "act", gate, up, width, layer)
        ym = self.linear(v + "ym", act, n + "down_proj.weight", hidden, width, layer, self.partial, 1)
        return (self.exchange("all_reduce", v + "rm", ym, hidden, "bf16", layer),)

    def moe(self, x: str, v: str, n: str, layer: int) -> tuple[str, ...]:
        """Router, latent down, shared expert and routed experts; the full-width x feeds all but the experts."""
        c, b, tp = self.c, self.b, self.tp
        hidden, latent, inter, topk = c.hidden_size, c.latent_size, c.moe_intermediate_size // tp, c.experts_per_token
        shared = c.num_shared_experts * inter
        logits = self.linear(v + "logits", x, n + "gate.weight", c.num_experts // tp, hidden, layer, "f32", 0)
        logits = self.exchange("all_gather", v + "logits_all", logits, c.num_experts, "f32", layer)
        z = self.linear(v + "z", x, n + "routed_expert_down_proj.weight", latent // tp, hidden, layer, shard=0)
        z = self.exchange("all_gather", v + "z_all", z, latent, "bf16", layer)
        bias = b.weight(n + "gate.e_score_correction_bias", (c.num_experts,), "f32")
        ids, wts = b.add(
            v + "route",
            "route",
            (logits,),
            ((v + "ids", topk, "i32"), (v + "wts", topk, "f32")),
            weights={"bias": bias},
            layer=layer,
            topk=topk,
            scale=c.routed_scaling_factor,
        )
        sgate = self.linear(v + "sgate", x, n + "shared_experts.gate_proj.weight", shared, hidden, layer, shard=0)
        sup = self.linear(v + "sup", x, n + "shared_experts.up_proj.weight", shared, hidden, layer, shard=0)
        sact = self.situ(v + "sact", sgate, sup, shared, layer)
        sh = self.linear(v + "sh", sact, n + "shared_experts.down_proj.weight", hidden, shared, layer, self.partial, 1)
        sh = self.exchange("all_reduce", v + "sh_all", sh, hidden, "bf16", layer)
        w = {role: self.experts(n, role, (inter, latent), 1) for role in ("w1", "w3")}
        ea = b.add(
            v + "ea",
            "expert_gate_up",
            (z, ids),
            ((v + "ea", topk * inter, "bf16"),),
            weights=w,
            layer=layer,
            topk=topk,
            act="situ",
            beta=c.situ_beta,
            linear_beta=c.situ_linear_beta,
        )[0]
        y = b.add(
            v + "y",
            "expert_down",
            (ea, ids, wts),
            ((v + "y", latent, "f32"),),
            weights={"w2": self.experts(n, "w2", (latent, inter), 2)},
            layer=layer,
            topk=topk,
        )[0]
        y = self.exchange("all_reduce", v + "y_all", y, latent, "bf16", layer)  # reduced before the norm
        yn = self.norm(v + "yn", y, n + "routed_expert_norm.weight", latent, layer)
        up = self.linear(v + "up_out", yn, n + "routed_expert_up_proj.weight", hidden // tp, latent, layer, shard=0)
        return self.exchange("all_gather", v + "up_all", up, hidden, "bf16", layer), sh

    def experts(self, n: str, role: str, shape: tuple[int, int], shard: int) -> str:
        source = (f"{n}experts.{{}}.{role}.weight_packed", f"{n}experts.{{}}.{role}.weight_scale")
        return self.b.weight(f"{n}experts.{role}", (self.c.num_experts, *shape), "mxfp4", source, "experts", shard)

    def tail(self) -> str:
        c, vocab = self.c, self.c.vocab_size // self.tp
        x = self.mixed_norm("", "out", "model.output_attn_res", "model.norm.weight", c.num_layers)
        return self.linear("logits", x, "lm_head.weight", vocab, c.hidden_size, c.num_layers, "f32", 0)
