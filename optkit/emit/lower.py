"""Plan + addresses -> the table of stage descriptors that the kernel walks (layout.py). numpy only, no CuTe DSL.

Everything the device knows about a stage comes through here, so this file and the bodies are the two writings of a
descriptor's fields. Counter edges become (counter, arrivals) pairs; tagged edges need no words beyond the operand's
producing stage, which fixes the tag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optkit.emit import layout as L
from optkit.models.rope import inverse_frequencies
from optkit.plan.types import Plan

COUNTING = ("counter", "grid_barrier")


@dataclass(frozen=True)
class StateAddress:
    """Where a state tensor lives: byte strides of a slot or block, of a row in it, of a head. `v` only for GQA."""

    base: int
    block: int
    row: int = 0
    head: int = 0
    v: tuple[int, int, int, int] = (0, 0, 0, 0)


@dataclass(frozen=True)
class Addresses:
    """Device addresses by name. `weight` of an MXFP4 tensor gives (packed, scales); `step(name, layer)` is the step input that
    layer reads (vLLM gives each cache group a block table and state slots of its own); `constant` stores an array on the
    device (table class) and returns its address; `sync` is the base of the sync region."""

    buffer: Callable[[str], int]
    weight: Callable[[str], int | tuple[int, int]]
    state: Callable[[str], StateAddress]
    constant: Callable[[np.ndarray], int]
    step: Callable[[str, int], int]
    sync: int
    positions: int  # rows of the rotary table: positions 0 .. positions - 1
    choices: Mapping[int, int] = field(default_factory=dict)  # route stage -> where its top-k ids are exported

    def counter(self, stage: int) -> int:
        """Address of a stage's arrival counter, a line of its own."""
        return self.sync + L.SYNC_COUNTERS + stage * L.LINE


def sync_bytes(plan: Plan) -> int:
    """Size of the sync region: control words and one counter line a stage."""
    return L.SYNC_COUNTERS + len(plan.stages) * L.LINE


def sync_image(plan: Plan, epoch: int) -> np.ndarray:
    """The sync region, uint8 [sync_bytes], as it stands after `epoch` launches: tickets in 64 bits, counters in 32."""
    image = np.zeros(sync_bytes(plan), np.uint8)
    for at in (L.SYNC_ENTERED, L.SYNC_EXITED):
        image[at : at + 8].view(np.uint64)[0] = epoch * plan.sms
    for stage in signalling(plan):
        at = L.SYNC_COUNTERS + stage * L.LINE
        image[at : at + 4].view(np.uint32)[0] = epoch * arrivals(plan, stage) & 0xFFFFFFFF
    return image


def arrivals(plan: Plan, src: int) -> int:
    """Arrivals per launch on a stage's counter."""
    return plan.sms if _barriers(plan) else plan.stages[src].tasks


def _barriers(plan: Plan) -> bool:
    return "grid_barrier" in plan.mechanisms


def waits_of(plan: Plan, index: int) -> tuple[int, ...]:
    """Stages whose counters stage `index` acquires, ascending.

    A stage whose tiles are queued only after its waits (stream after_wait) counts every producer, tagged ones too: the
    producer warp has no payload to poll.
    """
    if _barriers(plan):
        return (index - 1,) if index else ()
    stage = plan.stages[index]
    late = bool(stage.streams) and stage.param("stream") == "after_wait"
    return tuple(
        sorted(
            {
                e.src
                for e in plan.waits[index]
                if e.mechanism in COUNTING or (late and e.mechanism not in ("same_sm", "peer_mailbox"))
            }
        )
    )


def signalling(plan: Plan) -> frozenset[int]:
    """Stages that release arrivals."""
    if _barriers(plan):
        return frozenset(range(len(plan.stages)))
    return frozenset(s for i in range(len(plan.stages)) for s in waits_of(plan, i))


