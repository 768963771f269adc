"""vLLM's own model classes with one question asked first: was an artifact asked for that cannot be used?

A subclass of each class, made when vLLM looks it up here under the name "<architecture>@<vLLM's version>". It changes
nothing but `__init__`, and there nothing unless --additional-config has an "optkit" entry: the artifact is then loaded
and verified, every unmet requirement is gathered, and the engine refuses to start (require) or the log says why, once,
and vLLM's own model runs (auto). A subclass and not a stand-in, so that what vLLM derives from a model class (adapters
for embedding and classification, interfaces, quantisation maps) works as before.

The version is in the name because vLLM keeps what it learns about a class in a file on disk, by this name and the
contents of this module; under one name it would outlive an upgrade of vLLM.

Runs inside vLLM (0.32, 0.33) only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn
from vllm.config import VllmConfig

from optkit.export.backend import GPU_BACKEND_MISSING
from optkit.export.vllm_config import short_dtype
from optkit.export.vllm_plugin import OWN_CLASSES
from optkit.export.vllm_session import Session


def guarded(own: type[nn.Module]) -> type[nn.Module]:
    """A subclass of `own` that decides on the artifact before it is built."""

    class Guarded(own):  # type: ignore[valid-type, misc]
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **more: Any) -> None:
            Session(
                vllm_config,
                "vLLM's own model",
                state_dtypes=state_dtypes(own, vllm_config),
                more=(GPU_BACKEND_MISSING,),
            )
            super().__init__(vllm_config=vllm_config, prefix=prefix, **more)

    Guarded.__name__ = Guarded.__qualname__ = own.__name__
    Guarded.__doc__ = own.__doc__
    return Guarded


def state_dtypes(own: type[nn.Module], config: VllmConfig) -> Callable[[], Mapping[str, str]]:
    """What vLLM's class keeps between steps besides attention rows: conv windows, then the recurrent state."""

    def ask() -> Mapping[str, str]:
        if not hasattr(own, "get_mamba_state_dtype_from_config"):
            return {}
        *conv, recurrent = (short_dtype(d) for d in own.get_mamba_state_dtype_from_config(config))
        return {"conv": "+".join(dict.fromkeys(conv)), "recurrent": recurrent}

    return ask


def __getattr__(name: str) -> type[nn.Module]:
    architecture = name.partition("@")[0]
    if architecture not in OWN_CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = guarded(getattr(import_module(OWN_CLASSES[architecture]), architecture))
    return found
