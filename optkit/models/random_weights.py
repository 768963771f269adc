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

from optkit.models.graph import MX_GROUP, Graph, Weight
from optkit.models.token_classes import synthetic_classes

RMS_E2M1 = 2.926
"""Root mean square of a uniformly drawn e2m1 code: sqrt((0 + .25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)."""
GAINS = (
    # Gain 2: the output reaches the curved part of what follows (SiTU, softmax, sigmoid).
    *((suffix, 2.0) for suffix in ("gate_proj.weight", "up_proj.weight", "q_b_proj.weight", "w_uk", "w_uv")),
    *((suffix, 2.0) for suffix in ("f_b_proj.weight", "gate.weight", "experts.w1", "experts.w2", "experts.w3")),
    *((suffix, 2.0) for suffix in ("wq_b.weight", "weights_proj.weight", "experts.w1.weight", "experts.w3.weight")),
    # Gain 1/2: a sharp mix of residual rows and a large routed share amplify bf16 noise from layer to layer. With
    # these, nine tiny layers stay within 4 % of float64 (24 rows, top-k adopted); with gain 2 and 1 they reach 24 %.
    ("res_proj.weight", 0.5),
    ("routed_expert_up_proj.weight", 0.5),
    # The experts' output would otherwise drown the attention's in the residual streams.
    *((suffix, 0.5) for suffix in ("ffn.experts.w2", "shared_experts.w2.weight")),
)
"""Gains of matrices by the end of their name, the longest match counts; 1 where none matches."""


def _matrix_std(w: Weight, ranks: int) -> float:
    fan_in = w.shape[-1] * (ranks if w.shard == len(w.shape) - 1 else 1)
    if w.name.endswith("w_uk"):  # stored transposed per head: its product sums over nope, the original's over lora
        fan_in = w.shape[0] // (dict(w.pack_args)["heads"] // ranks)
    return max(((len(end), gain) for end, gain in GAINS if w.name.endswith(end)), default=(0, 1.0))[1] / math.sqrt(
        fan_in
    )


def _mxfp4(w: Weight, ranks: int, gen: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uniform codes with a scale per group of 2^e or 2^(e+1), which keeps 3.7e9 weights a layer cheap to draw."""
    *lead, k = w.shape
    exponent = round(math.log2(_matrix_std(w, ranks) / RMS_E2M1) - 0.5)
    packed = torch.randint(0, 256, (*lead, k // 2), generator=gen, device=device, dtype=torch.uint8)
    scales = torch.randint(0, 2, (*lead, k // 32), generator=gen, device=device, dtype=torch.uint8) + (127 + exponent)
    return packed, scales


def _e4m3(w: Weight, ranks: int, gen: torch.Generator, device: torch.device) -> tuple[Tensor, Tensor]:
    """Normal elements of spread 32 (448 is 14 of them) with a scale per group of 2^e or 2^(e+1)."""
    std = 1.0 if w.dtype == "mxfp8" else _matrix_std(w, ranks)
    exponent = round(math.log2(std / 32) - 0.5)
    elements = (32 * torch.randn(w.shape, generator=gen, device=device)).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = (w.shape[0] if w.dtype == "mxfp8" else -(-w.shape[0] // MX_GROUP), -(-w.shape[1] // MX_GROUP))
    scales = torch.randint(0, 2, shape, generator=gen, device=device, dtype=torch.uint8) + (127 + exponent)
    return elements, scales


def has_tied_head(graph: Graph) -> bool:
    """True if the embedding table is also the output projection."""
    return any(op.kind == "linear" and op.weight("w").endswith("embed_tokens.weight") for op in graph.ops)


def random_weight(
    w: Weight, seed: int, ranks: int = 1, device: str | torch.device = "cpu", tied_head: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """One resident weight. `ranks` is the tensor-parallel size that w's shape belongs to; a table that is also the
    head (`tied_head`) is drawn small enough for logits of order 1."""
    device = torch.device(device)
    gen = torch.Generator(device).manual_seed(zlib.crc32(f"{seed}:{w.name}".encode()))
    if w.dtype == "mxfp4":
        return _mxfp4(w, ranks, gen, device)
    if w.dtype in ("fp8_block", "mxfp8"):
        return _e4m3(w, ranks, gen, device)
    if w.pack == "token_classes":
        return synthetic_classes(w.shape[0], dict(w.pack_args)["classes"]).to(device)
    x = torch.randn(w.shape, generator=gen, device=device)
    if w.name.endswith("A_log"):
        x = torch.rand(w.shape, generator=gen, device=device) * 2 - 1
    elif w.name.endswith("dt_bias"):
        x = x - 1
    elif w.name.endswith(("e_score_correction_bias", "gate.bias")):
        x = 0.1 * x
    elif w.pack == "depthwise":
        x = 0.5 * x
    elif w.name.endswith(("attn_sink", "_base")):  # logits: of order 1, not all alike
        pass
    elif len(w.shape) == 1 or w.name.endswith(("q_weight", "k_weight")):
        x = 1 + 0.1 * x
    elif tied_head or not w.name.endswith(("embed_tokens.weight", "embed.weight")):
        x = x * _matrix_std(w, ranks)
    return x.to(torch.bfloat16) if w.dtype == "bf16" else x


def random_weights(
    graph: Graph, seed: int = 0, device: str | torch.device = "cpu"
) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
    """Every resident weight of a rank's graph, made directly on `device`, without files. Ranks are not slices of one
    another: use checkpoint.write_random and load for that."""
    ranks = int(dict(graph.constants)["tp"])
    tied = has_tied_head(graph)
    return {w.name: random_weight(w, seed, ranks, device, tied) for w in graph.weights}