class _Row:
    """One descriptor being filled."""

    def __init__(self, plan: Plan, index: int, addr: Addresses, words: np.ndarray):
        self.plan, self.index, self.addr, self.w = plan, index, addr, words
        self.stage = plan.stages[index]
        self.p = dict(self.stage.params)
        self.raw = {e.buffer: e.src for e in plan.waits[index] if e.kind == "raw"}

    def put(self, at: int, *values: int) -> None:
        for i, v in enumerate(values):
            self.w[at + i] = np.uint64(v & 0xFFFFFFFFFFFFFFFF).astype(np.int64)

    def param(self, at: int, *values: int) -> None:
        self.put(L.PARAMS + at, *values)

    def meta(self, name: str, producer: int) -> int:
        b = self.plan.buffer[name]
        return L.meta(b.dtype, b.width, tagged=b.layout == "tagged", producer=producer + 1)

    def read(self, name: str) -> tuple[int, int]:
        """Operand of a buffer this stage reads: the tag is its producer's."""
        return self.addr.buffer(name), self.meta(name, self.raw.get(name, -1))

    def write(self, name: str) -> tuple[int, int]:
        """Operand of a buffer this stage writes."""
        return self.addr.buffer(name), self.meta(name, self.index)

    def weight(self, name: str) -> int:
        """Address of a weight, 0 for none."""
        if not name:
            return 0
        a = self.addr.weight(name)
        if isinstance(a, tuple):
            raise TypeError(f"{self.stage.name}: weight {name} is MXFP4 where bf16 is expected")
        return a

    def fp4(self, name: str) -> tuple[int, int]:
        a = self.addr.weight(name)
        if not isinstance(a, tuple):
            raise TypeError(f"{self.stage.name}: weight {name} is not MXFP4")
        return a

    def peers(self, out: str, coeffs: tuple[float, ...]) -> tuple[int, int]:
        """(table of mailbox slots this rank writes, table of coefficients); emulated: all slots of the own mailbox."""
        b = self.plan.buffer[out]
        base, slot = self.addr.buffer(out), b.rows * b.width * 8
        return (
            self.addr.constant(np.array([base + p * slot for p in range(len(coeffs))], np.int64)),
            self.addr.constant(np.array(coeffs, np.float32)),
        )


def lower(plan: Plan, addr: Addresses) -> np.ndarray:
    """The descriptor table, int64 [stages, layout.DESC_WORDS]. Raises ValueError where no device body can do a stage."""
    if dict(plan.parallel)["peers"] == "real" and dict(plan.parallel)["tp"] > 1:
        raise ValueError(
            "parallel.peers = real: mailboxes of other processes are not mapped by this version; "
            "plan and proofs cover it, the kernel runs with parallel.peers=emulated"
        )
    table = np.zeros((len(plan.stages), L.DESC_WORDS), np.int64)
    signals = signalling(plan)
    for i in range(len(plan.stages)):
        _describe(_Row(plan, i, addr, table[i]), signals)
    return table


