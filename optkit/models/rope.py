"""Rotary frequencies, in plain Python (no torch), for the reference, the planner and the kernel's table alike.

Sources: RoFormer (Su et al. 2021), the "llama3" rule of Hugging Face transformers' `modeling_rope_utils`, and YaRN
(arXiv 2309.00071) as DeepSeek's inference code has it, which changes the frequencies only.
"""

from __future__ import annotations

import math
from typing import Any

Scaling = tuple[Any, ...]
"""() | (factor, low_freq_factor, high_freq_factor, original_max_position) | ("yarn", factor, fast, slow, original)."""


def inverse_frequencies(dim: int, theta: float, scaling: Scaling = ()) -> tuple[float, ...]:
    """The dim/2 angles per position, in radians, in float64.

    `scaling` is () for the plain rule, or (factor, low_freq_factor, high_freq_factor, original_max_position) for
    Llama 3: wavelengths longer than original/low are stretched by `factor`, those shorter than original/high are
    kept, those between are interpolated. ("yarn", factor, beta_fast, beta_slow, original): pairs that turn fewer than
    beta_slow times over the original length are stretched, more than beta_fast kept, a linear ramp over the pair index
    between.
    """
    plain = [theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    if not scaling:
        return tuple(plain)
    if scaling[0] == "yarn":
        return _yarn(plain, theta, *scaling[1:])
    factor, low, high, original = scaling
    out = []
    for f in plain:
        wavelength = 2 * math.pi / f
        if wavelength < original / high:
            out.append(f)
        elif wavelength > original / low:
            out.append(f / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append((1 - smooth) * f / factor + smooth * f)
    return tuple(out)


def _yarn(
    plain: list[float], theta: float, factor: float, fast: float, slow: float, original: float
) -> tuple[float, ...]:
    dim = 2 * len(plain)

    def pair(turns: float) -> float:
        """The (fractional) index of the pair that turns so often over the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair(fast)), 0), min(math.ceil(pair(slow)), dim - 1)
    ramp = [min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0) for i in range(len(plain))]
    return tuple(f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True))
