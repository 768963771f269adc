"""The kernel compiles without a GPU, its launch facts hold, the audit accepts it, and a weak load makes the audit red."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.emit import compile as C
from optkit.emit import layout as L
from optkit.verify.audit import audit
from tests.emit.test_lower import graph_of, plan_of

SPEC = C.KernelSpec(132, 4, 16896, ("gemv", "ew"), True)


@pytest.fixture(scope="module")
def small() -> C.Kernel:
    return C.compile_kernel(SPEC)


def test_launch_facts(small: C.Kernel) -> None:
    assert small.name.startswith(C.KERNEL_PREFIX)
    assert f".entry {small.name}(" in small.ptx
    assert ".target sm_90a" in small.ptx
    assert f".reqntid {L.THREADS}" in small.ptx
    assert small.cubin[:4] == b"\x7fELF"
    assert C.smem_of(SPEC) <= 227 * 1024


def test_audit_accepts_it(small: C.Kernel) -> None:
    checks = audit(small.cubin)
    assert checks and all(c.status == "pass" for c in checks), [c for c in checks if c.status != "pass"]


def test_same_specification_same_bytes(small: C.Kernel) -> None:
    assert C.compile_kernel(SPEC).cubin == small.cubin


def test_cache_returns_the_kernel_and_refuses_a_damaged_one(small: C.Kernel, tmp_path: Path) -> None:
    first = C.compile_cached(SPEC, "sm_90a", tmp_path)
    again = C.compile_cached(SPEC, "sm_90a", tmp_path)
    assert again == first and again.cached and not first.cached, "the evidence says which compile time is an old one"
    at = next(tmp_path.rglob("kernel.cubin"))
    at.write_bytes(at.read_bytes()[:-1] + b"\0")
    assert C.compile_cached(SPEC, "sm_90a", tmp_path).cubin == small.cubin


def test_depth_does_not_change_the_kernel() -> None:
    """Code size must not grow with depth: nine layers and the real two-layer slice of a rank need the same kind of spec."""
    graph = graph_of("llama_tiny")
    whole = plan_of(graph)
    part = plan_of(graph_of("llama_tiny", layers=(0, 2)))
    assert C.KernelSpec.of(whole).bodies == C.KernelSpec.of(part).bodies
    assert len(whole.stages) > len(part.stages)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
def test_other_architectures(arch: str) -> None:
    assert f".target {arch}" in C.compile_kernel(SPEC, arch, line_info=False).ptx
