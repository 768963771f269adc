"""The `optkit` command: what it prints, its exit codes, and that bad input leaves nothing behind."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from commands import ROOT, Result, child

from optkit.app import COMMANDS
from optkit.compose import resolve
from optkit.locate import PACKAGED

Optkit = Callable[..., Result]


def test_ls_is_quick_and_lists_every_recipe(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = child("ls", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime  # CPU time: others share the machine
    names = sorted(p.relative_to(PACKAGED).with_suffix("").as_posix() for p in PACKAGED.rglob("*.yaml"))
    assert [line.split()[0] for line in result.out.splitlines()] == names
    assert all(len(line.split(maxsplit=1)) == 2 for line in result.out.splitlines())
    assert seconds < 1


def test_ls_loads_nothing_heavy(tmp_path: Path) -> None:
    """The reason why it is quick: neither Hydra nor torch is imported."""
    code = "import sys; from optkit.app import main; main(['ls']); print({'hydra','torch','rich'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.endswith("set()\n")


def test_help_shows_every_command_with_an_example(optkit: Optkit) -> None:
    for args in ((), ("--help",), ("-h",), ("help",)):
        result = optkit(*args)
        assert result.code == 0
        assert all(f"optkit {name}" in result.out for name in COMMANDS)
    for name in COMMANDS:
        shown = child(name, "--help", cwd=Path.cwd())
        assert shown.code == 0 and f"optkit {name}" in shown.out, shown
        assert shown.err == ""


def test_show_is_a_loadable_recipe_with_sources(optkit: Optkit, tmp_path: Path) -> None:
    result = optkit("show", "kimi_k3/tiny", "decode.batch=4")
    tree = resolve("kimi_k3/tiny", ["decode.batch=4"]).tree
    assert yaml.safe_load(result.out) == tree
    lines = {line.strip().split(":")[0]: line for line in result.out.splitlines()}
    assert lines["batch"].endswith("# command line")
    assert lines["context"].endswith("# conf/recipe/kimi_k3/tiny.yaml")
    assert lines["sms"].endswith("# conf/tune/default.yaml")
    assert lines["checkpoint"].endswith("# schema default")
    (tmp_path / "again.yaml").write_text(result.out)
    assert yaml.safe_load(optkit("show", "./again.yaml").out) == tree, "what show prints is a recipe"


def test_why_shows_every_layer(optkit: Optkit) -> None:
    lines = optkit("show", "kimi_k3/tiny", "decode.batch=4", "--why", "decode.batch").out.splitlines()
    assert len(lines) == 3
    assert lines[-1] == "-> decode.batch: [4]  (command line)"
    assert "conf/decode/default.yaml" in lines[0] and "conf/recipe/kimi_k3/tiny.yaml" in lines[1]
    wrong = optkit("show", "kimi_k3/tiny", "--why", "decode.bach")
    assert wrong.code == 2 and "'decode.batch'" in wrong.err


@pytest.mark.parametrize("name", ["kimi_k3/tiny", "llama/tiny", "kimi_k3/h200_tp8_slice"])
def test_a_copy_is_the_same_recipe(optkit: Optkit, tmp_path: Path, name: str) -> None:
    assert optkit("cp", name, "mine.yaml").code == 0
    assert resolve("./mine.yaml").digest == resolve(name).digest
    again = optkit("cp", name, "mine.yaml")
    assert again.code == 2 and "exists" in again.err
    assert optkit("cp", name, "mine.yml").code == 2
    assert optkit("cp", name, "nowhere/mine.yaml").code == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.yaml"]


def test_same_digest_from_anywhere(tmp_path: Path) -> None:
    """From /, beside a foreign conf/config.yaml, by name and by path."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text("decode: {batch: [7]}\n")
    expected = resolve("llama/tiny").digest
    for cwd in (tmp_path, Path("/")):
        for target in ("llama/tiny", str(PACKAGED / "llama/tiny.yaml")):
            assert f"# digest {expected}" in child("show", target, cwd=cwd).out


