"""The constants of n-gram hashing: multipliers, prime moduli and column offsets per layer. Plain Python and numpy.

Engram (arXiv 2601.07372), constants as in DeepSeek-V4.1's inference code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

LAYER_SEED = 10007


@dataclass(frozen=True)
class LayerHash:
    """multipliers [n], moduli and offsets [(n - 1) * heads], orders 2..n outermost; `rows` is the table's least size."""

    multipliers: tuple[int, ...]
    moduli: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: int


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _primes_from(start: int) -> Iterator[int]:
    n = start
    while True:
        if _is_prime(n):
            yield n
        n += 1


@lru_cache
def layer_hashes(layers: tuple[int, ...], orders: int, heads: int, start: int, classes: int) -> dict[int, LayerHash]:
    """One LayerHash per layer id, in the order given.

    `orders` is the longest gram, `heads` the columns per order, `start` the smallest modulus allowed, `classes` the
    number of token classes. No prime is used twice, not by another layer either. The multipliers are odd and so small
    that class * multiplier stays below 2^63.
    """
    bound = max(1, ((2**63 - 1) // classes) // 2)
    primes = _primes_from(start)
    out = {}
    for layer in layers:
        moduli = tuple(next(primes) for _ in range((orders - 1) * heads))
        draws = np.random.default_rng(LAYER_SEED * layer).integers(0, bound, size=orders, dtype=np.int64)
        offsets = tuple(sum(moduli[:i]) for i in range(len(moduli)))
        out[layer] = LayerHash(tuple(int(d) * 2 + 1 for d in draws), moduli, offsets, sum(moduli))
    return out
