"""The stage bodies: how each one is cut into units, what a unit touches, which weight tiles it pulls, what it needs.

One function per body of docs/contracts.md ("Stage bodies and their params"). It takes the params of one stage, in
which buffers are still graph values (marked by the type `V`), and returns the `Shape` of the stage. Nothing here
knows an architecture, a GPU or the neighbours of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from optkit.plan.errors import PlanError
from optkit.plan.types import Access, Stream

TILE_ROWS = 16
CHUNK_BF16 = 512
CHUNK_FP4 = 2048
ROW_PITCH = 1088  # 1024 bytes of a row chunk + 64, so that 8 rows fall into different banks
SCALE_BYTES = 1024  # ue8m0 scales of one 16 x 2048 MXFP4 tile
SLOT_BYTES = TILE_ROWS * ROW_PITCH + SCALE_BYTES
FIXED_SMEM = 16 * 1024  # two descriptors (4.5 KiB), reduction scratch (8 KiB), barriers, alignment
THREADS = 288  # 8 consumer warps and one producer warp
REGS_MMA = 224  # 288 * 224 = 64512 of 65536 registers
REGS_VECTOR = 168
EW_COLUMNS = 64
KV_CHUNK = 64
PARTIAL_EXTRA = 4  # a head's attention partial is m, l, 0, 0, o[dv]: 16-byte aligned


class V(str):
    """A graph value (or planner-made value) that stands where a buffer name will stand."""


@dataclass(frozen=True)
class Shape:
    """What a body says about one stage; see types.Stage for the fields."""

    units: int
    row_units: int = 1
    assign: str = "block"
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    streams: tuple[Stream, ...] = ()
    smem: int = 0
    regs: int = REGS_VECTOR


@dataclass(frozen=True)
class Context:
    """Facts of the step that bodies need beside their params: the token class."""

    rows: int


Params = Mapping[str, Any]


def x_area(width: int) -> int:
    """Bytes of shared memory for 8 bf16 token rows of `width` columns (64 bytes of padding a row)."""
    return 8 * (2 * width + 64)


def gemv(p: Params, ctx: Context) -> Shape:
    """y = W x in 16-row tiles; every unit reads all of x (after its prologue)."""
    x = p["x"]
    reads = [Access(v) for v in x["inputs"]]
    if x["stats"]:
        reads.append(Access(x["stats"]))
    writes: list[Access] = []
    streams: list[Stream] = []
    units = 0
    for part in p["parts"]:
        first, count, k = part["first"], part["count"], part["k"]
        units = max(units, first + count)
        step = TILE_ROWS // 2 if part["epilogue"] == "act" else TILE_ROWS
        writes.append(Access(part["out"], base=0, step=step, span=step, first=first, count=count))
        for v in (*part["add"], *((part["gate"],) if part["gate"] else ())):
            reads.append(Access(v, base=0, step=step, span=step, first=first, count=count))
        chunk = min(CHUNK_BF16, k)
        streams.append(
            Stream(
                part["weight"],
                TILE_ROWS,
                chunk,
                ceil(k / chunk),
                TILE_ROWS * chunk * 2,
                first,
                count,
                weight2=part["weight2"],
            )
        )
    return Shape(
        units, reads=tuple(reads), writes=tuple(writes), streams=tuple(streams), smem=x_area(x["width"]), regs=REGS_MMA
    )


def mixnorm(p: Params, ctx: Context) -> Shape:
    """One row a unit: softmax mix over the inputs (if more than one), then the norm (if any)."""
    x = p["x"]
    reads = [Access(v, rows="unit") for v in x["inputs"]] + ([Access(x["stats"], rows="unit")] if x["stats"] else [])
    return Shape(
        ctx.rows, ctx.rows, reads=tuple(reads), writes=(Access(p["out"], rows="unit"),), smem=x_area(x["width"])
    )


def blockstats(p: Params, ctx: Context) -> Shape:
    """One row a unit: two dot products for each saved row; depends on no newer prefix."""
    return Shape(
        ctx.rows,
        ctx.rows,
        reads=tuple(Access(v, rows="unit") for v in p["inputs"]),
        writes=(Access(p["out"], rows="unit"),),
    )


def embed(p: Params, ctx: Context) -> Shape:
    """One row a unit: copy the table row of the token."""
    return Shape(ctx.rows, ctx.rows, reads=(Access("token", rows="unit"),), writes=(Access(p["out"], rows="unit"),))


def kda(p: Params, ctx: Context) -> Shape:
    """One head of one row a unit: conv, gate, delta rule, output norm; reads and writes its own state only."""
    d, heads = p["dim"], p["heads"]
    cols = [Access(p[key], "unit", 0, d, d) for key in ("q", "k", "v", "f", "g")] + [Access(p["b"], "unit", 0, 1, 1)]
    conv = [Access(p["conv"], "unit", (t * 3 + c) * heads * d, d, d) for t in range(p["taps"] - 1) for c in range(3)]
    state = [*conv, Access(p["recurrent"], "unit", 0, d * d, d * d)]
    return Shape(ctx.rows * heads, ctx.rows, reads=(*cols, *state, Access("state_slot", "unit")),
                 writes=(Access(p["out"], "unit", 0, d, d), *state), smem=4 * 6 * d, regs=REGS_MMA)


def mla_insert(p: Params, ctx: Context) -> Shape:
    """One row a unit: normalise the latent and write the cache row at slot_mapping."""
    return Shape(
        ctx.rows,
        ctx.rows,
        reads=(Access(p["kva"], "unit"), Access("slot_mapping", "unit")),
        writes=(Access(p["kv"], "unit"),),
    )


def rope_insert(p: Params, ctx: Context) -> Shape:
    """One row a unit: rotate q and k at position seq_len - 1, write k and v to the cache."""
    reads = tuple(Access(p[key], "unit") for key in ("q", "k", "v"))
    return Shape(
        ctx.rows,
        ctx.rows,
        reads=(*reads, Access("seq_len", "unit"), Access("slot_mapping", "unit")),
        writes=(Access(p["out"], "unit"), Access(p["kv"], "unit")),
    )


def attn(p: Params, ctx: Context) -> Shape:
    """One split of one kv group of one row a unit; chunks of 64 cached tokens."""
    groups, splits, per = p["groups"], p["splits"], p["heads_per_group"]
    if p["kind"] == "mla":
        q = [Access(p["q"], "unit"), Access(p["ql"], "unit")]
    elif splits == 1:
        q = [Access(p["q"], "unit", 0, per * p["dqk"], per * p["dqk"])]
    else:
        q = [Access(p["q"], "unit")]
    span = per * (p["dv"] if splits == 1 else p["dv"] + PARTIAL_EXTRA)
    # 16 query rows and a chunk of K rows (GQA: V rows too), scores fp32, probabilities bf16, m, l, alpha
    k_row, v_row = 2 * p["dqk"] + 64, 2 * p["dv"] + 64 if p["kind"] == "gqa" else 0
    smem = 16 * k_row + KV_CHUNK * (k_row + v_row) + 16 * KV_CHUNK * 4 + 16 * (2 * KV_CHUNK + 64) + 3 * 64
    return Shape(ctx.rows * groups * splits, ctx.rows,
                 reads=(*q, Access(p["kv"], "unit"), Access("seq_len", "unit"), Access("block_table", "unit")),
                 writes=(Access(p["out"], "unit", 0, span, span),), smem=smem, regs=REGS_MMA)


def attn_combine(p: Params, ctx: Context) -> Shape:
    """One kv group of one row a unit: merge the splits in order."""
    per, part = p["heads_per_group"], p["splits"] * p["heads_per_group"] * (p["dv"] + PARTIAL_EXTRA)
    return Shape(ctx.rows * p["groups"], ctx.rows, reads=(Access(p["partial"], "unit", 0, part, part),
                                                          Access("seq_len", "unit")),
                 writes=(Access(p["out"], "unit", 0, per * p["dv"], per * p["dv"]),),
                 smem=12 * per * p["splits"])  # m, l and the weight of every (head, split), fp32


def ew(p: Params, ctx: Context) -> Shape:
    """64 columns of all rows a unit."""
    whole = p["mode"] == "gather"  # the columns of one slot need not be a multiple of 64
    reads = tuple(Access(v) if whole else Access(v, step=EW_COLUMNS, span=EW_COLUMNS) for v in p["inputs"])
    return Shape(
        ceil(p["width"] / EW_COLUMNS), reads=reads, writes=(Access(p["out"], step=EW_COLUMNS, span=EW_COLUMNS),)
    )


def route(p: Params, ctx: Context) -> Shape:
    """A single task: top-k of every row, and the list of distinct experts."""
    return Shape(1, reads=(Access(p["logits"]),), writes=tuple(Access(p[key]) for key in ("ids", "wts", "uniq")),
                 smem=8 * ctx.rows * p["experts"] + 4 * 512)  # two kinds of scores; ids, first flags, ranks and experts of 128 slots


def expert_gate_up(p: Params, ctx: Context) -> Shape:
    """8 gate and 8 up rows of the u-th distinct expert a unit, for every row that chose it."""
    bound = ctx.rows * p["topk"]
    chunk = min(CHUNK_FP4, p["latent"])
    stream = Stream(
        p["w1"],
        TILE_ROWS,
        chunk,
        ceil(p["latent"] / chunk),
        TILE_ROWS * (chunk // 2 + chunk // 32),
        index=p["uniq"],
        weight2=p["w3"],
    )
    return Shape(
        bound * ceil(p["inter"] / 8),
        assign="cyclic",
        reads=(Access(p["z"]), Access(p["uniq"])),
        writes=(Access(p["out"], by=p["uniq"]),),
        streams=(stream,),
        smem=x_area(p["latent"]),
        regs=REGS_MMA,
    )


def expert_down(p: Params, ctx: Context) -> Shape:
    """16 latent rows of all distinct experts, summed in order, a unit."""
    bound = ctx.rows * p["topk"]
    chunk = min(CHUNK_FP4, p["inter"])
    stream = Stream(p["w2"], TILE_ROWS, chunk, ceil(p["inter"] / chunk), TILE_ROWS * (chunk // 2 + chunk // 32),
                    index=p["uniq"], repeat=bound)
    return Shape(ceil(p["latent"] / TILE_ROWS), reads=(Access(p["ea"]), Access(p["uniq"]), Access(p["wts"])),
                 writes=(Access(p["out"], step=TILE_ROWS, span=TILE_ROWS),), streams=(stream,),
                 smem=bound * (2 * p["inter"] + 64) + 4 * (1 + bound * (1 + ctx.rows)) + 4 * bound, regs=REGS_MMA)


BODIES: dict[str, Callable[[Params, Context], Shape]] = {
    f.__name__: f
    for f in (
        gemv,
        mixnorm,
        blockstats,
        embed,
        kda,
        mla_insert,
        rope_insert,
        attn,
        attn_combine,
        ew,
        route,
        expert_gate_up,
        expert_down,
    )
}


def shape_of(body: str, params: Params, ctx: Context) -> Shape:
    """The Shape of one stage. Raises PlanError for a body that does not exist."""
    if body not in BODIES:
        raise PlanError([f"stage body {body!r}: expected one of {', '.join(BODIES)}"])
    return BODIES[body](params, ctx)
