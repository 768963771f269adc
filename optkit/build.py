"""From a resolved recipe to the objects that the rest of the package works on: configuration, graphs, plans.

The one place that knows both the recipe's keys and the arguments of models and plan. Errors name the recipe's key and
where it was set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from optkit.compose import Resolved
from optkit.errors import Problem, UserError
from optkit.models import families
from optkit.models.graph import Graph
from optkit.plan.choices import GROUPS, PlanChoices
from optkit.recipe import MAX_ROWS, Limits, problems


@dataclass(frozen=True)
class ModelSource:
    """An architecture with one configuration: its module, its constants, and the config.json they come from."""

    module: ModuleType
    config: Any
    config_json: dict[str, Any]

    @property
    def limits(self) -> Limits:
        """What the recipe may ask of this model."""
        return Limits(layers=self.config.num_layers, max_context=self.config.max_position)


def model_source(resolved: Resolved) -> ModelSource:
    """Read the model's configuration and hold the recipe against it.

    Raises UserError with every mistake: unreadable or foreign config.json, context beyond the model, layers outside.
    """
    recipe, where = resolved.recipe, resolved.source
    name = recipe.model.config
    config_json = read_config(name, where("model.config"))
    try:
        module = families.family_of(config_json)
        if module.FAMILY != recipe.model.family:
            raise UserError(
                Problem(
                    "model.family",
                    recipe.model.family,
                    f"{module.FAMILY!r}, the family of {name} (model_type {config_json['model_type']!r})",
                    where("model.family"),
                )
            )
        config = module.Config.from_hf(config_json)
    except ValueError as err:
        raise UserError(f"model.config = {name!r} ({where('model.config')}): {line}" for line in _lines(err)) from err
    epsilon = recipe.model.qk_lora_norm_eps
    if epsilon is not None:
        if not (is_dataclass(config) and any(f.name == "qk_lora_norm_eps" for f in fields(config))):
            expected = f"null: family {module.FAMILY} has no low-rank query and KV norms"
            raise UserError(Problem("model.qk_lora_norm_eps", epsilon, expected, where("model.qk_lora_norm_eps")))
        config = replace(config, qk_lora_norm_eps=epsilon)  # type: ignore[type-var]
    source = ModelSource(module, config, config_json)
    wrong = problems(recipe, where, source.limits)
    if wrong:
        raise UserError(wrong)
    return source


def stage_layers(layers: tuple[int, int], pp: int, stage: int) -> tuple[int, int]:
    """The half-open layer range of one pipeline stage, cut as vLLM cuts it.

    Layers left over by an even cut go one each to the stages before the last, from the back: the last one also has
    the head. 93 layers in 2 stages: 47 and 46.
    """
    first, last = layers
    counts = [(last - first) // pp] * pp
    for i in range((last - first) % pp):
        counts[pp - 2 - i] += 1
    start = first + sum(counts[:stage])
    return start, start + counts[stage]


def build_graph(resolved: Resolved, source: ModelSource, stage: int | None = None) -> Graph:
    """One rank's graph of one pipeline stage (the recipe's own by default), for MAX_ROWS token rows."""
    recipe, parallel = resolved.recipe, resolved.recipe.parallel
    chosen = recipe.model.layers
    every = (chosen[0], chosen[1]) if chosen is not None else (0, source.limits.layers)
    layers = stage_layers(every, parallel.pp, parallel.stage if stage is None else stage)
    try:
        return source.module.build(
            source.config,
            rows=MAX_ROWS,
            tp=parallel.tp,
            rank=parallel.rank,
            layers=layers,
            peers=parallel.peers.value,
            seed=recipe.model.seed,
        )
    except ValueError as err:
        raise UserError(f"parallel.{line} ({resolved.source('parallel.tp')})" for line in _lines(err)) from err


def plan_choices(resolved: Resolved) -> PlanChoices:
    """The planner's view of the recipe. Memory is counted for the largest batch at full context."""
    return PlanChoices.from_dicts(
        name=resolved.name, recipe_digest=resolved.digest, **{group: resolved.tree[group] for group in GROUPS}
    )


def load_weights(resolved: Resolved, graph: Graph) -> dict[str, Any]:
    """The rank's weights: from `model.checkpoint`, or random ones seeded by `model.seed`.

    Raises UserError naming everything wrong with the checkpoint.
    """
    from optkit.models import checkpoint
    from optkit.models.random_weights import random_weights

    at = resolved.recipe.model.checkpoint
    if at is None:
        return random_weights(graph, resolved.recipe.model.seed)
    with _checkpoint_errors(resolved):
        return checkpoint.load(Path(at).expanduser(), graph)


def verify_weights(resolved: Resolved, graph: Graph) -> None:
    """Hold the headers of `model.checkpoint`, if there is one, against the graph, before anything is built.

    Raises UserError naming everything wrong with the checkpoint.
    """
    from optkit.models import checkpoint

    at = resolved.recipe.model.checkpoint
    if at is not None:
        with _checkpoint_errors(resolved):
            checkpoint.verify(Path(at).expanduser(), graph)


@contextmanager
def _checkpoint_errors(resolved: Resolved) -> Iterator[None]:
    from optkit.models.checkpoint import CheckpointError

    at, where = resolved.recipe.model.checkpoint, resolved.source("model.checkpoint")
    try:
        yield
    except (CheckpointError, OSError) as err:
        raise UserError(f"model.checkpoint = {at!r} ({where}): {line}" for line in _lines(err)) from err


def model_json(resolved: Resolved, source: ModelSource, graph: Graph) -> dict[str, Any]:
    """What builds this graph again on a machine without the recipe: config.json, keys, arguments of `build`, seed."""
    constants = dict(graph.constants)
    epsilon = resolved.recipe.model.qk_lora_norm_eps
    return {"config": source.config_json, "keys": {} if epsilon is None else {"qk_lora_norm_eps": epsilon},
            "build": {"rows": graph.rows, "tp": constants["tp"], "rank": constants["rank"], "layers": list(graph.layers),
                      "peers": resolved.recipe.parallel.peers.value, "seed": resolved.recipe.model.seed},
            "seed": resolved.recipe.model.seed}


def read_config(name: str, where: str) -> dict[str, Any]:
    """A packaged configuration by name, or a file by path. `where` says who asked, for the error."""
    path = Path(name).expanduser()
    if not (name.endswith(".json") or "/" in name):
        try:
            return families.named_config(name)
        except ValueError as err:
            raise UserError(f"model.config = {name!r} ({where}): {err}, or the path of a config.json") from err
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise UserError(Problem("model.config", name, "a readable config.json", where, str(err))) from err
    if not isinstance(data, dict):
        raise UserError(Problem("model.config", name, "a JSON object", where))
    return data


def _lines(err: Exception) -> list[str]:
    return str(err).splitlines() or [type(err).__name__]