def limits(plan: Plan) -> list[str]:
    """What the device bodies cannot do of a Plan, one line a reason; empty if every stage has a descriptor.

    The same code that fills the table for a launch, with made-up addresses: a Plan that passes here on a machine without
    a GPU is not refused first when it is launched.
    """
    found: dict[str, list[str]] = {}
    signals = signalling(plan)
    for i, stage in enumerate(plan.stages):
        fp4 = stage.body in ("expert_gate_up", "expert_down")
        weight = (0, 0) if fp4 else 0
        addr = Addresses(
            buffer=lambda _: 0,
            weight=lambda _, w=weight: w,  # type: ignore[misc]
            state=lambda _: StateAddress(0, 0),
            constant=lambda _: 0,
            step=lambda _, __: 0,
            sync=0,
            positions=1,
        )
        try:
            _describe(_Row(plan, i, addr, np.zeros(L.DESC_WORDS, np.int64)), signals)
        except ValueError as e:
            found.setdefault(str(e).removeprefix(f"stage {stage.name}"), []).append(stage.name)
    return [f"stage {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "") + why for why, names in found.items()]


def _describe(row: _Row, signals: frozenset[int]) -> None:
    """Fill one descriptor."""
    plan, i, stage = row.plan, row.index, row.stage
    waits = waits_of(plan, i)
    if len(waits) > L.MAX_WAITS:
        raise ValueError(
            f"stage {stage.name} waits on {len(waits)} counters: at most {L.MAX_WAITS} fit its descriptor"
        )
    row.put(
        L.BODY,
        L.BODIES.index(stage.body),
        stage.units,
        stage.tasks,
        stage.first_sm,
        int(stage.assign == "cyclic"),
        stage.units // max(stage.row_units, 1),
        len(waits),
        row.addr.counter(i) if i in signals else 0,
        i + 1,
    )
    row.put(L.ALL_SMS, int(_barriers(plan)))
    for k, src in enumerate(waits):
        row.put(L.WAITS + 2 * k, row.addr.counter(src), arrivals(plan, src))
    _streams(row)
    _FILL[stage.body](row)


def _multiple(row: _Row, what: str, value: int, of: int, why: str) -> None:
    """Raises ValueError where a size is not the multiple that a device body counts on."""
    if value % of:
        raise ValueError(f"stage {row.stage.name}: {what} is {value}: expected a multiple of {of} ({why})")


def _streams(row: _Row) -> None:
    stage, plan = row.stage, row.plan
    if not stage.streams:
        return
    index = next((s.index for s in stage.streams if s.index), "")
    row.put(L.STREAM, int(stage.param("stream") == "after_wait" and not index))
    if index:
        src = row.raw[index]
        row.put(L.INDEX_WAIT, row.addr.counter(src), arrivals(plan, src))
        if not dict(dict(plan.choices)["overlap"])["weight_stream"]:
            row.put(L.STREAM, 1)


def _prologue(row: _Row, x: Any, out: str = "") -> None:
    row.param(
        L.X_PROLOGUE,
        L.PROLOGUES.index(x["prologue"]),
        x["width"],
        row.weight(x["norm"]),
        L.f32_bits(x["eps"]),
        row.weight(x["mix_norm"]),
        row.weight(x["mix_proj"]),
        L.f32_bits(x["mix_eps"]),
        len(x["inputs"]),
    )
    if len(x["inputs"]) > L.MAX_INPUTS:
        raise ValueError(f"stage {row.stage.name} mixes {len(x['inputs'])} rows: at most {L.MAX_INPUTS}")
    if x["stats"]:
        row.param(L.X_STATS, *row.read(x["stats"]))
    _multiple(row, "width of x", x["width"], 8, "16 bytes a load")
    for i, name in enumerate(x["inputs"]):
        row.param(L.X_IN + 2 * i, *row.read(name))
    if out:
        row.param(L.X_OUT, *row.write(out))


def _gemv(row: _Row) -> None:
    _prologue(row, row.p["x"])
    parts = row.p["parts"]
    if len(parts) > L.MAX_PARTS:
        raise ValueError(f"stage {row.stage.name} packs {len(parts)} projections: at most {L.MAX_PARTS}")
    for i, p in enumerate(parts):
        at = L.PARTS + i * L.PART_WORDS
        group_rows = p["m"] // p["groups"]
        op = p["op"].rpartition(".")[2]
        _multiple(row, f"columns of {op}", p["k"], 32, "two mma of 16 columns a step, 16-byte bulk copies")
        _multiple(row, f"output rows of {op}", p["m"], 4, "4 a store")
        for what in ("x_stride", "x_offset"):
            _multiple(row, f"{what} of {op}", p[what], 8, "16 bytes a load")
        row.put(
            at,
            p["first"],
            p["count"],
            p["m"],
            p["k"],
            row.weight(p["weight"]),
            row.weight(p["weight2"]),
            group_rows,
            p["x_stride"],
            p["x_offset"],
            L.EPILOGUES.index(p["epilogue"]),
            L.ACTS.index(p["act"]) if p["act"] else 0,
            *row.write(p["out"]),
            L.f32_bits(p["beta"]),
            L.f32_bits(p["linear_beta"]),
            len(p["add"]),
        )
        operands = p["add"] or ((p["gate"],) if p["gate"] else ())
        if len(operands) > 3:
            raise ValueError(f"stage {row.stage.name}: {len(operands)} addends, at most 3")
        for k, name in enumerate(operands):
            row.put(at + L.P_ADD0 + 2 * k, *row.read(name))
        if p["epilogue"] == "mailbox":
            row.put(at + L.P_N_ADD, len(p["coeffs"]))
            row.put(at + L.P_PEERS, *row.peers(p["out"], p["coeffs"]))


def _mixnorm(row: _Row) -> None:
    _prologue(row, row.p["x"], row.p["out"])


def _blockstats(row: _Row) -> None:
    width = row.plan.buffer[row.p["inputs"][0]].width
    _prologue(
        row,
        {
            "prologue": "copy",
            "width": width,
            "norm": "",
            "eps": 0.0,
            "mix_norm": row.p["mix_norm"],
            "mix_proj": row.p["mix_proj"],
            "mix_eps": 0.0,
            "stats": "",
            "inputs": row.p["inputs"],
        },
        row.p["out"],
    )


def _embed(row: _Row) -> None:
    p = row.p
    _multiple(row, "width", p["width"], 4, "4 a store")
    row.param(0, row.weight(p["weight"]), p["vocab_start"], p["vocab_rows"], p["width"], *row.write(p["out"]))
    if p["coeffs"]:
        row.param(6, len(p["coeffs"]), *row.peers(p["out"], p["coeffs"]))


def _kda(row: _Row) -> None:
    p = row.p
    if p["dim"] != 128 or p["taps"] != 4:
        raise ValueError(
            f"stage {row.stage.name}: head dim {p['dim']}, {p['taps']} taps: the device body has 128 and 4"
        )
    conv, rec = row.addr.state(p["conv"]), row.addr.state(p["recurrent"])
    row.param(
        0,
        p["heads"],
        L.f32_bits(p["lower_bound"]),
        L.f32_bits(p["l2_eps"]),
        L.f32_bits(p["eps"]),
        conv.base,
        conv.block,
        rec.base,
        rec.block,
        *(row.weight(p[k]) for k in ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "o_norm")),
    )
    for i, k in enumerate(("q", "k", "v", "f", "b", "g")):
        row.param(14 + 2 * i, *row.read(p[k]))
    row.param(26, *row.write(p["out"]), row.addr.step("state_slot", row.stage.layer))


