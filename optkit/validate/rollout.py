"""A rollout with state carried: logits of every step against float64, which adopts the runner's expert choices.

A choice that differs from float64's own is allowed if the swapped scores lie within the measured score error: what the
plain bf16 implementation's scores are off by in its own rollout of the same steps. Tokens are given, so a near tie in
the logits does not fork the rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optkit.checks import Check, check
from optkit.execute.runner import StageRunner
from optkit.models import interpret
from optkit.models.graph import Graph
from optkit.models.ops import ChoiceError, Choices, StateTensor
from optkit.validate.gates import MAX_FACTOR, excess, judge, row_errors, why
from optkit.validate.numerics import Numerics
from optkit.validate.reference import AnyWeights, active_rows, reference_weights, state_rows
from optkit.validate.scenario import Scenario, copy_caches, tensors

Values = Mapping[str, Tensor]


@dataclass
class Trace:
    """What a rollout measured: output errors per row and step of the runner and of the plain implementation, the plain
    one's largest score error, the runner's choices that differed (where, gap), and why it stopped early."""

    errors: list[float] = field(default_factory=list)
    band: list[float] = field(default_factory=list)
    score_error: float = 0.0
    adopted: list[tuple[str, float]] = field(default_factory=list)
    stopped: str = ""
    inputs: list[dict[str, Tensor]] = field(default_factory=list)

    def refused(self) -> list[str]:
        """Choices that the score error does not allow; each score may be off by it, in either direction."""
        return [f"{where}: score gap {gap:.3g}" for where, gap in self.adopted if gap > MAX_FACTOR * self.score_error]


def _doubled(caches: dict[str, StateTensor]) -> dict[str, StateTensor]:
    """Caches of twice as many blocks and slots, both halves the same numbers."""
    return {
        k: (torch.cat([t[0], t[0]]), torch.cat([t[1], t[1]])) if isinstance(t, tuple) else torch.cat([t, t])
        for k, t in caches.items()
    }


def _double_inputs(inputs: dict[str, Tensor], scenario: Scenario) -> dict[str, Tensor]:
    """The rows twice, the second time in the second half of doubled caches."""
    shift = {
        "block_table": scenario.blocks,
        "slot_mapping": scenario.blocks * scenario.block_size,
        "state_slot": scenario.slots,
    }

    def second(name: str, t: Tensor) -> Tensor:
        pad = (
            t < 0
            if name == "slot_mapping"
            else t <= 0
            if name == "state_slot"
            else torch.zeros_like(t, dtype=torch.bool)
        )
        return torch.where(pad, t, t + shift[name]) if name in shift else t

    return {k: torch.cat([t, second(k, t)]) for k, t in inputs.items()}


def output_errors(graph: Graph, got: Values, want: Values, rows: Tensor) -> list[float]:
    """Relative L2 per row of every graph output that is not just handed through."""
    return [
        e
        for name in graph.outputs
        if name not in graph.inputs
        for e in row_errors(got[name][rows], want[name][rows]).tolist()
    ]


def trace(runner: StageRunner, graph: Graph, weights: AnyWeights, scenario: Scenario) -> Trace:
    """Runs the scenario on the runner and on the plain implementation; float64 follows both in one batch of twice the
    rows, so that its weights are read once a step."""
    w = reference_weights(graph, weights)
    routes = [(op.inputs[0], op.outputs[0]) for op in graph.ops if op.kind == "route"]
    plain_caches, exact_caches = scenario.caches("bf16"), _doubled(scenario.caches("f64"))
    copy_caches(runner.caches, scenario.caches("bf16"))
    n, out = scenario.batch, Trace()
    for t in range(scenario.steps):
        inputs = scenario.inputs(t)
        out.inputs.append(inputs)
        plain = interpret.run(graph, w.bf16, inputs, plain_caches, "bf16")
        try:
            runner.step(inputs)
            choices = runner.choices()
            adopt = Choices(
                {ids: torch.cat([choices[ids].to(plain[ids].device), plain[ids]]) for _, ids in routes}, float("inf")
            )
            exact = interpret.run(graph, w.f64, _double_inputs(inputs, scenario), exact_caches, "f64", adopt)
        except (ChoiceError, RuntimeError) as e:
            out.stopped = f"step {t}: {e}"
            return out
        rows = torch.nonzero(active_rows(graph, inputs)).flatten()
        out.adopted += [(f"step {t} {ids} row {row}", gap) for ids, row, gap in adopt.adopted if row < n]
        out.errors += output_errors(graph, runner.outputs(), exact, rows)
        second = {k: v[n:] for k, v in exact.items()}
        out.band += output_errors(graph, plain, second, rows)
        for logits, _ in routes if len(rows) else ():
            off = torch.sigmoid(plain[logits][rows].double()) - torch.sigmoid(second[logits][rows])
            out.score_error = max(out.score_error, float(off.abs().max()))
    return out


def foreign_states(runner: StageRunner, graph: Graph, scenario: Scenario, inputs: list[dict[str, Tensor]]) -> list[str]:
    """States in which an element changed that no live row of these steps owns."""
    fresh = scenario.caches("bf16")
    out = []
    for state in graph.states:
        for now, was in zip(tensors(runner.caches[state.name]), tensors(fresh[state.name]), strict=True):
            rest = now.clone()
            for step in inputs:
                where = state_rows(state.kind, now, step, torch.nonzero(active_rows(graph, step)).flatten())
                rest[where] = was[where]
            if not torch.equal(rest, was):
                out.append(state.name)
    return out


def rollout(
    runner: StageRunner, graph: Graph, weights: AnyWeights, scenario: Scenario, repeat: str = ""
) -> tuple[list[Check], list[Numerics]]:
    """All steps of `scenario` (64 at batch 4 give the 256 samples the band needs) through `runner.step`.

    Returns the checks "rollout.logits" (error within the band of the plain implementation's own rollout),
    "rollout.choices" (every differing choice lay within the score error) and "rollout.state" (no state of anybody else
    changed), and the Numerics row.
    """
    got = trace(runner, graph, weights, scenario)
    if got.stopped or not got.errors:
        return [check("rollout.logits", False, None, 1.0, got.stopped or "no live rows", repeat)], []
    row, refused = judge("rollout:" + graph.outputs[0], got.errors, got.band), got.refused()
    foreign = foreign_states(runner, graph, scenario, got.inputs)
    largest = max((gap for _, gap in got.adopted), default=0.0)
    return [
        check("rollout.logits", row.status == "pass", round(excess(row), 3), 1.0, why(row), repeat),
        check(
            "rollout.choices",
            not refused,
            largest,
            MAX_FACTOR * got.score_error,
            "; ".join(refused[:5])
            or f"{len(got.adopted)} choices differed from float64's own; largest score gap against twice the score error",
            repeat,
        ),
        check(
            "rollout.state",
            not foreign,
            len(foreign),
            0,
            ", ".join(foreign) or "states of other requests kept their bits",
            repeat,
        ),
    ], [row]
