"""Interleavings that hypothesis searches and shrinks: a right plan survives them, a missing edge becomes a short schedule.

Decisions are drawn from the Plan's edges (their sources are held back) and from the tasks that can run at each turn.
"""

from __future__ import annotations

import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample
from micro import graph, plan, runner, weights
from test_orders import needed_edges, without

from optkit.execute import Executor
from optkit.execute.memory import POISONS, ExecutionError
from optkit.execute.schedule import Schedule, Scheduler
from optkit.plan.types import Plan
from optkit.validate.orders import held_back, orders, run_bits, same_bits
from optkit.validate.scenario import Scenario

MECHANISMS = ("counter", "tagged", "grid_barrier")
QUICK = settings(max_examples=40, deadline=None, derandomize=True, database=None,
                 suppress_health_check=list(HealthCheck))  # fmt: skip
SEARCH = settings(QUICK, max_examples=400, phases=(Phase.generate, Phase.shrink))


def schedules(p: Plan) -> st.SearchStrategy[Schedule]:
    """Up to six held tasks of stages that edges start from, and up to forty turns given away by number."""
    sources = sorted({e.src for e in p.edges})
    held = st.sampled_from(sources).flatmap(lambda s: st.tuples(st.just(s), st.integers(0, p.stages[s].tasks - 1)))
    return st.builds(
        Schedule,
        held=st.lists(held, max_size=6, unique=True).map(tuple),
        picks=st.lists(st.integers(0, p.sms - 1), max_size=40).map(tuple),
    )


