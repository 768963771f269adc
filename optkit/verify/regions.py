"""Which words the units and tasks of a stage touch, as exact bitmaps over elementary column segments.

A `Footprint` is one stage's accesses to one buffer. All functions are pure and cached by shape: the layers of a deep
model repeat a few footprints, so that a 1300-stage plan computes some dozens of them. Rows of a buffer are the token
rows of the class; run-time rows beyond the step's own are neither read nor written by anybody.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from optkit.plan.types import Access, Stage

Bool = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Shape(NamedTuple):
    """What decides the units of a stage's tasks."""

    units: int
    row_units: int
    tasks: int
    assign: str


class Footprint(NamedTuple):
    """Accesses of one stage to one buffer of `width` columns (buffer names removed, so that equal layers share it)."""

    shape: Shape
    accesses: tuple[Access, ...]
    width: int

    @property
    def exists(self) -> bool:
        """Whether every unit certainly runs: "cyclic" marks stages whose units are known only after routing."""
        return self.shape.assign != "cyclic"

    @property
    def exact(self) -> bool:
        """Whether the region is touched in full: columns chosen by an index are only an upper bound."""
        return self.exists and not any(a.by for a in self.accesses)


def shape_of(stage: Stage) -> Shape:
    """The `Shape` of a stage."""
    return Shape(stage.units, stage.row_units, stage.tasks, stage.assign)


def footprint(stage: Stage, accesses: tuple[Access, ...], width: int, rows_matter: bool = True) -> Footprint:
    """The footprint of `accesses` (all to one buffer); with rows_matter False every access touches all rows."""
    strip: dict[str, Any] = {"buffer": ""} if rows_matter else {"buffer": "", "rows": "all"}
    return Footprint(shape_of(stage), tuple(replace(a, **strip) for a in accesses), width)


@lru_cache(maxsize=4096)
def task_of_unit(shape: Shape) -> Ints:
    """Task of every unit, [units]; the inverse of Stage.units_of."""
    u = np.arange(shape.units)
    if shape.assign == "cyclic":
        return u % shape.tasks
    starts = np.arange(shape.tasks + 1) * shape.units // shape.tasks
    return np.searchsorted(starts, u, side="right") - 1


@lru_cache(maxsize=4096)
def row_of_unit(shape: Shape) -> Ints:
    """Token row of every unit, -1 for units that hold all rows, [units]."""
    if shape.row_units <= 1:
        return np.full(shape.units, -1)
    return np.arange(shape.units) // (shape.units // shape.row_units)


