"""Task orders: edges and program order hold, bits do not depend on them, and a missing edge is seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from micro import body, edit, graph, plan, runner

from optkit.execute.memory import ExecutionError
from optkit.execute.schedule import POLICIES, Deadlock, Scheduler, Task, tagged_sources
from optkit.plan.types import Edge, Plan
from optkit.validate.orders import orders, run_bits, same_bits
from optkit.validate.scenario import Scenario

MECHANISMS = ("counter", "tagged", "grid_barrier")


def without(p: Plan, edge: Edge) -> Plan:
    return replace(p, edges=tuple(e for e in p.edges if e != edge))


def executed(p: Plan, order: int | str, rows: int = 4) -> list[Task]:
    return [task for group in Scheduler(p, rows, order) for task in group]


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("order", [3, *POLICIES])
def test_orders_respect_program_order_and_counters(mechanism: str, order: int | str) -> None:
    p = plan("k3", sync__mechanism=mechanism)
    at = {(t.stage, t.index): i for i, t in enumerate(executed(p, order))}
    assert len(at) == sum(s.tasks for s in p.stages)
    by_sm: dict[int, list[tuple[int, int]]] = {}
    for (stage, task), _ in sorted(at.items(), key=lambda x: x[1]):
        by_sm.setdefault(p.stages[stage].sm_of(task, p.sms), []).append((stage, task))
    assert all(run == sorted(run) for run in by_sm.values())
    for e in p.edges:
        if e.mechanism in ("counter", "grid_barrier"):
            last = max(at[e.src, t] for t in range(p.stages[e.src].tasks))
            assert last < min(at[e.dst, t] for t in range(p.stages[e.dst].tasks))


def test_orders_differ_and_repeat() -> None:
    p = plan("k3")
    assert executed(p, 1) == executed(p, 1)
    assert len({tuple(executed(p, o)) for o in (1, 2, *POLICIES)}) == 4


@pytest.mark.parametrize("name", ["k3", "llama"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_bits_do_not_depend_on_order(name: str, mechanism: str) -> None:
    scenario = Scenario(graph(name), 3, 2)
    result = orders(runner(name, scenario, plan(name, sync__mechanism=mechanism)), scenario, range(4))
    assert result.status == "pass", result.reason
    assert (result.value, result.threshold) == (18, 18), "four seeds, two policies, twelve held tasks"


def test_bits_do_not_depend_on_order_with_exchanges() -> None:
    scenario = Scenario(graph("k3", 2), 4, 1)
    result = orders(runner("k3", scenario, plan("k3", 2, sync__mechanism="tagged"), 2), scenario, range(3))
    assert result.status == "pass", result.reason


def test_order_must_be_known() -> None:
    with pytest.raises(ValueError, match="order='sideways': expected an int seed, starve:N or one of inverted, greedy"):
        Scheduler(plan("k3"), 4, "sideways")


def unproven(p: Plan, dropped: Edge) -> bool:
    """Whether, without this edge, some task may run before a task whose words it reads (counter plans).

    known[m, n] = last stage of which SM m knows that SM n has finished it; every SM runs its tasks in stage order.
    """
    known = np.full((p.sms, p.sms), -1)
    after: list[np.ndarray] = []
    for i, s in enumerate(p.stages):
        sms = [s.sm_of(t, p.sms) for t in range(s.tasks)]
        for e in p.waits[i]:
            if e != dropped and e.mechanism == "counter":
                known[sms] = np.maximum(known[sms], after[e.src])
        if i == dropped.dst:
            src = p.stages[dropped.src]
            return any(
                known[sm, src.sm_of(u, p.sms)] < dropped.src and sm != src.sm_of(u, p.sms)
                for t, sm in enumerate(sms)
                for u in tagged_sources(p, dropped, p.rows)[t]
            )
        for sm in sms:
            known[sm, sm] = i
        after.append(known[sms].max(0))
    raise AssertionError


def needed_edges(p: Plan) -> list[Edge]:
    """RAW edges that nothing else implies."""
    return [e for e in p.edges if e.kind == "raw" and e.mechanism == "counter" and unproven(p, e)]


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_every_dropped_wait_turns_the_gate_red(name: str) -> None:
    """Planted fault: each RAW edge that nothing else implies, dropped alone, is caught when its source is starved."""
    p = plan(name)
    scenario = Scenario(graph(name), 8, 1)
    edges = needed_edges(p)
    assert len(edges) >= 10
    missed = []
    for e in edges[:: max(1, len(edges) // 12)]:
        result = orders(runner(name, scenario, without(p, e)), scenario, (), (f"starve:{e.src}",))
        if result.status != "fail":
            missed.append((p.stages[e.src].name, p.stages[e.dst].name, e.buffer))
    assert not missed


def test_default_orders_catch_most_dropped_waits() -> None:
    """Without knowing where to look, eight random and the adversarial orders still see most of them."""
    p = plan("llama")
    scenario = Scenario(graph("llama"), 8, 1)
    edges = needed_edges(p)
    seen = [orders(runner("llama", scenario, without(p, e)), scenario).status == "fail" for e in edges]
    assert sum(seen) >= 0.8 * len(edges)


def test_dropped_wait_names_buffer_and_writer() -> None:
    p = plan("llama")
    e = next(e for e in needed_edges(p) if not e.buffer.startswith("L"))
    scenario = Scenario(graph("llama"), 8, 1)
    r = runner("llama", scenario, without(p, e), order=f"starve:{e.src}", checked=True)
    with pytest.raises(
        ExecutionError, match=f"reads buffer '{e.buffer}'.*before its write.*expected the value of stage {e.src} "
    ):
        r.step(scenario.inputs(0))


def test_dropped_state_edge_is_seen_as_poison() -> None:
    """An attention task that overtakes the insert of its own token reads a poisoned cache row."""
    p = plan("k3", tune__sms=64)  # on 12 SMs every SM runs an insert task, so program order alone would do
    e = next(e for e in p.edges if e.buffer == "L2.kv")
    assert unproven(p, e)
    scenario = Scenario(graph("k3"), 8, 1)
    r = runner("k3", scenario, without(p, e), order=f"starve:{e.src}", checked=True)
    with pytest.raises(ExecutionError, match="stage [0-9]+ 'L2.ol' .* NaN"):
        r.step(scenario.inputs(0))


def test_backward_edge_is_a_deadlock_with_names() -> None:
    p = plan("llama")
    last = len(p.stages) - 1
    p = replace(p, edges=(*p.edges, Edge(last, 1, "loop", "raw", "counter")))
    scenario = Scenario(graph("llama"), 1, 1)
    with pytest.raises(Deadlock, match=f"waits by counter on 'loop' of stage {last} '{p.stages[last].name}'"):
        runner("llama", scenario, p, order=0).step(scenario.inputs(0))


def test_undeclared_accesses_are_refused() -> None:
    p = plan("k3")
    scenario = Scenario(graph("k3"), 2, 1)

    def run(changed: Plan) -> None:
        runner("k3", scenario, changed, order=0, checked=True).step(scenario.inputs(0))

    pick = next(i for i, s in enumerate(p.stages) if s.body == "kda")
    hidden = tuple(a for a in p.stages[pick].reads if a.buffer != p.stages[pick].param("g"))
    with pytest.raises(ExecutionError, match="reads buffer .*not declared in its Accesses"):
        run(replace(p, stages=tuple(replace(s, reads=hidden) if i == pick else s for i, s in enumerate(p.stages))))
    narrow = tuple(
        replace(a, span=a.span // 2) if a.buffer == p.stages[pick].param("out") else a for a in p.stages[pick].writes
    )
    with pytest.raises(ExecutionError, match="writes buffer .*not declared in its Accesses"):
        run(replace(p, stages=tuple(replace(s, writes=narrow) if i == pick else s for i, s in enumerate(p.stages))))
    with pytest.raises(ExecutionError, match="uses state 'L1.recurrent': not in its Accesses"):
        run(edit(p, lambda s: body("kda")(s) and s.layer == 0, lambda _: {"recurrent": "L1.recurrent"}))


def test_tags_of_an_earlier_epoch_do_not_pass() -> None:
    """A stage that does not write this step leaves the last step's words; a reader must not take them."""
    p = plan("llama")
    scenario = Scenario(graph("llama"), 2, 2)
    r = runner("llama", scenario, p, checked=True)
    r.step(scenario.inputs(0))
    skipped = next(i for i, s in enumerate(p.stages) if s.body == "gemv")
    run_units = r._run_units
    r._run_units = lambda index, *a, **k: None if index == skipped else run_units(index, *a, **k)  # type: ignore[method-assign]
    with pytest.raises(ExecutionError, match="of epoch 2, found that of .* of epoch 1"):
        r.step(scenario.inputs(1))


def test_same_bits_sees_one_bit() -> None:
    a = [torch.tensor([1.0, float("nan")])]
    assert same_bits(a, [a[0].clone()])
    assert not same_bits(a, [torch.tensor([1.0 + 2**-23, float("nan")])])
    assert not same_bits(a, [torch.tensor([1.0, 0.0])])


def test_run_bits_starts_from_the_same_caches() -> None:
    scenario = Scenario(graph("llama"), 2, 2)
    r = runner("llama", scenario)
    first = run_bits(r, scenario)
    assert same_bits(first, run_bits(r, scenario))
    assert not same_bits(first[:2], first[2:4])
