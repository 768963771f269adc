"""Constants field by field against config.json: right for every packaged model, red for every single wrong one."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from optkit.models import families
from optkit.models.graph import Graph
from optkit.plan.build import build_plan
from optkit.plan.choices import FUSIONS, PlanChoices
from optkit.plan.types import Plan, Record
from optkit.verify.constants import NAME, check_constants


def made(config: dict[str, Any], tp: int = 1, **choices: Any) -> tuple[Plan, Graph]:
    module = families.family_of(config)
    graph = module.build(module.Config.from_hf(config), rows=8, tp=tp)
    base = PlanChoices.from_dicts(name="t", parallel={"tp": tp}, decode={"context": 512}, tune={"kv_splits": 2})
    return build_plan(graph, base.but(**choices)), graph


def failed(plan: Plan, graph: Graph, config: dict[str, Any], **keys: Any) -> str:
    """The reason of a red check, "" for a green one."""
    c = check_constants(plan, graph, config, keys)
    assert c.name == NAME
    return c.reason if c.status == "fail" else ""


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["kimi_k3_tiny", "llama_tiny", "llama_3_2_1b"])
def test_packaged_models_agree(name: str, tp: int) -> None:
    config = families.named_config(name)
    assert not failed(*made(config, tp), config)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_fusion_keeps_its_constants(fusion: str) -> None:
    config = families.named_config("kimi_k3_tiny")
    assert not failed(*made(config, **{f"fusion__{fusion}": False}), config)


def floats(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Paths of every number of a config that some op of the step uses as a float."""
    text = ("text_config",) if "text_config" in config else ()
    names = ("rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor", "rope_theta")
    found = [(*text, n) for n in names if n in (config["text_config"] if text else config)]
    found += [("text_config", "linear_attn_config", "gate_lower_bound")] if text else []
    return found + [("rope_scaling", n) for n in ("factor", "low_freq_factor", "high_freq_factor") if not text]


@pytest.mark.parametrize("name", ["kimi_k3_tiny", "llama_tiny"])
def test_every_field_of_the_file_is_compared(name: str) -> None:
    """Planted fault: the plan is made from a file in which one constant differs by a tenth."""
    config = families.named_config(name)
    for path in floats(config):
        changed = copy.deepcopy(config)
        at = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] *= 1.1
        assert failed(*made(changed), config), path


@pytest.mark.parametrize("name", ["kimi_k3_tiny", "llama_tiny"])
def test_every_constant_of_the_plan_is_compared(name: str) -> None:
    """Planted fault: one float of one stage is ten times too large."""
    config = families.named_config(name)
    plan, graph = made(config)
    seen = set()
    for i, s in enumerate(plan.stages):
        if s.body == "attn_combine":
            continue  # carries attn's constants along and uses none
        for path in paths(dict(s.params)):
            if (s.body, path[-1]) in seen:
                continue
            seen.add((s.body, path[-1]))
            wrong = replace(s, params=tuple(sorted(scaled(dict(s.params), path).items())))
            broken = replace(plan, stages=tuple(wrong if j == i else x for j, x in enumerate(plan.stages)))
            assert failed(broken, graph, config).startswith(f"{s.name}: "), (s.body, path)
    assert len(seen) >= (12 if name == "kimi_k3_tiny" else 3), seen


def paths(params: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Where a stage's params hold a float that its body uses."""
    found: list[tuple[Any, ...]] = [(k,) for k, v in params.items() if isinstance(v, float)]
    found += [("x", k) for k in ("eps", "mix_eps") if params.get("x") and params["x"][k]]
    for i, part in enumerate(params.get("parts", ())):
        used = part["epilogue"] == "act" and part["act"] != "silu"  # SiLU has no constants
        found += [("parts", i, k) for k in ("beta", "linear_beta") if used]
    return found


def scaled(params: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    if len(path) == 1:
        return {**params, path[0]: 10 * params[path[0]]}
    if path[0] == "x":
        return {**params, "x": Record({**params["x"], path[1]: 10 * params["x"][path[1]]})}
    parts = tuple(Record({**p, path[2]: 10 * p[path[2]]}) if i == path[1] else p for i, p in enumerate(params["parts"]))
    return {**params, "parts": parts}


def test_the_recipe_s_own_key_counts() -> None:
    config = families.named_config("kimi_k3_tiny")
    assert "is 1e-06, config.json says 1e-05" in failed(*made(config), config, qk_lora_norm_eps=1e-5)
