"""Routing extremes: all tokens on one set of experts, one expert that everybody wants, all experts different.

The logits of every router are replaced; the stages that route and that run experts are then held against float64 as in
`forced`, each alone. The number of distinct experts must be the one that the case was made for: in the first most experts
have no token (and most slots of the plan are empty), in the last the plan's bound on distinct experts is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from optkit.checks import Check, check
from optkit.execute.runner import StageRunner
from optkit.models.graph import Graph
from optkit.validate.forced import TeacherForced
from optkit.validate.gates import FLOOR, MAX_FACTOR
from optkit.validate.reference import AnyWeights, reference_weights
from optkit.validate.scenario import Scenario

BODIES = ("route", "expert_gate_up", "expert_down")
Ids = list[list[int]]
MARGIN = 0.05
"""Score plus bias of what is chosen falls evenly from min(bias) + 0.95 to max(bias) + 0.05: scores stay within (0, 1),
nothing else comes near (all other logits are -12), and the gaps are far beyond rounding while the biases lie within 0.9 of
each other; a case that a wider bias spoils is red, and its reason shows the choice."""


def extremes(rows: int, experts: int, topk: int) -> dict[str, Ids]:
    """Case -> the experts of every row, in falling order. The last id is among the chosen, so that an end is reached."""
    return {
        "one set for all": [[experts - 1, *range(topk - 1)]] * rows,
        "one expert for all": [[0, *((1 + r * (topk - 1) + k) % (experts - 1) + 1 for k in range(topk - 1))]
                               for r in range(rows)],
        "all different": [[experts - 1 - (r * topk + k) % experts for k in range(topk)] for r in range(rows)],
    }  # fmt: skip


def distinct_of(ids: Ids) -> int:
    """Number of experts that anybody chose."""
    return len({e for row in ids for e in row})


def logits_of(ids: Ids) -> Callable[[Tensor], Tensor]:
    """Logits f64 [R, E] that choose `ids` in this order, for a router with this bias [E]."""

    def make(bias: Tensor) -> Tensor:
        places = torch.tensor(ids, device=bias.device)
        top, bottom = float(bias.min()) + 1 - MARGIN, float(bias.max()) + MARGIN
        due = torch.linspace(top, bottom, places.shape[1], dtype=torch.float64, device=bias.device)
        score = (due - bias.double()[places]).clamp(0.01, 0.99)
        out = torch.full((len(ids), len(bias)), -12.0, dtype=torch.float64, device=bias.device)
        return out.scatter(1, places, torch.logit(score))

    return make


def _case(runner: StageRunner, graph: Graph, weights: AnyWeights, scenario: Scenario, ids: Ids) -> tuple[float, list[str]]:
    """(share of the gate used, what is wrong)."""
    forced = TeacherForced(runner, graph, weights, scenario, routing=logits_of(ids))
    stages = [i for i, s in enumerate(runner.plan.stages) if s.body in BODIES]
    chosen: dict[str, Tensor] = {}
    run_stages = runner.run_stages

    def watched(first: int, last: int, inputs: Mapping[str, Tensor], inject: Mapping[str, Tensor]) -> dict[str, Tensor]:
        got = run_stages(first, last, inputs, inject)
        stage = runner.plan.stages[first]
        if stage.body == "route":
            chosen[stage.name] = got[stage.param("ids")][: len(ids)]
        return got

    forced.run_stages = watched
    forced.step(0, scenario.caches("f64"), stages)
    wrong = list(forced.samples.wrong)
    for name, got in chosen.items():
        if got.tolist() != ids:
            row = next(r for r, (a, b) in enumerate(zip(got.tolist(), ids, strict=True)) if a != b)
            wrong.append(f"{name} row {row} chose {got[row].tolist()}, its scores say {ids[row]}")
    used = {k: max(e) / (MAX_FACTOR * max(*forced.samples.band[k], FLOOR)) for k, e in forced.samples.errors.items()}
    wrong += [f"{k}: {v:.2f} x its gate" for k, v in used.items() if v > 1]
    return max(used.values(), default=0.0), wrong


def routing(runner: StageRunner, graph: Graph, weights: AnyWeights, scenario: Scenario, repeat: str = "") -> list[Check]:
    """One check "routing.<case>" a case of `extremes`, none for a model without experts. The scenario has full batches."""
    stage = next((s for s in runner.plan.stages if s.body == "route"), None)
    if stage is None:
        return []
    weights, out = reference_weights(graph, weights), []
    for name, ids in extremes(scenario.batch, stage.param("experts"), stage.param("topk")).items():
        try:
            used, wrong = _case(runner, graph, weights, scenario, ids)
        except RuntimeError as e:
            used, wrong = float("inf"), [f"the runner failed: {e}"]
        passed = f"{distinct_of(ids)} of {stage.param('experts')} experts have a token, {scenario.batch} rows"
        out.append(check(f"routing.{name}", not wrong, round(used, 3), 1.0, "; ".join(wrong[:3]) or passed, repeat))
    return out
