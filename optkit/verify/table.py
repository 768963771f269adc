"""`check_table(plan)`: the descriptor table that the kernel will walk, read back and held against the Plan.

Everything a launch knows of a Plan goes through `emit.lower`; on a machine without a GPU nothing runs from that table,
so it is decoded here by a second writing of its layout: every wait, arrival and signal against the edges, every
operand's producer (the tag that is polled for), every weight and constant against the stage's params. Addresses are
made up, one of its own for each name, so a field that holds the wrong name shows.

`lower` raises ValueError for what no device body can do; that is passed on, so such a recipe is refused in words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from optkit.checks import Check, from_findings
from optkit.emit import layout as L
from optkit.emit.lower import Addresses, StateAddress, lower
from optkit.models.ops.attention import rotate
from optkit.plan.types import Edge, Plan, Stage

NAMES = ("table.waits", "table.operands", "table.constants")
POSITIONS = 8
"""Rows of the rotary table that are made and compared: all rows come from one formula."""
COUNTED = ("counter", "grid_barrier")
STEP_WORDS = {"kda": (28, "state_slot"), "mla_insert": (10, "slot_mapping"), "rope_insert": (20, "slot_mapping"),
              "attn": (24, "block_table")}
"""Where a body finds the step input of its layer's cache group."""
_APART = 1 << 32
_EXPERT = ("w1", "w2", "w3")
_STATE = {"block": 4096, "row": 256, "head": 64}
_VALUE = {"block": 8192, "row": 512, "head": 128}  # of the value cache: other strides than the key cache


class _Space:
    """Made-up addresses, and what they stand for."""

    def __init__(self, plan: Plan) -> None:
        self.at: dict[str, int] = {}
        self.arrays: dict[int, np.ndarray] = {}
        self.packed = {s.param(k) for s in plan.stages for k in _EXPERT if s.param(k)}
        self.sync = self("sync region")

    def __call__(self, name: str) -> int:
        return self.at.setdefault(name, (len(self.at) + 1) * _APART)

    def weight(self, name: str) -> int | tuple[int, int]:
        address = self(f"weight {name}")
        return (address, self(f"scales {name}")) if name in self.packed else address

    def buffer(self, name: str) -> int:
        return self(f"buffer {name}")

    def state(self, name: str) -> StateAddress:
        v = (self(f"value cache {name}"), _VALUE["block"], _VALUE["row"], _VALUE["head"])
        return StateAddress(self(f"state {name}"), **_STATE, v=v)

    def constant(self, array: np.ndarray) -> int:
        address = self(f"constant {len(self.arrays)}")
        self.arrays[address] = array
        return address

    def step(self, name: str, layer: int) -> int:
        return self(f"step input {name}@{layer}")

    def counter(self, stage: int) -> int:
        return self.sync + L.SYNC_COUNTERS + stage * L.LINE

    def addresses(self) -> Addresses:
        return Addresses(self.buffer, self.weight, self.state, self.constant, self.step, self.sync, POSITIONS)


def check_table(plan: Plan, repeat: str = "") -> list[Check]:
    """Lower the Plan onto made-up addresses and hold the table against it. Raises ValueError where it cannot be lowered.

    Mailboxes of real peers are other processes' memory; they are checked as the emulated ones, whose words are the same.
    """
    plan = replace(plan, parallel=tuple({**dict(plan.parallel), "peers": "emulated"}.items()))
    space = _Space(plan)
    rows = [_Row(plan, i, words.tolist(), space) for i, words in enumerate(lower(plan, space.addresses()))]
    barriers = any(e.mechanism == "grid_barrier" for e in plan.edges)
    waits = [x for r in rows for x in (_barrier(r, rows) if barriers else _waits(r, rows))]
    waits += [x for r in rows for x in _streams(r, barriers)]
    operands = [x for r in rows for x in r.operands()]
    constants = [x for r in rows for x in r.constants()]
    return [
        from_findings(NAMES[0], waits, f"{len(plan.edges)} edges reach the kernel: counters, arrivals, signals", repeat),
        from_findings(NAMES[1], operands, "every buffer a stage touches, with its dtype, layout and producer", repeat),
        from_findings(NAMES[2], constants, f"weights, sizes and constants of {len(rows)} descriptors", repeat),
    ]


