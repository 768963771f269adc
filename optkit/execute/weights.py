"""Resident weights as the CPU bodies want them: float32, cut into tiles once, kept between steps.

Assumes bf16 and f32 tensors or MXFP4 pairs by Weight name, as models.checkpoint loads them. Dequantisation is exact.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from optkit.models.ops import WeightTensor
from optkit.models.ops.mxfp4 import dequantise

EXPANDED_LIMIT = 1 << 29
"""Expert stacks up to this many float32 bytes stay expanded; larger ones are expanded per use (K3: 31 GB a layer)."""


class WeightStore:
    """float32 views of the resident weights, cached by name and tile height."""

    def __init__(self, weights: Mapping[str, WeightTensor]) -> None:
        self.source = weights
        self._cache: dict[tuple[str, int], torch.Tensor] = {}

    def dense(self, name: str) -> torch.Tensor:
        """One plain weight in float32, its own shape."""
        key = (name, 0)
        if key not in self._cache:
            w = self.source[name]
            if not isinstance(w, torch.Tensor):
                raise TypeError(f"weight {name!r} is MXFP4: expected a plain tensor")
            self._cache[key] = w.float()
        return self._cache[key]

    def tiles(self, name: str, rows: int) -> torch.Tensor:
        """[M, K] as [ceil(M / rows), rows, K] float32; the last tile is filled up with zero rows."""
        key = (name, rows)
        if key not in self._cache:
            w = self.dense(name)
            m, k = w.shape
            count = -(-m // rows)
            if count * rows == m:
                self._cache[key] = w.reshape(count, rows, k)
            else:
                tiles = w.new_zeros(count * rows, k)
                tiles[:m] = w
                self._cache[key] = tiles.view(count, rows, k)
        return self._cache[key]

    def expert_tiles(self, name: str, expert: int, rows: int) -> torch.Tensor:
        """One expert of a stack [E, out, in]: [out / rows, rows, in] float32."""
        w = self.source[name]
        stack = self._cache.get((name, 0))
        if stack is None and (w[0].numel() * 2 if isinstance(w, tuple) else w.numel()) * 4 <= EXPANDED_LIMIT:
            stack = self._cache[name, 0] = dequantise(*w, torch.float32) if isinstance(w, tuple) else w.float()
        if stack is not None:
            one = stack[expert]
        else:
            one = dequantise(w[0][expert], w[1][expert], torch.float32) if isinstance(w, tuple) else w[expert].float()
        return one.reshape(-1, rows, one.shape[-1])
