"""Every fusion and overlap changes the Plan in its own way, alone and in any combination."""

from __future__ import annotations

import pytest
from plan_cases import check_order, choices, graph, names, stage, tiny, tiny_with

from optkit.models.graph import Builder, Graph
from optkit.plan.build import build_plan
from optkit.plan.choices import FUSIONS, OVERLAPS
from optkit.plan.types import Plan


def without(switch: str, tp: int = 1) -> Plan:
    group = "fusion" if switch in FUSIONS else "overlap"
    return tiny_with(tp=tp, **{f"{group}__{switch}": False})


def bodies(plan: Plan) -> dict[str, int]:
    out: dict[str, int] = {}
    for s in plan.stages:
        out[s.body] = out.get(s.body, 0) + 1
    return out


def epilogues(plan: Plan) -> set[str]:
    return {p["epilogue"] for s in plan.stages if s.body == "gemv" for p in s.param("parts")}


def test_norm_projection():
    off = without("norm_projection")
    assert "mixnorm" not in bodies(tiny()) and stage(tiny(), "L1.x_m.proj").param("x")["prologue"] == "mixnorm"
    own = stage(off, "L1.x_m")
    assert own.body == "mixnorm" and own.units == 8 and own.param("x")["prologue"] == "mixnorm"
    x = stage(off, "L1.x_m.proj").param("x")
    assert x["prologue"] == "copy" and x["inputs"] == (own.param("out"),)
    assert all(s.param("x")["prologue"] == "copy" for s in off.stages if s.body == "gemv")


def test_packed_projections():
    off = without("packed_projections")
    assert all(len(s.param("parts")) == 1 for s in off.stages if s.body == "gemv")
    assert {"L1.logits", "L1.z", "L1.sgate"} <= set(names(off)) and "L1.x_m.proj" not in names(off)
    assert len(stage(tiny(), "L1.x_a.proj").param("parts")) == 6
    # each projection recomputes the norm: the same prologue, the same statistics
    assert stage(off, "L1.logits").param("x") == stage(off, "L1.z").param("x")


def test_gate_up_act():
    off = without("gate_up_act")
    assert "act" in epilogues(tiny()) and "act" not in epilogues(off)
    act = stage(off, "L1.sact")
    assert (act.body, act.param("mode"), act.param("act"), act.param("beta")) == ("ew", "act_mul", "situ", 4.0)
    assert act.param("inputs") == ("sgate@1", "sup@1")


def test_residual_add():
    off = without("residual_add")
    assert "add" in epilogues(tiny()) and "add" not in epilogues(off)
    (part,) = stage(tiny(), "L1.up_out").param("parts")
    assert part["add"] == ("P@2", "sh@1") and part["out"].startswith("P@")
    add = stage(off, "P.1m")
    assert add.param("mode") == "add" and add.param("inputs")[1:] == ("up_out@1", "sh@1")
    # with ranks the sum sits in the reduction, or after it
    assert len(stage(tiny(2), "P.1m").param("inputs")) == 3 and stage(tiny(2), "P.1m").param("mode") == "reduce"
    assert stage(without("residual_add", 2), "P.1m").param("mode") == "add"


def test_value_gate():
    off = without("value_gate")
    assert "gate" in epilogues(tiny()) and "gate" not in epilogues(off)
    assert stage(off, "L3.og").param("mode") == "sigmoid_mul" and stage(off, "L3.og").param("inputs") == ("ov@1", "g@1")


def test_weight_stream():
    off = without("weight_stream")
    static = [s for s in tiny().stages if s.streams and not s.streams[0].index]
    assert {s.param("stream") for s in static} == {"ahead"}
    assert {s.param("stream") for s in off.stages if s.streams} == {"after_wait"}


def test_shared_expert_early():
    on, off = names(tiny()), names(without("shared_expert_early"))
    assert on.index("L1.route") < on.index("L1.sh") < on.index("L1.ea")
    assert off.index("L1.y") < off.index("L1.sh") < off.index("L1.up_out")
    assert sorted(on) == sorted(off)


def test_early_block_stats():
    off = without("early_block_stats")
    assert "blockstats" not in bodies(off)
    assert stage(off, "L2.x_a.proj").param("x")["stats"] == ""
    on = tiny()
    stats = stage(on, "L2.x_a.stats")
    at = on.index["L2.x_a.stats"]
    assert stage(on, "L2.x_a.proj").param("x")["stats"] == stats.param("out")
    assert names(on)[at + 1] == "L1.up_out"  # before the projection that makes the newest row
    newest = stage(on, "L1.up_out").param("parts")[0]["out"]
    assert newest not in stats.param("inputs")
    assert stage(on, "L2.x_a.proj").param("x")["inputs"] == (*stats.param("inputs"), newest)
    two = names(tiny(2))  # with ranks: before the projection, not before the reduction
    assert two[two.index("L2.x_a.stats") + 1] == "L1.up_out"


