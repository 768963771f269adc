"""The global order of the stages: graph order, moved by the overlap choices, and always a topological order.

A stage depends on the stages that make the values it reads, and on earlier stages that touch a state it touches
(graph order says which is earlier). Among the stages that could come next, the one with the smallest `order` does.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from optkit.plan.bodies import Shape, V
from optkit.plan.choices import PlanChoices
from optkit.plan.errors import PlanError
from optkit.plan.fuse import Proto


def dependencies(protos: list[Proto], shapes: list[Shape], states: frozenset[str]) -> list[set[int]]:
    """For every stage the stages it must follow."""
    maker = {a.buffer: i for i, s in enumerate(shapes) for a in s.writes if a.buffer not in states}
    deps: list[set[int]] = [set() for _ in protos]
    touched: dict[str, list[tuple[tuple[float, float], int]]] = defaultdict(list)
    for i, shape in enumerate(shapes):
        deps[i] = {maker[a.buffer] for a in shape.reads if a.buffer in maker} - {i}
        for buffer in {a.buffer for a in (*shape.reads, *shape.writes) if a.buffer in states}:
            touched[buffer].append((protos[i].order, i))
    for users in touched.values():
        users.sort()
        for (_, a), (_, b) in zip(users, users[1:], strict=False):
            deps[b].add(a)
    return deps


def _closure(start: int, edges: list[set[int]]) -> set[int]:
    seen: set[int] = set()
    todo = [start]
    while todo:
        for n in edges[todo.pop()] - seen:
            seen.add(n)
            todo.append(n)
    return seen


def _invert(deps: list[set[int]]) -> list[set[int]]:
    out: list[set[int]] = [set() for _ in deps]
    for i, ds in enumerate(deps):
        for d in ds:
            out[d].add(i)
    return out


def _by_layer(protos: list[Proto]) -> dict[int, list[int]]:
    out: dict[int, list[int]] = defaultdict(list)
    for i, p in enumerate(protos):
        out[p.layer].append(i)
    return out


def place_shared_experts(protos: list[Proto], shapes: list[Shape], deps: list[set[int]], early: bool) -> None:
    """Static work beside a routed chain: before the first routed stage (while the router decides), or after the last.

    Such work depends on nothing the router made, nothing routed depends on it, and only it and what follows the
    experts reads it: the shared expert, whatever an architecture calls it.
    """
    users = _invert(deps)
    layers = _by_layer(protos)
    for gate_up, p in enumerate(protos):
        if p.body != "expert_gate_up":
            continue
        maker = {a.buffer: i for i in layers[p.layer] for a in shapes[i].writes}
        route = maker[p.params["uniq"]]
        down = next(i for i in users[gate_up] if protos[i].body == "expert_down")
        inside = set(layers[p.layer])
        before = _closure(gate_up, [d & inside for d in deps])
        after_route = _closure(route, users)
        after = _closure(gate_up, users)
        beside = {
            i
            for i in layers[p.layer]
            if protos[i].body in ("gemv", "ew")
            and i not in before
            and i not in after_route
            and i != gate_up
            and users[i]
        }
        while stray := {i for i in beside if not users[i] <= beside | after}:
            beside -= stray
        base, shift = (protos[gate_up].order[0], -1.0) if early else (protos[down].order[0], 1.0)
        for i in beside:
            protos[i].order = (base, shift + 1e-6 * protos[i].order[0])


def place_block_stats(protos: list[Proto], shapes: list[Shape], deps: list[set[int]]) -> None:
    """Early statistics go right before the projection whose result is the newest row of their mix."""
    maker = {a.buffer: i for i, s in enumerate(shapes) for a in s.writes}
    for p in protos:
        if p.body != "blockstats":
            continue
        prefix: V = p.params.pop("prefix")
        at = maker.get(prefix)
        if at is None:  # the newest row comes from an earlier pipeline stage
            p.order = (-2.0, p.order[0])
            continue
        while protos[at].body == "ew":
            made = [maker[a.buffer] for a in shapes[at].reads if a.buffer in maker]
            projections = [i for i in made if protos[i].body != "mixnorm"]
            at = max(projections, key=lambda i: protos[i].order)
            if protos[at].body in ("embed", "blockstats"):
                break
        p.order = (protos[at].order[0], protos[at].order[1] - 1e-3)


def sort(protos: list[Proto], shapes: list[Shape], states: frozenset[str], choices: PlanChoices) -> list[int]:
    """Indices of the stages in global order. Raises PlanError if fused stages depend on each other."""
    deps = dependencies(protos, shapes, states)
    place_shared_experts(protos, shapes, deps, choices.overlap.shared_expert_early)
    place_block_stats(protos, shapes, deps)
    users = _invert(deps)
    open_deps = [len(d) for d in deps]
    heap = [(protos[i].order, protos[i].name, i) for i, n in enumerate(open_deps) if n == 0]
    heapq.heapify(heap)
    out: list[int] = []
    while heap:
        _, _, i = heapq.heappop(heap)
        out.append(i)
        for u in users[i]:
            open_deps[u] -= 1
            if open_deps[u] == 0:
                heapq.heappush(heap, (protos[u].order, protos[u].name, u))
    if len(out) < len(protos):
        stuck = [p.name for i, p in enumerate(protos) if open_deps[i]]
        raise PlanError([f"stages wait for each other: {', '.join(stuck[:6])}"])
    return out
