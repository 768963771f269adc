"""Sweeps: the whole grid of given values, each job in its own process and its own folder.

Values are split by Hydra's own override grammar, jobs are `optkit run` as a child process: no state of one job
(compiler caches, CUDA contexts) reaches another, and a crash takes nothing with it. The plan of a sweep is written to
sweep.json first; it is what `--resume` compares with. Folders are numbered, never named after values: values may hold
slashes or be longer than a file name.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import hashlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import optkit
from optkit.compose import flow, parse_overrides, resolve
from optkit.console import make_console
from optkit.errors import EXIT_FAILED, Problem, UserError, did_you_mean
from optkit.rundir import RunDir, unique_folder, utc_stamp, write_text

SCHEMA = "optkit-sweep/1"
LAUNCHERS = ("basic", "joblib")


@dataclass(frozen=True)
class Job:
    """One point of the grid. `swept` are the overrides that differ between jobs."""

    index: int
    recipe: str
    overrides: tuple[str, ...]
    swept: tuple[str, ...]
    digest: str
    tree: dict[str, Any]

    @property
    def folder(self) -> str:
        """Number and digest: short and flat whatever the values are."""
        return f"{self.index:03d}-{self.digest[:6]}"

    @property
    def label(self) -> str:
        """What sets this job apart."""
        return " ".join(self.swept) or self.recipe


def sweep_command(argv: Sequence[str], parser: argparse.ArgumentParser) -> int:
    """`optkit sweep`; returns 0 if every job passed, 1 otherwise. Raises UserError before any job starts."""
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=V1,V2", help="recipe=A,B and any key; several values are swept"
    )
    parser.add_argument("--launcher", metavar="NAME", help="basic: one after the other; joblib: --jobs at a time")
    parser.add_argument("--jobs", type=int, metavar="N", help="jobs at a time; above 1 means joblib (default: 1)")
    parser.add_argument(
        "--resume", type=Path, metavar="DIR", help="go on with an earlier sweep: jobs that passed are skipped"
    )
    parser.add_argument(
        "--outputs",
        type=Path,
        default=Path("outputs"),
        metavar="DIR",
        help="parent of all run folders (default: outputs)",
    )
    args = parser.parse_intermixed_args(argv)
    overrides, launcher, parallel = _launcher(args)
    if args.until is not None:
        from optkit.steps import pipeline

        pipeline().until(args.until)
    stored = _stored(args.resume) if args.resume is not None else None
    if stored is not None and not overrides:
        overrides = stored["overrides"]
    until = args.until or (stored or {}).get("until")
    jobs = expand(overrides)
    if stored is not None:
        _same(stored, jobs, args.resume)
        folder = args.resume.resolve()  # `latest` is a link
    else:
        digest = hashlib.sha256("".join(j.digest for j in jobs).encode()).hexdigest()
        folder = unique_folder(args.outputs.absolute() / "sweep", f"{utc_stamp()}-{digest[:6]}")
        RunDir(folder).json(
            "sweep.json",
            {
                "schema": SCHEMA,
                "optkit": optkit.__version__,
                "overrides": overrides,
                "until": until,
                "jobs": [
                    {
                        "index": j.index,
                        "recipe": j.recipe,
                        "overrides": j.overrides,
                        "swept": j.swept,
                        "digest": j.digest,
                        "tree": j.tree,
                    }
                    for j in jobs
                ],
            },
        )
    console = make_console()
    console.print(f"{len(jobs)} jobs -> {folder}", markup=False)
    rows = _launch(jobs, folder, until, launcher, parallel, console)
    RunDir(folder).link_latest()
    return _report(rows, jobs, folder, console)


def _launcher(args: argparse.Namespace) -> tuple[list[str], str, int]:
    """(remaining overrides, launcher, jobs at a time); accepts Hydra's own names for both."""
    overrides, name, number = [], args.launcher, args.jobs
    for text in args.overrides:
        key, _, value = text.partition("=")
        if key.lstrip("+") == "hydra/launcher":
            name = name or value
        elif key.lstrip("+") == "hydra.launcher.n_jobs" and value.lstrip("-").isdigit():
            number = number or int(value)
        elif "=" not in text:
            overrides.append(f"recipe={text}")
        else:
            overrides.append(text)
    name = name or ("joblib" if (number or 1) > 1 else "basic")
    if name not in LAUNCHERS:
        raise UserError(
            Problem(
                "hydra/launcher", name, f"one of {', '.join(LAUNCHERS)}", "command line", did_you_mean(name, LAUNCHERS)
            )
        )
    if number is not None and number < 1 and number != -1:
        raise UserError(Problem("--jobs", number, "at least 1", "command line"))
    if name == "basic" and number not in (None, 1):
        raise UserError(
            Problem("--jobs", number, "1 with the basic launcher; --launcher joblib runs several", "command line")
        )
    return overrides, name, 1 if name == "basic" else (number or -1)


