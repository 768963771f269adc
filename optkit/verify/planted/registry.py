"""What a planted fault is, and what a subject of faults is: one recipe's model with the variants of its Plan.

A fault has *sites*: places of the same kind where it can be planted (another edge, another layer, another word). It is
tried at up to SITES of them and counts as caught only by a gate that is red at every one: a fault caught at one site or
for one seed alone is not caught.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from optkit.models import families
from optkit.models.graph import Graph
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices
from optkit.plan.types import Plan

SITES = 3
TARGETS = ("plan", "table", "constant", "body", "device")
KINDS = (
    "dropped wait",
    "dropped signal",
    "signal before write",
    "wait on a wrong count",
    "!= for >=",
    "tag off by one",
    "epoch reused",
    "relaxed for release",
    "scope too narrow",
    "weak load of an activation",
    "missing proxy fence",
    "ring one stage short",
    "ring shared between warps",
    "slot released early",
    "overlapping buffers",
    "split-K partial",
    "wrong RoPE base",
    "epsilon x 10",
    "missing scale",
    "swapped gate and up",
    "top-k off by one",
    "state in the wrong slot",
    "padding row written",
    "residency exceeded",
    "counter and flag on one line",
    "wrong wait",
    "wrong mechanism",
    "unordered reuse",
    "deadlock",
    "wrong work",
    "wrong index facts",
    "undeclared access",
    "wrong address",
    "wrong shape",
    "wrong constant",
    "wrong operand",
    "stale value",
    "budget",
    "load before wait",
    "no bound",
    "unmapped access",
    "wrong arithmetic",
    "nondeterminism",
    "lost work",
    "wrong masking",
)
"""The kinds that the issue names (first 25) and the others that the library adds."""

Site = tuple[str, Callable[[], Any]]
"""(where, thunk that makes the broken thing)."""


@dataclass(frozen=True)
class Fault:
    """One planted fault.

    `sites(base)` lists where it can be planted; base and product depend on the target. `gates`: one of these must be red at
    every site. `variant` is the Plan it is planted in (see VARIANTS). `hardware`: only a GPU can show it; `gates` are then
    those of the hardware run.
    """

    name: str
    kind: str
    target: str
    gates: tuple[str, ...]
    sites: Callable[[Any], Iterable[Site]]
    variant: str = "own"
    hardware: bool = False
    why: str = ""

    @property
    def key(self) -> str:
        """Unique name: target, kind, name."""
        return f"{self.target}/{self.name}"


def spread(sites: Sequence[Any], n: int = SITES) -> list[Any]:
    """At most n of them, the first and the last among them."""
    if len(sites) <= n:
        return list(sites)
    return [sites[i * (len(sites) - 1) // (n - 1)] for i in range(n)]


VARIANTS: dict[str, dict[str, Any]] = {
    "own": {},
    "counter": {"sync__mechanism": "counter"},
    "tagged": {"sync__mechanism": "tagged"},
    "barrier": {"sync__mechanism": "grid_barrier"},
    "late": {"overlap__weight_stream": False},
    "splits": {"tune__kv_splits": 4},
    "unfused": {
        f"fusion__{k}": False
        for k in ("norm_projection", "packed_projections", "gate_up_act", "residual_add", "value_gate")
    },
    "ranks": {"parallel__tp": 2},
    "real": {"parallel__tp": 2, "parallel__peers": "real"},
}
"""Plans of one model that faults are planted in: another mechanism, another fusion, two ranks."""


@dataclass
class Subject:
    """One recipe: its config.json, how its graph is built, the planner's choices. Plans are made when asked for."""

    name: str
    config: dict[str, Any]
    keys: dict[str, Any]
    build: dict[str, Any]
    choices: PlanChoices
    _graphs: dict[str, Graph] = field(default_factory=dict)
    _plans: dict[str, Plan] = field(default_factory=dict)

    @cached_property
    def family(self) -> str:
        """Name of the architecture's module."""
        return families.family_of(self.config).FAMILY

    def graph(self, variant: str = "own") -> Graph:
        """The graph of a variant."""
        changed = {k.removeprefix("parallel__"): v for k, v in VARIANTS[variant].items() if k.startswith("parallel__")}
        key = json.dumps(changed)
        if key not in self._graphs:
            self._graphs[key] = graph_of(self.config, self.keys, {**self.build, **changed})
        return self._graphs[key]

    def plan(self, variant: str = "own") -> Plan:
        """The Plan of a variant."""
        if variant not in self._plans:
            self._plans[variant] = build_plan(self.graph(variant), self.choices.but(**VARIANTS[variant]))
        return self._plans[variant]


def graph_of(config: dict[str, Any], keys: dict[str, Any], build: dict[str, Any]) -> Graph:
    """The graph of a config.json. `keys` override fields of the family's Config."""
    from dataclasses import replace

    module = families.family_of(config)
    args = dict(build)
    if args.get("layers"):
        args["layers"] = tuple(args["layers"])
    return module.build(replace(module.Config.from_hf(config), **keys), **args)


def digest(faults: Iterable[Fault]) -> str:
    """sha256 of the library's table: names, kinds, targets, variants and expected gates."""
    rows = sorted((f.key, f.kind, f.variant, f.hardware, list(f.gates)) for f in faults)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def library(targets: Sequence[str] = TARGETS) -> list[Fault]:
    """All faults of these targets, unique by key."""
    from optkit.verify.planted import body_faults, constant_faults, device_faults, plan_faults, table_faults

    every = {
        "plan": plan_faults.FAULTS,
        "table": table_faults.FAULTS,
        "constant": constant_faults.FAULTS,
        "body": body_faults.FAULTS,
        "device": device_faults.FAULTS,
    }
    out = [f for t in targets for f in every[t]]
    keys = [f.key for f in out]
    twice = sorted({k for k in keys if keys.count(k) > 1})
    if twice:
        raise ValueError(f"planted faults with one name: {', '.join(twice)}")
    for f in out:
        if f.kind not in KINDS or f.target not in TARGETS or f.variant not in VARIANTS:
            raise ValueError(
                f"planted fault {f.key}: unknown kind, target or variant: {f.kind}, {f.target}, {f.variant}"
            )
    return out
