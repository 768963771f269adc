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


def quantise_e4m3(w: Tensor, row_block: int) -> tuple[Tensor, Tensor]:
    """w [out, in] -> (elements, scales), the smallest power of two that keeps a group (row_block x 32) within e4m3.

    row_block is 32 for tiles, 1 for rows. Elements round to nearest even.
    """
    out, width = w.shape
    rows, cols = -(-out // row_block), -(-width // MX_GROUP)
    padded = torch.zeros(rows * row_block, cols * MX_GROUP, dtype=torch.float64, device=w.device)
    padded[:out, :width] = w
    tiles = padded.reshape(rows, row_block, cols, MX_GROUP)
    _, exponent = torch.frexp(tiles.abs().amax((1, 3)).clamp(min=2.0**-100) / E4M3_MAX)
    elements = tiles / power_of_two(exponent, torch.float64)[:, None, :, None]
    elements = elements.reshape(padded.shape)[:out, :width].to(torch.float8_e4m3fn)
    return elements, (exponent + 127).to(torch.uint8)