class _Row:
    """One descriptor and the stage it was made from."""

    def __init__(self, plan: Plan, index: int, words: list[int], space: _Space) -> None:
        self.plan, self.index, self.w, self.space = plan, index, words, space
        self.stage: Stage = plan.stages[index]
        self.counters = {space.counter(i): i for i in range(len(plan.stages))}

    def where(self, text: str) -> str:
        return f"stage {self.index} {self.stage.name}: {text}"

    def waits(self) -> dict[int, int]:
        """Stage waited for -> arrivals; -1 for an address that is no counter."""
        n = self.w[L.N_WAITS]
        return {self.counters.get(self.w[L.WAITS + 2 * k], -1): self.w[L.WAITS + 2 * k + 1] for k in range(n)}

    def signals(self) -> bool:
        return self.w[L.SIGNAL] == self.space.counter(self.index)

    # -- operands
    def operands(self) -> Iterator[str]:
        """Every buffer read or written stands in the descriptor, and where it is read with the stage that wrote it."""
        raw = {e.buffer: e for e in self.plan.waits[self.index] if e.kind == "raw"}
        inputs = {b.name for b in self.plan.buffers if b.klass in ("input", "state")}  # bound through the run-time block
        for write, accesses in ((False, self.stage.reads), (True, self.stage.writes)):
            for name in {a.buffer for a in accesses} - inputs:
                writers = {e.src for e in self.plan.waits[self.index] if e.buffer == name and e.kind == "raw"}
                if not write and len(writers) > 1 and self.plan.buffer[name].layout == "tagged":
                    yield self.where(f"reads tagged words of {name} that stages {sorted(writers)} write: one tag is polled for")
                if not any(self._is(k, name, write, raw.get(name)) for k in self._places(name)):
                    made = f"made by stage {raw[name].src}" if name in raw and not write else ""
                    yield self.where(f"{'writes' if write else 'reads'} {name}: not in its descriptor {made}".rstrip())

    def _places(self, name: str) -> list[int]:
        address = self.space.buffer(name)
        return [k for k in range(L.PARAMS, L.DESC_WORDS - 1) if self.w[k] == address]

    def _is(self, k: int, name: str, write: bool, edge: Edge | None) -> bool:
        b = self.plan.buffer[name]
        if b.dtype == "i32":
            return True  # ids and the expert table: counted, never tagged; a bare address
        bits = self.w[k + 1] & 0xFFFFFFFF
        if write:
            producer = self.index + 1
        else:
            producer = edge.src + 1 if edge else 0
        want = L.DTYPES.index(b.dtype) | L.META_TAGGED * (b.layout == "tagged")
        return bits & 0xFF == want and bits >> 8 == producer and (self.w[k + 1] >> 32) & 0xFFFFFFFF == b.width

    # -- constants
    def constants(self) -> Iterator[str]:
        """Every field of the descriptor that a param decides."""
        s = self.stage
        per_row = s.units // max(s.row_units, 1)
        head = {"body": (L.BODY, L.BODIES.index(s.body)), "units": (L.UNITS, s.units), "tasks": (L.TASKS, s.tasks),
                "first_sm": (L.FIRST_SM, s.first_sm), "assign": (L.ASSIGN, int(s.assign == "cyclic")),
                "units of a row": (L.PER_ROW, per_row), "tag": (L.TAG, self.index + 1)}
        if s.body in STEP_WORDS:
            at, name = STEP_WORDS[s.body]
            head[f"step input {name}"] = (L.PARAMS + at, self.space.step(name, s.layer))
        for key, (at, want) in head.items():
            if self.w[at] != want:
                yield self.where(f"{key} is {self.w[at]}, planned {want}")
        for at, key, want in _fields(self):
            if self.w[at] != want:
                yield self.where(f"{key}: word {at} of its descriptor is not that of the Plan")
        yield from self._tables()

    def _tables(self) -> Iterator[str]:
        p = dict(self.stage.params)
        arrays = [self.space.arrays[v] for v in self.w[L.PARAMS :] if v in self.space.arrays]
        coefficients = [c for part in p.get("parts", ({"coeffs": p.get("coeffs", ())},)) if (c := part["coeffs"])]
        for c in coefficients:
            if not any(a.dtype == np.float32 and a.tolist() == np.float32(c).tolist() for a in arrays):
                yield self.where("the coefficients of its peers are not those of the Plan")
        if self.stage.body == "rope_insert":
            half = p["dim"] // 2
            unit = torch.cat([torch.ones(half), torch.zeros(half)]).double().expand(POSITIONS, 1, 2 * half)
            turned = rotate(unit, torch.arange(POSITIONS), p["theta"], p["scaling"])[:, 0].reshape(POSITIONS, 2, half)
            if not np.allclose(arrays[0], turned.transpose(1, 2).numpy(), rtol=0, atol=1e-6):
                yield self.where(f"rotary table of theta {p['theta']} is not the reference's rotation")


