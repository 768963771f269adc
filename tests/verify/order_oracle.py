"""A slow second opinion on ordering: one node per load and store of every unit, and reachability.

Nodes: start and end of each task, each load and each store of a word. "before" edges say what is over before what;
"visible" edges what release/acquire publishes. Where a body leaves open which load a store depends on, a random choice
is made that keeps to the assumptions of order.py: each store depends on at least one word of each buffer that its unit
polls, and each load feeds at least one store. An order that the proof claims must hold for every choice.
"""

from __future__ import annotations

import random
from collections import defaultdict

import networkx as nx

from optkit.plan.types import Access, Plan, Stage
from optkit.verify.clocks import ACQUIRE, BY_VALUE
from optkit.verify.order import STAGED

Word = tuple[str, int, int]  # buffer, row, column


def words(plan: Plan, stage: Stage, unit: int, a: Access, rows: int) -> list[Word]:
    """The words of one access of one unit with `rows` run-time rows."""
    if a.count and not a.first <= unit < a.first + a.count:
        return []
    per_row = stage.units // stage.row_units
    row, j = (unit // per_row, unit % per_row) if stage.row_units > 1 else (-1, unit - a.first)
    if row >= rows:
        return []
    width = plan.buffer[a.buffer].width
    lo = min(a.base + j * a.step, width)
    hi = min(lo + a.span, width) if a.span else width
    of = [row] if a.rows == "unit" and row >= 0 else range(rows)
    return [(a.buffer, r, c) for r in of for c in range(lo, hi)]


def unordered(plan: Plan, rows: int, rng: random.Random) -> list[tuple[str, str, str, str]]:
    """(kind, buffer, first stage, then stage) of RAW and WAR pairs that nothing orders."""
    before, visible = nx.DiGraph(), nx.DiGraph()
    last: dict[int, int] = {}
    loads: dict[Word, list[tuple]] = defaultdict(list)
    stores: dict[Word, list[tuple]] = defaultdict(list)
    for i, s in enumerate(plan.stages):
        by_value = {e.buffer: e.src for e in plan.waits[i] if e.mechanism in BY_VALUE}
        for t in range(s.tasks):
            sm, start, end = s.sm_of(t, plan.sms), ("start", i, t), ("end", i, t)
            before.add_edge(start, end)
            if sm in last:
                before.add_edge(("end", last[sm], _task(plan, last[sm], sm)), start)
                visible.add_edge(("start", last[sm], _task(plan, last[sm], sm)), start)
                visible.add_edge(("end", last[sm], _task(plan, last[sm], sm)), end)
            visible.add_edge(start, end)
            staged: list[tuple] = []
            mine: list[tuple] = []
            for u in s.units_of(t):
                polls: dict[str, list[tuple]] = defaultdict(list)
                outs: list[tuple] = []
                for a in s.reads:
                    for w in words(plan, s, u, a, rows):
                        node = ("load", i, u, w)
                        before.add_edge(start, node)
                        before.add_edge(node, end)
                        visible.add_edge(start, node)
                        loads[w].append(node)
                        if a.step == 0 and s.body in STAGED:
                            staged.append(node)
                        else:
                            polls[w[0]].append(node)
                        if w[0] in by_value:
                            before.add_edges_from((x, node) for x in stores[w] if x[1] == by_value[w[0]])
                for a in s.writes:
                    for w in words(plan, s, u, a, rows):
                        node = ("store", i, u, w)
                        before.add_edge(start, node)
                        visible.add_edge(node, end)
                        stores[w].append(node)
                        outs.append(node)
                for group in polls.values():
                    for node in group:
                        if outs:
                            before.add_edge(node, rng.choice(outs))
                    for node in outs:
                        before.add_edge(rng.choice(group), node)
                mine += outs
            before.add_edges_from((x, y) for x in staged for y in mine)
            last[sm] = i
        for e in plan.waits[i]:
            src = plan.stages[e.src]
            for t in range(s.tasks):
                for t2 in range(src.tasks):
                    if e.mechanism in ACQUIRE:
                        before.add_edge(("end", e.src, t2), ("start", i, t))
                        visible.add_edge(("end", e.src, t2), ("start", i, t))
                    elif e.mechanism == "same_sm" and src.sm_of(t2, plan.sms) == s.sm_of(t, plan.sms):
                        visible.add_edge(("end", e.src, t2), ("start", i, t))
    out = []
    reach_b: dict[tuple, set] = {}
    reach_v: dict[tuple, set] = {}
    for w in set(loads) | set(stores):
        for a in stores[w]:
            for b in loads[w]:
                polled = any(e.buffer == w[0] and e.mechanism in BY_VALUE for e in plan.waits[b[1]])
                if a[1] < b[1] and not polled and b not in _from(visible, a, reach_v):
                    out.append(("raw", w[0], plan.stages[a[1]].name, plan.stages[b[1]].name))
        for a in loads[w]:
            for b in stores[w]:
                if a[1] < b[1] and b not in _from(before, a, reach_b):
                    out.append(("war", w[0], plan.stages[a[1]].name, plan.stages[b[1]].name))
    return out


def _task(plan: Plan, stage: int, sm: int) -> int:
    s = plan.stages[stage]
    return next(t for t in range(s.tasks) if s.sm_of(t, plan.sms) == sm)


def _from(g: nx.DiGraph, node: tuple, cache: dict[tuple, set]) -> set:
    if node not in cache:
        cache[node] = nx.descendants(g, node)
    return cache[node]
