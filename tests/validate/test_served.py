"""Scoring of served tokens: right ones pass, wrong probabilities, tokens or weights fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from micro import graph, weights

from optkit.checks import Check
from optkit.models.ops import WeightTensor
from optkit.validate.served import Answer, score_served, sequence_logprobs

PROMPTS = [5, 17, 3, 60, 2, 9, 44], [31]


def serve(
    name: str, n: int, w: Mapping[str, WeightTensor] | None = None, precision: str = "bf16", top: int = 10
) -> list[Answer]:
    """Greedy answers of the plain implementation, each with its `top` most probable tokens."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    rows: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    for _ in range(n):
        texts = [[*p, *t] for p, t in zip(PROMPTS, tokens, strict=True)]
        for i, found in enumerate(sequence_logprobs(graph(name), w or weights(name), texts, precision)):
            rows[i].append(found[-1])
            tokens[i].append(int(found[-1].argmax()))
    return [
        Answer(p, t, [float(x.max()) for x in r], [most_probable(x, top) for x in r])
        for p, t, r in zip(PROMPTS, tokens, rows, strict=True)
    ]


def most_probable(row: torch.Tensor, n: int) -> dict[int, float]:
    values, ids = row.topk(n)
    return dict(zip(ids.tolist(), values.tolist(), strict=True))


def failed(checks: list[Check]) -> set[str]:
    return {c.name for c in checks if c.status == "fail"}


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_served_by_a_bf16_implementation(name: str) -> None:
    checks = score_served(graph(name), weights(name), serve(name, 4), repeat="again")
    assert [c.name for c in checks] == ["served.logprobs", "served.median", "served.argmax"]
    assert failed(checks) == set() and all(c.value <= c.threshold and c.repeat == "again" for c in checks), checks


def test_texts_side_by_side_do_not_meet() -> None:
    """Each text alone gives what it gives beside a longer one."""
    texts = [[1, 2, 3], [4] * 20]
    both = sequence_logprobs(graph("k3"), weights("k3"), texts, "f64")
    for text, rows in zip(texts, both, strict=True):
        torch.testing.assert_close(sequence_logprobs(graph("k3"), weights("k3"), [text], "f64")[0], rows)


def test_wrong_logprob_is_seen() -> None:
    first, second = serve("llama", 3)
    second = replace(second, logprobs=[second.logprobs[0], second.logprobs[1] + 0.5, second.logprobs[2]])
    checks = score_served(graph("llama"), weights("llama"), [first, second])
    assert failed(checks) == {"served.logprobs"} and checks[0].reason.count("token 1 of answer 1") == 1


def test_token_far_from_the_argmax_is_seen() -> None:
    """Even one that is served with its right probability."""
    first = serve("llama", 2)[0]
    rows = sequence_logprobs(graph("llama"), weights("llama"), [[*first.prompt, first.tokens[0]]], "f64")[0][-2:]
    unlikely = [first.tokens[0], int(rows[1].argmin())]
    answer = Answer(first.prompt, unlikely, [float(rows[i, t]) for i, t in enumerate(unlikely)])
    assert failed(score_served(graph("llama"), weights("llama"), [answer])) == {"served.argmax"}


@pytest.mark.parametrize("name, missing", [
    ("llama", "model.layers.1.mlp.down_proj.weight"),
    ("llama", "model.layers.0.self_attn.k_proj.weight"),
    ("k3", "model.layers.2.self_attn.o_proj.weight"),
])  # fmt: skip
def test_a_weight_that_was_never_loaded_is_seen(name: str, missing: str) -> None:
    w = dict(weights(name))
    w[missing] = torch.zeros_like(w[missing])  # type: ignore[arg-type]
    assert failed(score_served(graph(name), weights(name), serve(name, 4, w))) >= {"served.logprobs", "served.median"}


def test_a_small_error_everywhere_is_seen_by_the_median() -> None:
    """Every served value shifted by less than the band: only the median can tell."""
    answers = serve("llama", 4, precision="f64")
    logprobs = score_served(graph("llama"), weights("llama"), answers)[0]
    shift = 0.9 * logprobs.threshold
    off = [
        replace(
            a, logprobs=[x + shift for x in a.logprobs], top=[{t: x + shift for t, x in d.items()} for d in a.top]
        )
        for a in answers
    ]
    assert failed(score_served(graph("llama"), weights("llama"), off)) == {"served.median"}


def test_without_the_most_probable_tokens() -> None:
    answers = [replace(a, top=()) for a in serve("llama", 4)]
    checks = score_served(graph("llama"), weights("llama"), answers)
    assert failed(checks) == set() and "of 8 tokens" in checks[1].reason


def test_what_cannot_be_scored() -> None:
    with pytest.raises(ValueError, match="prompt of 0, 1 tokens, 1 logprobs"):
        Answer([], [1], [0.0])
    with pytest.raises(ValueError, match="prompt of 1, 2 tokens, 1 logprobs"):
        Answer([1], [1, 2], [0.0])
    with pytest.raises(ValueError, match="no answers"):
        score_served(graph("llama"), weights("llama"), [])
