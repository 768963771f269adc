"""One torch thread for work that consists of many small operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs the body with one intra-op thread.

    A tiny K3 step in task order is some 10^4 operations of microseconds: waking and joining a second thread for each costs
    more than it saves, and far more where other processes want the cores (six orders of one step took 101 s with two
    threads and 2.9 s with one, on two busy cores).
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
