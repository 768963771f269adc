"""trace.json: the structure that the Perfetto viewer needs, and that it is marked as simulated."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from optkit.plan.types import Plan
from optkit.report.trace import trace, write_trace


def complete(data: dict[str, Any]) -> list[dict[str, Any]]:
    return [e for e in data["traceEvents"] if e["ph"] == "X"]


def test_every_slice_is_there(tmp_path: Path, plan: Plan, timeline: list[Any]) -> None:
    write_trace(tmp_path / "trace.json", timeline, plan)
    data = json.loads((tmp_path / "trace.json").read_text())
    events = complete(data)
    assert len(events) == len(timeline)
    assert data["otherData"]["simulated"] is True and all(e["args"]["simulated"] for e in events)
    want = sum(end - start for _, _, start, end, _ in timeline)
    assert sum(e["dur"] for e in events) == pytest.approx(want, rel=1e-6)
    for e in data["traceEvents"]:
        assert {"ph", "name", "pid", "tid"} <= set(e) and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        if e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0
            assert e["args"]["layer"] == plan.stages[e["args"]["stage"]].layer
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]


def test_one_process_per_role_and_one_thread_per_sm(plan: Plan, timeline: list[Any]) -> None:
    data = trace(timeline, plan)
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in data["traceEvents"] if e["ph"] == "M"}
    processes = {pid: a["name"] for (name, pid, _), a in names.items() if name == "process_name"}
    assert processes == {1: "DRAM stream (simulated)", 2: "SMs (simulated)"}
    for e in complete(data):
        assert names[("thread_name", e["pid"], e["tid"])]["name"] == f"SM {e['tid']}"
        assert processes[e["pid"]].startswith("DRAM" if e["cat"] == "stream" else "SMs")


def test_slices_of_one_thread_do_not_overlap(plan: Plan, timeline: list[Any]) -> None:
    """The viewer nests overlapping slices of one thread and drops those that cross."""
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for e in complete(trace([r for r in timeline if r[4] != "stream"], plan)):
        lanes[(e["pid"], e["tid"])].append((e["ts"], e["ts"] + e["dur"]))
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def test_cap_and_stage_index(plan: Plan, timeline: list[Any]) -> None:
    assert {e["tid"] for e in complete(trace(timeline, plan, max_sms=3))} == {0, 1, 2}
    assert complete(trace([(0, 1, 0.0, 1.0, "compute")], plan))[0]["name"] == plan.stages[1].name


def test_refuses_nonsense(plan: Plan) -> None:
    with pytest.raises(ValueError, match="0 <= start <= end"):
        trace([(0, "L0.qkv", 3.0, 1.0, "compute")], plan)
    with pytest.raises(ValueError, match="0 <= start <= end"):
        trace([(0, "L0.qkv", 3.0, float("nan"), "compute")], plan)
    with pytest.raises(ValueError, match="max_sms"):
        trace([], plan, max_sms=0)
