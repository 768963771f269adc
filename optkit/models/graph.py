"""The vocabulary of a decode step: values, weights, persistent state and the ops between them.

A `Graph` says *what* one decode step computes for up to `rows` token rows; it says nothing of fusion, tasks or
SMs. Every architecture file builds one; `plan/` and `execute/` read it. Widths are per token row: a value of
width n is a tensor [rows, n]. Plain data, hashable, no torch.
"""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

DTYPE_BYTES = {"bf16": 2, "f32": 4, "i32": 4, "i64": 8}
MX_GROUP = 32
"""Columns that share one ue8m0 scale in an "mxfp4" or "mxfp8" weight; side of a tile of an "fp8_block" weight."""


@dataclass(frozen=True)
class Value:
    """A step-local tensor [rows, width].

    `round` is the rounding point of the op that makes it: the dtype the value is rounded to when it is produced
    (the noise-band implementation and the kernel round here; float64 `ref` does not).
    """

    name: str
    width: int
    dtype: str = "bf16"  # bf16 | f32 | i32


@dataclass(frozen=True)
class Weight:
    """One logical weight as one rank holds it.

    `source` lists the checkpoint tensors it is made from (without the wrapper prefix, e.g.
    ``model.layers.3.self_attn.q_proj.weight``; ``{}`` stands for every index of the stack); `pack` names the
    reversible packing that makes the resident tensor from them (see models/packing.py) and `pack_args` holds its
    constants. `shape` is the resident shape on this rank, [out, in] for matrices, [E, out, in] for stacked experts.
    dtype "mxfp4": two resident tensors, packed uint8 [..., in/2] and ue8m0 scales uint8 [..., in/32]; "mxfp8": e4m3
    [out, in] and ue8m0 scales uint8 [out, in/32]; "fp8_block": the same elements with one ue8m0 scale per tile of 32
    rows and 32 columns, uint8 [ceil(out/32), ceil(in/32)]. `shard` is the axis of the resident tensor that is cut into
    equal parts across the tensor-parallel ranks (-1: every rank holds all of it). `place` "host": a table too large
    for the device, of which a step gathers a few rows; it stays in mapped host memory and counts no device bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: tuple[str, ...]
    pack: str = "plain"
    shard: int = -1
    pack_args: tuple[tuple[str, int], ...] = ()
    place: str = "device"

    @property
    def nbytes(self) -> int:
        n = math.prod(self.shape)
        if self.dtype == "mxfp4":
            return n // 2 + n // MX_GROUP
        if self.dtype == "mxfp8":
            return n + n // MX_GROUP
        if self.dtype == "fp8_block":
            return n + math.prod(-(-s // MX_GROUP) for s in self.shape)
        return n * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class State:
    """Persistent tensors that vLLM owns. `shape` is per slot (conv, recurrent, ring) or per row (kv, kv_heads).

    kv rows stand for `ratio` tokens each: row t of a request (tokens t * ratio to t * ratio + ratio - 1) lies in page
    block_table[t // n] at offset t % n, n = block_size / ratio rows of a page. Only the last `window` tokens are read
    where `window` > 0, so older pages may be null. `format` names the grid that the rows are rounded to when they are
    written (models/ops/cache_formats.py); `dtype` holds those values without a further rounding. A ring holds the
    last shape[0] rows of a request: position p at index p mod shape[0] of its slot.
    """

    name: str  # e.g. "L3.kv"
    kind: str  # conv | recurrent | ring | kv (paged rows [blocks, n, width]) | kv_heads (paged K and V per kv head)
    shape: tuple[int, ...]
    dtype: str
    layer: int
    ratio: int = 1
    window: int = 0
    format: str = "none"


@dataclass(frozen=True)
class Op:
    """One op. `weights` maps role -> Weight name, `states` role -> State name, `attrs` holds constants."""

    name: str  # "L3.in_proj"; unique
    kind: str  # a key of models.ops.OPS
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[tuple[str, str], ...] = ()
    states: tuple[tuple[str, str], ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()
    layer: int = -1  # -1 before the first layer, `layers` after the last

    def attr(self, key: str) -> Any:
        return dict(self.attrs)[key]

    def weight(self, role: str) -> str:
        return dict(self.weights)[role]

    def state(self, role: str) -> str:
        return dict(self.states)[role]


@dataclass(frozen=True)
class Graph:
    """One decode step of one rank.

    `inputs` are step inputs by vLLM: "token" (i32 [rows]), "seq_len" (i32 [rows], length including the new
    token), "block_table" (i32 [rows, max_blocks]), "slot_mapping" (i64 [rows], flat position of the new KV row,
    negative = padding), "state_slot" (i32 [rows], <= 0 = padding); where ops look back at earlier tokens "lookback"
    (i32 [rows, k], tokens at positions p-1 .. p-k, -1 before the sequence); for a later pipeline stage also the prefix
    and saved rows. `layers` is the half-open range of layers this graph covers.
    """

    name: str
    family: str
    rows: int
    layers: tuple[int, int]
    values: tuple[Value, ...]
    weights: tuple[Weight, ...]
    states: tuple[State, ...]
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...] = field(default=())

    def value(self, name: str) -> Value:
        return self._index("values")[name]

    def weight(self, name: str) -> Weight:
        return self._index("weights")[name]

    def state(self, name: str) -> State:
        return self._index("states")[name]

    def op(self, name: str) -> Op:
        return self._index("ops")[name]

    def producer(self, value: str) -> Op:
        index = self.__dict__.get("_producers")
        if index is None:
            index = {v: op for op in self.ops for v in op.outputs}
            object.__setattr__(self, "_producers", index)
        return index[value]

    def _index(self, what: str) -> dict[str, Any]:
        cache = self.__dict__.setdefault("_by_name", {})
        if what not in cache:
            cache[what] = {x.name: x for x in getattr(self, what)}
        return cache[what]


PER_GROUP = ("block_table", "slot_mapping", "state_slot")
"""Step inputs that a cache group of vLLM may have for itself."""


def step_name(inputs: Container[str], name: str, layer: int) -> str:
    """The step input that a layer reads: "state_slot@3" if there is one for layer 3 alone, else "state_slot".

    vLLM splits the layers of a hybrid model into cache groups, each with a block table, slot mapping and state slots of
    its own.
    """
    own = f"{name}@{layer}"
    return own if own in inputs else name


def state_input(inputs: Container[str], name: str, state: State) -> str:
    """The step input through which a state is reached: "block_table@L2.compressed", "block_table@2" or "block_table".

    A layer may read states of several cache groups (its own window, another layer's compressed rows).
    """
    own = f"{name}@{state.name}"
    return own if own in inputs else step_name(inputs, name, state.layer)


class Builder:
    """Collects a Graph op by op; every `add` returns the names of the op's outputs."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.weights: dict[str, Weight] = {}
        self.states: dict[str, State] = {}
        self.ops: list[Op] = []

    def weight(self, name: str, shape: tuple[int, ...], dtype: str = "bf16", source: tuple[str, ...] | None = None,
               pack: str = "plain", shard: int = -1, pack_args: dict[str, int] | None = None,
               place: str = "device") -> str:
        args = tuple(sorted((pack_args or {}).items()))
        self.weights[name] = Weight(name, shape, dtype, source or (name,), pack, shard, args, place)
        return name

    def state(self, name: str, kind: str, shape: tuple[int, ...], dtype: str, layer: int, *, ratio: int = 1,
              window: int = 0, format: str = "none") -> str:
        self.states[name] = State(name, kind, shape, dtype, layer, ratio, window, format)
        return name

    def add(self, name: str, kind: str, inputs: tuple[str, ...], outputs: tuple[tuple[str, int, str], ...], *,
            weights: dict[str, str] | None = None, states: dict[str, str] | None = None, layer: int = -1,
            **attrs: Any) -> tuple[str, ...]:
        for out, width, dtype in outputs:
            if out in self.values:
                raise ValueError(f"value {out!r} has two producers")
            self.values[out] = Value(out, width, dtype)
        names = tuple(o[0] for o in outputs)
        self.ops.append(Op(name, kind, inputs, names, tuple(sorted((weights or {}).items())),
                           tuple(sorted((states or {}).items())), tuple(sorted(attrs.items())), layer))
        return names

    def build(self, **kw: Any) -> Graph:
        return Graph(values=tuple(self.values.values()), weights=tuple(self.weights.values()),
                     states=tuple(self.states.values()), ops=tuple(self.ops), **kw)
