"""The eight ways in which Hydra 1.3's defaults are wrong for this program, each closed; and two smaller ones.

Each test says what Hydra does by itself, then that optkit does not.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from commands import Result, child

from optkit.compose import resolve
from optkit.errors import Problem, UserError
from optkit.locate import CONF, PACKAGED
from optkit.recipe import Hardware
from optkit.rundir import RunDir
from optkit.sweep import expand

Optkit = Callable[..., Result]


def test_trap_1_runs_of_one_second_share_a_folder(tmp_path: Path) -> None:
    """Hydra names folders by the second: two runs overwrite each other. Here eight at once make eight folders."""

    def one(number: int) -> Path:
        run = RunDir.create(tmp_path, "kimi_k3/tiny", "abcdef0123")
        run.text("overrides.yaml", f"- {number}\n")
        run.link_latest()
        return run.path

    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(one, range(8)))
    assert len(set(folders)) == 8
    assert sorted((f / "overrides.yaml").read_text() for f in folders) == [f"- {n}\n" for n in range(8)]
    assert (tmp_path / "kimi_k3/tiny/latest").resolve() in folders


def test_trap_2_failed_jobs_are_invisible(tmp_path: Path) -> None:
    """Hydra shows the first failure only and leaves its log empty. Here each failed job says why, in its own folder."""
    done = child(
        "sweep", "recipe=llama/tiny", "decode.batch=1,0,2", "decode.context=64,0", "--until", "model", cwd=tmp_path
    )
    assert done.code == 1, done.err
    sweep = (tmp_path / "outputs/sweep/latest").resolve()
    rows = list(csv.DictReader((sweep / "sweep.csv").open()))
    assert [r["status"] for r in rows] == ["passed", "refused", "refused", "refused", "passed", "refused"]
    for row in rows:
        folder = sweep / row["job"]
        if row["status"] == "passed":
            assert "layers" in (folder / "log.txt").read_text()
        else:
            assert row["error"] in (folder / "error.txt").read_text()
            assert row["error"].startswith("decode.")
            assert json.loads((folder / "status.json").read_text())["status"] == "refused"
            assert f"{row['job']} refused" in done.out
    assert "2 of 6 passed" in done.out


def test_trap_3_plus_bypasses_the_schema(optkit: Optkit) -> None:
    """In Hydra `+fusion.norm_qvk=false` is accepted and changes nothing. Here it is refused, whatever the key."""
    for override in ("+fusion.value_gte=false", "++fusion.value_gte=false", "+decode.batch=4", "+new.key=1"):
        result = optkit("show", "kimi_k3/tiny", override)
        assert result.code == 2
        assert result.err.count("\n") == 1 and override in result.err
    assert "'fusion.value_gate'" in optkit("show", "kimi_k3/tiny", "+fusion.value_gte=false").err


def test_trap_4_launcher_in_a_swept_recipe_is_ignored(optkit: Optkit, tmp_path: Path) -> None:
    """Hydra runs such a sweep with the basic launcher and says nothing. Here the recipe is refused."""
    for text in (
        "defaults:\n  - override /model: llama/tiny\n  - override /hydra/launcher: joblib\n",
        "hydra: {launcher: {n_jobs: 2}}\n",
    ):
        (tmp_path / "mine.yaml").write_text(text)
        for command in (("show", "./mine.yaml"), ("sweep", "recipe=./mine.yaml", "decode.batch=1,2")):
            result = optkit(*command)
            assert result.code == 2
            assert "hydra" in result.err and "mine.yaml" in result.err
    assert not (tmp_path / "outputs").exists()


def test_trap_5_a_recipe_with_a_shipped_name_is_ignored(
    optkit: Optkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra takes the packaged file in silence. Here an ambiguous name is an error that shows both files."""
    mine = tmp_path / "my" / "llama" / "tiny.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("# Mine.\ndefaults:\n  - override /model: llama/tiny\ndecode: {batch: 3}\n")
    monkeypatch.setenv("OPTKIT_RECIPES", str(tmp_path / "my"))
    result = optkit("show", "llama/tiny")
    assert result.code == 2
    assert str(mine) in result.err and str(PACKAGED / "llama/tiny.yaml") in result.err
    assert "batch: [3]" in optkit("show", str(mine)).out
    assert "ambiguous" in optkit("ls").out
    mine.rename(mine.with_name("other.yaml"))
    assert "batch: [3]" in optkit("show", "llama/other").out


