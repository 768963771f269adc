"""Attention residuals: each sub-layer reads a softmax mix of the saved block rows and the running prefix.

Attention Residuals (Kimi team): row v_i scores v_i . (norm * proj) / rms(v_i); the *raw* rows are mixed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, cast, register


def block_statistics(rows: list[Tensor], u: Tensor) -> Tensor:
    """[R, 2n]: (v_i . v_i, v_i . u) per saved row, where u = norm * proj [H].

    They do not depend on the prefix, so they can be computed before it is known.
    """
    return torch.stack([s for v in rows for s in ((v * v).sum(-1), v @ u)], -1)


def mix_from_statistics(rows: list[Tensor], prefix: Tensor, stats: Tensor, u: Tensor, eps: float) -> Tensor:
    """The mix [R, H] from early statistics of the saved rows: only two dot products are left for the prefix."""
    stats = torch.cat([stats, block_statistics([prefix], u)], -1)
    square, dot = stats[:, 0::2], stats[:, 1::2]
    a = torch.softmax(dot * torch.rsqrt(square / prefix.shape[-1] + eps), -1)
    return torch.einsum("rn,rnh->rh", a, torch.stack([*rows, prefix], 1))


@register("attnres", block_statistics=block_statistics, mix_from_statistics=mix_from_statistics)
def attnres(op: Op, ins: list[Tensor], weights: Mapping[str, WeightTensor], ctx: StepContext) -> list[Tensor]:
    """v_0..v_n -> sum_i softmax(score)_i v_i over saved rows and, last, the prefix."""
    v = torch.stack(ins, 1)
    u = (cast(weights, "norm", ctx) * cast(weights, "proj", ctx)).reshape(-1)
    score = (v @ u) * torch.rsqrt((v * v).mean(-1) + op.attr("eps"))
    return [torch.einsum("rn,rnh->rh", torch.softmax(score, -1), v)]
