"""mlx-lm's Kimi K3 on the CPU: an implementation by other people, fed with checkpoint tensors.

mlx_lm's own package initialiser imports its whole serving stack; only the model module is wanted, so an empty package
of the same path stands in for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def import_kimi_k3() -> types.ModuleType:
    """The module mlx_lm.models.kimi_k3, without mlx_lm's initialiser."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None and spec.submodule_search_locations, "mlx-lm is a test dependency (pip install --no-deps)"
    root = Path(next(iter(spec.submodule_search_locations)))
    for name, path in (("mlx_lm", root), ("mlx_lm.models", root / "models")):
        stub = types.ModuleType(name)
        stub.__path__ = [str(path)]
        sys.modules.setdefault(name, stub)
    return importlib.import_module("mlx_lm.models.kimi_k3")


class MlxK3:
    """tensors: checkpoint names (any wrapper prefix) -> torch tensors; experts stay packed MXFP4, the rest is fp32."""

    def __init__(self, hf_config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        import mlx.core as mx
        import mlx.nn as nn

        self.mx = mx
        mx.set_default_device(mx.cpu)
        module = import_kimi_k3()
        self.model = module.Model(module.ModelArgs.from_dict(hf_config))
        routed = lambda path, module: "switch_mlp" in path and hasattr(module, "to_quantized")  # noqa: E731
        nn.quantize(self.model, group_size=32, bits=4, mode="mxfp4", class_predicate=routed)
        arrays = {k: mx.array((v if v.dtype == torch.uint8 else v.float()).numpy()) for k, v in tensors.items()}
        self.model.load_weights(list(self.model.sanitize(arrays).items()), strict=True)
        self.model.eval()
        self.cache = self.model.make_cache()

    def step(self, token: Tensor) -> Tensor:
        """token i32 [rows] -> logits f32 [rows, vocab]; every row is its own request."""
        logits = self.model(self.mx.array(token.numpy())[:, None], self.cache)[:, -1]
        return torch.from_numpy(np.array(logits.astype(self.mx.float32)))

    def recurrent(self, layer: int) -> Tensor:
        """KDA state of a layer, [rows, heads, V, K]."""
        return torch.from_numpy(np.array(self.cache[layer][1].astype(self.mx.float32)))
