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

INPUTS = ("token", "seq_len", "block_table", "slot_mapping", "state_slot")
"""Step inputs in vLLM's meaning (see models.graph.Graph); row count of a step = len(token) <= plan.rows."""


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
        """One decode step: f32 logits [rows, V]; caches are updated in place."""
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
