"""optkit's own torch model inside vLLM, for machines without a GPU: stock vLLM cannot run Kimi K3 there.

vLLM owns requests, caches, sampling and the API. This model holds the checkpoint's tensors under optkit's names and
computes logits: pure decode steps through the artifact's plan on the CPU executor, everything else (prefill, mixed
steps, steps without an artifact that fits) token by token with the plain bf16 interpretation of the same graph, on
the same caches. Exact and slow: meant for tests on tiny models.

Runs inside vLLM (0.32, 0.33) only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid
from vllm.model_executor.models.llama import LlamaForCausalLM as VllmLlamaForCausalLM

from optkit.export.backend import CpuBackend, DecodeBackend, TorchBackend
from optkit.export.vllm_caches import Caches
from optkit.export.vllm_config import graph_of, raw_config
from optkit.export.vllm_session import Session
from optkit.models import checkpoint


class OptkitForCausalLM(nn.Module):
    """What both architectures share. `forward` gives logits already, `compute_logits` passes them on."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", session: Session | None = None) -> None:
        super().__init__()
        dtype = vllm_config.model_config.dtype
        if dtype != torch.bfloat16:
            raise ValueError(f"dtype: {dtype}: optkit's CPU model computes in bfloat16 only; pass --dtype bfloat16")
        if vllm_config.parallel_config.world_size != 1:
            raise ValueError("optkit's CPU model runs on one rank only; tensor and pipeline parallel size must be 1")
        self.session = session or Session(vllm_config, "optkit's own torch model")
        self.graph = graph_of(vllm_config, raw_config(vllm_config))
        self.weights: dict[str, Any] = {}
        self.caches = Caches(self.graph, prefix, vllm_config)
        for cache in self.caches.paged.values():
            cache.on_bind = self.session.settled
        self.bound: tuple[int, ...] = ()
        self.torch_backend: DecodeBackend
        self.artifact_backend: DecodeBackend | None = None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Every tensor of the graph, or one error that names each missing, misshapen, mistyped or unexpected one."""
        tensors = dict(weights)
        self.weights = checkpoint.from_tensors(self.graph, tensors)
        self.torch_backend = TorchBackend(self.graph, self.weights)
        if self.session.artifact is not None:
            self.artifact_backend = CpuBackend(self.session.artifact, self.graph, self.weights)
        return set(tensors)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("optkit's CPU model takes token ids only")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors: Any = None,
                inputs_embeds: torch.Tensor | None = None) -> torch.Tensor:
        """input_ids [T] -> logits float32 [T, vocab]; zeros while vLLM profiles (no requests, no caches)."""
        logits = torch.zeros(input_ids.shape[0], self.graph.value(self.graph.outputs[0]).width)
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return logits
        self._bind()
        requests = self.caches.requests(metadata)
        backend, artifact = self.artifact_backend, self.session.artifact
        with self.caches.gathered(requests) as slots:
            if requests.pure_decode and backend and artifact and requests.count <= artifact.manifest.scope.batch[-1]:
                rows = next(b for b in artifact.manifest.scope.batch if b >= requests.count)
                at, inputs = requests.inputs(input_ids, 0, slots, rows)
                logits[at] = backend.step(inputs)[: len(at)]
                self.session.counter.count("decode_executor")
            else:
                for i in range(requests.longest):
                    at, inputs = requests.inputs(input_ids, i, slots)
                    logits[at] = self.torch_backend.step(inputs)
                self.session.counter.count("decode_fallback" if requests.pure_decode else "prefill")
        return logits

    def _bind(self) -> None:
        """Hand the caches to the backends whenever vLLM has allocated them anew."""
        if (key := self.caches.addresses()) != self.bound:
            self.torch_backend.bind(self.caches.by_state())
            if self.artifact_backend is not None:
                self.artifact_backend.bind(self.caches.by_state())
            self.bound = key


class KimiK3ForCausalLM(OptkitForCausalLM, HasInnerState, IsHybrid):
    """Kimi K3's text model (also under the multimodal wrapper, whose vision tensors are skipped)."""

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        graph = graph_of(vllm_config, raw_config(vllm_config))
        first = {s.kind: s.shape for s in reversed(graph.states)}
        return first["conv"], first["recurrent"]

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, torch.dtype]:
        return torch.bfloat16, torch.float32

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, Any]:
        return get_conv_copy_spec, get_temporal_copy_spec


class LlamaForCausalLM(VllmLlamaForCausalLM):
    """vLLM's own Llama, unless an artifact is named and fits: then optkit's model is built in its place.

    A subclass, so that all that vLLM derives from its class (adapters, interfaces) is as without optkit.
    """

    def __new__(cls, *args: Any, vllm_config: VllmConfig, prefix: str = "", **more: Any) -> Any:
        session = Session(vllm_config, "vLLM's own model")
        if session.artifact is None:
            return super().__new__(cls, *args, vllm_config=vllm_config, prefix=prefix, **more)
        return OptkitForCausalLM(vllm_config=vllm_config, prefix=prefix, session=session)
