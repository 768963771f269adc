"""Scores tokens that somebody served: float64 log-probabilities given the served prefix.

Loading is no proof that a model computes what it should (a missing weight loads silently in many engines); this is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optkit.checks import Check, check
from optkit.models import interpret
from optkit.models.graph import Graph
from optkit.validate.reference import AnyWeights, reference_weights

BLOCK = 16


def sequence_logprobs(graph: Graph, weights: AnyWeights, tokens: Sequence[int], precision: str) -> Tensor:
    """Log-probabilities [len(tokens), V] (float64) of the token after each given one, decoded one by one from nothing."""
    w = reference_weights(graph, weights).of(precision)
    blocks = -(-len(tokens) // BLOCK)
    caches = interpret.allocate_caches(graph, 2, blocks + 1, BLOCK, precision)
    table = torch.arange(1, blocks + 1, dtype=torch.int32)[None]
    out = []
    for t, token in enumerate(tokens):
        inputs = {
            "token": torch.tensor([token], dtype=torch.int32),
            "seq_len": torch.tensor([t + 1], dtype=torch.int32),
            "block_table": table,
            "slot_mapping": torch.tensor([BLOCK + t]),
            "state_slot": torch.ones(1, dtype=torch.int32),
        }
        out.append(interpret.run(graph, w, inputs, caches, precision)[graph.outputs[0]][0].double())
    return torch.log_softmax(torch.stack(out), -1)


def score_served(
    graph: Graph,
    weights: AnyWeights,
    prefix: Sequence[int],
    served: Sequence[int],
    logprobs: Sequence[float],
    name: str = "served.tokens",
    repeat: str = "",
) -> Check:
    """Greedy tokens with their log-probabilities against float64 given the same prefix.

    Band = the largest log-probability error of the plain bf16 implementation over all tokens of the vocabulary at the
    scored positions. Passes if every |delta logprob| <= band and every token lies within 2 bands of float64's argmax;
    equal tokens are not asked for. `prefix` must not be empty.
    """
    if not prefix or len(served) != len(logprobs) or not served:
        raise ValueError(
            f"prefix of {len(prefix)}, {len(served)} tokens, {len(logprobs)} logprobs: expected a prefix and "
            "one logprob per token"
        )
    weights = reference_weights(graph, weights)
    fed = [*prefix, *served[:-1]]
    exact, plain = (sequence_logprobs(graph, weights, fed, p)[len(prefix) - 1 :] for p in ("f64", "bf16"))
    band = float((exact - plain).abs().max())
    index = torch.arange(len(served))
    mine = exact[index, torch.tensor(list(served))]
    delta = (torch.tensor(list(logprobs), dtype=torch.float64) - mine).abs()
    behind = exact.max(-1).values - mine
    ok = bool((delta <= band).all()) and bool((behind <= 2 * band).all())
    return check(
        name,
        ok,
        float(delta.max()),
        band,
        f"{len(served)} tokens after {len(prefix)}: largest |delta logprob| "
        f"{float(delta.max()):.3g} at {int(delta.argmax())}, furthest behind the argmax {float(behind.max()):.3g} "
        f"(allowed {2 * band:.3g})",
        repeat,
    )
