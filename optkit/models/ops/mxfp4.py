"""MXFP4 as compressed-tensors stores it: e2m1 nibbles, low nibble = even column, ue8m0 scale per 32 columns.

OCP Microscaling Formats 1.0: value = (-1)^sign * {0, .5, 1, 1.5, 2, 3, 4, 6} * 2^(scale - 127).
"""

from __future__ import annotations

import torch
from torch import Tensor

from optkit.models.graph import MX_GROUP

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MIN_LOG2 = -100
"""A group of zeros gets this exponent instead of log2(0); far below any real weight, far above ue8m0's 2^-127."""


def dequantise(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """packed uint8 [..., K/2], scales uint8 [..., K/32] -> [..., K]; exact in f32 and f64."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=dtype, device=packed.device)
    value = table[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()]
    power = torch.tensor([2.0 ** (s - 127) for s in range(255)] + [float("nan")], dtype=dtype, device=packed.device)
    scale = power[scales.int()]  # a table, because exp2 of an integer need not be exact in f32
    return (value.unflatten(-1, (-1, MX_GROUP)) * scale[..., None]).flatten(-2)


def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] -> (packed, scales): scale from the group's largest magnitude, elements to the nearest code."""
    if w.shape[-1] % MX_GROUP:
        raise ValueError(f"mxfp4: {w.shape[-1]} columns: expected a multiple of {MX_GROUP}")
    group = w.double().unflatten(-1, (-1, MX_GROUP))
    log2 = torch.log2(group.abs().amax(-1)).clamp(min=MIN_LOG2)
    exponent = torch.floor(log2) - 2  # 6 = 1.5 * 2^2 is the largest magnitude
    q = group / torch.exp2(exponent)[..., None]
    codes = (q.abs()[..., None] - torch.tensor(E2M1, dtype=q.dtype, device=q.device)).abs().argmin(-1)
    codes = (codes + 8 * (q < 0)).flatten(-2).to(torch.uint8)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponent + 127).to(torch.uint8)
