"""Sweeps: the grid, launchers, failures, crashes, and resuming."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import ROOT, Result

import optkit.sweep as sweep_module
from optkit.errors import UserError
from optkit.sweep import Job, expand

Optkit = Callable[..., Result]


def rows(tmp_path: Path) -> list[dict[str, str]]:
    with (tmp_path / "outputs/sweep/latest/sweep.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs that are not run but noted, with a status as a run writes it; those at context 32 fail."""
    ran: list[str] = []

    def job(job: Job, folder: Path, until: str | None, threads: int | None) -> dict[str, Any]:
        ran.append(job.label)
        failed = "decode.context=32" in job.overrides
        status = {
            "status": "failed" if failed else "passed",
            "verdict": "failed (1)" if failed else "verified",
            "digest": job.digest,
            "seconds": 1.0,
            "checks": {"pass": 3, "fail": int(failed), "not_run": 0},
            "error": "numerics: 3 against 2" if failed else "",
        }
        folder.mkdir(exist_ok=True)
        (folder / "status.json").write_text(json.dumps(status))
        return status

    monkeypatch.setattr(sweep_module, "_run_job", job)
    return ran


def test_the_whole_grid_last_key_fastest() -> None:
    jobs = expand(["recipe=kimi_k3/tiny,llama/tiny", "decode.batch=1,4", "sync=counter,tagged", "decode.context=64"])
    assert [j.index for j in jobs] == list(range(8))
    assert jobs[1].overrides == ("decode.batch=1", "sync=tagged", "decode.context=64")
    assert jobs[1].swept == ("recipe=kimi_k3/tiny", "decode.batch=1", "sync=tagged")
    assert [j.tree["decode"]["batch"] for j in jobs] == [[1], [1], [4], [4]] * 2
    assert len({j.digest for j in jobs}) == 8


def test_hydras_grammar_splits_the_values() -> None:
    assert len(expand(["recipe=llama/tiny", "decode.batch=[1,2],[4]"])) == 2
    assert [j.tree["decode"]["batch"] for j in expand(["recipe=llama/tiny", "decode.batch=range(1,4)"])] == [
        [1],
        [2],
        [3],
    ]
    (job,) = expand(["recipe=llama/tiny", "hardware.name='a,b'"])
    assert job.tree["hardware"]["name"] == "a,b" and job.swept == ()
    assert len(expand(["recipe=llama/tiny", "hardware.name='a,b','c'"])) == 2


def test_one_mistake_is_one_line_and_nothing_starts(optkit: Optkit, tmp_path: Path) -> None:
    result = optkit("sweep", "recipe=kimi_k3/tiny,llama/tiny", "decode.bach=1,2,3", "sync=counter,tagged")
    assert result.code == 2
    assert len(result.err.splitlines()) == 1 and "'decode.batch'" in result.err
    for args in (
        ("sweep", "decode.batch=1,2"),
        ("sweep", "recipe=llama/tny"),
        ("sweep", "llama/tiny", "--launcher", "joblin"),
        ("sweep", "llama/tiny", "--launcher", "basic", "--jobs", "2"),
        ("sweep", "llama/tiny", "--jobs", "0"),
        ("sweep", "llama/tiny", "--until", "nowhere"),
        ("sweep", "llama/tiny", "--resume", "nowhere"),
        ("sweep", "recipe=llama/tiny", "recipe=kimi_k3/tiny"),
        ("sweep", "llama/tiny", "hydra.sweep.dir=x"),
    ):
        result = optkit(*args)
        assert result.code == 2, args
        assert len(result.err.splitlines()) == 1, result.err
    assert "'joblib'" in optkit("sweep", "llama/tiny", "--launcher", "joblin").err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "launcher",
    [
        [],
        ["--launcher", "basic"],
        ["hydra/launcher=basic"],
        ["--launcher", "joblib", "--jobs", "2"],
        ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"],
        ["--jobs", "2"],
    ],
)
def test_every_job_runs_and_a_failure_stops_none(
    optkit: Optkit, tmp_path: Path, instant: list[str], launcher: list[str]
) -> None:
    result = optkit(
        "sweep", "recipe=kimi_k3/tiny,llama/tiny", "decode.context=32,64", "validate.rollout_steps=8", *launcher
    )
    assert result.code == 1
    assert len(instant) == 4
    table = rows(tmp_path)
    assert [r["status"] for r in table] == ["failed", "passed", "failed", "passed"]
    assert [(r["recipe"], r["decode.context"]) for r in table] == [
        ("kimi_k3/tiny", "32"),
        ("kimi_k3/tiny", "64"),
        ("llama/tiny", "32"),
        ("llama/tiny", "64"),
    ]
    assert table[0]["error"] == "numerics: 3 against 2" and table[0]["fail"] == "1"
    assert "2 of 4 passed" in result.out and "4/4 " in result.out
    assert result.out.count("numerics: 3 against 2") == 4, "once while running, once at the end"


