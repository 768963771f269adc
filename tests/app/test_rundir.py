"""The run folder: unique, complete or absent, `latest` always a whole link."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from commands import child

from optkit.rundir import RunDir, utc_stamp, write_text


def test_stamp() -> None:
    assert utc_stamp(datetime(2026, 11, 30, 15, 4, 5, tzinfo=UTC)) == "20261130T150405Z"


def test_eight_processes_at_once_make_eight_folders(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: child("run", "llama/tiny", "--until", "model", cwd=tmp_path), range(8)))
    assert [r.code for r in results] == [0] * 8, results
    runs = [p for p in (tmp_path / "outputs/llama/tiny").iterdir() if not p.is_symlink()]
    assert len(runs) == 8
    for run in runs:
        assert (run / "overrides.yaml").read_text() == "[]\n"
        assert '"status": "passed"' in (run / "status.json").read_text()
    assert (tmp_path / "outputs/llama/tiny/latest").resolve() in runs


def test_a_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.txt", "old")

    def broken(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", broken)
    with pytest.raises(OSError, match="disk full"):
        write_text(tmp_path / "a.txt", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_folder_is_whole_or_absent(tmp_path: Path) -> None:
    run = RunDir(tmp_path)

    def fill(folder: Path) -> None:
        (folder / "one").write_text("1")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError):
        run.folder("artifact", fill)
    assert list(tmp_path.iterdir()) == []
    run.folder("artifact", lambda folder: (folder / "one").write_text("1") and None)
    assert (tmp_path / "artifact/one").read_text() == "1"


def test_latest_is_replaced_in_one_step(tmp_path: Path) -> None:
    first = RunDir.create(tmp_path, "a/b", "0" * 64)
    second = RunDir.create(tmp_path, "a/b", "1" * 64)
    assert first.link_latest().resolve() == first.path
    assert second.link_latest().resolve() == second.path
    assert not [p for p in (tmp_path / "a/b").iterdir() if p.name.startswith(".")]


def test_discard_removes_only_what_the_run_made(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    run = RunDir.create(tmp_path / "outputs", "a/b", "0" * 64)
    run.text("x", "x")
    run.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["outputs"]
    assert list((tmp_path / "outputs").iterdir()) == []
    kept = RunDir.create(tmp_path / "new", "a/b", "0" * 64)
    other = RunDir.create(tmp_path / "new", "a/c", "0" * 64)
    kept.discard()
    assert other.path.is_dir() and not (tmp_path / "new/a/b").exists()
