"""A rollout with state carried: logits of every step against float64, which adopts the runner's expert choices.

A choice that differs from float64's own is adopted if the swapped scores lie within the measured score error: what the
plain bf16 implementation's scores are off by in its own rollout. Anything else fails. Tokens are given, so a near tie
in the logits does not fork the rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from optkit.execute.runner import StageRunner
from optkit.models import interpret
from optkit.models.graph import Graph
from optkit.models.ops import ChoiceError, Choices, StateTensor, WeightTensor
from optkit.validate.check import Check, Numerics, check
from optkit.validate.gates import MAX_FACTOR, judge, row_errors
from optkit.validate.per_stage import excess, why
from optkit.validate.reference import active_rows
from optkit.validate.scenario import Scenario, copy_caches

Step = Callable[[dict[str, Tensor]], tuple[dict[str, Tensor], dict[str, Tensor]]]
"""inputs -> (outputs by value, choices by ids value)."""


class Follower:
    """Float64 beside another implementation, adopting its choices; caches of its own."""

    def __init__(self, graph: Graph, weights: Mapping[str, WeightTensor], caches: dict[str, StateTensor],
                 score_error: float) -> None:
        self.graph, self.caches, self.score_error = graph, caches, score_error
        self.weights = interpret.cast_weights(graph, weights, "f64")
        self.adopted = 0

    def step(self, inputs: dict[str, Tensor], choices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every value in float64. Raises ChoiceError for a choice its scores do not allow."""
        adopt = Choices(choices, self.score_error)
        values = interpret.run(self.graph, self.weights, inputs, self.caches, "f64", adopt)
        self.adopted += len(adopt.adopted)
        return values


def plain_band(graph: Graph, weights: Mapping[str, WeightTensor], scenario: Scenario) -> tuple[list[float], float]:
    """The plain bf16 implementation's own rollout: (error of the outputs per row and step, largest score error)."""
    w, caches = interpret.cast_weights(graph, weights, "bf16"), scenario.caches("bf16")
    follower = Follower(graph, weights, scenario.caches("f64"), float("inf"))
    routes = [(op.inputs[0], op.outputs[0]) for op in graph.ops if op.kind == "route"]
    errors: list[float] = []
    score_error = 0.0
    for t in range(scenario.steps):
        inputs = scenario.inputs(t)
        got = interpret.run(graph, w, inputs, caches, "bf16")
        want = follower.step(inputs, {ids: got[ids] for _, ids in routes})
        rows = torch.nonzero(active_rows(graph, inputs)).flatten()
        errors += output_errors(graph, got, want, rows)
        for logits, _ in routes:
            off = torch.sigmoid(got[logits][rows].double()) - torch.sigmoid(want[logits][rows])
            score_error = max(score_error, float(off.abs().max()))
    return errors, score_error


def output_errors(graph: Graph, got: Mapping[str, Tensor], want: Mapping[str, Tensor], rows: Tensor) -> list[float]:
    """Relative L2 per row of every graph output that is not just handed through."""
    return [e for name in graph.outputs if name not in graph.inputs
            for e in row_errors(got[name][rows], want[name][rows]).tolist()]


def rollout(runner: StageRunner, graph: Graph, weights: Mapping[str, WeightTensor], scenario: Scenario,
            repeat: str = "") -> tuple[list[Check], list[Numerics]]:
    """All steps of `scenario` (64 at batch 4 give the 256 samples the band needs) through `runner.step`.

    Returns the checks "rollout.logits" (error within the band of the plain implementation's own rollout) and
    "rollout.choices" (every differing choice lay within the score error), and the Numerics row.
    """
    band, score_error = plain_band(graph, weights, scenario)
    copy_caches(runner.caches, scenario.caches("bf16"))
    allowed = MAX_FACTOR * score_error
    follower = Follower(graph, weights, scenario.caches("f64"), allowed)
    errors: list[float] = []
    refused = ""
    for t in range(scenario.steps):
        inputs = scenario.inputs(t)
        runner.step(inputs)
        try:
            want = follower.step(inputs, runner.choices())
        except ChoiceError as e:
            refused = f"step {t}: {e}"
            break
        rows = torch.nonzero(active_rows(graph, inputs)).flatten()
        errors += output_errors(graph, runner.outputs(), want, rows)
    choices = check("rollout.choices", not refused, follower.adopted, allowed, refused or
                    f"{follower.adopted} choices differed from float64's own, each within the score error", repeat)
    if not errors:
        return [check("rollout.logits", False, None, None, "no step finished", repeat), choices], []
    row = judge("rollout:logits", errors, band)
    return [check("rollout.logits", row.status == "pass", round(excess(row), 3), 1.0,
                  why(row) if row.status == "fail" else f"{row.n} rows, median {row.median:.2e}, maximum {row.max:.2e}", repeat),
            choices], [row]
