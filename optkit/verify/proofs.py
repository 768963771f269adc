"""`prove(plan)`: all static proofs on a Plan, as checks (docs/design.md, sections 2 and 4.2).

Needs no GPU and no weights, and trusts nothing that the planner says about itself: regions, arrivals and orders are
recomputed from stages, accesses and edges. A failure names buffer, stages, tasks and the missing edge.
"""

from __future__ import annotations

from dataclasses import replace

from optkit.checks import Check, from_findings
from optkit.plan.types import Plan
from optkit.verify import mailbox, order, ring_model, rules

REPEAT = "optkit check {name}"


def prove(plan: Plan, repeat: str = "") -> list[Check]:
    """Prove ordering, liveness, ring, budgets and index sets of one Plan; about a second for 1300 stages.

    `repeat` is the command to quote in each check (default: ``optkit check <plan name>``). Never raises for a bad
    Plan: what is malformed fails a check.
    """
    again = repeat or REPEAT.format(name=plan.name)
    if not plan.stages:
        return [Check("proof.arrivals", "fail", 0, 1, "the Plan has no stages", again)]
    structural = rules.arrivals(plan)
    edges = rules.edges(plan)
    here = range(len(plan.stages))
    plan = replace(plan, edges=tuple(e for e in plan.edges if e.src in here and e.dst in here))
    out = [
        _check("proof.edges", edges, f"{len(plan.edges)} edges join existing accesses", again),
        _check(
            "proof.arrivals",
            structural,
            "arrivals of an edge = tasks of its source, static; empty tasks "
            "arrive too; counters compare by signed 32-bit difference",
            again,
        ),
        _check(
            "proof.tags", rules.tags(plan), "tag = epoch << 16 | stage + 1, 48 bits of epoch, one writer a word", again
        ),
        _check(
            "proof.liveness", rules.liveness(plan), "one global order of tasks and tiles; no wait points forward", again
        ),
        _check("proof.placement", rules.placement(plan), f"{plan.sms} CTAs, one per SM", again),
    ]
    if structural:
        why = f"tasks or units are malformed: {structural[0]}"
        out += [Check(n, "fail", None, 0, why, again) for n in ORDER_CHECKS]
    else:
        out += _ordering(plan, again)
    out += _resources(plan, again)
    out += [
        _check(
            "proof.index_sets",
            rules.index_sets(plan),
            f"{len(plan.index_sets)} index sets have producer, bound and "
            "facts; the facts are checked at run time in validation",
            again,
        )
    ]
    return out


ORDER_CHECKS = (
    "proof.raw",
    "proof.war",
    "proof.waw",
    "proof.within_stage",
    "proof.never_written",
    "proof.mailbox_reuse",
)


def _ordering(plan: Plan, again: str) -> list[Check]:
    result = order.check_order(plan)
    by_kind = {k: [v.text for v in result.violations if v.kind == k] for k in ("raw", "war", "waw")}
    return [
        _check(
            "proof.raw", by_kind["raw"], f"{result.pairs} pairs of accesses compared on {plan.sms} vector clocks", again
        ),
        _check(
            "proof.war",
            by_kind["war"],
            "assumes that consumer warps meet between two tasks of a CTA; steps are "
            "separated by the launch boundary (stream order)",
            again,
        ),
        _check("proof.waw", by_kind["waw"], "release/acquire, or every overwritten word was read before", again),
        _check(
            "proof.within_stage",
            order.check_within(plan),
            "tasks of one stage touch disjoint words, or a declared fact (injective, partition) says so",
            again,
        ),
        _check(
            "proof.never_written",
            result.unwritten,
            "every word read was written by this step, by vLLM or at load",
            again,
        ),
        _check(
            "proof.mailbox_reuse",
            mailbox.reuse(plan, result.exchanges),
            f"{len(mailbox.exchanges(result.exchanges))} exchanges; another lies between two uses of a mailbox",
            again,
        ),
    ]


def _resources(plan: Plan, again: str) -> list[Check]:
    smem, smem_need, smem_have = rules.shared_memory(plan)
    regs, regs_need, regs_have = rules.registers(plan)
    model = ring_model.explore(slots=min(max(plan.ring_slots, 1), 3), warps=2, laps=3)
    return [
        _check(
            "proof.ring",
            rules.ring(plan),
            f"{plan.ring_slots} slots of {plan.ring_slot_bytes} bytes; static tiles before "
            "routed ones, routed ones after their index",
            again,
        ),
        Check(
            "proof.ring_parity",
            "pass" if model.safe else "fail",
            model.states,
            None,
            "every consumer warp waits for every lap of each slot in order; no parity is mistaken in any order of "
            "a ring of up to 3 slots, 2 warps, 3 laps with copies landing out of order"
            if model.safe
            else model.trace,
            again,
        ),
        Check(
            "proof.shared_memory",
            "fail" if smem else "pass",
            smem_need,
            smem_have,
            "; ".join(smem) or "ring + largest body + fixed part, bytes of one CTA",
            again,
        ),
        Check(
            "proof.registers",
            "fail" if regs else "pass",
            regs_need,
            regs_have,
            "; ".join(regs) or "largest declared ceiling x threads, of the register file",
            again,
        ),
    ]


def _check(name: str, findings: list[str], passed: str, again: str) -> Check:
    return from_findings(name, findings, passed, again)


def failed(checks: list[Check]) -> list[str]:
    """Names and reasons of the checks that failed, one line each."""
    return [f"{c.name}: {c.reason}" for c in checks if c.status == "fail"]
