"""DeepSeek-V4.1's text decode step: mixed residual streams, window and compressed attention, Engram, FP8 and MXFP4.

Sources: the released config.json, checkpoint names and inference code of deepseek-ai/DeepSeek-V4.1-Flash; mHC (arXiv
2512.24880), Engram (arXiv 2601.07372). One rank's graph has the shapes of that rank: heads with their output groups, the
experts' and the shared intermediate, Engram's projection and the vocabulary are cut across ranks; stream coefficients,
the latent projections, compressor, indexer and router are on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optkit.models.config import ConfigError, Reader, divides
from optkit.models.engram_hash import LayerHash, layer_hashes
from optkit.models.graph import MX_GROUP, Graph, Weight
from optkit.models.step import StepBuilder

FAMILY = "deepseek_v41"
MODEL_TYPES = ("deepseek_v41", "deepseek_v41_text")
WRAPPER_PREFIX = ""
IGNORED_PREFIXES = ("mtp.", "vision.", "aligner.", "image_")
READS_TOKENIZER = True
POST_FACTOR = 2.0
GATE_FLOOR = 1e-6
RING_ROWS = 8
CACHE_FORMATS = {
    "none": dict.fromkeys(("window", "compressed", "keys", "query"), "none"),
    "official": {"window": "fp8_32", "compressed": "nvfp4_16", "keys": "mxfp4_32", "query": "mxfp4_32"},
    "h200": {"window": "fp8_64_tail", "compressed": "fp8_64_tail", "keys": "fp8_row", "query": "fp8_row"},
}
"""Grids (ops/cache_formats.py) of cache rows and index queries: pure math, the released code's, what vLLM has on H200."""


def ignores(name: str, constants: Mapping[str, Any]) -> bool:
    """True for checkpoint tensors that text decode has no part for: draft layers, vision, image routing bias."""
    return (
        name.startswith(IGNORED_PREFIXES)
        or name.endswith(".ffn.gate.bias_vl")
        or (name == "tokenizer.json" and not constants["engram_layers"])
    )


def unused_weights(config: Config) -> tuple[Weight, ...]:
    """Tensors that every checkpoint holds and no step reads: none."""
    return ()


