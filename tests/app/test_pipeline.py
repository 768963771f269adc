"""The pipeline: order, refusal, broken steps, verdicts; and what a run leaves behind in each case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optkit.compose import Resolved, resolve
from optkit.console import Display, make_console
from optkit.errors import UserError
from optkit.pipeline import Check, Context, Pipeline, Step, verdict
from optkit.recipe import Recipe
from optkit.run import check_recipe, run_recipe
from optkit.rundir import RunDir


@pytest.fixture(scope="module")
def resolved() -> Resolved:
    return resolve("llama/tiny")


def good(recipe: Recipe, context: Context) -> None:
    context.check(f"{context.step}.fine", True, value=1, threshold=2)


def bad(recipe: Recipe, context: Context) -> None:
    context.check("too large", False, value=3, threshold=2)


def waits(recipe: Recipe, context: Context) -> None:
    context.not_run("speed", "needs a GPU")


def breaks(recipe: Recipe, context: Context) -> None:
    raise RuntimeError("a defect")


def refuses(recipe: Recipe, context: Context) -> None:
    raise ValueError("memory: 198 GB needed\nand more")


def test_verdicts() -> None:
    def of(*statuses: str) -> str:
        return verdict([Check(str(i), s) for i, s in enumerate(statuses)])  # type: ignore[arg-type]

    assert of("pass") == "verified"
    assert of("pass", "not_run", "not_run") == "verified except hardware (2)"
    assert of("pass", "fail", "not_run") == "failed (1)"
    assert of() == "nothing checked" == of("not_run")


def run(resolved: Resolved, tmp_path: Path, *steps: Step, until: str | None = None) -> tuple[int, Path]:
    code = run_recipe(resolved, outputs=tmp_path, pipeline=Pipeline(steps), until=until, plain=True)
    return code, (tmp_path / "llama/tiny/latest").resolve()


def test_a_run_that_passes(resolved: Resolved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, folder = run(resolved, tmp_path, Step("one", "first", good), Step("two", "second", waits))
    assert code == 0
    status = json.loads((folder / "status.json").read_text())
    assert status["verdict"] == "verified except hardware (1)"
    assert status["checks"] == {"pass": 1, "fail": 0, "not_run": 1}
    out = capsys.readouterr().out
    assert "1/2 one" in out and "verdict: verified except hardware (1)" in out and str(folder) in out


def test_a_failed_check_fails_the_run(resolved: Resolved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, folder = run(resolved, tmp_path, Step("one", "first", bad), Step("two", "second", good))
    assert code == 1
    assert "too large" in (folder / "error.txt").read_text()
    assert json.loads((folder / "status.json").read_text())["status"] == "failed"
    out = capsys.readouterr().out
    assert "FAILED too large: value 3, threshold 2" in out and "2/2 two" in out


def test_a_broken_step_fails_and_the_report_still_runs(resolved: Resolved, tmp_path: Path) -> None:
    seen: list[str] = []
    steps = (
        Step("one", "first", breaks),
        Step("two", "second", lambda r, c: seen.append("two")),
        Step("report", "third", lambda r, c: seen.append("report"), always=True),
    )
    code, folder = run(resolved, tmp_path, *steps)
    assert code == 1
    assert seen == ["report"]
    assert "RuntimeError: a defect" in (folder / "error.txt").read_text()
    assert "RuntimeError: a defect" in (folder / "log.txt").read_text()
    assert "a defect" in json.loads((folder / "status.json").read_text())["error"]


def test_a_refused_recipe_leaves_nothing(resolved: Resolved, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(resolved, tmp_path, Step("one", "first", good), Step("two", "second", refuses, refuses=True))
    assert caught.value.problems == ["memory: 198 GB needed", "and more"]
    assert list(tmp_path.iterdir()) == []


def test_the_same_error_elsewhere_is_a_defect(resolved: Resolved, tmp_path: Path) -> None:
    assert run(resolved, tmp_path, Step("one", "first", refuses))[0] == 1


def test_a_refused_job_of_a_sweep_says_why_in_its_folder(resolved: Resolved, tmp_path: Path) -> None:
    line = Pipeline((Step("one", "first", refuses, refuses=True),))
    with pytest.raises(UserError):
        run_recipe(resolved, outputs=tmp_path, folder=tmp_path / "job", pipeline=line, plain=True)
    assert "198 GB" in (tmp_path / "job/error.txt").read_text()
    assert json.loads((tmp_path / "job/status.json").read_text())["status"] == "refused"
    with pytest.raises(UserError, match="does not exist yet"):
        run_recipe(resolved, outputs=tmp_path, folder=tmp_path / "job", pipeline=line, plain=True)


def test_an_interrupted_run_says_so(resolved: Resolved, tmp_path: Path) -> None:
    def stop(recipe: Recipe, context: Context) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(resolved, tmp_path, Step("one", "first", stop))
    (folder,) = (tmp_path / "llama/tiny").iterdir()
    assert json.loads((folder / "status.json").read_text())["status"] == "interrupted"


def test_until(resolved: Resolved, tmp_path: Path) -> None:
    steps = (Step("one", "first", good), Step("two", "second", bad))
    code, folder = run(resolved, tmp_path, *steps, until="one")
    assert code == 0
    assert json.loads((folder / "status.json").read_text())["verdict"] == "not verified (stopped after one)"
    with pytest.raises(UserError, match="expected one of one, two"):
        run(resolved, tmp_path, *steps, until="three")


def test_check_writes_nothing_and_fails_with_a_failed_check(
    resolved: Resolved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_recipe(resolved, plain=True, pipeline=Pipeline((Step("check", "proofs", good),))) == 0
    assert check_recipe(resolved, plain=True, pipeline=Pipeline((Step("check", "proofs", bad),))) == 1
    assert list(tmp_path.iterdir()) == []


def test_the_rules_of_checks(resolved: Resolved, tmp_path: Path) -> None:
    context = Context(resolved, RunDir(tmp_path), Display(make_console(plain=True)))
    assert context.check("a", True)
    with pytest.raises(RuntimeError, match="twice"):
        context.check("a", True)
    with pytest.raises(ValueError, match="reason"):
        context.not_run("b", "")
    assert not context.check("c", False, value=2, threshold=1)
    assert context.checks[-1].reason, "a failed check always has a reason"
    context.take([Check("d", "pass")], suffix="@stage1")
    assert context.checks[-1].name == "d@stage1"
    assert context.checks[-1].repeat == "optkit run llama/tiny"