BAD = {
    "unknown recipe": (("run", "kimi_k3/tny"), ["kimi_k3/tny", "did you mean 'kimi_k3/tiny'"]),
    "missing file": (("run", "./none.yaml"), ["./none.yaml", "no such file"]),
    "misspelt key": (("run", "llama/tiny", "decode.bach=4"), ["decode.bach", "4", "did you mean 'decode.batch'"]),
    "misspelt group": (("run", "llama/tiny", "synk=tagged"), ["synk", "tagged", "did you mean 'sync'"]),
    "misspelt choice": (("run", "llama/tiny", "sync=taged"), ["sync", "taged", "did you mean 'tagged'"]),
    "misspelt option": (("run", "llama/tiny", "--unitl", "plan"), ["--unitl", "did you mean '--until'"]),
    "misspelt command": (("rnu", "llama/tiny"), ["rnu", "did you mean 'run'"]),
    "plus": (("run", "llama/tiny", "+decode.batch=4"), ["+decode.batch=4"]),
    "wrong type": (("run", "llama/tiny", "decode.context=long"), ["decode.context", "long", "int"]),
    "batch 0": (("run", "llama/tiny", "decode.batch=0"), ["decode.batch", "0", "1 to 8"]),
    "context beyond the model": (
        ("run", "llama/tiny", "decode.context=99999999"),
        ["decode.context", "99999999", "llama"],
    ),
    "tp does not divide": (("run", "kimi_k3/tiny", "parallel.tp=3"), ["parallel.tp", "3", "heads"]),
    "layers outside": (("run", "llama/tiny", "model.layers=[0,99]"), ["model.layers", "99"]),
    "foreign family": (("run", "llama/tiny", "model.config=kimi_k3_tiny"), ["model.family", "llama", "kimi_k3"]),
    "unknown config": (("run", "llama/tiny", "model.config=lama_tiny"), ["model.config", "lama_tiny", "llama_tiny"]),
    "missing config": (("run", "llama/tiny", "model.config=./x.json"), ["model.config", "./x.json"]),
    "too large": (("run", "kimi_k3/h200_tp8"), ["198.1 GB", "141", "h200"]),
    "epsilon": (("run", "llama/tiny", "model.qk_lora_norm_eps=1e-5"), ["model.qk_lora_norm_eps"]),
    "idle pattern": (("check", "./idle.yaml"), ["sync.overrides.nothing*"]),
    "several values": (("run", "llama/tiny", "decode.batch=1,2"), ["decode.batch", "optkit sweep"]),
    "unreadable override": (("run", "llama/tiny", "decode.batch=["), ["decode.batch=["]),
    "syntax error": (("run", "./broken.yaml"), ["broken.yaml:2:"]),
    "a list": (("run", "./list.yaml"), ["list.yaml", "mapping"]),
    "no recipe": (("decode.batch=4",), ["recipe"]),
    "no recipe to run": (("run",), ["required: RECIPE"]),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_exit_2_and_nothing_written(optkit: Optkit, tmp_path: Path, case: str) -> None:
    (tmp_path / "broken.yaml").write_text("decode: {batch: [1\nmodel: {}\n")
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "idle.yaml").write_text(
        "defaults: [{override /model: llama/tiny}]\nsync:\n  overrides: {'nothing*': tagged}\n"
    )
    before = sorted(tmp_path.rglob("*"))
    args, expected = BAD[case]
    result = optkit(*args)
    assert result.code == 2, result
    lines = result.err.splitlines()
    assert all(line.startswith("error: ") for line in lines)
    assert case != "no recipe to run" or "KEY=VALUE" not in result.err, "overrides are not required"
    if case != "tp does not divide":  # one line per dimension that 3 does not divide
        assert len(lines) == 1, lines
    for text in expected:
        assert text in result.err
    assert "Traceback" not in result.err + result.out
    assert sorted(tmp_path.rglob("*")) == before


