"""The grids that cache rows and index queries are rounded to, as values: quantise and expand again in one go.

Formats (DeepSeek-V4.1 inference code; H200: what vLLM keeps there). Every result is exact in bf16, so a bf16 or wider
state holds it without a further rounding; the packed bytes are the cache owner's business.

  none            as it is
  fp8_32          e4m3, ue8m0 scale per 32: 2^ceil(log2(max(amax, 1e-4) / 448))
  nvfp4_16        e2m1, e4m3 scale per 16: e4m3(max(amax, 6 * 2^-9) / 6)
  mxfp4_32        e2m1, ue8m0 scale per 32: 2^ceil(log2(max(amax, 6 * 2^-126) / 6))
  fp8_64_tail     e4m3 with a ue8m0 scale per 64 before the rotary tail, the tail in bf16
  fp8_row         e4m3, one power of two for the whole row
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.base import StepContext, WeightTensor, register
from optkit.models.ops.mxfp4 import E2M1
from optkit.models.ops.quantised import E4M3_MAX, power_of_two

FLOOR = 1e-4
FORMATS = ("none", "fp8_32", "nvfp4_16", "mxfp4_32", "fp8_64_tail", "fp8_row")


def round_e4m3(v: Tensor) -> Tensor:
    """To the nearest e4m3 value, ties to even, saturating at 448; subnormals step by 2^-9."""
    magnitude = v.abs()
    _, exponent = torch.frexp(magnitude.clamp(min=2.0**-6))
    step = power_of_two(exponent - 4, v.dtype)  # frexp's mantissa is in [1/2, 1): three bits below the leading one
    return torch.sign(v) * (torch.round(magnitude / step) * step).clamp(max=E4M3_MAX)


def round_e2m1(v: Tensor) -> Tensor:
    """To the nearest e2m1 value, ties to the even code, saturating at 6."""
    grid = torch.tensor(E2M1, dtype=v.dtype, device=v.device)
    middle = (grid[1:] + grid[:-1]) / 2
    magnitude = v.abs().contiguous()
    code = torch.bucketize(magnitude, middle)  # the lower neighbour at a tie
    tie = magnitude == middle[code.clamp(max=len(E2M1) - 2)]
    return torch.copysign(grid[code + (tie & (code % 2 == 1)).long()], v)


def round_bf16(v: Tensor) -> Tensor:
    """To the nearest bf16 value in one rounding; a cast from float64 rounds to f32 first, which moves some ties."""
    mantissa, exponent = torch.frexp(v)
    return torch.round(mantissa * 256) / 256 * power_of_two(exponent, v.dtype)


def ceil_power_of_two(v: Tensor) -> Tensor:
    """The smallest power of two >= v > 0."""
    mantissa, exponent = torch.frexp(v)
    return power_of_two(exponent - (mantissa == 0.5).int(), v.dtype)


def _grouped(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    g = x.unflatten(-1, (-1, group))
    return g, g.abs().amax(-1, keepdim=True)


def _fp8(x: Tensor, group: int) -> Tensor:
    g, amax = _grouped(x, group)
    scale = ceil_power_of_two(amax.clamp(min=FLOOR) / E4M3_MAX)
    return (round_e4m3(g / scale) * scale).flatten(-2)


def round_rows(x: Tensor, format: str, tail: int = 0) -> Tensor:
    """x [..., width] on the grid of `format`; `tail` is the width of the rotary part at the end (fp8_64_tail only).

    The width must be a multiple of the format's group. Raises ValueError for an unknown format.
    """
    if format == "none":
        return x
    if format == "fp8_32":
        return _fp8(x, 32)
    if format == "fp8_row":
        return _fp8(x, x.shape[-1])
    if format == "fp8_64_tail":
        head = _fp8(x[..., : x.shape[-1] - tail], 64)
        return torch.cat([head, round_bf16(x[..., x.shape[-1] - tail :])], -1)
    if format == "nvfp4_16":
        g, amax = _grouped(x, 16)
        scale = round_e4m3(amax.clamp(min=6 * 2.0**-9) / 6)
    elif format == "mxfp4_32":
        g, amax = _grouped(x, 32)
        scale = ceil_power_of_two(amax.clamp(min=6 * 2.0**-126) / 6)
    else:
        raise ValueError(f"format: {format!r}: expected one of {', '.join(FORMATS)}")
    return (round_e2m1(g / scale) * scale).flatten(-2)


@register("quantise")
def quantise(op: Op, ins: list[Tensor], weights: Mapping[str, WeightTensor], ctx: StepContext) -> list[Tensor]:
    """x [R, heads*dim] -> every head on the grid of attr `format`."""
    return [round_rows(ins[0].unflatten(-1, (op.attr("heads"), -1)), op.attr("format")).flatten(-2)]
