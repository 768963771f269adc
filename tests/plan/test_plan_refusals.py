"""Choices that cannot work are refused in words, all at once: key, what was asked, what is there."""

from __future__ import annotations

from enum import Enum

import pytest
from plan_cases import choices, graph, tiny

from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices
from optkit.plan.errors import PlanError


def problems(**groups) -> tuple[str, ...]:
    with pytest.raises(PlanError) as e:
        PlanChoices.from_dicts(**groups)
    return e.value.problems


def refused(g, c) -> tuple[str, ...]:
    with pytest.raises(PlanError) as e:
        build_plan(g, c)
    return e.value.problems


def test_every_mistake_is_listed():
    got = problems(
        fusion={"gate_up_akt": True, "value_gate": "yes"},
        overlap={"ring_slots": "many"},
        parallell={"tp": 2},
        tune={"sms": True},
    )
    assert got == (
        "fusion.gate_up_akt: unknown key, did you mean 'gate_up_act'?",
        "fusion.value_gate = 'yes': expected bool",
        "overlap.ring_slots = 'many': expected int",
        "parallell: unknown group of plan choices, did you mean 'parallel'?",
        "tune.sms = True: expected int",
    )


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        ({"decode": {"batch": [0]}}, "decode.batch = [0]: expected at least one batch size, each at least 1"),
        (
            {"decode": {"batch": 9}},
            "decode.batch = [9]: 9 x decode.rows_per_request 1 rows asked, the kernel's token class has 8",
        ),
        ({"decode": {"batch": [4], "rows_per_request": 4}}, "4 x decode.rows_per_request 4 rows asked"),
        ({"sync": {"mechanism": "taged"}}, "expected one of counter, tagged, grid_barrier, did you mean 'tagged'?"),
        (
            {"sync": {"overrides": {"q@0": "grid_barrier"}}},
            "sync.overrides.q@0 = 'grid_barrier': expected counter or tagged",
        ),
        ({"parallel": {"tp": 2, "rank": 2}}, "parallel.rank = 2: expected 0 .. 1"),
        ({"parallel": {"pp": 2, "stage": 2}}, "parallel.stage = 2: expected 0 .. 1"),
        ({"parallel": {"peers": "none"}}, "parallel.peers = 'none': expected emulated or real"),
        ({"tune": {"sms": 133}}, "tune.sms = 133: h200 has 132"),
        ({"tune": {"kv_splits": 0}}, "tune.kv_splits = 0: expected at least 1"),
        ({"overlap": {"ring_slots": 1}}, "overlap.ring_slots = 1: expected at least 2"),
        ({"cache": {"kv_dtype": "fp8"}}, "cache.kv_dtype, cache.recurrent_dtype = fp8, f32: expected bf16, f32"),
    ],
)
def test_values_out_of_range(groups, line):
    (got,) = problems(**groups)
    assert line in got


def test_a_recipe_group_passes_as_it_is():
    class Mechanism(str, Enum):
        tagged = "tagged"

    c = PlanChoices.from_dicts(
        hardware={
            "name": "h200",
            "arch": "sm_90a",
            "sms": 132,
            "smem_kib": 227,
            "registers": 65536,
            "memory_gb": 141,
            "read_gbs": 4530,
            "l2_mb": 50,
            "peer_gbs": 450,
            "max_gpus_per_node": 8,
        },
        decode={"batch": [1, 4], "context": 256, "rows_per_request": 2},
        tune={"sms": None, "kv_splits": None},
        overlap={"ring_slots": None},
        sync={"mechanism": Mechanism.tagged, "overrides": {"P@*": Mechanism.tagged}},
    )
    assert c.sync.mechanism == "tagged" and type(c.sync.mechanism) is str and c.largest_batch == 4
    assert c.hardware.memory == 141_000_000_000 and c.hardware.smem == 232448


def test_context_too_long_for_the_memory():
    (line,) = refused(graph("kimi_k3_tiny"), choices(context=100_000_000))
    assert "needed per GPU, 141 there on h200" in line and "decode.context = 100000000" in line


def test_memory_by_kind():
    """Whole blocks of keys and values for the largest batch; a padding slot for recurrent state."""
    blocks = 8 * -(-250 // 16)
    heads = graph("llama_tiny").state("L0.kv").shape
    layers = graph("llama_tiny").layers[1]
    got = dict(build_plan(graph("llama_tiny"), choices(context=250)).memory)
    assert got["kv"] == layers * blocks * 16 * 2 * heads[0] * heads[1] * 2 and got["state"] == 0
    got = dict(tiny().memory)
    d = 4 * 128
    assert got["kv"] == 3 * 8 * 256 * 576 * 2
    assert got["state"] == 9 * 6 * (4 * d * 128 + 2 * 3 * 3 * d)
    assert got["weights"] == sum(w.nbytes for w in graph("kimi_k3_tiny").weights)
    assert got["total"] == got["weights"] + got["kv"] + got["state"] + got["workspace"]
    pool = choices(cache={"blocks": 1000, "slots": 20})
    got = dict(build_plan(graph("kimi_k3_tiny"), pool).memory)
    assert got["kv"] == 3 * 1000 * 16 * 576 * 2 and got["state"] == 20 * 6 * (4 * d * 128 + 2 * 3 * 3 * d)


def test_shared_memory_says_asked_and_there():
    small = {"name": "small", "smem_kib": 64}
    (line,) = refused(graph("kimi_k3_tiny"), choices(hardware=small))
    assert line.startswith("shared memory: stage ") and "65536 there on small" in line and "bytes asked" in line


def test_ring_gets_what_is_left():
    plan = tiny()
    largest = max(s.smem for s in plan.stages)
    fixed = 227 * 1024 - largest - plan.ring_slots * plan.ring_slot_bytes
    assert 0 < fixed < plan.ring_slot_bytes + 16 * 1024 and plan.ring_slots >= 2
    (line,) = refused(graph("kimi_k3_tiny"), choices(overlap={"ring_slots": plan.ring_slots + 1}))
    assert f"overlap.ring_slots = {plan.ring_slots + 1}:" in line and f"at most {plan.ring_slots}" in line
    assert build_plan(graph("kimi_k3_tiny"), choices(overlap={"ring_slots": 2})).ring_slots == 2


def test_registers():
    (line,) = refused(graph("kimi_k3_tiny"), choices(hardware={"name": "few", "registers": 32768}))
    assert line == "registers: body gemv declares 224 a thread x 288 threads = 64512 asked, 32768 there on few"


def test_several_budgets_at_once():
    got = refused(
        graph("kimi_k3_tiny"), choices(hardware={"name": "x", "registers": 1024, "smem_kib": 32, "memory_gb": 0.01})
    )
    assert [line.split(":")[0] for line in got] == ["shared memory", "registers", "memory"]


def test_the_graph_must_match():
    assert refused(graph("kimi_k3_tiny", 2), choices(4)) == ("parallel.tp = 4: the graph was built for 2",)
    assert "parallel.peers = real" in refused(graph("kimi_k3_tiny", 2), choices(parallel={"tp": 2, "peers": "real"}))[0]
