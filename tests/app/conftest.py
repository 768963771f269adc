"""Shared helpers of the command-line tests: run `optkit` in this process or as a child."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from optkit.app import main

ROOT = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    """Exit code and both outputs of one command."""

    code: int
    out: str
    err: str


@pytest.fixture
def optkit(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`optkit(*args)` in this process, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPTKIT_RECIPES", raising=False)

    def call(*args: str) -> Result:
        code = main(args)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


def child(*args: str, cwd: Path, **env: str) -> Result:
    """`python -m optkit` as a process of its own."""
    full = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run([sys.executable, "-m", "optkit", *args], cwd=cwd, env=full, capture_output=True, text=True, timeout=300)
    return Result(done.returncode, done.stdout, done.stderr)
