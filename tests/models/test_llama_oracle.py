"""Llama against transformers: whole decode over several steps, from a written checkpoint, rope scaling included."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from model_steps import Model, rel, rollout, step_inputs, tokens
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from optkit.models import checkpoint, families, interpret
from optkit.models.rope import inverse_frequencies

STEPS, ROWS = 40, 3


@pytest.fixture(scope="module")
def hf_logits(llama: Model, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """[steps, rows, vocab] of HF in fp32, from the checkpoint that write_random writes."""
    path = checkpoint.write_random(tmp_path_factory.mktemp("llama") / "c", llama.hf, seed=3)
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    assert AutoConfig.from_pretrained(path).rope_parameters["rope_type"] == "llama3"
    with torch.no_grad():
        return model(tokens(ROWS, STEPS).T.long()).logits.transpose(0, 1)


def test_logits_equal_transformers(llama: Model, hf_logits: torch.Tensor) -> None:
    out = torch.stack([o["logits"] for o in rollout(llama.graph, llama.exact, tokens(ROWS, STEPS))])
    assert max(rel(a, b) for a, b in zip(out, hf_logits, strict=True)) < 1e-5


def test_the_plain_rotation_differs(llama: Model, hf_logits: torch.Tensor) -> None:
    graph = llama.module.build(dataclasses.replace(llama.config, rope_scaling=()), rows=4)
    out = torch.stack([o["logits"] for o in rollout(graph, llama.exact, tokens(ROWS, STEPS))])
    assert rel(out[-1], hf_logits[-1]) > 1e-3


def test_ragged_requests_equal_alone(llama: Model) -> None:
    """Rows at different positions of scattered pages give what each gives alone; a padded row writes nothing."""
    ids = tokens(3, 20)
    alone = rollout(llama.graph, llama.exact, ids)
    state = interpret.allocate_caches(llama.graph, 1, 12, 16)
    start = (0, 3, 7)
    for i in range(20):
        inputs = step_inputs(ids[i], i)
        rows = [step_inputs(ids[max(i - s, 0)], max(i - s, 0)) for s in start]
        for name in ("token", "seq_len", "slot_mapping"):
            inputs[name] = torch.stack([r[name][j] for j, r in enumerate(rows)])
        for j, s in enumerate(start):
            if i < s:
                inputs["slot_mapping"][j], inputs["seq_len"][j] = -1, 0
        logits = interpret.run(llama.graph, llama.exact, inputs, state)["logits"]
        for j, s in enumerate(start):
            if i >= s:
                assert rel(logits[j], alone[i - s]["logits"][j]) < 1e-12


@pytest.mark.parametrize("name", ["llama_tiny", "llama_3_2_1b"])
def test_frequencies_equal_transformers(name: str) -> None:
    hf = families.named_config(name)
    config = families.family_of(hf).Config.from_hf(hf)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**hf), "cpu")
    ours = torch.tensor(inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))
    assert rel(ours, theirs) < 1e-6
    assert rel(torch.tensor(inverse_frequencies(config.head_dim, config.rope_theta)), theirs) > 1e-7
