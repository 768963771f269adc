"""The one error of the planner: every problem of a choice, each in one line.

A problem line says which key or number is wrong, what was asked, what is there, and what would fit.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PlanError(ValueError):
    """A graph and its choices cannot become a Plan. `problems` holds one line per mistake."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A suffix ", did you mean 'x'?" or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f", did you mean {close[0]!r}?" if close else ""
