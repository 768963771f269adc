"""Planted faults: wrong Plans made from a right one, each of which must turn its proof red (docs/design.md, section 4).

A fault is chosen so that it really breaks the Plan: dropping an edge that a chain of others implies would be harmless.
Where a Plan has nothing to break in this way (no state read by another stage, no mailbox) the fault does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from optkit.checks import Check
from optkit.plan.types import Access, Buffer, Edge, Plan
from optkit.verify.proofs import prove


@dataclass(frozen=True)
class Fault:
    """`make` breaks a Plan (None: does not apply); one of the checks `red` must then fail."""

    name: str
    red: tuple[str, ...]
    make: Callable[[Plan], Plan | None]


def _with_stage(plan: Plan, i: int, **changes: object) -> Plan:
    return replace(plan, stages=tuple(replace(s, **changes) if j == i else s for j, s in enumerate(plan.stages)))  # type: ignore[arg-type]


def _raw(plan: Plan) -> Iterator[Edge]:
    """RAW edges on activations between different SMs, last first."""
    for e in reversed(plan.edges):
        if e.kind == "raw" and e.mechanism != "same_sm" and plan.buffer[e.buffer].klass in ("activation", "scratch"):
            yield e


def drop_edge(plan: Plan) -> Plan | None:
    """Nothing between writer and reader knows the writer any more."""
    e = next(_raw(plan), None)
    if e is None:
        return None
    return replace(plan, edges=tuple(x for x in plan.edges if not (x.src == e.src and x.dst <= e.dst)))


def retarget_edge(plan: Plan) -> Plan | None:
    """The reader waits for another stage than the writer."""
    for e in _raw(plan):
        other = next((j for j in range(e.src) if not any(a.buffer == e.buffer for a in plan.stages[j].writes)), None)
        if other is not None:
            return replace(plan, edges=tuple(replace(x, src=other) if x == e else x for x in plan.edges))
    return None


def wrong_count(plan: Plan) -> Plan | None:
    """A stage is said to have one task more than SMs: its readers would count an arrival that never comes."""
    return _with_stage(plan, len(plan.stages) // 2, tasks=plan.sms + 1)


def shared_buffer(plan: Plan) -> Plan | None:
    """Two values that live at the same time get one buffer."""

    def kind(name: str) -> tuple[str, str, str, int]:
        b = plan.buffer[name]
        return b.klass, b.dtype, b.layout, b.width

    for e in _raw(plan):
        for s in plan.stages[e.src + 1 : e.dst]:
            other = next(
                (a.buffer for a in s.writes if a.buffer != e.buffer and kind(a.buffer) == kind(e.buffer)), None
            )
            if other is not None and not any(a.buffer == other for a in plan.stages[e.src].writes):
                return _renamed(plan, frozenset((other,)), e.buffer)
    return None


def _renamed(plan: Plan, names: frozenset[str], to: str) -> Plan:
    """All accesses and edges on `names` go to buffer `to`."""

    def ren(accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        return tuple(replace(a, buffer=to) if a.buffer in names else a for a in accesses)

    return replace(
        plan,
        stages=tuple(replace(s, reads=ren(s.reads), writes=ren(s.writes)) for s in plan.stages),
        edges=tuple(replace(e, buffer=to) if e.buffer in names else e for e in plan.edges),
    )


def tagged_state(plan: Plan) -> Plan | None:
    """State rows read by another SM are handed over by tags; no counter between the two stages orders them instead.

    Only where the order rests on this pair of stages: with counters everywhere a later stage on the writer's SMs may
    have told the reader already, and then tags on the state are harmless.
    """
    pairs = {(e.src, e.dst) for e in plan.edges if e.kind == "raw" and plan.buffer[e.buffer].klass == "state"}
    for pair in sorted(pairs):
        without = replace(plan, edges=tuple(e for e in plan.edges if (e.src, e.dst) != pair))
        if any(c.name == "proof.raw" and c.status == "fail" for c in prove(without)):
            return replace(
                plan,
                edges=tuple(replace(e, mechanism="tagged") if (e.src, e.dst) == pair else e for e in plan.edges),
            )
    return None


def large_smem(plan: Plan) -> Plan | None:
    """A body asks for more shared memory than is left beside the ring."""
    return _with_stage(plan, 0, smem=dict(plan.hardware)["smem_kib"] * 1024)


def many_registers(plan: Plan) -> Plan | None:
    """A body's register ceiling times the threads passes the register file."""
    return _with_stage(plan, 0, regs=248)


def cyclic_order(plan: Plan) -> Plan | None:
    """An edge points backwards: two stages wait for each other."""
    e = next(_raw(plan), None)
    return None if e is None else replace(plan, edges=(*plan.edges, replace(e, src=e.dst, dst=e.src)))


