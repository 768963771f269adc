"""vLLM-owned caches for optkit's own torch model: KDA state slots, MLA rows and K/V pages.

Each layer that keeps something between steps registers one cache module with vLLM. vLLM groups them, allocates the
memory and tells, for every step and group, which blocks belong to which request; `CacheBackend` passes that on
unchanged. Layers of one kind may land in different groups with different block tables (vLLM splits kinds into groups
of equal size), so addresses are kept per layer.

Runs inside vLLM (0.32, 0.33) only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec


@dataclass
class CacheMetadata:
    """Where one step's requests live in one cache group. R requests, T tokens, all on the model's device.

    query_start_loc [R + 1]: first token of each request; seq_lens [R]: length including the step's tokens;
    block_table [R, blocks]; slot_mapping [T]: flat position of each token's cache row.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class CacheMetadataBuilder(AttentionMetadataBuilder[CacheMetadata]):
    def __init__(self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig,
                 device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata,
              fast_build: bool = False) -> CacheMetadata:
        cm = common_attn_metadata
        n = cm.num_reqs
        return CacheMetadata(cm.query_start_loc[: n + 1], cm.seq_lens[:n], cm.block_table_tensor[:n], cm.slot_mapping)


class CacheBackend(AttentionBackend):
    """Addresses caches, computes nothing: the model reads and writes them itself."""

    supported_dtypes = [torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "OPTKIT_CACHE"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("optkit's cache layers have no attention implementation of their own")

    @staticmethod
    def get_builder_cls() -> type[CacheMetadataBuilder]:
        return CacheMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]


class MlaCacheBackend(CacheBackend):
    @classmethod
    def is_mla(cls) -> bool:
        return True


class StateCacheBackend(CacheBackend):
    @classmethod
    def is_ssm(cls) -> bool:
        return True


def _announce(layer: nn.Module, prefix: str, vllm_config: VllmConfig) -> None:
    layers = vllm_config.compilation_config.static_forward_context
    if prefix in layers:
        raise ValueError(f"two cache layers are called {prefix!r}")
    layers[prefix] = layer


class StateCache(nn.Module, MambaBase):
    """Conv window [taps - 1, channels] bf16 and recurrent state [heads, V, K] f32 of one layer, one slot a request."""

    def __init__(self, prefix: str, shapes: tuple[tuple[int, ...], ...], vllm_config: VllmConfig) -> None:
        super().__init__()
        self.prefix, self.shapes = prefix, shapes
        self.kv_cache = (torch.empty(0), torch.empty(0))
        _announce(self, prefix, vllm_config)

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum.LINEAR

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float32)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StateCacheBackend


class PagedCache(nn.Module, AttentionLayerBase):
    """Paged rows of one attention layer: MLA rows of `width` (kv_heads 0), or K and V of `kv_heads` heads."""

    def __init__(self, prefix: str, width: int, kv_heads: int, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.prefix, self.width, self.kv_heads = prefix, width, kv_heads
        self.kv_cache = torch.empty(0)
        _announce(self, prefix, vllm_config)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CacheBackend if self.kv_heads else MlaCacheBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        block = vllm_config.cache_config.block_size
        if self.kv_heads:
            return FullAttentionSpec(block_size=block, num_kv_heads=self.kv_heads, head_size=self.width,
                                     dtype=torch.bfloat16)
        return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=self.width, dtype=torch.bfloat16)
