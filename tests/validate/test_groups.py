"""Layers in a second cache group: the same bits, and a runner that ignores the layer's own inputs is caught."""

from __future__ import annotations

import pytest
import torch

from optkit.execute import Executor
from optkit.models import families, interpret
from optkit.models.random_weights import random_weights
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices
from optkit.validate.groups import Regrouped, groups
from optkit.validate.scenario import Scenario


@pytest.fixture(scope="module", params=["kimi_k3_tiny", "llama_tiny"])
def made(request):
    config = families.named_config(request.param)
    module = families.family_of(config)
    graph = module.build(module.Config.from_hf(config), rows=8)
    plan = build_plan(graph, PlanChoices.from_dicts(name="t", decode={"context": 256}))
    return graph, plan, random_weights(graph, 0)


def test_same_bits(made) -> None:
    graph, plan, weights = made
    got = groups(lambda caches, own: Executor(plan, graph, weights, caches), graph, Scenario(graph, 3, 2))
    assert got.status == "pass" and "second cache group" in got.reason


def test_a_runner_that_ignores_them_is_caught(made) -> None:
    graph, plan, weights = made

    class Deaf(Executor):
        def step(self, inputs):
            return super().step({k: v for k, v in inputs.items() if "@" not in k})

    assert groups(lambda caches, own: Deaf(plan, graph, weights, caches), graph, Scenario(graph, 3, 2)).status == "fail"


def test_the_reference_reads_them_too(made) -> None:
    graph, _, weights = made
    s = Scenario(graph, 2, 1)
    other = Regrouped(graph, s)
    out = graph.outputs[0]
    one = interpret.run(graph, interpret.cast_weights(graph, weights, "bf16"), s.inputs(0), s.caches("bf16"), "bf16")[
        out
    ]
    two = interpret.run(graph, interpret.cast_weights(graph, weights, "bf16"), other.inputs(0), other.caches(), "bf16")[
        out
    ]
    assert torch.equal(one, two)