def test_trap_6_self_after_recipe_cancels_the_recipe(tmp_path: Path) -> None:
    """With `_self_` behind `recipe`, every value a recipe sets is taken back. Here each one survives composition."""
    for path in PACKAGED.rglob("*.yaml"):
        resolved = resolve(path.relative_to(PACKAGED).with_suffix("").as_posix())
        own = yaml.safe_load(path.read_text())
        for group, section in own.items():
            if group == "defaults":
                for entry in section:
                    ((name, option),) = entry.items()
                    assert f"conf/{name.removeprefix('override /')}/{option}.yaml" in [
                        la.source for la in resolved.layers
                    ]
            else:
                for name, value in section.items():
                    assert resolved.tree[group][name] == value
    defaults = yaml.safe_load((CONF / "config.yaml").read_text())["defaults"]
    assert defaults.index("_self_") < defaults.index({"optional recipe": None})
    mine = tmp_path / "mine.yaml"
    mine.write_text("decode: {batch: 3, context: 77}\nvalidate: {rollout_steps: 7}\nmodel: {seed: 9}\n")
    tree = resolve(str(mine)).tree
    assert (tree["decode"]["batch"], tree["decode"]["context"], tree["model"]["seed"]) == ([3], 77, 9)


def test_trap_7_folders_named_after_values() -> None:
    """Slashes in values nest folders, long lists exceed a file name. Here a folder is a number and a digest."""
    long = "decode.batch=[" + ",".join(["8"] * 300) + "]"
    jobs = expand(["recipe=kimi_k3/tiny,llama/tiny", "model.checkpoint=a/b/c,d/e", long, "export.name=null"])
    assert len(jobs) == 4
    for index, job in enumerate(jobs):
        assert job.index == index
        assert job.folder == f"{index:03d}-{job.digest[:6]}"
        assert "/" not in job.folder and len(job.folder) < 20


def test_trap_8_missing_values_reach_the_program(tmp_path: Path) -> None:
    """Hydra starts a program with `???` in its config. Here every missing key is named, and where to set it."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults:\n  - override /hardware: null\nhardware: {name: mine, sms: 100, registers: '???'}\n")
    with pytest.raises(UserError) as caught:
        resolve(str(mine), ["hardware.smem_kib=99"])
    keys = [p.key for p in caught.value.problems if isinstance(p, Problem)]
    expected = [f"hardware.{f.name}" for f in fields(Hardware) if f.name not in ("name", "sms", "smem_kib")]
    assert sorted(keys) == sorted(expected)
    assert "mine.yaml" in str(caught.value) and "number" in str(caught.value)


def test_one_process_for_all_jobs(tmp_path: Path) -> None:
    """Hydra's basic launcher runs all jobs in one process. Here each job's log names another process."""
    done = child("sweep", "llama/tiny", "decode.batch=1,2", "--until", "model", cwd=tmp_path)
    assert done.code == 0, done.out + done.err
    sweep = (tmp_path / "outputs/sweep/latest").resolve()
    pids = {json.loads((f / "status.json").read_text())["pid"] for f in sweep.iterdir() if f.is_dir()}
    assert len(pids) == 2


def test_files_that_do_not_end_in_yaml_are_ignored(
    optkit: Optkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra does not see .yml. Here the user is told, and none is shipped."""
    assert not [p for p in CONF.rglob("*") if p.is_file() and p.suffix not in (".yaml", ".py", ".pyc")]
    (tmp_path / "mine.yml").write_text("decode: {batch: 1}\n")
    assert ".yaml" in optkit("show", "./mine.yml").err
    monkeypatch.setenv("OPTKIT_RECIPES", str(tmp_path))
    assert "mine.yml" in optkit("ls").err
    result = optkit("show", "mine")
    assert result.code == 2 and "mine.yml" in result.err
