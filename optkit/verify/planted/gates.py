"""The gates that judge planted faults, one function a target: broken thing -> names of the gates that are red.

Boundary cases are one gate ("boundary"). Numeric gates run on the family's small model (small.py) with the lengths that the
gates need to pass on a right one (256 samples); `only` limits them to some, to save time at further sites.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from optkit.checks import Check
from optkit.execute import Executor
from optkit.models.graph import Graph
from optkit.models.random_weights import random_weights
from optkit.plan.build import build_plan
from optkit.plan.types import Plan
from optkit.validate import boundaries, orders, per_stage, repeat, rollout
from optkit.validate.boundaries import cases
from optkit.validate.gates import MIN_SAMPLES
from optkit.validate.reference import reference_weights
from optkit.validate.scenario import Scenario
from optkit.verify.constants import NAME as CONFIG
from optkit.verify.constants import check_constants
from optkit.verify.planted import small
from optkit.verify.planted.registry import VARIANTS, Subject, graph_of
from optkit.verify.planted.table_faults import Lowered
from optkit.verify.proofs import prove
from optkit.verify.table import check_table, lowered

NUMERIC = (
    "numerics.per_stage",
    "numerics.probes",
    "numerics.exact",
    "rollout.logits",
    "rollout.choices",
    "rollout.state",
    "boundary",
    "repeat.bits",
    "orders.bits",
)
PAGES, SLOTS = 130, 10
"""Pages of 16 tokens and state slots of the small model's caches: 8 requests of up to 200 tokens."""


def red(checks: Iterable[Check]) -> set[str]:
    """Gates that failed; boundary cases under one name."""
    return {"boundary" if c.name.startswith("boundary.") else c.name for c in checks if c.status == "fail"}


def proofs(plan: Plan) -> set[str]:
    """The static proofs. Orders that were not looked at, because tasks or units are malformed, are not counted as red."""
    return red(c for c in prove(plan) if not c.reason.startswith("tasks or units are malformed"))


def base_table(subject: Subject, variant: str) -> Lowered:
    """A right table at synthetic addresses."""
    plan = subject.plan(variant)
    return Lowered(plan, *lowered(plan, subject.graph(variant)))


def table(broken: Lowered) -> set[str]:
    """The table read back."""
    return red(check_table(broken.plan, broken.table, broken.book))


@dataclass(frozen=True)
class Small:
    """The small model of a family with one variant of its Plan."""

    graph: Graph
    plan: Plan
    weights: Any

    def runner(self, plan: Plan, scenario: Scenario) -> Executor:
        """A fresh executor on fresh caches of the scenario."""
        return Executor(plan, self.graph, self.weights.resident, scenario.caches("bf16"))


@cache
def small_model(family: str, variant: str) -> Small:
    """Graph, Plan and random weights; made once a process."""
    from optkit.plan.choices import PlanChoices

    config = small.config(family)
    build = {
        "rows": 8,
        **{k.removeprefix("parallel__"): v for k, v in VARIANTS[variant].items() if k.startswith("parallel__")},
    }
    graph = graph_of(config, {}, build)
    choices = PlanChoices.from_dicts(decode={"context": 256}, tune={"sms": small.SMS, "kv_splits": 4})
    return Small(graph, build_plan(graph, choices.but(**VARIANTS[variant])), _Weights(graph))


class _Weights:
    """Resident weights and the reference's copies of them."""

    def __init__(self, graph: Graph) -> None:
        self.resident = random_weights(graph)
        self.both = reference_weights(graph, self.resident)


def _runs(m: Small, plan: Plan, seed: int, short: bool) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(gates, thunk that gives their checks), cheapest first; every gate gets a fresh runner. `short`: stages get 32 samples
    instead of 256, and too few samples is no reason to be red."""
    g, w = m.graph, m.weights.both

    def scenario(batch: int, steps: int, n: int) -> Scenario:
        return Scenario(g, batch, steps, 100 * seed + n, 16, blocks=PAGES, slots=SLOTS)

    def stages() -> list[Check]:
        s = scenario(8, 4 if short else 32, 1)
        got = per_stage(m.runner(plan, s), g, w, s, samples=32 if short else MIN_SAMPLES)[0]
        return [c for c in got if not (short and c.reason.startswith("fewer than"))]

    def roll() -> list[Check]:
        s = scenario(4, 64, 2)
        return rollout(m.runner(plan, s), g, w, s)[0]

    def edges() -> list[Check]:
        named = cases(g, 16, PAGES, SLOTS)
        return boundaries(m.runner(plan, next(iter(named.values()))), g, w, named)

    def same() -> list[Check]:
        s = scenario(4, 2, 3)
        return [repeat(m.runner(plan, s), s)]

    def order() -> list[Check]:
        s = scenario(4, 2, 3)
        return [orders(m.runner(plan, s), s, range(seed, seed + 2))]

    yield NUMERIC[:3], stages
    yield NUMERIC[7:8], same
    yield NUMERIC[8:9], order
    yield NUMERIC[6:7], edges
    yield NUMERIC[3:6], roll


def numerics(
    m: Small, plan: Plan, seed: int, only: frozenset[str] = frozenset(NUMERIC), short: bool = False
) -> set[str]:
    """The gates on the executor that `only` asks for. A runner that raises is red for the gate that ran it."""
    out: set[str] = set()
    for names, run in _runs(m, plan, seed, short):
        if not only & set(names):
            continue
        try:
            out |= red(run())
        except Exception:  # a body that breaks down in the middle is seen, whatever it raises
            out.add(names[0])
    return out & only


def constants(subject: Subject, change: Any, seed: int, only: frozenset[str], short: bool = False) -> set[str]:
    """config.json on the recipe's Plan, the numeric gates on the small model's, both changed."""
    out: set[str] = set()
    if CONFIG in only:
        out |= red([check_constants(change(subject.plan()), subject.graph(), subject.config, subject.keys)])
    m = small_model(subject.family, "splits")
    return out | numerics(m, change(m.plan), seed, only, short)


def bodies(
    subject: Subject, variant: str, patch: Any, seed: int, only: frozenset[str], short: bool = False
) -> set[str]:
    """The numeric gates while the executor is patched."""
    m = small_model(subject.family, variant)
    with patch:
        return numerics(m, replace(m.plan), seed, only, short)


def control(subject: Subject, seed: int) -> set[str]:
    """Gates that are red without any fault: none may be."""
    out = proofs(subject.plan()) | table(base_table(subject, "own"))
    out |= constants(subject, lambda p: p, seed, frozenset((CONFIG, *NUMERIC)))
    return out | bodies(subject, "unfused", nullcontext(), seed, frozenset(NUMERIC))
