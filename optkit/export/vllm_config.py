"""What vLLM's configuration says, in the words of `support.Facts`; and the options given by --additional-config.

Runs inside vLLM (0.32, 0.33) only.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from optkit.export.backend import log
from optkit.export.manifest import Artifact, ArtifactError, config_digest, load_artifact
from optkit.export.scope import shape_constants
from optkit.export.support import Facts
from optkit.models.families import family_of
from optkit.models.graph import Graph

_SHORT = {torch.bfloat16: "bf16", torch.float32: "f32", torch.float16: "f16"}
DEFAULT_BLOCK = 16
"""Where vLLM has not chosen a block size yet; it is checked again when it has (`Session.settled`)."""
_FLAGS = ("enable_dbo", "enable_expert_parallel", "enable_eplb")


@dataclass(frozen=True)
class Options:
    """--additional-config '{"optkit": {"artifact": DIR, "mode": "auto" | "require", "digest": "…"}}'.

    `digest`, if given, must be the artifact's: then vLLM's configuration hash, and with it every compile cache of
    vLLM, follows the artifact's content. Without it the plugin enters the digest itself when the model is built.
    """

    artifact: str
    mode: Literal["auto", "require"] = "auto"
    digest: str = ""

    @classmethod
    def of(cls, config: VllmConfig) -> Options | None:
        """None where vLLM was started without an "optkit" entry. Raises ValueError with one line for a bad one."""
        extra = config.additional_config
        raw = extra.get("optkit") if isinstance(extra, dict) else None
        if raw is None:
            return None
        if not isinstance(raw, dict):
            raise ValueError(f"additional_config.optkit: {raw!r}: expected a mapping with the key artifact")
        known = tuple(cls.__dataclass_fields__)
        for key in raw:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"additional_config.optkit: {key}: unknown key, expected one of {', '.join(known)}"
                                 f"{hint}")
        if not isinstance(raw.get("artifact"), str) or not raw["artifact"]:
            raise ValueError(f"additional_config.optkit.artifact: {raw.get('artifact')!r}: expected a directory")
        if raw.get("mode", "auto") not in ("auto", "require"):
            raise ValueError(f"additional_config.optkit.mode: {raw['mode']!r}: expected auto or require")
        return cls(**raw)

    def load(self, config: VllmConfig) -> Artifact:
        """The verified artifact. A damaged one is never a reason to fall back: it raises ArtifactError in any mode."""
        artifact = load_artifact(self.artifact)
        if self.digest not in ("", artifact.digest):
            raise ArtifactError(f"artifact {artifact.path}: digest {artifact.digest}, additional_config.optkit.digest "
                                f"asks for {self.digest}")
        config.additional_config["optkit"]["digest"] = artifact.digest
        return artifact


def refuse(
    artifact: Artifact, mode: str, reasons: Sequence[str], fallback: str, say: Callable[[str], None] = log.warning
) -> None:
    """Says why an artifact is not used. Raises ValueError with every reason where it is required."""
    if mode == "require":
        raise ValueError(
            f"optkit: artifact {artifact.path} is required but cannot be used:\n" + "\n".join(f"  - {r}" for r in reasons)
        )
    say(f"optkit: artifact {artifact.path} is not used, {fallback} runs every step, because: " + "; ".join(reasons))


def raw_config(config: VllmConfig) -> dict[str, Any]:
    """The checkpoint's config.json as written, not as a configuration class completes it."""
    local = Path(config.model_config.model) / "config.json"
    if local.is_file():
        return json.loads(local.read_text())
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    found = get_hf_file_to_dict("config.json", config.model_config.model, config.model_config.revision)
    if found is None:
        raise ValueError(f"model {config.model_config.model}: config.json not found")
    return found


def graph_of(config: VllmConfig, raw: Mapping[str, Any]) -> Graph:
    """The decode step of this engine's checkpoint, on this rank. Raises ConfigError naming every key it cannot take."""
    p = config.parallel_config
    family = family_of(raw)
    return family.build(family.Config.from_hf(raw), rows=config.scheduler_config.max_num_seqs,
                        tp=p.tensor_parallel_size, rank=p.rank % p.tensor_parallel_size, peers="real")


def short_dtype(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> bf16, as Plans and artifacts call it."""
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def facts(config: VllmConfig, state_dtypes: Mapping[str, str] | None = None) -> Facts:
    """Everything `unsupported` needs to know of this engine, whatever its model.

    `state_dtypes`: kind of recurrent state -> dtype in the caches; None: those of the model's graph, which optkit's own
    model classes use. A model that no graph can be made of is a fact too (`model_error`).
    """
    m, p, s = config.model_config, config.parallel_config, config.scheduler_config
    raw: Mapping[str, Any] = {}
    graph, error = None, ""
    try:
        raw = raw_config(config)
        graph = graph_of(config, raw)
    except (ValueError, OSError) as e:
        error = "; ".join(str(e).splitlines())
    gpu: dict[str, Any] = {}
    if current_platform.is_cuda():
        major, minor = torch.cuda.get_device_capability()
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        gpu = {"arch": f"sm_{major}{minor}a", "sms": sms}
    elif not current_platform.is_cpu():
        gpu = {"arch": type(current_platform).__name__}
    return Facts(
        device="cpu" if current_platform.is_cpu() else "cuda",
        vllm=vllm.__version__,
        architectures=tuple(raw.get("architectures") or ()),
        config_digest=config_digest(raw),
        shape=shape_constants(graph) if graph else {},
        dtypes=_dtypes(config, graph, state_dtypes),
        block_size=config.cache_config.block_size or DEFAULT_BLOCK,
        max_num_seqs=s.max_num_seqs,
        max_model_len=m.max_model_len,
        tp=p.tensor_parallel_size,
        pp=p.pipeline_parallel_size,
        rank=p.rank % p.tensor_parallel_size,
        pp_rank=p.rank // p.tensor_parallel_size,
        features=_features(config),
        model_error=error,
        **gpu,
    )


def _dtypes(config: VllmConfig, graph: Graph | None, state_dtypes: Mapping[str, str] | None) -> dict[str, str]:
    activation = short_dtype(config.model_config.dtype)
    kv = config.cache_config.cache_dtype
    out = {"activation": activation}
    for state in graph.states if graph else ():
        if state.kind in ("kv", "kv_heads"):
            out["kv"] = activation if kv == "auto" else kv.replace("bfloat16", "bf16")
        else:
            out[state.kind] = state.dtype if state_dtypes is None else state_dtypes.get(state.kind, "none")
    return out


def _features(config: VllmConfig) -> tuple[str, ...]:
    """Features that change a decode step or its caches and that no artifact is built for."""
    p, c = config.parallel_config, config.cache_config
    found = {
        "pooling": config.model_config.runner_type == "pooling",
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "KV transfer": config.kv_transfer_config is not None,
        # Cached prefixes hold attention rows only; a recurrent state cannot be resumed from them.
        "prefix caching of a model with recurrent state": config.model_config.is_hybrid and bool(c.enable_prefix_caching),
        "decode context parallelism": getattr(p, "decode_context_parallel_size", 1) > 1,
        "prefill context parallelism": getattr(p, "prefill_context_parallel_size", 1) > 1,
        "data parallelism": p.data_parallel_size > 1,
    }
    found |= {flag.replace("_", " "): bool(getattr(p, flag, False)) for flag in _FLAGS}
    return tuple(name for name, on in found.items() if on)
