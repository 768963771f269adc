"""Facts that proofs assume of indices are checked at run time, and epochs survive any sequence of batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from micro import graph, plan, runner

from optkit.execute.bodies import experts
from optkit.execute.facts import FACTS
from optkit.execute.memory import ExecutionError
from optkit.validate.scenario import Scenario


def stepped(name: str, **inputs: Any) -> torch.Tensor:
    scenario = Scenario(graph(name), 3, 1)
    changed = {k: torch.tensor(v, dtype=scenario.inputs(0)[k].dtype) for k, v in inputs.items()}
    return runner(name, scenario, checked=True).step({**scenario.inputs(0), **changed})


def test_every_fact_of_the_plans_can_be_checked() -> None:
    assert {f for name in ("k3", "llama") for s in plan(name).index_sets for f in s.facts} <= FACTS.keys()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            {"state_slot": [2, 3, 2]},
            r"index set 'state_slot' of contract:vllm: injective does not hold: live rows share \[2\]",
        ),
        (
            {"slot_mapping": [40, 7, 40]},
            r"'slot_mapping' of contract:vllm: injective does not hold: live rows share \[40\]",
        ),
    ],
)
def test_shared_slots_are_refused(inputs: dict[str, list[int]], message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        stepped("k3", **inputs)


def test_padding_may_repeat() -> None:
    assert bool(torch.isfinite(stepped("k3", state_slot=[2, 0, 0], slot_mapping=[40, -1, -1], seq_len=[1, 0, 0])).all())


def test_page_written_by_one_row_and_read_by_another_is_refused() -> None:
    scenario = Scenario(graph("llama"), 2, 1, starts=(20, 20))
    inputs = scenario.inputs(0)
    inputs["block_table"][0, 1] = inputs["block_table"][1, 1]  # where row 1 puts its new token
    with pytest.raises(ExecutionError, match="a live row writes pages"):
        runner("llama", scenario, checked=True).step(inputs)
    inputs = scenario.inputs(0)
    inputs["block_table"][0, 0] = inputs["block_table"][1, 0]  # a full page of a common prefix
    runner("llama", scenario, checked=True).step(inputs)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda ids, table: (ids, [table[0], 99, *table[2:]]), r"in_range does not hold: experts \[99\]"),
        (
            lambda ids, table: (ids, [table[0] - 1, *table[1:]]),
            r"partition does not hold: \d (row, k)? ?.*pairs in slots",
        ),
        (lambda ids, table: (ids, [table[0], *table[10:19], *table[10:]]), r"partition does not hold"),
    ],
)
def test_a_wrong_expert_table_is_refused(monkeypatch: pytest.MonkeyPatch, fault: Any, message: str) -> None:
    original = experts.distinct
    monkeypatch.setattr(experts, "distinct", lambda ids, rows: fault(ids, original(ids, rows))[1])
    with pytest.raises(ExecutionError, match=message):
        stepped("k3")


def test_an_expert_twice_in_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = experts.top_k
    monkeypatch.setattr(experts, "top_k", lambda *a: (original(*a)[0][:, :1].expand(-1, a[2]), original(*a)[1]))
    with pytest.raises(ExecutionError, match="'ids@1' of L1.route: distinct_in_row does not hold"):
        stepped("k3")


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_batches_of_any_size_follow_each_other(name: str) -> None:
    """8 -> 1 -> 4 -> 8 rows on one runner give the bits of fresh runners: nothing of a larger batch is left to read."""
    one = runner(name, Scenario(graph(name), 8, 1), order=1, checked=True)
    for batch in (8, 1, 4, 8):
        scenario = Scenario(graph(name), batch, 1, blocks=73, slots=10)
        fresh = runner(name, scenario)
        one.caches.update(scenario.caches("bf16"))
        assert torch.equal(one.step(scenario.inputs(0)), fresh.step(scenario.inputs(0)))


def test_epochs_pass_two_to_the_32() -> None:
    scenario = Scenario(graph("llama"), 2, 3)
    a, b = runner("llama", scenario), runner("llama", scenario, order=2, checked=True)
    b.memory.epoch = 2**32 - 2
    for t in range(3):
        assert torch.equal(a.step(scenario.inputs(t)), b.step(scenario.inputs(t)))