def _mla_insert(row: _Row) -> None:
    p = row.p
    kv = row.addr.state(p["kv"])
    for part in ("lora", "rope"):
        _multiple(row, f"{part} part of a cache row", p[part], 4, "4 a load")
    row.param(0, kv.base, kv.block, kv.row, p["lora"], p["rope"], row.weight(p["weight"]), L.f32_bits(p["eps"]))
    row.param(8, *row.read(p["kva"]), row.addr.step("slot_mapping", row.stage.layer))


def rope_table(dim: int, theta: float, scaling: tuple[float, ...], positions: int) -> np.ndarray:
    """(cos, sin) pairs [positions, dim / 2, 2], float32, from float64 angles."""
    angle = np.arange(positions, dtype=np.float64)[:, None] * np.array(inverse_frequencies(dim, theta, tuple(scaling)))
    return np.stack([np.cos(angle), np.sin(angle)], -1).astype(np.float32)


def _rope_insert(row: _Row) -> None:
    p = row.p
    kv = row.addr.state(p["kv"])
    _multiple(row, "head dim", p["dim"], 8, "4 rotated pairs a store")
    table = row.addr.constant(rope_table(p["dim"], p["theta"], p["scaling"], row.addr.positions))
    row.param(0, kv.base, kv.block, kv.row, kv.head, *kv.v, p["heads"], p["kv_heads"], p["dim"], table)
    for i, k in enumerate(("q", "k", "v")):
        row.param(12 + 2 * i, *row.read(p[k]))
    row.param(18, *row.write(p["out"]), row.addr.step("slot_mapping", row.stage.layer))


def _attn(row: _Row, combine: bool = False) -> None:
    p = row.p
    kv = row.addr.state(p["kv"])
    mla = p["kind"] == "mla"
    if p["heads_per_group"] > 16 or p["dqk"] % 32 or p["dv"] % 64 or p["dv"] > 512:
        raise ValueError(
            f"stage {row.stage.name}: {p['heads_per_group']} heads a group (at most 16), key width {p['dqk']} "
            f"(multiple of 32), value width {p['dv']} (multiple of 64, at most 512)"
        )
    v = (kv.base, kv.block, kv.row, 0) if mla else kv.v
    row.param(
        0,
        int(not mla),
        p["groups"],
        p["heads_per_group"],
        p["dqk"],
        p["dv"],
        L.f32_bits(p["scale"]),
        p["splits"],
        kv.base,
        kv.block,
        kv.row,
        kv.head,
        *v,
        p["dv"] if mla else 0,
        p["nope"] + p["rope"],
        p["nope"] if mla else 0,
    )
    if combine:
        row.param(18, *row.read(p["partial"]))
    else:
        row.param(18, *row.read(p["q"]))
        if mla:
            row.param(20, *row.read(p["ql"]))
    row.param(22, *row.write(p["out"]), row.addr.step("block_table", row.stage.layer))


