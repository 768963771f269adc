"""The last step of a run: trace.json, traces.jsonl, evidence.json, report.html from what the steps before it left.

Works for a broken run too: without a plan there is no trace, and the report has the sections that there is data for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from optkit import evidence
from optkit.plan.cost import Load, step_cost
from optkit.plan.timeline import simulate
from optkit.plan.types import Plan
from optkit.report.bench_traces import write_traces
from optkit.report.html import write_report
from optkit.report.trace import write_trace

UNLISTED = (evidence.SUMS, "evidence.json", "report.html", "traces.jsonl", "log.txt", "status.json", "error.txt")
"""Made from the evidence, or still being written when it is taken: evidence.json has no digests of these, only
SHA256SUMS has."""


def publish(run_dir: Path, *, recipe: str, recipe_digest: str, command: str, checks: Iterable[Any],
            numerics: Iterable[Any] = (), scope: Mapping[str, Any] | None = None, not_covered: Iterable[str] = (),
            plan: Plan | None = None, load: Load | None = None, ablations: Iterable[Any] = ()) -> evidence.Bundle:
    """Write the files into `run_dir`, SHA256SUMS last, and return the evidence.

    `checks` and `numerics` as `evidence.bundle` takes them. `load` is the step that is simulated (default: the
    plan's rows at context 256). Every other file of the folder is listed with its sha256. Raises ValueError where
    checks or numerics contradict themselves.
    """
    if plan is not None:
        load = load or Load(batch=plan.rows, context=256)
        write_trace(run_dir / "trace.json", simulate(plan, load), plan)
    files = [p for p in run_dir.rglob("*") if p.is_file() and not p.is_symlink()
             and not p.name.startswith(".") and p.relative_to(run_dir).as_posix() not in UNLISTED]
    provenance = evidence.provenance(recipe=recipe, recipe_digest=recipe_digest, root=run_dir, files=files,
                                     plan_digest=plan.digest if plan is not None else "", command=command)
    bundle = evidence.bundle(checks, provenance, numerics=numerics, scope=scope, not_covered=not_covered)
    evidence.write(run_dir / "evidence.json", bundle)
    draw(run_dir, bundle, plan, load, ablations)
    evidence.write_sums(run_dir)
    return bundle


def draw(run_dir: Path, bundle: evidence.Bundle, plan: Plan | None, load: Load | None,
         ablations: Iterable[Any] = ()) -> None:
    """What is made from the evidence: report.html and, where stages were measured, traces.jsonl."""
    cost = simulated = None
    if plan is not None and load is not None:
        cost, simulated = step_cost(plan, load), simulate(plan, load)
    write_report(run_dir / "report.html", bundle, plan=plan, cost=cost, timeline=simulated or (), ablations=ablations)
    if bundle.numerics:
        write_traces(run_dir / "traces.jsonl", bundle)
