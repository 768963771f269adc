"""Wheel and sdist carry every data file: built here, installed elsewhere, used from another folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "optkit"
BUILD = "import os, sys; os.chdir(sys.argv[1]); from setuptools import build_meta; print(getattr(build_meta, sys.argv[2])(sys.argv[3]))"


def build(source: Path, kind: str, out: Path) -> Path:
    """`build_wheel` or `build_sdist` by the build backend itself: no network, no isolation."""
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(source), kind, str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def data_files(names: list[str]) -> set[str]:
    """Package files that are not Python."""
    inside = [n for n in names if n.startswith("optkit/") and not n.endswith("/")]
    return {n for n in inside if not n.endswith((".py", ".pyc")) and "__pycache__" not in n}


def source_data() -> set[str]:
    return data_files([p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob("*") if p.is_file()])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel, sdist, and the wheel made from the sdist, of a copy of the source (building writes into it)."""
    tmp = tmp_path_factory.mktemp("package")
    source = tmp / "source"
    source.mkdir()
    for file in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / file, source)
    shutil.copytree(PACKAGE, source / "optkit", ignore=shutil.ignore_patterns("__pycache__"))
    sdist = build(source, "build_sdist", tmp / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp / "unpacked", filter="data")
    (unpacked,) = (tmp / "unpacked").iterdir()
    return {
        "sdist": sdist,
        "wheel": build(source, "build_wheel", tmp / "wheel"),
        "again": build(unpacked, "build_wheel", tmp / "again"),
    }


@pytest.mark.parametrize("kind", ["wheel", "again"])
def test_the_wheel_has_every_file(built: dict[str, Path], kind: str) -> None:
    names = zipfile.ZipFile(built[kind]).namelist()
    assert data_files(names) == source_data()
    modules = {n for n in names if n.startswith("optkit/") and n.endswith(".py")}
    assert modules == {p.relative_to(ROOT).as_posix() for p in PACKAGE.rglob("*.py")}
    assert [n for n in names if n.endswith("licenses/LICENSE")]
    assert {n.split("/")[0] for n in names if not n.startswith("optkit-")} == {"optkit"}, "nothing else is installed"


def test_the_source_has_the_files_this_test_is_about() -> None:
    names = source_data()
    assert "optkit/conf/recipe/kimi_k3/tiny.yaml" in names and "optkit/models/configs/kimi_k3.json" in names
    assert any(n.startswith("optkit/report/templates/") for n in names)


def test_an_installed_wheel_works_from_elsewhere(built: dict[str, Path], tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(built["wheel"]),
    ]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OPTKIT_RECIPES")}

    def optkit(*args: str, codes: tuple[int, ...] = (0,)) -> str:
        command = [sys.executable, str(site / "bin/optkit"), *args]
        done = subprocess.run(
            command, cwd=elsewhere, env={**env, "PYTHONPATH": str(site)}, capture_output=True, text=True, check=False
        )
        assert done.returncode in codes, done.stdout + done.stderr
        return done.stdout

    expected = sorted(
        p.relative_to(PACKAGE / "conf/recipe").with_suffix("").as_posix()
        for p in PACKAGE.rglob("conf/recipe/**/*.yaml")
    )
    assert [line.split()[0] for line in optkit("ls").splitlines()] == expected
    for recipe in expected:
        assert f"# conf/recipe/{recipe}.yaml" in optkit("show", recipe)
    doctor = optkit("doctor", codes=(0, 1)).splitlines()
    assert f"{site}" in next(line for line in doctor if line.startswith("optkit "))
    wrong = [line.split()[0] for line in doctor if line.split()[1] == "problem"]
    assert wrong in ([], ["distribution"]), "it is installed twice where the tests' environment has it too"
    assert list(elsewhere.iterdir()) == []


def test_entry_points(built: dict[str, Path]) -> None:
    wheel = zipfile.ZipFile(built["wheel"])
    (name,) = [n for n in wheel.namelist() if n.endswith("entry_points.txt")]
    text = wheel.read(name).decode()
    assert "[console_scripts]\noptkit = optkit.app:main" in text
    assert "[vllm.general_plugins]\noptkit = optkit.export.vllm_plugin:register" in text
    assert "[vllm.stat_logger_plugins]\noptkit = optkit.export.vllm_foreign:Foreign" in text