def expand(overrides: Sequence[str]) -> list[Job]:
    """The grid in order, the last key running fastest.

    Every job is composed here, so that a misspelt key refuses the sweep before it starts. What only one combination
    makes impossible is left to that job.
    """
    keys: list[list[str]] = []
    swept: list[bool] = []
    recipes: list[str] = []
    for o in parse_overrides(list(overrides)):
        values = list(o.sweep_string_iterator()) if o.is_sweep_override() else None
        if o.key_or_group == "recipe" and o.type.name == "CHANGE":
            if recipes:
                raise UserError(
                    Problem("recipe", o.get_value_string(), "one recipe=A,B for the whole sweep", "command line")
                )
            recipes = [v.strip("'\"") for v in values] if values else [str(o.value())]
            continue
        keys.append([f"{o.key_or_group}={v}" for v in values] if values else [str(o.input_line)])
        swept.append(values is not None)
    if not recipes:
        raise UserError("recipe: expected recipe=NAME or recipe=A,B (command line)")
    jobs: list[Job] = []
    found: dict[str, Problem | str] = {}
    for index, (recipe, *point) in enumerate(itertools.product(recipes, *keys)):
        varied = tuple(p for p, s in zip(point, swept, strict=True) if s)
        if len(recipes) > 1:
            varied = (f"recipe={recipe}", *varied)
        try:
            resolved = resolve(recipe, point, cross_checks=False)
        except UserError as err:
            for p in err.problems:  # one mistake once, not once per value beside it
                found.setdefault(f"{p.key} {p.where}" if isinstance(p, Problem) else p, p)
            continue
        jobs.append(Job(index, recipe, tuple(point), varied, resolved.digest, resolved.tree))
    if found:
        raise UserError(found.values())
    return jobs


def _stored(folder: Path) -> dict[str, Any]:
    path = folder / "sweep.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise UserError(f"--resume {folder}: expected a folder made by `optkit sweep`: {err}") from err
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise UserError(f"{path}: schema {schema!r}: expected {SCHEMA!r}")
    job = {"index", "recipe", "overrides", "swept", "digest", "tree"}
    if not {"optkit", "overrides", "jobs"} <= set(data) or any(set(j) != job for j in data["jobs"]):
        raise UserError(f"{path}: damaged: expected optkit, overrides and jobs; start a new sweep")
    return dict(data)


def _same(stored: dict[str, Any], jobs: list[Job], folder: Path) -> None:
    """Refuse to resume another sweep than the one that was started, showing the difference."""
    old = stored["jobs"]
    if stored["optkit"] != optkit.__version__:
        raise UserError(
            f"--resume {folder}: started by optkit {stored['optkit']}, this is {optkit.__version__}: start a new sweep"
        )
    lines: list[str] = []
    if [j["recipe"] for j in old] != [j.recipe for j in jobs] or [j["overrides"] for j in old] != [
        list(j.overrides) for j in jobs
    ]:
        lines = _diff(
            [f"{j['recipe']} {' '.join(j['overrides'])}" for j in old],
            [f"{j.recipe} {' '.join(j.overrides)}" for j in jobs],
            "jobs",
        )
    else:
        for before, job in zip(old, jobs, strict=True):
            if before["digest"] != job.digest:
                lines += _diff(_flat(before["tree"]), _flat(job.tree), f"job {job.index}, {job.label}")
    if lines:
        raise UserError(
            [f"--resume {folder}: the recipe has changed since this sweep was started; start a new sweep", *lines]
        )


def _flat(tree: dict[str, Any]) -> list[str]:
    return [
        f"{group}.{name}: {flow(value)}"
        for group, section in sorted(tree.items())
        for name, value in sorted(section.items())
    ]


def _diff(old: list[str], new: list[str], what: str) -> list[str]:
    return list(difflib.unified_diff(old, new, f"started ({what})", f"now ({what})", lineterm="", n=0))


