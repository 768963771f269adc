"""Constants of a Plan against config.json, field by field (docs/design.md, section 4.4).

Every float of every stage must be what config.json says, by a rule of models/published.py; a float that no rule explains is
a finding. Integers that config.json fixes (top-k, experts, head sizes) are compared too. Needs no torch and no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from optkit.checks import Check, from_findings
from optkit.models.graph import Graph
from optkit.models.published import origin
from optkit.plan.types import Plan, Stage

NAME = "constants.config"
CARRIED = ("attn_combine",)
"""Bodies whose scale is carried along and not used."""
UNUSED = {"silu": ("beta", "linear_beta"), "": ("act", "beta", "linear_beta")}
"""Fields that an activation does not read."""


def fields(stage: Stage) -> Iterator[tuple[str, Any, str]]:
    """(field, value, weight that tells norms apart) of a stage's params, its prologue and its parts."""
    p = dict(stage.params)
    for k, v in p.items():
        if k == "x":
            if v["norm"]:
                yield "x.eps", v["eps"], v["norm"]
            if v["prologue"] == "mixnorm":
                yield "x.mix_eps", v["mix_eps"], v["mix_norm"]
        elif k == "parts":
            for part in v:
                for f in ("act", "beta", "linear_beta"):
                    if f not in UNUSED.get(part["act"], ()):
                        yield f, part[f], part["weight"]
        elif k not in UNUSED.get(p.get("act", "none"), ()) and k != "coeffs":
            yield k, v, ""


def check_constants(
    plan: Plan, graph: Graph, config: Mapping[str, Any], keys: Mapping[str, Any] | None = None, repeat: str = ""
) -> Check:
    """`config`: config.json as published; `keys`: what the recipe sets instead (model.* keys of the same names)."""
    text = {**config.get("text_config", config), **(keys or {})}
    said: Mapping[str, Any] = {**config, "text_config": text} if "text_config" in config else text
    out: list[str] = []
    compared = 0
    for stage in plan.stages:
        for field, value, weight in fields(stage):
            rule = origin(graph.family, stage.body, field, weight)
            if rule is None:
                if isinstance(value, float) and stage.body not in CARRIED and value != 0.0:
                    out.append(f"{stage.name}: {field} = {value:g}: no rule says which key of config.json it is")
                continue
            compared += 1
            want = rule.value(said)
            same = (
                abs(value - want) <= 1e-12 * abs(want)
                if isinstance(want, float) and isinstance(value, float)
                else value == want
            )
            if not same:
                out.append(f"{stage.name}: {field} is {value}, config.json says {want} ({rule.said})")
    return from_findings(
        NAME, out, f"{compared} constants of {len(plan.stages)} stages are those of config.json", repeat
    )
