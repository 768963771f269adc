"""Shared by the bodies: unit bookkeeping and the two row prologues (norm, residual mix + norm).

Sums run over tensors of class rows in which every row sits at its own position, so that a row's bits are the same
whether its neighbours are computed along with it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from optkit.execute.memory import Memory
from optkit.models.ops import rms_scale
from optkit.models.ops.attnres import block_statistics, mix_from_statistics


def runs(units: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Maximal contiguous half-open runs of an increasing unit list."""
    start = 0
    for i in range(1, len(units) + 1):
        if i == len(units) or units[i] != units[i - 1] + 1:
            yield units[start], units[i - 1] + 1
            start = i


def row_blocks(units: Sequence[int], parts: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Units (row, part) with `parts` parts a row as blocks (r0, r1, j0, j1) of active rows."""
    for lo, hi in runs(units):
        hi = min(hi, rows * parts)
        while lo < hi:
            row, part = divmod(lo, parts)
            if part == 0 and hi - lo >= parts:
                last = row + (hi - lo) // parts
                yield row, last, 0, parts
                lo = last * parts
            else:
                end = min(hi, (row + 1) * parts)
                yield row, row + 1, part, part + end - lo
                lo = end


VECTOR = 64
"""A multiple of the elements that torch's vectorised functions take at a time; sigmoid of the rest takes another path."""


def elementwise(fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """fn of equally shaped float32 tensors, filled up to whole vectors.

    torch.sigmoid gives an element different last bits in a vector and in the remainder after the last vector; filled up,
    an element's bits do not depend on how many neighbours are computed with it.
    """
    shape, n = tensors[0].shape, tensors[0].numel()
    fill = -n % VECTOR
    flat = [torch.nn.functional.pad(t.reshape(-1), (0, fill)) for t in tensors]
    return fn(*flat)[:n].view(shape)


def class_rows(
    mem: Memory, name: str, rows: tuple[int, int] | None = None, lo: int = 0, hi: int | None = None
) -> torch.Tensor:
    """Rows [r0, r1) (default: all active) of a buffer in float32 at their places in [class rows, hi - lo], rest 0."""
    r0, r1 = rows or (0, mem.rows)
    value = mem.load(name, (r0, r1), lo, hi)
    out = torch.zeros((mem.class_rows, value.shape[-1]), dtype=torch.float32, device=mem.device)
    out[r0:r1] = value
    return out


def mix_direction(mem: Memory, norm: str, proj: str) -> torch.Tensor:
    """u [H] = norm * proj in float32: what a residual row is scored against."""
    return mem.weights.dense(norm) * mem.weights.dense(proj).reshape(-1)


def prologue(mem: Memory, x: Mapping[str, Any], rows: tuple[int, int] | None = None) -> torch.Tensor:
    """The row operand of a stage, float32 before its rounding: [class rows, width].

    `rmsnorm`: RMS(input; norm, eps). `mixnorm`: softmax mix of the inputs (saved rows, then the prefix), with early
    statistics if `stats` names a buffer, then the norm on the *unrounded* mix; no norm if `norm` is "".
    """
    inputs = [class_rows(mem, name, rows) for name in x["inputs"]]
    h = inputs[-1]
    if x["prologue"] == "mixnorm":
        u = mix_direction(mem, x["mix_norm"], x["mix_proj"])
        saved = inputs[:-1]
        stats = class_rows(mem, x["stats"], rows) if x.get("stats") else block_statistics(saved, u)
        h = mix_from_statistics(saved, h, stats, u, x["mix_eps"])
    if not x.get("norm"):
        return h
    return h * rms_scale(h, x["eps"]) * mem.weights.dense(x["norm"])
