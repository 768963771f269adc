"""Rotary positions on the last channels of every head, adjacent channels paired; also backwards.

RoFormer (Su et al. 2021); DeepSeek's inference code rotates only the trailing `rope` channels, and turns the output
of attention back by the query's angle, because keys are values too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, register
from optkit.models.rope import Scaling, inverse_frequencies


def rotate_tail(
    x: Tensor, position: Tensor, rope: int, theta: float, scaling: Scaling, inverse: bool = False
) -> Tensor:
    """x [R, ..., dim]: channels (dim - rope + 2i, + 1) turned by position [R] * f_i, backwards if `inverse`."""
    freq = torch.tensor(inverse_frequencies(rope, theta, scaling), dtype=x.dtype, device=x.device)
    angle = position.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1)) * (-freq if inverse else freq)
    head, tail = x[..., : x.shape[-1] - rope], x[..., x.shape[-1] - rope :]
    a, b, cos, sin = tail[..., 0::2], tail[..., 1::2], torch.cos(angle), torch.sin(angle)
    return torch.cat([head, torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)], -1)


@register("rope_tail")
def rope_tail(op: Op, ins: list[Tensor], weights: Mapping[str, WeightTensor], ctx: StepContext) -> list[Tensor]:
    """x [R, heads*dim] -> rotated at position seq_len - 1 (attr `inverse`: backwards)."""
    position = (ctx.seq_len - 1).clamp(min=0)
    x = ins[0].unflatten(-1, (op.attr("heads"), -1))
    y = rotate_tail(x, position, op.attr("rope"), op.attr("theta"), op.attr("scaling"), op.attr("inverse"))
    return [y.flatten(-2)]
