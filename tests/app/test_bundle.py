"""A run's folder under `optkit evidence verify`: one changed byte in any file is found, and the recipe is composed again.

The run is short: model, plan, proofs, a stand-in for the kernel, the real evidence step.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Result

from optkit import evidence as ev
from optkit.compose import resolve
from optkit.pipeline import Check, Context, Pipeline, Step
from optkit.recipe import Recipe
from optkit.report.bench_traces import load_traces
from optkit.run import run_recipe
from optkit.steps import delivery, planning
from optkit.validate.numerics import Numerics

Optkit = Callable[..., Result]
CUBIN = b"\x7fELF a stand-in"
ROWS = [
    Numerics("gemv:x", 256, 0.0017, 0.0021, 0.0018, 0.0022, "pass"),
    Numerics("attn_combine:o", 256, 0.0015, 0.0019, 0.0016, 0.002, "pass"),
]


def kernel(recipe: Recipe, context: Context) -> None:
    assert context.run is not None
    context.run.folder("artifact", lambda at: (at / "kernel.cubin").write_bytes(CUBIN))
    context.take([Check(ev.AUDITED, "pass", hashlib.sha256(CUBIN).hexdigest())])
    context.not_run("gpu.rollout", "needs an H200 GPU")
    context.results["numerics"] = ROWS


LINE = Pipeline(
    (
        Step("model", "graph", planning.model, refuses=True),
        Step("plan", "plan", planning.plan, refuses=True),
        Step("check", "proofs", planning.check, refuses=True),
        Step("emit", "kernel", kernel),
        Step("evidence", "evidence", delivery.evidence, always=True),
    )
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("runs") / "run"
    assert run_recipe(resolve("llama/tiny", ["decode.batch=[2,4]"]), outputs=at, folder=at, pipeline=LINE, plain=True) == 0
    return at


@pytest.fixture()
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def test_a_finished_run_verifies(optkit: Optkit, folder: Path) -> None:
    result = optkit("evidence", "verify", str(folder))
    assert result.code == 0, result.out
    lines = {line.split()[1]: line.split()[0] for line in result.out.splitlines()[:-1]}
    assert {"again/recipe", "again/plan", "audited/artifact/kernel.cubin", "digest/SHA256SUMS"} <= lines.keys()
    assert set(lines.values()) == {"pass"}
    assert optkit("evidence", str(folder)) == result, "the folder alone means verify"
    assert optkit("evidence", str(folder / "none")).code == 2


def test_one_changed_byte_anywhere_is_found(optkit: Optkit, folder: Path) -> None:
    names = {p.relative_to(folder).as_posix() for p in files(folder)}
    assert names >= {"evidence.json", "report.html", "traces.jsonl", "trace.json", "plan.json", "recipe.yaml", "overrides.yaml",
                     "status.json", "log.txt", "SHA256SUMS", "artifact/kernel.cubin"}  # fmt: skip
    missed = []
    for path in files(folder):
        whole = path.read_bytes()
        for at in {0, len(whole) // 2, len(whole) - 1} if whole else {}:
            for bit in (0x01, 0x20):  # 0x20 makes a digest's letter upper case
                path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
                try:
                    found = any(c.status == "fail" for c in ev.reverify(folder))
                except ev.EvidenceError:
                    found = True
                if not found:
                    missed.append((path.name, at, bit))
        path.write_bytes(whole)
    assert not missed
    assert ev.verdict(ev.reverify(folder)) == "verified", "all bytes are back in place"


def test_a_missing_file_is_found(folder: Path) -> None:
    for path in files(folder):
        whole = path.read_bytes()
        path.unlink()
        try:
            assert any(c.status == "fail" for c in ev.reverify(folder)), path
        except ev.EvidenceError:
            assert path.name == "evidence.json"
        path.write_bytes(whole)


def redigest(folder: Path) -> None:
    """Every digest taken anew, as someone would who changes a file and hides it."""
    data = json.loads((folder / "evidence.json").read_text())
    listed = data["provenance"]["files"]
    data["provenance"]["files"] = {n: ev.sha256(folder / n) for n in listed}
    ev.write(folder / "evidence.json", ev.Bundle.model_validate(data))
    ev.write_sums(folder)


def test_a_recipe_that_gives_another_plan_is_found(optkit: Optkit, folder: Path) -> None:
    """Planted fault: one choice of recipe.yaml is changed and every digest is taken anew."""
    recipe = folder / "recipe.yaml"
    assert "weight_stream: true" in recipe.read_text()
    recipe.write_text(recipe.read_text().replace("weight_stream: true", "weight_stream: false"))
    redigest(folder)
    result = optkit("evidence", "verify", str(folder))
    bad = [line for line in result.out.splitlines()[:-1] if line.startswith("fail")]
    assert result.code == 1 and len(bad) == 2
    assert "again/recipe" in bad[0] and "again/plan" in bad[1] and "gives another plan" in bad[1]


def test_a_recipe_that_cannot_be_composed_is_one_line(optkit: Optkit, folder: Path) -> None:
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("weight_stream:", "weight_strem:"))
    redigest(folder)
    result = optkit("evidence", "verify", str(folder))
    bad = [line for line in result.out.splitlines()[:-1] if line.startswith("fail")]
    assert result.code == 1 and len(bad) == 1 and "cannot be composed again" in bad[0] and "weight_strem" in bad[0]


def test_merging_draws_the_report_again(optkit: Optkit, folder: Path, tmp_path: Path) -> None:
    row = {"stage": "gemv:x", "n": 256, "median": 0.1, "max": 0.2, "band_median": 0.002, "band_max": 0.003, "status": "fail"}
    record = ev.HardwareRecord(
        cubin_sha256=hashlib.sha256(CUBIN).hexdigest(),
        gpu="NVIDIA H200",
        driver="580",
        time="2026-01-01T00:00:00+00:00",
        command="optkit run x",
        checks=(ev.Check("gpu.rollout", "fail", 0.2, 0.006, "gemv:x"),),
        numerics=(ev.as_numerics(row),),
    )
    ev.write(tmp_path / "hardware.json", record)
    shutil.rmtree(folder / "artifact")  # a bundle without an artifact has no manifest to seal
    (folder / "artifact").mkdir()
    (folder / "artifact" / "kernel.cubin").write_bytes(CUBIN)
    before = (folder / "report.html").read_text()
    ev.merge_run(folder, [ev.load_hardware(tmp_path / "hardware.json")], None, _report())
    after = (folder / "report.html").read_text()
    assert "failed (1)" in after and "failed (1)" not in before and 'id="ablations"' in after and 'id="roofline"' in after
    assert ev.verdict(ev.reverify(folder)) == "verified"
    (failed,) = [t for t in load_traces(folder / "traces.jsonl") if t.evaluation]
    assert failed.evaluation is not None and failed.evaluation.environment.hardware == "NVIDIA_H200"


def test_merging_works_without_the_recipe(folder: Path) -> None:
    """The run was made by another optkit: its plan.json is drawn, and the digests hold afterwards."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("weight_stream:", "weight_strem:"))
    redigest(folder)
    _report()(folder, ev.load(folder))
    text = (folder / "report.html").read_text()
    assert 'id="roofline"' in text and 'id="plan"' in text and 'id="ablations"' not in text


def _report() -> ev.Report:
    from optkit.recompose import report

    return report


def test_the_report_of_a_run_has_roofline_and_ablations(made: Path) -> None:
    text = (made / "report.html").read_text()
    for switch in ("fusion.norm_projection", "fusion.gate_up_act", "overlap.weight_stream"):
        assert f"<td>{switch}</td>" in text
    assert 'id="roofline"' in text and "<td>simulated</td>" in text and "<td>measured</td>" not in text
    assert "at 2 rows and context" in text, "the recipe's smallest batch"
