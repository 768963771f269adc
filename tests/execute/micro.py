"""Models small enough to run hundreds of times, with every kind of layer, and ways to break their plans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from optkit.execute import Executor
from optkit.models import families
from optkit.models.graph import Graph
from optkit.models.ops import WeightTensor
from optkit.models.random_weights import random_weights
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices
from optkit.plan.types import Plan, Record, Stage
from optkit.validate.scenario import Scenario

SMS = 12
"""Few SMs, so that tasks hold several units and stages share SMs."""


def _k3() -> dict[str, Any]:
    """Tiny K3 shrunk to KKMK, two layers a block: 1.6 M weights."""
    config = copy.deepcopy(families.named_config("kimi_k3_tiny"))
    text = config["text_config"]
    text.update(
        hidden_size=128,
        num_hidden_layers=4,
        attn_res_block_size=2,
        intermediate_size=96,
        kv_lora_rank=64,
        q_lora_rank=48,
        num_attention_heads=2,
        num_key_value_heads=2,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_token=3,
        routed_expert_hidden_size=64,
        vocab_size=96,
    )
    text["linear_attn_config"].update(full_attn_layers=[3], kda_layers=[1, 2, 4], head_dim=32, num_heads=2)
    return config


def _llama() -> dict[str, Any]:
    """Tiny Llama shrunk to two layers."""
    return {
        **families.named_config("llama_tiny"),
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 96,
    }


CONFIGS = {"k3": _k3, "llama": _llama}


@cache
def graph(name: str, tp: int = 1, layers: tuple[int, int] | None = None) -> Graph:
    config = CONFIGS[name]()
    family = families.family_of(config)
    return family.build(family.Config.from_hf(config), rows=8, tp=tp, layers=layers)


@cache
def weights(name: str, tp: int = 1, layers: tuple[int, int] | None = None) -> dict[str, WeightTensor]:
    return random_weights(graph(name, tp, layers))


@cache
def plan(name: str, tp: int = 1, layers: tuple[int, int] | None = None, **changes: Any) -> Plan:
    """Counters and four KV splits unless `changes` (group__key=value) say otherwise."""
    base = PlanChoices.from_dicts(parallel={"tp": tp}, decode={"context": 256}, tune={"sms": SMS, "kv_splits": 4})
    return build_plan(graph(name, tp, layers), base.but(**changes))


def runner(
    name: str, scenario: Scenario, p: Plan | None = None, tp: int = 1, layers: tuple[int, int] | None = None, **kw: Any
) -> Executor:
    return Executor(
        p or plan(name, tp, layers), graph(name, tp, layers), weights(name, tp, layers), scenario.caches("bf16"), **kw
    )


def edit(p: Plan, pick: Callable[[Stage], bool], change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plan:
    """A plan whose picked stages have changed params; at least one must be picked."""
    assert any(pick(s) for s in p.stages)
    return replace(
        p,
        stages=tuple(
            replace(s, params=tuple(sorted({**dict(s.params), **change(dict(s.params))}.items()))) if pick(s) else s
            for s in p.stages
        ),
    )


def body(name: str) -> Callable[[Stage], bool]:
    return lambda s: s.body == name


def edit_parts(p: Plan, pick: Callable[[Record], bool], change: Callable[[Record], dict[str, Any]]) -> Plan:
    """A plan whose picked parts of gemv stages are changed."""
    return edit(
        p,
        lambda s: any(pick(x) for x in s.param("parts", ())),
        lambda params: {"parts": tuple(Record({**x, **change(x)}) if pick(x) else x for x in params["parts"])},
    )