@dataclass(frozen=True)
class Config:
    """Every constant of the text decode step. Layers are 0-based; widths are of the whole model.

    `ratios` has one entry per layer: 0 window only, r > 0 also compressed rows of r tokens each. A layer of `kv_sources`
    makes compressed rows and index keys, which the layers up to the next source read; a layer of `index_sources`
    chooses rows, the layers up to the next one reuse its choice. `candidate_source` is -1 where no blocks are published.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    ratios: tuple[int, ...]
    kv_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    index_heads: int
    index_dim: int
    index_topk: int
    candidate_source: int
    candidate_blocks: int
    candidate_block_size: int
    rope_theta: float
    compressed_rope_theta: float
    compressed_rope_scaling: tuple[Any, ...]
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    streams: int
    sinkhorn_iterations: int
    stream_eps: float
    engram_layers: tuple[int, ...]
    engram_rows: tuple[int, ...]
    engram_ngram: int
    engram_start: int
    engram_heads: int
    engram_dim: int
    engram_pad_token: int
    engram_classes: int
    rms_norm_eps: float
    vocab_size: int
    max_position: int

    @classmethod
    def from_hf(cls, config_json: Mapping[str, Any]) -> Config:
        """From the released wrapper config (text_config) or a plain text config. Raises ConfigError naming every key."""
        model_type = config_json.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"config.json: model_type: {model_type!r}: expected one of {', '.join(MODEL_TYPES)}")
        top = Reader(config_json)
        t = top.sub("text_config") if model_type == "deepseek_v41" else top
        quant = top.sub("quantization_config")
        top.check()
        if model_type == "deepseek_v41":
            t.only("model_type", "deepseek_v41_text")
        for reader, key, allowed in (
            (t, "num_key_value_heads", 1),
            (t, "hidden_act", "silu"),
            (t, "attention_bias", False),
            (t, "tie_word_embeddings", False),
            (t, "n_shared_experts", 1),
            (t, "scoring_func", "sqrtsoftplus"),
            (t, "topk_method", "noaux_tc"),
            (t, "norm_topk_prob", True),
            (quant, "quant_method", "fp8"),
            (quant, "weight_block_size", [MX_GROUP, MX_GROUP]),
            (quant, "scale_fmt", "ue8m0"),
            (quant, "expert_dtype", "fp4"),
        ):
            reader.only(key, allowed)
        rope = t.sub("rope_scaling")
        rope.only("rope_type", "yarn")
        layers = t.integer("num_hidden_layers")
        config = cls(
            hidden_size=t.integer("hidden_size"),
            num_layers=layers,
            num_heads=t.integer("num_attention_heads"),
            head_dim=t.integer("head_dim"),
            rope_dim=t.integer("qk_rope_head_dim", low=2),
            q_lora_rank=t.integer("q_lora_rank"),
            o_groups=t.integer("o_groups"),
            o_lora_rank=t.integer("o_lora_rank"),
            window=t.integer("sliding_window"),
            ratios=t.integers("compress_ratios")[:layers],  # the list goes on with the draft layers
            kv_sources=tuple(i for i in t.integers("kv_source_layer_ids") if i < layers),
            index_sources=tuple(i for i in t.integers("index_source_layer_ids") if i < layers),
            index_heads=t.integer("index_n_heads"),
            index_dim=t.integer("index_head_dim"),
            index_topk=t.integer("index_topk"),
            candidate_source=t.integer("candidate_source_layer_id", low=-1),
            candidate_blocks=t.integer("candidate_topk_blocks"),
            candidate_block_size=t.integer("candidate_block_size"),
            rope_theta=t.number("rope_theta"),
            compressed_rope_theta=t.number("compress_rope_theta"),
            compressed_rope_scaling=(
                "yarn",
                rope.number("factor"),
                rope.number("beta_fast"),
                rope.number("beta_slow"),
                rope.number("original_max_position_embeddings"),
            ),
            num_experts=t.integer("n_routed_experts"),
            experts_per_token=t.integer("num_experts_per_tok"),
            moe_intermediate_size=t.integer("moe_intermediate_size"),
            routed_scaling_factor=t.number("routed_scaling_factor"),
            swiglu_limit=t.number("swiglu_limit"),
            streams=t.integer("hc_mult"),
            sinkhorn_iterations=t.integer("hc_sinkhorn_iters"),
            stream_eps=t.number("hc_eps"),
            engram_layers=t.integers("engram_layer_ids"),
            engram_rows=t.integers("engram_num_embeddings"),
            engram_ngram=t.integer("engram_max_ngram_size", low=2),
            engram_start=t.integer("engram_vocab_size", low=2),
            engram_heads=t.integer("engram_n_heads"),
            engram_dim=t.integer("engram_head_dim"),
            engram_pad_token=t.integer("engram_pad_token_id", low=0),
            engram_classes=t.integer("engram_compressed_vocab_size"),
            rms_norm_eps=t.number("rms_norm_eps"),
            vocab_size=t.integer("vocab_size"),
            max_position=t.integer("max_position_embeddings"),
        )
        if not t.mistakes:
            config._check_sizes(t)
            config._check_schedule(t)
            config._check_engram(t)
        t.check()
        return config

    def _check_sizes(self, t: Reader) -> None:
        rope, heads, inter = self.rope_dim, self.num_heads, self.moe_intermediate_size
        fits = rope % 2 == 0 and rope <= min(self.head_dim, self.index_dim)
        t.require(fits, "qk_rope_head_dim", rope, "an even number within head_dim and index_head_dim")
        t.require(heads % self.o_groups == 0, "o_groups", self.o_groups, f"a divisor of num_attention_heads = {heads}")
        t.require(inter % MX_GROUP == 0, "moe_intermediate_size", inter, f"a multiple of the MX group, {MX_GROUP}")
        t.require(self.hidden_size % MX_GROUP == 0, "hidden_size", self.hidden_size, f"a multiple of {MX_GROUP}")
        t.require(
            self.num_experts >= self.experts_per_token,
            "num_experts_per_tok",
            self.experts_per_token,
            f"at most n_routed_experts = {self.num_experts}",
        )

    def _check_schedule(self, t: Reader) -> None:
        """Every compressed layer must have a source of its own ratio before it, and a choice of that source's rows."""
        covered = len(self.ratios) == self.num_layers and min(self.ratios) >= 0
        t.require(covered, "compress_ratios", list(self.ratios), f"at least {self.num_layers} entries >= 0")
        for key, ids in (
            ("kv_source_layer_ids", self.kv_sources),
            ("index_source_layer_ids", self.index_sources),
            ("engram_layer_ids", self.engram_layers),
        ):
            rising = list(ids) == sorted(set(ids)) and min(ids, default=0) >= 0
            t.require(rising, key, list(ids), "rising layer ids >= 0")
        unchosen = sorted(set(self.kv_sources) - set(self.index_sources))
        t.require(not unchosen, "kv_source_layer_ids", unchosen, "ids that index_source_layer_ids has too")
        if t.mistakes:
            return
        for key, ids in (("kv_source_layer_ids", self.kv_sources), ("index_source_layer_ids", self.index_sources)):
            idle = [i for i in ids if self.ratios[i] == 0]
            t.require(not idle, key, idle, "layers whose compress_ratios entry is > 0")
        for layer, ratio in enumerate(self.ratios):
            source = self.source_of(layer)
            t.require(
                ratio == 0 or (source >= 0 and self.ratios[source] == ratio),
                f"compress_ratios[{layer}]",
                ratio,
                f"the ratio of the nearest entry of kv_source_layer_ids at or before layer {layer}",
            )
        c = self.candidate_source
        t.require(
            c in (-1, *self.kv_sources) or c >= self.num_layers,
            "candidate_source_layer_id",
            c,
            "-1 or an entry of kv_source_layer_ids",
        )
        later = [s for s in self.kv_sources if 0 <= c < s]
        t.require(not later, "candidate_source_layer_id", c, f"the last KV source, but {later} come after it")

    def _check_engram(self, t: Reader) -> None:
        ids, rows = self.engram_layers, self.engram_rows
        t.require(len(ids) == len(rows), "engram_num_embeddings", list(rows), f"one entry per layer of {list(ids)}")
        t.require(0 not in ids, "engram_layer_ids", list(ids), "layers >= 1, behind which the streams differ")
        for key, value, limit in (
            ("engram_pad_token_id", self.engram_pad_token, self.vocab_size - 1),
            ("engram_compressed_vocab_size", self.engram_classes, self.vocab_size),
        ):
            t.require(value <= limit, key, value, f"at most {limit}")
        t.require(self.engram_dim % MX_GROUP == 0, "engram_head_dim", self.engram_dim, f"a multiple of {MX_GROUP}")
        for have, (layer, h) in zip(rows, self.hashes().items(), strict=False):
            t.require(have >= h.rows, "engram_num_embeddings", have, f"at least {h.rows}, layer {layer}'s hash range")

    def hashes(self) -> dict[int, LayerHash]:
        """The hash constants of every Engram layer."""
        return layer_hashes(
            self.engram_layers, self.engram_ngram, self.engram_heads, self.engram_start, self.engram_classes
        )

    def source_of(self, layer: int) -> int:
        """The layer whose compressed rows `layer` reads; -1 if there is none."""
        return max((s for s in self.kv_sources if s <= layer), default=-1)

    def chooser_of(self, layer: int) -> int:
        """The layer whose choice of rows `layer` reads; -1 if there is none."""
        return max((s for s in self.index_sources if s <= layer), default=-1)

    def cuts(self) -> tuple[int, ...]:
        """Layers where a pipeline stage may begin: nothing at or behind them reads a source before them."""
        return tuple(
            first
            for first in range(self.num_layers)
            if all(self.source_of(i) >= first for i in range(first, self.num_layers) if self.ratios[i])
        )

    def of_layers(self, layers: tuple[int, ...], engram_start: int = 0) -> Config:
        """A shallower model of the same widths, made of `layers` of this one in rising order, e.g. one of every type.

        Sources among them keep their role; a layer whose source is left out reads the nearest one that is there.
        `engram_start` > 0 shrinks the Engram tables: primes from there on, and just as many rows as they address.
        Raises ConfigError if a compressed layer is left without rows.
        """
        place = {old: new for new, old in enumerate(layers)}

        def kept(ids: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(place[i] for i in ids if i in place)

        rows = dict(zip(self.engram_layers, self.engram_rows, strict=True))
        small = dataclasses.replace(
            self,
            num_layers=len(layers),
            ratios=tuple(self.ratios[i] for i in layers),
            kv_sources=kept(self.kv_sources),
            index_sources=kept(self.index_sources),
            candidate_source=place.get(self.candidate_source, -1),
            engram_layers=kept(self.engram_layers),
            engram_rows=tuple(rows[i] for i in layers if i in rows),
        )
        if engram_start:
            small = dataclasses.replace(small, engram_start=engram_start)
            small = dataclasses.replace(small, engram_rows=tuple(h.rows for h in small.hashes().values()))
        reader = Reader({}, f"{FAMILY} layers {layers}")
        small._check_schedule(reader)
        small._check_engram(reader)
        reader.check()
        return small


def build(
    config: Config,
    *,
    rows: int,
    tp: int = 1,
    rank: int = 0,
    layers: tuple[int, int] | None = None,
    peers: str = "emulated",
    seed: int = 0,
    cache_format: str = "official",
) -> Graph:
    """One rank's graph of one decode step for up to `rows` token rows; arguments as for every family.

    `layers` (a, b) is a pipeline stage: a > 0 takes "in.x" (the streams) and "in.pre" (the coefficients of the last site
    before), b < num_layers ends with the two. `cache_format` none | official | h200 names the grids of the caches.
    Raises ValueError in words if tp does not divide the model, for a stage that would read another stage's caches, and
    for an unknown cache format or one that does not fit the head size.
    """
    divides(
        FAMILY,
        tp,
        attention_heads=config.num_heads,
        output_groups=config.o_groups,
        vocabulary=config.vocab_size,
        scale_tiles_of_the_query_projection=config.num_heads * config.head_dim // MX_GROUP,
        scale_tiles_of_the_output_projection=config.o_groups * config.o_lora_rank // MX_GROUP,
        MX_groups_of_the_experts_intermediate=config.moe_intermediate_size // MX_GROUP,
        scale_tiles_of_Engram=(config.streams + 1) * config.hidden_size // MX_GROUP if config.engram_layers else tp,
    )
    if cache_format not in CACHE_FORMATS:
        raise ValueError(f"cache_format: {cache_format!r}: expected one of {', '.join(CACHE_FORMATS)}")
    group = {"none": 1, "official": 32, "h200": 64}[cache_format]
    tail = config.rope_dim if cache_format == "h200" else 0
    for width in (config.head_dim - tail, config.index_dim):
        if width % group:
            raise ValueError(f"cache_format: {cache_format!r}: expected widths in multiples of {group}, got {width}")
    for bound in layers or ():
        if bound not in (*config.cuts(), config.num_layers):
            allowed = ", ".join(map(str, (*config.cuts(), config.num_layers)))
            raise ValueError(
                f"layers: {layers}: expected bounds among {allowed}, where no source's readers are cut off"
            )
    return _Step(config, cache_format, rows=rows, tp=tp, rank=rank, layers=layers, peers=peers, seed=seed).build()


class _Step(StepBuilder):
    """`x` is the current value of the streams, `pre` the last site's input coefficients."""

    def __init__(self, config: Config, cache_format: str, **kw: Any) -> None:
        super().__init__(FAMILY, config, **kw)
        self.c, self.cache_format, self.formats = config, cache_format, CACHE_FORMATS[cache_format]
        self.x = self.pre = self.start = ""
        self.sel = self.blocks = ""
        self.compressed: dict[int, str] = {}
        self.keys: dict[int, str] = {}

    def build(self) -> Graph:
        c, (first, last) = self.c, self.layers
        carried: tuple[str, ...] = ()
        if first == 0:
            self.start = self.embed("embed.weight")
            width = c.streams * c.hidden_size
            self.x = self.b.add("X.in", "repeat", (self.start,), (("X.in", width, "bf16"),), times=c.streams)[0]
        else:
            carried = self.x, self.pre = "in.x", "in.pre"
        for layer in range(first, last):
            self.layer(layer)
        outputs = (self.x, self.pre) if last < c.num_layers else (self.tail(),)
        lookback = any(first <= layer < last for layer in c.engram_layers)
        return self.graph(carried, outputs, lookback, cache_format=self.cache_format)

    def layer(self, layer: int) -> None:
        v, n = f"L{layer}.", f"layers.{layer}."
        if layer in self.c.engram_layers:
            self.x = self.engram(v, n + "engram.", layer)
        self.site(v, "a", n + "hc_attn_", n + "attn_norm.weight", self.attention, n + "attn.", layer)
        self.site(v, "m", n + "hc_ffn_", n + "ffn_norm.weight", self.moe, n + "ffn.", layer)

    def site(self, v: str, short: str, mixing: str, norm: str, sublayer: Any, n: str, layer: int) -> None:
        """Coefficients from the streams as they are; the sub-layer's input with the coefficients of the site before."""
        c, b = self.c, self.b
        count, width = c.streams * (c.streams + 2), c.streams * c.hidden_size
        w = {"w": b.weight(mixing + "fn", (count, width), "f32")}
        m = b.add(
            f"{v}m_{short}",
            "stream_scores",
            (self.x,),
            ((f"{v}m_{short}", count, "f32"),),
            weights=w,
            layer=layer,
            eps=c.rms_norm_eps,
        )[0]
        w = {"scale": b.weight(mixing + "scale", (3,), "f32"), "base": b.weight(mixing + "base", (count,), "f32")}
        sizes = (("pre", c.streams), ("post", c.streams), ("mix", c.streams**2))
        pre, post, mix = b.add(
            f"{v}gates_{short}",
            "stream_gates",
            (m,),
            tuple((f"{v}{s}_{short}", size, "f32") for s, size in sizes),
            weights=w,
            layer=layer,
            streams=c.streams,
            iterations=c.sinkhorn_iterations,
            eps=c.stream_eps,
            post_factor=POST_FACTOR,
        )
        x = self.norm(f"{v}x_{short}", self.collapsed(f"{v}h_{short}", layer), norm, c.hidden_size, layer)
        y = sublayer(x, v, n, layer)
        self.x = b.add(
            f"X.{layer}{short}",
            "stream_expand",
            (y, self.x, post, mix),
            ((f"X.{layer}{short}", width, "bf16"),),
            layer=layer,
        )[0]
        self.pre = pre

    def collapsed(self, name: str, layer: int) -> str:
        """The streams weighed by the last `pre`; before the first site they are all the embedding."""
        if not self.pre:
            return self.start
        out = ((name, self.c.hidden_size, "bf16"),)
        return self.b.add(name, "stream_collapse", (self.x, self.pre), out, layer=layer)[0]

    def rotary(self, layer: int) -> dict[str, Any]:
        """RoPE of a layer's window rows, queries and compressed rows."""
        c = self.c
        if self.c.ratios[layer]:
            return {"rope": c.rope_dim, "theta": c.compressed_rope_theta, "scaling": c.compressed_rope_scaling}
        return {"rope": c.rope_dim, "theta": c.rope_theta, "scaling": ()}

    def turn(self, name: str, x: str, heads: int, dim: int, layer: int, inverse: bool = False) -> str:
        out = ((name, heads * dim, "bf16"),)
        return self.b.add(
            name, "rope_tail", (x,), out, layer=layer, heads=heads, inverse=inverse, **self.rotary(layer)
        )[0]

    def insert(self, name: str, x: str, state: str, norm: str, width: int, ratio: int, what: str, layer: int) -> None:
        self.b.add(
            name,
            "latent_insert",
            (x,),
            (),
            weights={"w": self.b.weight(norm, (width,))} if norm else {},
            states={"kv": state},
            layer=layer,
            eps=self.c.rms_norm_eps,
            ratio=ratio,
            format=self.formats[what],
            **self.rotary(layer),
        )

    def attention(self, x: str, v: str, n: str, layer: int) -> str:
        c, b, tp = self.c, self.b, self.tp
        heads, groups, dim, ratio = c.num_heads // tp, c.o_groups // tp, c.head_dim, c.ratios[layer]
        hidden, width, form = c.hidden_size, heads * dim, "fp8_block"
        qa = self.linear(v + "qa", x, n + "wq_a.weight", c.q_lora_rank, hidden, layer, form=form)
        kv = self.linear(v + "kv", x, n + "wkv.weight", dim, hidden, layer, form=form)
        qc = self.norm(v + "qc", qa, n + "q_norm.weight", c.q_lora_rank, layer)
        q = self.linear(v + "q", qc, n + "wq_b.weight", width, c.q_lora_rank, layer, shard=0, form=form)
        q = self.turn(v + "qr", q, heads, dim, layer)
        window = b.state(v + "window", "kv", (dim,), "bf16", layer, window=c.window, format=self.formats["window"])
        self.insert(v + "insert", kv, window, n + "kv_norm.weight", dim, 1, "window", layer)
        if layer in c.kv_sources:
            self.compress(x, v, n, layer)
        if layer in c.index_sources:
            self.index(x, qc, v, n + "indexer.", layer)
        states = {"window": window} | ({"compressed": self.compressed[c.source_of(layer)]} if ratio else {})
        o = b.add(
            v + "o",
            "sparse_attention",
            (q, self.sel) if ratio else (q,),
            ((v + "o", width, "bf16"),),
            weights={"sink": b.weight(n + "attn_sink", (heads,), "f32", shard=0)},
            states=states,
            layer=layer,
            heads=heads,
            dim=dim,
            window=c.window,
            ratio=ratio,
            topk=c.index_topk if ratio else 0,
            scale=dim**-0.5,
        )[0]
        o = self.turn(v + "ot", o, heads, dim, layer, inverse=True)
        inner = groups * c.o_lora_rank
        z = b.add(
            v + "oz",
            "grouped_linear",
            (o,),
            ((v + "oz", inner, "bf16"),),
            weights={"w": self.matrix(n + "wo_a.weight", inner, width // groups, 0, form)},
            layer=layer,
            groups=groups,
            x_stride=width // groups,
            x_offset=0,
        )[0]
        ya = self.linear(v + "ya", z, n + "wo_b.weight", hidden, inner, layer, self.partial, 1, form)
        return self.exchange("all_reduce", v + "ra", ya, hidden, "bf16", layer)

    def compress(self, x: str, v: str, n: str, layer: int) -> None:
        """Latent of the group that the token closes -> a compressed row and, from the unrotated latent, an index key."""
        c, b, ratio, m = self.c, self.b, self.c.ratios[layer], n + "compressor."
        dim, hidden = c.head_dim, c.hidden_size
        if ratio == 1:
            latent = self.linear(v + "ca", x, m + "wkv.weight", dim, hidden, layer)
        else:
            a = self.linear(v + "ca", x, m + "wkv.weight", dim, hidden, layer, "f32")
            g = self.linear(v + "cg", x, m + "wgate.weight", dim, hidden, layer, "f32")
            ring = b.state(v + "ring", "ring", (max(RING_ROWS, self.rows + ratio - 1), 2 * dim), "f32", layer)
            latent = b.add(
                v + "cp",
                "gated_pool",
                (a, g),
                ((v + "cp", dim, "f32"),),
                states={"ring": ring},
                layer=layer,
                ratio=ratio,
            )[0]
        latent = self.norm(v + "latent", latent, m + "norm.weight", dim, layer)
        rows = b.state(v + "compressed", "kv", (dim,), "bf16", layer, ratio=ratio, format=self.formats["compressed"])
        self.insert(v + "insert_c", latent, rows, "", dim, ratio, "compressed", layer)
        ik = self.linear(v + "ik", latent, n + "indexer.wk.weight", c.index_dim, dim, layer)
        keys = b.state(v + "keys", "kv", (c.index_dim,), "bf16", layer, ratio=ratio, format=self.formats["keys"])
        self.insert(v + "insert_k", ik, keys, n + "indexer.k_norm.weight", c.index_dim, ratio, "keys", layer)
        self.compressed[layer], self.keys[layer] = rows, keys

    def index(self, x: str, qc: str, v: str, n: str, layer: int) -> None:
        c, b = self.c, self.b
        heads, dim = c.index_heads, c.index_dim
        width = heads * dim
        iq = self.linear(v + "iq", qc, n + "wq_b.weight", width, c.q_lora_rank, layer, form="fp8_block")
        iq = self.turn(v + "ir", iq, heads, dim, layer)
        if (grid := self.formats["query"]) != "none":
            out = ((v + "iz", width, "bf16"),)
            iq = b.add(v + "iz", "quantise", (iq,), out, layer=layer, heads=heads, format=grid)[0]
        iw = self.linear(v + "iw", x, n + "weights_proj.weight", heads, c.hidden_size, layer, "f32")
        publishes, restricted = layer == c.candidate_source, 0 <= c.candidate_source < layer
        chosen = ((v + "sel", c.index_topk, "i32"), (v + "blocks", c.candidate_blocks, "i32"))
        self.sel, *blocks = b.add(
            v + "select",
            "index_select",
            (iq, iw, self.blocks) if restricted else (iq, iw),
            chosen if publishes else chosen[:1],
            states={"keys": self.keys[c.source_of(layer)]},
            layer=layer,
            heads=heads,
            dim=dim,
            topk=c.index_topk,
            ratio=c.ratios[layer],
            block_size=c.candidate_block_size,
            keep_blocks=c.candidate_blocks if publishes or restricted else 0,
            scale=(dim * heads) ** -0.5,
        )
        if blocks:
            self.blocks = blocks[0]

    def moe(self, x: str, v: str, n: str, layer: int) -> str:
        """Routed experts and the shared expert on the same full-width input; their partials are summed in f32."""
        c, b = self.c, self.b
        hidden, inter, topk = c.hidden_size, c.moe_intermediate_size // self.tp, c.experts_per_token
        limit: dict[str, Any] = {"act": "clamped_silu", "beta": c.swiglu_limit, "linear_beta": c.swiglu_limit}
        logits = self.linear(v + "logits", x, n + "gate.weight", c.num_experts, hidden, layer, "f32")
        ids, wts = b.add(
            v + "route",
            "route",
            (logits,),
            ((v + "ids", topk, "i32"), (v + "wts", topk, "f32")),
            weights={"bias": b.weight(n + "gate.bias", (c.num_experts,), "f32")},
            layer=layer,
            topk=topk,
            scale=c.routed_scaling_factor,
            score="sqrt_softplus",
        )
        m, form = n + "shared_experts.", "fp8_block"
        gate = self.linear(v + "sgate", x, m + "w1.weight", inter, hidden, layer, shard=0, form=form)
        up = self.linear(v + "sup", x, m + "w3.weight", inter, hidden, layer, shard=0, form=form)
        act = b.add(v + "sact", "act_mul", (gate, up), ((v + "sact", inter, "bf16"),), layer=layer, **limit)[0]
        sh = self.linear(v + "sh", act, m + "w2.weight", hidden, inter, layer, "f32", 1, form)
        w = {role: self.experts(n, role, (inter, hidden), 1) for role in ("w1", "w3")}
        out = ((v + "ea", topk * inter, "bf16"),)
        ea = b.add(v + "ea", "expert_gate_up", (x, ids), out, weights=w, layer=layer, topk=topk, **limit)[0]
        w = {"w2": self.experts(n, "w2", (hidden, inter), 2)}
        out = ((v + "y", hidden, "f32"),)
        y = b.add(v + "y", "expert_down", (ea, ids, wts), out, weights=w, layer=layer, topk=topk)[0]
        ym = b.add(v + "ym", "sum", (y, sh), ((v + "ym", hidden, self.partial),), layer=layer)[0]
        return self.exchange("all_reduce", v + "rm", ym, hidden, "bf16", layer)

    def experts(self, n: str, role: str, shape: tuple[int, int], shard: int) -> str:
        source = (f"{n}experts.{{}}.{role}.weight", f"{n}experts.{{}}.{role}.scale")
        shape3 = (self.c.num_experts, *shape)
        return self.b.weight(f"{n}experts.{role}", shape3, "mxfp4", source, "experts_e8m0", shard)

    def engram(self, v: str, n: str, layer: int) -> str:
        """Rows of the table for the last tokens, projected to a key per stream and one value, gated into the streams.

        All but the gate depends on tokens alone. The table lies in host memory: every rank gathers all of its columns.
        """
        c, b = self.c, self.b
        h, columns = c.hashes()[layer], (c.engram_ngram - 1) * c.engram_heads
        width, streams = columns * c.engram_dim, c.streams
        classes = b.weight(
            "engram.token_classes",
            (c.vocab_size,),
            "i32",
            ("tokenizer.json",),
            "token_classes",
            pack_args={"classes": c.engram_classes},
        )
        rows = b.add(
            v + "grams",
            "ngram_hash",
            ("token",),
            ((v + "grams", columns, "i32"),),
            weights={"classes": classes},
            layer=layer,
            multipliers=h.multipliers,
            moduli=h.moduli,
            offsets=h.offsets,
            pad_token=c.engram_pad_token,
        )[0]
        table = b.weight(
            n + "embed.weight",
            (c.engram_rows[c.engram_layers.index(layer)], c.engram_dim),
            "mxfp8",
            (n + "embed.weight", n + "embed.scale"),
            "mxfp8",
            place="host",
        )
        out = ((v + "e", width, "bf16"),)
        e = b.add(v + "e", "table_gather", (rows,), out, weights={"w": table}, layer=layer)[0]
        made = (streams + 1) * c.hidden_size
        kv = self.linear(v + "ekv", e, n + "wkv.weight", made // self.tp, width, layer, shard=0, form="fp8_block")
        kv = self.exchange("all_gather", v + "ekv_all", kv, made, "bf16", layer)
        gate = b.add(
            v + "eg",
            "memory_gate",
            (self.x, kv),
            ((v + "eg", streams, "f32"),),
            weights={r: b.weight(f"{n}{r}_weight", (streams, c.hidden_size)) for r in "qk"},
            layer=layer,
            streams=streams,
            eps=c.rms_norm_eps,
            floor=GATE_FLOOR,
        )[0]
        out = ((f"X.{layer}e", streams * c.hidden_size, "bf16"),)
        return b.add(f"X.{layer}e", "stream_add", (self.x, kv, gate), out, layer=layer)[0]

    def tail(self) -> str:
        c = self.c
        x = self.norm("x_out", self.collapsed("h_out", c.num_layers), "norm.weight", c.hidden_size, c.num_layers)
        vocab = c.vocab_size // self.tp
        return self.linear("logits", x, "head.weight", vocab, c.hidden_size, c.num_layers, "f32", 0)
