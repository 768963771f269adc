"""The evidence schema: what it refuses, what the verdict says, merging and re-verification."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optkit import evidence as ev
from optkit.evidence import Check


def record(cubin: Path, *checks: Check, time: str = "2026-01-01T00:00:00+00:00", **kw: Any) -> ev.HardwareRecord:
    return ev.HardwareRecord(cubin_sha256=ev.sha256(cubin), gpu="NVIDIA H200", driver="580.1", time=time,
                             command="optkit run hand/made", checks=checks, **kw)


@pytest.mark.parametrize(("arguments", "says"), [
    (("x", "not_run"), "needs a reason"), (("x", "not_run", None, None, "  "), "needs a reason"),
    (("x", "not_run", None, None, "it takes long"), "must name the GPU"), (("x", "fail", 3), "needs a reason"),
    (("x", "skipped"), "'pass', 'fail' or 'not_run'"), (("", "pass"), "needs a name"),
    (("x", "pass", float("nan")), "finite"),
])
def test_check_refuses(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Check(*arguments)


def test_check_is_frozen_and_keeps_types() -> None:
    c = Check("x", "pass", 3, 2.0 ** -9)
    assert (type(c.value), type(c.threshold)) == (int, float)
    with pytest.raises(Exception, match="frozen|cannot assign"):
        c.status = "fail"  # type: ignore[misc]


def test_verdict() -> None:
    ok, bad = Check("a", "pass"), Check("b", "fail", 3, 2, "too large")
    gpu = Check("c", "not_run", reason="needs a GPU")
    assert ev.verdict([ok]) == "verified"
    assert ev.verdict([ok, gpu, gpu]) == "verified except hardware (2)"
    assert ev.verdict([ok, gpu, bad]) == "failed (1)"
    with pytest.raises(ev.EvidenceError, match="no checks"):
        ev.verdict([])


def test_round_trip_and_every_byte_counts(run_dir: Path, checks: list[Check], prov: ev.Provenance,
                                          numerics: list[ev.StageNumerics]) -> None:
    bundle = ev.bundle(checks, prov, numerics=numerics, scope={"batch": [1, 8]}, not_covered=["prefill"])
    ev.write(run_dir / "evidence.json", bundle)
    assert ev.load(run_dir) == bundle
    data = json.loads((run_dir / "evidence.json").read_text())
    assert list(data)[:2] == ["schema", "verdict"] and data["schema"] == "optkit-evidence/1"
    assert set(data["checks"][0]) == {"name", "status", "value", "threshold", "reason", "repeat"}
    assert all(c["repeat"] for c in data["checks"])
    assert not list(run_dir.glob(".evidence*"))


@pytest.mark.parametrize(("change", "says"), [
    (lambda d: d.update(verdict="verified"), "does not follow"),
    (lambda d: d.update(schema="optkit-evidence/2"), "expected 'optkit-evidence/1'"),
    (lambda d: d.update(note="x"), "note"),
    (lambda d: d["checks"][0].update(status="not_run"), "checks.0.*needs a reason"),
    (lambda d: d["checks"].append(d["checks"][0]), "two checks"),
    (lambda d: d["checks"][0].update(repeat=""), "no command"),
    (lambda d: d["numerics"][3].update(max=1.0), "numerics.3.*status pass"),
    (lambda d: d["numerics"][3].update(median="NaN"), "numerics.3.*status pass"),
    (lambda d: d["numerics"][3].update(max=1.0, status="fail"), "outside its error limits"),
    (lambda d: d["numerics"][3].update(status="fail"), "numerics.3.*status fail"),
    (lambda d: d["numerics"][3].update(max_limit=0.0), "numerics.3.max_limit"),
    (lambda d: d["numerics"][3].pop("band_max"), "numerics.3.band_max"),
    (lambda d: d["provenance"].pop("recipe_digest"), "provenance.recipe_digest"),
])
def test_load_refuses_tampered_evidence(run_dir: Path, checks: list[Check], prov: ev.Provenance, change: Any, says: str,
                                        numerics: list[ev.StageNumerics]) -> None:
    data = json.loads(ev.bundle(checks, prov, numerics=numerics).to_json())
    change(data)
    (run_dir / "evidence.json").write_text(json.dumps(data))
    with pytest.raises(ev.EvidenceError, match=says) as e:
        ev.load(run_dir)
    assert "\n" not in str(e.value) and "evidence.json" in str(e.value)


def test_records_of_other_parts_are_taken(prov: ev.Provenance) -> None:
    @dataclass
    class Row:
        stage: str
        n: int
        median: float
        max: float
        band_median: float
        band_max: float
        status: str

    @dataclass
    class Gate:
        name: str
        status: str
        value: Any = None
        threshold: Any = None
        reason: str = ""
        repeat: str = ""
        step: str = ""

    got = ev.bundle([Gate("a.b", "pass", np.float32(0.5), (1, 2))], prov,
                    numerics=[Row("kda:og", 9, 0.001, 0.003, 0.0, 0.004, "pass")])
    assert got.checks == (Check("a.b", "pass", 0.5, "(1, 2)", "", prov.command),)
    row = got.numerics[0]
    assert (row.median_limit, row.max_limit) == (1.25 * 2 ** -9, 2 * 0.004), "a band counts at least 2^-9"
    assert row.share == pytest.approx(0.001 / (1.25 * 2 ** -9))
    with pytest.raises(ValueError, match="status pass, but it uses 1.5 of its limits"):
        ev.bundle([Gate("a.b", "pass")], prov, numerics=[Row("kda:og", 9, 0.001, 0.012, 0.0, 0.004, "pass")])


def test_failed_write_leaves_the_old_file(run_dir: Path, checks: list[Check], prov: ev.Provenance,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_dir / "evidence.json"
    ev.write(path, ev.bundle(checks[:1], prov))
    before = path.read_bytes()

    def full_disk(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ev.os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        ev.write(path, ev.bundle(checks, prov))
    assert path.read_bytes() == before and not list(run_dir.glob(".evidence*"))


def test_merge_adds_hardware(run_dir: Path, checks: list[Check], prov: ev.Provenance) -> None:
    base = ev.bundle(checks, prov)
    cubin = run_dir / "artifact" / "step.cubin"
    good = record(cubin, Check("gpu/rollout", "pass", 64, 64), Check("gpu/replay", "pass", 10, 10))
    merged = ev.merge(base, [good])
    assert base.verdict == "verified except hardware (1)" and merged.verdict == "verified"
    by_name = {c.name: c for c in merged.checks}
    assert by_name["gpu/rollout"].value == 64 and "H200" in by_name["gpu/rollout"].reason
    assert by_name["gpu/replay"].repeat == "optkit run hand/made"
    assert ev.merge(merged, [good]) == merged
    assert ev.Bundle.model_validate_json(merged.to_json()) == merged
    bad = record(cubin, Check("gpu/rollout", "fail", 3, 64, "token 3 differs"))
    assert ev.merge(base, [bad]).verdict == "failed (1)"


def test_the_newest_hardware_result_counts(run_dir: Path, checks: list[Check], prov: ev.Provenance) -> None:
    cubin = run_dir / "artifact" / "step.cubin"
    old = record(cubin, Check("gpu/rollout", "fail", 3, 64, "token 3 differs"), time="2026-01-01T00:00:00+00:00")
    new = record(cubin, Check("gpu/rollout", "pass", 64, 64), time="2026-02-01T00:00:00+00:00")
    base = ev.bundle(checks, prov)
    assert ev.merge(base, [old, new]).verdict == ev.merge(base, [new, old]).verdict == "verified"
    assert len(ev.merge(ev.merge(base, [new]), [old]).hardware) == 2


def test_merge_refuses_another_cubin(run_dir: Path, checks: list[Check], prov: ev.Provenance) -> None:
    base = ev.bundle(checks, prov)
    (run_dir / "artifact" / "step.cubin").write_bytes(b"\x7fELF two")
    with pytest.raises(ev.EvidenceError, match="this run has artifact/step.cubin"):
        ev.merge(base, [record(run_dir / "artifact" / "step.cubin", Check("gpu/rollout", "pass"))])


def test_two_kernels_need_two_records(run_dir: Path, checks: list[Check]) -> None:
    second = run_dir / "artifact" / "step8.cubin"
    second.write_bytes(b"\x7fELF eight")
    prov = ev.provenance(recipe="r", recipe_digest="a", plan_digest="b", root=run_dir,
                         files=(run_dir / "artifact").glob("*"))
    base = ev.bundle(checks, prov)
    one = ev.merge(base, [record(run_dir / "artifact" / "step.cubin", Check("gpu/rollout", "pass", 64, 64))])
    assert one.verdict == "verified except hardware (1)"
    assert "1 of 2 kernels" in {c.name: c for c in one.checks}["gpu/rollout"].reason
    assert ev.merge(one, [record(second, Check("gpu/rollout", "pass", 64, 64))]).verdict == "verified"


def test_merge_seals_the_artifact_and_can_be_repeated(run_dir: Path, checks: list[Check], prov: ev.Provenance) -> None:
    ev.write(run_dir / "evidence.json", ev.bundle(checks, prov))
    hardware = record(run_dir / "artifact" / "step.cubin", Check("gpu/rollout", "pass", 64, 64))

    def seal(folder: Path, merged: ev.Bundle) -> list[str]:
        (folder / ev.MANIFEST).write_text(json.dumps({"verdict": {"status": merged.verdict, "not_run": 0}, "by": hardware.digest}))
        return [ev.MANIFEST]

    def power_cut(folder: Path, merged: ev.Bundle) -> list[str]:
        seal(folder, merged)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ev.merge_run(run_dir, [hardware], power_cut)
    assert ev.load(run_dir).verdict == "verified except hardware (1)"
    with pytest.raises(ev.EvidenceError, match="manifest.json: content differs"):
        ev.merge_run(run_dir, [hardware])
    assert ev.merge_run(run_dir, [hardware], seal).verdict == "verified"
    assert ev.verdict(ev.reverify(run_dir)) == "verified"


def test_compile_probes_need_no_hardware(run_dir: Path, checks: list[Check]) -> None:
    (run_dir / "probe_sm_100a.cubin").write_bytes(b"probe")
    prov = ev.provenance(recipe="r", recipe_digest="a", plan_digest="b", root=run_dir, files=run_dir.rglob("*.cubin"))
    assert set(ev.bundle(checks, prov).cubins) == {"artifact/step.cubin"} < set(prov.files)


def test_hardware_record_holds_only_what_ran(run_dir: Path) -> None:
    with pytest.raises(ValueError, match="only checks that ran"):
        record(run_dir / "artifact" / "step.cubin", Check("gpu/x", "not_run", reason="no GPU"))


def all_passed(bundle: ev.Bundle) -> ev.Bundle:
    """Consistent in itself, but not what the artifact says: nothing was left for the hardware."""
    passed = tuple(Check(c.name, "pass", 0, 0, "", c.repeat) if c.status == "not_run" else c for c in bundle.checks)
    return bundle.model_copy(update={"checks": passed, "verdict": "verified"})


def test_what_cannot_be_read_is_said_in_one_line(run_dir: Path) -> None:
    (run_dir / "evidence.json").mkdir()
    with pytest.raises(ev.EvidenceError, match="cannot be read"):
        ev.load(run_dir)
    (run_dir / "evidence.json").rmdir()
    (run_dir / "evidence.json").write_text("[" * 200_000)
    with pytest.raises(ev.EvidenceError, match="not JSON"):
        ev.load(run_dir)


@pytest.mark.parametrize(("damage", "name"), [
    (lambda d: (d / "artifact" / "step.cubin").write_bytes(b"\x7fELF onE"), "digest/artifact/step.cubin"),
    (lambda d: (d / "artifact" / "manifest.json").unlink(), "digest/artifact/manifest.json"),
    (lambda d: (d / "artifact" / "extra.so").write_bytes(b"x"), "digest/artifact"),
    (lambda d: (d / "plan.json").write_text('{"plan":2}'), "digest/plan"),
    (lambda d: ev.write(d / "evidence.json", all_passed(ev.load(d))), "digest/verdict"),
])
def test_reverify_finds_damage(run_dir: Path, checks: list[Check], prov: ev.Provenance, damage: Any, name: str) -> None:
    ev.write(run_dir / "evidence.json", ev.bundle(checks, prov))
    assert ev.verdict(ev.reverify(run_dir)) == "verified"
    damage(run_dir)
    assert name in {c.name for c in ev.reverify(run_dir) if c.status == "fail"}


def test_reverify_does_not_follow_paths_out(run_dir: Path, checks: list[Check], prov: ev.Provenance) -> None:
    outside = run_dir.parent / "outside.txt"
    outside.write_text("x")
    files = {"../outside.txt": ev.sha256(outside), **prov.files}
    ev.write(run_dir / "evidence.json", ev.bundle(checks, prov.model_copy(update={"files": files})))
    assert {c.name for c in ev.reverify(run_dir) if c.status == "fail"} == {"digest/../outside.txt"}


def test_command_line(run_dir: Path, checks: list[Check], prov: ev.Provenance,
                      capsys: pytest.CaptureFixture[str]) -> None:
    ev.write(run_dir / "evidence.json", ev.bundle(checks, prov))
    hardware = run_dir / "hardware.json"
    ev.write(hardware, record(run_dir / "artifact" / "step.cubin", Check("gpu/rollout", "pass", 64, 64)))
    assert ev.main_evidence(["show", str(run_dir)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1] == "verified except hardware (1)"
    assert ev.main_evidence(["verify", str(run_dir)]) == 0
    assert re.fullmatch(r"all \d+ digests hold", capsys.readouterr().out.splitlines()[-1]), "not the run's verdict"
    assert ev.main_evidence(["show", "--help"]) == 0
    assert "optkit.bench.hardware" in capsys.readouterr().out, "says where a hardware record comes from"
    assert ev.main_evidence(["merge", str(run_dir), str(hardware)]) == 0
    assert ev.load(run_dir).verdict == "verified"
    (run_dir / "artifact" / "step.cubin").write_bytes(b"changed")
    assert ev.main_evidence(["verify", str(run_dir)]) == 1
    assert ev.main_evidence(["merge", str(run_dir), str(hardware)]) == 2
    assert "nothing merged" in capsys.readouterr().err
    for bad in ([], ["shwo", str(run_dir)], ["merge", str(run_dir)], ["show", str(run_dir / "none")]):
        assert ev.main_evidence(bad) == 2


def test_provenance_names_the_host_but_not_its_user(prov: ev.Provenance) -> None:
    assert prov.versions["pydantic"] and prov.python.startswith("3.")
    assert prov.files.keys() == {"plan.json", "artifact/step.cubin", "artifact/manifest.json"}
    assert str(Path.home()) not in prov.model_dump_json()


def test_import_is_cheap() -> None:
    code = ("import sys, optkit.evidence; "
            "print(sorted({'torch', 'numpy', 'hydra', 'cutlass', 'jinja2'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
