"""vLLM-owned caches for optkit's own torch model: KDA state slots, MLA rows and K/V pages.

Each layer that keeps something between steps registers one cache module with vLLM. vLLM groups them, allocates the
memory and tells, for every step and group, which blocks belong to which request; `CacheBackend` passes that on
unchanged. Layers of one kind may land in different groups with different block tables (vLLM splits kinds into groups
of equal size), so addresses are kept per layer.

Runs inside vLLM (0.32, 0.33) only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionMetadataBuilder, CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MLAAttentionSpec

from optkit.models.graph import Graph


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
    """Keeps what vLLM says of a step as it is; nothing to precompute."""

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

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]

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
    """One latent row a token instead of K and V."""

    @classmethod
    def is_mla(cls) -> bool:
        return True


class StateCacheBackend(CacheBackend):
    """One block a request: its recurrent state."""

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
        self.on_bind: Callable[[int], None] = lambda block_size: None
        _announce(self, prefix, vllm_config)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """vLLM's pages [blocks, heads, block_size, content]; only now is the block size final."""
        self.kv_cache = kv_cache
        self.on_bind(kv_cache.shape[2])

    def get_attn_backend(self) -> type[AttentionBackend]:
        return CacheBackend if self.kv_heads else MlaCacheBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        block = vllm_config.cache_config.block_size
        if self.kv_heads:
            return FullAttentionSpec(block_size=block, num_kv_heads=self.kv_heads, head_size=self.width,
                                     dtype=torch.bfloat16)
        return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=self.width, dtype=torch.bfloat16)


@dataclass
class Requests:
    """The requests of one step. first [R]: index of a request's first token in the batch; new [R]: its new tokens;
    length [R]: its tokens in all, new ones included."""

    first: list[int]
    new: list[int]
    length: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor

    @property
    def count(self) -> int:
        return len(self.first)

    @property
    def longest(self) -> int:
        return max(self.new, default=0)

    @property
    def pure_decode(self) -> bool:
        """Every request has exactly one new token, and a token before it (a prompt of one token starts a state)."""
        return all(n == 1 and length > 1 for n, length in zip(self.new, self.length, strict=True))

    def inputs(self, tokens: torch.Tensor, i: int, slots: torch.Tensor,
               rows: int = 0) -> tuple[list[int], dict[str, torch.Tensor]]:
        """The i-th new token of every request that has one, as step inputs, padded to `rows` rows.

        Returns (index of each row's token in the batch, inputs); padding has token 0, length 0, slot_mapping -1 and
        state_slot 0.
        """
        who = [r for r in range(self.count) if i < self.new[r]]
        at = [self.first[r] + i for r in who]
        rows = max(rows, len(who))
        out = {"token": torch.zeros(rows, dtype=torch.int32), "seq_len": torch.zeros(rows, dtype=torch.int32),
               "block_table": torch.zeros(rows, self.block_table.shape[1], dtype=torch.int32),
               "slot_mapping": torch.full((rows,), -1, dtype=torch.int64),
               "state_slot": torch.zeros(rows, dtype=torch.int32)}
        n = len(who)
        out["token"][:n] = tokens[at]
        out["seq_len"][:n] = torch.tensor([self.length[r] - self.new[r] + i + 1 for r in who])
        out["block_table"][:n] = self.block_table[who]
        out["slot_mapping"][:n] = self.slot_mapping[at]
        out["state_slot"][:n] = slots[who]
        return at, out


class Caches:
    """All cache layers of one model, addressed by state name.

    A decode step knows one state slot a request, but vLLM gives a request another slot in each group of recurrent
    layers. `gathered` therefore brings the step's states into one dense copy and writes them back afterwards.
    """

    def __init__(self, graph: Graph, prefix: str, vllm_config: VllmConfig) -> None:
        self.paged: dict[str, PagedCache] = {}  # by state name
        self.state: dict[tuple[str, ...], StateCache] = {}  # by the layer's state names
        layers = sorted({s.layer for s in graph.states})
        for layer in layers:
            states = {s.kind: s for s in graph.states if s.layer == layer}
            name = f"{prefix}{'.' if prefix else ''}layers.{layer}.cache"
            if "recurrent" in states:
                pair = (states["conv"], states["recurrent"])
                self.state[tuple(s.name for s in pair)] = StateCache(name, tuple(s.shape for s in pair), vllm_config)
            elif "kv" in states:
                s = states["kv"]
                self.paged[s.name] = PagedCache(name, s.shape[-1], 0, vllm_config)
            else:
                s = states["kv_heads"]
                self.paged[s.name] = PagedCache(name, s.shape[-1], s.shape[0], vllm_config)
        rows = vllm_config.scheduler_config.max_num_seqs + 1  # slot 0 is padding
        self.dense = {name: torch.zeros((rows, *shape), dtype=dtype)
                      for names, cache in self.state.items()
                      for name, shape, dtype in zip(names, cache.shapes, cache.get_state_dtype(), strict=True)}

    def addresses(self) -> tuple[int, ...]:
        """Changes whenever vLLM binds other memory."""
        return tuple(c.kv_cache.data_ptr() for c in self.paged.values())

    def by_state(self) -> dict[str, Any]:
        """kv -> [blocks, block_size, width]; kv_heads -> pair K, V [blocks, block_size, kv_heads, dim]; conv and
        recurrent -> the dense copies [slots, ...]. Views of vLLM's memory with its strides, but for the last two."""
        out: dict[str, Any] = dict(self.dense)
        for name, cache in self.paged.items():
            pages = cache.kv_cache.transpose(1, 2)  # vLLM: [blocks, heads, block_size, content]
            if cache.kv_heads:
                out[name] = (pages[..., : cache.width], pages[..., cache.width:])
            else:
                out[name] = pages[:, :, 0]
        return out

    def requests(self, metadata: Mapping[str, CacheMetadata]) -> Requests:
        """The step's requests. Raises ValueError where paged layers have different block tables."""
        groups = [metadata[c.prefix] for c in self.paged.values()]
        if any(g.block_table.data_ptr() != groups[0].block_table.data_ptr() for g in groups):
            raise ValueError("optkit's CPU model needs all attention layers in one cache group")
        start = groups[0].query_start_loc.tolist()
        lengths = groups[0].seq_lens.tolist()
        new = [b - a for a, b in zip(start, start[1:], strict=False)]
        live = [r for r, n in enumerate(new) if n > 0]
        self.slots = {names: metadata[c.prefix].block_table[live, 0].tolist() for names, c in self.state.items()}
        return Requests([start[r] for r in live], [new[r] for r in live], [lengths[r] for r in live],
                        groups[0].block_table[live], groups[0].slot_mapping)

    @contextmanager
    def gathered(self, requests: Requests) -> Iterator[torch.Tensor]:
        """The states of the step's requests in the dense copies, at the slots given; written back at the end.

        A request without tokens before this step starts from zero.
        """
        rows = torch.arange(1, requests.count + 1)
        old = torch.tensor([n < length for n, length in zip(requests.new, requests.length, strict=True)])
        for names, cache in self.state.items():
            for name, held in zip(names, cache.kv_cache, strict=True):
                values = held[self.slots[names]]
                self.dense[name][rows] = torch.where(old.view(-1, *[1] * (values.ndim - 1)), values, 0)
        yield rows.to(torch.int32)
        for names, cache in self.state.items():
            for name, held in zip(names, cache.kv_cache, strict=True):
                held[self.slots[names]] = self.dense[name][rows]
