"""traces.jsonl: the per-stage numerics of a run in the trace form of flashinfer-bench, one JSON object a line.

The form (FlashInfer Trace, 2026): a trace names a `definition`, a `workload` (axes, inputs, uuid), a `solution` and its
`evaluation`: status, environment (hardware, libs), timestamp, log, correctness, performance. `Trace` below is a checker
of that form in our own words, not their package. What the form has no room for is not forced into it:

* PASSED demands a latency. Stages are measured for their error and not timed here, so a stage that passed becomes a
  workload trace (definition and workload, no solution, no evaluation), which claims nothing.
* A stage outside its limits is INCORRECT_NUMERICAL. `max_relative_error` is then optkit's measure, the largest relative
  L2 norm of a row against float64, as `extra` says; absolute errors are not measured: NaN.

Definitions are optkit's own names (optkit.<body>.<output>): they are not among the form's published definitions.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from optkit.evidence import Bundle, StageNumerics

Status = Literal["PASSED", "INCORRECT_SHAPE", "INCORRECT_NUMERICAL", "INCORRECT_DTYPE", "RUNTIME_ERROR", "COMPILE_ERROR",
                 "TIMEOUT"]
LIBS = ("optkit", "torch", "nvidia-cutlass-dsl")


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Workload(_Form):
    """Axis sizes and how inputs were made; optkit draws seeded random ones and lists none by name."""

    axes: dict[str, int]
    inputs: dict[str, dict[str, Any]]
    uuid: str = Field(min_length=1)


class Correctness(_Form):
    """Errors; negative ones are refused, NaN means not measured."""

    max_relative_error: float = 0.0
    max_absolute_error: float = 0.0
    extra: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _sign(self) -> Correctness:
        if any(e < 0 for e in (self.max_relative_error, self.max_absolute_error)):
            raise ValueError("errors must not be negative")
        return self


class Performance(_Form):
    """Milliseconds of the solution and of a reference, and their quotient."""

    latency_ms: float = Field(ge=0)
    reference_latency_ms: float = Field(ge=0)
    speedup_factor: float = Field(ge=0)


class Environment(_Form):
    """Hardware by name, and versions of libraries."""

    hardware: str = Field(min_length=1)
    libs: dict[str, str] = Field(default_factory=dict)


class Evaluation(_Form):
    """The outcome. Correctness belongs to PASSED and INCORRECT_NUMERICAL, performance to PASSED; elsewhere neither."""

    status: Status
    environment: Environment
    timestamp: str = Field(min_length=1)
    log: str = ""
    correctness: Correctness | None = None
    performance: Performance | None = None

    @model_validator(mode="after")
    def _parts(self) -> Evaluation:
        if (self.correctness is not None) != (self.status in ("PASSED", "INCORRECT_NUMERICAL")):
            raise ValueError(f"status {self.status}: correctness given: {self.correctness is not None}")
        if (self.performance is not None) != (self.status == "PASSED"):
            raise ValueError(f"status {self.status}: performance given: {self.performance is not None}")
        return self


class Trace(_Form):
    """One line of the file. Solution and evaluation are both given, or both not: a workload trace."""

    definition: str = Field(min_length=1)
    workload: Workload
    solution: str | None = None
    evaluation: Evaluation | None = None

    @model_validator(mode="after")
    def _whole(self) -> Trace:
        if (self.solution is None) != (self.evaluation is None):
            raise ValueError("a solution without an evaluation, or an evaluation without a solution")
        return self


def traces(evidence: Bundle) -> Iterator[Trace]:
    """A trace per row of numerics: those of the run (CPU executor), then those of every hardware record."""
    made = evidence.provenance
    here = Environment(hardware=f"CPU ({made.platform})", libs=_libs(made.versions))
    for row in evidence.numerics:
        yield _trace(evidence, row, here, made.time)
    for record in evidence.hardware:
        there = Environment(hardware=record.gpu.replace(" ", "_"), libs=_libs(record.versions))
        for row in record.numerics:
            yield _trace(evidence, row, there, record.time)


def _trace(evidence: Bundle, row: StageNumerics, environment: Environment, time: str) -> Trace:
    made = evidence.provenance
    name = f"{made.plan_digest}/{environment.hardware}/{row.stage}/{row.n}"
    workload = Workload(axes={"samples": row.n}, inputs={}, uuid=str(uuid.uuid5(uuid.NAMESPACE_URL, name)))
    definition = "optkit." + row.stage.replace(":", ".")
    if row.status == "pass":
        return Trace(definition=definition, workload=workload)
    extra = {"measure": "relative L2 norm per row against float64, exact inputs", "median": _finite(row.median),
             "median_limit": row.median_limit, "max_limit": row.max_limit, "samples": row.n}
    correctness = Correctness(max_relative_error=abs(row.max), max_absolute_error=math.nan, extra=extra)
    log = f"optkit {made.command}: {row.share:.3g} of the limits used; absolute errors not measured, not timed"
    return Trace(definition=definition, workload=workload, solution=f"{made.recipe}@{made.plan_digest[:12]}",
                 evaluation=Evaluation(status="INCORRECT_NUMERICAL", environment=environment, timestamp=time, log=log,
                                       correctness=correctness))


def _libs(versions: dict[str, str]) -> dict[str, str]:
    return {name: versions[name] for name in LIBS if name in versions}


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def write_traces(path: Path, evidence: Bundle) -> None:
    """One trace a line, renamed into place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("".join(t.model_dump_json() + "\n" for t in traces(evidence)), encoding="utf-8")
    temporary.replace(path)


def load_traces(path: Path) -> list[Trace]:
    """The traces of a file, each held against the form. Raises ValueError naming the line."""
    out = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            out.append(Trace.model_validate(json.loads(line)))
        except ValueError as e:
            raise ValueError(f"{path.name}, line {number}: {e}") from e
    return out