@lru_cache(maxsize=4096)
def regions(fp: Footprint) -> Ints:
    """[units, accesses, 3]: row (-1 = all), first column, column after the last; empty where the unit has no access."""
    shape = fp.shape
    u, row = np.arange(shape.units), row_of_unit(shape)
    out = np.zeros((shape.units, len(fp.accesses), 3), np.int64)
    for i, a in enumerate(fp.accesses):
        j = u % (shape.units // shape.row_units) if shape.row_units > 1 else u - a.first
        lo = np.minimum(a.base + j * a.step, fp.width)
        hi = np.minimum(lo + a.span, fp.width) if a.span else np.full_like(lo, fp.width)
        made = (u >= a.first) & (u < a.first + a.count) if a.count else np.ones(shape.units, bool)
        out[:, i, 0] = row if a.rows == "unit" else -1
        out[:, i, 1] = np.where(made, lo, 0)
        out[:, i, 2] = np.where(made, hi, 0)
    return out


@lru_cache(maxsize=4096)
def _grid(a: Footprint, b: Footprint) -> tuple[Ints, int]:
    """Common column boundaries of two footprints and the number of rows that must be told apart."""
    ra, rb = regions(a), regions(b)
    edges = np.unique(np.concatenate([ra[..., 1:].ravel(), rb[..., 1:].ravel()]))
    rows = 1 + max(int(ra[..., 0].max(initial=-1)), int(rb[..., 0].max(initial=-1)))
    return edges, max(rows, 1)


@lru_cache(maxsize=4096)
def _distinct(fp: Footprint) -> tuple[Ints, Ints]:
    """Distinct regions of the units, [distinct, accesses, 3], and which one each unit has, [units]."""
    reg = regions(fp).reshape(fp.shape.units, -1)
    weights = np.random.default_rng(0).integers(
        1, 1 << 62, reg.shape[1]
    )  # one 64-bit key a unit: sorting keys is cheap
    _, first, which = np.unique(reg @ weights, return_index=True, return_inverse=True)
    if not (reg[first][which.ravel()] == reg).all():  # two regions met in one key
        _, first, which = np.unique(reg, axis=0, return_index=True, return_inverse=True)
    return reg[first].reshape(len(first), -1, 3), which.ravel()


def _bitmap(fp: Footprint, edges: Ints, rows: int) -> tuple[NDArray[np.float32], Ints]:
    """Distinct unit regions as 0/1 rows over (row, segment) cells, and the distinct region of each unit."""
    distinct, which = _distinct(fp)
    cells = np.zeros((len(distinct), rows, max(len(edges) - 1, 1)), np.float32)
    bounds = np.searchsorted(edges, distinct[..., 1:])
    for k, (region, at) in enumerate(zip(distinct.tolist(), bounds.tolist(), strict=True)):
        for (row, lo, hi), (first, last) in zip(region, at, strict=True):
            if lo < hi:
                cells[k, slice(None) if row < 0 else row, first:last] = 1
    return cells.reshape(len(distinct), -1), which


def _per_task(fp: Footprint, cells: NDArray[np.float32], which: Ints) -> NDArray[np.float32]:
    """0/1 cells of every task, [tasks, cells]."""
    holds = np.zeros((fp.shape.tasks, len(cells)), np.float32)
    holds[task_of_unit(fp.shape), which] = 1
    return (holds @ cells > 0).astype(np.float32)


@lru_cache(maxsize=4096)
def overlap(a: Footprint, b: Footprint) -> Bool:
    """Which tasks of a touch a word that a task of b touches, [tasks a, tasks b]."""
    edges, rows = _grid(a, b)
    ca = _per_task(a, *_bitmap(a, edges, rows))
    cb = _per_task(b, *_bitmap(b, edges, rows))
    return ca @ cb.T > 0


@lru_cache(maxsize=4096)
def same_units(a: Footprint, b: Footprint) -> bool:
    """Whether units of a and b that share a word share all of them (one thread can own the words in both stages)."""
    if a.shape != b.shape:
        return False
    edges, rows = _grid(a, b)
    (ca, wa), (cb, wb) = _bitmap(a, edges, rows), _bitmap(b, edges, rows)
    meet = ca[wa] @ cb[wb].T > 0
    return bool((meet <= np.eye(len(meet), dtype=bool)).all())


@lru_cache(maxsize=4096)
def missing(cover: tuple[Footprint, ...], fp: Footprint) -> int:
    """Columns (of any row) that `fp` touches and none of `cover` does."""
    allr = [regions(f) for f in (*cover, fp)]
    edges = np.unique(np.concatenate([r[..., 1:].ravel() for r in allr]))
    rows = max(1, 1 + max(int(r[..., 0].max(initial=-1)) for r in allr))
    want = _bitmap(fp, edges, rows)[0].max(axis=0, initial=0)
    have = np.zeros_like(want)
    for f in cover:
        have = np.maximum(have, _bitmap(f, edges, rows)[0].max(axis=0, initial=0))
    width = np.tile(np.diff(edges) if len(edges) > 1 else np.zeros(1), rows)
    return int(width[(want > 0) & (have == 0)].sum())


@lru_cache(maxsize=4096)
def clash(a: Footprint, b: Footprint) -> tuple[int, int] | None:
    """Two different tasks of one stage of which the first's `a` and the second's `b` share a word, or None."""
    meet = overlap(a, b) & ~np.eye(a.shape.tasks, dtype=bool)
    hits = np.argwhere(meet)
    return (int(hits[0][0]), int(hits[0][1])) if len(hits) else None


class Told(NamedTuple):
    """A [tasks reader, tasks writer] relation by its distinct rows (comparing 148 columns a row is the costly part)."""

    patterns: Bool  # [distinct, tasks writer]
    which: Ints  # [tasks reader]

    @classmethod
    def of(cls, relation: Bool) -> Told:
        patterns, which = np.unique(relation, axis=0, return_inverse=True)
        return cls(patterns, which.ravel())

    @property
    def all(self) -> bool:
        return bool(self.patterns.all())


class Polled(NamedTuple):
    """One tagged buffer between two stages.

    `staged`: the reader puts the whole buffer into shared memory and meets at a CTA barrier before its first store;
    otherwise a store follows only the polls of its own thread.
    """

    writer: Footprint
    reader: Footprint
    staged: bool


class Heard(NamedTuple):
    """What tagged words tell the tasks of a reader about the tasks of their writer.

    A unit is heard in full when all words that it writes are polled: then its own polls are over, whichever of its
    threads made them. `every`: any store of the reader's task comes after the store of some word of the writer's task.
    `every_whole`: after those of all words of the writer's task. `each`: any store of the reader's task comes after the
    store of a word of *one* of these writer's tasks (one relation per buffer that is not staged). `whole`: the units of
    the reader's task together hear the writer's task in full. `units`: those of the whole reader stage together do.
    """

    every: Told
    every_whole: Told
    each: tuple[Told, ...]
    whole: Told
    units: Bool  # [units writer]


@lru_cache(maxsize=4096)
def heard(pairs: tuple[Polled, ...], unheard: tuple[Footprint, ...] = (), single: bool = True) -> Heard:
    """Knowledge carried by the tagged buffers between two stages.

    `unheard`: what the writer stage writes besides; its units that do so are not heard in full. `single`: the reader's
    units write one buffer, so that each store depends on a word of each buffer that the unit polls. For `every`,
    `every_whole` and `whole` the writer's task must have a unit that exists however few rows the step has: one of row 0
    or of all rows. Routed writers ("cyclic") may have no units at all and tell nothing.
    """
    ws, rs = pairs[0].writer.shape, pairs[0].reader.shape
    if not all(p.writer.exact for p in pairs):
        none = Told.of(np.zeros((rs.tasks, ws.tasks), bool))
        return Heard(none, none, (), none, np.zeros(ws.units, bool))
    exists = (row_of_unit(ws) <= 0)[None, :]
    staged = np.zeros((rs.units, ws.units), bool)  # reader unit polls a word of the writer unit before its first store
    polled = staged.copy()
    lost = np.zeros(ws.units, bool)  # the writer unit writes something that is not polled here
    for f in unheard:
        reg = regions(f)
        lost |= (reg[..., 2] > reg[..., 1]).any(axis=1)
    by_unit, by_task = np.tile(~lost, (rs.units, 1)), np.tile(~lost, (rs.tasks, 1))
    by_stage = ~lost
    each: list[Told] = []
    tr = task_of_unit(rs)
    for p in pairs:
        edges, rows = _grid(p.writer, p.reader)
        (cw, iw), (cr, ir) = _bitmap(p.writer, edges, rows), _bitmap(p.reader, edges, rows)
        meet = (cr @ cw.T > 0)[ir][:, iw]
        polled |= meet
        if p.staged:
            staged |= meet
        elif single and meet.any(axis=1).all():
            some = np.zeros((rs.tasks, ws.tasks), bool)
            np.logical_or.at(some, tr, _by_task(meet, ws))
            each.append(Told.of(some))
        by_unit &= ((1 - cr) @ cw.T == 0)[ir][:, iw]
        by_task &= ((1 - _per_task(p.reader, cr, ir)) @ cw.T == 0)[:, iw]
        by_stage &= ((1 - cr.max(axis=0)) @ cw.T == 0)[iw]
    every, some = np.ones((rs.tasks, ws.tasks), bool), np.zeros((rs.tasks, ws.tasks), bool)
    whole = every.copy()
    np.logical_and.at(every, tr, _by_task(staged & exists, ws))
    np.logical_or.at(some, tr, _by_task(polled & exists, ws))
    np.logical_and.at(whole, tr, ~_by_task(~by_unit, ws))
    every &= some  # a reader task without units hears nothing
    if not all(p.staged for p in pairs):
        whole[:] = False
    return Heard(
        Told.of(every),
        Told.of(whole & every),
        tuple(each),
        Told.of(~_by_task(~by_task, ws) & some),
        by_stage & polled.any(axis=0),
    )


def _by_task(of_units: Bool, shape: Shape) -> Bool:
    """[n, units] -> [n, tasks]: whether it holds for any unit of the task."""
    member = np.zeros((shape.units, shape.tasks), np.float32)
    member[np.arange(shape.units), task_of_unit(shape)] = 1
    return of_units.astype(np.float32) @ member > 0
