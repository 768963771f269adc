"""The audit on kernels compiled here for sm_90a without a GPU: clean ones pass, each defect is found and named."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest

from optkit.checks import Check
from optkit.verify import access, audit, code_faults, elf, sass

pytest.importorskip("cutlass")
MEMORY = Path(__file__).parent / "kernels" / "memory.py"


@pytest.fixture(scope="session")
def cubin_of(tmp_path_factory: pytest.TempPathFactory):
    """Compile a case once per session; returns its bytes."""
    from kernels import cases

    made: dict[tuple[str, bool], bytes] = {}

    def get(name: str, line_info: bool = True) -> bytes:
        if (name, line_info) not in made:
            made[name, line_info] = cases.compile_case(name, tmp_path_factory.mktemp(name), line_info)
        return made[name, line_info]

    return get


def checks(cubin: bytes, **kw) -> dict[str, Check]:
    return {c.name: c for c in audit.audit(cubin, memory=MEMORY, **kw)}


def test_the_clean_kernel_passes_every_check(cubin_of) -> None:
    got = checks(cubin_of("clean"), ceiling=224)
    assert {n: c.status for n, c in got.items()} == dict.fromkeys(audit.NAMES, "pass")
    for word in ("1 ld_act", "2 ld_tag", "1 ld_weight", "1 red_sync", "2 st_act"):
        assert word in got["audit.access"].reason


DEFECTS = {
    "weak_load": ("audit.access", ("LDG.E.128 ", "ld_act_weak", "memory.py:", "a weak access")),
    "nc_load": ("audit.access", ("LDG.E.128.CONSTANT", "ld_act_nc", "CONSTANT")),
    "cta_scope": ("audit.access", ("STRONG.SM", "ld_act_cta", "scope SM")),
    "weak_store": ("audit.access", ("STG.E.128 ", "st_act_weak", "a weak access")),
    "nc_input": ("audit.access", ("LDG.E.CONSTANT", "ld_input_nc")),
    "unmapped": ("audit.access", ("cases.py:", "outside the helpers of memory.py")),
    "wrong_helper": ("audit.access", ("lds_but_global", "no memory class")),
    "generic": ("audit.access", ("LD.E.128", "generic")),
    "split_tag": ("audit.access", ("ld_tag_split", "one access of 128 bits")),
    "hoisted": ("audit.guarded", ("ld_act_v4", "reached without a wait")),
    "hoisted_in_loop": ("audit.guarded", ("ld_act_v4", "reached without a wait")),
    "early_store": ("audit.guarded", ("st_act_v4", "+0x1000", "reached without a wait")),
    "inside_wait": ("audit.guarded", ("ld_act_v4", "reached without a wait")),
    "no_loop": ("audit.guarded", ("ld_act_v4", "reached without a wait")),
    "other_branch": ("audit.guarded", ("+0x40", "reached without a wait")),
    "acquire_unfenced": ("audit.fences", ("ld_sync_acquire_unfenced", "no CCTL.IVALL")),
    "release_unfenced": ("audit.fences", ("red_sync_release_unfenced", "MEMBAR")),
    "bulk_without_proxy_fence": ("audit.fences", ("bulk_act", "fence.proxy.async")),
    "local_array": ("audit.local_memory", ("stack frame", "STL")),
}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_turns_exactly_its_check_red(cubin_of, name: str) -> None:
    got = checks(cubin_of(name))
    check, words = DEFECTS[name]
    assert [n for n, c in got.items() if c.status == "fail"] == [check]
    for word in words:
        assert word in got[check].reason, got[check].reason


def test_without_line_information_nothing_is_believed(cubin_of) -> None:
    got = checks(cubin_of("clean", line_info=False))
    assert got["audit.access"].status == "fail"
    assert "no line information" in got["audit.access"].reason


def test_the_ceiling_of_the_plan_holds(cubin_of) -> None:
    got = checks(cubin_of("clean"), ceiling=8)["audit.registers"]
    assert got.status == "fail" and got.value > 8 and got.threshold == 8
    from hand_plans import toy

    got = checks(cubin_of("clean"), plan=toy())["audit.registers"]
    assert "compiled for 128 threads, the Plan says 288" in got.reason
    assert checks(cubin_of("clean"), plan=replace(toy(), threads=128))["audit.registers"].status == "pass"


def test_faults_planted_in_the_code_are_caught(cubin_of) -> None:
    results = code_faults.plant(cubin_of("clean"), MEMORY)
    assert {f.name: caught for f, caught in results} == {f.name: True for f in code_faults.FAULTS}


def test_catch_rate_reports_what_it_misses(cubin_of, monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_faults.catch_rate(cubin_of("clean"), MEMORY).status == "pass"
    monkeypatch.setattr(
        code_faults, "FAULTS", (code_faults.CodeFault("harmless", "audit.access", lambda code, at: True),)
    )
    missed = code_faults.catch_rate(cubin_of("clean"), MEMORY)
    assert missed.status == "fail" and "harmless" in missed.reason


@pytest.mark.parametrize("broken", [b"", b"not a cubin", b"\x7fELF\x02" + bytes(100)])
def test_what_is_no_cubin_fails_every_check(broken: bytes) -> None:
    got = audit.audit(broken, memory=MEMORY)
    assert [c.name for c in got] == list(audit.NAMES)
    assert all(c.status == "fail" and "nothing could be audited" in c.reason for c in got)


def test_a_truncated_cubin_fails(cubin_of) -> None:
    assert all(c.status == "fail" for c in audit.audit(cubin_of("clean")[:3000], memory=MEMORY))


def test_resources_agree_with_the_disassembly(cubin_of) -> None:
    (figures,) = elf.resources(cubin_of("clean"))
    (f,) = sass.disassemble(cubin_of("clean"))
    named = {int(r) for i in f.code for r in re.findall(r"\bR(\d+)\b", i.operands)}
    assert figures.name == f.name and figures.threads == 128
    assert max(named) < figures.registers <= 64
    assert elf.resources(cubin_of("local_array"))[0].frame >= 256


def test_missing_nvdisasm_says_what_to_install(cubin_of, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cubin = cubin_of("clean")
    monkeypatch.delenv("NVDISASM", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    sass.disassemble.cache_clear()
    got = audit.audit(cubin, memory=MEMORY)
    assert all("install nvidia-cuda-nvdisasm" in c.reason for c in got)


def test_the_kernels_own_helpers_all_have_a_class() -> None:
    """Every function of the real helper file that names global memory in its PTX belongs to a class."""
    if not audit.MEMORY.is_file():
        pytest.skip("the kernels are not there")
    table = access.helpers(audit.MEMORY)
    assert len(table) > 20
    for h in table:
        if ".global" in h.ptx:
            assert h.klass, f"{h.name} touches global memory and has no class"
    assert {h.klass for h in table} >= {"ld_act", "st_act", "ld_weight", "ld_tag", "ld_sync", "red_sync", "bulk_weight"}
    assert all(h.acquires for h in table if h.name.startswith("ld_sync_acquire"))


def test_the_megakernel_passes_and_its_own_planted_faults_are_caught() -> None:
    compiler = pytest.importorskip("optkit.emit.compile")
    from test_proofs import planned

    plan = planned("llama_tiny")
    kernel = compiler.compile_kernel(compiler.KernelSpec.of(plan))
    got = audit.audit(kernel.cubin, plan)
    assert {c.name: c.status for c in got} == dict.fromkeys(audit.NAMES, "pass"), got
    caught = code_faults.plant(kernel.cubin)
    assert len(caught) == len(code_faults.FAULTS) and all(hit for _, hit in caught), caught
