"""Rotary frequencies, in plain Python (no torch), for the reference, the planner and the kernel's table alike.

Source: RoFormer (Su et al. 2021) and the "llama3" rule of Hugging Face transformers' `modeling_rope_utils`.
"""

from __future__ import annotations

import math


def inverse_frequencies(dim: int, theta: float, scaling: tuple[float, ...] = ()) -> tuple[float, ...]:
    """The dim/2 angles per position, in radians, in float64.

    `scaling` is () for the plain rule, or (factor, low_freq_factor, high_freq_factor, original_max_position) for
    Llama 3: wavelengths longer than original/low are stretched by `factor`, those shorter than original/high are
    kept, those between are interpolated.
    """
    plain = [theta ** (-2.0 * i / dim) for i in range(dim // 2)]
    if not scaling:
        return tuple(plain)
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
