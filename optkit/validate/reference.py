"""Float64 and the plain bf16 implementation, of whole steps and of single stages from given inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optkit.models import interpret
from optkit.models.graph import Graph
from optkit.models.interpret import MATH, TORCH_DTYPE
from optkit.models.ops import OPS, Choices, StateTensor, StepContext, WeightTensor
from optkit.models.ops.mxfp4 import dequantise

EXPANDED_LIMIT = 1 << 30
"""Expert stacks of up to this many float32 bytes in all are expanded once (exact), instead of at every use."""
KV_KINDS = ("kv", "kv_heads")


@dataclass(frozen=True)
class ReferenceWeights:
    """Weights as the two references want them, made once for all checks: `f64` and `bf16` (float32 math)."""

    f64: dict[str, WeightTensor]
    bf16: dict[str, WeightTensor]

    def of(self, precision: str) -> dict[str, WeightTensor]:
        """By the name of the precision in models.interpret."""
        return self.f64 if precision == "f64" else self.bf16


AnyWeights = Mapping[str, WeightTensor] | ReferenceWeights


def reference_weights(graph: Graph, weights: AnyWeights) -> ReferenceWeights:
    """Casts and, where small, expands `weights`; what already is a ReferenceWeights is returned as it is."""
    if isinstance(weights, ReferenceWeights):
        return weights
    packed = {w.name: t for w in graph.weights if isinstance(t := weights[w.name], tuple)}
    expanded: dict[str, WeightTensor] = dict(packed)
    if sum(8 * t[0].numel() for t in packed.values()) <= EXPANDED_LIMIT:
        expanded = {k: dequantise(*t, torch.float32) for k, t in packed.items()}
    return ReferenceWeights(*({**interpret.cast_weights(graph, weights, p), **expanded} for p in ("f64", "bf16")))


def run_ops(
    graph: Graph,
    ops: Sequence[str],
    values: Mapping[str, Tensor],
    weights: Mapping[str, WeightTensor],
    inputs: Mapping[str, Tensor],
    states: Mapping[str, StateTensor],
    block_size: int,
    precision: str,
    adopt: Choices | None = None,
) -> dict[str, Tensor]:
    """Outputs of `ops` in order, from `values` (name -> [R, width]); `states` are updated in place.

    "f64": everything in float64. "bf16": float32 math, every output rounded to its value's dtype.
    """
    math = MATH[precision]
    ctx = StepContext(
        inputs["seq_len"],
        inputs["block_table"],
        inputs["slot_mapping"],
        inputs["state_slot"],
        block_size,
        states,
        math,
        active_rows(graph, inputs),
        adopt,
    )
    env = dict(values)
    made: dict[str, Tensor] = {}
    for name in ops:
        op = graph.op(name)
        ins = [env[v].to(math) if env[v].is_floating_point() else env[v] for v in op.inputs]
        for out, y in zip(
            op.outputs, OPS[op.kind].ref(op, ins, {r: weights[w] for r, w in op.weights}, ctx), strict=True
        ):
            env[out] = made[out] = (
                y if precision == "f64" or not y.is_floating_point() else y.to(TORCH_DTYPE[graph.value(out).dtype])
            )
    return made


def active_rows(graph: Graph, inputs: Mapping[str, Tensor]) -> Tensor:
    """bool [R]: rows that are no padding."""
    kinds = {s.kind for s in graph.states}
    active = torch.ones_like(inputs["seq_len"], dtype=torch.bool)
    if kinds & set(KV_KINDS):
        active &= inputs["slot_mapping"] >= 0
    if kinds - set(KV_KINDS):
        active &= inputs["state_slot"] > 0
    return active


def state_rows(kind: str, t: Tensor, inputs: Mapping[str, Tensor], rows: Tensor) -> tuple[Tensor, ...]:
    """Index of what a step may write of one state tensor, for the given rows: one entry a row."""
    if kind in KV_KINDS:
        flat = inputs["slot_mapping"][rows].long()
        return flat // t.shape[1], flat % t.shape[1]
    return (inputs["state_slot"][rows].long(),)
