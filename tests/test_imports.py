"""The house rules that a reader relies on (docs/design.md, section 5), checked on the source.

Data flows models -> plan -> emit, execute, verify -> validate -> bench, export -> report and never up; serving needs
neither Hydra nor CuTe DSL; no architecture is named outside models/ and no GPU outside conf/hardware; every module
says what it is for; files stay readable.
"""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "optkit"

PARTS: dict[str, set[str]] = {
    "models": set(),
    "plan": {"models"},
    "emit": {"models", "plan"},
    "execute": {"models", "plan"},
    "verify": {"models", "plan", "emit"},
    "validate": {"models", "plan", "emit", "execute", "verify"},
    "verify.planted": {"models", "plan", "emit", "execute", "verify", "validate", "export"},
    "tune": {"models", "plan", "emit", "execute", "verify", "validate"},
    "bench": {"models", "plan", "emit", "execute", "verify", "verify.planted", "validate", "export"},
    "export": {"models", "plan", "emit", "execute"},
    "report": {"models", "plan", "validate"},
}
"""Which part may import which. Modules directly under optkit/ (the command line) may import every part."""
ANYONE = {"", "checks", "evidence", "errors"}
"""Imported by any part: the package itself (its version), the check record, the evidence types, the error type."""
PATHS = sorted(PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part(path: Path) -> str:
    """The part a file belongs to; "" for modules directly under optkit/ and for steps/, which drives the parts."""
    relative = path.relative_to(PACKAGE)
    if ".".join(relative.parts[:2]) in PARTS:  # planted faults judge all gates: above validate, in a folder of verify
        return ".".join(relative.parts[:2])
    return relative.parts[0] if len(relative.parts) > 1 and relative.parts[0] in PARTS else ""


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(absolute module, line) of every import, also those inside functions."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((a.name, node.lineno) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(p for p in (base, node.module) if p)
            yield module, node.lineno
            if module == "optkit":
                yield from ((f"optkit.{a.name}", node.lineno) for a in node.names)


def test_every_part_is_named_here() -> None:
    folders = {p.name for p in PACKAGE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert folders <= {*PARTS, "conf", "steps"}, "a new part needs its place in the order above"


@pytest.mark.parametrize("path", [p for p in PATHS if part(p)], ids=name)
def test_data_flows_one_way(path: Path) -> None:
    mine = part(path)
    allowed = PARTS[mine] | ANYONE | {mine}
    for module, line in imports(path):
        if module.split(".")[0] == "optkit":
            other = (module.split(".") + [""])[1]
            if ".".join(module.split(".")[1:3]) in PARTS:
                other = ".".join(module.split(".")[1:3])
            if other == "__version__":
                continue
            assert other in allowed, f"{name(path)}:{line}: {mine} must not import optkit.{other}"


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_libraries_stay_where_they_belong(path: Path) -> None:
    """Hydra and OmegaConf: the command line. CuTe DSL: emit. vLLM: export."""
    where = {"hydra": {""}, "omegaconf": {""}, "cutlass": {"emit"}, "vllm": {"export"}}
    for module, line in imports(path):
        top = module.split(".")[0]
        assert part(path) in where.get(top, {part(path)}), f"{name(path)}:{line}: {part(path)} must not import {top}"


def test_every_library_is_declared() -> None:
    """What optkit imports is in pyproject.toml, not just there by luck of another package's needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [r for group in project["optional-dependencies"].values() for r in group]
    declared = {canonicalize_name(Requirement(r).name) for r in [*project["dependencies"], *extras]}
    distributions = {
        **metadata.packages_distributions(),
        "cutlass": ["nvidia-cutlass-dsl"],
    }  # found through a .pth file
    for path in PATHS:
        for module, line in imports(path):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top in ("optkit", "vllm"):  # vLLM loads optkit, never the reverse
                continue
            owners = {canonicalize_name(d) for d in distributions.get(top, [top])}
            assert owners & declared, f"{name(path)}:{line}: {top}"


BLOCKED = """
import importlib, pkgutil, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is not there")

BLOCKED = {blocked!r}
sys.meta_path.insert(0, Block())
import {module}
"""


def import_without(module: str, *blocked: str) -> str:
    """Import a module in a fresh process in which some libraries cannot be imported; its error output."""
    code = BLOCKED.replace("{blocked!r}", repr(set(blocked))).replace("{module}", module)
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False).stderr


def test_serving_needs_neither_hydra_nor_cute_dsl() -> None:
    assert import_without("optkit.export.vllm_plugin", "hydra", "omegaconf", "cutlass", "torch", "vllm") == ""
    for module in ("optkit.export.backend", "optkit.export.manifest", "optkit.export.support"):
        assert import_without(module, "hydra", "omegaconf", "cutlass", "vllm") == ""
    assert "hydra is not there" in import_without("optkit.compose", "hydra"), "the block works"


def test_the_package_itself_is_cheap() -> None:
    assert import_without("optkit", "torch", "hydra", "omegaconf", "numpy", "pydantic", "rich") == ""


@pytest.mark.parametrize("path", PATHS, ids=name)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    doc = ast.get_docstring(tree(path))
    assert doc and len(doc) > 25, f"{name(path)}: no module docstring"


def test_public_names_are_documented() -> None:
    """Every public function and class of a module. (Methods often override what is documented elsewhere.)"""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    bare = [
        f"{name(p)}:{node.lineno}: {node.name}"
        for p in PATHS
        for node in tree(p).body
        if isinstance(node, kinds) and not node.name.startswith("_") and not ast.get_docstring(node)
    ]
    assert not bare, "\n".join(bare)


def test_files_stay_readable() -> None:
    lengths = {name(p): len(p.read_text(encoding="utf-8").splitlines()) for p in PATHS}
    for file, n in lengths.items():
        assert n <= (1300 if "/kernels/" in file else 700), f"{file}: {n} lines"
    assert statistics.median(lengths.values()) <= 250


def literals(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def decisions(path: Path) -> Iterator[tuple[str, int]]:
    """Strings that a comparison, a match case or a prefix test decides on."""
    for node in ast.walk(tree(path)):
        if isinstance(node, (ast.Compare, ast.MatchValue)):
            yield from ((s, node.lineno) for s in literals(node))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("startswith", "endswith")
        ):
            yield from ((s, node.lineno) for s in literals(node))


@pytest.mark.parametrize("path", [p for p in PATHS if part(p) != "models"], ids=name)
def test_no_decision_on_an_architecture_or_a_gpu(path: Path) -> None:
    """A name may be data, a default or a log line; it may not decide anything outside models/ and conf/."""
    families = {p.name for p in (PACKAGE / "conf/model").iterdir() if p.is_dir()}
    gpus = {p.stem for p in (PACKAGE / "conf/hardware").glob("*.yaml")}
    assert {"kimi_k3", "llama"} <= families and "h200" in gpus
    words = {*families, *gpus, "kimi", "sm_90", "sm_100", "sm_103", "hopper", "blackwell"}
    for text, line in decisions(path):
        hit = [w for w in words if w in text.lower()]
        assert not hit, f"{name(path)}:{line}: decides on {text!r}"


def test_top_level_folders_are_links_into_the_package() -> None:
    """`conf/` and `recipes/` are what a reader opens first; the files themselves are in the package."""
    assert (ROOT / "conf").resolve() == PACKAGE / "conf"
    assert (ROOT / "recipes").resolve() == PACKAGE / "conf/recipe"
