"""Tensor-parallel exchanges. `ref` knows one rank: its peers are emulated by seeded multiples of its own partial.

Real peers are summed by `interpret.run_ranks`, which holds every rank's value.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.emulation import emulation_coefficients
from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, register

Weights = Mapping[str, WeightTensor]
COLLECTIVES = ("all_reduce", "all_gather")


def combine(kind: str, parts: list[Tensor]) -> Tensor:
    """The result on every rank from the ranks' partials: the sum in rank order, or the concatenation."""
    if kind == "all_gather":
        return torch.cat(parts, -1)
    y = parts[0]
    for p in parts[1:]:
        y = y + p
    return y


def _emulated(op: Op, ins: list[Tensor], weights: Weights, ctx: StepContext) -> list[Tensor]:
    """x -> what the exchange gives if peer p holds c[p] * x."""
    if op.attr("peers") != "emulated":
        raise ValueError(f"{op.name}: real peers: expected interpret.run_ranks, which holds every rank")
    c = emulation_coefficients(op.attr("seed"), op.attr("ranks"), op.attr("rank"))
    return [combine(op.kind, [p * ins[0] for p in c])]


for _kind in COLLECTIVES:
    register(_kind)(_emulated)
