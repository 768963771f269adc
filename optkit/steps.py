"""The steps of `optkit run`, in order. Each imports its part of the package when it runs: `optkit ls` stays quick."""

from __future__ import annotations

from optkit.pipeline import Pipeline, Step

STEPS: tuple[Step, ...] = ()


def pipeline() -> Pipeline:
    """The whole line, from the model to the report."""
    return Pipeline(STEPS)
