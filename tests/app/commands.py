"""Shared helpers of the command-line tests: run `optkit` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    """Exit code and both outputs of one command."""

    code: int
    out: str
    err: str


def child(*args: str, cwd: Path, **env: str) -> Result:
    """`python -m optkit` as a process of its own."""
    full = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, "-m", "optkit", *args], cwd=cwd, env=full, capture_output=True, text=True, timeout=300
    )
    return Result(done.returncode, done.stdout, done.stderr)
