"""What the user sees of a run: one line per step with its time, then a short table, the verdict and the paths.

On a terminal the running step has a spinner (rich); elsewhere plain lines are written at once, for logs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.table import Table

from optkit.pipeline import Check, Context


def make_console(plain: bool = False) -> Console:
    """A console for standard output; `plain` (and any output that is no terminal) has no colour and no spinner."""
    interactive = sys.stdout.isatty() and not plain
    return Console(
        force_terminal=interactive, highlight=False, soft_wrap=not interactive, width=None if interactive else 120
    )


class Display:
    """Shows the steps of one run (a pipeline.Listener)."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status: Status | None = None
        self._label = ""

    def started(self, step: str, title: str, number: int, total: int) -> None:
        """A step begins."""
        self._label = f"{number}/{total} {step:<9}"
        if self.console.is_terminal:
            self._status = self.console.status(f"{self._label} {title}")
            self._status.start()
        else:
            self.console.print(f"{self._label} {title} ...", markup=False)

    def note(self, text: str) -> None:
        """A step says something."""
        self.console.print(f"            {text}", markup=False)

    def finished(self, step: str, seconds: float, checks: Sequence[Check]) -> None:
        """A step has ended."""
        self.close()
        self.console.print(f"{self._label} {seconds:6.1f} s  {_counts(checks)}", markup=False)

    def close(self) -> None:
        """Stop the spinner; harmless where there is none."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def summary(console: Console, context: Context, verdict: str, paths: Sequence[Path]) -> None:
    """The table, the failed checks, the verdict and the paths."""
    table = Table(box=None, pad_edge=False)
    for name, justify in (("step", "left"), ("s", "right"), ("pass", "right"), ("fail", "right"), ("not run", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for step, seconds in context.seconds.items():
        mine = [c for c in context.checks if c.step == step]
        table.add_row(
            step, f"{seconds:.1f}", *(str(sum(c.status == s for c in mine)) for s in ("pass", "fail", "not_run"))
        )
    counts = (sum(c.status == s for c in context.checks) for s in ("pass", "fail", "not_run"))
    table.add_row("total", f"{sum(context.seconds.values()):.1f}", *map(str, counts))
    console.print()
    console.print(table)
    for c in context.checks:
        if c.status == "fail":
            limit = f", threshold {c.threshold}" if c.threshold is not None else ""
            value = f" value {c.value}{limit}" if c.value is not None else ""
            console.print(f"FAILED {c.name}:{value} {c.reason}", markup=False)
    console.print(f"verdict: {verdict}", markup=False)
    for path in paths:
        console.print(f"  {path}", markup=False)


def _counts(checks: Sequence[Check]) -> str:
    words = {"pass": "passed", "fail": "FAILED", "not_run": "not run"}
    parts = [f"{n} {words[s]}" for s in words if (n := sum(c.status == s for c in checks))]
    return ", ".join(parts)
