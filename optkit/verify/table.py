"""The descriptor table read back: does every word say what the Plan says? (docs/design.md, section 7)

`lower` (emit/lower.py) writes the table, the device code reads it. This is a third, independent statement of what each
word must be: derived from stages, accesses and edges, at the offsets that the *device* source names (read as text, so a
field that host and device place differently is found without a GPU). Words that nobody names must be zero, so one
changed word anywhere is a finding. Needs numpy only.
"""

from __future__ import annotations

import ast
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from optkit.checks import Check, from_findings
from optkit.emit import layout as L
from optkit.emit.lower import Addresses, StateAddress, lower
from optkit.models.graph import Graph
from optkit.plan.types import Plan

NAMES = ("table.work", "table.waits", "table.tags", "table.addresses", "table.constants")
KERNELS = Path(__file__).parent.parent / "emit" / "kernels"
ALIGN = 256
ITEM = {"bf16": 2, "f32": 4, "i32": 4, "i64": 8}


@dataclass
class Book:
    """Synthetic device addresses: every buffer, weight, state and constant in a region of its own, at its true size."""

    graph: Graph
    plan: Plan
    positions: int = 64
    regions: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (first byte, size)
    arrays: dict[int, np.ndarray] = field(default_factory=dict)
    top: int = 1 << 33  # above 4 GiB, so that a truncated address is another address

    def at(self, name: str, nbytes: int) -> int:
        """Address of `name`; allocates it the first time."""
        if name not in self.regions:
            self.regions[name] = (self.top, nbytes)
            self.top += -(-max(nbytes, 1) // ALIGN) * ALIGN + ALIGN
        return self.regions[name][0]

    def buffer(self, name: str) -> int:
        b = self.plan.buffer[name]
        return self.at(name, b.nbytes)

    def weight(self, name: str) -> int | tuple[int, int]:
        w = self.graph.weight(name)
        n = int(np.prod(w.shape))
        if w.dtype != "mxfp4":
            return self.at(name, n * ITEM[w.dtype])
        return self.at(name, n // 2), self.at(name + " scales", n // 32)

    def state(self, name: str) -> StateAddress:
        """Strides as of a cache with 16-token pages and 12 slots; all different, so that none passes for another."""
        s = self.graph.state(name)
        item, n = ITEM[s.dtype], int(np.prod(s.shape))
        if s.kind in ("conv", "recurrent"):
            return StateAddress(self.at(name, 12 * n * item), n * item, n * item // s.shape[0])
        row = n * item
        if s.kind == "kv":
            return StateAddress(self.at(name, 40 * 16 * row), 16 * row, row)
        k, v = self.at(name + " K", 40 * 16 * row), self.at(name + " V", 40 * 17 * row)
        return StateAddress(k, 16 * row, row, row // s.shape[0], (v, 17 * row, row, row // s.shape[0]))

    def step(self, name: str, layer: int) -> int:
        """A step input as one layer reads it: its cache group may have its own."""
        return self.at(f"step input {name} of layer {layer}", 4096)

    def constant(self, array: np.ndarray) -> int:
        where = self.at(f"constant {array.dtype} {array.shape} {hash(array.tobytes())}", array.nbytes)
        self.arrays[where] = array.copy()
        return where

    def addresses(self) -> Addresses:
        """What `lower` takes."""
        sync = self.at("sync", L.SYNC_COUNTERS + len(self.plan.stages) * L.LINE)
        return Addresses(self.buffer, self.weight, self.state, self.constant, self.step, sync, self.positions)


def f32(x: float) -> int:
    """The bits of x in fp32."""
    return int.from_bytes(struct.pack("<f", x), "little")


@cache
def device_names(folder: Path = KERNELS) -> dict[str, dict[str, int]]:
    """file stem -> {NAME: value} of the integer constants of the device sources: `A = 3`, `(A, B) = range(2)`, `A, B = 1, 2`."""
    out: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob("*.py")):
        names: dict[str, int] = {}
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.Assign) or len(node.targets) != 1:
                continue
            target, value = node.targets[0], node.value
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant) and isinstance(value.value, int):
                names[target.id] = value.value
            elif isinstance(target, ast.Tuple):
                keys = [t.id for t in target.elts if isinstance(t, ast.Name)]
                if isinstance(value, ast.Tuple):
                    values = [v.value for v in value.elts if isinstance(v, ast.Constant)]
                elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "range":
                    values = list(range(len(keys)))
                else:
                    continue
                names.update({k: int(v) for k, v in zip(keys, values, strict=False) if isinstance(v, int)})
        out[path.stem] = names
    return out


@cache
def device_bodies(folder: Path = KERNELS) -> dict[int, str]:
    """Number in the switch -> name of the body it calls, from the device's own dispatch table."""
    for node in ast.parse((folder / "megakernel.py").read_text()).body:
        if (
            isinstance(node, ast.Assign)
            and getattr(node.targets[0], "id", "") == "PLAIN"
            and isinstance(node.value, ast.Dict)
        ):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {
                k.value: v.attr
                for k, v in pairs
                if isinstance(k, ast.Constant) and isinstance(k.value, int) and isinstance(v, ast.Attribute)
            }
    return {}


Word = tuple[str, int, int, str]
"""(check, word of the descriptor, what it must hold, what it is)."""


class _Expect:
    """The words of one stage."""

    def __init__(self, plan: Plan, index: int, book: Book, names: dict[str, dict[str, int]]):
        self.plan, self.i, self.book, self.names = plan, index, book, names
        self.stage = plan.stages[index]
        self.p: dict[str, Any] = dict(self.stage.params)
        self.words: list[Word] = []
        self.tables: list[tuple[int, np.ndarray, str]] = []  # (word, array its address must lead to, what it is)
        self.partial: list[tuple[int, int, int, str]] = []  # (word, mask, value, what): bits of a meta word

    def put(self, check: str, at: int, value: int, what: str) -> None:
        self.words.append((f"table.{check}", at, value & 0xFFFFFFFFFFFFFFFF, what))

    def step(self, at: int, name: str) -> None:
        """The step input that this stage's layer reads."""
        self.put("addresses", at, self.book.step(name, self.stage.layer), f"step input {name}")

    def number(self, at: int, value: float | int, what: str) -> None:
        self.put("constants", at, f32(value) if isinstance(value, float) else int(value), what)

    def weight(self, at: int, name: str, part: int = -1) -> None:
        if name:
            a = self.book.weight(name)
            self.put("addresses", at, a[part] if isinstance(a, tuple) else a, f"weight {name}")

    def operand(self, at: int, name: str, write: bool = False) -> None:
        """Address, dtype, layout and width; the tag's producer is the last stage before this one that writes the buffer."""
        b = self.plan.buffer[name]
        producer = self.i if write else last_writer(self.plan, self.i, name)
        self.put("addresses", at, self.book.buffer(name), f"buffer {name}")
        bits = ("bf16", "f32", "i32").index(b.dtype) | (16 if b.layout == "tagged" else 0)
        tagged = b.layout == "tagged" or b.klass == "mailbox"
        if tagged:
            self.put("tags", at + 1, bits | (producer + 1) << 8 | b.width << 32, f"layout and tag of {name}")
        else:
            self.partial.append((at + 1, 0xFFFFFFFF_000000FF, bits | b.width << 32, f"layout of {name}"))

    def peers(self, at: int, out: str, coeffs: tuple[float, ...]) -> None:
        """Table of mailbox slots, table of coefficients."""
        b = self.plan.buffer[out]
        slot = b.rows * b.width * 4 * 2
        base = self.book.buffer(out)
        self.tables.append((at, np.array([base + p * slot for p in range(len(coeffs))], np.int64), f"slots of {out}"))
        self.tables.append((at + 1, np.array(coeffs, np.float32), f"coefficients of {out}"))

    def state(self, name: str, base: int, block: int, row: int = -1, head: int = -1) -> None:
        """Base and byte strides of a state at these words."""
        s = self.book.state(name)
        for at, value, what in (
            (base, s.base, "base"),
            (block, s.block, "block stride"),
            (row, s.row, "row stride"),
            (head, s.head, "head stride"),
        ):
            if at >= 0:
                self.put("addresses", at, value, f"{what} of state {name}")


def last_writer(plan: Plan, index: int, name: str) -> int:
    """The last stage before `index` that writes `name`, -1 if none: whose words a reader must see."""
    table: dict[str, list[int]] | None = plan.__dict__.get("_table_writers")
    if table is None:  # once a Plan: a scan for every operand would be quadratic in the stages
        table = {}
        for j, s in enumerate(plan.stages):
            for b in {a.buffer for a in s.writes}:
                table.setdefault(b, []).append(j)
        plan.__dict__["_table_writers"] = table
    here = table.get(name, [])
    at = bisect_left(here, index)
    return here[at - 1] if at else -1


def _prologue(e: _Expect, x: Any, out: str = "") -> None:
    at = L.PARAMS
    e.number(at + L.X_PROLOGUE, ("copy", "rmsnorm", "mixnorm").index(x["prologue"]), "prologue")
    e.number(at + L.X_WIDTH, x["width"], "width of x")
    e.number(at + L.X_EPS, float(x["eps"]), "epsilon of the norm")
    e.number(at + L.X_MIX_EPS, float(x["mix_eps"]), "epsilon of the mix")
    e.number(at + L.X_N, len(x["inputs"]), "rows of the mix")
    for word, name in ((L.X_NORM, x["norm"]), (L.X_MIX_NORM, x["mix_norm"]), (L.X_MIX_PROJ, x["mix_proj"])):
        e.weight(at + word, name)
    if x["stats"]:
        e.operand(at + L.X_STATS, x["stats"])
    for k, name in enumerate(x["inputs"]):
        e.operand(at + L.X_IN + 2 * k, name)
    if out:
        e.operand(at + L.X_OUT, out, write=True)


def _gemv(e: _Expect) -> None:
    _prologue(e, e.p["x"])
    for i, p in enumerate(e.p["parts"]):
        at = L.PARTS + i * L.PART_WORDS
        for word, value, what in (
            (L.P_FIRST, p["first"], "first unit"),
            (L.P_COUNT, p["count"], "units"),
            (L.P_M, p["m"], "rows of W"),
            (L.P_K, p["k"], "columns of W"),
            (L.P_GROUP_ROWS, p["m"] // p["groups"], "rows of a group"),
            (L.P_X_STRIDE, p["x_stride"], "stride of x"),
            (L.P_X_OFFSET, p["x_offset"], "offset of x"),
            (L.P_EPILOGUE, ("store", "act", "add", "gate", "mailbox").index(p["epilogue"]), "epilogue"),
            (L.P_ACT, ("silu", "situ").index(p["act"]) if p["act"] else 0, "activation"),
            (L.P_BETA, float(p["beta"]), "beta"),
            (L.P_LINEAR_BETA, float(p["linear_beta"]), "linear beta"),
        ):
            e.number(at + word, value, f"{what} of {p['op']}")
        e.weight(at + L.P_W, p["weight"])
        e.weight(at + L.P_W2, p["weight2"])
        e.operand(at + L.P_OUT, p["out"], write=True)
        extra = p["add"] or ((p["gate"],) if p["gate"] else ())
        e.number(
            at + L.P_N_ADD, len(p["coeffs"]) if p["epilogue"] == "mailbox" else len(p["add"]), f"addends of {p['op']}"
        )
        for k, name in enumerate(extra):
            e.operand(at + L.P_ADD0 + 2 * k, name)
        if p["epilogue"] == "mailbox":
            e.peers(at + L.P_PEERS, p["out"], p["coeffs"])


def _mixnorm(e: _Expect) -> None:
    _prologue(e, e.p["x"], e.p["out"])


def _blockstats(e: _Expect) -> None:
    width = e.plan.buffer[e.p["inputs"][0]].width
    _prologue(
        e,
        {
            "prologue": "copy",
            "width": width,
            "norm": "",
            "eps": 0.0,
            "mix_norm": e.p["mix_norm"],
            "mix_proj": e.p["mix_proj"],
            "mix_eps": 0.0,
            "stats": "",
            "inputs": e.p["inputs"],
        },
        e.p["out"],
    )


def _named(e: _Expect, file: str, fields: dict[str, tuple[str, str]]) -> dict[str, int]:
    """Fields by their device names: {NAME: (kind, param)}. Returns the absolute word of every name of the file."""
    at = {k: L.PARAMS + v for k, v in e.names[file].items()}
    for name, (kind, key) in fields.items():
        if kind == "i":
            e.number(at[name], int(e.p[key]), key)
        elif kind == "f":
            e.number(at[name], float(e.p[key]), key)
        elif kind == "w":
            e.weight(at[name], e.p[key])
        elif kind == "r":
            e.operand(at[name], e.p[key])
        else:
            e.operand(at[name], e.p[key], write=True)
    return at


def _embed(e: _Expect) -> None:
    at = _named(
        e,
        "elementwise",
        {
            "EM_TABLE": ("w", "weight"),
            "EM_START": ("i", "vocab_start"),
            "EM_ROWS": ("i", "vocab_rows"),
            "EM_WIDTH": ("i", "width"),
            "EM_OUT": ("o", "out"),
        },
    )
    if e.p["coeffs"]:
        e.number(at["EM_RANKS"], len(e.p["coeffs"]), "ranks")
        e.peers(at["EM_PEERS"], e.p["out"], e.p["coeffs"])


def _kda(e: _Expect) -> None:
    at = _named(
        e,
        "kda",
        {
            "K_HEADS": ("i", "heads"),
            "K_LOWER": ("f", "lower_bound"),
            "K_L2_EPS": ("f", "l2_eps"),
            "K_EPS": ("f", "eps"),
            "K_WQ": ("w", "q_conv"),
            "K_WK": ("w", "k_conv"),
            "K_WV": ("w", "v_conv"),
            "K_A_LOG": ("w", "A_log"),
            "K_DT_BIAS": ("w", "dt_bias"),
            "K_O_NORM": ("w", "o_norm"),
            "K_Q": ("r", "q"),
            "K_K": ("r", "k"),
            "K_V": ("r", "v"),
            "K_F": ("r", "f"),
            "K_B": ("r", "b"),
            "K_G": ("r", "g"),
            "K_OUT": ("o", "out"),
        },
    )
    e.state(e.p["conv"], at["K_CONV"], at["K_CONV_STRIDE"])
    e.state(e.p["recurrent"], at["K_REC"], at["K_REC_STRIDE"])
    e.step(at["K_SLOTS"], "state_slot")


def _mla_insert(e: _Expect) -> None:
    at = _named(
        e,
        "attention",
        {
            "I_LORA": ("i", "lora"),
            "I_ROPE": ("i", "rope"),
            "I_NORM": ("w", "weight"),
            "I_EPS": ("f", "eps"),
            "I_IN": ("r", "kva"),
        },
    )
    e.state(e.p["kv"], at["I_KV"], at["I_BLOCK"], at["I_ROW"])
    e.step(at["I_MAPPING"], "slot_mapping")


def angles(dim: int, theta: float, scaling: tuple[float, ...], positions: int) -> np.ndarray:
    """(cos, sin) [positions, dim / 2, 2]: theta^(-2i/dim), Llama 3's frequency scaling where `scaling` is given
    (factor, low, high, original length): wavelengths beyond original / low are stretched by `factor`, those below
    original / high kept, between them linear in original / wavelength."""
    inverse = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if scaling:
        factor, low, high, original = scaling
        turns = original * inverse / (2 * np.pi)
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
        inverse = inverse * (smooth + (1 - smooth) / factor)
    a = np.arange(positions, dtype=np.float64)[:, None] * inverse
    return np.stack([np.cos(a), np.sin(a)], -1)


def _rope_insert(e: _Expect) -> None:
    at = _named(
        e,
        "attention",
        {
            "R_HEADS": ("i", "heads"),
            "R_KV_HEADS": ("i", "kv_heads"),
            "R_DIM": ("i", "dim"),
            "R_Q": ("r", "q"),
            "R_KIN": ("r", "k"),
            "R_VIN": ("r", "v"),
            "R_OUT": ("o", "out"),
        },
    )
    e.state(e.p["kv"], at["R_K"], at["R_K_BLOCK"], at["R_K_ROW"], at["R_K_HEAD"])
    for word, value in zip(("R_V", "R_V_BLOCK", "R_V_ROW", "R_V_HEAD"), e.book.state(e.p["kv"]).v, strict=True):
        e.put("addresses", at[word], value, f"{word} of state {e.p['kv']}")
    e.step(at["R_MAPPING"], "slot_mapping")
    e.tables.append((at["R_TABLE"], angles(e.p["dim"], e.p["theta"], e.p["scaling"], e.book.positions), "rotary table"))


def _attn(e: _Expect) -> None:
    mla = e.p["kind"] == "mla"
    combine = e.stage.body == "attn_combine"
    at = _named(
        e,
        "attention",
        {
            "T_GROUPS": ("i", "groups"),
            "T_HPG": ("i", "heads_per_group"),
            "T_DQK": ("i", "dqk"),
            "T_DV": ("i", "dv"),
            "T_SCALE": ("f", "scale"),
            "T_SPLITS": ("i", "splits"),
            "T_OUT": ("o", "out"),
            "T_Q": ("r", "partial" if combine else "q"),
            **({"T_QL": ("r", "ql")} if mla and not combine else {}),
        },
    )
    e.number(at["T_KIND"], int(not mla), "kind")
    e.number(at["T_LORA"], e.p["dv"] if mla else 0, "width of the latent query")
    e.number(at["T_QROW"], e.p["nope"] + e.p["rope"], "width of a query head")
    e.number(at["T_NOPE"], e.p["nope"] if mla else 0, "first column of the positionless part")
    e.step(at["T_TABLE"], "block_table")
    s = e.book.state(e.p["kv"])
    e.state(e.p["kv"], at["T_K"], at["T_K_BLOCK"], at["T_K_ROW"], at["T_K_HEAD"])
    for word, value in zip(
        ("T_V", "T_V_BLOCK", "T_V_ROW", "T_V_HEAD"), (s.base, s.block, s.row, 0) if mla else s.v, strict=True
    ):
        e.put("addresses", at[word], value, f"{word} of state {e.p['kv']}")


def _ew(e: _Expect) -> None:
    at = {k: L.PARAMS + v for k, v in e.names["elementwise"].items()}
    ranks = e.plan.buffer[e.p["inputs"][0]].ranks
    for name, value in (
        ("EW_MODE", ("add", "act_mul", "sigmoid_mul", "reduce", "gather").index(e.p["mode"])),
        ("EW_WIDTH", e.p["width"]),
        ("EW_N", len(e.p["inputs"])),
        ("EW_ACT", ("silu", "situ").index(e.p["act"]) if e.p["act"] else 0),
        ("EW_BETA", float(e.p["beta"])),
        ("EW_LINEAR_BETA", float(e.p["linear_beta"])),
        ("EW_RANKS", ranks),
        ("EW_SHARD", e.p["width"] // max(ranks, 1)),
    ):
        e.number(at[name], value, name)
    for k, name in enumerate(e.p["inputs"]):
        e.operand(at["EW_IN"] + 2 * k, name)
    e.operand(at["EW_OUT"], e.p["out"], write=True)


def _route(e: _Expect) -> None:
    at = _named(
        e,
        "moe",
        {
            "RO_EXPERTS": ("i", "experts"),
            "RO_TOPK": ("i", "topk"),
            "RO_SCALE": ("f", "scale"),
            "RO_BIAS": ("w", "bias"),
            "RO_LOGITS": ("r", "logits"),
            "RO_WTS": ("o", "wts"),
        },
    )
    e.put("addresses", at["RO_IDS"], e.book.buffer(e.p["ids"]), "exported choices")
    e.put("addresses", at["RO_UNIQ"], e.book.buffer(e.p["uniq"]), "table of distinct experts")


def _expert(e: _Expect) -> None:
    up = e.stage.body == "expert_gate_up"
    at = _named(
        e,
        "moe",
        {
            "E_INTER": ("i", "inter"),
            "E_LATENT": ("i", "latent"),
            "E_TOPK": ("i", "topk"),
            "E_IN": ("r", "z" if up else "ea"),
            "E_OUT": ("o", "out"),
        },
    )
    e.number(at["E_ACT"], ("silu", "situ").index(e.p["act"]) if e.p.get("act") else 0, "activation")
    e.number(at["E_BETA"], float(e.p.get("beta", 0.0)), "beta")
    e.number(at["E_LINEAR_BETA"], float(e.p.get("linear_beta", 0.0)), "linear beta")
    e.put("addresses", at["E_UNIQ"], e.book.buffer(e.p["uniq"]), "table of distinct experts")
    for name, key, part in (
        ("E_W1", "w1" if up else "w2", 0),
        ("E_S1", "w1" if up else "w2", 1),
        ("E_W3", "w3" if up else "w2", 0),
        ("E_S3", "w3" if up else "w2", 1),
    ):
        e.weight(at[name], e.p[key], part)
    if e.p.get("wts"):
        e.operand(at["E_WTS"], e.p["wts"])
    if e.p.get("coeffs"):
        e.number(at["E_RANKS"], len(e.p["coeffs"]), "ranks")
        e.peers(at["E_PEERS"], e.p["out"], e.p["coeffs"])


BODIES: dict[str, Callable[[_Expect], None]] = {
    "gemv": _gemv,
    "mixnorm": _mixnorm,
    "blockstats": _blockstats,
    "embed": _embed,
    "kda": _kda,
    "mla_insert": _mla_insert,
    "rope_insert": _rope_insert,
    "attn": _attn,
    "attn_combine": _attn,
    "ew": _ew,
    "route": _route,
    "expert_gate_up": _expert,
    "expert_down": _expert,
}


def counted(plan: Plan, index: int) -> dict[int, int]:
    """Stages whose arrivals stage `index` must count before it runs, with their number: counter edges, every edge of a
    stage whose weight tiles may be queued only after its waits, and under a grid barrier all CTAs of the stage before."""
    if any(e.mechanism == "grid_barrier" for e in plan.edges):
        return {index - 1: plan.sms} if index else {}
    stage = plan.stages[index]
    late = bool(stage.streams) and stage.param("stream") == "after_wait"
    free = ("same_sm", "program", "peer_mailbox")
    return {
        e.src: plan.stages[e.src].tasks
        for e in plan.waits[index]
        if e.mechanism == "counter" or (late and e.mechanism not in free)
    }


def _order(e: _Expect, table: np.ndarray, waited: frozenset[int], sync: int) -> Iterator[str]:
    """Findings on waits, signal and ring order of one stage."""
    plan, i, stage, row = e.plan, e.i, e.stage, table[e.i]

    def counter(s: int) -> int:
        return sync + L.SYNC_COUNTERS + s * L.LINE

    want = {counter(s): n for s, n in counted(plan, i).items()}
    n = int(row[L.N_WAITS])
    if not 0 <= n <= L.MAX_WAITS:
        yield f"{stage.name}: {n} waits, a descriptor has {L.MAX_WAITS}"
        return
    pairs = [(int(row[L.WAITS + 2 * k]), int(row[L.WAITS + 2 * k + 1])) for k in range(n)]
    got = dict(pairs)
    by = {counter(s): x.name for s, x in enumerate(plan.stages)}
    for at, count in want.items():
        if at not in got:
            yield f"{stage.name} does not wait for {by[at]}"
        elif got[at] != count:
            yield f"{stage.name} counts {got[at]} arrivals of {by[at]}, which makes {count}"
    for at in got.keys() - want.keys():
        yield f"{stage.name} waits on {by.get(at, hex(at))}, and no edge says so"
    if len(pairs) != len(got):
        yield f"{stage.name} waits twice on one counter"
    if int(row[L.SIGNAL]) != (counter(i) if i in waited else 0):
        yield f"{stage.name} signals {int(row[L.SIGNAL]):#x}, expected {counter(i) if i in waited else 0:#x}"
    index = next((s.index for s in stage.streams if s.index), "")
    src = last_writer(plan, i, index) if index else -1
    barrier = any(x.mechanism == "grid_barrier" for x in plan.edges)
    due = (counter(src), plan.sms if barrier else plan.stages[src].tasks) if index else (0, 0)
    if (int(row[L.INDEX_WAIT]), int(row[L.INDEX_ARRIVALS])) != due:
        yield f"{stage.name}: the producer warp's wait for {index or 'no index'} is not {due}"
    streams = dict(dict(plan.choices).get("overlap", ())).get("weight_stream", True)
    after = bool(stage.streams) and (not streams if index else stage.param("stream") == "after_wait")
    if int(row[L.STREAM]) != int(after):
        yield f"{stage.name}: tiles are queued {'ahead of' if after else 'after'} its waits"
    if int(row[L.TAG]) != i + 1:
        yield f"{stage.name}: names itself stage {int(row[L.TAG]) - 1}"


def check_table(plan: Plan, table: np.ndarray, book: Book, folder: Path = KERNELS, repeat: str = "") -> list[Check]:
    """The five checks `NAMES` on a table that `lower(plan, book.addresses())` made; `folder`: the device sources."""
    names, dispatch = device_names(folder), device_bodies(folder)
    found: dict[str, list[str]] = {n: [] for n in NAMES}
    sync = book.regions["sync"][0]
    waited = frozenset(s for i in range(len(plan.stages)) for s in counted(plan, i)) | frozenset(
        last_writer(plan, i, s.index) for i, st in enumerate(plan.stages) for s in st.streams if s.index
    )
    if any(e.mechanism == "grid_barrier" for e in plan.edges):
        waited = frozenset(range(len(plan.stages)))
    fixed = {L.N_WAITS, L.SIGNAL, L.TAG, L.STREAM, L.INDEX_WAIT, L.INDEX_ARRIVALS}
    barrier = any(e.mechanism == "grid_barrier" for e in plan.edges)
    if table.shape != (len(plan.stages), L.DESC_WORDS):
        return [from_findings(n, [f"table of {table.shape}, {len(plan.stages)} stages"], "", repeat) for n in NAMES]
    for i, stage in enumerate(plan.stages):
        e = _Expect(plan, i, book, names)
        number = int(table[i, L.BODY])
        called = dispatch.get(number, L.BODIES[number] if 0 <= number < len(L.BODIES) else "nothing")
        if called != stage.body:
            found["table.work"].append(f"{stage.name}: body {number} calls {called}, expected {stage.body}")
        for at, value, what in (
            (L.UNITS, stage.units, "units"),
            (L.TASKS, stage.tasks, "tasks"),
            (L.FIRST_SM, stage.first_sm, "first SM"),
            (L.ASSIGN, int(stage.assign == "cyclic"), "assignment"),
            (L.PER_ROW, stage.units // max(stage.row_units, 1), "units a row"),
            (L.ALL_SMS, int(barrier), "arrival of every SM"),
        ):
            e.put("work", at, value, what)
        BODIES[stage.body](e)
        found["table.waits"] += _order(e, table, waited, sync)
        row = table[i].astype(np.uint64)
        seen = {L.BODY} | fixed | {L.WAITS + k for k in range(2 * min(max(int(table[i, L.N_WAITS]), 0), L.MAX_WAITS))}
        for check, at, want, what in e.words:
            seen.add(at)
            if int(row[at]) != want:
                found[check].append(
                    f"{stage.name}: {what} is {_show(check, int(row[at]))}, expected {_show(check, want)}"
                )
        for at, mask, want, what in e.partial:
            seen.add(at)
            if int(row[at]) & mask != want:
                found["table.tags"].append(f"{stage.name}: {what} is {int(row[at]) & mask:#x}, expected {want:#x}")
        for at, array, what in e.tables:
            seen.add(at)
            have = book.arrays.get(int(row[at]))
            if have is None or have.shape != array.shape or not _same(have, array):
                found["table.constants"].append(f"{stage.name}: {what} is not what the Plan says")
        extra = [int(w) for w in np.nonzero(row)[0] if int(w) not in seen]
        if extra:
            found["table.work"].append(f"{stage.name}: words {extra[:4]} are set and nobody reads them")
    found["table.addresses"] += _overlaps(book)
    n = table.shape[0]
    say = {
        "table.work": f"{n} descriptors name body, units, tasks and SMs of their stages",
        "table.waits": "waits, arrivals, signals and the ring's own waits follow from the edges; a line a counter",
        "table.tags": "tagged operands name the last stage that writes them, in the buffer's dtype and layout",
        "table.addresses": f"{len(book.regions)} regions, disjoint; operands, weights and states at their own",
        "table.constants": "shapes, epsilons, scales and switches at the offsets that the device code reads",
    }
    return [from_findings(c, found[c], say[c], repeat) for c in NAMES]


def _same(have: np.ndarray, want: np.ndarray) -> bool:
    """Addresses exactly, floats to fp32's precision."""
    return np.array_equal(have, want) if want.dtype == np.int64 else np.allclose(have, want, rtol=1e-6, atol=2e-7)


def _show(check: str, word: int) -> str:
    if check != "table.constants" or word < 1 << 20 or word >= 1 << 32:
        return hex(word) if word >= 1 << 20 else str(word)
    return f"{struct.unpack('<f', word.to_bytes(4, 'little'))[0]:g}"


def _overlaps(book: Book) -> list[str]:
    """Regions that share bytes, or break the 16-byte alignment of bulk copies."""
    out = [f"{n} at {a:#x}: not on a 16-byte boundary" for n, (a, _) in book.regions.items() if a % 16]
    order = sorted((a, a + size, n) for n, (a, size) in book.regions.items())
    out += [
        f"{x[2]} and {y[2]} share {x[1] - y[0]} bytes" for x, y in zip(order, order[1:], strict=False) if x[1] > y[0]
    ]
    return out


def lowered(plan: Plan, graph: Graph) -> tuple[np.ndarray, Book]:
    """The table of a Plan at synthetic addresses, and the book that knows them. Raises ValueError where `lower` refuses."""
    book = Book(graph, plan)
    return lower(plan, book.addresses()), book


def audit_table(plan: Plan, graph: Graph, repeat: str = "") -> list[Check]:
    """Lower the Plan and read the table back. A Plan that cannot be lowered fails every check, in the words of `lower`."""
    try:
        table, book = lowered(plan, graph)
    except (ValueError, TypeError, KeyError) as err:
        return [Check(n, "fail", None, 0, f"the Plan cannot be lowered: {err}", repeat) for n in NAMES]
    return check_table(plan, table, book, repeat=repeat)