def small_slot(plan: Plan) -> Plan | None:
    """Ring slots smaller than a tile."""
    largest = max((t.tile_bytes for s in plan.stages for t in s.streams), default=0)
    return replace(plan, ring_slot_bytes=largest // 2 // 16 * 16) if largest else None


def single_slot(plan: Plan) -> Plan | None:
    """A ring of one slot."""
    return replace(plan, ring_slots=1) if any(s.streams for s in plan.stages) else None


def early_index(plan: Plan) -> Plan | None:
    """Routed tiles are queued without the edge from the router."""
    keys = {(i, t.index) for i, s in enumerate(plan.stages) for t in s.streams if t.index}
    return replace(plan, edges=tuple(e for e in plan.edges if (e.dst, e.buffer) not in keys)) if keys else None


def no_facts(plan: Plan) -> Plan | None:
    """An index set promises nothing."""
    return replace(plan, index_sets=tuple(replace(x, facts=()) for x in plan.index_sets)) if plan.index_sets else None


def overlapping_tasks(plan: Plan) -> Plan | None:
    """Every task of a stage writes the same columns."""
    for i, s in enumerate(plan.stages):
        if s.tasks > 1 and s.row_units == 1 and s.assign == "block" and any(w.step for w in s.writes):
            return _with_stage(plan, i, writes=tuple(replace(w, step=0, span=0) for w in s.writes))
    return None


def unwritten_read(plan: Plan) -> Plan | None:
    """The last stage reads a buffer that nobody writes."""
    last = plan.stages[-1]
    ghost = Buffer("nobody", "activation", "bf16", plan.rows, 64)
    return replace(
        _with_stage(plan, len(plan.stages) - 1, reads=(*last.reads, Access("nobody"))), buffers=(*plan.buffers, ghost)
    )


def too_many_ctas(plan: Plan) -> Plan | None:
    """More CTAs than SMs."""
    return replace(plan, hardware=tuple((k, plan.sms - 1 if k == "sms" else v) for k, v in plan.hardware))


def one_mailbox(plan: Plan) -> Plan | None:
    """All exchanges go through one mailbox."""
    boxes = [b for b in plan.buffers if b.klass == "mailbox"]
    if not boxes:
        return None
    return _renamed(plan, frozenset(b.name for b in boxes), max(boxes, key=lambda b: b.width).name)


def two_names(plan: Plan) -> Plan | None:
    """Two stages of one name."""
    return _with_stage(plan, len(plan.stages) - 1, name=plan.stages[0].name)


FAULTS: tuple[Fault, ...] = (
    Fault("drop_edge", ("proof.raw",), drop_edge),
    Fault("retarget_edge", ("proof.edges", "proof.raw"), retarget_edge),
    Fault("wrong_count", ("proof.arrivals",), wrong_count),
    Fault("shared_buffer", ("proof.raw", "proof.war", "proof.waw"), shared_buffer),
    Fault("tagged_state", ("proof.raw",), tagged_state),
    Fault("large_smem", ("proof.shared_memory",), large_smem),
    Fault("many_registers", ("proof.registers",), many_registers),
    Fault("cyclic_order", ("proof.liveness",), cyclic_order),
    Fault("small_slot", ("proof.ring",), small_slot),
    Fault("single_slot", ("proof.ring",), single_slot),
    Fault("early_index", ("proof.ring",), early_index),
    Fault("no_facts", ("proof.index_sets",), no_facts),
    Fault("overlapping_tasks", ("proof.within_stage",), overlapping_tasks),
    Fault("unwritten_read", ("proof.never_written",), unwritten_read),
    Fault("too_many_ctas", ("proof.placement",), too_many_ctas),
    Fault("one_mailbox", ("proof.mailbox_reuse",), one_mailbox),
    Fault("two_names", ("proof.tags",), two_names),
)


def plant(plan: Plan) -> list[tuple[Fault, bool]]:
    """Prove every broken Plan: (fault, caught) for each fault that applies. A fault is caught by a check it should turn
    red, not by any."""
    out: list[tuple[Fault, bool]] = []
    for fault in FAULTS:
        broken = fault.make(plan)
        if broken is not None:
            red = {c.name for c in prove(broken) if c.status == "fail"}
            out.append((fault, bool(red & set(fault.red))))
    return out


def catch_rate(plan: Plan, repeat: str = "") -> Check:
    """Share of the planted faults that the proofs catch; everything below 1 fails."""
    results = plant(plan)
    missed = [f.name for f, caught in results if not caught]
    rate = 1 - len(missed) / len(results)
    reason = f"missed: {', '.join(missed)}" if missed else f"{len(results)} of {len(FAULTS)} faults apply to this Plan"
    return Check("proof.planted_faults", "fail" if missed else "pass", rate, 1.0, reason, repeat)
