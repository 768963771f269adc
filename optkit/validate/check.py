"""Records of the evidence: one `Check` per gate, one `Numerics` row per stage and output. Plain data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Check:
    """One gate: status pass | fail | not_run. `repeat` is the command or call that repeats it."""

    name: str
    status: str
    value: float | int | str | None
    threshold: float | int | str | None
    reason: str = ""
    repeat: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The record as evidence.json holds it."""
        return asdict(self)


@dataclass(frozen=True)
class Numerics:
    """Errors of one output over its samples, and the band they are judged by.

    `stage` names body and output without the layer ("kda:og"); e = relative L2 per row against float64; n = samples
    (rows x steps x layers).
    """

    stage: str
    n: int
    median: float
    max: float
    band_median: float
    band_max: float
    status: str

    def as_dict(self) -> dict[str, Any]:
        """The record as evidence.json holds it."""
        return asdict(self)


def check(name: str, ok: bool, value: float | int | str | None, threshold: float | int | str | None, reason: str = "",
          repeat: str = "") -> Check:
    """A Check that ran."""
    return Check(name, "pass" if ok else "fail", value, threshold, reason, repeat)