def test_all_passing_is_exit_0(optkit: Optkit, instant: list[str]) -> None:
    assert optkit("-m", "recipe=llama/tiny", "decode.batch=1,2").code == 0
    assert optkit("recipe=llama/tiny", "decode.batch=1,2", "-m").code == 0


def test_resume_skips_what_passed(optkit: Optkit, tmp_path: Path, instant: list[str]) -> None:
    optkit("sweep", "recipe=llama/tiny", "decode.context=32,64,65", "validate.rollout_steps=8")
    folder = str(tmp_path / "outputs/sweep/latest")
    before = {r["job"] for r in rows(tmp_path)}
    instant.clear()
    assert optkit("sweep", "--resume", folder).code == 1
    assert instant == ["decode.context=32"], "the failed one runs again, those that passed do not"
    assert {r["job"] for r in rows(tmp_path)} == before, "numbers are stable"
    again = optkit(
        "sweep", "recipe=llama/tiny", "decode.context=32,64,65", "validate.rollout_steps=8", "--resume", folder
    )
    assert again.code == 1
    other = optkit("sweep", "recipe=llama/tiny", "decode.context=32,64", "--resume", folder)
    assert other.code == 2 and "decode.context=65" in other.err


def test_resume_refuses_a_changed_recipe_and_shows_the_difference(
    optkit: Optkit, tmp_path: Path, instant: list[str]
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [{override /model: llama/tiny}]\ndecode: {context: 64}\n")
    assert optkit("sweep", "recipe=./mine.yaml", "decode.batch=1,2").code == 0
    mine.write_text("defaults: [{override /model: llama/tiny}]\ndecode: {context: 65}\n")
    instant.clear()
    result = optkit("sweep", "--resume", "outputs/sweep/latest")
    assert result.code == 2 and instant == []
    assert "-decode.context: 64" in result.err and "+decode.context: 65" in result.err


def test_a_killed_sweep_can_be_resumed(tmp_path: Path) -> None:
    """kill -9 while the second job runs: its half-written folder is made anew, the first is kept."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "optkit", "sweep", "recipe=llama/tiny", "decode.batch=1,2,3", "--until", "model"]
    child = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    sweep = tmp_path / "outputs/sweep"
    deadline = time.monotonic() + 120
    while not list(sweep.glob("*/001-*/status.json")):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.02)
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    (folder,) = sweep.iterdir()
    first = (next(folder.glob("000-*")) / "status.json").stat().st_mtime_ns
    done = subprocess.run(
        [*command[:4], "--resume", str(folder)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed before" in done.stdout and "3 of 3 passed" in done.stdout
    assert (next(folder.glob("000-*")) / "status.json").stat().st_mtime_ns == first


def test_a_crash_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job killed by a signal leaves no word; the sweep writes one for it."""
    (job,) = expand(["recipe=llama/tiny", "decode.batch=1"])
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho last words\nkill -SEGV $$\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    status = sweep_module._run_job(job, tmp_path / job.folder, None, 1)
    assert status["status"] == "crashed" and "SIGSEGV" in status["error"]
    assert "last words" in (tmp_path / job.folder / "error.txt").read_text()


def test_a_recipe_edited_while_the_sweep_runs_is_noticed(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [{override /model: llama/tiny}]\n")
    (job,) = expand([f"recipe={mine}", "decode.batch=1"])
    mine.write_text("defaults: [{override /model: llama/tiny}]\nmodel: {seed: 3}\n")
    status = sweep_module._run_job(job, tmp_path / job.folder, "model", 1)
    assert status["status"] == "failed" and "changed" in status["error"]


def test_resume_of_a_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text('{"schema": "other"}')
    with pytest.raises(UserError, match="optkit-sweep/1"):
        sweep_module._stored(tmp_path)


@pytest.mark.parametrize("content", [[], {}, {"optkit": "", "overrides": [], "jobs": [{}]}])
def test_a_damaged_plan_of_a_sweep_is_refused_in_words(optkit: Optkit, tmp_path: Path, content: Any) -> None:
    if isinstance(content, dict):
        content["schema"] = sweep_module.SCHEMA
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    result = optkit("sweep", "--resume", str(tmp_path))
    assert result.code == 2 and "sweep.json" in result.err and len(result.err.splitlines()) == 1
