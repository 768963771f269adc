"""A run's folder, composed again: recipe.yaml gives the same recipe and the same Plan, and the report is drawn again.

What `optkit evidence verify` and `merge` need beyond `optkit.evidence`, which knows neither recipes nor plans. Assumes
the folder of a run that got as far as its evidence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import optkit
from optkit.build import build_graph, model_source, plan_choices
from optkit.compose import Resolved, resolve
from optkit.errors import UserError
from optkit.evidence import Bundle, Check
from optkit.models.graph import Graph
from optkit.plan.ablate import ablate
from optkit.plan.build import build_plan
from optkit.plan.cost import Load
from optkit.plan.types import Plan

MAX_ABLATED_STAGES = 300
"""Plans up to this size are planned again without each choice (half a second for tiny K3); for 93 layers it would be a minute."""


def resolve_run(run_dir: Path, name: str) -> Resolved:
    """The recipe of a run from its recipe.yaml, under the name it ran by. Raises UserError for what cannot be read."""
    return replace(resolve(str(run_dir / "recipe.yaml")), name=name)


def graph_and_plan(resolved: Resolved) -> tuple[Graph, Plan]:
    """Graph and Plan of the pipeline stage that the recipe emits. Raises UserError and ValueError as a run does."""
    graph = build_graph(resolved, model_source(resolved))
    return graph, build_plan(graph, plan_choices(resolved))


def load_of(resolved: Resolved) -> Load:
    """The step that cost, timeline and ablations of a report are about: the recipe's smallest batch."""
    decode = resolved.recipe.decode
    return Load(batch=min(decode.batch), context=decode.context)


def ablated(resolved: Resolved, graph: Graph, plan: Plan) -> list[tuple[str, float, float]]:
    """What every choice of the recipe is worth in the simulated step of `load_of`; nothing for large plans."""
    if len(plan.stages) > MAX_ABLATED_STAGES:
        return []
    return ablate(graph, plan_choices(resolved), load_of(resolved))


def again(run_dir: Path, evidence: Bundle) -> Iterable[Check]:
    """ "again/recipe" and "again/plan": recipe.yaml composed anew has the digests that the evidence names."""
    command, made = f"optkit evidence verify {run_dir}", evidence.provenance
    if not made.plan_digest:
        return
    other = made.versions.get("optkit", optkit.__version__)
    hint = "" if other == optkit.__version__ else f" (made by optkit {other}, this is {optkit.__version__})"
    try:
        resolved = resolve_run(run_dir, made.recipe)
        found = {"recipe": resolved.digest, "plan": graph_and_plan(resolved)[1].digest}
    except (UserError, ValueError) as err:
        reason = f"recipe.yaml cannot be composed again: {str(err).splitlines()[0]}"
        yield Check("again/recipe", "fail", None, made.recipe_digest, reason, command)
        return
    for what, expected in (("recipe", made.recipe_digest), ("plan", made.plan_digest)):
        reason = "" if found[what] == expected else f"recipe.yaml gives another {what}{hint}"
        yield Check(f"again/{what}", "fail" if reason else "pass", found[what], expected, reason, command)


def report(run_dir: Path, evidence: Bundle) -> None:
    """Writes report.html again from changed evidence, with the same pictures."""
    from optkit.report.publish import draw

    resolved = resolve_run(run_dir, evidence.provenance.recipe)
    graph, plan = graph_and_plan(resolved)
    draw(run_dir, evidence, plan, load_of(resolved), ablated(resolved, graph, plan))