def broken(r: Executor, scenario: Scenario, schedule: Schedule) -> str:
    """The error of one step in this order, "" if it has none."""
    r.order = schedule
    try:
        r.step(scenario.inputs(0))
    except ExecutionError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("name", ["k3", "llama"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_right_plans_survive_every_schedule(name: str, mechanism: str) -> None:
    p = plan(name, sync__mechanism=mechanism)
    scenario = Scenario(graph(name), 3, 2)
    r = runner(name, scenario, p, checked=True, accesses=False)
    want = run_bits(r, scenario, poison="nan")

    @QUICK
    @given(schedules(p), st.sampled_from(POISONS))
    def survives(schedule: Schedule, poison: str) -> None:
        r.order, r.poison = schedule, poison
        assert same_bits(run_bits(r, scenario, poison="ones" if poison == "ones" else "nan"), want)

    survives()


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_a_missing_edge_shrinks_to_one_held_task(name: str) -> None:
    """Planted fault: an edge is dropped. The smallest order that shows it holds back one task of its source, or gives
    away a turn or two, and the error says which."""
    p = plan(name)
    edges = needed_edges(p)
    scenario = Scenario(graph(name), 8, 1)
    for e in edges[:: max(1, len(edges) // 2)]:
        r = runner(name, scenario, without(p, e), checked=True, accesses=False)
        found = find(schedules(p), lambda s, r=r: bool(broken(r, scenario, s)), settings=SEARCH)
        assert 1 <= len(found) <= 2, found
        message = broken(r, scenario, found)
        assert f"schedule: {found.describe(p)}" in message
        if found.held:
            assert f"hold task {found.held[0][1]} of stage {found.held[0][0]} '{p.stages[found.held[0][0]].name}'" in message


def test_the_search_finds_nothing_in_a_right_plan() -> None:
    p = plan("llama")
    scenario = Scenario(graph("llama"), 8, 1)
    r = runner("llama", scenario, p, checked=True, accesses=False)
    with pytest.raises(NoSuchExample):
        find(schedules(p), lambda s: bool(broken(r, scenario, s)), settings=settings(SEARCH, max_examples=60))


def test_a_failing_property_prints_its_schedule() -> None:
    """What a developer sees: hypothesis' falsifying example and the error, both with the decisions."""
    p = plan("llama")
    e = needed_edges(p)[3]
    scenario = Scenario(graph("llama"), 8, 1)
    r = runner("llama", scenario, without(p, e), checked=True, accesses=False)

    @SEARCH
    @given(schedules(p))
    def survives(schedule: Schedule) -> None:
        r.order = schedule
        r.step(scenario.inputs(0))

    with pytest.raises(ExecutionError, match="before its write.*schedule: (hold task|turns go)") as error:
        survives()
    notes = "\n".join(error.value.__notes__)
    assert re.search(r"schedule=Schedule\((held=\(\(\d+, \d+\),\)|picks=\(\d+)", notes), notes


def test_a_schedule_is_one_order_and_every_task_runs_once() -> None:
    p = plan("k3", sync__mechanism="tagged")
    total = sum(s.tasks for s in p.stages)
    for schedule in (Schedule(), Schedule(((4, 1), (9, 0))), Schedule((), (3, 0, 7, 1)), Schedule(((2, 0),), (5,) * 30)):
        first, again = ([t for group in Scheduler(p, 4, schedule) for t in group] for _ in range(2))
        assert first == again and len(set(first)) == total
    assert Schedule().describe(p) == "stage by stage"
    stages = [group[0].stage for group in Scheduler(p, 4, Schedule())]
    assert stages == sorted(stages), "no decisions: stage by stage"


def test_a_held_task_runs_last_of_all_that_can() -> None:
    p = plan("llama")
    order = [(t.stage, t.index) for group in Scheduler(p, 4, Schedule(((2, 1),))) for t in group]
    at = order.index((2, 1))
    waiting = {e.dst for e in p.edges if e.src == 2}
    assert all(s <= 2 or p.stages[s].sm_of(t, p.sms) != p.stages[2].sm_of(1, p.sms) for s, t in order[:at])
    assert not any(s in waiting for s, _ in order[:at])


def test_held_tasks_of_a_run_come_from_the_edges() -> None:
    for name in ("k3", "llama"):
        p = plan(name)
        chosen = held_back(p)
        sources = {e.src for e in p.edges}
        assert len(chosen) == len(set(chosen)) == 12
        assert all(s in sources and t < p.stages[s].tasks for c in chosen for s, t in c.held)
        assert max(c.held[0][0] for c in chosen) > 0.7 * len(p.stages), "spread over the whole plan"


@pytest.mark.parametrize("poison", POISONS)
def test_a_stage_that_never_ran_is_seen_whatever_memory_held(poison: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a stage writes nothing in the second step, so its readers get the poison or the last step's data."""
    p = plan("llama")
    scenario = Scenario(graph("llama"), 2, 2)
    r = runner("llama", scenario, p, checked=True, poison=poison, order=Schedule())
    r.step(scenario.inputs(0))
    skipped = next(i for i, s in enumerate(p.stages) if s.body == "gemv")
    run_units = r._run_units
    monkeypatch.setattr(r, "_run_units", lambda i, *a, **k: None if i == skipped else run_units(i, *a, **k))
    with pytest.raises(ExecutionError, match=f"stage {skipped} .* of epoch 2, found that of .* of epoch 1"):
        r.step(scenario.inputs(1))


@pytest.mark.parametrize("poison", ["nan", "ones"])
def test_one_cached_token_too_many_is_seen(poison: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: attention reads one token beyond the request. Random leftovers there would be a small error."""
    from optkit.execute.bodies import attention

    original = attention._length
    monkeypatch.setattr(attention, "_length", lambda mem, row: n + 1 if (n := original(mem, row)) else 0)
    scenario = Scenario(graph("llama"), 3, 1, starts=(5, 3, 9))
    r = runner("llama", scenario, checked=True, order=Schedule())
    with pytest.raises(ExecutionError, match="NaN"):
        run_bits(r, scenario, poison=poison)
    assert orders(r, scenario, range(1), (), held=0).status == "fail"


def test_poison_must_be_known() -> None:
    with pytest.raises(ValueError, match="poison='zero': expected one of nan, ones, stale"):
        Executor(plan("llama"), graph("llama"), weights("llama"), Scenario(graph("llama"), 1, 1).caches(), poison="zero")


def test_stale_memory_is_that_of_the_step_before() -> None:
    scenario = Scenario(graph("llama"), 2, 2)
    r = runner("llama", scenario, checked=True, poison="stale")
    r.step(scenario.inputs(0))
    held = {k: v.clone() for k, v in r.memory.data.items()}
    r.memory.begin(scenario.inputs(1), poison=r.poison)
    assert all(torch.equal(v.nan_to_num(), held[k].nan_to_num()) for k, v in r.memory.data.items())
