"""The steps of `optkit run`, in order. Each imports its part of the package when it runs: `optkit ls` stays quick.

A step reads what earlier ones left in `context.results` and registers checks; what it leaves is said in its module.
"""

from __future__ import annotations

from optkit.pipeline import Pipeline, Step
from optkit.steps import delivery, kernel, numerics, planning

STEPS: tuple[Step, ...] = (
    Step("model", "configuration and graph", planning.model, refuses=True),
    Step("plan", "stages, tasks, edges, memory", planning.plan, refuses=True),
    Step("check", "ordering, liveness, budgets", planning.check, refuses=True),
    Step("emit", "one persistent kernel: PTX, cubin, audit", kernel.emit),
    Step("validate", "numerics and task orders on the CPU", numerics.validate),
    Step("hardware", "the same kernel on a GPU", numerics.hardware),
    Step("export", "the artifact that vLLM loads", delivery.export),
    Step("evidence", "evidence, report, timeline", delivery.evidence, always=True),
)


def pipeline() -> Pipeline:
    """The whole line, from the model to the report."""
    return Pipeline(STEPS)
