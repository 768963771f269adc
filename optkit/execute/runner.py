"""What anything that can run a Plan looks like from outside: the CPU executor here, the GPU runtime elsewhere.

`validate` only knows this protocol. Tensors may live on any device; a runner takes and returns them on its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch

from optkit.models.ops import StateTensor
from optkit.plan.types import Plan

Tensors = Mapping[str, torch.Tensor]


@runtime_checkable
class StageRunner(Protocol):
    """Runs whole steps or slices of one Plan on bound caches.

    Attributes:
        plan: the Plan that runs.
        caches: State name -> paged tensor (K, V pair for kv_heads), bound in place, any strides.
        device: where inputs are expected and outputs are returned.
    """

    plan: Plan
    caches: dict[str, StateTensor]
    device: torch.device

    def step(self, inputs: Tensors) -> torch.Tensor:
        """One decode step: the graph's first output (f32 logits [rows, V] where the head is in the graph).

        `inputs` holds every name of graph.inputs (see models.graph.Graph); its row count, at most plan.rows, is the
        step's. Caches are updated in place.
        """
        ...

    def outputs(self) -> dict[str, torch.Tensor]:
        """Every graph output of the last step (a pipeline stage hands over its prefix and saved rows)."""
        ...

    def choices(self) -> dict[str, torch.Tensor]:
        """Top-k choices of the last step: ids value ("L3.ids") -> i32 [rows, topk], in the order that was used."""
        ...

    def run_stages(self, first: int, last: int, inputs: Tensors, inject: Tensors) -> dict[str, torch.Tensor]:
        """Stages [first, last) alone, from poisoned memory with `inject` (buffer -> [rows, width]) written first.

        Returns every buffer that these stages write, [rows, width] (mailboxes [ranks, rows, width]); state is
        updated in the bound caches.
        """
        ...
