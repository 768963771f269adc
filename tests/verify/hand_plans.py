"""Small hand-made Plans for the proofs: a few layers of projection, state update, routed experts and exchange."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from optkit.plan.types import Access, Buffer, Edge, IndexSet, Plan, Stage, Stream

ROWS, SMS, HIDDEN, HEADS, DIM, INTER, BOUND = 8, 6, 128, 4, 32, 32, 4
HARDWARE = (("name", "toy"), ("registers", 65536), ("smem_kib", 227), ("sms", SMS))
SLOT = 18432


def gemv(
    name: str, reads: tuple[str, ...], out: str, m: int, tasks: int = SMS, first_sm: int = 0, k: int = HIDDEN
) -> Stage:
    """Every unit reads all of `reads` and writes 16 columns of `out`."""
    units = m // 16
    return Stage(
        name,
        "gemv",
        (name,),
        0,
        units,
        1,
        min(tasks, units),
        first_sm,
        "block",
        tuple(Access(r) for r in reads),
        (Access(out, step=16, span=16),),
        (Stream(f"{name}.weight", 16, 512, 1, 16 * k * 2),),
        smem=4096,
        regs=224,
    )


def heads(name: str, q: str, out: str, state: str, tasks: int = SMS) -> Stage:
    """One (row, head) a unit; reads and writes its own state row."""
    own = Access(state, "unit", 0, DIM, DIM)
    return Stage(
        name,
        "kda",
        (name,),
        0,
        ROWS * HEADS,
        ROWS,
        tasks,
        0,
        "block",
        (Access(q, "unit", 0, DIM, DIM), own, Access("state_slot", "unit")),
        (Access(out, "unit", 0, DIM, DIM), own),
        smem=2048,
        regs=168,
    )


def insert(name: str, q: str, state: str) -> Stage:
    return Stage(
        name,
        "mla_insert",
        (name,),
        0,
        ROWS,
        ROWS,
        min(SMS, ROWS),
        1,
        "block",
        (Access(q, "unit"), Access("slot_mapping", "unit")),
        (Access(state, "unit"),),
        regs=168,
    )


def attend(name: str, q: str, state: str, out: str) -> Stage:
    return Stage(
        name,
        "attn",
        (name,),
        0,
        ROWS * HEADS,
        ROWS,
        SMS,
        0,
        "block",
        (Access(q, "unit"), Access(state, "unit"), Access("seq_len", "unit"), Access("block_table", "unit")),
        (Access(out, "unit", 0, DIM, DIM),),
        regs=224,
    )


def route(name: str, logits: str, uniq: str) -> Stage:
    return Stage(name, "route", (name,), 0, 1, 1, 1, 0, "block", (Access(logits),), (Access(uniq),), regs=168)


def gate_up(name: str, z: str, uniq: str, ea: str) -> Stage:
    return Stage(
        name,
        "expert_gate_up",
        (name,),
        0,
        BOUND * INTER // 8,
        1,
        SMS,
        0,
        "cyclic",
        (Access(z), Access(uniq)),
        (Access(ea, by=uniq),),
        (Stream("experts.w1", 16, 2048, 1, 17408, index=uniq, weight2="experts.w3"),),
        regs=224,
    )


def down(name: str, ea: str, uniq: str, out: str) -> Stage:
    return Stage(
        name,
        "expert_down",
        (name,),
        0,
        HIDDEN // 16,
        1,
        SMS,
        0,
        "block",
        (Access(ea), Access(uniq)),
        (Access(out, step=16, span=16),),
        (Stream("experts.w2", 16, 2048, 1, 17408, index=uniq, repeat=BOUND),),
        regs=224,
    )


def make(
    stages: list[Stage],
    buffers: list[Buffer],
    mechanism: str = "counter",
    sets: tuple[IndexSet, ...] = (),
    edges: list[Edge] | None = None,
    **kw: Any,
) -> Plan:
    """A Plan whose RAW edges (and, for counters, nothing else) are derived: every reader waits for the last writers."""
    by_name = {b.name: b for b in buffers}
    if edges is None:
        edges = []
        for i, s in enumerate(stages):
            for name in dict.fromkeys(a.buffer for a in s.reads):
                writers = [j for j in range(i) if any(a.buffer == name for a in stages[j].writes)]
                if name in by_name and writers:
                    b = by_name[name]
                    m = {"tagged": "tagged", "plain": "counter"}[b.layout] if b.klass != "mailbox" else "peer_mailbox"
                    edges.append(Edge(writers[-1], i, name, "raw", m))
    base: dict[str, Any] = dict(
        name="toy",
        recipe_digest="",
        hardware=HARDWARE,
        sms=SMS,
        rows=ROWS,
        parallel=(("peers", "emulated"), ("tp", 1)),
        stages=tuple(stages),
        segments=(),
        buffers=tuple(buffers),
        edges=tuple(edges),
        index_sets=sets,
        ring_slots=4,
        ring_slot_bytes=SLOT,
        threads=288,
        choices=(),
        memory=(),
    )
    return Plan(**{**base, **kw})


def toy(layout: str = "plain", layers: int = 3) -> Plan:
    """`layers` layers: q -> heads (state) -> o -> kv -> insert, attend -> h, router, route, experts -> next p."""

    def act(name: str, width: int, dtype: str = "bf16", plain: bool = False) -> Buffer:
        return Buffer(name, "activation", dtype, ROWS, width, "plain" if plain else layout)

    buffers = [
        Buffer(n, "input", "i32", ROWS, 1) for n in ("token", "seq_len", "state_slot", "slot_mapping", "block_table")
    ]
    sets = [
        IndexSet("slot_mapping", "contract:vllm", ROWS, ("injective",)),
        IndexSet("state_slot", "contract:vllm", ROWS, ("injective",)),
    ]
    for p in range(2):
        buffers += [
            act(f"p@{p}", HIDDEN),
            act(f"q@{p}", HIDDEN),
            act(f"o@{p}", HIDDEN),
            act(f"a@{p}", HIDDEN),
            act(f"k@{p}", HIDDEN),
            act(f"ao@{p}", HIDDEN),
            act(f"h@{p}", HIDDEN),
            act(f"logits@{p}", 16, "f32"),
            act(f"uniq@{p}", 1 + BOUND * 9, "i32", plain=True),
            act(f"ea@{p}", 2 * INTER),
        ]
    stages = [
        Stage(
            "embed",
            "embed",
            ("embed",),
            -1,
            ROWS,
            ROWS,
            SMS,
            0,
            "block",
            (Access("token", "unit"),),
            (Access("p@0", "unit"),),
            regs=168,
        )
    ]
    for layer in range(layers):
        x, n = layer % 2, f"L{layer}."
        y = 1 - x
        buffers += [Buffer(f"{n}s", "state", "f32", 16, HEADS * DIM), Buffer(f"{n}kv", "state", "bf16", 16, HIDDEN)]
        stages += [
            gemv(n + "q", (f"p@{x}",), f"q@{x}", HIDDEN),
            heads(n + "heads", f"q@{x}", f"o@{x}", f"{n}s"),
            gemv(n + "o", (f"o@{x}",), f"a@{x}", HIDDEN, first_sm=2),
            gemv(n + "kv", (f"a@{x}",), f"k@{x}", HIDDEN),
            insert(n + "insert", f"k@{x}", f"{n}kv"),
            attend(n + "attend", f"a@{x}", f"{n}kv", f"ao@{x}"),
            gemv(n + "h", (f"ao@{x}",), f"h@{x}", HIDDEN),
            gemv(n + "router", (f"h@{x}",), f"logits@{x}", 16),
            route(n + "route", f"logits@{x}", f"uniq@{x}"),
            gate_up(n + "gate_up", f"h@{x}", f"uniq@{x}", f"ea@{x}"),
            down(n + "down", f"ea@{x}", f"uniq@{x}", f"p@{y}"),
        ]
        if layer < 2:
            sets.append(IndexSet(f"uniq@{x}", n + "route", BOUND, ("partition",)))
    return make(stages, buffers, sets=tuple(sets))


def but(plan: Plan, stage: str, **changes: Any) -> Plan:
    """`plan` with one stage changed."""
    return replace(plan, stages=tuple(replace(s, **changes) if s.name == stage else s for s in plan.stages))


def without(plan: Plan, src: str, dst: str, buffer: str = "") -> Plan:
    """`plan` without the edges from src to dst (on one buffer, or all)."""
    i, j = plan.index[src], plan.index[dst]
    kept = tuple(e for e in plan.edges if not (e.src == i and e.dst == j and buffer in ("", e.buffer)))
    assert len(kept) < len(plan.edges)
    return replace(plan, edges=kept)
