"""Answers for an artifact that is named to an engine whose architecture optkit has no class for.

vLLM then builds its own model, and no class of optkit would ever see --additional-config. This is an entry point of
vLLM's own group for loggers of statistics, the one place where vLLM hands its configuration to a plug-in in every
serving process without being patched. It records nothing. Used by `vllm serve`; the offline `LLM` class loads no such
plug-ins.

Runs inside vLLM (0.32, 0.33) only.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from optkit.export.vllm_config import Options, raw_config, refuse
from optkit.export.vllm_plugin import CPU_ARCHITECTURES, OWN_CLASSES


def answer(config: VllmConfig) -> None:
    """Logs why the artifact is not used, or raises ValueError where it is required; a damaged artifact raises
    ArtifactError in any mode. Nothing where none is named, or where a model class of optkit decides."""
    options = Options.of(config)
    if options is None:
        return
    names = tuple(raw_config(config).get("architectures") or ())
    if set(names) & {*CPU_ARCHITECTURES, *OWN_CLASSES}:
        return
    artifact = options.load(config)
    refuse(artifact, options.mode, [f"model: optkit has no class for {', '.join(names) or 'this model'}"], "vLLM's own model")


class Foreign(StatLoggerBase):
    """Made once an engine by vLLM; see the module."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        if engine_index == 0:
            answer(vllm_config)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to record."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