def _attn_combine(row: _Row) -> None:
    _attn(row, combine=True)


def _ew(row: _Row) -> None:
    p = row.p
    ranks = row.plan.buffer[p["inputs"][0]].ranks
    _multiple(row, "width", p["width"], 4 * (ranks if p["mode"] == "gather" else 1), "4 a store, from one rank")
    row.param(
        0,
        L.EW_MODES.index(p["mode"]),
        p["width"],
        len(p["inputs"]),
        L.ACTS.index(p["act"]) if p["act"] else 0,
        L.f32_bits(p["beta"]),
        L.f32_bits(p["linear_beta"]),
        ranks,
        p["width"] // max(ranks, 1),
    )
    if len(p["inputs"]) > 6:
        raise ValueError(f"stage {row.stage.name}: {len(p['inputs'])} inputs, at most 6")
    for i, name in enumerate(p["inputs"]):
        row.param(8 + 2 * i, *row.read(name))
    row.param(20, *row.write(p["out"]))


def _route(row: _Row) -> None:
    p = row.p
    if p["topk"] % 4 or p["topk"] * L.ROWS > 128:
        raise ValueError(f"stage {row.stage.name}: top-{p['topk']}: the device body takes multiples of 4 up to 16")
    _multiple(row, "number of experts", p["experts"], 4, "4 a load")
    row.param(
        0,
        p["experts"],
        p["topk"],
        L.f32_bits(p["scale"]),
        row.weight(p["bias"]),
        row.addr.choices.get(row.index) or row.addr.buffer(p["ids"]),
        row.addr.buffer(p["uniq"]),
    )
    row.param(6, *row.read(p["logits"]), *row.write(p["wts"]))


def _expert(row: _Row, w1: str, w3: str, x: str) -> None:
    p = row.p
    _multiple(row, "expert width", p["inter"], 64, "MXFP4 scales of 8 rows are one bulk copy of 16-byte units")
    _multiple(row, "latent width", p["latent"], 64 if p["latent"] <= L.CHUNK_FP4 else 512,
              "MXFP4 scales of a tile are bulk copies of 16-byte units")
    a, b = row.fp4(p[w1]), row.fp4(p[w3])
    row.param(
        0,
        p["inter"],
        p["latent"],
        p["topk"],
        L.ACTS.index(p["act"]) if p.get("act") else 0,
        L.f32_bits(p.get("beta", 0.0)),
        L.f32_bits(p.get("linear_beta", 0.0)),
        row.addr.buffer(p["uniq"]),
        *a,
        *b,
    )
    row.param(14, *row.read(p[x]), *row.write(p["out"]))
    if p.get("wts"):
        row.param(18, *row.read(p["wts"]))
    if p.get("coeffs"):
        row.param(11, len(p["coeffs"]), *row.peers(p["out"], p["coeffs"]))


def _expert_gate_up(row: _Row) -> None:
    _expert(row, "w1", "w3", "z")


def _expert_down(row: _Row) -> None:
    if row.p["inter"] > L.CHUNK_FP4:
        raise ValueError(
            f"stage {row.stage.name}: expert width {row.p['inter']}: at most {L.CHUNK_FP4} columns fit one tile"
        )
    _expert(row, "w2", "w2", "ea")


_FILL: dict[str, Callable[[_Row], None]] = {
    "gemv": _gemv,
    "mixnorm": _mixnorm,
    "blockstats": _blockstats,
    "embed": _embed,
    "kda": _kda,
    "mla_insert": _mla_insert,
    "rope_insert": _rope_insert,
    "attn": _attn,
    "attn_combine": _attn_combine,
    "ew": _ew,
    "route": _route,
    "expert_gate_up": _expert_gate_up,
    "expert_down": _expert_down,
}


def x_bytes(plan: Plan) -> int:
    """Bytes of the x area: the largest stage's shared memory beside the ring."""
    return -(-max(max((s.smem for s in plan.stages), default=0), 1024) // 128) * 128


def bodies_of(plan: Plan) -> tuple[str, ...]:
    """The bodies a kernel for this Plan must contain, in switch order."""
    used = {s.body for s in plan.stages}
    return tuple(b for b in L.BODIES if b in used)
