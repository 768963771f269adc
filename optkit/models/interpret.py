"""Runs a Graph op by op in torch: the float64 reference, or the plain bf16 implementation that sets the noise band.

"f64": all math and all caches in float64, no rounding. "bf16": math in float32, every output rounded to its value's
dtype, state rows stored in the state's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from optkit.models.graph import PER_GROUP, Graph, Weight, state_input
from optkit.models.ops import OPS, Choices, StateTensor, StepContext, WeightTensor
from optkit.models.ops.comm import COLLECTIVES, combine
from optkit.models.ops.quantised import expand

TORCH_DTYPE = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
MATH = {"f64": torch.float64, "bf16": torch.float32}
Weights = Mapping[str, WeightTensor]
Caches = Mapping[str, StateTensor]


def _math(precision: str) -> torch.dtype:
    if precision not in MATH:
        raise ValueError(f"precision: {precision!r}: expected one of {', '.join(MATH)}")
    return MATH[precision]


def allocate_caches(
    graph: Graph, slots: int, blocks: int, block_size: int, precision: str = "f64", device: str | torch.device = "cpu"
) -> dict[str, StateTensor]:
    """Zeroed states by name: conv, recurrent and ring [slots, ...] (slot 0 is padding), kv [blocks, block_size / ratio,
    width], kv_heads a pair of [blocks, block_size, kv_heads, dim]. float64 for "f64", the state's own dtype for "bf16".
    Raises ValueError if the block size is no multiple of a state's ratio."""
    if bad := [f"{s.name}: ratio {s.ratio}" for s in graph.states if block_size % s.ratio]:
        raise ValueError(f"block_size: {block_size}: expected a multiple of every ratio, not so for {', '.join(bad)}")
    out: dict[str, StateTensor] = {}
    for s in graph.states:
        dtype = torch.float64 if _math(precision) == torch.float64 else TORCH_DTYPE[s.dtype]
        lead = (blocks, block_size // s.ratio) if s.kind.startswith("kv") else (slots,)
        fresh = [
            torch.zeros(*lead, *s.shape, dtype=dtype, device=device) for _ in range(2 if s.kind == "kv_heads" else 1)
        ]
        out[s.name] = (fresh[0], fresh[1]) if s.kind == "kv_heads" else fresh[0]
    return out


def cast_weights(graph: Graph, weights: Weights, precision: str) -> dict[str, WeightTensor]:
    """The weights in the math dtype once for many steps; quantised experts and tables stay packed, integers as they are."""
    dtype = _math(precision)

    def cast(w: Weight) -> WeightTensor:
        t = weights[w.name]
        if isinstance(t, Tensor):
            return t.to(dtype) if t.is_floating_point() else t
        return expand(t, dtype) if w.dtype == "fp8_block" else t

    return {w.name: cast(w) for w in graph.weights}


def _context(
    graph: Graph, inputs: Mapping[str, Tensor], caches: Caches, precision: str, adopt: Choices | None
) -> StepContext:
    missing = [name for name in graph.inputs if name not in inputs] + [
        s.name for s in graph.states if s.name not in caches
    ]
    if missing:
        raise ValueError(f"{graph.name}: inputs and caches lack {', '.join(missing)}")
    block_size = next((_first(caches[s.name]).shape[1] * s.ratio for s in graph.states if s.kind.startswith("kv")), 1)
    active = torch.ones_like(inputs["seq_len"], dtype=torch.bool)
    if any(s.kind.startswith("kv") for s in graph.states):
        active &= inputs["slot_mapping"] >= 0
    if any(s.kind in ("conv", "recurrent", "ring") for s in graph.states):
        active &= inputs["state_slot"] > 0
    return StepContext(
        inputs["seq_len"],
        inputs["block_table"],
        inputs["slot_mapping"],
        inputs["state_slot"],
        block_size,
        caches,
        _math(precision),
        active,
        adopt,
        inputs["lookback"] if "lookback" in graph.inputs else None,
        {s.name: {name: inputs[state_input(inputs, name, s)] for name in PER_GROUP} for s in graph.states},
    )


def _first(t: StateTensor) -> Tensor:
    return t if isinstance(t, Tensor) else t[0]


class _Rank:
    """One rank's run: its values so far, and how an op's outputs are stored."""

    def __init__(
        self,
        graph: Graph,
        weights: Weights,
        inputs: Mapping[str, Tensor],
        caches: Caches,
        precision: str,
        adopt: Choices | None,
    ) -> None:
        self.graph, self.weights = graph, weights
        self.inputs = inputs
        self.ctx = _context(graph, inputs, caches, precision, adopt)
        self.values = {k: inputs[k] for k in graph.inputs if k == "token" or k.startswith("in.")}

    def read(self, name: str) -> Tensor:
        v = self.values[name]
        return v.to(self.ctx.math) if v.is_floating_point() else v

    def store(self, outputs: Sequence[str], results: Sequence[Tensor]) -> None:
        for name, y in zip(outputs, results, strict=True):
            exact = self.ctx.math == torch.float64 or not y.is_floating_point()
            self.values[name] = y if exact else y.to(TORCH_DTYPE[self.graph.value(name).dtype])

    def step(self, index: int) -> None:
        op = self.graph.ops[index]
        weights = {role: self.weights[name] for role, name in op.weights}
        ctx = self.ctx
        own: dict[str, Any] = {
            name: self.inputs[f"{name}@{op.layer}"] for name in PER_GROUP if f"{name}@{op.layer}" in self.inputs
        }
        if own:
            ctx = replace(ctx, **own)  # type: ignore[arg-type]  # only names of PER_GROUP, all tensors
        self.store(op.outputs, OPS[op.kind].ref(op, [self.read(v) for v in op.inputs], weights, ctx))


def run(
    graph: Graph,
    weights: Weights,
    inputs: Mapping[str, Tensor],
    caches: Caches,
    precision: str = "f64",
    adopt: Choices | None = None,
) -> dict[str, Tensor]:
    """One decode step of one rank; caches are updated in place.

    `inputs` holds every name of graph.inputs: token i32 [R], seq_len i32 [R] (with the new token), block_table i32
    [R, max_blocks], slot_mapping i64 [R], state_slot i32 [R], where the graph names it lookback i32 [R, k]; for a later
    pipeline stage also what the stage before hands over ("in.p" and "in.block{j}" [R, H], or the family's own). R is the
    number of rows given. Returns every value by name, [R, width], in float64 ("f64") or the value's dtype ("bf16").
    `adopt` takes over another implementation's top-k choices within their score error (ChoiceError otherwise).
    """
    rank = _Rank(graph, weights, inputs, caches, precision, adopt)
    for i in range(len(graph.ops)):
        rank.step(i)
    return rank.values


def run_ranks(
    graphs: Sequence[Graph],
    weights: Sequence[Weights],
    inputs: Mapping[str, Tensor],
    caches: Sequence[Caches],
    precision: str = "f64",
) -> list[dict[str, Tensor]]:
    """One decode step of all ranks of a tensor-parallel group with real peers, in lockstep; values per rank."""
    ranks = [_Rank(g, w, inputs, c, precision, None) for g, w, c in zip(graphs, weights, caches, strict=True)]
    for i, op in enumerate(graphs[0].ops):
        if op.kind in COLLECTIVES:
            total = combine(op.kind, [r.read(r.graph.ops[i].inputs[0]) for r in ranks])
            for r in ranks:
                r.store(op.outputs, [total])
        else:
            for r in ranks:
                r.step(i)
    return [r.values for r in ranks]
