"""Cost model against bytes counted by hand from the published shapes of one TP8 rank of Kimi K3."""

from __future__ import annotations

import pytest
from plan_cases import GB300, choices, graph, llama, stage, tiny, tiny_with

from optkit.plan.build import build_plan
from optkit.plan.cost import Load, step_cost, total
from optkit.plan.timeline import simulate
from optkit.plan.types import Plan

H, D, LAT, E, K, INTER = 7168, 12288, 3584, 896, 16, 3072
TP = 8
MB = 1e6


@pytest.fixture(scope="module")
def full() -> Plan:
    g = graph("kimi_k3", TP)
    return build_plan(g, choices(context=8192, parallel={"tp": TP}, hardware=GB300, mechanism="tagged"))


def moe_bytes(batch: int) -> float:
    hit = E * (1 - (1 - K / E) ** batch)
    static = 2 * (E * H + 2 * LAT * H + 3 * 2 * INTER * H) / TP
    return static + hit * 3 * INTER * LAT * (0.5 + 1 / 32) / TP


def kda_bytes(batch: int) -> float:
    weights = 2 * ((4 * D * H + H * D + D * 128 + 96 * H) / TP + 128 * H) + 4 * 13 * D / TP
    return weights + batch * (2 * 4 * 96 * 128 * 128 + 2 * 2 * 3 * 3 * D) / TP


def mla_bytes(batch: int, context: int) -> float:
    weights = 2 * ((D * H + 18432 * 1536 + 24576 * 512 + H * D) / TP + 2112 * H)
    return weights + batch * context * 576 * 2  # every rank reads the whole bf16 latent


@pytest.mark.parametrize(
    ("batch", "kda_mb", "mla_mb"), [(1, 196.8, 171.9), (2, 232.9, 211.0), (4, 303.2, 287.6), (8, 436.9, 433.6)]
)
def test_bytes_of_a_layer(full, batch, kda_mb, mla_mb):
    """Within 0.1 % of the sum of shapes, and of the published table (whose KV is fp8: 576 bytes a row less here)."""
    layers = step_cost(full, Load(batch, 8192)).by_layer()
    assert layers[5] == pytest.approx(kda_bytes(batch) + moe_bytes(batch), rel=1e-3)
    assert layers[7] == pytest.approx(mla_bytes(batch, 8192) + moe_bytes(batch), rel=1e-3)
    assert layers[5] / MB == pytest.approx(kda_mb, rel=2e-3)
    assert layers[7] / MB - batch * 8192 * 576 / MB == pytest.approx(mla_mb, rel=2e-3)


def test_bytes_and_flops_of_a_step(full):
    cost = step_cost(full, Load(1, 8192))
    fp8_saves = 24 * 8192 * 576
    assert (cost.bytes - fp8_saves) / 1e9 == pytest.approx(18.10, rel=5e-3)
    assert cost.by_layer()[93] / MB == pytest.approx(2 * 163840 * H / TP / MB, rel=1e-3)
    assert cost.roofline_us == pytest.approx(cost.bytes / 8e6, rel=1e-9)  # memory bound at batch 1
    per_token = cost.flops * TP / 1e9  # 208 GF of the model, attention over 8K tokens, and what every rank repeats
    assert 208 + 24 * 8 * 0.214 < per_token < 1.05 * (208 + 24 * 8 * 0.214)


def test_a_weight_counts_once():
    """Recomputing a norm in several stages reads its weight from DRAM once; a step reads every matrix once."""
    packed = step_cost(tiny(), Load(1, 256)).bytes
    assert step_cost(tiny_with(fusion__packed_projections=False), Load(1, 256)).bytes == packed
    weights = sum(w.nbytes for w in graph("llama_tiny").weights)
    table = graph("llama_tiny").weight("model.embed_tokens.weight")
    cost = total(step_cost(llama(), Load(1, 256)).stages)
    tied = not any(w.name == "lm_head.weight" for w in graph("llama_tiny").weights)
    row = 2 * table.shape[1]
    assert cost.weights == weights + row - (0 if tied else table.nbytes)


def test_given_experts_and_kv_scale():
    one = total(step_cost(tiny(), Load(2, 256, distinct_experts=4)).stages)
    two = total(step_cost(tiny(), Load(2, 512, distinct_experts=8)).stages)
    assert two.experts == 2 * one.experts
    kv_rows = 3 * 2 * 576 * 2  # layers, requests, columns, bytes
    assert two.kv - one.kv == 256 * kv_rows
    with pytest.raises(ValueError, match="batch = 9: expected 1 .. 8"):
        step_cost(tiny(), Load(9))


def test_timeline_is_deterministic_and_consistent():
    plan = tiny()
    a, b = simulate(plan, Load(4, 256)), simulate(plan, Load(4, 256))
    assert a == b
    assert a.step_us >= step_cost(plan, Load(4, 256)).roofline_us
    last: dict[int, float] = {}
    for e in a.events:
        assert e.end_us >= e.start_us >= last.get(e.sm, 0.0) - 1e-3  # one thing at a time on every SM
        last[e.sm] = e.end_us
    assert {e.what for e in a.events} == {s.body for s in plan.stages} | {"wait"}
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    for e in a.events:
        if e.what != "wait":
            ends[e.stage] = max(ends.get(e.stage, 0.0), e.end_us)
            starts[e.stage] = min(starts.get(e.stage, 1e9), e.start_us)
    for edge in plan.edges:
        assert starts[edge.dst] >= ends[edge.src] + (1.4 if edge.mechanism == "counter" else 0.0) - 2e-3


def test_timeline_sees_the_choices():
    base = simulate(tiny(), Load(1, 256)).step_us
    slower = {
        "overlap__weight_stream": False,
        "fusion__norm_projection": False,
        "fusion__packed_projections": False,
        "fusion__residual_add": False,
        "fusion__gate_up_act": False,
    }
    for key, value in slower.items():
        assert simulate(tiny_with(**{key: value}), Load(1, 256)).step_us > base, key
    assert simulate(tiny(1, "tagged"), Load(1, 256)).step_us < base  # a tagged hop is cheaper than a counter's


def test_a_deeper_ring_hides_more():
    """Two slots: hardly anything can be fetched before a wait ends."""
    g, c = graph("kimi_k3", TP, (90, 93)), choices(parallel={"tp": TP})
    times = [simulate(build_plan(g, c.but(overlap__ring_slots=n)), Load(1, 256)).step_us for n in (2, 3, 5)]
    assert times[0] > times[1] > times[2]


def test_few_requests_leave_row_tasks_idle():
    plan = tiny()
    kda = plan.index["L1.og"]
    busy = [sum(e.stage == kda and e.what == "kda" for e in simulate(plan, Load(b, 256)).events) for b in (1, 4)]
    assert busy == [stage(plan, "L1.og").tasks // 8, stage(plan, "L1.og").tasks // 2]