def _launch(
    jobs: list[Job], folder: Path, until: str | None, launcher: str, parallel: int, console: Console
) -> list[dict[str, Any]]:
    done = itertools.count(1)
    threads = (
        None
        if launcher == "basic"
        else max(1, (os.cpu_count() or 1) // (parallel if parallel > 0 else os.cpu_count() or 1))
    )

    def one(job: Job) -> dict[str, Any]:
        status = _status(folder / job.folder)
        skipped = status.get("status") == "passed" and status.get("digest") == job.digest
        if not skipped:
            console.print(f"    {job.folder} {job.label} ...", markup=False)  # a job takes minutes: say what is running
            status = _run_job(job, folder / job.folder, until, threads)
        word = "passed before" if skipped else status["status"]
        line = f"{next(done)}/{len(jobs)} {job.folder} {job.label}: {word}, {status.get('seconds', 0):.1f} s"
        console.print(line + (f": {_first(status)}" if status["status"] != "passed" else ""), markup=False)
        return status

    if launcher == "basic":
        return [one(job) for job in jobs]
    from joblib import Parallel, delayed

    # threads are enough: each only waits for its job's own process
    return list(Parallel(n_jobs=parallel, backend="threading")(delayed(one)(job) for job in jobs))


def _run_job(job: Job, folder: Path, until: str | None, threads: int | None) -> dict[str, Any]:
    """Run one job in a child process; returns its status, also when it refused, failed or crashed."""
    if folder.exists():  # left by an interrupted or failed attempt; its number stays, its content does not
        shutil.rmtree(folder)
    command = [sys.executable, "-m", "optkit", "run", job.recipe, *job.overrides, "--dir", str(folder), "--plain"]
    if until is not None:
        command += ["--until", until]
    env = dict(os.environ)
    if threads is not None:
        env.setdefault("OMP_NUM_THREADS", str(threads))
    start = time.perf_counter()
    child = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env, check=False
    )
    seconds = round(time.perf_counter() - start, 3)
    run = RunDir(folder)
    run.text("console.txt", child.stdout)
    status = _status(folder)
    if status.get("status") in (None, "running"):  # refused before it had a folder, or gone without a word
        refused = child.returncode == 2
        cause = child.stdout.strip() if refused else f"{_exit(child.returncode)}\n{child.stdout[-4000:]}"
        status = {
            "recipe": job.recipe,
            "overrides": list(job.overrides),
            "digest": job.digest,
            **status,
            "status": "refused" if refused else "crashed",
            "error": cause,
        }
        run.text("error.txt", cause + "\n")
    elif status.get("digest") != job.digest:
        status = {**status, "status": "failed", "error": "the recipe changed while the sweep ran"}
        run.text("error.txt", status["error"] + "\n")
    status["seconds"] = seconds
    run.json("status.json", status)
    return status


def _exit(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _status(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "status.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _first(status: dict[str, Any]) -> str:
    lines = str(status.get("error", "")).strip().splitlines()
    return lines[0].removeprefix("error: ") if lines else ""


def _report(rows: list[dict[str, Any]], jobs: list[Job], folder: Path, console: Console) -> int:
    """Table and sweep.csv; returns the exit code."""
    keys = list(dict.fromkeys(s.partition("=")[0] for j in jobs for s in j.swept)) or ["recipe"]
    head = ["job", *keys, "status", "verdict", "s", "pass", "fail", "not run", "error"]
    lines = []
    for job, status in zip(jobs, rows, strict=True):
        point = dict(s.partition("=")[::2] for s in job.swept)
        counts = status.get("checks", {})
        lines.append(
            [
                job.folder,
                *(point.get(k, job.recipe) for k in keys),
                status["status"],
                status.get("verdict", ""),
                f"{status['seconds']:.1f}",
                *(str(counts.get(c, "")) for c in ("pass", "fail", "not_run")),
                _first(status),
            ]
        )
    out = io.StringIO()
    csv.writer(out).writerows([head, *lines])
    write_text(folder / "sweep.csv", out.getvalue())
    table = Table(box=None, pad_edge=False)
    for name in head[:-1]:
        table.add_column(name)
    for line in lines:
        table.add_row(*line[:-1])
    console.print()
    console.print(table)
    bad = [(j, s) for j, s in zip(jobs, rows, strict=True) if s["status"] != "passed"]
    for job, status in bad:
        console.print(
            f"{job.folder} {status['status']}: {_first(status)} ({folder / job.folder / 'error.txt'})", markup=False
        )
    console.print(f"{len(jobs) - len(bad)} of {len(jobs)} passed: {folder / 'sweep.csv'}", markup=False)
    return EXIT_FAILED if bad else 0
