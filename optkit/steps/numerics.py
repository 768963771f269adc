"""The Plan against float64: the steps `validate` (CPU executor) and `hardware` (the kernel itself).

They leave "weights" and "numerics" (rows for the report).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optkit.bench.names import CHECKPOINT, hardware_checks
from optkit.build import load_weights, model_json
from optkit.pipeline import Context
from optkit.recipe import Recipe

CPU_WEIGHTS_GB = 1.0
"""Largest model that is held against float64 on the CPU: the reference keeps every weight in 8 bytes too."""


def validate(recipe: Recipe, context: Context) -> None:
    """Every stage alone, a rollout with state carried, task orders, and repetition, on the CPU executor."""
    graph, plan = context.results["graph"], context.results["plan"]
    size = sum(w.nbytes for w in graph.weights) / 1e9
    if size > CPU_WEIGHTS_GB:
        for name in ("numerics.per_stage", "rollout.logits", "orders.bits"):
            context.not_run(
                name,
                f"{size:.1f} GB of weights: float64 takes a GPU (hardware.* checks), the CPU does up to "
                f"{CPU_WEIGHTS_GB:g} GB",
                repeat=hardware_command(recipe, context),
            )
        return
    import torch

    from optkit.execute import Executor
    from optkit.validate import suite

    torch.set_num_threads(1)  # thousands of small products: a second thread costs more in hand-overs than it computes
    weights = context.results["weights"] = _weights(recipe, context)
    scenarios = suite.make(graph, recipe.validate, recipe.cache.block_size)
    runner = Executor(plan, graph, weights, scenarios.caches())
    checks, context.results["numerics"] = suite.validate(runner, weights, scenarios, context.repeat, context.note)
    context.take(checks)


def _weights(recipe: Recipe, context: Context) -> Any:
    """The rank's weights. A whole model without a checkpoint gets one with random weights in the run's folder, and goes
    through the loader like any other; slices and ranks are drawn directly."""
    source, graph = context.results["source"], context.results["graph"]
    whole = graph.layers == (0, source.limits.layers) and dict(graph.constants)["tp"] == 1
    if recipe.model.checkpoint is not None or context.run is None or not whole:
        return load_weights(context.resolved, graph)
    from optkit.models.checkpoint import load, write_random

    path = write_random(context.run.path / CHECKPOINT, source.config_json, recipe.model.seed)
    context.note(f"random checkpoint {_shown(path)}, {sum(f.stat().st_size for f in path.iterdir()) / 1e6:.0f} MB")
    return load(path, graph)


def hardware_command(recipe: Recipe, context: Context) -> str:
    """The command that runs the hardware checks of this run directory on a machine with the GPU."""
    run = "RUN_DIR" if context.run is None else _shown(context.run.path)
    batches = ",".join(map(str, sorted(recipe.decode.batch)))
    return (
        f"python -m optkit.bench.hardware {run} --batches {batches} --steps {recipe.bench.steps} "
        f"--launches {recipe.bench.launches} --out hardware"
    )


def hardware(recipe: Recipe, context: Context) -> None:
    """What only the GPU can show: registered as not run here, with the command that runs it there."""
    if context.run is not None:
        context.run.json(
            "model.json", model_json(context.resolved, context.results["source"], context.results["graph"])
        )
    command = hardware_command(recipe, context)
    for name in hardware_checks(sorted(recipe.decode.batch), [context.results["plan"].rows]):
        context.not_run(name, f"needs a GPU: {recipe.hardware.name} ({recipe.hardware.arch})", repeat=command)


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