@pytest.mark.parametrize("switch", FUSIONS + OVERLAPS)
@pytest.mark.parametrize("tp", [1, 2])
def test_each_switch_alone_changes_the_stages_and_still_orders_every_read(switch, tp):
    plan = without(switch, tp)
    assert plan.stages != tiny(tp).stages
    check_order(plan)


def small_graph() -> Graph:
    """Two rows of a mix, a gated attention-like middle and a routed layer, as small as the rules allow."""
    b = Builder()
    n = 64

    def linear(name: str, x: str, m: int, k: int, dtype: str = "bf16") -> str:
        return b.add(name, "linear", (x,), ((name, m, dtype),), weights={"w": b.weight(f"w.{name}", (m, k))}, layer=0)[
            0
        ]

    def normed(name: str, rows: tuple[str, ...]) -> str:
        w = {"norm": b.weight(f"{name}.mn", (n,)), "proj": b.weight(f"{name}.mp", (1, n))}
        h = b.add(f"L0.h{name}", "attnres", rows, ((f"L0.h{name}", n, "bf16"),), weights=w, layer=0, eps=1e-5)[0]
        return b.add(
            f"L0.x{name}",
            "rmsnorm",
            (h,),
            ((f"L0.x{name}", n, "bf16"),),
            layer=0,
            eps=1e-5,
            weights={"w": b.weight(f"{name}.n", (n,))},
        )[0]

    act = {"act": "situ", "beta": 4.0, "linear_beta": 25.0}
    saved = b.add(
        "embed", "embed", ("token",), (("P.s", n, "bf16"),), weights={"w": b.weight("e", (32, n))}, vocab_start=0
    )[0]
    p = linear("P.p", saved, n, n)
    x = normed("a", (saved, p))
    v, g = linear("L0.v", x, n, n), linear("L0.g", x, n, n)
    og = b.add("L0.og", "sigmoid_mul", (v, g), (("L0.og", n, "bf16"),), layer=0)[0]
    p = b.add("P.a", "add", (p, linear("L0.ya", og, n, n)), (("P.a", n, "bf16"),), layer=0)[0]
    x = normed("m", (saved, p))
    logits, z = linear("L0.logits", x, 8, n, "f32"), linear("L0.z", x, 64, n)
    ids, wts = b.add(
        "L0.route",
        "route",
        (logits,),
        (("L0.ids", 2, "i32"), ("L0.wts", 2, "f32")),
        layer=0,
        topk=2,
        scale=1.0,
        weights={"bias": b.weight("bias", (8,), "f32")},
    )
    a = b.add(
        "L0.act",
        "act_mul",
        (linear("L0.sg", x, 32, n), linear("L0.su", x, 32, n)),
        (("L0.act", 32, "bf16"),),
        layer=0,
        **act,
    )[0]
    sh = linear("L0.sh", a, n, 32)
    ea = b.add(
        "L0.ea",
        "expert_gate_up",
        (z, ids),
        (("L0.ea", 2 * 32, "bf16"),),
        layer=0,
        topk=2,
        **act,
        weights={r: b.weight(f"e.{r}", (8, 32, 64), "mxfp4") for r in ("w1", "w3")},
    )[0]
    y = b.add(
        "L0.y",
        "expert_down",
        (ea, ids, wts),
        (("L0.y", 64, "f32"),),
        layer=0,
        topk=2,
        weights={"w2": b.weight("e.w2", (8, 64, 32), "mxfp4")},
    )[0]
    p = b.add("P.m", "add", (p, linear("L0.up", y, n, 64), sh), (("P.m", n, "bf16"),), layer=0)[0]
    out = linear("out", p, 16, n, "f32")
    return b.build(name="small", family="small", rows=8, layers=(0, 1), inputs=("token",), outputs=(out,))


@pytest.mark.parametrize("mechanism", ["counter", "tagged"])
def test_all_256_combinations(mechanism):
    g = small_graph()
    seen = set()
    for mask in range(256):
        on = [bool(mask >> k & 1) for k in range(8)]
        c = choices(
            mechanism=mechanism,
            fusion=dict(zip(FUSIONS, on[:5], strict=True)),
            overlap=dict(zip(OVERLAPS, on[5:], strict=True)),
        )
        plan = build_plan(g, c)
        check_order(plan)
        seen.add(plan.stages)
    assert len(seen) == 256  # no two combinations give the same stages


def test_combinations_of_the_tiny_model():
    for mask in range(0, 256, 51):
        on = [bool(mask >> k & 1) for k in range(8)]
        groups = {
            "fusion": dict(zip(FUSIONS, on[:5], strict=True)),
            "overlap": dict(zip(OVERLAPS, on[5:], strict=True)),
        }
        check_order(build_plan(graph("kimi_k3_tiny", 2), choices(2, "tagged", **groups)))
