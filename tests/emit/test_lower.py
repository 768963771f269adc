"""The descriptor table says what the Plan says: waits, arrivals, tags, addresses, and refuses what no body can do."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest

from optkit.emit import layout as L
from optkit.emit.lower import (
    Addresses,
    StateAddress,
    arrivals,
    bodies_of,
    limits,
    lower,
    rope_table,
    signalling,
    sync_bytes,
    sync_image,
    waits_of,
    x_bytes,
)
from optkit.models import families
from optkit.models.graph import Graph
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices
from optkit.plan.types import Plan, Record


def graph_of(name: str, **kw: object) -> Graph:
    config = families.named_config(name)
    module = families.family_of(config)
    return module.build(module.Config.from_hf(config), rows=8, **kw)


def plan_of(graph: Graph, mechanism: str = "counter", **groups: dict[str, object]) -> Plan:
    return build_plan(
        graph, PlanChoices.from_dicts(name="t", sync={"mechanism": mechanism}, decode={"context": 512}, **groups)
    )


def fake(graph: Graph, plan: Plan) -> Addresses:
    """Every name gets an address of its own, 1 MiB apart."""
    seen: dict[str, int] = {}

    def at(name: str) -> int:
        return seen.setdefault(name, (len(seen) + 1) << 20)

    def weight(name: str) -> int | tuple[int, int]:
        return (at(name), at(name + "/scales")) if graph.weight(name).dtype == "mxfp4" else at(name)

    def state(name: str) -> StateAddress:
        return StateAddress(at(name), 4096, 256, 64, (at(name + "/v"), 4096, 256, 64))

    return Addresses(at, weight, state, lambda a: at(a.tobytes().hex()[:64]), lambda n, _: at(n), 1 << 40, 512)


@pytest.fixture(scope="module")
def k3() -> Graph:
    return graph_of("kimi_k3_tiny")


@pytest.mark.parametrize("mechanism", ["counter", "tagged", "grid_barrier"])
def test_every_ordering_edge_reaches_the_device(k3: Graph, mechanism: str) -> None:
    plan = plan_of(k3, mechanism)
    table = lower(plan, fake(k3, plan))
    assert table.shape == (len(plan.stages), L.DESC_WORDS)
    for i, stage in enumerate(plan.stages):
        row = table[i]
        assert (row[L.BODY], row[L.UNITS], row[L.TASKS]) == (L.BODIES.index(stage.body), stage.units, stage.tasks)
        n = int(row[L.N_WAITS])
        got = {int(row[L.WAITS + 2 * k]): int(row[L.WAITS + 2 * k + 1]) for k in range(n)}
        want = {(1 << 40) + L.SYNC_COUNTERS + s * L.LINE: arrivals(plan, s) for s in waits_of(plan, i)}
        assert got == want
        for e in plan.waits[i]:
            if e.mechanism == "counter":
                assert e.src in waits_of(plan, i)
        for s in waits_of(plan, i):  # whoever is waited for releases arrivals
            assert table[s, L.SIGNAL] == (1 << 40) + L.SYNC_COUNTERS + s * L.LINE


def test_a_barrier_is_met_by_every_sm(k3: Graph) -> None:
    plan = plan_of(k3, "grid_barrier")
    table = lower(plan, fake(k3, plan))
    assert (table[:, L.ALL_SMS] == 1).all()
    assert (table[1:, L.WAITS + 1] == plan.sms).all()


def test_tagged_operands_carry_their_producer(k3: Graph) -> None:
    plan = plan_of(k3, "tagged")
    table = lower(plan, fake(k3, plan))
    checked = 0
    for i, stage in enumerate(plan.stages):
        if stage.body != "gemv":
            continue
        x = stage.param("x")
        for k, name in enumerate(x["inputs"]):
            meta = int(table[i, L.PARAMS + L.X_IN + 2 * k + 1]) & 0xFFFFFFFFFFFFFFFF
            edge = next((e for e in plan.waits[i] if e.buffer == name and e.kind == "raw"), None)
            if edge is not None and plan.buffer[name].layout == "tagged":
                assert meta & L.META_TAGGED
                assert (meta >> 8) & 0xFFFFFF == edge.src + 1
                checked += 1
    assert checked > 20


def test_dropping_an_edge_drops_its_wait(k3: Graph) -> None:
    plan = plan_of(k3)
    edge = next(e for e in plan.edges if e.mechanism == "counter" and e.kind == "raw")
    kept = tuple(e for e in plan.edges if (e.src, e.dst) != (edge.src, edge.dst))
    assert edge.src in waits_of(plan, edge.dst)
    assert edge.src not in waits_of(replace(plan, edges=kept), edge.dst)


def test_weight_stream_off_makes_the_producer_wait(k3: Graph) -> None:
    ahead, late = plan_of(k3, "tagged"), plan_of(k3, "tagged", overlap={"weight_stream": False})
    a, b = lower(ahead, fake(k3, ahead)), lower(late, fake(k3, late))
    static = [i for i, s in enumerate(late.stages) if s.streams and not any(x.index for x in s.streams)]
    assert all(b[i, L.STREAM] == 1 for i in static) and all(a[i, L.STREAM] == 0 for i in static)
    assert all(waits_of(late, i) for i in static if late.waits[i])  # tagged producers are counted for it


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads_per_group": 17}, "at most 16"), ({"dqk": 40}, "multiple of 32"), ({"dv": 96}, "multiple of 64"),
     ({"dv": 576}, "at most 512")],
)
def test_impossible_attention_is_refused(change: dict[str, int], message: str) -> None:
    graph = graph_of("llama_tiny")
    plan = plan_of(graph)
    stages = tuple(
        replace(s, params=tuple({**dict(s.params), **change}.items())) if s.body == "attn" else s for s in plan.stages
    )
    with pytest.raises(ValueError, match=message):
        lower(replace(plan, stages=stages), fake(graph, plan))


def test_limits_of_the_bodies_are_known_before_a_launch(k3: Graph) -> None:
    """Two ranks leave tiny K3 a projection of 2 rows and experts 32 wide: its stores and bulk copies would be misaligned."""
    assert limits(plan_of(k3)) == []
    found = limits(plan_of(graph_of("kimi_k3_tiny", tp=2, peers="emulated"), parallel={"tp": 2}))
    assert any("L0.x_a.proj and 5 more: output rows of b is 2: expected a multiple of 4" in line for line in found), found
    assert any("L1.ea and 15 more: expert width is 32: expected a multiple of 64" in line for line in found), found


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("k", 72, r"columns of \S+ is 72: expected a multiple of 32"), ("m", 6, "is 6: expected a multiple of 4"),
     ("x_offset", 4, "x_offset of .* is 4: expected a multiple of 8")],
)
def test_a_projection_that_no_tile_fits_is_refused(key: str, value: int, message: str) -> None:
    graph = graph_of("llama_tiny")
    plan = plan_of(graph)
    at = next(i for i, s in enumerate(plan.stages) if s.body == "gemv")
    stage = plan.stages[at]
    parts = stage.param("parts")
    params = {**dict(stage.params), "parts": (Record(parts[0], **{key: value}), *parts[1:])}
    broken = replace(plan, stages=(*plan.stages[:at], replace(stage, params=tuple(params.items())), *plan.stages[at + 1 :]))
    with pytest.raises(ValueError, match=message):
        lower(broken, fake(graph, plan))
    assert len(limits(broken)) == 1


def test_grouped_query_heads_wider_than_the_accumulators_are_refused() -> None:
    graph = graph_of("llama_tiny")
    plan = plan_of(graph)
    wide = tuple(replace(s, params=tuple({**dict(s.params), "dv": 576}.items())) if s.body == "attn" else s for s in plan.stages)
    with pytest.raises(ValueError, match="at most 512"):
        lower(replace(plan, stages=wide), fake(graph, plan))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama_tiny", {"intermediate_size": 200}, "is 200: expected a multiple of 32"),
        ("llama_tiny", {"hidden_size": 300}, "is 300: expected a multiple of"),
        ("llama_tiny", {"vocab_size": 501}, "output rows of .* is 501: expected a multiple of 4"),
        ("kimi_k3_tiny", {"num_experts_per_token": 6}, "top-6"),
        ("kimi_k3_tiny", {"moe_intermediate_size": 96}, "expert width is 96: expected a multiple of 64"),
        ("kimi_k3_tiny", {"routed_expert_hidden_size": 96}, "latent width is 96: expected a multiple of 64"),
    ],
)
def test_sizes_that_vectors_and_tiles_cannot_cut_are_refused(name: str, change: dict[str, int], message: str) -> None:
    """The kernel would drop the remainder or copy from an address between two 16-byte words."""
    config = copy.deepcopy(families.named_config(name))
    config.get("text_config", config).update(change)
    module = families.family_of(config)
    graph = module.build(module.Config.from_hf(config), rows=8)
    plan = plan_of(graph)
    with pytest.raises(ValueError, match=message):
        lower(plan, fake(graph, plan))


def test_real_peers_are_refused_in_words() -> None:
    graph = graph_of("llama_tiny", tp=2, peers="real")
    plan = plan_of(graph, parallel={"tp": 2, "peers": "real"})
    with pytest.raises(ValueError, match=r"parallel\.peers = real"):
        lower(plan, fake(graph, plan))


def test_counters_follow_the_epoch_past_two_to_the_32(k3: Graph) -> None:
    """Launch n adds `arrivals` to a counter; the word a wait compares with is the low half of epoch x arrivals."""
    plan = plan_of(k3)
    epoch = 2**32 + 5
    image = sync_image(plan, epoch)
    assert len(image) == sync_bytes(plan)
    assert image[L.SYNC_ENTERED : L.SYNC_ENTERED + 8].view(np.uint64)[0] == epoch * plan.sms
    signals = signalling(plan)
    for i in range(len(plan.stages)):
        at = L.SYNC_COUNTERS + i * L.LINE
        want = (epoch & 0xFFFFFFFF) * arrivals(plan, i) & 0xFFFFFFFF if i in signals else 0
        assert image[at : at + 4].view(np.uint32)[0] == want
    assert not sync_image(plan, 0).any()


def test_rotary_table_matches_the_reference_angles() -> None:
    t = rope_table(64, 10000.0, (), 9)
    assert t.shape == (9, 32, 2) and t.dtype == np.float32
    assert np.allclose(t[8, 5], [np.cos(8 * 10000.0 ** (-10 / 64)), np.sin(8 * 10000.0 ** (-10 / 64))], atol=1e-7)


def test_kernel_holds_only_the_bodies_of_its_plan(k3: Graph) -> None:
    assert "rope_insert" not in bodies_of(plan_of(k3))
    assert "kda" not in bodies_of(plan_of(graph_of("llama_tiny")))
    assert x_bytes(plan_of(k3)) % 128 == 0
