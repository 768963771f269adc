"""DeepSeek-V4.1's step against NeMo AutoModel 0.7.0 (other people, full sequence, fp32) at 48 positions.

NeMo reads the checkpoint that this project writes, in the released names and types, and maps token classes from the
tokenizer.json beside it by its own code, so names, packings and the class rule are compared too. Window wrap, clamp,
candidate blocks and top-k cut within 48 positions (asserted in test_deepseek_oracle.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_steps import Model, rel, rollout, tokens
from nemo_oracle import REASON, nemo_logits

from optkit.models import checkpoint

STEPS = 48


@pytest.mark.slow
def test_logits_equal_nemo(deepseek: Model, tmp_path: Path) -> None:
    pytest.importorskip("nemo_automodel", reason=REASON)
    assert deepseek.config.index_heads >= 8  # with fewer, ReLU gives exact ties, which may be broken either way
    directory = checkpoint.write_random(tmp_path / "c", deepseek.hf, seed=3, shards=2)
    ids = tokens(1, STEPS)
    expected = nemo_logits(deepseek.hf, directory, ids[:, 0])
    out = rollout(deepseek.graph, checkpoint.load(directory, deepseek.graph), ids)
    assert expected.shape[0] == STEPS
    errors = torch.tensor([rel(o["logits"][0], e) for o, e in zip(out, expected, strict=True)])
    assert errors.max() < 1e-4  # fp32 may cross a boundary of a cache grid; a wrong variant is beyond 1e-3
    assert errors.median() < 1e-5