def _waits(row: _Row, rows: list[_Row]) -> Iterator[str]:
    """Every counted edge is a wait for all tasks of its source, which releases them; nothing waits forward."""
    got = row.waits()
    stages = row.plan.stages
    for src, arrivals in got.items():
        if not 0 <= src < row.index:
            yield row.where("waits for a counter that no earlier stage has")
        elif arrivals != stages[src].tasks:
            yield row.where(f"waits for {arrivals} arrivals of stage {src}, which has {stages[src].tasks} tasks")
        elif not rows[src].signals():
            yield row.where(f"waits for stage {src}, which signals nothing")
    late = bool(row.stage.streams) and row.stage.param("stream") == "after_wait"
    for e in row.plan.waits[row.index]:
        counted = e.mechanism in COUNTED or (late and e.mechanism == "tagged")
        if counted and e.src not in got:
            yield row.where(f"no wait for stage {e.src} {stages[e.src].name}: its {e.kind} edge on {e.buffer} is lost")


def _barrier(row: _Row, rows: list[_Row]) -> Iterator[str]:
    """Every SM arrives at every stage and waits for all SMs of the one before."""
    if not row.w[L.ALL_SMS] or not row.signals():
        yield row.where("a stage that not every SM arrives at, in a Plan of grid barriers")
    if row.index and row.waits() != {row.index - 1: row.plan.sms}:
        yield row.where(f"waits for {row.waits()}, planned a barrier of {row.plan.sms} SMs after stage {row.index - 1}")


def _streams(row: _Row, barriers: bool) -> Iterator[str]:
    """When the producer warp may queue a stage's tiles: at once, after the stage's waits, or after the index."""
    index = next((s.index for s in row.stage.streams if s.index), "")
    late = bool(row.stage.streams) and row.stage.param("stream") == "after_wait"
    if not index:
        if bool(row.w[L.STREAM]) != late:
            yield row.where("its weight tiles are queued " + ("before" if late else "after") + " its waits, not as planned")
        return
    edge = next((e for e in row.plan.waits[row.index] if e.buffer == index and e.kind == "raw"), None)
    want = row.plan.sms if barriers else None if edge is None else row.plan.stages[edge.src].tasks
    if edge is None or row.w[L.INDEX_WAIT] != row.space.counter(edge.src) or row.w[L.INDEX_ARRIVALS] != want:
        yield row.where(f"its routed tiles are not queued after {want} arrivals of the stage that makes {index}")


def _fields(row: _Row) -> Iterator[tuple[int, str, int]]:
    """(word, param, planned value) of the words that a body's params decide."""
    for at, key, value in _BODY.get(row.stage.body, _none)(row, dict(row.stage.params)):
        yield L.PARAMS + at, key, value


def _word(value: Any) -> int:
    return L.f32_bits(value) if isinstance(value, float) else int(value)


def _w(row: _Row, name: str) -> int:
    if not name:
        return 0
    address = row.space.weight(name)
    return address if isinstance(address, int) else address[0]


Fields = Iterator[tuple[int, str, int]]


def _none(row: _Row, p: dict[str, Any]) -> Fields:
    return iter(())


