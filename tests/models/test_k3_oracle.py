"""The whole K3 step against mlx-lm (other people, fp32, packed experts) and against numpy (float64, second writing)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from mlx_oracle import MlxK3
from model_steps import Model, caches, rel, rollout, tokens
from numpy_k3 import NumpyK3, dequantise
from torch import Tensor

from optkit.models import checkpoint, ops
from optkit.models.graph import Graph

STEPS, ROWS = 24, 2
FEW = 4  # steps for the wrong variants
WRONG = 1e-2  # a wrong variant moves the logits at least this far; the right one stays below 1e-4


@pytest.fixture(scope="module")
def tensors(k3: Model) -> dict[str, Tensor]:
    return {n: t for group in checkpoint.random_tensors(k3.hf, seed=3) for n, t in group.items()}


@pytest.fixture(scope="module")
def oracle(k3: Model, tensors: dict[str, Tensor]) -> tuple[list[Tensor], MlxK3]:
    mlx = MlxK3(k3.hf, {"language_model." + n: t for n, t in tensors.items()})
    return [mlx.step(t) for t in tokens(ROWS, STEPS)], mlx


def logits_error(graph: Graph, weights: Any, expected: list[Tensor], steps: int) -> float:
    """Worst rel-L2 of the logits over the first steps."""
    out = rollout(graph, weights, tokens(ROWS, STEPS)[:steps])
    return max(rel(o["logits"], e) for o, e in zip(out, expected, strict=False))


def test_logits_and_state_equal_mlx_lm(k3: Model, oracle: tuple[list[Tensor], MlxK3]) -> None:
    expected, mlx = oracle
    state = caches(k3.graph, ROWS)
    out = rollout(k3.graph, k3.exact, tokens(ROWS, STEPS), state=state)
    assert max(rel(o["logits"], e) for o, e in zip(out, expected, strict=True)) < 1e-4
    slots = torch.arange(ROWS, 0, -1)
    for layer in (0, 6):
        assert rel(state[f"L{layer}.recurrent"][slots], mlx.recurrent(layer)) < 1e-4


def replace_attr(graph: Graph, kind: str, **attrs: Any) -> Graph:
    changed = tuple(
        dataclasses.replace(op, attrs=tuple(sorted({**dict(op.attrs), **attrs}.items()))) if op.kind == kind else op
        for op in graph.ops
    )
    return dataclasses.replace(graph, ops=changed)


@pytest.mark.parametrize("variant", ["silu", "lower_bound", "no_bias", "normalised_rows", "no_linear_clip"])
def test_wrong_variants_move_the_logits(
    variant: str, k3: Model, oracle: tuple[list[Tensor], MlxK3], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, weights = k3.graph, dict(k3.exact)
    if variant == "silu":
        graph = replace_attr(replace_attr(graph, "act_mul", act="silu"), "expert_gate_up", act="silu")
    elif variant == "lower_bound":
        graph = replace_attr(graph, "kda_recurrence", lower_bound=-4.5)
    elif variant == "no_linear_clip":
        graph = replace_attr(replace_attr(graph, "act_mul", linear_beta=1e9), "expert_gate_up", linear_beta=1e9)
    elif variant == "no_bias":
        weights.update({n: torch.zeros_like(w) for n, w in weights.items() if n.endswith("e_score_correction_bias")})
    else:
        right = ops.OPS["attnres"].ref

        def normalised(op: Any, ins: list[Tensor], w: Any, ctx: Any) -> list[Tensor]:
            return right(op, [x * ops.rms_scale(x, op.attr("eps")) for x in ins], w, ctx)

        monkeypatch.setitem(ops.OPS, "attnres", dataclasses.replace(ops.OPS["attnres"], ref=normalised))
    assert logits_error(graph, weights, oracle[0], FEW) > WRONG


def test_float64_equals_numpy(k3: Model, tensors: dict[str, Tensor]) -> None:
    w = {n: t.double().numpy() for n, t in tensors.items() if t.dtype != torch.uint8}
    for n, t in tensors.items():
        if n.endswith("weight_packed"):
            scale = tensors[n.replace("packed", "scale")].numpy()
            w[n.removesuffix("_packed")] = dequantise(t.numpy(), scale)
    numpy_k3 = NumpyK3(k3.config, w)
    state = numpy_k3.new_state()
    ids = tokens(ROWS, 8)
    expected = np.stack([numpy_k3.step(int(t[0]), state) for t in ids])
    ours = torch.stack([o["logits"][0] for o in rollout(k3.graph, k3.exact, ids)])
    assert rel(ours, torch.from_numpy(expected)) < 1e-10
