"""Answers for an artifact that no model class of optkit will ever see: on a GPU, and for architectures optkit has none for.

There stock vLLM builds its own model and would never look at `--additional-config`. This class is an entry point of
vLLM's own group for loggers of statistics, the one place where vLLM hands its configuration to a plug-in in every serving
process without being patched. It records nothing. Used by `vllm serve` (AsyncLLM); the offline `LLM` class loads no such
plug-ins.

Runs inside vLLM (0.32, 0.33) only.
"""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.metrics.loggers import StatLoggerBase

from optkit.export.support import unsupported
from optkit.export.vllm_config import Options, facts, graph_of, raw_config, refuse
from optkit.export.vllm_plugin import CPU_ARCHITECTURES

NO_LAUNCH = "device: this version of the plug-in launches no kernel inside vLLM; the artifact serves on the CPU only"


def answer(config: VllmConfig) -> None:
    """Logs why the artifact is not used, or raises ValueError with every reason where it is required; a damaged one
    raises ArtifactError in any mode. Nothing where no artifact is named or a model class of optkit decides."""
    options = Options.of(config)
    if options is None:
        return
    raw = raw_config(config)
    on_cpu = current_platform.is_cpu()
    if on_cpu and set(raw.get("architectures") or ()) & set(CPU_ARCHITECTURES):
        return
    artifact = options.load(config)
    reasons = [] if on_cpu else [NO_LAUNCH]
    try:
        reasons += unsupported(artifact.manifest, facts(config, raw, graph_of(config, raw)))
    except ValueError as err:
        reasons += [f"model: {line}" for line in str(err).splitlines()]
    refuse(artifact, options.mode, reasons or ["model: optkit has no model class for it"], "vLLM's own model")


class Guard(StatLoggerBase):
    """Made once an engine by vLLM; see the module."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        if engine_index == 0:
            answer(vllm_config)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to record."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