def _plain(p: dict[str, Any], first: int, *keys: str) -> Fields:
    for k, key in enumerate(keys):
        yield first + k, key, _word(p[key])


def _prologue(row: _Row, x: Any) -> Fields:
    yield L.X_PROLOGUE, "prologue", L.PROLOGUES.index(x["prologue"])
    yield L.X_WIDTH, "width", x["width"]
    yield L.X_EPS, "eps", L.f32_bits(x["eps"])
    yield L.X_MIX_EPS, "mix_eps", L.f32_bits(x["mix_eps"])
    yield L.X_N, "number of inputs", len(x["inputs"])
    for at, key in ((L.X_NORM, "norm"), (L.X_MIX_NORM, "mix_norm"), (L.X_MIX_PROJ, "mix_proj")):
        yield at, key, _w(row, x[key])
    for i, name in enumerate(x["inputs"]):
        yield L.X_IN + 2 * i, f"input {i}", row.space.buffer(name)


def _gemv(row: _Row, p: dict[str, Any]) -> Fields:
    yield from _prologue(row, p["x"])
    for i, part in enumerate(p["parts"]):
        base = L.PARTS - L.PARAMS + i * L.PART_WORDS
        named = {L.P_FIRST: "first", L.P_COUNT: "count", L.P_M: "m", L.P_K: "k", L.P_X_STRIDE: "x_stride",
                 L.P_X_OFFSET: "x_offset", L.P_BETA: "beta", L.P_LINEAR_BETA: "linear_beta"}
        for at, key in named.items():
            value = float(part[key]) if key in ("beta", "linear_beta") else part[key]
            yield base + at, f"{part['op']}.{key}", _word(value)
        yield base + L.P_GROUP_ROWS, f"{part['op']}.rows of a group", part["m"] // part["groups"]
        yield base + L.P_W, f"{part['op']}.weight", _w(row, part["weight"])
        yield base + L.P_W2, f"{part['op']}.weight2", _w(row, part["weight2"])
        yield base + L.P_EPILOGUE, f"{part['op']}.epilogue", L.EPILOGUES.index(part["epilogue"])
        yield base + L.P_OUT, f"{part['op']}.out", row.space.buffer(part["out"])
        if part["act"]:
            yield base + L.P_ACT, f"{part['op']}.act", L.ACTS.index(part["act"])
        operands = part["add"] or ((part["gate"],) if part["gate"] else ())
        for k, name in enumerate(operands):
            yield base + L.P_ADD0 + 2 * k, f"{part['op']}.addend {k}", row.space.buffer(name)
        count = len(part["coeffs"]) if part["epilogue"] == "mailbox" else len(part["add"])
        yield base + L.P_N_ADD, f"{part['op']}.addends", count


def _mixnorm(row: _Row, p: dict[str, Any]) -> Fields:
    yield from _prologue(row, p["x"])
    yield L.X_OUT, "out", row.space.buffer(p["out"])


def _embed(row: _Row, p: dict[str, Any]) -> Fields:
    yield 0, "weight", _w(row, p["weight"])
    yield from _plain(p, 1, "vocab_start", "vocab_rows", "width")


