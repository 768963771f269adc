"""The memory of one step: buffers with a tag per element, bound inputs, caches and weights.

Every element of a buffer carries the tag of its last writer, `epoch << 16 | stage + 1` as in the kernel's tagged words
(contracts: Buffer.layout). Nothing clears tags between steps; a reader compares for equality, so a word of an earlier
epoch or of the buffer's previous user never passes. A `Guard` adds the checks of validation mode: a task may touch only
what its stage's Accesses declare, and may read only what the sequentially last writer wrote in this epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from optkit.execute.weights import WeightStore
from optkit.models.graph import step_name
from optkit.models.ops import StateTensor
from optkit.plan.types import Access, Buffer, Plan, Stage

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, "i64": torch.int64}
LOCAL = ("activation", "scratch", "mailbox")
"""Buffer classes that live in this memory; inputs and state are bound, sync words are the scheduler's."""


class ExecutionError(RuntimeError):
    """A task did what the Plan does not allow; the message names stage, units, buffer and columns."""


def poison_value(dtype: torch.dtype) -> float | int:
    """NaN for floats, the smallest int otherwise: nothing reads it unseen."""
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def unit_span(stage: Stage, access: Access, unit: int, width: int) -> tuple[int | None, int, int] | None:
    """(row or None for all rows, first column, end column) that `unit` touches, or None if it makes no such access."""
    if not access.applies(unit):
        return None
    row = unit // (stage.units // stage.row_units) if access.rows == "unit" else None
    lo, hi = access.columns(stage.column_part(unit, access.first), width)
    return (row, lo, hi) if lo < hi else None