def test_run_writes_its_folder(optkit: Optkit, tmp_path: Path) -> None:
    for args in (
        ("run", "llama/tiny", "decode.batch=2", "--until", "plan"),
        ("run", "recipe=llama/tiny", "decode.batch=2", "--until", "plan"),
        ("recipe=llama/tiny", "decode.batch=2", "--until", "plan"),
    ):
        result = optkit(*args)
        assert result.code == 0, result.err
        run = (tmp_path / "outputs/llama/tiny/latest").resolve()
        digest = resolve("llama/tiny", ["decode.batch=2"]).digest
        assert run.name.rsplit("-", 1)[-1] == digest[:6] or digest[:6] in run.name
        assert yaml.safe_load((run / "recipe.yaml").read_text())["decode"]["batch"] == [2]
        assert yaml.safe_load((run / "overrides.yaml").read_text()) == ["decode.batch=2"]
        status = json.loads((run / "status.json").read_text())
        assert (status["status"], status["digest"]) == ("passed", digest)
        assert "step plan" in (run / "log.txt").read_text()
        assert json.loads((run / "plan.json").read_text())
        assert str(run.relative_to(tmp_path)) in result.out and "verdict:" in result.out
        assert not [p for p in run.rglob(".*")], "no temporary file is left"
        assert not (run / "error.txt").exists()
    assert len(list((tmp_path / "outputs/llama/tiny").iterdir())) == 4


def test_check_writes_nothing(optkit: Optkit, tmp_path: Path) -> None:
    result = optkit("check", "llama/tiny")
    assert result.code == 0, result
    assert "llama/tiny: ok" in result.out
    assert list(tmp_path.iterdir()) == []


def test_doctor_writes_nothing(optkit: Optkit, tmp_path: Path) -> None:
    result = optkit("doctor")
    for word in ("python", "torch", "hydra-core", "gpu", "nvdisasm", "vllm", "plugin"):
        assert any(line.startswith(word) for line in result.out.splitlines()), word
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from optkit import doctor

    point = metadata.EntryPoint("optkit", "optkit.export.vllm_plugin:register", doctor.GROUP)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point, point])
    monkeypatch.setattr(doctor, "PYTHONS", ((3, 9),))
    monkeypatch.setattr(doctor, "_requirement", lambda name: "<0.1" if name == "torch" else "")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    found = {f.name: f.state for f in doctor.findings()}
    assert {k for k, v in found.items() if v == "problem"} == {"python", "torch", "plugin", "VLLM_PLUGINS"}
    assert doctor.doctor() == 1


@pytest.mark.parametrize("override", ["decode=null", "fusion=null"])
def test_no_option_is_no_choice_on_the_command_line(optkit: Optkit, override: str) -> None:
    """In a recipe's defaults list null leaves every key to the recipe; Hydra itself cannot read it here."""
    result = optkit("check", "llama/tiny", override)
    assert result.code == 2 and result.err.startswith(f"error: {override.split('=')[0]} = 'null': expected one of ")


def test_a_bad_checkpoint_is_refused_before_anything_is_built(optkit: Optkit, tmp_path: Path) -> None:
    for command in (("check", "llama/tiny"), ("run", "llama/tiny", "--outputs", str(tmp_path / "o"), "--plain")):
        result = optkit(*command, f"model.checkpoint={tmp_path / 'none'}")
        assert result.code == 2 and "config.json: missing" in result.err
        assert "2/" not in result.out, "the plan was made first"
    assert not (tmp_path / "o").exists()


def test_a_folder_that_cannot_be_written_is_one_line(optkit: Optkit, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = optkit("run", "llama/tiny", "--outputs", str(tmp_path / "file" / "o"), "--until", "check", "--plain")
    assert result.code == 2 and len(result.err.splitlines()) == 1 and str(tmp_path) in result.err


def test_hints_name_another_option_than_the_one_given(optkit: Optkit) -> None:
    result = optkit("run", "llama/tiny", "--outputs")
    assert result.code == 2 and "did you mean" not in result.err


def test_paths_with_spaces_and_other_letters(optkit: Optkit, tmp_path: Path) -> None:
    folder = tmp_path / "ä ö 目"
    folder.mkdir()
    mine = folder / "mein rezept ü.yaml"
    assert optkit("cp", "llama/tiny", str(mine)).code == 0
    assert optkit("checkpoint", "llama_tiny", str(folder / "gewichte ü")).code == 0
    assert optkit("check", str(mine), f"model.checkpoint='{folder / 'gewichte ü'}'", "--plain").code == 0
    unquoted = optkit("check", str(mine), f"model.checkpoint={folder / 'gewichte ü'}")
    assert unquoted.code == 2 and "quote the value: model.checkpoint='...'" in unquoted.err
