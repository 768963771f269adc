"""Task orders and repetition: the same bits, whatever the order and every time.

Runs are compared with whole-stage execution bit by bit, logits of every step and all caches at the end, with poisoned
memory and every access checked, so that a missing edge is an error that names its buffer and not a small difference.
Memory holds NaN, bytes 0xFF or the data of the step before in turn; cache elements that no request owns hold poison.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optkit.checks import Check, check
from optkit.execute.executor import Executor
from optkit.execute.memory import POISONS, ExecutionError, poisoned
from optkit.execute.runner import StageRunner
from optkit.execute.schedule import POLICIES, Order, Schedule
from optkit.plan.types import Plan
from optkit.validate.reference import active_rows
from optkit.validate.scenario import Scenario, copy_caches, tensors
from optkit.validate.threads import one_thread

Bits = list[torch.Tensor]


HELD = 12
"""Orders of a run that hold back one task of an edge's source: a step each, spread over the plan's sources."""


def run_bits(runner: StageRunner, scenario: Scenario, steps: int = 0, poison: str = "") -> Bits:
    """Outputs of the first `steps` steps (0: all) and the caches after them, from the scenario's fresh caches.

    `poison` ("nan", "ones") overwrites every cache element first that no live request holds.
    """
    copy_caches(runner.caches, scenario.caches("bf16"))
    if poison:
        poison_unheld(runner, scenario, poison)
    out: Bits = []
    for t in range(steps or scenario.steps):
        runner.step(scenario.inputs(t))
        out += [v.clone() for v in runner.outputs().values()]
    return out + [x.clone() for t in runner.caches.values() for x in tensors(t)]


def poison_unheld(runner: StageRunner, scenario: Scenario, poison: str) -> None:
    """Overwrites cached tokens beyond every live request's length, pages and slots of nobody: no task may use them."""
    inputs = scenario.inputs(0)
    live = torch.nonzero(active_rows(scenario.graph, inputs)).flatten()
    size = scenario.block_size
    for state in scenario.graph.states:
        for t in tensors(runner.caches[state.name]):
            held = torch.zeros(t.shape[: 2 if state.kind.startswith("kv") else 1], dtype=torch.bool, device=t.device)
            for r in live.tolist():
                if state.kind.startswith("kv"):
                    pos = torch.arange(int(inputs["seq_len"][r]) - 1, device=t.device)  # the new token is still to come
                    held[inputs["block_table"][r][pos // size].long(), pos % size] = True
                else:
                    held[int(inputs["state_slot"][r])] = True
            t[~held] = poisoned(t.dtype, poison).to(t.device)


def held_back(plan: Plan, count: int = HELD, seed: int = 0) -> list[Schedule]:
    """Adversarial orders chosen from the edges: each holds back one task of an edge's source until nothing else can
    run, so that a reader which no edge holds overtakes it (for WAR edges: a writer overtakes the reader)."""
    sources = sorted({e.src for e in plan.edges if e.mechanism != "program"})
    if not sources:
        return []
    chosen = [sources[(i * len(sources) + seed) // count % len(sources)] for i in range(min(count, len(sources)))]
    return [Schedule(((s, (7 * i + seed) % plan.stages[s].tasks),)) for i, s in enumerate(chosen)]


def same_bits(a: Bits, b: Bits) -> bool:
    """Equal as bits (NaN compares equal to itself)."""
    return all(
        torch.equal(torch.nan_to_num(x.float()), torch.nan_to_num(y.float()))
        and torch.equal(torch.isnan(x), torch.isnan(y))
        for x, y in zip(a, b, strict=True)
    )


def repeat(runner: StageRunner, scenario: Scenario, command: str = "") -> Check:
    """ "repeat.bits": the same steps from the same caches twice, bit by bit."""
    same = same_bits(run_bits(runner, scenario), run_bits(runner, scenario))
    return check(
        "repeat.bits",
        same,
        "equal" if same else "different",
        "equal",
        f"{scenario.steps} steps at batch {scenario.batch}, outputs and caches",
        command,
    )


@one_thread()
def orders(
    runner: Executor,
    scenario: Scenario,
    seeds: Sequence[int] = range(8),
    policies: Sequence[str] = POLICIES,
    command: str = "",
    held: int = HELD,
) -> Check:
    """ "orders.bits": random task orders by seed over all steps, adversarial ones and those of `held_back` over the first,
    each compared with stage order bit by bit."""
    before = runner.order, runner.checked, runner.accesses, runner.poison
    every: tuple[Order, ...] = (*seeds, *policies, *held_back(runner.plan, held))
    failures: list[str] = []
    try:
        runner.order, runner.checked, runner.poison = "stage", True, "nan"
        want = {n: run_bits(runner, scenario, n, "nan") for n in {1, scenario.steps}}
        for i, order in enumerate(every):
            steps = scenario.steps if isinstance(order, int) else 1
            runner.order, runner.accesses = order, i == 0  # what a task touches does not depend on the order
            runner.poison = POISONS[i % len(POISONS)]
            try:
                caches = "ones" if runner.poison == "ones" else "nan"
                if not same_bits(run_bits(runner, scenario, steps, caches), want[steps]):
                    failures.append(f"order {order}, memory {runner.poison}: different bits")
            except ExecutionError as e:
                failures.append(f"order {order}, memory {runner.poison}: {e}")
    except ExecutionError as e:
        failures += [f"stage order: {e}"] * len(every)
    finally:
        runner.order, runner.checked, runner.accesses, runner.poison = before
    return check(
        "orders.bits",
        not failures,
        len(every) - len(failures),
        len(every),
        "; ".join(failures[:3])
        or f"{len(seeds)} random orders over {scenario.steps} steps, {len(every) - len(seeds)} adversarial ones over one, "
        f"batch {scenario.batch}, memory {', '.join(POISONS)} in turn",
        command,
    )
