"""DeepSeek-V4.1's graphs: the published model, every layer type, stages, ranks against the whole, bad configs."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from model_steps import BLOCK_SIZE, Model, caches, rel, rollout, step_inputs, tokens
from test_graph import well_formed

from optkit.models import checkpoint, deepseek_v41, families, interpret
from optkit.models.config import ConfigError
from optkit.models.graph import Graph

SLICE = (0, 1, 2, 3, 20, 21, 24)


@pytest.fixture(scope="module")
def published() -> deepseek_v41.Config:
    hf = families.named_config("deepseek_v41_flash")
    return families.family_of(hf).Config.from_hf(hf)


def kinds(graph: Graph, layer: int) -> set[str]:
    return {op.kind for op in graph.ops if op.layer == layer}


def test_published_rank(published: deepseek_v41.Config) -> None:
    start = time.process_time()
    g = deepseek_v41.build(published, rows=8, tp=8, rank=3)
    assert time.process_time() - start < 2
    well_formed(g)
    device = [w for w in g.weights if w.place == "device"]
    assert sum(w.nbytes for w in device) / 1e9 == pytest.approx(38.0, abs=0.1)
    tables = [w for w in g.weights if w.place == "host"]
    assert [w.nbytes for w in tables] == [rows * 264 for rows in (384_006_168, 384_016_682)]
    shapes = {
        "attn.wq_a.weight": (1280, 5120),
        "attn.wkv.weight": (512, 5120),
        "attn.wq_b.weight": (4096, 1280),
        "attn.wo_a.weight": (1024, 4096),
        "attn.wo_b.weight": (5120, 1024),
        "attn.indexer.wq_b.weight": (4096, 1280),
        "attn.indexer.weights_proj.weight": (32, 5120),
        "attn.indexer.wk.weight": (128, 512),
        "attn.compressor.wgate.weight": (512, 5120),
        "attn.attn_sink": (8,),
        "ffn.gate.weight": (384, 5120),
        "ffn.experts.w1": (384, 288, 5120),
        "ffn.experts.w2": (384, 5120, 288),
        "ffn.shared_experts.w1.weight": (288, 5120),
        "hc_attn_fn": (24, 20480),
        "engram.wkv.weight": (3200, 6144),
    }
    assert {n: g.weight(f"layers.14.{n}").shape for n in shapes} == shapes
    assert g.weight("head.weight").shape == (16160, 5120)


def test_plain_text_config_equals_wrapper(published: deepseek_v41.Config) -> None:
    hf = families.named_config("deepseek_v41_flash")
    text = {**hf["text_config"], "quantization_config": hf["quantization_config"]}
    assert families.family_of(text).Config.from_hf(text) == published
    del text["quantization_config"], hf["quantization_config"]
    for config in (text, hf):
        with pytest.raises(ConfigError, match="quantization_config: missing"):
            deepseek_v41.Config.from_hf(config)


def test_hash_ranges_equal_the_published_table_sizes(published: deepseek_v41.Config) -> None:
    """The prime search is right if 24 primes per layer sum to exactly the released tables' rows."""
    hashes = published.hashes()
    assert tuple(hashes[i].rows for i in (1, 14)) == published.engram_rows
    assert len({p for h in hashes.values() for p in h.moduli}) == 48
    assert all(m % 2 and m * (published.engram_classes - 1) < 2**63 for h in hashes.values() for m in h.multipliers)


def test_layer_types(published: deepseek_v41.Config) -> None:
    g = deepseek_v41.build(published, rows=8, tp=8)
    index, compress = {"index_select"}, {"gated_pool"}
    for layer in (0, 3, 21, 39):
        assert not kinds(g, layer) & (index | compress)
    for layer in (2, 8, 14):
        assert kinds(g, layer) >= index | compress
    assert "gated_pool" not in kinds(g, 20) and len(g.op("L20.select").outputs) == 2
    for layer in (24, 28, 32, 36):
        assert g.op(f"L{layer}.select").inputs[2] == "L20.blocks"
        assert g.op(f"L{layer}.select").state("keys") == "L20.keys"
    assert len(g.op("L8.select").inputs) == 2
    reads = {
        i: (dict(g.op(f"L{i}.o").states).get("compressed"), g.op(f"L{i}.o").inputs[1:]) for i in (1, 7, 19, 23, 39)
    }
    assert reads == {
        1: (None, ()),
        7: ("L2.compressed", ("L2.sel",)),
        19: ("L14.compressed", ("L14.sel",)),
        23: ("L20.compressed", ("L20.sel",)),
        39: ("L20.compressed", ("L36.sel",)),
    }
    assert [op.layer for op in g.ops if op.kind == "ngram_hash"] == [1, 14]
    assert g.op("L3.h_a").inputs == ("X.2m", "L2.pre_m") and g.op("L3.h_m").inputs == ("X.3a", "L3.pre_a")
    states = {s.name: s for s in g.states}
    assert sum(s.window == 128 for s in g.states) == 40
    assert (states["L2.compressed"].ratio, states["L20.keys"].ratio, states["L2.ring"].shape) == (2, 1, (9, 1024))


def test_h200_slice_of_every_type(published: deepseek_v41.Config) -> None:
    small = published.of_layers(SLICE)
    assert (small.ratios, small.kv_sources, small.index_sources) == ((0, 0, 2, 2, 1, 1, 1), (2, 4), (2, 4, 6))
    assert (small.candidate_source, small.engram_layers) == (4, (1,))
    assert small.engram_rows == (384_006_168,)
    little = published.of_layers(SLICE, engram_start=10_000)
    assert little.engram_rows == (little.hashes()[1].rows,) and 24 * 10_000 < little.engram_rows[0] < 24 * 11_000
    g = deepseek_v41.build(little, rows=8, tp=8)
    well_formed(g)
    whole = deepseek_v41.build(published, rows=8, tp=8)
    assert g.weight("layers.6.attn.wq_b.weight").shape == whole.weight("layers.24.attn.wq_b.weight").shape
    with pytest.raises(ConfigError, match=r"compress_ratios\[1\]"):
        published.of_layers((0, 3))