def _kda(row: _Row, p: dict[str, Any]) -> Fields:
    yield 0, "heads", p["heads"]
    for at, key in enumerate(("lower_bound", "l2_eps", "eps"), 1):
        yield at, key, L.f32_bits(p[key])
    yield 4, "conv", row.space(f"state {p['conv']}")
    yield 6, "recurrent", row.space(f"state {p['recurrent']}")
    for at, key in enumerate(("q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "o_norm"), 8):
        yield at, key, _w(row, p[key])
    for i, key in enumerate(("q", "k", "v", "f", "b", "g")):
        yield 14 + 2 * i, key, row.space.buffer(p[key])


def _mla_insert(row: _Row, p: dict[str, Any]) -> Fields:
    yield 0, "kv", row.space(f"state {p['kv']}")
    yield from zip((1, 2), ("block stride", "row stride"), (_STATE["block"], _STATE["row"]), strict=True)
    yield from _plain(p, 3, "lora", "rope")
    yield 5, "weight", _w(row, p["weight"])
    yield 6, "eps", L.f32_bits(p["eps"])


def _rope_insert(row: _Row, p: dict[str, Any]) -> Fields:
    cache = (row.space(f"state {p['kv']}"), *_STATE.values(), row.space(f"value cache {p['kv']}"), *_VALUE.values())
    yield from ((k, "kv", v) for k, v in enumerate(cache))
    yield from _plain(p, 8, "heads", "kv_heads", "dim")
    for i, key in enumerate(("q", "k", "v", "out")):
        yield 12 + 2 * i, key, row.space.buffer(p[key])


def _attn(row: _Row, p: dict[str, Any]) -> Fields:
    mla = p["kind"] == "mla"
    yield 0, "kind", int(not mla)
    yield from _plain(p, 1, "groups", "heads_per_group", "dqk", "dv")
    yield 5, "scale", L.f32_bits(p["scale"])
    yield 6, "splits", p["splits"]
    key = (row.space(f"state {p['kv']}"), *_STATE.values())
    value = (key[0], _STATE["block"], _STATE["row"], 0) if mla else (row.space(f"value cache {p['kv']}"), *_VALUE.values())
    yield from ((7 + k, "kv", v) for k, v in enumerate((*key, *value)))
    yield 15, "value width of a cache row", p["dv"] if mla else 0
    yield from ((16, "query width", p["nope"] + p["rope"]), (17, "query offset", p["nope"] if mla else 0))
    yield 18, "first operand", row.space.buffer(p["partial"] if row.stage.body == "attn_combine" else p["q"])
    if mla and row.stage.body == "attn":
        yield 20, "ql", row.space.buffer(p["ql"])
    yield 22, "out", row.space.buffer(p["out"])


def _ew(row: _Row, p: dict[str, Any]) -> Fields:
    yield from ((0, "mode", L.EW_MODES.index(p["mode"])), (1, "width", p["width"]), (2, "inputs", len(p["inputs"])))
    if p["act"]:
        yield from ((3, "act", L.ACTS.index(p["act"])), (4, "beta", L.f32_bits(p["beta"])),
                    (5, "linear_beta", L.f32_bits(p["linear_beta"])))
    yield 6, "ranks", row.plan.buffer[p["inputs"][0]].ranks
    yield from ((8 + 2 * i, f"input {i}", row.space.buffer(name)) for i, name in enumerate(p["inputs"]))


def _route(row: _Row, p: dict[str, Any]) -> Fields:
    yield from _plain(p, 0, "experts", "topk")
    yield from ((2, "scale", L.f32_bits(p["scale"])), (3, "bias", _w(row, p["bias"])))
    yield from ((at, key, row.space.buffer(p[key])) for at, key in ((4, "ids"), (5, "uniq"), (6, "logits"), (8, "wts")))


def _expert(row: _Row, p: dict[str, Any]) -> Fields:
    first, second, x = ("w1", "w3", "z") if row.stage.body == "expert_gate_up" else ("w2", "w2", "ea")
    yield from _plain(p, 0, "inter", "latent", "topk")
    if p.get("act"):
        yield from ((3, "act", L.ACTS.index(p["act"])), (4, "beta", L.f32_bits(p["beta"])),
                    (5, "linear_beta", L.f32_bits(p["linear_beta"])))
    yield 6, "uniq", row.space.buffer(p["uniq"])
    for at, key in ((7, first), (9, second)):
        yield at, key, row.space(f"weight {p[key]}")
        yield at + 1, f"scales of {key}", row.space(f"scales {p[key]}")
    yield from ((14, x, row.space.buffer(p[x])), (16, "out", row.space.buffer(p["out"])))
    if p.get("wts"):
        yield 18, "wts", row.space.buffer(p["wts"])
    if p.get("coeffs"):
        yield 11, "peers", len(p["coeffs"])


_BODY: dict[str, Any] = {
    "gemv": _gemv, "mixnorm": _mixnorm, "embed": _embed, "kda": _kda, "mla_insert": _mla_insert, "rope_insert": _rope_insert,
    "attn": _attn, "attn_combine": _attn, "ew": _ew, "route": _route, "expert_gate_up": _expert, "expert_down": _expert}
