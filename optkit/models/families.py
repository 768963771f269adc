"""The registry of architectures: the only place that maps a config.json's model_type to the module that builds it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from importlib import resources
from types import ModuleType
from typing import Any

from optkit.models import deepseek_v41, kimi_k3, llama
from optkit.models.config import ConfigError

FAMILIES: dict[str, ModuleType] = {
    model_type: module for module in (deepseek_v41, kimi_k3, llama) for model_type in module.MODEL_TYPES
}
"""model_type -> module with FAMILY, Config (from_hf) and build."""


def family_of(config_json: Mapping[str, Any]) -> ModuleType:
    """The module of a config.json. Raises ConfigError for an unknown or missing model_type."""
    model_type = config_json.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    near = difflib.get_close_matches(str(model_type), FAMILIES, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(f"config.json: model_type: {model_type!r}: expected one of {', '.join(FAMILIES)}{hint}")


def module_of(config: Any) -> ModuleType:
    """The module whose Config `config` is."""
    return next(module for module in FAMILIES.values() if isinstance(config, module.Config))


def config_names() -> tuple[str, ...]:
    """Names of the configurations that ship with the package."""
    files = resources.files("optkit.models").joinpath("configs").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def named_config(name: str) -> dict[str, Any]:
    """A shipped HF config.json by name, e.g. "kimi_k3_tiny". Raises ConfigError for an unknown name."""
    if name not in config_names():
        near = difflib.get_close_matches(name, config_names(), 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"model config {name!r}: expected one of {', '.join(config_names())}{hint}")
    return json.loads(resources.files("optkit.models").joinpath("configs", f"{name}.json").read_text())
