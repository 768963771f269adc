"""The ordered steps from a recipe to evidence, and the checks they register.

A step is a function (recipe, context) -> None. It reads what earlier steps left in `context.results`, leaves its own
results there, and registers checks. A step that finds the input impossible raises UserError (or, where it is marked
`refuses`, any ValueError): the run is refused. Anything else that a step raises is a failed check; steps marked
`always` still run, so that a broken run ends with evidence of what broke. Assumes nothing of what the steps do.
"""

from __future__ import annotations

import logging
import shlex
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from optkit.checks import Check
from optkit.compose import Resolved
from optkit.errors import UserError
from optkit.recipe import Recipe
from optkit.rundir import RunDir

log = logging.getLogger("optkit")


class Listener(Protocol):
    """Who is told how a run goes on."""

    def started(self, step: str, title: str, number: int, total: int) -> None: ...

    def note(self, text: str) -> None: ...

    def finished(self, step: str, seconds: float, checks: Sequence[Check]) -> None: ...


@dataclass
class Context:
    """What the steps of one run share.

    `run` is None for `optkit check`: then nothing may be written. `results` holds hand-overs by name.
    """

    resolved: Resolved
    run: RunDir | None
    listener: Listener
    checks: list[Check] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    step: str = ""

    @property
    def target(self) -> str:
        """Recipe and overrides as the user typed them."""
        return " ".join([self.resolved.target, *(shlex.quote(o) for o in self.resolved.overrides)])

    @property
    def repeat(self) -> str:
        """The command that repeats this run."""
        return f"optkit run {self.target}"

    def check(
        self, name: str, ok: bool, *, value: Any = None, threshold: Any = None, reason: str = "", repeat: str = ""
    ) -> bool:
        """Register a check that ran; returns `ok`."""
        if not ok and not reason:
            reason = f"{value} against {threshold}"
        self._add(Check(name, "pass" if ok else "fail", value, threshold, reason, repeat or self.repeat, self.step))
        return ok

    def not_run(self, name: str, reason: str, *, threshold: Any = None, repeat: str = "") -> None:
        """Register a check that needs hardware this machine lacks."""
        if not reason:
            raise ValueError(f"check {name!r}: not_run needs a reason")
        self._add(Check(name, "not_run", None, threshold, reason, repeat or self.repeat, self.step))

    def take(self, checks: Iterable[Any], *, suffix: str = "") -> None:
        """Register checks that another part made: anything with the fields of a Check. `suffix` is added to names."""
        for c in checks:
            self._add(
                Check(c.name + suffix, c.status, c.value, c.threshold, c.reason, c.repeat or self.repeat, self.step)
            )

    def note(self, text: str) -> None:
        """One line for the user and the log."""
        log.info("%s: %s", self.step, text)
        self.listener.note(text)

    def _add(self, check: Check) -> None:
        if any(c.name == check.name for c in self.checks):
            raise RuntimeError(f"check {check.name!r} is registered twice")
        log.log(
            logging.ERROR if check.status == "fail" else logging.INFO,
            "check %s: %s, value %s, threshold %s %s",
            check.name,
            check.status,
            check.value,
            check.threshold,
            check.reason,
        )
        self.checks.append(check)


@dataclass(frozen=True)
class Step:
    """A named step.

    `refuses`: a ValueError means that the recipe cannot work (else it is a defect). `always`: runs even when an
    earlier step broke.
    """

    name: str
    title: str
    run: Callable[[Recipe, Context], None]
    refuses: bool = False
    always: bool = False


def verdict(checks: Sequence[Check]) -> str:
    """`verified`, `verified except hardware (n)`, `failed (n)`, or `nothing checked`."""
    failed = sum(c.status == "fail" for c in checks)
    waiting = sum(c.status == "not_run" for c in checks)
    if failed:
        return f"failed ({failed})"
    if not any(c.status == "pass" for c in checks):
        return "nothing checked"
    return f"verified except hardware ({waiting})" if waiting else "verified"


class Pipeline:
    """Steps in order."""

    def __init__(self, steps: Sequence[Step], stops_after: str | None = None) -> None:
        self.steps = tuple(steps)
        self.stops_after = stops_after

    def until(self, name: str | None) -> Pipeline:
        """The steps up to and including `name`; all for None."""
        if name is None:
            return self
        names = [s.name for s in self.steps]
        if name not in names:
            raise UserError(f"--until {name!r}: expected one of {', '.join(names)}")
        return Pipeline(self.steps[: names.index(name) + 1], None if name == names[-1] else name)

    def run(self, context: Context) -> str:
        """Run the steps; returns the verdict. Raises UserError where a step refuses the recipe."""
        broken = False
        for number, step in enumerate(self.steps, 1):
            if broken and not step.always:
                continue
            context.step = step.name
            before, start = len(context.checks), time.perf_counter()
            log.info("step %s: %s", step.name, step.title)
            context.listener.started(step.name, step.title, number, len(self.steps))
            try:
                step.run(context.resolved.recipe, context)
            except UserError:
                raise
            except Exception as err:
                if step.refuses and isinstance(err, ValueError) and str(err):
                    log.info("%s", traceback.format_exc())
                    raise UserError(str(err).splitlines()) from err
                broken = True  # a defect of ours: it must end up in the evidence, not hide it
                self._broke(context, err)
            context.seconds[step.name] = time.perf_counter() - start
            context.listener.finished(step.name, context.seconds[step.name], context.checks[before:])
        result = verdict(context.checks)
        return (
            result
            if self.stops_after is None or result.startswith("failed")
            else f"not verified (stopped after {self.stops_after})"
        )

    @staticmethod
    def _broke(context: Context, err: Exception) -> None:
        text = traceback.format_exc()
        log.error("%s", text)
        context.errors.append(text)
        context.check(f"step {context.step} ends", False, reason=f"{type(err).__name__}: {err}")
