"""Random weights for any graph, with spreads that keep activations in range and make every constant matter.

Matrices are normal with standard deviation gain / sqrt(fan-in of the whole model); norms scatter around 1; router
biases, dt_bias and A_log are not zero. Each weight has its own stream, seeded by its name, so a slice of layers gets
the same weights as the whole model.
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from optkit.models.graph import Graph, Weight

RMS_E2M1 = 2.926
"""Root mean square of a uniformly drawn e2m1 code: sqrt((0 + .25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)."""
DOUBLE = ("gate_proj.weight", "up_proj.weight", "res_proj.weight", "q_b_proj.weight", "w_uk", "w_uv", "f_b_proj.weight",
          "gate.weight", "experts.w1", "experts.w2", "experts.w3")
"""Matrices with gain 2: their outputs reach the curved part of what follows (SiTU, softmax, sigmoid)."""


def _normal(w: Weight, gen: torch.Generator, device: torch.device) -> Tensor:
    return torch.randn(w.shape, generator=gen, device=device)


def _matrix_std(w: Weight, ranks: int) -> float:
    fan_in = w.shape[-1] * (ranks if w.shard == len(w.shape) - 1 else 1)
    if w.name.endswith("w_uk"):  # stored transposed per head: its product sums over nope, the original's over lora
        fan_in = w.shape[0] // (dict(w.pack_args)["heads"] // ranks)
    return (2.0 if w.name.endswith(DOUBLE) and not w.name.endswith("self_attn.g_proj.weight") else 1.0) / math.sqrt(fan_in)


def _mxfp4(w: Weight, ranks: int, gen: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uniform codes with a scale per group of 2^e or 2^(e+1), which keeps 3.7e9 weights a layer cheap to draw."""
    *lead, k = w.shape
    exponent = round(math.log2(_matrix_std(w, ranks) / RMS_E2M1) - 0.5)
    packed = torch.randint(0, 256, (*lead, k // 2), generator=gen, device=device, dtype=torch.uint8)
    scales = torch.randint(0, 2, (*lead, k // 32), generator=gen, device=device, dtype=torch.uint8) + (127 + exponent)
    return packed, scales


def random_weight(w: Weight, seed: int, ranks: int = 1, device: str | torch.device = "cpu") -> Tensor | tuple[Tensor, Tensor]:
    """One resident weight. `ranks` is the tensor-parallel size that w's shape belongs to."""
    device = torch.device(device)
    gen = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{w.name}".encode()))
    if w.dtype == "mxfp4":
        return _mxfp4(w, ranks, gen, device)
    x = _normal(w, gen, device)
    if w.name.endswith("A_log"):
        x = torch.rand(w.shape, generator=gen, device=device) * 2 - 1
    elif w.name.endswith("dt_bias"):
        x = x - 1
    elif w.name.endswith("e_score_correction_bias"):
        x = 0.1 * x
    elif w.pack == "depthwise":
        x = 0.5 * x
    elif len(w.shape) == 1:
        x = 1 + 0.1 * x
    elif not w.name.endswith("embed_tokens.weight"):
        x = x * _matrix_std(w, ranks)
    return x.to(torch.bfloat16) if w.dtype == "bf16" else x


def random_weights(graph: Graph, seed: int = 0, device: str | torch.device = "cpu") -> dict[str, Tensor | tuple[Tensor, Tensor]]:
    """Every resident weight of a rank's graph, made directly on `device`, without files. Ranks are not slices of one
    another: use checkpoint.write_random and load for that."""
    ranks = int(dict(graph.constants)["tp"])
    return {w.name: random_weight(w, seed, ranks, device) for w in graph.weights}
