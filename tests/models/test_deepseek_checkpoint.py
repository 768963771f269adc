"""DeepSeek-V4.1 checkpoints: released names and types, reversible packings, every mistake named, token classes."""

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
from optkit.models.checkpoint import TOKENIZER, CheckpointError
from optkit.models.ops.quantised import expand
from optkit.models.token_classes import synthetic_classes, token_classes, write_tokenizer

N = "layers.2."


@pytest.fixture(scope="module")
def written(deepseek: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write_random(tmp_path_factory.mktemp("deepseek") / "c", deepseek.hf, seed=3)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return all(same(*pair) for pair in zip(a, b, strict=True))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_load_gives_the_written_weights(deepseek: Model, written: Path, tmp_path: Path) -> None:
    weights = checkpoint.load(written, deepseek.graph)
    assert set(weights) == {w.name for w in deepseek.graph.weights}
    assert all(same(weights[n], deepseek.weights[n]) for n in weights)
    sharded = checkpoint.write_random(tmp_path / "s", deepseek.hf, seed=3, shards=3)
    assert len(list(sharded.glob("*.safetensors"))) == 3 and (sharded / checkpoint.INDEX).exists()
    assert all(same(t, weights[n]) for n, t in checkpoint.load(sharded, deepseek.config).items())


def test_released_names_types_and_shapes(written: Path) -> None:
    t = load_file(written / "model.safetensors")
    expected = {
        N + "attn.wq_a.weight": (torch.float8_e4m3fn, (128, 256)),
        N + "attn.wq_a.scale": (torch.float8_e8m0fnu, (4, 8)),
        N + "attn.attn_sink": (torch.float32, (4,)),
        N + "attn.compressor.wgate.weight": (torch.bfloat16, (128, 256)),
        N + "attn.indexer.wk.weight": (torch.bfloat16, (128, 128)),
        N + "ffn.experts.3.w1.weight": (torch.int8, (64, 128)),
        N + "ffn.experts.3.w1.scale": (torch.float8_e8m0fnu, (64, 8)),
        N + "ffn.gate.bias": (torch.float32, (16,)),
        N + "hc_ffn_fn": (torch.float32, (24, 1024)),
        "layers.1.engram.embed.weight": (torch.float8_e4m3fn, (672, 64)),
        "layers.1.engram.embed.scale": (torch.float8_e8m0fnu, (672, 2)),
        "layers.1.engram.q_weight": (torch.bfloat16, (4, 256)),
        "head.weight": (torch.bfloat16, (512, 256)),
    }
    assert {n: (t[n].dtype, tuple(t[n].shape)) for n in expected} == expected
    assert TOKENIZER not in t and (written / TOKENIZER).exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_packings_are_reversible(deepseek: Model, written: Path, ranks: int) -> None:
    stored = load_file(written / "model.safetensors") | {TOKENIZER: token_classes(written / TOKENIZER)}
    back = {n: torch.zeros_like(t.view(torch.uint8)).view(t.dtype) for n, t in stored.items()}

    def write(name: str, region: Any, part: torch.Tensor) -> None:
        back[name][region] = part

    for rank in range(ranks):
        graph = deepseek.build(tp=ranks, rank=rank)
        weights = checkpoint.load(written, graph)
        for w in graph.weights:
            packing.unpack(w, ranks, rank, weights[w.name], write)
    assert not [n for n in stored if not same(back[n], stored[n])]


def broken(written: Path, to: Path, change: Any) -> Path:
    shutil.copytree(written, to)
    tensors = load_file(to / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors")
    return to


def test_all_mistakes_at_once(deepseek: Model, written: Path, tmp_path: Path) -> None:
    def change(t: dict[str, torch.Tensor]) -> None:
        del t[N + "attn.wq_a.scale"]
        t[N + "attn.wkv.weight"] = t[N + "attn.wkv.weight"].to(torch.bfloat16)
        t["layers.1.engram.embed.weight"] = t["layers.1.engram.embed.weight"][:600].clone()
        t["layers.5.attn.compressor.wkv.weight"] = torch.zeros(2, 2)
        t["mtp.0.main_proj.weight"] = torch.zeros(2, 2)  # the draft's and vision's tensors are not ours to judge
        t["vision.norm.weight"] = torch.zeros(2)
        t[N + "ffn.gate.bias_vl"] = torch.zeros(16)

    directory = broken(written, tmp_path / "b", change)
    (directory / TOKENIZER).unlink()
    with pytest.raises(CheckpointError) as e:
        checkpoint.load(directory, deepseek.graph)
    lines = str(e.value).splitlines()
    for part in (
        "layers.2.attn.wq_a.scale: missing: expected e8m0 [4, 8]",
        "layers.2.attn.wkv.weight: dtype bf16 in model.safetensors: expected e4m3",
        "layers.1.engram.embed.weight: shape [600, 64] in model.safetensors: expected [672, 64]",
        "layers.5.attn.compressor.wkv.weight: unexpected tensor",
        "tokenizer.json: missing: expected i32 [512]",
    ):
        assert any(part in line for line in lines), part
    assert len(lines) == 5


def test_a_tokenizer_of_another_model_is_refused(deepseek: Model, written: Path, tmp_path: Path) -> None:
    shutil.copytree(written, tmp_path / "c")
    write_tokenizer(tmp_path / "c" / TOKENIZER, synthetic_classes(512, 399))
    with pytest.raises(ValueError, match=r"tokenizer.json: 399 token classes: expected 400"):
        checkpoint.load(tmp_path / "c", deepseek.graph)
    (tmp_path / "c" / TOKENIZER).write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer.json: damaged"):
        checkpoint.load(tmp_path / "c", deepseek.graph)


def test_classes_fold_case_accents_and_blanks(tmp_path: Path) -> None:
    words = ["The", "the", "thé", "ＴＨＥ", "ﬁ", "FI", " ", "\t\n ", "a  b", " A b", "b"]
    body = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(words)}, "unk_token": "The"},
    }
    (tmp_path / "t.json").write_text(json.dumps(body))
    assert token_classes(tmp_path / "t.json").tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_scales_cover_tiles_and_rows() -> None:
    """A tile's scale covers 32 rows and 32 columns, the last tile fewer; a row's scale 32 columns."""
    elements = torch.ones(40, 64).to(torch.float8_e4m3fn)
    tiles = expand((elements, torch.tensor([[127, 128], [129, 0]], dtype=torch.uint8)), torch.float32)
    assert [tiles[0, 0], tiles[31, 31], tiles[0, 32], tiles[32, 31], tiles[39, 63]] == [1, 1, 2, 4, 2.0**-127]
    scales = torch.full((40, 2), 127, dtype=torch.uint8)
    scales[1, 1] = 130
    rows = expand((elements, scales), torch.float64)
    assert (rows[1, 32:] == 8).all() and rows.sum() == 40 * 64 + 7 * 32
