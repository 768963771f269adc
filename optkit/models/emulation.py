"""What an emulated peer rank would have sent: a fixed, seeded multiple of this rank's own partial.

One GPU can play one rank of a tensor-parallel group. Mailbox slot p then carries c[p] times the rank's own partial;
the reference computes the same sum, so an exchange that drops, repeats or swaps a slot is visible. Plain Python, so
that planning needs no torch.
"""

from __future__ import annotations

import random


def emulation_coefficients(seed: int, ranks: int, rank: int) -> tuple[float, ...]:
    """`ranks` pairwise distinct multiples of 1/64 in [1/8, 5/8], except c[rank] = 1.

    Multiples of 1/64 are exact in bf16, so scaling a partial costs at most one rounding. With eight ranks they sum to
    about 3.6, near the sqrt(8) by which eight independent partials would grow, so activations stay in range.
    """
    if not 0 <= rank < ranks:
        raise ValueError(f"rank: {rank}: expected 0 <= rank < {ranks}")
    if ranks > 33:
        raise ValueError(f"ranks: {ranks}: emulation has 33 distinct coefficients")
    c = [k / 64 for k in random.Random(seed).sample(range(8, 41), ranks)]
    c[rank] = 1.0
    return tuple(c)
