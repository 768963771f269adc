"""The descriptor table read back: right for every kind of Plan, and red for every way of getting it wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from optkit.emit import layout as L
from optkit.emit import lower as lowering
from optkit.models import families
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices
from optkit.plan.types import Plan
from optkit.verify import table
from optkit.verify.table import check_table


def plan_of(name: str, mechanism: str = "counter", tp: int = 1, peers: str = "emulated", **groups: Any) -> Plan:
    config = copy.deepcopy(families.named_config(name))
    if "kimi" in name:  # at tp 2 still what a tile of scales and a lane's four outputs take
        shapes = config.get("text_config", config)
        shapes["moe_intermediate_size"] = 128
        shapes["linear_attn_config"]["num_heads"] = 8
    module = families.family_of(config)
    graph = module.build(module.Config.from_hf(config), rows=8, tp=tp, peers=peers)
    parallel = {"tp": tp, "peers": peers}
    choices = PlanChoices.from_dicts(name="t", sync={"mechanism": mechanism}, parallel=parallel, decode={"context": 512}, **groups)
    return build_plan(graph, choices)


def failed(plan: Plan) -> set[str]:
    checks = check_table(plan)
    assert [c.name for c in checks] == list(table.NAMES)
    return {c.name for c in checks if c.status == "fail"}


@pytest.mark.parametrize("mechanism", ["counter", "tagged", "grid_barrier"])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["kimi_k3_tiny", "llama_tiny"])
def test_what_is_lowered_is_what_was_planned(name: str, tp: int, mechanism: str) -> None:
    assert not failed(plan_of(name, mechanism, tp))


def test_real_peers_and_late_streams() -> None:
    assert not failed(plan_of("llama_tiny", tp=2, peers="real"))
    assert not failed(plan_of("kimi_k3_tiny", "tagged", overlap={"weight_stream": False}))
    assert not failed(plan_of("llama_tiny", tune={"kv_splits": 3}))


def stage(plan: Plan, body: str, **where: Any) -> int:
    return next(i for i, s in enumerate(plan.stages) if s.body == body and all(s.param(k) == v for k, v in where.items()))


def waiting(plan: Plan, t: np.ndarray) -> int:
    return next(i for i in range(len(plan.stages)) if t[i, L.N_WAITS])


def drop_wait(plan: Plan, t: np.ndarray) -> None:
    t[waiting(plan, t), L.N_WAITS] -= 1


def fewer_arrivals(plan: Plan, t: np.ndarray) -> None:
    t[waiting(plan, t), L.WAITS + 1] -= 1


def no_signal(plan: Plan, t: np.ndarray) -> None:
    i = waiting(plan, t)
    t[(t[i, L.WAITS] - first_counter(t)) // L.LINE, L.SIGNAL] = 0


def first_counter(t: np.ndarray) -> int:
    """Address of stage 0's counter: any signalling stage gives it."""
    i = int(np.flatnonzero(t[:, L.SIGNAL])[0])
    return int(t[i, L.SIGNAL]) - i * L.LINE


def wait_for_later(plan: Plan, t: np.ndarray) -> None:
    t[waiting(plan, t), L.WAITS] = first_counter(t) + (len(plan.stages) - 1) * L.LINE


def early_index(plan: Plan, t: np.ndarray) -> None:
    t[stage(plan, "expert_gate_up"), L.INDEX_ARRIVALS] = 0


def early_tiles(plan: Plan, t: np.ndarray) -> None:
    i = next(i for i, s in enumerate(plan.stages) if s.streams and not any(x.index for x in s.streams))
    t[i, L.STREAM] ^= 1


def other_tag(plan: Plan, t: np.ndarray) -> None:
    t[stage(plan, "kda"), L.PARAMS + 15] += 1 << 8


def other_width(plan: Plan, t: np.ndarray) -> None:
    t[stage(plan, "kda"), L.PARAMS + 15] += 1 << 32


def lost_output(plan: Plan, t: np.ndarray) -> None:
    t[stage(plan, "kda"), L.PARAMS + 26] += 16


def eps(plan: Plan, t: np.ndarray) -> None:
    t[stage(plan, "gemv"), L.PARAMS + L.X_EPS] = L.f32_bits(1e-3)


def swapped_gate_and_up(plan: Plan, t: np.ndarray) -> None:
    i, at = stage(plan, "expert_gate_up"), L.PARAMS + 7
    t[i, [at, at + 1, at + 2, at + 3]] = t[i, [at + 2, at + 3, at, at + 1]]


def fewer_experts(plan: Plan, t: np.ndarray) -> None:
    t[stage(plan, "route"), L.PARAMS + 1] -= 1


def no_scale(plan: Plan, t: np.ndarray) -> None:
    t[stage(plan, "attn"), L.PARAMS + 5] = L.f32_bits(1.0)


def state_off_by_a_slot(plan: Plan, t: np.ndarray) -> None:
    t[stage(plan, "kda"), L.PARAMS + 6] += 4096


def other_weight(plan: Plan, t: np.ndarray) -> None:
    t[stage(plan, "gemv"), L.PARTS + L.P_W] += 16


def fewer_units(plan: Plan, t: np.ndarray) -> None:
    t[stage(plan, "gemv"), L.UNITS] -= 1


FAULTS: list[tuple[Callable[[Plan, np.ndarray], None], str]] = [
    *((f, "table.waits") for f in (drop_wait, fewer_arrivals, no_signal, wait_for_later, early_index, early_tiles)),
    *((f, "table.operands") for f in (other_tag, other_width, lost_output)),
    *((f, "table.constants") for f in (eps, swapped_gate_and_up, fewer_experts, no_scale, state_off_by_a_slot, other_weight,
                                       fewer_units)),
]


@pytest.mark.parametrize(("fault", "red"), FAULTS, ids=[f.__name__ for f, _ in FAULTS])
def test_a_wrong_table_is_found(fault: Callable[[Plan, np.ndarray], None], red: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: Plan, addr: lowering.Addresses) -> np.ndarray:
        words = lowering.lower(plan, addr)
        fault(plan, words)
        return words

    monkeypatch.setattr(table, "lower", wrong)
    assert red in failed(plan_of("kimi_k3_tiny"))


def test_a_barrier_that_one_stage_skips_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(plan: Plan, addr: lowering.Addresses) -> np.ndarray:
        words = lowering.lower(plan, addr)
        words[3, L.ALL_SMS] = 0
        return words

    monkeypatch.setattr(table, "lower", wrong)
    assert failed(plan_of("llama_tiny", "grid_barrier")) == {"table.waits"}


def test_tables_beside_the_descriptors_are_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = lowering.rope_table
    monkeypatch.setattr(lowering, "rope_table", lambda dim, theta, *rest: kept(dim, 2 * theta, *rest))
    assert failed(plan_of("llama_tiny")) == {"table.constants"}
    monkeypatch.undo()
    monkeypatch.setattr(lowering._Row, "peers", lambda row, out, c: (row.addr.constant(np.zeros(2, np.int64)),
                                                                     row.addr.constant(np.ones(len(c), np.float32))))
    assert failed(plan_of("llama_tiny", tp=2)) == {"table.constants"}


def test_one_tag_cannot_stand_for_two_writers() -> None:
    from dataclasses import replace

    plan = plan_of("kimi_k3_tiny", "tagged")
    edge = next(e for e in plan.edges if e.mechanism == "tagged" and e.kind == "raw" and e.src > 3)
    assert "table.operands" in failed(replace(plan, edges=(*plan.edges, replace(edge, src=edge.src - 2))))
