"""Faults of constants: the Plan is sound, and one number or weight name in it is wrong. Base: a Plan; product: a change of
Plans, made in the recipe's own Plan (held against config.json) and in the small model's (held against float64).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from optkit.plan.types import Plan, Record, Stage
from optkit.verify.planted.registry import Fault, Site

Change = Callable[[Plan], Plan]
Params = dict[str, Any]


def edited(plan: Plan, at: Iterable[int], change: Callable[[Params], Params]) -> Plan:
    """Params of some stages changed."""
    at = set(at)
    return replace(
        plan,
        stages=tuple(
            replace(s, params=tuple(sorted({**dict(s.params), **change(dict(s.params))}.items()))) if i in at else s
            for i, s in enumerate(plan.stages)
        ),
    )


def places(test: Callable[[Stage], bool], change: Callable[[Params], Params]) -> Callable[[Plan], Iterable[Site]]:
    """Sites: the first, the last and all stages that pass `test`."""

    def sites(plan: Plan) -> list[Site]:
        if not any(test(s) for s in plan.stages):
            return []

        def make(which: slice) -> Change:
            return lambda p: edited(p, [i for i, s in enumerate(p.stages) if test(s)][which], change)

        return [
            ("first", lambda: make(slice(0, 1))),
            ("last", lambda: make(slice(-1, None))),
            ("all", lambda: make(slice(None))),
        ]

    return sites


def body(*names: str) -> Callable[[Stage], bool]:
    """Stages with one of these bodies."""
    return lambda s: s.body in names


def has(**want: Any) -> Callable[[Stage], bool]:
    """Stages whose prologue has these (truthy: just set)."""
    return lambda s: (
        bool(s.param("x"))
        and all(bool(s.param("x")[k]) if v is True else s.param("x")[k] == v for k, v in want.items())
    )


def acts(name: str) -> Callable[[Stage], bool]:
    """Stages with a part that ends in this activation."""
    return lambda s: any(p["epilogue"] == "act" and p["act"] == name for p in s.param("parts", ()))


def x(**f: Callable[[Any], Any]) -> Callable[[Params], Params]:
    """Fields of the prologue changed."""
    return lambda d: {"x": Record({**d["x"], **{k: g(d["x"][k]) for k, g in f.items()}})}


def part(test: Callable[[Any], bool], **f: Callable[[Any], Any]) -> Callable[[Params], Params]:
    """Fields of the parts that pass `test` changed; a change gets the whole part."""
    return lambda d: {
        "parts": tuple(Record({**p, **{k: g(p) for k, g in f.items()}}) if test(p) else p for p in d["parts"])
    }


def param(**f: Callable[[Params], Any]) -> Callable[[Params], Params]:
    """Params of the stage changed; a change gets all of them."""
    return lambda d: {k: g(d) for k, g in f.items()}


def ten(v: float) -> float:
    """Ten times as much."""
    return 10 * v


def is_act(p: Any) -> bool:
    """Whether a part ends in a gated activation."""
    return p["epilogue"] == "act"


def weight_like(tail: str) -> Callable[[Stage], bool]:
    """gemv stages with a part whose weight ends so."""
    return lambda s: any(tail in p["weight"] for p in s.param("parts", ()))


CONFIG = "constants.config"
STAGE, PROBES, EXACT = "numerics.per_stage", "numerics.probes", "numerics.exact"


def F(name: str, kind: str, sites: Callable[[Plan], Iterable[Site]], *gates: str) -> Fault:
    """A fault of a constant; by default ordinary inputs or probes must show it."""
    return Fault(name, kind, "constant", gates or (STAGE, PROBES), sites)


def scaled(key: str, k: float) -> Callable[[Params], Params]:
    """One param times k."""
    return lambda d: {key: k * d[key]}


lora_norm = has(norm=True)
FAULTS: tuple[Fault, ...] = (
    F("epsilon of a norm x 10", "epsilon x 10", places(has(norm=True), x(eps=ten)), PROBES),
    F("epsilon of a norm missing", "epsilon x 10", places(has(norm=True), x(eps=lambda v: 0.0)), PROBES),
    F("epsilon of a norm in bf16", "wrong constant", places(has(norm=True), x(eps=lambda v: v * (1 - 2**-9))), CONFIG),
    F("epsilon of a mix x 10", "epsilon x 10", places(has(prologue="mixnorm"), x(mix_eps=ten)), PROBES),
    F(
        "epsilon of the low-rank norm as elsewhere",
        "epsilon x 10",
        places(lambda s: bool(s.param("x")) and "q_a_layernorm" in s.param("x")["norm"], x(eps=ten)),
        PROBES,
    ),
    F("epsilon of the cache norm x 10", "epsilon x 10", places(body("mla_insert"), scaled("eps", 10)), PROBES),
    F("epsilon of the output norm of KDA x 10", "epsilon x 10", places(body("kda"), scaled("eps", 10)), PROBES),
    F("epsilon of the key norm x 10", "epsilon x 10", places(body("kda"), scaled("l2_eps", 10)), PROBES),
    F("decay bound x 10", "wrong constant", places(body("kda"), scaled("lower_bound", 10))),
    F("decay bound positive", "wrong constant", places(body("kda"), scaled("lower_bound", -1))),
    F(
        "beta of the activation x 10",
        "wrong constant",
        places(acts("situ"), part(is_act, beta=lambda p: 10 * p["beta"])),
    ),
    F(
        "clip of the activation x 10",
        "wrong constant",
        places(acts("situ"), part(is_act, linear_beta=lambda p: 10 * p["linear_beta"])),
    ),
    F(
        "beta and clip exchanged",
        "wrong constant",
        places(acts("situ"), part(is_act, beta=lambda p: p["linear_beta"], linear_beta=lambda p: p["beta"])),
    ),
    F("silu for situ", "wrong constant", places(acts("situ"), part(is_act, act=lambda p: "silu"))),
    F(
        "situ for silu",
        "wrong constant",
        places(acts("silu"), part(is_act, act=lambda p: "situ", beta=lambda p: 4.0, linear_beta=lambda p: 25.0)),
    ),
    F("experts' beta x 10", "wrong constant", places(body("expert_gate_up"), scaled("beta", 10))),
    F("experts' clip x 10", "wrong constant", places(body("expert_gate_up"), scaled("linear_beta", 10))),
    F("experts' activation silu", "wrong constant", places(body("expert_gate_up"), param(act=lambda d: "silu"))),
    F(
        "gate and up of a dense block exchanged",
        "swapped gate and up",
        places(
            lambda s: any(is_act(p) for p in s.param("parts", ())),
            part(is_act, weight=lambda p: p["weight2"], weight2=lambda p: p["weight"]),
        ),
        STAGE,
    ),
    F(
        "gate and up of the experts exchanged",
        "swapped gate and up",
        places(body("expert_gate_up"), param(w1=lambda d: d["w3"], w3=lambda d: d["w1"])),
        STAGE,
    ),
    F("scores not scaled", "missing scale", places(body("attn"), param(scale=lambda d: 1.0)), STAGE),
    F(
        "scores scaled by the latent width",
        "missing scale",
        places(body("attn"), param(scale=lambda d: 2 * d["scale"])),
        STAGE,
    ),
    F("routing weights not scaled", "missing scale", places(body("route"), scaled("scale", 1.01)), STAGE),
    F("routing scale twice", "missing scale", places(body("route"), scaled("scale", 2.0)), STAGE),
    F("rotary base x 10", "wrong RoPE base", places(body("rope_insert"), scaled("theta", 10))),
    F("rotary base of another model", "wrong RoPE base", places(body("rope_insert"), param(theta=lambda d: 500000.0))),
    F("rotary scaling missing", "wrong RoPE base", places(body("rope_insert"), param(scaling=lambda d: ())), STAGE),
    F(
        "rotary scaling factor doubled",
        "wrong RoPE base",
        places(body("rope_insert"), param(scaling=lambda d: (2 * d["scaling"][0], *d["scaling"][1:]))),
        CONFIG,
        STAGE,
    ),
    F(
        "low and high rotary factors exchanged",
        "wrong RoPE base",
        places(
            body("rope_insert"),
            param(scaling=lambda d: (d["scaling"][0], d["scaling"][2] * 1.5, d["scaling"][2], d["scaling"][3])),
        ),
        CONFIG,
        STAGE,
    ),
    F(
        "query and key convolutions exchanged",
        "wrong operand",
        places(body("kda"), param(q_conv=lambda d: d["k_conv"], k_conv=lambda d: d["q_conv"])),
        STAGE,
    ),
    F(
        "decay from the key convolution's width",
        "wrong operand",
        places(body("kda"), param(f=lambda d: d["g"], g=lambda d: d["f"])),
        STAGE,
    ),
    F("query of the key", "wrong operand", places(body("kda"), param(q=lambda d: d["k"])), STAGE, "orders.bits"),
    F(
        "norm weight of the mix",
        "wrong operand",
        places(
            lambda s: has(norm=True, mix_norm=True)(s), lambda d: {"x": Record({**d["x"], "norm": d["x"]["mix_norm"]})}
        ),
        STAGE,
    ),
    F(
        "vocabulary shifted by a row",
        "wrong constant",
        places(body("embed"), param(vocab_start=lambda d: d["vocab_start"] + 1)),
        STAGE,
    ),
    F(
        "vocabulary one row short",
        "padding row written",
        places(body("embed"), param(vocab_rows=lambda d: d["vocab_rows"] // 2)),
        STAGE,
    ),
    F(
        "query head width",
        "wrong shape",
        places(lambda s: s.body == "attn" and s.param("kind") == "mla", param(ql=lambda d: d["q"])),
        STAGE,
    ),
    F(
        "residual stored instead of added",
        "wrong constant",
        places(
            lambda s: any(p["epilogue"] == "add" for p in s.param("parts", ())),
            part(lambda p: p["epilogue"] == "add", epilogue=lambda p: "store", add=lambda p: ()),
        ),
        STAGE,
    ),
    F(
        "value gate left out",
        "wrong constant",
        places(
            lambda s: any(p["epilogue"] == "gate" for p in s.param("parts", ())),
            part(lambda p: p["epilogue"] == "gate", epilogue=lambda p: "store", gate=lambda p: ""),
        ),
        STAGE,
    ),
    F(
        "group offset of the query lost",
        "wrong shape",
        places(
            lambda s: any(p["groups"] > 1 for p in s.param("parts", ())),
            part(lambda p: p["groups"] > 1, x_stride=lambda p: 0),
        ),
        STAGE,
    ),
)
