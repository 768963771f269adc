"""Scores tokens that somebody served: float64 log-probabilities given the served prefix.

Loading is no proof that a model computes what it should (a missing weight loads silently in many engines); this is.
All answers are judged together, against what plain bf16 costs at the same positions: near-ties of a router make its
errors rare and large, so the largest of a dozen positions says little about the next dozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optkit.checks import Check, check
from optkit.models import interpret
from optkit.models.graph import Graph
from optkit.validate.reference import AnyWeights, reference_weights

BLOCK = 16
MEDIAN_FACTOR = 2.0
"""Median error served against that of plain bf16 at the same positions. Runs of the same model in other batches differ
by up to 1.2; one missing projection in one layer costs 3 and more."""


@dataclass(frozen=True)
class Answer:
    """What an engine answered to one request, greedily.

    prompt: token ids sent, at least one; tokens: token ids served; logprobs: the natural log-probability served with
    each; top: for each token, the log-probabilities served of the most probable ones by id (may be left out).
    """

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    top: Sequence[Mapping[int, float]] = ()

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not self.prompt or not n or len(self.logprobs) != n or len(self.top) not in (0, n):
            raise ValueError(
                f"prompt of {len(self.prompt)}, {n} tokens, {len(self.logprobs)} logprobs, {len(self.top)} top: expected "
                "a prompt, and for each token one logprob and, if given at all, the most probable tokens"
            )


def sequence_logprobs(
    graph: Graph, weights: AnyWeights, texts: Sequence[Sequence[int]], precision: str
) -> list[Tensor]:
    """For every text log-probabilities [len(text), V] (float64) of the token after each of its tokens.

    Decoded one by one from nothing, all texts side by side. `precision`: "f64" or "bf16".
    """
    w = reference_weights(graph, weights).of(precision)
    longest = max(map(len, texts))
    per = -(-longest // BLOCK)
    caches = interpret.allocate_caches(graph, len(texts) + 1, len(texts) * per, BLOCK, precision)
    table = torch.arange(len(texts) * per, dtype=torch.int32).view(len(texts), per)
    out: list[list[Tensor]] = [[] for _ in texts]
    for i in range(longest):
        live = [r for r, text in enumerate(texts) if i < len(text)]
        inputs = {
            "token": torch.tensor([texts[r][i] for r in live], dtype=torch.int32),
            "seq_len": torch.full((len(live),), i + 1, dtype=torch.int32),
            "block_table": table[live],
            "slot_mapping": torch.tensor([r * per * BLOCK + i for r in live]),
            "state_slot": torch.tensor([r + 1 for r in live], dtype=torch.int32),
        }
        logits = interpret.run(graph, w, inputs, caches, precision)[graph.outputs[0]].double()
        for row, r in enumerate(live):
            out[r].append(torch.log_softmax(logits[row], -1))
    return [torch.stack(rows) for rows in out]


def score_served(
    graph: Graph, weights: AnyWeights, answers: Sequence[Answer], name: str = "served", repeat: str = ""
) -> list[Check]:
    """Greedy answers against float64 given the same prefix; errors in nats. Equal tokens are not asked for.

    Band = the largest log-probability error of the plain bf16 implementation over the whole vocabulary at the scored
    positions. Three checks:

    * `<name>.logprobs`: the largest |delta logprob| of a served token is within the band;
    * `<name>.median`: the median |delta logprob| over the most probable tokens of every position (over the served tokens
      where an answer has no `top`) is at most MEDIAN_FACTOR times that of plain bf16 for the same tokens;
    * `<name>.argmax`: no served token is more than 2 bands behind float64's best.

    Raises ValueError without answers.
    """
    if not answers:
        raise ValueError("no answers to score")
    weights = reference_weights(graph, weights)
    texts = [[*a.prompt, *a.tokens[:-1]] for a in answers]
    runs = [sequence_logprobs(graph, weights, texts, p) for p in ("f64", "bf16")]
    exact, plain = (torch.cat([r[len(a.prompt) - 1 :] for a, r in zip(answers, run, strict=True)]) for run in runs)
    noise = (plain - exact).abs()
    band = float(noise.max())

    tokens = torch.tensor([t for a in answers for t in a.tokens])
    at = torch.arange(len(tokens))
    error = (torch.tensor([x for a in answers for x in a.logprobs], dtype=torch.float64) - exact[at, tokens]).abs()
    behind = exact.max(1).values - exact[at, tokens]

    tops = [d for a in answers for d in (a.top or [{t: x} for t, x in zip(a.tokens, a.logprobs, strict=True)])]
    rows, ids, values = zip(*((i, t, x) for i, top in enumerate(tops) for t, x in top.items()), strict=True)
    index = (list(rows), list(ids))
    median = float((torch.tensor(values, dtype=torch.float64) - exact[index]).abs().median())
    allowed = MEDIAN_FACTOR * float(noise[index].median())

    where = [(n, i) for n, a in enumerate(answers) for i in range(len(a.tokens))]

    def worst(t: Tensor) -> str:
        answer, token = where[int(t.argmax())]
        return f"of {len(tokens)} tokens in {len(answers)} answers, the worst is token {token} of answer {answer}"

    return [
        check(
            f"{name}.logprobs",
            bool((error <= band).all()),
            float(error.max()),
            band,
            f"largest |delta logprob| from float64 {worst(error)}; plain bf16 sets the threshold",
            repeat,
        ),
        check(
            f"{name}.median",
            median <= allowed,
            median,
            allowed,
            f"median |delta logprob| of {len(values)} tokens; threshold is {MEDIAN_FACTOR:g} times plain bf16's",
            repeat,
        ),
        check(
            f"{name}.argmax",
            bool((behind <= 2 * band).all()),
            float(behind.max()),
            2 * band,
            f"nats behind float64's most probable token {worst(behind)}",
            repeat,
        ),
    ]
