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
from optkit.verify.constants import BODIES, LAYOUT, NAMES, check_constants


def made(config: dict[str, Any], tp: int = 1, **choices: Any) -> tuple[Plan, Graph, dict[str, Any]]:
    module = families.family_of(config)
    graph = module.build(module.Config.from_hf(config), rows=8, tp=tp)
    base = PlanChoices.from_dicts(name="t", parallel={"tp": tp}, decode={"context": 512}, tune={"kv_splits": 2})
    return build_plan(graph, base.but(**choices)), graph, module.published(config, tp)


def failed(plan: Plan, graph: Graph, published: dict[str, Any]) -> dict[str, str]:
    checks = check_constants(plan, graph, published)
    assert [c.name for c in checks] == list(NAMES)
    return {c.name: c.reason for c in checks if c.status == "fail"}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["kimi_k3_tiny", "llama_tiny"])
def test_packaged_models_agree(name: str, tp: int) -> None:
    assert not failed(*made(families.named_config(name), tp))


@pytest.mark.parametrize("fusion", FUSIONS)
def test_every_fusion_keeps_its_constants(fusion: str) -> None:
    assert not failed(*made(families.named_config("kimi_k3_tiny"), **{f"fusion__{fusion}": False}))


def test_the_published_models_agree() -> None:
    """Llama 3.2 1B as a whole; Kimi K3 by its graph, whose plan of 93 layers takes seconds."""
    assert not failed(*made(families.named_config("llama_3_2_1b")))
    config = families.named_config("kimi_k3")
    module = families.family_of(config)
    graph = module.build(module.Config.from_hf(config), rows=8, tp=8, layers=(0, 4))
    plan = build_plan(graph, PlanChoices.from_dicts(name="t", parallel={"tp": 8}, decode={"context": 512}))
    assert not failed(plan, graph, module.published(config, 8))


def floats(config: dict[str, Any]) -> list[tuple[str, ...]]:
    """Paths of every number of a config that some op of the step uses as a float."""
    text = ("text_config",) if "text_config" in config else ()
    names = ("rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "routed_scaling_factor", "rope_theta")
    found = [(*text, n) for n in names if n in (config["text_config"] if text else config)]
    found += [("text_config", "linear_attn_config", "gate_lower_bound")] if text else []
    return found + [("rope_scaling", n) for n in ("factor", "low_freq_factor", "high_freq_factor") if not text]


@pytest.mark.parametrize("name", ["kimi_k3_tiny", "llama_tiny"])
def test_every_field_of_the_file_is_compared(name: str) -> None:
    """Planted fault: graph and plan are made from a file in which one constant differs by a tenth."""
    config = families.named_config(name)
    published = families.family_of(config).published(config)
    for path in floats(config):
        changed = copy.deepcopy(config)
        at = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] *= 1.1
        plan, graph, _ = made(changed)
        assert set(failed(plan, graph, published)) == set(NAMES), path


@pytest.mark.parametrize("name", ["kimi_k3_tiny", "llama_tiny"])
def test_every_constant_of_the_plan_is_compared(name: str) -> None:
    """Planted fault: one float of one stage is ten times too large."""
    plan, graph, published = made(families.named_config(name))
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
            assert set(failed(broken, graph, published)) == {"constants.plan"}, (s.body, path)
            assert s.name in failed(broken, graph, published)["constants.plan"]
    assert len(seen) >= (12 if name == "kimi_k3_tiny" else 4), seen


def paths(params: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Where a stage's params hold a float that its body uses."""
    found: list[tuple[Any, ...]] = [(k,) for k, v in params.items() if isinstance(v, float)]
    found += [("x", k) for k in ("eps", "mix_eps") if params.get("x") and params["x"][k]]
    for i, part in enumerate(params.get("parts", ())):
        found += [("parts", i, k) for k in ("beta", "linear_beta") if part["epilogue"] == "act"]
    return found


def scaled(params: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    if len(path) == 1:
        return {**params, path[0]: 10 * params[path[0]]}
    if path[0] == "x":
        return {**params, "x": Record({**params["x"], path[1]: 10 * params["x"][path[1]]})}
    parts = tuple(Record({**p, path[2]: 10 * p[path[2]]}) if i == path[1] else p for i, p in enumerate(params["parts"]))
    return {**params, "parts": parts}


def test_a_constant_that_the_file_lacks_is_a_finding() -> None:
    plan, graph, published = made(families.named_config("llama_tiny"))
    del published["rope_insert.theta"]
    assert "no counterpart" in failed(plan, graph, published)["constants.plan"]


def test_the_recipe_s_own_key_counts() -> None:
    config = families.named_config("kimi_k3_tiny")
    plan, graph, _ = made(config)
    module = families.family_of(config)
    reasons = failed(plan, graph, module.published(config, qk_lora_norm_eps=1e-5))
    assert "eps is 1e-06, config.json says 1e-05" in reasons["constants.graph"]


def test_bodies_and_layout_name_what_exists() -> None:
    plans = [made(families.named_config(n))[:2] for n in ("kimi_k3_tiny", "llama_tiny")]
    assert BODIES.keys() <= {s.body for p, _ in plans for s in p.stages}
    assert {k for _, g in plans for op in g.ops for k, _ in op.attrs} >= LAYOUT