def merge(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, disjoint union of half-open intervals."""
    out: list[tuple[int, int]] = []
    for lo, hi in sorted(spans):
        if out and lo <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], hi))
        else:
            out.append((lo, hi))
    return out


def touched(
    stage: Stage, accesses: Iterable[Access], units: Sequence[int], buffer: str, width: int
) -> dict[int | None, list[tuple[int, int]]]:
    """Columns of `buffer` that `units` touch, by row (None = all rows)."""
    spans: dict[int | None, set[tuple[int, int]]] = {}
    for access in accesses:
        if access.buffer != buffer:
            continue
        for unit in units:
            span = unit_span(stage, access, unit, width)
            if span is not None:
                spans.setdefault(span[0], set()).add(span[1:])
            if access.rows == "all" and access.step == 0 and not access.count:
                break  # the same columns for every unit
    return {row: merge(s) for row, s in spans.items()}


def memo(plan: Plan, key: Any, make: Any) -> Any:
    """`make()`, once for each Plan object: hashing a whole Plan on every look-up would cost more than most answers."""
    cache = plan.__dict__.setdefault("_execute_memo", {})
    if key not in cache:
        cache[key] = make()
    return cache[key]


Writers = tuple[torch.Tensor, int]


def sequential_writers(plan: Plan) -> tuple[dict[str, Writers], ...]:
    """For each stage: buffer it reads -> (i64 [width], the last earlier stage that writes each column (-1: none); that
    stage if it is one and the same for all columns, else -1).

    This is what a reader must see whatever the order: the result of running the stages one after the other.
    """
    return memo(plan, "writers", lambda: _sequential_writers(plan))


def _sequential_writers(plan: Plan) -> tuple[dict[str, Writers], ...]:
    last = {b.name: torch.full((b.width,), -1, dtype=torch.int64) for b in plan.buffers if b.klass in LOCAL}
    out: list[dict[str, Writers]] = []
    for index, stage in enumerate(plan.stages):
        out.append(
            {
                name: (last[name].clone(), int(last[name][0]) if len(last[name].unique()) == 1 else -1)
                for name in {a.buffer for a in stage.reads}
                if name in last
            }
        )
        for name in {a.buffer for a in stage.writes} & last.keys():
            spans = touched(stage, stage.writes, range(stage.units), name, len(last[name]))
            for lo, hi in merge(s for group in spans.values() for s in group):
                last[name][lo:hi] = index
    return tuple(out)


class Memory:
    """Buffers of one Plan on one device, plus what vLLM and the checkpoint bring.

    `rows` is the run-time row count of the current step (<= plan.rows); rows beyond it are never written.
    """

    def __init__(
        self,
        plan: Plan,
        weights: WeightStore,
        caches: Mapping[str, StateTensor],
        device: torch.device,
        block_size: int = 1,
    ) -> None:
        self.block_size = block_size  # tokens of one page of the KV caches
        self.plan, self.weights, self.caches, self.device = plan, weights, caches, device
        self.rows = 0
        self.epoch = 0
        self.inputs: dict[str, torch.Tensor] = {}
        self.choices: dict[str, torch.Tensor] = {}
        self.stage = -1
        self.guard: Guard | None = None
        self.data: dict[str, torch.Tensor] = {}
        self.tags: dict[str, torch.Tensor] = {}
        for b in plan.buffers:
            if b.klass in LOCAL:
                shape = (b.ranks, b.rows, b.width) if b.ranks else (b.rows, b.width)
                self.data[b.name] = torch.full(
                    shape, poison_value(DTYPES[b.dtype]), dtype=DTYPES[b.dtype], device=device
                )
                self.tags[b.name] = torch.zeros((b.rows, b.width), dtype=torch.int64, device=device)

    @property
    def class_rows(self) -> int:
        """Rows every product is computed for, so that bits depend on the token class alone."""
        return self.plan.rows

    def begin(self, inputs: Mapping[str, torch.Tensor], *, poison: bool) -> None:
        """A new epoch with these step inputs; `poison` overwrites every buffer first."""
        self.epoch += 1
        self.inputs = {k: v.to(self.device) for k, v in inputs.items()}
        self.rows = int(next(iter(self.inputs.values())).shape[0])
        if not 1 <= self.rows <= self.plan.rows:
            raise ExecutionError(f"rows={self.rows}: plan {self.plan.name!r} takes 1..{self.plan.rows} rows a step")
        if poison:
            for t in self.data.values():
                t.fill_(poison_value(t.dtype))

    def tag(self, stage: int) -> int:
        """Tag that `stage` writes in this epoch."""
        return self.epoch << 16 | (stage + 1)

    def buffer(self, name: str) -> Buffer:
        return self.plan.buffer[name]

    def active(self, name: str) -> int:
        """Active rows of a buffer: the step's rows, or all rows of one-row buffers such as the routing table."""
        return min(self.rows, self.plan.buffer[name].rows)

    def load(self, name: str, rows: tuple[int, int] | None = None, lo: int = 0, hi: int | None = None) -> torch.Tensor:
        """Stored values [rows, hi - lo] (mailbox: [ranks, rows, hi - lo]) of the active rows, or of rows [r0, r1)."""
        data = self.data[name] if name in self.data else self.inputs[name]
        r0, r1 = rows or (0, self.active(name))
        hi = data.shape[-1] if hi is None else hi
        if self.guard is not None:
            self.guard.check_load(self, name, r0, r1, lo, hi)
        return data[..., r0:r1, lo:hi]

    def store(self, name: str, value: torch.Tensor, rows: tuple[int, int] | None = None, lo: int = 0) -> None:
        """Rounds `value` to the buffer's dtype and writes it at rows [r0, r1) (default: active), columns from `lo`."""
        data = self.data[name]
        r0, r1 = rows or (0, self.active(name))
        hi = lo + value.shape[-1]
        if self.guard is not None:
            self.guard.check_store(self, name, value, r0, r1, lo, hi)
        data[..., r0:r1, lo:hi] = value  # copying rounds to nearest even
        if self.guard is not None:
            self.tags[name][r0:r1, lo:hi] = self.tag(self.stage)

    def input(self, name: str) -> torch.Tensor:
        """A step input of the active rows, as the current stage's layer reads it."""
        return self.inputs[step_name(self.inputs, name, self.plan.stages[self.stage].layer)]

    def cache(self, state: str) -> torch.Tensor:
        """The paged tensor bound to a State, to be read and written in place."""
        if self.guard is not None:
            self.guard.check_state(state)
        t = self.caches[state]
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"state {state!r} is a (K, V) pair: expected one tensor")
        return t

    def cache_pair(self, state: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The (K, V) pair bound to a State of kind kv_heads."""
        if self.guard is not None:
            self.guard.check_state(state)
        t = self.caches[state]
        if isinstance(t, torch.Tensor):
            raise TypeError(f"state {state!r} is one tensor: expected a (K, V) pair")
        return t


class Guard:
    """Validation-mode checks of one task: Accesses are complete, reads see this epoch's last sequential writer."""

    def __init__(
        self, plan: Plan, stage: int, units: Sequence[int], *, accesses: bool, injected: frozenset[str] = frozenset()
    ) -> None:
        self.plan, self.index, self.units, self.accesses, self.injected = plan, stage, units, accesses, injected
        self.stage = plan.stages[stage]
        self.writers = sequential_writers(plan)[stage]

    def _where(self, what: str, name: str, lo: int, hi: int) -> str:
        u = self.units
        return (
            f"stage {self.index} {self.stage.name!r} (units {u[0]}..{u[-1]}) {what} buffer {name!r} "
            f"columns [{lo}, {hi})"
        )

    def _declared(self, what: str, accesses: Sequence[Access], name: str, r0: int, r1: int, lo: int, hi: int) -> None:
        spans = touched(self.stage, accesses, self.units, name, self.plan.buffer[name].width)
        for row in range(r0, r1):
            if not any(a <= lo and hi <= b for a, b in merge(spans.get(None, []) + spans.get(row, []))):
                raise ExecutionError(
                    self._where(what, name, lo, hi) + f" row {row}: not declared in its Accesses "
                    f"(declared {spans or 'nothing'})"
                )

    def check_load(self, mem: Memory, name: str, r0: int, r1: int, lo: int, hi: int) -> None:
        """Refuses undeclared reads, and reads of anything but what the last sequential writer left this epoch."""
        if self.accesses:
            self._declared("reads", self.stage.reads, name, r0, r1, lo, hi)
        if name not in self.writers:
            if name not in mem.data and any(a.buffer == name for a in self.stage.reads):
                return  # a step input of vLLM: written before the launch
            raise ExecutionError(self._where("reads", name, lo, hi) + ": not declared in its Accesses")
        if r0 == r1 or name in self.injected:
            return
        writers, only = self.writers[name]
        got = mem.tags[name][r0:r1, lo:hi]
        want = (
            mem.tag(only)
            if only >= 0
            else torch.where(writers < 0, -1, (mem.epoch << 16) + writers + 1)[lo:hi].to(mem.device)
        )
        if bool((got != want).any()):
            row, col = (int(x[0]) for x in torch.nonzero(got != want, as_tuple=True))
            tag, due = int(got[row, col]), int(want if isinstance(want, int) else want[col])
            raise ExecutionError(
                self._where("reads", name, lo, hi) + f" row {r0 + row} column {lo + col} before its write: expected "
                f"the value of {self._writer(due)}, found that of {self._writer(tag)} (epoch now {mem.epoch})"
            )

    def check_state(self, name: str) -> None:
        """Refuses a state that no Access of the stage names."""
        if all(a.buffer != name for a in (*self.stage.reads, *self.stage.writes)):
            raise ExecutionError(f"stage {self.index} {self.stage.name!r} uses state {name!r}: not in its Accesses")

    def _writer(self, tag: int) -> str:
        if tag <= 0:
            return "nobody"
        return f"stage {(tag & 0xFFFF) - 1} {self.plan.stages[(tag & 0xFFFF) - 1].name!r} of epoch {tag >> 16}"

    def check_store(self, mem: Memory, name: str, value: torch.Tensor, r0: int, r1: int, lo: int, hi: int) -> None:
        """Refuses undeclared writes, writes beyond the active rows, and NaN (poison that was read)."""
        if r1 > mem.active(name):
            raise ExecutionError(self._where("writes", name, lo, hi) + f": rows up to {r1}, {mem.active(name)} active")
        if self.accesses:
            self._declared("writes", self.stage.writes, name, r0, r1, lo, hi)
        if value.is_floating_point() and bool(torch.isnan(value).any()):
            raise ExecutionError(self._where("writes", name, lo, hi) + ": NaN, it has used poisoned or damaged data")
