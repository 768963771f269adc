"""Scores served tokens by the float64 reference, given the served prefix. The band is what plain bf16 costs there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from server import Answer

from optkit.models import interpret
from optkit.models.graph import Graph

BLOCK = 64


@dataclass
class Score:
    """One served token. errors in nats."""

    error: float  # |served logprob - reference logprob|
    gap: float  # reference logprob of the argmax minus that of the served token; 0 = it is the argmax


def logprobs(graph: Graph, weights: Mapping[str, Any], answers: Sequence[Answer], precision: str) -> list[torch.Tensor]:
    """For every answer float64 [tokens, vocab]: the distribution each served token was drawn from, given what was
    served before it. All answers advance together, one token a step."""
    rows = len(answers)
    texts = [a.prompt + a.tokens[:-1] for a in answers]
    longest = max(map(len, texts))
    per = -(-longest // BLOCK)
    caches = interpret.allocate_caches(graph, rows + 1, rows * per, BLOCK, precision)
    weights = interpret.cast_weights(graph, weights, precision)
    table = torch.arange(rows * per, dtype=torch.int32).view(rows, per)
    out: list[list[torch.Tensor]] = [[] for _ in answers]
    for i in range(longest):
        live = [r for r, t in enumerate(texts) if i < len(t)]
        inputs = {"token": torch.tensor([texts[r][i] for r in live], dtype=torch.int32),
                  "seq_len": torch.full((len(live),), i + 1, dtype=torch.int32), "block_table": table[live],
                  "slot_mapping": torch.tensor([r * per * BLOCK + i for r in live]),
                  "state_slot": torch.tensor([r + 1 for r in live], dtype=torch.int32)}
        logits = interpret.run(graph, weights, inputs, caches, precision)[graph.outputs[0]].double()
        for row, r in enumerate(live):
            if i >= len(answers[r].prompt) - 1:
                out[r].append(torch.log_softmax(logits[row], -1))
    return [torch.stack(o) for o in out]


def score(answers: Sequence[Answer], reference: Sequence[torch.Tensor]) -> list[Score]:
    """Every served token against the reference's distributions."""
    out = []
    for a, ref in zip(answers, reference, strict=True):
        for token, served, row in zip(a.tokens, a.logprobs, ref, strict=True):
            out.append(Score(abs(served - float(row[token])), float(row.max() - row[token])))
    return out


def noise_band(plain: Sequence[torch.Tensor], reference: Sequence[torch.Tensor]) -> float:
    """Largest logprob error of the plain bf16 implementation, over every scored position and the whole vocabulary."""
    return max(float((p - r).abs().max()) for p, r in zip(plain, reference, strict=True))
