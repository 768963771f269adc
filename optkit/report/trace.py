"""trace.json: the simulated step for the Perfetto viewer (Chrome trace event format, JSON object form).

Two processes, each with one thread per SM: "DRAM stream" holds the weight tiles on their way into the SM's ring,
"SMs" what the SM computes and waits for. Everything in the file is marked as simulated; a measured trace must never
be taken for it or the other way round.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optkit.evidence import write_text
from optkit.plan.types import Plan
from optkit.report.inputs import Slice, is_stream, slices

DRAM, SMS = 1, 2
PROCESSES = {DRAM: "DRAM stream (simulated)", SMS: "SMs (simulated)"}


def trace(rows: Any, plan: Plan, max_sms: int | None = None) -> dict[str, Any]:
    """The trace as JSON-able data, times in microseconds.

    `rows`: what `plan.timeline.simulate` gives, or rows as in `optkit.report.inputs`; `max_sms` keeps SMs 0 ..
    max_sms - 1 (default: all). Raises ValueError for a row that ends before it starts and for max_sms below 1.
    """
    if max_sms is not None and max_sms < 1:
        raise ValueError(f"max_sms: expected at least 1, got {max_sms}")
    kept = [s for s in slices(rows, plan) if max_sms is None or s.sm < max_sms]
    bodies = {s.name: (i, s) for i, s in enumerate(plan.stages)}
    used = sorted({(_process(s), s.sm) for s in kept})
    events: list[dict[str, Any]] = []
    for pid in sorted({p for p, _ in used}):
        events += [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": PROCESSES[pid]}},
                   {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}]
    for pid, sm in used:
        events += [{"ph": "M", "name": "thread_name", "pid": pid, "tid": sm, "args": {"name": f"SM {sm}"}},
                   {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": sm, "args": {"sort_index": sm}}]
    for s in kept:
        args: dict[str, Any] = {"what": s.what, "simulated": True}
        if s.stage in bodies:
            index, stage = bodies[s.stage]
            args |= {"stage": index, "body": stage.body, "layer": stage.layer}
        events.append({"ph": "X", "name": s.stage, "cat": s.what, "pid": _process(s), "tid": s.sm,
                       "ts": round(s.start_us, 4), "dur": round(s.end_us - s.start_us, 4), "args": args})
    return {"displayTimeUnit": "ns", "traceEvents": events,
            "otherData": {"simulated": True, "plan": plan.name, "recipe_digest": plan.recipe_digest,
                          "sms": plan.sms, "sms_shown": len({sm for _, sm in used})}}


def write_trace(path: Path, rows: Any, plan: Plan, max_sms: int | None = None) -> None:
    """Write `trace` to `path` (renamed into place)."""
    text = json.dumps(trace(rows, plan, max_sms), separators=(",", ":"), allow_nan=False)
    write_text(path, text)


def _process(s: Slice) -> int:
    return DRAM if is_stream(s) else SMS
