"""The README shows exactly the figures that are committed under benchmarks/."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from optkit.report import readme_table as rt

ROOT = Path(__file__).resolve().parents[2]


def result(**kw: Any) -> dict[str, Any]:
    return {"schema": "optkit-benchmark/1", "recipe": "llama/tiny", "gpu": "NVIDIA H200", "driver": "580",
            "time": "2026-01-01", "command": "x", "cubin_sha256": "0" * 64, "more": {"free": "form"},
            "rows": [{"batch": 1, "status": "pass", "steps": 64, "worst_of_limit": 0.814, "p99": 3}]} | kw


@pytest.fixture()
def repository(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks" / "h200").mkdir(parents=True)
    (tmp_path / "README.md").write_text(f"# x\n\n{rt.BEGIN}\nold\n{rt.END}\nrest\n")
    (tmp_path / "benchmarks" / "h200" / "llama.json").write_text(json.dumps(result()))
    (tmp_path / "benchmarks" / "other.json").write_text('{"schema": "something else"}')
    return tmp_path


def test_the_readme_agrees_with_the_committed_results() -> None:
    assert rt.main(["--root", str(ROOT), "--check"]) == 0


def test_write_then_check(repository: Path) -> None:
    root = ["--root", str(repository)]
    assert rt.main([*root, "--check"]) == 1
    assert rt.main([*root, "--write"]) == 0 and rt.main([*root, "--check"]) == 0
    text = (repository / "README.md").read_text()
    assert "| llama/tiny | NVIDIA H200 | 1 | 64 | passed | 0.81 |  |  | [json](benchmarks/h200/llama.json) |" in text
    assert text.startswith("# x\n") and text.endswith("rest\n") and "old" not in text
    assert re.search(r"\| kimi_k3/tiny \| NVIDIA H200 \|(  \|)+\n", text), "not measured: empty cells"
    (repository / "benchmarks" / "h200" / "llama.json").write_text(
        json.dumps(result(rows=[{"batch": 1, "status": "fail", "steps": 64}])))
    assert rt.main([*root, "--check"]) == 1
    assert "**failed**" in rt.table(rt.load(repository / "benchmarks"))


def test_columns_line_up(repository: Path) -> None:
    lines = rt.table(rt.load(repository / "benchmarks")).splitlines()
    assert {line.count("|") for line in lines} == {len(rt.HEADER) + 1}


@pytest.mark.parametrize(("change", "says"), [
    ({"gpu": None}, "llama.json: gpu"), ({"rows": []}, "rows"), ({"cubin_sha256": "abc"}, "cubin_sha256"),
    ({"rows": [{"batch": 1, "status": "pass", "step_us": -1}]}, "rows.0.step_us"),
    ({"schema": "optkit-benchmark/2"}, "schema"),
])
def test_a_result_that_does_not_fit_is_named(repository: Path, change: dict[str, Any], says: str,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "benchmarks" / "h200" / "llama.json").write_text(json.dumps(result(**change)))
    assert rt.main(["--root", str(repository), "--check"]) == 2
    assert says in capsys.readouterr().err


def test_two_results_for_one_line_are_refused(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "benchmarks" / "again.json").write_text(json.dumps(result()))
    assert rt.main(["--root", str(repository)]) == 2
    assert "holds llama/tiny on NVIDIA H200 already" in capsys.readouterr().err


def test_a_readme_without_markers_is_refused(repository: Path) -> None:
    (repository / "README.md").write_text("# x\n")
    assert rt.main(["--root", str(repository), "--write"]) == 2
    assert (repository / "README.md").read_text() == "# x\n"
