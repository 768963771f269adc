"""Checkpoints: every kind of damage is named, all at once; packings are reversible; slices per rank."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_steps import Model
from safetensors.torch import load_file, save_file

from optkit.models import checkpoint, packing
from optkit.models.checkpoint import CheckpointError

KV_B = "model.layers.3.self_attn.kv_b_proj.weight"


@pytest.fixture(scope="module")
def written(k3: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write_random(tmp_path_factory.mktemp("k3") / "c", k3.hf, seed=3, shards=3)


@pytest.fixture(scope="module")
def small(llama: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write_random(tmp_path_factory.mktemp("llama") / "c", llama.hf, seed=3)


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else all(map(torch.equal, a, b))


def edit(directory: Path, to: Path, change: Any) -> Path:
    """A copy whose tensors went through `change`."""
    shutil.copytree(directory, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


def test_load_gives_the_written_weights(k3: Model, written: Path) -> None:
    weights = checkpoint.load(written, k3.graph)
    assert set(weights) == {w.name for w in k3.graph.weights}
    assert all(same(weights[n], k3.weights[n]) for n in weights)
    assert same(checkpoint.load(written, k3.config)["lm_head.weight"], weights["lm_head.weight"])


def test_shards_have_an_index_and_wrapper_names(written: Path) -> None:
    index = json.loads((written / checkpoint.INDEX).read_text())["weight_map"]
    assert len(set(index.values())) == 3
    assert all(n.startswith("language_model.") for n in index)
    a_log = next(n for n in index if n.endswith("layers.0.self_attn.A_log"))
    assert load_file(written / index[a_log])[a_log].shape == (128,)


def test_names_without_wrapper_and_vision_tensors(k3: Model, written: Path, tmp_path: Path) -> None:
    tensors = {}
    for file in written.glob("*.safetensors"):
        tensors.update({n.removeprefix("language_model."): t for n, t in load_file(file).items()})
    tensors["vision_tower.patch.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(k3.hf["text_config"]))
    weights = checkpoint.load(tmp_path, k3.graph)
    assert all(same(weights[n], k3.weights[n]) for n in weights)
    again = checkpoint.from_tensors(k3.graph, tensors)
    assert all(same(again[n], k3.weights[n]) for n in again)


def test_ranks_hold_slices(k3: Model, written: Path) -> None:
    ranks = [checkpoint.load(written, k3.build(tp=2, rank=r)) for r in range(2)]
    for w in k3.build(tp=2).weights:
        parts = [r[w.name] for r in ranks]
        whole = k3.weights[w.name]
        if w.shard < 0:
            assert same(parts[0], whole) and same(parts[1], whole)
        elif w.dtype == "mxfp4":
            assert same(tuple(torch.cat([p[i] for p in parts], w.shard) for i in range(2)), whole)
        else:
            assert same(torch.cat(parts, w.shard), whole), w.name


def test_a_stage_loads_only_its_layers(k3: Model, written: Path) -> None:
    weights = checkpoint.load(written, k3.build(layers=(4, 9)))
    assert not any(n.startswith(("model.layers.3.", "model.embed")) for n in weights)
    assert "lm_head.weight" in weights


@pytest.mark.parametrize("ranks", [1, 2])
def test_packings_are_reversible(k3: Model, written: Path, ranks: int) -> None:
    """What the ranks hold, written back, is the checkpoint again."""
    stored = {}
    for file in written.glob("*.safetensors"):
        stored.update({n.removeprefix("language_model."): t for n, t in load_file(file).items()})
    back = {n: torch.zeros_like(t) for n, t in stored.items()}

    def write(name: str, region: Any, part: torch.Tensor) -> None:
        back[name][region] = (
            part if back[name][region].shape == part.shape else torch.cat([part, back[name][region][part.shape[0] :]])
        )

    for rank in range(ranks):
        graph = k3.build(tp=ranks, rank=rank)
        weights = checkpoint.load(written, graph)
        for w in graph.weights:
            packing.unpack(w, ranks, rank, weights[w.name], write)
    unread = {w.name for w in k3.module.unused_weights(k3.config)}
    assert {n for n in stored if not torch.equal(back[n], stored[n])} == unread


def test_kv_b_packing_is_the_absorbed_product(k3: Model, written: Path) -> None:
    index = json.loads((written / checkpoint.INDEX).read_text())["weight_map"]
    name = "language_model." + KV_B
    kv_b = load_file(written / index[name])[name].reshape(4, 256, 512)
    w_uk = k3.weights["model.layers.3.self_attn.w_uk"].reshape(4, 512, 128)
    assert torch.equal(w_uk, kv_b[:, :128].transpose(1, 2))
    assert torch.equal(k3.weights["model.layers.3.self_attn.w_uv"].reshape(4, 128, 512), kv_b[:, 128:])


def test_all_mistakes_in_one_error(llama: Model, small: Path, tmp_path: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        n = "model.layers.1."
        del t[n + "mlp.down_proj.weight"]
        t[n + "mlp.up_proj.weight"] = t[n + "mlp.up_proj.weight"][:-1].contiguous()
        t[n + "input_layernorm.weight"] = t[n + "input_layernorm.weight"].float()
        t["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
        t["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(32)
        t["lm_head.weight"] = torch.zeros(2)  # tied: not read

    with pytest.raises(CheckpointError) as e:
        checkpoint.load(edit(small, tmp_path / "c", change), llama.graph)
    lines = sorted(str(e.value).splitlines())
    assert lines == [
        "model.layers.1.input_layernorm.weight: dtype f32 in model.safetensors: expected bf16",
        "model.layers.1.mlp.down_proj.weight: missing: expected bf16 [256, 512]",
        "model.layers.1.mlp.up_proj.weight: shape [511, 256] in model.safetensors: expected [512, 256]",
        "model.layers.9.mlp.up_proj.weight: unexpected tensor in model.safetensors: not part of llama",
    ]


def test_a_short_a_log_is_named(k3: Model, written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "c")
    index = json.loads((written / checkpoint.INDEX).read_text())["weight_map"]
    name = "language_model.model.layers.0.self_attn.A_log"
    tensors = load_file(tmp_path / "c" / index[name])
    tensors[name] = tensors[name][:3].contiguous()
    save_file(tensors, tmp_path / "c" / index[name])
    with pytest.raises(CheckpointError, match=r"A_log: shape \[3\] in .*: expected at least \[4\]"):
        checkpoint.load(tmp_path / "c", k3.graph)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "no_shard", "index", "index_lies", "no_config", "no_files"])
def test_damaged_files_are_named(
    damage: str, k3: Model, llama: Model, written: Path, small: Path, tmp_path: Path
) -> None:
    model, source = (llama, small) if damage in ("truncated", "garbage", "no_config", "no_files") else (k3, written)
    copy = tmp_path / "c"
    shutil.copytree(source, copy)
    file = sorted(copy.glob("*.safetensors"))[0]
    words = f"{file.name}: damaged safetensors file"
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
    elif damage == "garbage":
        file.write_bytes(b"\xff" * 100)
    elif damage == "no_shard":
        file.unlink()
        words = f"{file.name}: missing"
    elif damage == "index":
        (copy / checkpoint.INDEX).write_text("{")
        words = f"{checkpoint.INDEX}: damaged"
    elif damage == "index_lies":
        index = json.loads((copy / checkpoint.INDEX).read_text())
        index["weight_map"]["model.extra"] = file.name
        (copy / checkpoint.INDEX).write_text(json.dumps(index))
        words = "model.extra: missing"
    elif damage == "no_config":
        (copy / "config.json").unlink()
        words = "config.json: missing"
    else:
        file.unlink()
        words = "no \\*.safetensors file"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.load(copy, model.graph)


def test_a_config_that_differs_from_the_plan_is_named(llama: Model, k3: Model, small: Path, tmp_path: Path) -> None:
    shutil.copytree(small, tmp_path / "c")
    (tmp_path / "c" / "config.json").write_text(json.dumps({**llama.hf, "rms_norm_eps": 1e-6}))
    with pytest.raises(CheckpointError, match="rms_norm_eps: 1e-06: expected 1e-05"):
        checkpoint.load(tmp_path / "c", llama.graph)
    with pytest.raises(CheckpointError, match="model_type: 'llama'.*family kimi_k3"):
        checkpoint.load(small, k3.graph)


def test_the_tokenizer_has_a_word_for_every_token(small: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(small)
    last = tokenizer.vocab_size - 1
    assert tokenizer("t0 t5 t17")["input_ids"] == [0, 5, 17] and tokenizer.decode([last]) == f"t{last}"


def test_write_random_refuses_a_used_directory(llama: Model, small: Path) -> None:
    with pytest.raises(ValueError, match="not empty"):
        checkpoint.write_random(small, llama.hf)
    assert not list(small.parent.glob("*.partial"))


def test_headers_alone_show_what_is_wrong(llama: Model, small: Path, tmp_path: Path) -> None:
    """What a run asks before it builds anything: a lost and a renamed tensor, without reading a weight."""
    checkpoint.verify(small, llama.graph)
    bad = edit(small, tmp_path / "c", lambda t: t.update({"model.norm.weighs": t.pop("model.norm.weight")}))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify(bad, llama.graph)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["model.norm.weight", "model.norm.weighs"]


def test_a_tensor_lost_from_its_shard_does_not_hide_other_mistakes(k3: Model, written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "c")
    shard = sorted((tmp_path / "c").glob("*.safetensors"))[0]
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    tensors["model.stray"] = tensors.pop(name)
    save_file(tensors, shard)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify(tmp_path / "c", k3.graph)
    assert f"{name}: missing: {checkpoint.INDEX} places it" in str(caught.value)
    assert "model.stray: unexpected tensor" in str(caught.value)


@pytest.mark.parametrize("file", ["../c/model-00001-of-00003.safetensors", 5, None, "."])
def test_an_index_names_files_beside_it(file: object, k3: Model, written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "c")
    index = tmp_path / "c" / checkpoint.INDEX
    body = json.loads(index.read_text())
    name = sorted(body["weight_map"])[0]
    body["weight_map"][name] = file
    index.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=r"expected the name of a file beside the index"):
        checkpoint.verify(tmp_path / "c", k3.graph)


def test_a_checkpoint_that_could_not_be_finished_leaves_nothing(
    llama: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        checkpoint.write_random(tmp_path / "c", llama.hf)
    assert not list(tmp_path.iterdir())
