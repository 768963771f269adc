"""vLLM's entry point (group `vllm.general_plugins`): runs once in every vLLM process, before any model is chosen.

Registration names classes as strings, so this module imports nothing but vLLM's registry: no torch, Hydra or CuTe DSL.
"""

from __future__ import annotations

CPU_ARCHITECTURES = {
    "KimiK3ForConditionalGeneration": "optkit.export.vllm_model:KimiK3ForCausalLM",
    "KimiLinearForCausalLM": "optkit.export.vllm_model:KimiK3ForCausalLM",
    "LlamaForCausalLM": "optkit.export.vllm_model:LlamaForCausalLM",
}
"""Architectures of config.json that optkit's own torch model serves where vLLM runs on the CPU."""

CPU_OVERRIDES = {
    "KimiK3ForConditionalGeneration, KimiLinearForCausalLM": "always: vLLM's own needs Triton for KDA and attention "
    "residuals, and has no CPU expert kernel for SiTU. Text only; the vision tower's tensors are skipped.",
    "LlamaForCausalLM": "only where --additional-config names an artifact and it fits; else vLLM's own class is built.",
    "attention backend of these models": "optkit.export.vllm_caches: only lays out and addresses vLLM's paged caches; "
    "any block size.",
}
"""Everything that differs from stock vLLM on the CPU. (docs/vllm.md repeats this.)"""

OWN_CLASSES = {
    "KimiK3ForConditionalGeneration": "vllm.models.kimi_k3",
    "KimiLinearForCausalLM": "vllm.models.kimi_k3",
    "LlamaForCausalLM": "vllm.model_executor.models.llama",
}
"""Where vLLM keeps its own classes of the architectures covered. Elsewhere than on the CPU each gets a subclass that
asks whether an artifact was named and otherwise changes nothing (optkit.export.vllm_guard)."""


def register() -> None:
    """Register the model classes of this platform. Safe to call any number of times."""
    import vllm
    from vllm.platforms import current_platform

    registry = vllm.ModelRegistry
    if current_platform.is_cpu():
        for arch, path in CPU_ARCHITECTURES.items():
            registry.register_model(arch, path)
        return
    known = registry.get_supported_archs()
    for arch in OWN_CLASSES:
        if arch in known:  # another vLLM may have none of this name: then there is nothing to guard
            registry.register_model(arch, f"optkit.export.vllm_guard:{arch}@{vllm.__version__}")
