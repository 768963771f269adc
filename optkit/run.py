"""One run: its folder, its log, its status file, and the pipeline between them.

Assumes a resolved recipe. The folder holds recipe.yaml (resolved), overrides.yaml, log.txt, status.json and, after a
failure, error.txt, besides what the steps write. A refused recipe leaves no folder, unless a sweep gave one.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

import optkit
from optkit.compose import Resolved
from optkit.console import Display, make_console, summary
from optkit.errors import EXIT_FAILED, UserError
from optkit.pipeline import Context, Pipeline
from optkit.rundir import RunDir

log = logging.getLogger("optkit")


def run_recipe(
    resolved: Resolved,
    *,
    outputs: Path,
    folder: Path | None = None,
    until: str | None = None,
    plain: bool = False,
    pipeline: Pipeline | None = None,
) -> int:
    """Run every step (up to `until`); returns the exit code. Raises UserError where the recipe is refused."""
    line = (pipeline or _line()).until(until)
    if folder is None:
        run = RunDir.create(outputs, resolved.name, resolved.digest)
    else:
        try:
            folder.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            raise UserError(f"--dir {folder}: expected a folder that does not exist yet") from None
        run = RunDir(folder.absolute())
    console = make_console(plain)
    display = Display(console)
    context = Context(resolved, run, display)
    status: dict[str, Any] = {
        "recipe": resolved.name,
        "target": resolved.target,
        "overrides": list(resolved.overrides),
        "digest": resolved.digest,
        "pid": os.getpid(),
        "optkit": optkit.__version__,
        "status": "running",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    start = time.perf_counter()

    def end(word: str, **more: Any) -> None:
        counts = {s: sum(c.status == s for c in context.checks) for s in ("pass", "fail", "not_run")}
        run.json(
            "status.json",
            {
                **status,
                "status": word,
                "checks": counts,
                "seconds": round(time.perf_counter() - start, 3),
                "steps": {k: round(v, 3) for k, v in context.seconds.items()},
                **more,
            },
        )

    run.text(
        "recipe.yaml",
        f"# {resolved.name}, resolved by optkit {optkit.__version__}; digest {resolved.digest}\n" + resolved.yaml(),
    )
    run.text("overrides.yaml", yaml.safe_dump(list(resolved.overrides)))
    run.json("status.json", status)
    with _log_file(run.path / "log.txt"):
        log.info("recipe %s, digest %s, optkit %s", resolved.name, resolved.digest, optkit.__version__)
        console.print(f"{resolved.name} -> {_shown(run.path)}", markup=False)
        try:
            result = line.run(context)
        except UserError as err:
            display.close()
            if folder is None:
                run.discard()
            else:
                run.text("error.txt", f"{err}\n")
                end("refused", error=str(err))
            raise
        except BaseException as err:
            display.close()
            log.exception("interrupted")
            run.text("error.txt", f"{type(err).__name__}: {err}\n")
            end("interrupted", error=type(err).__name__)
            raise
        failed = any(c.status == "fail" for c in context.checks)
        if context.errors:
            run.text("error.txt", "\n".join(context.errors))
        elif failed:
            run.text(
                "error.txt",
                "".join(
                    f"{c.name}: {c.status}, value {c.value}, threshold {c.threshold} {c.reason}\n"
                    for c in context.checks
                    if c.status == "fail"
                ),
            )
        first = next((f"{c.name}: {c.reason or c.value}" for c in context.checks if c.status == "fail"), "")
        end("failed" if failed else "passed", verdict=result, **({"error": first} if failed else {}))
    if (run.path / "evidence.json").exists():
        from optkit.evidence import write_sums

        write_sums(run.path)  # again: the log and the status have ended only now
    if folder is None:
        run.link_latest()
    shown = [
        p
        for name in ("report.html", "evidence.json", "trace.json", "artifact", "error.txt")
        if (p := run.path / name).exists()
    ]
    summary(console, context, result, [_shown(p) for p in (run.path, *shown)])
    return EXIT_FAILED if failed else 0


def check_recipe(resolved: Resolved, *, plain: bool = False, pipeline: Pipeline | None = None) -> int:
    """The steps up to `check`, writing nothing; returns the exit code. Raises UserError where the recipe is refused."""
    console = make_console(plain)
    display = Display(console)
    context = Context(resolved, None, display)
    try:
        (pipeline or _line()).until("check").run(context)
    finally:
        display.close()
    for c in context.checks:
        if c.status == "fail":
            console.print(f"FAILED {c.name}: {c.reason or c.value}", markup=False)
    failed = any(c.status == "fail" for c in context.checks)
    console.print(f"{resolved.name}: {'failed' if failed else 'ok'}, digest {resolved.digest[:6]}", markup=False)
    return EXIT_FAILED if failed else 0


def _line() -> Pipeline:
    from optkit.steps import pipeline

    return pipeline()


def _shown(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@contextmanager
def _log_file(path: Path) -> Iterator[None]:
    """Send the package's log to a file while one run lasts."""
    handler = logging.FileHandler(path, encoding="utf-8")
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        handler.close()
