"""Rules on a Plan that need no clocks: arrivals, tags, liveness, ring, budgets, index sets.

Each function returns findings, one line each; none means the rule holds. What a rule takes for granted about the kernel
is said where the findings become checks (proofs.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from optkit.plan.types import CLASSES, MECHANISMS, Edge, IndexSet, Plan

FIXED_SMEM = 6 * 1024  # barriers, descriptors and reduction scratch of the kernel, beside ring and bodies
MAX_REGISTERS = 255  # per thread, all GPUs since sm_35
MAX_STAGES = (1 << 16) - 2  # a tag holds stage + 1 in 16 bits
COUNTER_WINDOW = 1 << 31  # counters compare by signed 32-bit difference


def edges(plan: Plan) -> list[str]:
    """Every edge runs forward and joins accesses that exist, by a mechanism its buffer can carry."""
    out: list[str] = []
    touched = [({a.buffer for a in s.reads}, {a.buffer for a in s.writes}) for s in plan.stages]
    for e in plan.edges:
        if not (0 <= e.src < len(plan.stages) and 0 <= e.dst < len(plan.stages)):
            out.append(f"edge {e.src} -> {e.dst} on {e.buffer}: there are {len(plan.stages)} stages")
            continue
        where = _edge(plan, e)
        if e.mechanism not in MECHANISMS or e.kind not in ("raw", "war", "waw"):
            out.append(f"{where}: unknown kind or mechanism {e.kind}/{e.mechanism}")
            continue
        if e.buffer not in plan.buffer:
            out.append(f"{where}: no such buffer")
            continue
        first, then = {"raw": (1, 0), "war": (0, 1), "waw": (1, 1)}[e.kind]
        verbs = ("read", "write")
        if e.buffer not in touched[e.src][first]:
            out.append(f"{where}: {plan.stages[e.src].name} does not {verbs[first]} {e.buffer}")
        if e.buffer not in touched[e.dst][then]:
            out.append(f"{where}: {plan.stages[e.dst].name} does not {verbs[then]} {e.buffer}")
        b = plan.buffer[e.buffer]
        if e.mechanism == "tagged" and b.layout != "tagged":
            out.append(f"{where}: tagged, but the buffer's layout is {b.layout}: its words carry no tag")
        if e.mechanism == "tagged" and b.klass == "state":
            out.append(f"{where}: state rows carry no tags and need release/acquire")
        if e.mechanism == "tagged" and e.kind != "raw":
            out.append(f"{where}: a tag orders a word's own write before its read and nothing else, so no {e.kind}")
        if e.mechanism == "peer_mailbox" and b.klass != "mailbox":
            out.append(f"{where}: peer_mailbox on a buffer of class {b.klass}")
        if (
            e.kind == "raw"
            and b.klass == "mailbox"
            and e.mechanism != "peer_mailbox"
            and dict(plan.parallel).get("peers") == "real"
        ):
            out.append(f"{where}: real peers write this mailbox, and no {e.mechanism} of this GPU waits for them")
    return out


def arrivals(plan: Plan) -> list[str]:
    """Counts are static and equal the tasks; every unit belongs to one task, every task to one SM of its own."""
    out: list[str] = []
    for s in plan.stages:
        if not 1 <= s.tasks <= plan.sms:
            out.append(
                f"{s.name}: {s.tasks} tasks, expected 1 .. {plan.sms} (one per SM): an edge from it would count "
                f"{s.tasks} arrivals"
            )
            continue
        if s.assign not in ("block", "cyclic"):
            out.append(f"{s.name}: assign {s.assign!r}, expected block or cyclic")
            continue
        if s.units < 1 or s.row_units < 1 or s.units % s.row_units:
            out.append(f"{s.name}: {s.units} units do not divide into {s.row_units} rows")
        if s.row_units not in (1, plan.rows):
            out.append(f"{s.name}: row_units {s.row_units}, expected 1 or the class of {plan.rows} rows")
        if not 0 <= s.first_sm < plan.sms:
            out.append(f"{s.name}: first_sm {s.first_sm}, expected 0 .. {plan.sms - 1}")
        held = Counter(u for t in {0, s.tasks // 2, s.tasks - 1} for u in s.units_of(t))
        if sum(len(s.units_of(t)) for t in range(s.tasks)) != s.units or max(held.values(), default=1) > 1:
            out.append(f"{s.name}: its tasks do not hold each of {s.units} units once")
    counted = {e.src for e in plan.edges if e.mechanism in ("counter", "grid_barrier")}
    for i in sorted(counted):
        if 0 <= i < len(plan.stages) and plan.stages[i].tasks >= COUNTER_WINDOW:
            out.append(f"{plan.stages[i].name}: {plan.stages[i].tasks} arrivals an epoch pass the signed 32-bit window")
    return out


def tags(plan: Plan) -> list[str]:
    """Tags (epoch << 16 | stage + 1) are unique: the stage fits 16 bits and no word has two writers under one tag."""
    out: list[str] = []
    if len(plan.stages) > MAX_STAGES:
        out.append(f"{len(plan.stages)} stages, a tag has room for {MAX_STAGES}")
    names = Counter(s.name for s in plan.stages)
    out += [f"stage name {n!r} occurs {c} times" for n, c in names.items() if c > 1]
    names = Counter(b.name for b in plan.buffers)
    out += [f"buffer name {n!r} occurs {c} times" for n, c in names.items() if c > 1]
    out += [
        f"{b.name}: class {b.klass!r} is none of {', '.join(CLASSES)}" for b in plan.buffers if b.klass not in CLASSES
    ]
    for b in plan.buffers:
        if b.layout == "tagged" and b.width * {"bf16": 2, "f32": 4, "i32": 4, "i64": 8}[b.dtype] % 8:
            out.append(f"{b.name}: a row of {b.width} {b.dtype} is no multiple of the 8 payload bytes of a tagged word")
    step = {"bf16": 4, "f32": 2, "i32": 2, "i64": 1}
    for s in plan.stages:
        for a in s.writes:
            tagged = plan.buffer.get(a.buffer)
            if tagged is not None and tagged.layout == "tagged":
                n = step[tagged.dtype]
                if a.base % n or a.step % n or (a.span % n and a.base + a.span < tagged.width and a.step):
                    out.append(
                        f"{s.name} writes {a.buffer} in pieces (base {a.base}, step {a.step}, span {a.span}) that "
                        f"split a tagged word of {n} elements"
                    )
    return out


def liveness(plan: Plan) -> list[str]:
    """All waits point backwards in the one global order, and every polled word is written by a stage before it.

    With it: take the first unfinished task in stage order; all it waits for is finished, its SM has finished its
    earlier tasks, its tiles come next out of the FIFO. So it proceeds, and no schedule can hang.
    """
    out: list[str] = []
    for e in plan.edges:
        if e.src >= e.dst:
            out.append(f"{_edge(plan, e)}: waits for a stage that is not earlier in the global order: deadlock")
    writers: dict[str, list[int]] = {}
    for i, s in enumerate(plan.stages):
        for a in s.writes:
            writers.setdefault(a.buffer, []).append(i)
    ins: set[tuple[int, str]] = {(e.dst, e.buffer) for e in plan.edges if e.kind == "raw"}
    for i, s in enumerate(plan.stages):
        for name in {a.buffer for a in s.reads}:
            b = plan.buffer.get(name)
            if b is not None and b.layout == "tagged" and (i, name) not in ins:
                out.append(f"{s.name} polls tagged words of {name} but no edge says whose tag to wait for")
    return out


def placement(plan: Plan) -> list[str]:
    """All CTAs are resident at once: one per SM, no more than the GPU has."""
    have = _hw(plan, "sms")
    if have is None:
        return ["hardware.sms is missing from the Plan"]
    return (
        [f"{plan.sms} CTAs wait for each other on a GPU of {have} SMs: some would never start"]
        if plan.sms > have
        else []
    )


def ring(plan: Plan) -> list[str]:
    """Tiles fit a slot, at least two slots, routed tiles behind the static ones of their stage and their edge."""
    out: list[str] = []
    if plan.ring_slots < 2 and any(s.streams for s in plan.stages):
        out.append(f"ring of {plan.ring_slots} slots: the producer cannot fill one while another is read (at least 2)")
    if plan.ring_slot_bytes % 16:
        out.append(f"ring slot of {plan.ring_slot_bytes} bytes: bulk copies need multiples of 16")
    into: dict[int, list[Edge]] = {}
    for e in plan.edges:
        into.setdefault(e.dst, []).append(e)
    seen: set[tuple[Any, ...]] = set()
    for i, s in enumerate(plan.stages):
        routed = False
        for t in s.streams:
            key = (s.body, t.weight.split(".")[-1], t.tile_bytes)
            if t.tile_bytes > plan.ring_slot_bytes and key not in seen:
                seen.add(key)
                out.append(f"{s.name}: a tile of {t.weight} has {t.tile_bytes} bytes, a slot {plan.ring_slot_bytes}")
            if t.tiles < 1 or t.tile_bytes < 1:
                out.append(f"{s.name}: stream of {t.weight} has {t.tiles} tiles of {t.tile_bytes} bytes")
            if routed and not t.index:
                out.append(
                    f"{s.name}: static tiles of {t.weight} are queued behind routed ones and would wait for the route"
                )
            routed = routed or bool(t.index)
            if t.index:
                acquire = [
                    e
                    for e in into.get(i, [])
                    if e.buffer == t.index
                    and e.kind == "raw"
                    and e.src < i
                    and e.mechanism in ("counter", "grid_barrier")
                ]
                if not acquire:
                    out.append(
                        f"{s.name}: tiles of {t.weight} are chosen by {t.index}, but the stage has no counter or "
                        f"grid_barrier edge from the stage that writes it: the producer warp would read it early"
                    )
    return out


def shared_memory(plan: Plan) -> tuple[list[str], int, int | None]:
    """(findings, bytes needed, bytes there): ring + largest body + fixed part."""
    worst = max(plan.stages, key=lambda s: s.smem)
    need = plan.ring_slots * plan.ring_slot_bytes + worst.smem + FIXED_SMEM
    kib = _hw(plan, "smem_kib")
    if kib is None:
        return ["hardware.smem_kib is missing from the Plan"], need, None
    have = kib * 1024
    if need <= have:
        return [], need, have
    line = (
        f"ring {plan.ring_slots} x {plan.ring_slot_bytes} + {worst.name} {worst.smem} + fixed {FIXED_SMEM} = {need}, "
        f"the GPU gives a CTA {have}"
    )
    return [line], need, have


def registers(plan: Plan) -> tuple[list[str], int, int | None]:
    """(findings, registers of the CTA, registers of the SM): all bodies are one kernel, so the largest ceiling counts.

    Allocation is per warp in units of 256 registers, so a thread's ceiling is rounded up to a multiple of 8.
    """
    worst = max(plan.stages, key=lambda s: s.regs)
    out = [f"{s.name}: body {s.body} declares no register ceiling" for s in plan.stages if s.regs < 1][:1]
    if worst.regs > MAX_REGISTERS:
        out.append(f"{worst.name}: ceiling of {worst.regs} registers a thread, an instruction can name {MAX_REGISTERS}")
    if plan.threads % 32:
        out.append(f"{plan.threads} threads: not whole warps")
    need = -(-worst.regs // 8) * 8 * plan.threads
    have = _hw(plan, "registers")
    if have is None:
        return [*out, "hardware.registers is missing from the Plan"], need, None
    if need > have:
        out.append(
            f"{worst.name} (body {worst.body}): {worst.regs} registers x {plan.threads} threads, the SM has {have}"
        )
    return out, need, have


def index_sets(plan: Plan) -> list[str]:
    """Every index a stage depends on has a producer that runs before, a bound that fits its units, and facts."""
    out: list[str] = []
    known: dict[str, list[IndexSet]] = {}
    for x in plan.index_sets:
        known.setdefault(x.value, []).append(x)
        if x.bound < 1:
            out.append(f"index set {x.value}: bound {x.bound}, expected at least 1")
        if not x.facts:
            out.append(f"index set {x.value}: no facts; disjoint work on its elements cannot be proven")
        if x.producer.startswith("contract:"):
            continue
        if x.producer not in plan.index:
            out.append(f"index set {x.value}: producer {x.producer!r} is no stage")
        elif x.value not in {a.buffer for a in plan.stages[plan.index[x.producer]].writes}:
            out.append(f"index set {x.value}: its producer {x.producer} does not write it")
    for i, s in enumerate(plan.stages):
        used = {t.index for t in s.streams if t.index} | {a.by for a in (*s.reads, *s.writes) if a.by}
        for name in sorted(used):
            before = [
                x
                for x in known.get(name, [])
                if x.producer.startswith("contract:") or plan.index.get(x.producer, i) < i
            ]
            if not before:
                made = ", ".join(x.producer for x in known.get(name, [])) or "no declared index set"
                out.append(f"{s.name} depends on the elements of {name}, which no earlier stage makes ({made})")
                continue
            bound = before[-1].bound
            if s.assign == "cyclic" and s.units % max(bound, 1):
                out.append(f"{s.name}: {s.units} units are not a multiple of the {bound} slots of {name}")
            for t in s.streams:
                if t.index == name and t.repeat > 1 and t.repeat != bound:
                    out.append(
                        f"{s.name}: pulls {t.weight} for at most {t.repeat} elements of {name}, whose bound is {bound}"
                    )
    return out


def _hw(plan: Plan, key: str) -> int | None:
    value = dict(plan.hardware).get(key)
    return int(value) if isinstance(value, int | float) else None


def _edge(plan: Plan, e: Edge) -> str:
    names = [plan.stages[i].name if 0 <= i < len(plan.stages) else str(i) for i in (e.src, e.dst)]
    return f"edge {names[0]} -> {names[1]} ({e.kind} on {e.buffer}, {e.mechanism})"
