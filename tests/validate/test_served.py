"""Scoring of served tokens: right ones pass, wrong probabilities, tokens or weights fail."""

from __future__ import annotations

import pytest
import torch
from micro import graph, weights

from optkit.models.ops import WeightTensor
from optkit.validate.served import score_served, sequence_logprobs

PREFIX = [5, 17, 3, 60, 2, 9, 44]


def serve(name: str, n: int, w: dict[str, WeightTensor] | None = None) -> tuple[list[int], list[float]]:
    """Greedy tokens and log-probabilities by the plain bf16 implementation."""
    tokens: list[int] = []
    logprobs: list[float] = []
    for _ in range(n):
        row = sequence_logprobs(graph(name), w or weights(name), [*PREFIX, *tokens], "bf16")[-1]
        tokens.append(int(row.argmax()))
        logprobs.append(float(row.max()))
    return tokens, logprobs


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_served_by_a_bf16_implementation(name: str) -> None:
    tokens, logprobs = serve(name, 4)
    result = score_served(graph(name), weights(name), PREFIX, tokens, logprobs, repeat="again")
    assert result.status == "pass", result
    assert result.value <= result.threshold and result.repeat == "again"


def test_wrong_logprob_is_seen() -> None:
    tokens, logprobs = serve("llama", 3)
    logprobs[1] += 0.5
    result = score_served(graph("llama"), weights("llama"), PREFIX, tokens, logprobs)
    assert result.status == "fail" and " at 1," in result.reason


def test_token_far_from_the_argmax_is_seen() -> None:
    tokens, _ = serve("llama", 2)
    rows = sequence_logprobs(graph("llama"), weights("llama"), [*PREFIX, tokens[0]], "f64")[-2:]
    unlikely = [tokens[0], int(rows[1].argmin())]
    exact = [float(rows[i, t]) for i, t in enumerate(unlikely)]
    assert score_served(graph("llama"), weights("llama"), PREFIX, unlikely, exact).status == "fail"


@pytest.mark.parametrize("missing", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_a_weight_that_was_never_loaded_is_seen(missing: str) -> None:
    w = dict(weights("llama"))
    w[missing] = torch.zeros_like(w[missing])  # type: ignore[arg-type]
    tokens, logprobs = serve("llama", 4, w)
    assert score_served(graph("llama"), weights("llama"), PREFIX, tokens, logprobs).status == "fail"


def test_needs_a_prefix_and_matching_lists() -> None:
    with pytest.raises(ValueError, match="prefix of 0, 1 tokens, 1 logprobs"):
        score_served(graph("llama"), weights("llama"), [], [1], [0.0])
    with pytest.raises(ValueError, match="prefix of 1, 2 tokens, 1 logprobs"):
        score_served(graph("llama"), weights("llama"), [1], [1, 2], [0.0])
