"""The `optkit` fixture: one command in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Result

from optkit.app import main


@pytest.fixture
def optkit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """`optkit(*args)` in this process, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPTKIT_RECIPES", raising=False)

    def call(*args: str) -> Result:
        code = main(args)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call
