"""Boundary cases: one row, the full class, padded rows, no live row at all, non-positive slots, first tokens, edges of
pages, of 64-token chunks, of the convolution's window, and a block table used to its last element.

Few steps each, so only the maximum rule of the gates applies; what no live row owns must keep its bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from optkit.checks import Check, check
from optkit.execute.runner import StageRunner
from optkit.models.graph import Graph
from optkit.validate.gates import FLOOR, MAX_FACTOR
from optkit.validate.reference import AnyWeights, reference_weights
from optkit.validate.rollout import foreign_states, trace
from optkit.validate.scenario import Scenario

STEPS = 2


def cases(
    graph: Graph, block_size: int = 16, blocks: int = 0, slots: int = 0, device: torch.device | str = "cpu"
) -> dict[str, Scenario]:
    """The named situations, on caches of the given size."""
    edge = (block_size - 1, block_size, 63, 64)

    def make(seed: int, starts: tuple[int, ...], padding: tuple[int, ...] = ()) -> Scenario:
        return Scenario(
            graph, len(starts), STEPS, seed, block_size, starts, padding, blocks, slots, torch.device(device)
        )

    return {
        "batch 1": make(11, (5,)),
        "class maximum": make(12, tuple(7 * r + r % 2 for r in range(graph.rows))),
        "padded rows": make(13, (9, 70, 3, 0), (3,)),
        "padding first": make(14, (0, 9, 70), (0,)),
        "zero-length requests": make(17, (0, 0, 21, 0), (0, 1, 3)),
        "no live row": make(18, (0, 3), (0, 1)),
        "page edges": make(15, edge),
        "window and chunk edges": make(19, (1, 2, 3, 62, 63, 127, 128)[: graph.rows]),
        "last block full": make(20, (2 * block_size - STEPS, block_size - STEPS)),
        "first tokens": make(16, (0, 1)),
    }


def _case(runner: StageRunner, graph: Graph, weights: AnyWeights, scenario: Scenario) -> tuple[float, str]:
    """(share of the gate used, what is wrong)."""
    got = trace(runner, graph, weights, scenario)
    if got.stopped:
        return float("inf"), got.stopped
    if not got.errors:  # no live row: nothing may be written, and what padding rows hold is nobody's
        foreign = foreign_states(runner, graph, scenario, got.inputs)
        return 0.0, f"wrote state that no live row owns: {', '.join(foreign)}" if foreign else ""
    # two steps say little about the largest score error: allow for at least one bf16 rounding of a score
    got.score_error = max(got.score_error, FLOOR)
    used = max(got.errors) / (MAX_FACTOR * max(*got.band, FLOOR))
    foreign = foreign_states(runner, graph, scenario, got.inputs)
    if foreign:
        return used, f"wrote state that no live row owns: {', '.join(foreign)}"
    if got.refused():
        return used, "; ".join(got.refused()[:3])
    return used, f"error {max(got.errors):.2e} is {used:.2f} x its gate" if used > 1 else ""


def boundaries(
    runner: StageRunner, graph: Graph, weights: AnyWeights, scenarios: Mapping[str, Scenario], repeat: str = ""
) -> list[Check]:
    """One check "boundary.<case>" a case of `cases`; the runner's caches have the scenarios' size."""
    out = []
    weights = reference_weights(graph, weights)
    for name, scenario in scenarios.items():
        used, wrong = _case(runner, graph, weights, scenario)
        out.append(
            check(
                f"boundary.{name}",
                not wrong,
                round(used, 3),
                1.0,
                wrong or f"{scenario.steps} steps, {len(scenario.active())} live rows of {scenario.batch}",
                repeat,
            )
        )
    return out
