"""`check_constants`: every constant of graph and Plan, field by field, against config.json as a second reader reads it.

The table check (table.py) holds what the kernel gets against the Plan; this one holds the Plan against the published file,
through a reading of its own (`published` of each model family), so that a wrong epsilon or scale cannot hide in the
configuration class that graph, reference and Plan all share. Values must be equal, not close.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from optkit.checks import Check, from_findings
from optkit.models.graph import Graph, Op
from optkit.plan.types import Plan, Stage

NAMES = ("constants.graph", "constants.plan")
LAYOUT = frozenset({"vocab_start", "x_stride", "x_offset", "groups"})
"""Attributes that say where a rank's part lies, not what is computed."""
EXCHANGES = frozenset({"all_reduce", "all_gather"})
"""Ops of several ranks: their attributes come from the recipe's `parallel` group, config.json has none."""
BODIES: dict[str, dict[str, str]] = {
    "embed": {"width": "embed.width"},
    "kda": {"heads": "kda_recurrence.heads", "dim": "kda_recurrence.dim", "lower_bound": "kda_recurrence.lower_bound",
            "l2_eps": "kda_recurrence.l2_eps", "eps": "gated_norm.eps", "taps": "conv.taps"},
    "mla_insert": {"eps": "mla_insert.eps", "lora": "mla_insert.lora", "rope": "mla_insert.rope"},
    "rope_insert": {"dim": "rope_insert.dim", "heads": "rope_insert.heads", "kv_heads": "rope_insert.kv_heads",
                    "theta": "rope_insert.theta", "scaling": "rope_insert.scaling"},
    "route": {"experts": "route.experts", "topk": "route.topk", "scale": "route.scale"},
    "expert_gate_up": {k: f"expert_gate_up.{k}" for k in ("topk", "inter", "act", "beta", "linear_beta")},
    "expert_down": {"topk": "expert_down.topk", "inter": "expert_down.inter"},
}
"""Stage body -> its param -> the constant that it is."""
ATTENTION = {"mla": {"scale": "mla_attention.scale", "dv": "mla_attention.lora", "nope": "mla_attention.nope",
                     "rope": "mla_attention.rope"},
             "gqa": {"scale": "gqa_attention.scale", "dqk": "gqa_attention.dim", "dv": "gqa_attention.dim"}}  # fmt: skip

Published = Mapping[str, Any]
Finding = tuple[str, str]


def check_constants(plan: Plan, graph: Graph, published: Published, repeat: str = "") -> list[Check]:
    """ "constants.graph" and "constants.plan": no constant differs from `published`, and none has nothing to be held
    against. `plan` is made from `graph`."""
    ops = [x for op in graph.ops for x in _op(op, published)]
    stages = [x for s in plan.stages for x in _stage(s, graph, published)]
    return [
        from_findings(name, [text for text, _ in found if text], f"{len(found)} values of {what} equal config.json's", repeat)
        for name, found, what in ((NAMES[0], ops, f"{len(graph.ops)} ops"), (NAMES[1], stages, f"{len(plan.stages)} stages"))
    ]


def _wanted(published: Published, key: str, op: str) -> Any:
    """The constant of one op; KeyError where config.json has none."""
    own = f"{key}@{re.sub(r'^L[0-9]+[.]', '', op)}"
    return published[own] if own in published else published[key]


def _held(where: str, name: str, got: Any, published: Published, key: str, op: str) -> Finding:
    try:
        want = _wanted(published, key, op)
    except KeyError:
        return f"{where}: {name} = {got!r} has no counterpart in config.json ({key})", key
    return ("" if got == want else f"{where}: {name} is {got!r}, config.json says {want!r}"), key


def _op(op: Op, published: Published) -> Iterator[Finding]:
    for name, value in op.attrs:
        if name not in LAYOUT and op.kind not in EXCHANGES:
            yield _held(f"op {op.name}", name, value, published, f"{op.kind}.{name}", op.name)


def _stage(s: Stage, graph: Graph, published: Published) -> Iterator[Finding]:
    where, params = f"stage {s.name}", dict(s.params)
    keys = ATTENTION[params["kind"]] if s.body == "attn" else BODIES.get(s.body, {})
    for name, key in keys.items():
        yield _held(where, name, params[name], published, key, s.name)
    x = params.get("x")
    if x:
        for weight, eps, kind in (("norm", "eps", "rmsnorm"), ("mix_norm", "mix_eps", "attnres")):
            if x[weight]:
                op = next(o for o in graph.ops if x[weight] in dict(o.weights).values() and o.kind == kind)
                yield _held(where, f"{eps} of {x[weight]}", x[eps], published, f"{kind}.eps", op.name)
    for part in params.get("parts", ()):
        if part["epilogue"] == "act":
            for name in ("act", "beta", "linear_beta"):
                yield _held(where, f"{part['op']}.{name}", part[name], published, f"act_mul.{name}", part["op"])
