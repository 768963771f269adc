"""Task orders and repetition: the same bits, whatever the order and every time.

Runs are compared with whole-stage execution bit by bit, logits of every step and all caches at the end, with poisoned
memory and every access checked, so that a missing edge is an error that names its buffer and not a small difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optkit.checks import Check, check
from optkit.execute.executor import Executor
from optkit.execute.memory import ExecutionError
from optkit.execute.runner import StageRunner
from optkit.execute.schedule import POLICIES
from optkit.validate.scenario import Scenario, copy_caches, tensors
from optkit.validate.threads import one_thread

Bits = list[torch.Tensor]


def run_bits(runner: StageRunner, scenario: Scenario, steps: int = 0) -> Bits:
    """Outputs of the first `steps` steps (0: all) and the caches after them, from the scenario's fresh caches."""
    copy_caches(runner.caches, scenario.caches("bf16"))
    out: Bits = []
    for t in range(steps or scenario.steps):
        runner.step(scenario.inputs(t))
        out += [v.clone() for v in runner.outputs().values()]
    return out + [x.clone() for t in runner.caches.values() for x in tensors(t)]


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
) -> Check:
    """ "orders.bits": random task orders by seed over all steps, adversarial ones over the first, each compared with stage
    order bit by bit."""
    before = runner.order, runner.checked, runner.accesses
    total = len(seeds) + len(policies)
    failures: list[str] = []
    try:
        runner.order, runner.checked = "stage", True
        want = {n: run_bits(runner, scenario, n) for n in {1, scenario.steps}}
        every: tuple[int | str, ...] = (*seeds, *policies)
        for i, order in enumerate(every):
            steps = scenario.steps if isinstance(order, int) else 1
            runner.order, runner.accesses = order, i == 0  # what a task touches does not depend on the order
            try:
                if not same_bits(run_bits(runner, scenario, steps), want[steps]):
                    failures.append(f"order {order}: different bits")
            except ExecutionError as e:
                failures.append(f"order {order}: {e}")
    except ExecutionError as e:
        failures += [f"stage order: {e}"] * total
    finally:
        runner.order, runner.checked, runner.accesses = before
    return check(
        "orders.bits",
        not failures,
        total - len(failures),
        total,
        "; ".join(failures[:3])
        or f"{len(seeds)} random orders over {scenario.steps} steps, {len(policies)} adversarial ones over one, batch "
        f"{scenario.batch}",
        command,
    )
