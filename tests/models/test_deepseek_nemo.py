"""DeepSeek-V4.1's step against NeMo AutoModel 0.7.0 (other people, full sequence, fp32) at 48 positions.

NeMo reads the checkpoint that this project writes, in the released names and types, and maps token classes from the
tokenizer.json beside it by its own code, so names, packings and the class rule are compared too. Window wrap, clamp,
candidate blocks and top-k cut within 48 positions (asserted in test_deepseek_oracle.py).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from model_steps import Model, rel, rollout, tokens
from nemo_oracle import REASON, nemo_logits
from test_deepseek_oracle import attr

from optkit.models import checkpoint
from optkit.models.graph import Graph

STEPS = 48


@pytest.mark.slow
@pytest.mark.parametrize("cache_format", ["none", "official"])
def test_logits_equal_nemo(cache_format: str, deepseek: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nemo_automodel", reason=REASON)
    assert deepseek.config.index_heads >= 8  # with fewer, ReLU gives exact ties, which may be broken either way
    directory = checkpoint.write_random(tmp_path / "c", deepseek.hf, seed=3, shards=2)
    ids = tokens(1, STEPS)
    expected = nemo_logits(deepseek.hf, directory, ids[:, 0], cache_format == "official", monkeypatch)
    assert expected.shape[0] == STEPS
    graph = deepseek.build(cache_format=cache_format)
    weights = checkpoint.load(directory, graph)

    def errors(graph: Graph) -> torch.Tensor:
        out = rollout(graph, weights, ids)
        return torch.tensor([rel(o["logits"][0], e) for o, e in zip(out, expected, strict=True)])

    right = errors(graph)
    assert right.median() < 5e-6
    if cache_format == "none":
        assert right.max() < 2e-5
    else:  # fp32 may fall on the other side of a grid's boundary than float64, at a position or two
        assert (right > 2e-5).sum() <= 3 and right.max() < 2e-3
    ops = tuple(attr(op, window=op.attr("window") - 1) if op.kind == "sparse_attention" else op for op in graph.ops)
    wrong = errors(dataclasses.replace(graph, ops=ops))[deepseek.config.window :]
    assert wrong.median() > 1e-2
