"""Expanding block-scaled weights: MXFP4, and e4m3 with ue8m0 scales per 32 columns of a row or per 32 x 32 tile.

OCP Microscaling Formats 1.0 for the elements and scales; tiles of 32 x 32 as DeepSeek-V4.1's quantization_config
(weight_block_size) has them. The element type tells the two apart: MXFP4 is packed in uint8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.models.graph import MX_GROUP
from optkit.models.ops import mxfp4

E4M3_MAX = 448.0
"""The largest e4m3 magnitude."""
LOWEST = -150
"""No exponent below this occurs: ue8m0 ends at 2^-127."""


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exactly (exp2 of an integer need not be exact in f32); exponents are clamped to [-150, 150]."""
    table = torch.tensor([2.0**e for e in range(LOWEST, 1 - LOWEST)], dtype=dtype, device=exponent.device)
    return table[exponent.long().clamp(LOWEST, -LOWEST) - LOWEST]


def expand_e4m3(elements: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """elements e4m3 [out, in], scales uint8 [out, in/32] or [ceil(out/32), ceil(in/32)] -> [out, in], exact."""
    out, width = elements.shape
    scale = power_of_two(scales.int() - 127, dtype)
    if scales.shape[0] != out:
        scale = scale.repeat_interleave(MX_GROUP, 0)[:out]
    return elements.to(dtype) * scale.repeat_interleave(MX_GROUP, 1)[:, :width]


def expand(w: Tensor | tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Any resident weight in `dtype`."""
    if isinstance(w, Tensor):
        return w.to(dtype)
    elements, scales = w
    if elements.dtype == torch.uint8:
        return mxfp4.dequantise(elements, scales, dtype)
    return expand_e4m3(elements, scales, dtype)
