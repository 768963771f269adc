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
"""Everything that differs from stock vLLM on the CPU. On a GPU vLLM is unpatched. (docs/vllm.md repeats this.)"""


def register() -> None:
    """Register the CPU model classes. Safe to call any number of times."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for arch, path in CPU_ARCHITECTURES.items():
        ModelRegistry.register_model(arch, path)
