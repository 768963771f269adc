"""The errors of one output against its noise band, as evidence.json holds them. Plain data, no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
