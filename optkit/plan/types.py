"""The Plan: one description of how a decode step runs, made once and only read afterwards.

Vocabulary. A *stage* is a set of fused ops. Its work is cut into `units` (a 16-row weight tile, one head of one
token row, ...). A *task* is the share of one SM in one stage: there are `tasks` of them, task t runs on SM
(first_sm + t) % sms, and holds units by `assign`: "block" (balanced contiguous ranges) or "cyclic" (unit i belongs
to task i % tasks; used where the number of non-empty units is known only after routing). Every SM runs its tasks in
stage order, so the stage list is the global topological order. All counts are static: a task whose units turn out
empty (padding rows, experts nobody chose) still arrives.

Everything is frozen, JSON-serialisable and hashable; same recipe => same bytes (`Plan.to_json`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

SCHEMA = "optkit-plan/1"
CLASSES = ("weight", "table", "input", "activation", "scratch", "state", "mailbox", "sync")
MECHANISMS = ("same_sm", "counter", "tagged", "grid_barrier", "peer_mailbox", "program")
"""`program`: both ends are the same task chain on one SM in stage order and on one thread; needs no instruction."""


class Record(dict[str, Any]):
    """A read-only, hashable mapping: the nested groups inside `Stage.params` (a part of a packed stage, a prologue)."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a Record is read-only; make a new one: Record(old, key=value)")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, (dict(self),)


@dataclass(frozen=True)
class Buffer:
    """One named region of device memory, [rows, width] per copy.

    `layout` "plain" = row-major elements of `dtype`; "tagged" = 16-byte words of 8 payload bytes (4 bf16 or 2 f32)
    and a 64-bit tag (epoch << 16 | writing stage index + 1), so a reader polls the data itself. Buffers of class
    `state` and `input` belong to vLLM and are bound at run time (`rows` = request slots, `width` informative).
    `ranks` > 0 only for mailboxes: [ranks, rows, width], slot p filled by rank p; `copies` > 1: copy epoch % copies is
    in use (real peers may run one step ahead of a slow reader).
    """

    name: str
    klass: str
    dtype: str
    rows: int
    width: int
    layout: str = "plain"
    ranks: int = 0
    copies: int = 1

    @property
    def nbytes(self) -> int:
        item = {"bf16": 2, "f32": 4, "i32": 4, "i64": 8}[self.dtype]
        n = self.copies * max(self.ranks, 1) * self.rows * self.width * item
        return 2 * n if self.layout == "tagged" else n


@dataclass(frozen=True)
class Access:
    """What one unit touches of a buffer.

    Unit u of a stage with `row_units` R > 1 belongs to row u // (units // R) with column part j = u % (units // R);
    with row_units 1 it belongs to all rows and j = u - first (for accesses of one part of a packed stage `first` and
    `count` restrict the access to units first <= u < first + count; other units do not make it).
    `rows` "all" | "unit" says which rows; columns are [base + j * step, base + j * step + span) clipped to the
    buffer's width; step 0 = the same columns for every unit. `span` 0 = whole width from `base`.
    `ranks` "own" | "all": which mailbox slots (emulated peers write all of them).
    `by` names an index value: the columns depend on its elements; units are disjoint only by its `partition` fact.
    """

    buffer: str
    rows: str = "all"
    base: int = 0
    step: int = 0
    span: int = 0
    first: int = 0
    count: int = 0  # 0 = all units
    ranks: str = "all"
    by: str = ""

    def applies(self, unit: int) -> bool:
        """Whether this unit makes the access."""
        return self.count == 0 or self.first <= unit < self.first + self.count

    def columns(self, j: int, width: int) -> tuple[int, int]:
        """Half-open column range of column part `j` in a buffer of `width` columns."""
        lo = min(self.base + j * self.step, width)
        return lo, min(lo + self.span, width) if self.span else width


@dataclass(frozen=True)
class Stream:
    """Weight tiles that one unit of a stage pulls through its SM's ring, in order.

    A tile is `rows` weight rows times at most `chunk` columns; a unit pulls `tiles` of them. `first`/`count` restrict
    the stream to the units of one part. `index` names the value whose elements choose the expert (routed weights):
    then the tiles may be queued only after that value's edge; otherwise ("static") they may be queued before any
    edge, as far ahead as the ring is deep, when the overlap `weight_stream` is on.
    `weight2`: the second half of a tile's rows comes from this weight (gate | up). `repeat`: the unit pulls its tiles
    once for each of at most so many elements of `index`. The last tile of a row may be narrower than `chunk`.
    """

    weight: str
    rows: int
    chunk: int
    tiles: int
    tile_bytes: int
    first: int = 0
    count: int = 0
    index: str = ""
    weight2: str = ""
    repeat: int = 1


