"""The record of a gate, shared by every part that has gates. Plain data: no torch, no pydantic.

`optkit.evidence` holds the same fields as the schema of evidence.json and refuses records that contradict themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

SHOWN = 3
"""Findings named in a reason; the value counts all of them."""


@dataclass(frozen=True)
class Check:
    """One gate and how it came out.

    status is pass | fail | not_run (only for what needs hardware this machine lacks; `reason` says which). `value` is
    what was measured, `threshold` what it was held against, `repeat` the command or call that does it again, `step` the
    pipeline step that registered it.
    """

    name: str
    status: str
    value: Any = None
    threshold: Any = None
    reason: str = ""
    repeat: str = ""
    step: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The record as evidence.json holds it."""
        return {k: v for k, v in asdict(self).items() if k != "step"}


def check(name: str, ok: bool, value: Any, threshold: Any, reason: str = "", repeat: str = "") -> Check:
    """A Check that ran."""
    return Check(name, "pass" if ok else "fail", value, threshold, reason, repeat)


def from_findings(name: str, findings: Sequence[str], passed: str, repeat: str = "") -> Check:
    """A check that passes when nothing was found; `passed` says what a pass means or assumes."""
    if not findings:
        return Check(name, "pass", 0, 0, passed, repeat)
    more = f" (+ {len(findings) - SHOWN} more)" if len(findings) > SHOWN else ""
    return Check(name, "fail", len(findings), 0, "; ".join(findings[:SHOWN]) + more, repeat)
