"""What the planner makes of the tiny models: stages, parts, streams and accesses as docs/contracts.md says."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest
from plan_cases import GB300, check_order, choices, edges_between, graph, llama, names, stage, tiny, tiny_with

from optkit.execute.contents import contents
from optkit.models.emulation import emulation_coefficients
from optkit.models.graph import Builder, Graph
from optkit.plan.bodies import BODIES, Shape
from optkit.plan.build import build_plan
from optkit.plan.errors import PlanError
from optkit.plan.fuse import Proto
from optkit.plan.order import sort
from optkit.plan.types import Access

ALL = [tiny, llama]
H = 256
PART_KEYS = {
    *("op", "weight", "weight2", "m", "k", "first", "count", "groups", "x_stride", "x_offset", "epilogue", "out"),
    *("dtype", "act", "beta", "linear_beta", "add", "gate", "coeffs"),
}
X_KEYS = {"prologue", "width", "inputs", "norm", "eps", "mix_norm", "mix_proj", "mix_eps", "stats"}


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mechanism", ["counter", "tagged", "grid_barrier"])
def test_every_op_once_and_every_read_ordered(make, tp, mechanism):
    plan = make(tp, mechanism)
    ops = Counter(op for s in plan.stages for op in s.ops)
    g = graph("kimi_k3_tiny" if make is tiny else "llama_tiny", tp)
    assert set(ops) == {op.name for op in g.ops}
    shared = {op for op, n in ops.items() if n > 1}  # a norm recomputed by several stages
    assert all(g.op(op).kind in ("rmsnorm", "attnres") for op in shared)
    assert {s.body for s in plan.stages} <= set(BODIES)
    check_order(plan)


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("tp", [1, 2])
def test_every_stage_finds_its_values(make, tp):
    """Each buffer still holds the value that the ops ask for when the stage reads it, however often it is reused."""
    g, plan = graph("kimi_k3_tiny" if make is tiny else "llama_tiny", tp), make(tp)
    values = {v.name for v in g.values}
    for s, held in zip(plan.stages, contents(plan, g), strict=True):
        ops = [g.op(name) for name in s.ops]
        asked = {v for op in ops for v in op.inputs if v in values} - {v for op in ops for v in op.outputs}
        found = {source.value for source in held.reads.values()}
        assert asked <= found, (s.name, asked - found)


def test_names_are_unique_and_sms_rotate():
    plan = tiny()
    assert len(plan.index) == len(plan.stages)
    small = [s.first_sm for s in plan.stages if s.tasks < 64]
    assert len(set(small)) > len(small) // 2


def test_units_of_all_tasks_cover_every_unit_once():
    for s in tiny(2).stages:
        held = sorted(u for t in range(s.tasks) for u in s.units_of(t))
        assert held == list(range(s.units)) and 1 <= s.tasks <= tiny(2).sms


def test_front_stage_parts():
    plan, g = tiny(), graph("kimi_k3_tiny")
    front = stage(plan, "L1.x_m.proj")
    router, latent, shared = front.param("parts")
    for p in (router, latent, shared):
        assert set(p) == PART_KEYS
    x = front.param("x")
    assert set(x) == X_KEYS and x["prologue"] == "mixnorm" and x["width"] == H
    assert (router["epilogue"], router["dtype"], router["m"]) == ("store", "f32", 32)
    assert (latent["epilogue"], latent["dtype"]) == ("store", "bf16")
    assert (shared["epilogue"], shared["act"], shared["beta"], shared["linear_beta"]) == ("act", "situ", 4.0, 25.0)
    assert shared["weight"].endswith("shared_experts.gate_proj.weight")
    assert shared["weight2"].endswith("shared_experts.up_proj.weight")
    assert [p["count"] for p in (router, latent, shared)] == [2, ceil(latent["m"] / 16), ceil(shared["m"] / 8)]
    assert [p["first"] for p in (router, latent, shared)] == [0, 2, 2 + latent["count"]]
    assert front.units == sum(p["count"] for p in (router, latent, shared))
    assert shared["m"] == g.weight(shared["weight"]).shape[0]
    streams = front.streams
    assert [s.weight for s in streams] == [p["weight"] for p in (router, latent, shared)]
    assert streams[2].weight2 == shared["weight2"] and streams[0].tile_bytes == 16 * H * 2 and streams[0].tiles == 1


def test_attention_input_parts():
    plan = tiny()
    assert [p["op"] for p in stage(plan, "L1.x_a.proj").param("parts")] == [
        f"L1.{x}" for x in ("q_raw", "k_raw", "v_raw", "g", "fa", "b")
    ]
    assert [p["op"] for p in stage(plan, "L3.x_a.proj").param("parts")] == ["L3.qa", "L3.kva", "L3.g"]
    assert [p["op"] for p in stage(llama(), "L0.x_a.proj").param("parts")] == ["L0.q", "L0.k", "L0.v"]


def test_grouped_projections_and_value_gate():
    plan = tiny()
    (ql,) = stage(plan, "L3.ql").param("parts")
    assert (ql["groups"], ql["x_stride"], ql["x_offset"], ql["k"]) == (4, 192, 0, 128)
    (ov,) = stage(plan, "L3.ov").param("parts")
    assert (ov["epilogue"], ov["gate"], ov["out"], ov["k"]) == ("gate", "g@1", "og@1", 512)


def test_prefix_is_never_updated_in_place():
    plan = tiny()
    for s in plan.stages:
        if s.body == "gemv":
            for p in s.param("parts"):
                assert p["out"] not in p["add"], s.name


def test_saved_rows_keep_their_buffer():
    """A saved row (read by every later mix) may not be overwritten before the tail reads it."""
    plan = tiny()
    tail = plan.stages[-1].param("x")["inputs"]
    assert len(tail) == 4  # layers 0, 4, 8 saved their prefix; and the last prefix
    for row in tail[:3]:
        writes = [i for i, s in enumerate(plan.stages) if any(a.buffer == row for a in s.writes)]
        reads = [i for i, s in enumerate(plan.stages) if any(a.buffer == row for a in s.reads)]
        assert max(reads) == len(plan.stages) - 1
        assert not [w for w in writes if w > min(r for r in reads if r > writes[-1])]


def test_routed_experts():
    plan = tiny()
    up, down, route = (stage(plan, f"L1.{n}") for n in ("ea", "y", "route"))
    assert up.assign == "cyclic" and up.units == 8 * 4 * ceil(up.param("inter") / 8)
    assert up.streams[0].index == "L1.uniq" and up.streams[0].weight2.endswith("w3")
    assert up.writes[0].by == "L1.uniq"
    assert down.streams[0].repeat == 32 and up.param("stream") == down.param("stream") == "after_wait"
    uniq = plan.buffer["L1.uniq"]
    assert (uniq.rows, uniq.width, uniq.dtype) == (1, 1 + 32 * 9, "i32")
    sets = {(s.value, s.producer): s for s in plan.index_sets}
    assert sets["L1.uniq", "L1.route"].bound == 32 and "partition" in sets["L1.uniq", "L1.route"].facts
    assert "injective" in sets["slot_mapping", "contract:vllm"].facts
    assert "injective" in sets["state_slot", "contract:vllm"].facts
    assert route.tasks == 1


def test_attention_splits():
    assert stage(tiny_with(tune__kv_splits=1), "L3.ol").param("out") == "ol@1"
    plan = tiny_with(tune__kv_splits=3)
    attn, combine = stage(plan, "L3.ol"), stage(plan, "L3.ol.combine")
    assert attn.units == 8 * attn.param("groups") * 3
    assert combine.param("partial") == attn.param("out") == "ol.part@1" and combine.param("out") == "ol@1"
    assert plan.buffer["ol.part@1"].dtype == "f32"


def test_exchanges_become_mailboxes():
    plan = tiny(2)
    ya, reduce = stage(plan, "L1.ya"), stage(plan, "P.1a")
    (part,) = ya.param("parts")
    box = plan.buffer[part["out"]]
    op = graph("kimi_k3_tiny", 2).op("L1.ra")
    assert part["epilogue"] == "mailbox"
    assert part["coeffs"] == emulation_coefficients(op.attr("seed"), 2, 0) and part["coeffs"][0] == 1.0
    assert (box.klass, box.ranks, box.dtype, box.layout, box.copies) == ("mailbox", 2, "f32", "tagged", 1)
    assert (
        reduce.param("mode") == "reduce" and reduce.param("inputs")[0] == box.name and len(reduce.param("inputs")) == 2
    )
    assert [e.mechanism for e in edges_between(plan, "L1.ya", "P.1a")] == ["peer_mailbox"]
    assert stage(plan, "L1.z_all").param("mode") == "gather"
    assert not [b for b in tiny().buffers if b.klass == "mailbox"]


def test_real_peers_buffer_mailboxes_by_epoch_and_never_use_a_grid_barrier():
    g = graph("kimi_k3_tiny", 2, peers="real")
    plan = build_plan(g, choices(mechanism="grid_barrier", parallel={"tp": 2, "peers": "real"}))
    boxes = [b for b in plan.buffers if b.klass == "mailbox"]
    assert boxes and all(b.copies == 2 and b.layout == "tagged" for b in boxes)
    assert {e.mechanism for e in plan.edges} == {"grid_barrier", "peer_mailbox"}
    assert stage(plan, "L1.ya").param("parts")[0]["coeffs"] == (1.0, 1.0)


def test_pipeline_stage_takes_and_gives_rows():
    first = build_plan(graph("kimi_k3_tiny", layers=(0, 5)), choices(mechanism="tagged", parallel={"pp": 2}))
    g = graph("kimi_k3_tiny", layers=(5, 9))
    second = build_plan(g, choices(mechanism="tagged", parallel={"pp": 2, "stage": 1}))
    given = [first.buffer[v] for v in graph("kimi_k3_tiny", layers=(0, 5)).outputs]
    assert len(given) == 3 and all(
        b.layout == "plain" for b in given
    )  # the prefix and two saved rows, for vLLM to ship
    taken = [second.buffer[v] for v in g.inputs if v.startswith("in.")]
    assert len(taken) == 3 and all((b.klass, b.width) == ("input", H) for b in taken)
    check_order(first)
    check_order(second)


def test_logits_stay_plain_for_the_sampler():
    assert tiny(1, "tagged").buffer["logits"].layout == "plain"


def test_unknown_op_is_named():
    b = Builder()
    x = b.add("x", "embed", ("token",), (("x", 64, "bf16"),), weights={"w": b.weight("e", (8, 64))}, vocab_start=0)
    b.add("strange", "sparse_gather", x, (("y", 64, "bf16"),))
    g = b.build(name="g", family="f", rows=8, layers=(0, 1), inputs=("token",), outputs=("y",))
    with pytest.raises(PlanError, match="strange: no stage body computes op kind 'sparse_gather'"):
        build_plan(g, choices())


def test_more_sms_change_the_placement_only():
    plan = build_plan(graph("kimi_k3_tiny"), choices(hardware=GB300))
    assert plan.sms == 152 and names(plan) == names(tiny())
    assert max(s.tasks for s in plan.stages) == 152


def chain(b: Builder, name: str, x: str, n: int = 64, layer: int = 0) -> str:
    w = b.weight(f"w.{name}", (n, n))
    return b.add(name, "linear", (x,), ((name, n, "bf16"),), weights={"w": w}, layer=layer)[0]


def start(b: Builder) -> str:
    return b.add(
        "embed", "embed", ("token",), (("x", 64, "bf16"),), weights={"w": b.weight("e", (8, 64))}, vocab_start=0
    )[0]


def finish(b: Builder, out: str, layers: int) -> Graph:
    return b.build(name="g", family="f", rows=8, layers=(0, layers), inputs=("token",), outputs=(out,))


def test_a_value_read_far_ahead_keeps_its_buffer():
    b = Builder()
    p = start(b)
    for layer in range(4):
        p = chain(b, f"L{layer}.v", p, layer=layer)
    out = b.add("sum", "add", (p, "L0.v", "L1.v"), (("out", 64, "bf16"),), layer=4)[0]
    g = finish(b, out, 4)
    plan = build_plan(g, choices())
    outs = [s.param("parts")[0]["out"] for s in plan.stages if s.body == "gemv"]
    assert outs == ["v@0", "v@1", "v@2", "v@3"]  # not @0 and @1 again: the sum still needs them
    assert stage(plan, "sum").param("inputs") == ("v@3", "v@0", "v@1")
    check_order(plan)


def test_a_sum_of_two_projections_of_one_input():
    """The one that sums waits for the other, so they cannot share a stage."""
    b = Builder()
    p = start(b)
    first, second = chain(b, "L0.first", p), chain(b, "L0.second", p)
    g = finish(b, b.add("sum", "add", (p, first, second), (("out", 64, "bf16"),))[0], 1)
    plan = build_plan(g, choices())
    assert names(plan) == ["embed", "L0.first", "L0.second"]
    (part,) = stage(plan, "L0.second").param("parts")
    assert part["epilogue"] == "add" and part["add"] == ("x@0", "first@0")
    check_order(plan)


def test_the_sum_goes_to_a_projection_that_nobody_else_reads():
    b = Builder()
    p = start(b)
    first = chain(b, "L0.first", p)
    second = chain(b, "L0.second", first)
    third = chain(b, "L0.third", second)
    out = b.add("sum", "add", (p, second, third), (("s", 64, "bf16"),))[0]
    out = b.add("again", "add", (out, first, third), (("out", 64, "bf16"),))[0]
    plan = build_plan(finish(b, out, 1), choices())
    assert [s.name for s in plan.stages if s.body == "ew"] == ["sum", "again"]  # third is read twice, second by third
    b = Builder()
    p = start(b)
    first, second = chain(b, "L0.first", p), chain(b, "L0.second", p)
    third = chain(b, "L0.third", second)
    out = b.add("sum", "add", (p, first, second), (("s", 64, "bf16"),))[0]
    out = b.add("again", "add", (out, third), (("out", 64, "bf16"),))[0]
    plan = build_plan(finish(b, out, 1), choices())
    (part,) = stage(plan, "L0.first").param("parts")
    assert part["add"] == ("x@0", "second@0")


def test_a_partial_with_another_reader_cannot_be_exchanged():
    b = Builder()
    partial = chain(b, "L0.y", start(b))
    total = b.add("L0.r", "all_reduce", (partial,), (("L0.r", 64, "bf16"),), layer=0, ranks=2, rank=0, seed=1)[0]
    out = b.add("sum", "add", (total, partial), (("out", 64, "bf16"),))[0]
    with pytest.raises(PlanError, match="L0.r: its input L0.y has another reader or leaves the graph"):
        build_plan(finish(b, out, 1), choices(2))


def test_a_value_with_another_reader_is_stored():
    """Its product with the gate cannot replace it."""
    b = Builder()
    x = start(b)
    v, g = chain(b, "L0.v", x), chain(b, "L0.g", x)
    og = b.add("L0.og", "sigmoid_mul", (v, g), (("L0.og", 64, "bf16"),), layer=0)[0]
    out = b.add("sum", "add", (v, og), (("out", 64, "bf16"),))[0]
    plan = build_plan(finish(b, out, 1), choices())
    assert [s.param("mode") for s in plan.stages if s.body == "ew"] == ["sigmoid_mul", "add"]
    assert [p["epilogue"] for p in stage(plan, "x.proj").param("parts")] == ["store", "store"]


def test_stages_on_one_state_keep_the_order_of_the_graph():
    """Even where the earlier one becomes ready later."""
    late = Proto("late", "ew", (), 0, {}, (9.0, 0.0))
    insert = Proto("insert", "mla_insert", (), 0, {}, (1.0, 0.0))
    attend = Proto("attend", "attn", (), 0, {}, (2.0, 0.0))
    shapes = [
        Shape(1, writes=(Access("kva"),)),
        Shape(1, reads=(Access("kva"),), writes=(Access("kv"),)),
        Shape(1, reads=(Access("kv"),), writes=(Access("o"),)),
    ]
    assert sort([late, insert, attend], shapes, frozenset({"kv"}), choices()) == [0, 1, 2]