@dataclass(frozen=True)
class Stage:
    """One fused stage. `params` holds all constants the device body and the executor need (sorted pairs)."""

    name: str  # "L3.in_proj"
    body: str  # key of emit.kernels bodies and of execute bodies
    ops: tuple[str, ...]  # graph ops computed here, in order
    layer: int
    units: int
    row_units: int
    tasks: int
    first_sm: int
    assign: str
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    streams: tuple[Stream, ...] = ()
    params: tuple[tuple[str, Any], ...] = ()
    smem: int = 0  # bytes of shared memory beside the ring
    regs: int = 0  # declared register ceiling of the body, per thread

    @cached_property
    def _param(self) -> dict[str, Any]:
        return dict(self.params)

    def param(self, key: str, default: Any = None) -> Any:
        return self._param.get(key, default)

    def units_of(self, task: int) -> range:
        """The units of one task, in execution order."""
        if self.assign == "cyclic":
            return range(task, self.units, self.tasks)
        return range(task * self.units // self.tasks, (task + 1) * self.units // self.tasks)

    def sm_of(self, task: int, sms: int) -> int:
        return (self.first_sm + task) % sms

    def column_part(self, unit: int, first: int = 0) -> int:
        """The column part j of a unit (see Access)."""
        return unit % (self.units // self.row_units) if self.row_units > 1 else unit - first


@dataclass(frozen=True)
class Edge:
    """Stage `src` must be finished (all its tasks) before any task of stage `dst` proceeds.

    kind: raw | war | waw; mechanism: one of MECHANISMS. A `counter` edge: every task of src releases one arrival, dst
    waits (acquire) for src.tasks arrivals per epoch. A `tagged` edge orders only the words of `buffer` that a
    reader reads. A war/waw edge is listed only when no chain of other edges already implies it.
    """

    src: int
    dst: int
    buffer: str
    kind: str
    mechanism: str


@dataclass(frozen=True)
class IndexSet:
    """A data-dependent set: who makes it, its bound, and the facts proofs may use (checked at run time)."""

    value: str
    producer: str  # stage name, or "contract:<who>"
    bound: int
    facts: tuple[str, ...]


@dataclass(frozen=True)
class Segment:
    """A run of `count` instances of one body (list of stage templates), starting at layer `layer`.

    In templates "@" stands for the instance's layer index; `tables` gives per-instance values for every other hole
    "${name}".
    """

    body: str
    layer: int
    count: int
    tables: tuple[tuple[str, tuple[Any, ...]], ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything the kernel, the executor, the proofs, the cost model and the report read."""

    name: str
    recipe_digest: str
    hardware: tuple[tuple[str, Any], ...]
    sms: int
    rows: int  # token class: at most this many rows a step; fewer at run time, padded rows write nothing
    parallel: tuple[tuple[str, Any], ...]
    stages: tuple[Stage, ...]  # unrolled, in global order
    segments: tuple[Segment, ...]
    buffers: tuple[Buffer, ...]
    edges: tuple[Edge, ...]
    index_sets: tuple[IndexSet, ...]
    ring_slots: int
    ring_slot_bytes: int
    threads: int
    choices: tuple[tuple[str, Any], ...]  # fusion / overlap / sync choices as lowered
    memory: tuple[tuple[str, int], ...]  # device bytes per GPU: weights, kv, state, workspace, total
    schema: str = field(default=SCHEMA)

    @cached_property
    def buffer(self) -> dict[str, Buffer]:
        return {b.name: b for b in self.buffers}

    @cached_property
    def index(self) -> dict[str, int]:
        return {s.name: i for i, s in enumerate(self.stages)}

    @cached_property
    def waits(self) -> tuple[tuple[Edge, ...], ...]:
        """Edges into each stage, by stage index."""
        out: list[list[Edge]] = [[] for _ in self.stages]
        for e in self.edges:
            out[e.dst].append(e)
        return tuple(tuple(x) for x in out)

    @cached_property
    def mechanisms(self) -> frozenset[str]:
        """The mechanisms that some edge has."""
        return frozenset(e.mechanism for e in self.edges)

    def hw(self, key: str) -> Any:
        return dict(self.hardware)[key]

    def to_json(self) -> str:
        """Canonical bytes: bodies once, instances as tables (see plan.compress)."""
        from optkit.plan.compress import compress

        return json.dumps(compress(self), sort_keys=True, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def as_dict(obj: Any) -> dict[str, Any]:
    """A dataclass as plain JSON-able data."""
    return asdict(obj)
