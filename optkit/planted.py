"""`optkit check --planted`: recipes become subjects of planted faults (verify/planted), and the library runs on them.

The one place that knows both the recipe and the library. Writes nothing but the file that `--out` names and the cache of
what the audit said of changed kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from optkit.build import build_graph, model_json, model_source, plan_choices
from optkit.compose import Resolved, resolve
from optkit.steps.kernel import cache_folder
from optkit.verify.planted import runner
from optkit.verify.planted.registry import Subject

RECIPES = ("kimi_k3/tiny", "llama/tiny")
"""What the library runs on where no recipe is named: between them they have every body, and every fault applies to one."""


def subject(resolved: Resolved) -> Subject:
    """The model, graph and choices of a recipe. Raises UserError where the recipe is refused."""
    source = model_source(resolved)
    made = model_json(resolved, source, build_graph(resolved, source))
    return Subject(resolved.name, made["config"], made["keys"], made["build"], plan_choices(resolved))


def check_planted(recipe: str | None, overrides: Sequence[str], out: Path | None, jobs: int | None) -> int:
    """The whole library on one recipe (overrides applied), or on RECIPES; returns the exit code."""
    names = (recipe,) if recipe else RECIPES
    subjects = [subject(resolve(name, overrides)) for name in names]
    return runner.main(subjects, out=out, jobs=jobs, cache=cache_folder() / "planted")
