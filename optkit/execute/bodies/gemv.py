"""y = W x on 16-row weight tiles, tokens as the short side, with the row prologues and epilogues fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from optkit.execute.bodies.common import class_rows, elementwise, prologue, runs
from optkit.execute.memory import Memory
from optkit.models.ops import activation
from optkit.plan.types import Stage

TILE = 16


def tile_product(x: torch.Tensor, tiles: torch.Tensor) -> torch.Tensor:
    """x [rows, K] or [U, rows, K], tiles [U, t, K] -> [rows, U * t]; one product of fixed shape per tile."""
    u, t, k = tiles.shape
    y = torch.bmm(x.expand(u, *x.shape[-2:]), tiles.transpose(1, 2))
    return y.transpose(0, 1).reshape(x.shape[-2], u * t)


def round_bf16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to bf16, kept in float32."""
    return x.to(torch.bfloat16).float()


def _operand(
    mem: Memory, part: dict[str, Any], whole: torch.Tensor | None, source: str, lo: int, hi: int
) -> torch.Tensor:
    """bf16 operand of units [lo, hi) of a part: [rows, K], or [hi - lo, rows, K] if grouped."""
    groups, k = part.get("groups") or 1, part["k"]
    offset = part.get("x_offset") or 0

    def columns(start: int) -> torch.Tensor:
        if whole is not None:
            return whole[:, start : start + k]
        return round_bf16(class_rows(mem, source, None, start, start + k))

    if groups == 1:
        return columns(offset)
    per_group = part["m"] // groups
    if per_group % TILE:
        raise ValueError(f"part {part['op']!r}: {per_group} rows a group: expected a multiple of {TILE}")
    group = [u * TILE // per_group for u in range(lo, hi)]
    table = {g: columns(g * part["x_stride"] + offset) for g in set(group)}
    return torch.stack([table[g] for g in group])


def gemv(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """All parts of the stage that own some of `units`; see the epilogues in the contract of the body."""
    x = dict(stage.param("x"))
    whole = None if x["prologue"] == "copy" else round_bf16(prologue(mem, x))
    for pairs in stage.param("parts"):
        part = dict(pairs)
        first, count = part["first"], part["count"]
        mine = [u - first for u in units if first <= u < first + count]
        for lo, hi in runs(mine):
            _part(mem, part, _operand(mem, part, whole, x["inputs"][0], lo, hi), lo, hi)


def _part(mem: Memory, part: dict[str, Any], x: torch.Tensor, lo: int, hi: int) -> None:
    """Product and epilogue of units [lo, hi) of one part."""
    epilogue, out, rows = part["epilogue"], part["out"], mem.rows
    height = TILE // 2 if epilogue == "act" else TILE
    c0, c1 = lo * height, min(hi * height, part["m"])
    y = tile_product(x, mem.weights.tiles(part["weight"], height)[lo:hi])[:rows, : c1 - c0]
    if epilogue == "act":
        up = tile_product(x, mem.weights.tiles(part["weight2"], height)[lo:hi])[:rows, : c1 - c0]
        y = elementwise(lambda g, u: activation(part["act"], g, u, part["beta"], part["linear_beta"]), y, up)
    elif epilogue == "add":
        prefix, *extras = part["add"]
        for name in extras:
            y = y + mem.load(name, None, c0, c1).float()
        y = mem.load(prefix, None, c0, c1).float() + round_bf16(y)
    elif epilogue == "gate":
        y = round_bf16(y) * elementwise(torch.sigmoid, mem.load(part["gate"], None, c0, c1).float())
    elif epilogue == "mailbox":
        y = torch.stack([c * y for c in part["coeffs"]])
    elif epilogue != "store":
        raise ValueError(f"part {part['op']!r}: epilogue {epilogue!r}: expected store, act, add, gate or mailbox")
    mem.store(out, y, None, c0)
