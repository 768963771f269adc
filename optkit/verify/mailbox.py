"""When may a mailbox be used again? The only question that one rank's own edges cannot answer.

A peer needs this rank's words of an exchange to finish it, so it can be ahead of this rank by what follows one
exchange, not more. It may therefore overwrite its slot for use k + 1 while this rank still reads use k, unless another
exchange lies between: one that this rank enters (stores its own words) only after its reads of use k, and that the
peer must have left before its stores of use k + 1. All ranks run the same Plan, so the peer's order is the same.
Uses follow each other over the step boundary too: a launch orders the steps of one rank, not those of its peers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from optkit.plan.types import Plan
from optkit.verify.order import MailboxEvent


@dataclass
class _Exchange:
    mailbox: str
    writes: list[MailboxEvent] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)


def exchanges(events: list[MailboxEvent]) -> list[_Exchange]:
    """Uses of mailboxes in order of their first write; a write after a read of the same mailbox starts a new use."""
    out: list[_Exchange] = []
    current: dict[str, _Exchange] = {}
    for e in events:
        use = current.get(e.mailbox)
        if e.kind == "w" and (use is None or use.reads):
            use = current[e.mailbox] = _Exchange(e.mailbox)
            out.append(use)
        if use is None:
            continue
        if e.kind == "w":
            use.writes.append(e)
        else:
            use.reads.append(e.stage)
    return out


def reuse(plan: Plan, events: list[MailboxEvent]) -> list[str]:
    """One line for every mailbox use that a faster peer may overwrite."""
    uses = exchanges(events)
    out: list[str] = []
    first: dict[str, int] = {}
    for i, use in enumerate(uses):
        first.setdefault(use.mailbox, i)
    following: dict[str, int] = {}
    for i in range(len(uses) - 1, -1, -1):
        use = uses[i]
        later = following.get(use.mailbox)
        following[use.mailbox] = i
        end = uses[later].writes[0].stage if later is not None else len(plan.stages)
        safe = any(
            u.reads and max(u.reads) < end and all(set(use.reads) <= w.known for w in u.writes)
            for u in uses[i + 1 : later]
        )
        if later is None:  # over the step boundary: an exchange finished before the first use of the next step counts
            start = uses[first[use.mailbox]].writes[0].stage
            safe = safe or any(u.reads and max(u.reads) < start for u in uses[: first[use.mailbox]])
        if not safe:
            then = f"by {plan.stages[end].name}" if later is not None else "in the next step"
            who = ", ".join(plan.stages[r].name for r in use.reads[:1]) or "nobody"
            out.append(
                f"mailbox {use.mailbox}: words read by {who} may be overwritten {then} by a faster peer; no other "
                "exchange lies between (alternate two mailboxes)"
            )
    return out[::-1]
