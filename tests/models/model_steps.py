"""A tiny model with its graph and weights, and decode steps over scattered cache pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from optkit.models import families, interpret
from optkit.models.graph import Graph
from optkit.models.random_weights import random_weights

BLOCK_SIZE = 16
LOOKBACK = 3


@dataclass
class Model:
    """A config.json, the family's module, its graph for 4 rows and the rank's weights."""

    hf: dict[str, Any]
    module: ModuleType
    config: Any
    graph: Graph
    weights: dict[str, Any]

    @cached_property
    def exact(self) -> dict[str, Any]:
        """The weights in float64, cast once for the whole suite."""
        return interpret.cast_weights(self.graph, self.weights, "f64")

    def build(self, **kw: Any) -> Graph:
        return self.module.build(self.config, rows=4, **kw)


def tiny(name: str) -> Model:
    """A shipped tiny configuration with random weights."""
    return built(families.named_config(name))


def built(hf: dict[str, Any]) -> Model:
    """Any config.json with random weights."""
    module = families.family_of(hf)
    config = module.Config.from_hf(hf)
    graph = module.build(config, rows=4)
    return Model(hf, module, config, graph, random_weights(graph, seed=3))


def tokens(rows: int, steps: int, vocab: int = 512) -> Tensor:
    """Token ids i32 [steps, rows]."""
    return torch.randint(0, vocab, (steps, rows), generator=torch.Generator().manual_seed(11), dtype=torch.int32)


def step_inputs(token: Tensor, step: int, pages: int = 4, before: Tensor | None = None) -> dict[str, Tensor]:
    """Inputs of one decode step: every row is at position `step`; its pages are scattered over the cache.

    `before` [step, rows]: the tokens of the earlier steps, for graphs that look back at them."""
    rows = token.shape[0]
    table = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(5)).reshape(rows, pages).int()
    slot = table[:, step // BLOCK_SIZE].long() * BLOCK_SIZE + step % BLOCK_SIZE
    lookback = torch.full((rows, LOOKBACK), -1, dtype=torch.int32)
    if before is not None:
        for i in range(min(step, LOOKBACK)):
            lookback[:, i] = before[step - 1 - i]
    return {
        "token": token,
        "lookback": lookback,
        "seq_len": torch.full((rows,), step + 1, dtype=torch.int32),
        "block_table": table,
        "slot_mapping": slot,
        "state_slot": torch.arange(rows, 0, -1, dtype=torch.int32),
    }


def caches(graph: Graph, rows: int = 4, precision: str = "f64", pages: int = 4) -> dict[str, Any]:
    """Fresh caches for `step_inputs`."""
    return interpret.allocate_caches(graph, rows + 1, rows * pages, BLOCK_SIZE, precision)


def rollout(
    graph: Graph, weights: Any, ids: Tensor, precision: str = "f64", state: dict[str, Any] | None = None
) -> list[dict[str, Tensor]]:
    """All values of every step; ids [steps, rows]."""
    state = caches(graph, ids.shape[1], precision) if state is None else state
    cast = interpret.cast_weights(graph, weights, precision)
    return [interpret.run(graph, cast, step_inputs(t, i, before=ids), state, precision) for i, t in enumerate(ids)]


def rel(a: Tensor, b: Tensor) -> float:
    """Relative L2 of a against b."""
    return float((a.double() - b.double()).norm() / b.double().norm())
