"""Elementwise bodies on 64 columns of all rows, the reading end of an exchange among them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optkit.execute.bodies.common import elementwise, runs
from optkit.execute.bodies.gemv import round_bf16
from optkit.execute.memory import Memory
from optkit.models.ops import activation
from optkit.plan.types import Stage

COLUMNS = 64


def _add(prefix: torch.Tensor, terms: list[torch.Tensor]) -> torch.Tensor:
    """p + bf16(a + b + ...), summed in order."""
    delta = terms[0]
    for t in terms[1:]:
        delta = delta + t
    return prefix + round_bf16(delta)


def _gather(stage: Stage, mem: Memory, lo: int, hi: int) -> torch.Tensor:
    """Columns [lo, hi) of the concatenation of all mailbox slots."""
    name = stage.param("inputs")[0]
    n = mem.buffer(name).width
    pieces = []
    for rank in range(lo // n, (hi - 1) // n + 1):
        a, b = max(lo - rank * n, 0), min(hi - rank * n, n)
        pieces.append(mem.load(name, None, a, b)[rank].float())
    return torch.cat(pieces, -1)


def ew(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """mode add | act_mul | sigmoid_mul | reduce | gather, see the contract of the body."""
    mode, inputs, width = stage.param("mode"), stage.param("inputs"), stage.param("width")
    for first, last in runs(units):
        lo, hi = first * COLUMNS, min(last * COLUMNS, width)
        if mode == "gather":
            mem.store(stage.param("out"), _gather(stage, mem, lo, hi), None, lo)
            continue
        v = [mem.load(name, None, lo, hi).float() for name in inputs]
        if mode == "add":
            y = _add(v[0], v[1:])
        elif mode == "act_mul":
            y = elementwise(
                lambda g, u: activation(stage.param("act"), g, u, stage.param("beta"), stage.param("linear_beta")),
                v[0],
                v[1],
            )
        elif mode == "sigmoid_mul":
            y = v[0] * elementwise(torch.sigmoid, v[1])
        elif mode == "reduce":
            y = v[0][0]
            for p in v[0][1:]:
                y = y + p
            if len(v) > 1:
                y = _add(v[1], [round_bf16(y), *v[2:]])
        else:
            raise ValueError(f"stage {stage.name!r}: mode {mode!r}: expected add, act_mul, sigmoid_mul, reduce, gather")
        mem.store(stage.param("out"), y, None, lo)
