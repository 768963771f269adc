"""All dynamic checks in the order of a run, on one set of caches. What `optkit run` calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from optkit.checks import Check
from optkit.execute.executor import Executor
from optkit.execute.runner import StageRunner
from optkit.models.graph import Graph
from optkit.models.ops import StateTensor
from optkit.validate.boundaries import boundaries, cases
from optkit.validate.gates import MIN_SAMPLES
from optkit.validate.groups import groups
from optkit.validate.numerics import Numerics
from optkit.validate.orders import orders, repeat
from optkit.validate.per_stage import per_stage
from optkit.validate.reference import AnyWeights, reference_weights
from optkit.validate.rollout import rollout
from optkit.validate.scenario import Scenario
from optkit.validate.threads import one_thread


@dataclass(frozen=True)
class Suite:
    """The scenarios of one graph; all share caches of `blocks` x `block_size` tokens and `slots` states.

    Args: see `make`. Steps of the per-stage scenario follow from the 256 samples that an output made once a step needs.
    """

    graph: Graph
    per_stage: Scenario
    rollout: Scenario
    orders: Scenario
    order_seeds: int
    boundaries: dict[str, Scenario] = field(default_factory=dict)

    def caches(self) -> dict[str, StateTensor]:
        """A set of caches for the runner, in the states' dtypes."""
        return self.per_stage.caches("bf16")


class Lengths(Protocol):
    """How much to run; the recipe's `validate` group has these fields."""

    rollout_steps: int
    rollout_batch: int
    order_seeds: int
    order_steps: int
    samples: int
    seed: int


def make(graph: Graph, want: Lengths, block_size: int = 16, device: torch.device | str = "cpu") -> Suite:
    """The suite of a graph. The rollout's steps x rows must reach 256 samples for it to pass."""
    rows, device = graph.rows, torch.device(device)
    steps, rollout_steps = -(-max(want.samples, MIN_SAMPLES) // rows), want.rollout_steps
    longest = 130 + max(rollout_steps, steps, want.order_steps)  # the longest default start of a Scenario
    blocks, slots = 1 + rows * -(-longest // block_size), rows + 2

    def scenario(batch: int, n: int, seed: int) -> Scenario:
        return Scenario(graph, batch, n, want.seed + seed, block_size, blocks=blocks, slots=slots, device=device)

    batch = min(want.rollout_batch, rows)
    return Suite(
        graph,
        scenario(rows, steps, 1),
        scenario(batch, rollout_steps, 2),
        scenario(batch, want.order_steps, 3),
        want.order_seeds,
        cases(graph, block_size, blocks, slots, device),
    )


@one_thread()
def validate(
    runner: StageRunner,
    weights: AnyWeights,
    suite: Suite,
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Check], list[Numerics]]:
    """Every check; task orders only for the CPU executor (a GPU's order is its own).

    `command` is the command that repeats the run, for the records; `progress` is told what starts.
    """
    graph = suite.graph
    weights = reference_weights(graph, weights)
    progress("stages, teacher-forced")
    checks, numerics = per_stage(runner, graph, weights, suite.per_stage, repeat=command)
    progress("rollout")
    more, row = rollout(runner, graph, weights, suite.rollout, command)
    checks, numerics = checks + more, numerics + row
    progress("boundary cases")
    checks += boundaries(runner, graph, weights, suite.boundaries, command)
    progress("repetition and task orders")
    checks.append(repeat(runner, suite.orders, command))
    if isinstance(runner, Executor):
        plan, held = runner.plan, runner.memory.weights.source
        checks.append(groups(lambda caches, own: Executor(plan, graph, held, caches), graph, suite.orders, command))
        checks.append(orders(runner, suite.orders, range(suite.order_seeds), command=command))
    return checks, numerics
