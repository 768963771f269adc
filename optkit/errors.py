"""Errors a user can act on: each problem is one line with key, value, what was expected and where it was written.

Assumes nothing; every part of optkit may import it. `UserError` ends a command with exit code 2 and no traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


@dataclass(frozen=True)
class Problem:
    """One mistake. `hint` is a suggestion such as ``did you mean 'decode.batch'?``."""

    key: str
    value: Any
    expected: str
    where: str
    hint: str = ""

    def __str__(self) -> str:
        shown = (
            "" if self.value is None else f" = {self.value!r}" if isinstance(self.value, str) else f" = {self.value}"
        )
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.key}{shown}: expected {self.expected} ({self.where}){hint}"


class UserError(Exception):
    """Bad input. Holds every problem found, not the first one only."""

    def __init__(self, problems: Problem | str | Iterable[Problem | str]) -> None:
        if isinstance(problems, (Problem, str)):
            problems = [problems]
        self.problems = list(problems)
        super().__init__("\n".join(str(p) for p in self.problems))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?`` for the closest known word, or an empty string."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close:  # a dotted key misspelt in its first half: compare the last part alone
        tails = {k.rsplit(".", 1)[-1]: k for k in known}
        tail = difflib.get_close_matches(word.rsplit(".", 1)[-1], list(tails), n=1, cutoff=0.7)
        close = [tails[t] for t in tail]
    return f"did you mean {close[0]!r}?" if close else ""
