"""Canonical JSON of a Plan: bodies once, layers as tables; and the exact way back.

The unrolled stages are cut into instances (one per layer, in order). Instances with the same list of stages share a
body: a template in which "{@}" and "{@+1}" stand for the instance's layer and the next one, "{%}" for the layer's
parity, and `{"$": i}` for a value that differs in some other way; those values are the tables of the segments.
The edges into a stage travel with it, with the source as a distance backwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from optkit.plan.types import Access, Buffer, Edge, IndexSet, Plan, Record, Segment, Stage, Stream

PAIRS = ("hardware", "parallel", "choices", "memory")
SCALARS = ("name", "recipe_digest", "sms", "rows", "ring_slots", "ring_slot_bytes", "threads", "schema")


def groups_of(stages: Sequence[Stage]) -> list[tuple[int, int, int]]:
    """Instances as (layer, first stage, end): a stage placed among those of an earlier layer travels with them."""
    out: list[tuple[int, int, int]] = []
    home = [0] * len(stages)
    low = 1 << 60
    for i in range(len(stages) - 1, -1, -1):
        low = min(low, stages[i].layer)
        home[i] = low
    for i, layer in enumerate(home):
        if out and out[-1][0] == layer:
            out[-1] = (layer, out[-1][1], i + 1)
        else:
            out.append((layer, i, i + 1))
    return out


def _signature(stages: Sequence[Stage], layer: int) -> tuple[tuple[str, str], ...]:
    return tuple((s.body, _abstract(s.name, layer)) for s in stages)


def segments_of(stages: Sequence[Stage], family: str) -> tuple[Segment, ...]:
    """Runs of equal instances. The tables are made by `compress`; here they are left empty."""
    bodies: dict[tuple[tuple[str, str], ...], str] = {}
    out: list[Segment] = []
    for layer, lo, hi in groups_of(stages):
        body = bodies.setdefault(_signature(stages[lo:hi], layer), f"{family}.{len(bodies)}")
        if out and out[-1].body == body and out[-1].layer + out[-1].count == layer:
            out[-1] = Segment(body, out[-1].layer, out[-1].count + 1)
        else:
            out.append(Segment(body, layer, 1))
    return tuple(out)


# -- names of layers --------------------------------------------------------------------------------------------------


@cache
def _patterns(layer: int) -> tuple[re.Pattern[str], re.Pattern[str]]:
    def at(n: int) -> re.Pattern[str]:
        return re.compile(rf"(^|[^A-Za-z0-9])(L|layers\.|P\.){n}(?![0-9])")

    return at(layer), at(layer + 1)


@cache
def _abstract(text: str, layer: int) -> str:
    if layer < 0:
        return text
    here, after = _patterns(layer)
    text = after.sub(r"\1\2{@+1}", here.sub(r"\1\2{@}", text))
    return text[: -len(str(layer % 2))] + "{%}" if text.endswith(f"@{layer % 2}") else text


def _concrete(text: str, layer: int) -> str:
    if "{" not in text:
        return text
    return text.replace("{@}", str(layer)).replace("{@+1}", str(layer + 1)).replace("{%}", str(layer % 2))


# -- stages as plain data ---------------------------------------------------------------------------------------------

_ACCESS = Access("")
_STREAM = Stream("", 0, 0, 0, 0)
_ACCESS_KEYS = tuple(vars(_ACCESS))
_STREAM_KEYS = tuple(vars(_STREAM))


def _sparse(obj: Any, keys: tuple[str, ...], default: Any) -> dict[str, Any]:
    return {k: v for k in keys if (v := getattr(obj, k)) != getattr(default, k)}


def _plain(value: Any, layer: int) -> Any:
    if isinstance(value, str):
        return _abstract(value, layer)
    if isinstance(value, dict):
        return {k: _plain(v, layer) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v, layer) for v in value]
    return value


def _rich(value: Any, layer: int) -> Any:
    if isinstance(value, str):
        return _concrete(value, layer)
    if isinstance(value, dict):
        return Record({k: _rich(v, layer) for k, v in value.items()})
    if isinstance(value, list):
        return tuple(_rich(v, layer) for v in value)
    return value


def _stage_out(s: Stage, waits: Sequence[Edge], i: int, layer: int) -> dict[str, Any]:
    d = {k: v for k, v in vars(s).items() if k not in ("reads", "writes", "streams", "params", "_param")}
    d["layer"] = s.layer - layer
    d["params"] = Record(s.params)
    d["reads"] = tuple(_sparse(a, _ACCESS_KEYS, _ACCESS) for a in s.reads)
    d["writes"] = tuple(_sparse(a, _ACCESS_KEYS, _ACCESS) for a in s.writes)
    d["streams"] = tuple(_sparse(a, _STREAM_KEYS, _STREAM) for a in s.streams)
    d["waits"] = tuple((i - e.src, e.buffer, e.kind, e.mechanism) for e in waits)
    return _plain(d, layer)  # type: ignore[no-any-return]


def _stage_in(data: dict[str, Any], i: int, layer: int) -> tuple[Stage, list[Edge]]:
    d = dict(_rich(data, layer))
    waits = [Edge(i - back, i, buffer, kind, mechanism) for back, buffer, kind, mechanism in d.pop("waits")]
    d["layer"] += layer
    d["params"] = tuple(sorted(d["params"].items()))
    for key, kind, default in (("reads", Access, _ACCESS), ("writes", Access, _ACCESS), ("streams", Stream, _STREAM)):
        d[key] = tuple(kind(**{**vars(default), **x}) for x in d[key])
    return Stage(**d), waits


# -- templates --------------------------------------------------------------------------------------------------------


def _unify(values: list[Any], tables: list[list[Any]]) -> Any:
    first = values[0]
    if all(v == first and type(v) is type(first) for v in values):
        return first
    if all(isinstance(v, dict) and v.keys() == first.keys() for v in values) and isinstance(first, dict):
        return {k: _unify([v[k] for v in values], tables) for k in sorted(first)}
    if all(isinstance(v, list) and len(v) == len(first) for v in values) and isinstance(first, list):
        return [_unify([v[k] for v in values], tables) for k in range(len(first))]
    tables.append(values)
    return {"$": len(tables) - 1}


def _fill(template: Any, tables: list[Any], instance: int) -> Any:
    if isinstance(template, dict):
        if "$" in template:
            table = tables[template["$"]]
            return table["="] if isinstance(table, dict) else table[instance]
        return {k: _fill(v, tables, instance) for k, v in template.items()}
    if isinstance(template, list):
        return [_fill(v, tables, instance) for v in template]
    return template


def compress(plan: Plan) -> dict[str, Any]:
    """JSON-able data; `expand` gives the equal Plan back."""
    groups = groups_of(plan.stages)
    instances: dict[str, list[list[dict[str, Any]]]] = {}
    where: list[tuple[str, int]] = []
    cursor = 0
    for seg in plan.segments:
        for _ in range(seg.count):
            layer, lo, hi = groups[cursor]
            cursor += 1
            waits = plan.waits
            known = instances.setdefault(seg.body, [])
            where.append((seg.body, len(known)))
            known.append([_stage_out(plan.stages[i], waits[i], i, layer) for i in range(lo, hi)])
    bodies: dict[str, Any] = {}
    tables: dict[str, list[list[Any]]] = {}
    for body, known in instances.items():
        tables[body] = []
        bodies[body] = _unify(known, tables[body])
    segments = []
    cursor = 0
    for seg in plan.segments:
        at = where[cursor][1]
        cursor += seg.count
        columns = [t[at : at + seg.count] for t in tables[seg.body]]
        segments.append(
            {
                "body": seg.body,
                "layer": seg.layer,
                "count": seg.count,
                "tables": [{"=": c[0]} if all(v == c[0] for v in c) else c for c in columns],
            }
        )
    out: dict[str, Any] = {k: getattr(plan, k) for k in SCALARS}
    out |= {k: _plain(dict(getattr(plan, k)), -1) for k in PAIRS}
    out["buffers"] = [list(vars(b).values()) for b in plan.buffers]
    out["index_sets"] = [[s.value, s.producer, s.bound, list(s.facts)] for s in plan.index_sets]
    out["bodies"], out["segments"] = bodies, segments
    return out


def expand(data: dict[str, Any]) -> Plan:
    """The Plan that `compress` was given. Raises KeyError or ValueError on data that is not a compressed Plan."""
    stages: list[Stage] = []
    edges: list[Edge] = []
    for seg in data["segments"]:
        for k in range(seg["count"]):
            for stage in _fill(data["bodies"][seg["body"]], seg["tables"], k):
                s, waits = _stage_in(stage, len(stages), seg["layer"] + k)
                stages.append(s)
                edges += waits
    rest = {k: data[k] for k in SCALARS} | {k: tuple(sorted(_rich(data[k], -1).items())) for k in PAIRS}
    rest["memory"] = tuple(
        (k, data["memory"][k]) for k in ("weights", "kv", "state", "workspace", "total", "available")
    )
    return Plan(
        stages=tuple(stages),
        edges=tuple(edges),
        buffers=tuple(Buffer(*b) for b in data["buffers"]),
        index_sets=tuple(IndexSet(v, p, n, tuple(f)) for v, p, n, f in data["index_sets"]),
        segments=tuple(Segment(s["body"], s["layer"], s["count"]) for s in data["segments"]),
        **rest,
    )


def from_json(text: str) -> Plan:
    """Read what `Plan.to_json` wrote."""
    return expand(json.loads(text))
