"""Bitmaps of regions against plain enumeration of units and columns."""

from __future__ import annotations

import random

import numpy as np

from optkit.plan.types import Access, Stage
from optkit.verify import regions as R

WIDTH = 24


def random_stage(rng: random.Random) -> tuple[Stage, tuple[Access, ...]]:
    row_units = rng.choice((1, 1, 3))
    units = row_units * rng.randint(1, 6)
    acc = []
    for _ in range(rng.randint(1, 2)):
        step = rng.choice((0, 2, 4))
        first = rng.randrange(units) if row_units == 1 and rng.random() < 0.4 else 0
        count = rng.randint(1, units - first) if first else 0
        acc.append(
            Access("b", rng.choice(("all", "unit")), rng.choice((0, 4)), step, rng.choice((0, 3, 4)), first, count)
        )
    stage = Stage("s", "x", (), 0, units, row_units, rng.randint(1, units), 0, rng.choice(("block", "cyclic")), (), ())
    return stage, tuple(acc)


def plain(stage: Stage, accesses: tuple[Access, ...], task: int) -> set[tuple[int, int]]:
    out = set()
    for u in stage.units_of(task):
        row = u // (stage.units // stage.row_units) if stage.row_units > 1 else -1
        for a in accesses:
            if a.applies(u):
                lo, hi = a.columns(stage.column_part(u, a.first), WIDTH)
                rows = (row,) if a.rows == "unit" and row >= 0 else range(3)
                out |= {(r, c) for r in rows for c in range(lo, hi)}
    return out


def test_overlap_and_missing_agree_with_enumeration() -> None:
    rng = random.Random(0)
    for _ in range(300):
        (s1, a1), (s2, a2) = random_stage(rng), random_stage(rng)
        f1, f2 = R.footprint(s1, a1, WIDTH), R.footprint(s2, a2, WIDTH)
        w1 = [plain(s1, a1, t) for t in range(s1.tasks)]
        w2 = [plain(s2, a2, t) for t in range(s2.tasks)]
        want = np.array([[bool(x & y) for y in w2] for x in w1])
        assert (R.overlap(f1, f2) == want).all()
        left = set().union(*w2) - set().union(*w1)
        assert bool(R.missing((f1,), f2)) == bool(left)


def test_task_of_unit_inverts_units_of() -> None:
    for units, tasks, assign in ((7, 3, "block"), (7, 3, "cyclic"), (5, 5, "block"), (448, 132, "block")):
        stage = Stage("s", "x", (), 0, units, 1, tasks, 0, assign, (), ())
        task = R.task_of_unit(R.shape_of(stage))
        assert all(task[u] == t for t in range(tasks) for u in stage.units_of(t))
