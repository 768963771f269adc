"""The graphs: shapes of one TP8 rank of the published K3, well-formedness, pipeline stages, ranks against the whole."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from model_steps import Model, caches, rel, rollout, step_inputs, tiny, tokens

from optkit.models import checkpoint, families, interpret
from optkit.models.emulation import emulation_coefficients
from optkit.models.graph import Graph
from optkit.models.ops import OPS
from optkit.models.random_weights import random_weights

DATA = Path(__file__).parents[1] / "data"
STEP_NAMES = {"token", "seq_len", "block_table", "slot_mapping", "state_slot"}


def published() -> Any:
    hf = json.loads((DATA / "kimi_k3_config.json").read_text())
    return families.family_of(hf).Config.from_hf(hf)


def well_formed(g: Graph) -> None:
    """Every input is known before it is read, every weight and state is declared and used, every kind has a ref."""
    known = {i for i in g.inputs if i == "token" or i.startswith("in.")}
    assert len({o.name for o in g.ops}) == len(g.ops)
    used_weights, used_states = set(), set()
    for o in g.ops:
        assert o.kind in OPS
        assert set(o.inputs) <= known, o.name
        known |= set(o.outputs)
        used_weights |= {w for _, w in o.weights}
        used_states |= {s for _, s in o.states}
    assert used_weights == {w.name for w in g.weights}
    assert used_states == {s.name for s in g.states}
    assert set(g.outputs) <= known


def test_published_config() -> None:
    c = published()
    assert (c.num_layers, c.hidden_size, c.kda_heads, c.num_experts, c.experts_per_token) == (93, 7168, 96, 896, 16)
    assert c.full_attn_layers == (*range(3, 92, 4), 92)
    assert (c.rms_norm_eps, c.qk_lora_norm_eps, c.gate_lower_bound, c.block_size) == (1e-5, 1e-6, -5.0, 12)


def test_plain_text_config_equals_wrapper() -> None:
    hf = json.loads((DATA / "kimi_k3_config.json").read_text())
    assert families.family_of(hf["text_config"]).Config.from_hf(hf["text_config"]) == published()


def test_full_k3_rank() -> None:
    start = time.process_time()
    g = families.FAMILIES["kimi_k3"].build(published(), rows=8, tp=8, rank=3)
    assert time.process_time() - start < 5
    well_formed(g)
    assert sum(w.nbytes for w in g.weights) / 1e9 == pytest.approx(195, abs=1)
    assert len([s for s in g.states if s.kind == "kv"]) == 24
    counts = [len(g.op(f"L{i}.h_a").inputs) for i in (1, 12, 13, 84, 92)]
    assert counts == [2, 2, 3, 8, 9]
    assert len(g.op("h_out").inputs) == 9


def test_slice_s1_has_the_shapes_of_one_rank() -> None:
    """Two layers with real per-rank dimensions: 4.2 GB, in.p and in.block0 given, prefix and block handed on."""
    g = families.FAMILIES["kimi_k3"].build(published(), rows=8, tp=8, layers=(2, 4))
    well_formed(g)
    assert g.inputs[-2:] == ("in.p", "in.block0") and "token" not in g.inputs
    assert g.outputs == ("P.3m", "in.block0")
    n = "model.layers.{}."
    shapes = {
        n.format(2) + "self_attn.q_proj.weight": (1536, 7168),
        n.format(2) + "self_attn.f_a_proj.weight": (128, 7168),
        n.format(2) + "self_attn.f_b_proj.weight": (1536, 128),
        n.format(2) + "self_attn.b_proj.weight": (12, 7168),
        n.format(2) + "self_attn.q_conv1d.weight": (1536, 4),
        n.format(2) + "self_attn.o_proj.weight": (7168, 1536),
        n.format(3) + "self_attn.q_a_proj.weight": (1536, 7168),
        n.format(3) + "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        n.format(3) + "self_attn.q_b_proj.weight": (2304, 1536),
        n.format(3) + "self_attn.w_uk": (12 * 512, 128),
        n.format(3) + "self_attn.w_uv": (12 * 128, 512),
        n.format(3) + "block_sparse_moe.gate.weight": (112, 7168),
        n.format(3) + "block_sparse_moe.routed_expert_down_proj.weight": (448, 7168),
        n.format(3) + "block_sparse_moe.routed_expert_up_proj.weight": (896, 3584),
        n.format(3) + "block_sparse_moe.shared_experts.gate_proj.weight": (768, 7168),
        n.format(3) + "block_sparse_moe.shared_experts.down_proj.weight": (7168, 768),
        n.format(3) + "block_sparse_moe.experts.w1": (896, 384, 3584),
        n.format(3) + "block_sparse_moe.experts.w2": (896, 3584, 384),
    }
    assert {k: g.weight(k).shape for k in shapes} == shapes
    assert g.state("L2.recurrent").shape == (12, 128, 128)
    assert sum(w.nbytes for w in g.weights) / 1e9 == pytest.approx(4.25, abs=0.1)
    assert g.value("L2.ya").dtype == "f32" and g.value("L2.ra").dtype == "bf16"


@pytest.mark.parametrize("name", families.config_names())
def test_shipped_configs_build(name: str) -> None:
    hf = families.named_config(name)
    module = families.family_of(hf)
    config = module.Config.from_hf(hf)
    well_formed(module.build(config, rows=1))
    well_formed(module.build(config, rows=8, tp=2, rank=1))


@pytest.mark.parametrize(
    ("name", "tp", "words"),
    [
        ("kimi_k3", 5, "attention heads 96"),
        ("kimi_k3", 64, "MX groups of the experts intermediate 96"),
        ("kimi_k3_tiny", 8, "MX groups of the experts intermediate 2"),
        ("llama_3_2_1b", 16, "kv heads 8"),
        ("llama_3_2_1b", 3, "vocabulary 128256"),
        ("llama_tiny", 0, "expected >= 1"),
    ],
)
def test_indivisible_tp_is_refused(name: str, tp: int, words: str) -> None:
    hf = families.named_config(name)
    module = families.family_of(hf)
    if words == "vocabulary 128256":
        hf = {**hf, "vocab_size": 128257}
        words = "vocabulary 128257"
    with pytest.raises(ValueError, match=words):
        module.build(module.Config.from_hf(hf), rows=1, tp=tp)


@pytest.mark.parametrize("kw", [{"layers": (4, 4)}, {"layers": (0, 99)}, {"rows": 0}, {"rank": 1}, {"peers": "some"}])
def test_bad_build_arguments(k3: Model, kw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(kw))):
        k3.module.build(k3.config, **{"rows": 1, **kw})


@pytest.mark.parametrize("cut", [1, 4, 6])
@pytest.mark.parametrize("name", ["k3", "llama"])
def test_pipeline_stages_equal_the_whole(name: str, cut: int, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(name)
    cut = min(cut, model.config.num_layers - 1)
    first, second = model.build(layers=(0, cut)), model.build(layers=(cut, model.config.num_layers))
    ids = tokens(2, 2)
    whole = rollout(model.graph, model.exact, ids)
    state = caches(model.graph, 2)
    for i, token in enumerate(ids):
        inputs = step_inputs(token, i)
        a = interpret.run(first, model.exact, inputs, state)
        carried = [n for n in second.inputs if n.startswith("in.")]
        assert len(carried) == len(first.outputs)
        for theirs, ours in zip(carried, first.outputs, strict=True):
            inputs[theirs] = a[ours]
        out = interpret.run(second, model.exact, inputs, state)["logits"]
        assert torch.equal(out, whole[i]["logits"])


@pytest.mark.parametrize("name", ["kimi_k3_tiny", "llama_tiny"])
def test_real_ranks_equal_the_whole(name: str, tmp_path: Path) -> None:
    """Both ranks of a written checkpoint, peers real, give the unsharded logits: slices and exchanges are right."""
    model = tiny(name)
    path = checkpoint.write_random(tmp_path / "c", model.hf, seed=3, shards=2)
    graphs = [model.build(tp=2, rank=r, peers="real") for r in range(2)]
    weights = [checkpoint.load(path, g) for g in graphs]
    state = [caches(g, 2) for g in graphs]
    ids = tokens(2, 2)
    for i, (token, whole) in enumerate(zip(ids, rollout(model.graph, model.exact, ids), strict=True)):
        out = interpret.run_ranks(graphs, weights, step_inputs(token, i), state)
        logits = torch.cat([o["logits"] for o in out], -1)
        assert rel(logits, whole["logits"]) < 1e-11


def test_emulated_peers_match_their_coefficients(k3: Model) -> None:
    g = k3.build(tp=2, rank=1)
    seeds = {short: g.op(f"L1.{short}").attr("seed") for short in ("ra", "z_all", "sh_all")}
    assert len(set(seeds.values())) == 3 and g.op("L2.ra").attr("seed") == seeds["ra"]
    c = {short: emulation_coefficients(seed, 2, 1) for short, seed in seeds.items()}
    assert all(pair[1] == 1.0 and 0.125 <= pair[0] <= 0.625 for pair in c.values())
    inputs = step_inputs(torch.tensor([300, 400], dtype=torch.int32), 0)
    out = interpret.run(g, random_weights(g), inputs, caches(g, 2))
    assert rel(out["L1.ra"], sum(c["ra"]) * out["L1.ya"]) < 1e-12
    first, own = out["L1.z_all"].chunk(2, -1)
    assert torch.equal(own, out["L1.z"]) and rel(first, c["z_all"][0] * out["L1.z"]) < 1e-12


def test_one_rank_alone_cannot_have_real_peers(k3: Model) -> None:
    g = k3.build(tp=2, rank=1, peers="real")
    with pytest.raises(ValueError, match="real peers"):
        interpret.run(g, random_weights(g), step_inputs(tokens(2, 1)[0], 0), caches(g, 2))


@pytest.mark.parametrize("ranks", [1, 2, 8, 33])
def test_coefficients_tell_ranks_apart(ranks: int) -> None:
    c = emulation_coefficients(7, ranks, ranks - 1)
    assert len(set(c)) == ranks and c[-1] == 1.0
    assert c == emulation_coefficients(7, ranks, ranks - 1)
    assert all(torch.tensor(x).bfloat16().item() == x for x in c)
    with pytest.raises(ValueError, match="rank"):
        emulation_coefficients(7, ranks, ranks)


def broken(**changes: Any) -> dict[str, Any]:
    hf = families.named_config("kimi_k3_tiny")
    hf["text_config"].update(changes)
    return hf


@pytest.mark.parametrize(
    ("hf", "words"),
    [
        ({"model_type": "kimi_k2"}, "model_type: 'kimi_k2'.*did you mean kimi_k3"),
        ({}, "model_type: None"),
        (broken(hidden_size="1024"), "hidden_size: '1024': expected an integer"),
        ({"model_type": "kimi_k3"}, "^config.json: text_config: missing: expected a mapping$"),
        (broken(linear_attn_config=3), "^config.json: text_config: linear_attn_config: 3: expected a mapping$"),
        (broken(hidden_act="silu"), "hidden_act: 'silu': expected 'situ'"),
        (broken(mla_use_nope=False), "mla_use_nope: False"),
        (broken(num_hidden_layers=8), r"full_attn_layers \+ kda_layers"),
        (broken(moe_intermediate_size=100), "moe_intermediate_size: 100: expected a multiple of the MX group"),
        (broken(num_experts=2), "num_experts_per_token: 4"),
        (broken(rms_norm_eps=0), "rms_norm_eps: 0"),
        (broken(quantization_config={"quant_method": "fp8"}), "quant_method: 'fp8'"),
        ({"model_type": "llama", "hidden_size": 8}, "num_attention_heads: missing"),
        ({**families.named_config("llama_tiny"), "attention_bias": True}, "attention_bias: True"),
        ({**families.named_config("llama_tiny"), "rope_scaling": {"rope_type": "yarn"}}, "rope_type: 'yarn'"),
        ({**families.named_config("llama_tiny"), "num_key_value_heads": 3}, "num_key_value_heads: 3"),
    ],
)
def test_bad_configs_are_named(hf: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        families.family_of(hf).Config.from_hf(hf)


def test_every_missing_key_is_named_at_once() -> None:
    hf = families.named_config("kimi_k3_tiny")
    for key in ("hidden_size", "kv_lora_rank"):
        del hf["text_config"][key]
    hf["text_config"]["q_lora_rnk"] = hf["text_config"].pop("q_lora_rank")
    with pytest.raises(ValueError) as e:
        families.family_of(hf).Config.from_hf(hf)
    lines = str(e.value).splitlines()
    assert len(lines) == 3
    assert "did you mean q_lora_rnk?" in next(line for line in lines if "q_lora_rank" in line)


def test_rope_parameters_are_read_as_rope_scaling() -> None:
    hf = families.named_config("llama_tiny")
    old = families.family_of(hf).Config.from_hf(hf)
    scaling = hf.pop("rope_scaling")
    hf["rope_parameters"] = {**scaling, "rope_theta": hf.pop("rope_theta")}
    assert families.family_of(hf).Config.from_hf(hf) == old
