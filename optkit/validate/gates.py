"""The error measure and the gates of the design's section 4 (4).

e = relative L2 per row against float64. Band = e of the plain bf16 implementation over at least MIN_SAMPLES samples,
floored at 2^-9 (one bf16 rounding of a row). Gate: median <= 1.25 x band median, maximum <= 2 x band maximum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optkit.validate.numerics import Numerics

FLOOR = 2.0**-9
MEDIAN_FACTOR = 1.25
MAX_FACTOR = 2.0
MIN_SAMPLES = 256


def row_errors(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 per row, float64 [R]; got and want [R, ...]. Not finite counts as infinite; 0 / 0 is 0."""
    g, w = got.double().flatten(1), want.double().flatten(1)
    diff, norm = (g - w).norm(dim=1), w.norm(dim=1)
    e = torch.where(diff == 0, torch.zeros_like(diff), diff / norm)
    return torch.nan_to_num(e, nan=float("inf"), posinf=float("inf"))


def limits(band: Sequence[float]) -> tuple[float, float, float, float]:
    """(band median, band maximum, largest allowed median, largest allowed maximum)."""
    t = torch.tensor(band, dtype=torch.float64)
    median, top = float(t.median()), float(t.max())
    return median, top, MEDIAN_FACTOR * max(median, FLOOR), MAX_FACTOR * max(top, FLOOR)


def judge(stage: str, errors: Sequence[float], band: Sequence[float]) -> Numerics:
    """One output's errors against its band; fails also on fewer than MIN_SAMPLES samples of either."""
    band_median, band_max, allowed_median, allowed_max = limits(band)
    t = torch.tensor(errors, dtype=torch.float64)
    median, top = float(t.median()), float(t.max())
    ok = median <= allowed_median and top <= allowed_max and min(len(errors), len(band)) >= MIN_SAMPLES
    return Numerics(stage, len(errors), median, top, band_median, band_max, "pass" if ok else "fail")


def excess(r: Numerics) -> float:
    """How much of its gate an output uses: 1 = at the limit of median or maximum, whichever is closer."""
    return max(r.median / (MEDIAN_FACTOR * max(r.band_median, FLOOR)), r.max / (MAX_FACTOR * max(r.band_max, FLOOR)))


def why(r: Numerics) -> str:
    """One clause about a failed output."""
    return (
        f"{r.stage}: {r.n} samples, median {r.median:.2e} (band {r.band_median:.2e}), maximum {r.max:.2e} (band "
        f"{r.band_max:.2e}), {excess(r):.2f} x its gate"
    )
