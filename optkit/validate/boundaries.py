"""Boundary cases: one row, the full class, padded rows, non-positive slots, first tokens, page edges.

Few steps each, so only the maximum rule of the gates applies; what no live row owns must keep its bits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.execute.runner import StageRunner
from optkit.models import interpret
from optkit.models.graph import Graph
from optkit.models.ops import ChoiceError, WeightTensor
from optkit.validate.check import Check, check
from optkit.validate.gates import FLOOR, MAX_FACTOR
from optkit.validate.reference import active_rows, state_rows
from optkit.validate.rollout import Follower, output_errors, plain_band
from optkit.validate.scenario import Scenario, copy_caches, tensors

STEPS = 2


def cases(graph: Graph, block_size: int = 16, blocks: int = 0, slots: int = 0, device: torch.device | str = "cpu") -> dict[str, Scenario]:
    """The named situations, on caches of the given size."""
    edge = (block_size - 1, block_size, 63, 64)

    def make(seed: int, starts: tuple[int, ...], padding: tuple[int, ...] = ()) -> Scenario:
        return Scenario(graph, len(starts), STEPS, seed, block_size, starts, padding, blocks, slots, torch.device(device))

    return {
        "batch 1": make(11, (5,)),
        "class maximum": make(12, tuple(7 * r + r % 2 for r in range(graph.rows))),
        "padded rows": make(13, (9, 70, 3, 0), (3,)),
        "padding first": make(14, (0, 9, 70), (0,)),
        "page edges": make(15, edge),
        "first tokens": make(16, (0, 1)),
    }


def _foreign(graph: Graph, runner: StageRunner, scenario: Scenario, written: list[dict[str, Tensor]]) -> list[str]:
    """States in which an element changed that no live row of these steps owns."""
    fresh = scenario.caches("bf16")
    out = []
    for state in graph.states:
        for now, was in zip(tensors(runner.caches[state.name]), tensors(fresh[state.name]), strict=True):
            rest = now.clone()
            for inputs in written:
                where = state_rows(state.kind, now, inputs, torch.nonzero(active_rows(graph, inputs)).flatten())
                rest[where] = was[where].to(rest.device)
            if not torch.equal(rest, was.to(rest)):
                out.append(state.name)
    return out


def _case(runner: StageRunner, graph: Graph, weights: Mapping[str, WeightTensor], scenario: Scenario) -> tuple[float, str]:
    """(share of the gate used, what is wrong)."""
    band, score_error = plain_band(graph, weights, scenario)
    copy_caches(runner.caches, scenario.caches("bf16"))
    follower = Follower(graph, weights, scenario.caches("f64"), MAX_FACTOR * max(score_error, FLOOR))
    worst, written = 0.0, []
    for t in range(scenario.steps):
        inputs = scenario.inputs(t)
        written.append(inputs)
        try:
            runner.step(inputs)
            want = follower.step(inputs, runner.choices())
        except (ChoiceError, RuntimeError) as e:
            return float("inf"), str(e)
        rows = torch.nonzero(active_rows(graph, inputs)).flatten()
        worst = max(worst, *output_errors(graph, runner.outputs(), want, rows))
    used = worst / (MAX_FACTOR * max(*band, FLOOR))
    foreign = _foreign(graph, runner, scenario, written)
    if foreign:
        return used, f"wrote state that no live row owns: {', '.join(foreign)}"
    return used, f"error {worst:.2e} is {used:.2f} x its gate" if used > 1 else ""


def boundaries(runner: StageRunner, graph: Graph, weights: Mapping[str, WeightTensor], scenarios: Mapping[str, Scenario],
               repeat: str = "") -> list[Check]:
    """One check "boundary.<case>" a case of `cases`; the runner's caches have the scenarios' size."""
    out = []
    for name, scenario in scenarios.items():
        used, wrong = _case(runner, graph, weights, scenario)
        out.append(check(f"boundary.{name}", not wrong, round(used, 3), 1.0,
                         wrong or f"{scenario.steps} steps, {len(scenario.active())} live rows of {scenario.batch}", repeat))
    return out
