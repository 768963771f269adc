"""The result of one verification rule, in the shape of an entry of evidence.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 3
"""Findings named in a reason; the value counts all of them."""


@dataclass(frozen=True)
class Check:
    """One rule and how it came out.

    `value` is what was measured (usually the number of violations) and `threshold` what it may be at most; `reason`
    names the first violations, or says what the proof assumed; `repeat` is the command that runs it again.
    """

    name: str
    status: str  # pass | fail | not_run
    value: Any = None
    threshold: Any = None
    reason: str = ""
    repeat: str = ""


def from_findings(name: str, findings: Sequence[str], passed: str, repeat: str = "") -> Check:
    """A check that passes when nothing was found; `passed` says what a pass means or assumes."""
    if not findings:
        return Check(name, "pass", 0, 0, passed, repeat)
    more = f" (+ {len(findings) - SHOWN} more)" if len(findings) > SHOWN else ""
    return Check(name, "fail", len(findings), 0, "; ".join(findings[:SHOWN]) + more, repeat)
