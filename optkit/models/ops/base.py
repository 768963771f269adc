"""What every op family shares: the step context, the registry entry and the activations.

An op's `ref` is written once, in torch. It computes in `ctx.math` (float64: the reference; float32: the plain bf16
implementation, whose outputs the caller rounds). Inputs arrive already cast to `ctx.math`; weights may have any
dtype and are cast here. Values are [rows, width].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops.quantised import expand

WeightTensor = Tensor | tuple[Tensor, Tensor]
"""One resident weight; "mxfp4" weights are (packed uint8 [..., in/2], scales uint8 [..., in/32]), "mxfp8" and
"fp8_block" weights (e4m3 elements [out, in], scales uint8, see graph.Weight)."""
StateTensor = Tensor | tuple[Tensor, Tensor]
"""kv [blocks, block_size, width]; kv_heads a pair K, V [blocks, block_size, kv_heads, dim];
conv [slots, taps-1, 3D]; recurrent [slots, heads, V, K]; ring [slots, capacity, width]."""


class ChoiceError(ValueError):
    """Another implementation chose experts or keys that this one's scores do not allow."""


@dataclass
class Choices:
    """Top-k choices of another implementation, to be adopted by the reference.

    `ids` maps a route op's ids value (e.g. "L3.ids") or an index op's selection ("L2.sel", "L4.blocks") to int
    [rows, topk]; a differing choice is adopted only if the scores (with bias) of the swapped experts lie within
    `score_error` of each other, those of swapped keys or blocks within `key_score_error`. `adopted` collects
    (value, row, gap) for every row whose set differed.
    """

    ids: Mapping[str, Tensor]
    score_error: float
    key_score_error: float = 0.0
    adopted: list[tuple[str, int, float]] = field(default_factory=list)


@dataclass
class StepContext:
    """Everything of a step that is not a value or a weight. R = rows.

    seq_len i32 [R] (length including the new token), block_table i32 [R, max_blocks], slot_mapping i64 [R] (flat
    position block * block_size + offset of the new KV row, negative = padding), state_slot i32 [R] (<= 0 = padding).
    Cache rows are reached through the block table only; the caches may have any strides.
    """

    seq_len: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    state_slot: Tensor
    block_size: int
    states: Mapping[str, StateTensor]
    math: torch.dtype = torch.float64
    active: Tensor | None = None  # bool [R]; None = all rows
    choices: Choices | None = None
    lookback: Tensor | None = None  # i32 [R, k]: tokens before the new one, nearest first, -1 = none
    per_state: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # graph.PER_GROUP inputs by state name

    def state(self, name: str) -> Tensor:
        """A state held as one tensor."""
        t = self.states[name]
        assert isinstance(t, Tensor), f"{name} is a pair"
        return t

    def kv_pair(self, name: str) -> tuple[Tensor, Tensor]:
        """A state held as K and V."""
        t = self.states[name]
        assert isinstance(t, tuple), f"{name} is not a pair"
        return t

    def of(self, state: str, ratio: int = 1) -> StepContext:
        """The step as the cache group of a paged state with `ratio` tokens a row sees it: its table, slots, block size."""
        return replace(self, block_size=self.state(state).shape[1] * ratio, **self.per_state.get(state, {}))

    def token_rows(self, row: int) -> tuple[Tensor, Tensor]:
        """(block, offset) of every token of the request in `row`, oldest first."""
        pos = torch.arange(int(self.seq_len[row]), device=self.block_table.device)
        return self.block_table[row, pos // self.block_size].long(), pos % self.block_size

    def new_token(self, row: int) -> tuple[int, int] | None:
        """(block, offset) where the new token of `row` goes; None for a padding row."""
        slot = int(self.slot_mapping[row])
        return None if slot < 0 else divmod(slot, self.block_size)

    def group_rows(self, row: int, groups: Tensor, ratio: int) -> tuple[Tensor, Tensor]:
        """(block, offset) of the cache rows of `groups` (ascending or not) of the request in `row`; ratio tokens each."""
        per_block = self.block_size // ratio
        return self.block_table[row, groups // per_block].long(), groups % per_block

    def closed_group(self, row: int, ratio: int) -> tuple[int, int] | None:
        """(block, offset) of the cache row of the group that the new token of `row` closes; None if it closes none.

        A flat slot and the block's size are multiples of the ratio apart, so no further input is needed.
        """
        slot = int(self.slot_mapping[row])
        closes = slot >= 0 and int(self.seq_len[row]) % ratio == 0
        return divmod(slot // ratio, self.block_size // ratio) if closes else None


Ref = Callable[[Op, list[Tensor], Mapping[str, WeightTensor], StepContext], list[Tensor]]


@dataclass(frozen=True)
class OpDef:
    """A registered op kind. `decompositions` are other ways to the same result, equal to `ref` in float64."""

    kind: str
    ref: Ref
    decompositions: Mapping[str, Callable[..., Any]]


OPS: dict[str, OpDef] = {}


def register(kind: str, **decompositions: Callable[..., Any]) -> Callable[[Ref], Ref]:
    """Decorator: enters `ref` of an op kind into OPS."""

    def enter(ref: Ref) -> Ref:
        OPS[kind] = OpDef(kind, ref, decompositions)
        return ref

    return enter


def cast(weights: Mapping[str, WeightTensor], role: str, ctx: StepContext) -> Tensor:
    """A weight matrix or vector in the math dtype; quantised ones are expanded."""
    return expand(weights[role], ctx.math)


def rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, kept as width 1."""
    return torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def activation(act: str, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """ "silu": silu(g) * u. "situ": [beta tanh(g/beta) sigmoid(g)] * [linear_beta tanh(u/linear_beta)].
    "clamped_silu": silu(min(g, beta)) * clip(u, -linear_beta, linear_beta)."""
    if act == "silu":
        return gate * torch.sigmoid(gate) * up
    if act == "situ":
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * (linear_beta * torch.tanh(up / linear_beta))
    if act == "clamped_silu":
        gate, up = gate.clamp(max=beta), up.clamp(-linear_beta, linear_beta)
        return gate * torch.sigmoid(gate) * up
    raise ValueError(f"act: {act!r}: expected 'silu', 'situ' or 'clamped_silu'")
