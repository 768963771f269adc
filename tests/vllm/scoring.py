"""Scores served tokens by float64 given the served prefix, against what plain bf16 costs at the same positions.

All answers of a run are judged together: near-ties of the router make errors of plain bf16 rare and large, so the
largest of a dozen positions says little about the next dozen. For each position the served log probabilities of the
TOP most probable tokens are compared, so some 50 positions give 1000 samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from server import Answer
from torch import Tensor

from optkit.models import interpret
from optkit.models.graph import Graph

BLOCK = 64
MEDIAN_FACTOR = 2.0
"""Median error served against that of plain bf16 at the same positions. Runs of the same model in other batches differ
by up to 1.2; one missing projection in one layer costs 3 and more."""


def logprobs(graph: Graph, weights: Mapping[str, Any], texts: Sequence[Sequence[int]], precision: str) -> list[Tensor]:
    """For every text float64 [len, vocab]: the distribution after each of its tokens. All texts advance together."""
    rows, longest = len(texts), max(map(len, texts))
    per = -(-longest // BLOCK)
    caches = interpret.allocate_caches(graph, rows + 1, rows * per, BLOCK, precision)
    weights = interpret.cast_weights(graph, weights, precision)
    table = torch.arange(rows * per, dtype=torch.int32).view(rows, per)
    out: list[list[Tensor]] = [[] for _ in texts]
    for i in range(longest):
        live = [r for r, t in enumerate(texts) if i < len(t)]
        inputs = {"token": torch.tensor([texts[r][i] for r in live], dtype=torch.int32),
                  "seq_len": torch.full((len(live),), i + 1, dtype=torch.int32), "block_table": table[live],
                  "slot_mapping": torch.tensor([r * per * BLOCK + i for r in live]),
                  "state_slot": torch.tensor([r + 1 for r in live], dtype=torch.int32)}
        logits = interpret.run(graph, weights, inputs, caches, precision)[graph.outputs[0]].double()
        for row, r in enumerate(live):
            out[r].append(torch.log_softmax(logits[row], -1))
    return [torch.stack(o) for o in out]


@dataclass(frozen=True)
class Score:
    """Errors in nats, served | plain bf16. `top`: largest error of a served token | over the whole vocabulary; `median`
    over the TOP tokens of every position; `behind`: how far the worst served token is behind the argmax."""

    top: tuple[float, float]
    median: tuple[float, float]
    behind: float

    def faults(self) -> list[str]:
        """Empty when every served token is within the band, and within 2 bands of the argmax."""
        band = self.top[1]
        out = []
        if self.top[0] > band:
            out.append(f"|delta logprob| {self.top[0]:.3g}, band {band:.3g}")
        if self.median[0] > MEDIAN_FACTOR * self.median[1]:
            out.append(f"median |delta logprob| {self.median[0]:.3g}, plain bf16 {self.median[1]:.3g}")
        if self.behind > 2 * band:
            out.append(f"token {self.behind:.3g} behind the argmax, allowed {2 * band:.3g}")
        return out


def score(graph: Graph, weights: Mapping[str, Any], answers: Sequence[Answer]) -> Score:
    """Float64 and plain bf16, both given the served prefix."""
    texts = [a.prompt + a.tokens[:-1] for a in answers]
    runs = [logprobs(graph, weights, texts, p) for p in ("f64", "bf16")]
    exact, plain = (torch.cat([r[len(a.prompt) - 1:] for a, r in zip(answers, run, strict=True)]) for run in runs)
    at = torch.arange(len(exact))
    tokens = torch.tensor([t for a in answers for t in a.tokens])
    error = (torch.tensor([x for a in answers for x in a.logprobs]).double() - exact[at, tokens]).abs()
    rows, ids, values = zip(*((i, t, x) for i, top in enumerate(d for a in answers for d in a.top) for t, x in top.items()),
                            strict=True)
    wide = (torch.tensor(values).double() - exact[list(rows), list(ids)]).abs()
    noise = (plain - exact).abs()
    return Score((float(error.max()), float(noise.max())),
                 (float(wide.median()), float(noise[list(rows), list(ids)].median())),
                 float((exact.max(1).values - exact[at, tokens]).max()))