def test_stages_equal_the_whole(deepseek: Model) -> None:
    parts = [deepseek.build(layers=cut) for cut in ((0, 2), (2, 4), (4, 7))]
    for part in parts:
        well_formed(part)
    assert "lookback" in parts[0].inputs and "token" not in parts[1].inputs
    state, stages = caches(deepseek.graph, 2), [caches(p, 2) for p in parts]
    ids = tokens(2, 6)
    for i, t in enumerate(ids):
        inputs = step_inputs(t, i, before=ids)
        want = interpret.run(deepseek.graph, deepseek.exact, inputs, state)
        handed: dict[str, torch.Tensor] = {}
        for part, own in zip(parts, stages, strict=True):
            out = interpret.run(part, deepseek.exact, inputs | handed, own)
            handed = dict(zip(("in.x", "in.pre"), (out[n] for n in part.outputs), strict=False))
        assert torch.equal(out["logits"], want["logits"])
    with pytest.raises(ValueError, match=r"layers: \(0, 3\): expected bounds among 0, 1, 2, 4, 7"):
        deepseek.build(layers=(0, 3))


def test_ranks_equal_the_whole(deepseek: Model, tmp_path: Any) -> None:
    directory = checkpoint.write_random(tmp_path / "c", deepseek.hf, seed=3)
    graphs = [deepseek.build(tp=2, rank=r, peers="real") for r in range(2)]
    weights = [interpret.cast_weights(g, checkpoint.load(directory, g), "f64") for g in graphs]
    states = [caches(g, 2) for g in graphs]
    ids = tokens(2, 20)
    want = rollout(deepseek.graph, deepseek.exact, ids)
    for i, t in enumerate(ids):
        out = interpret.run_ranks(graphs, weights, step_inputs(t, i, before=ids), states)
        assert rel(torch.cat([o["logits"] for o in out], -1), want[i]["logits"]) < 1e-10


def test_emulated_peers_are_not_this_rank_alone(deepseek: Model) -> None:
    g = deepseek.build(tp=2)
    well_formed(g)
    kinds = [op.kind for op in g.ops if op.layer == 1 and op.kind in ("all_reduce", "all_gather")]
    assert kinds == ["all_gather", "all_reduce", "all_reduce"]  # Engram's projection, attention, experts


BAD: dict[str, tuple[str, Any, str]] = {
    "act": ("hidden_act", "gelu", "hidden_act: 'gelu': expected 'silu'"),
    "ratio": ("compress_ratios", [0, 0, 2, 1, 1, 1, 1], r"compress_ratios\[3\]: 1: expected the ratio of the nearest"),
    "short": ("compress_ratios", [0, 0], r"compress_ratios: \[0, 0\]: expected at least 7 entries"),
    "source": ("kv_source_layer_ids", [1, 4], "kv_source_layer_ids: .*expected"),
    "unchosen": ("index_source_layer_ids", [2, 6], r"kv_source_layer_ids: \[4\]: expected ids that index_source"),
    "candidate": ("candidate_source_layer_id", 3, "candidate_source_layer_id: 3: expected -1 or an entry"),
    "early": ("candidate_source_layer_id", 2, r"candidate_source_layer_id: 2: expected the last KV source"),
    "table": ("engram_num_embeddings", [659], "engram_num_embeddings: 659: expected at least 660"),
    "tables": ("engram_num_embeddings", [672, 672], "engram_num_embeddings: .*one entry per layer"),
    "experts": ("num_experts_per_tok", 17, "num_experts_per_tok: 17: expected at most n_routed_experts = 16"),
    "groups": ("o_groups", 3, "o_groups: 3: expected a divisor of num_attention_heads = 4"),
    "inter": ("moe_intermediate_size", 48, "moe_intermediate_size: 48: expected a multiple of the MX group"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_configs_are_one_line_each(case: str) -> None:
    key, value, message = BAD[case]
    hf = copy.deepcopy(families.named_config("deepseek_v41_tiny"))
    hf["text_config"][key] = value
    with pytest.raises(ConfigError, match=message) as e:
        deepseek_v41.Config.from_hf(hf)
    assert all(line.startswith("config.json: ") for line in str(e.value).splitlines())


def test_other_families_and_formats_are_refused(deepseek: Model) -> None:
    with pytest.raises(ConfigError, match=r"model_type: 'deepseek_v4': expected one of .*did you mean deepseek_v41"):
        families.family_of({"model_type": "deepseek_v4"})
    with pytest.raises(ConfigError, match="model_type: 'kimi_k3'"):
        deepseek_v41.Config.from_hf(families.named_config("kimi_k3_tiny"))
    with pytest.raises(ValueError, match=r"tp: 4: does not divide output groups 2") as e:
        deepseek.build(tp=4)
    assert "MX groups" in str(e.value)
    with pytest.raises(ValueError, match=r"cache_format: 'fp8': expected one of none, official, h200"):
        deepseek.build(cache_format="fp8")
    with pytest.raises(ValueError, match="block_size: 7: expected a multiple of every ratio"):
        interpret.allocate_caches(deepseek.graph, 1, 1, 7)
    assert BLOCK_SIZE % 2 == 0
