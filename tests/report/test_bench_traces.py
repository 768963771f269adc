"""traces.jsonl against flashinfer-bench's trace form: what is written holds, and what the form forbids is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from optkit.evidence import Check, HardwareRecord, Provenance, StageNumerics, bundle
from optkit.report.bench_traces import Evaluation, Trace, load_traces, traces, write_traces


def outside() -> StageNumerics:
    return StageNumerics(stage="kda:og", n=256, median=0.1, max=0.2, band_median=0.002, band_max=0.003, status="fail")


def test_a_stage_that_passed_claims_nothing_that_was_not_measured(
        tmp_path: Path, checks: list[Check], prov: Provenance, numerics: list[StageNumerics]) -> None:
    write_traces(tmp_path / "traces.jsonl", bundle(checks, prov, numerics=numerics))
    lines = [json.loads(x) for x in (tmp_path / "traces.jsonl").read_text().splitlines()]
    assert [x["definition"] for x in lines] == ["optkit." + n.stage for n in numerics]
    assert all(x["solution"] is None and x["evaluation"] is None for x in lines), "no latency, so no PASSED"
    assert len({x["workload"]["uuid"] for x in lines}) == len(lines)
    assert load_traces(tmp_path / "traces.jsonl") == list(traces(bundle(checks, prov, numerics=numerics)))


def test_a_stage_outside_its_limits_is_incorrect(tmp_path: Path, checks: list[Check], prov: Provenance) -> None:
    bad = Check("numerics/x", "fail", 0.2, 0.006, "kda:og")
    hardware = HardwareRecord(cubin_sha256="0" * 64, gpu="NVIDIA H200", driver="1", time="2026-02-01", command="x",
                              checks=(bad,), numerics=(outside(),))
    made = bundle([*checks, bad], prov, numerics=[outside()]).model_copy(update={"hardware": (hardware,)})
    write_traces(tmp_path / "traces.jsonl", made)
    here, there = load_traces(tmp_path / "traces.jsonl")
    assert here.evaluation is not None and there.evaluation is not None
    assert here.evaluation.status == "INCORRECT_NUMERICAL" and here.evaluation.performance is None
    assert here.evaluation.correctness is not None and here.evaluation.correctness.max_relative_error == 0.2
    assert math.isnan(here.evaluation.correctness.max_absolute_error), "not measured is not 0"
    assert here.evaluation.environment.hardware.startswith("CPU (") and "torch" in here.evaluation.environment.libs
    assert there.evaluation.environment.hardware == "NVIDIA_H200" and there.evaluation.timestamp == "2026-02-01"
    assert here.solution == f"hand/made@{prov.plan_digest[:12]}" and here.workload.uuid != there.workload.uuid


@pytest.mark.parametrize("change", [
    {"status": "PASSED"}, {"status": "RUNTIME_ERROR"}, {"status": "GOOD"}, {"correctness": None}, {"timestamp": ""},
    {"performance": {"latency_ms": 1.0, "reference_latency_ms": 2.0, "speedup_factor": 2.0}}, {"note": "x"},
    {"correctness": {"max_relative_error": -1.0}}, {"environment": {"hardware": "", "libs": {}}},
])
def test_what_the_form_forbids_is_refused(change: dict[str, Any]) -> None:
    good = {"status": "INCORRECT_NUMERICAL", "environment": {"hardware": "NVIDIA_H200", "libs": {}}, "timestamp": "now",
            "correctness": {"max_relative_error": 0.5, "max_absolute_error": "NaN"}}
    Evaluation.model_validate(good)
    with pytest.raises(ValueError):
        Evaluation.model_validate(good | change)


def test_a_timed_stage_may_pass() -> None:
    Evaluation.model_validate({"status": "PASSED", "environment": {"hardware": "NVIDIA_H200"}, "timestamp": "now",
                               "correctness": {"max_relative_error": 0.0, "max_absolute_error": 0.0},
                               "performance": {"latency_ms": 1.0, "reference_latency_ms": 2.0, "speedup_factor": 2.0}})


def test_half_a_trace_is_refused_with_its_line(tmp_path: Path) -> None:
    workload = {"axes": {}, "inputs": {}, "uuid": "u"}
    Trace.model_validate({"definition": "d", "workload": workload})
    (tmp_path / "t.jsonl").write_text(json.dumps({"definition": "d", "workload": workload}) + "\n"
                                      + json.dumps({"definition": "d", "workload": workload, "solution": "s"}) + "\n")
    with pytest.raises(ValueError, match=r"(?s)t\.jsonl, line 2: .*without an evaluation"):
        load_traces(tmp_path / "t.jsonl")
