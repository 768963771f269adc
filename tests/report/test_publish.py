"""A run's last step, on the planner's own plan: three files that agree with one another and with the folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from optkit import evidence
from optkit.evidence import Check
from optkit.models.families import family_of, named_config
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices
from optkit.plan.types import Plan
from optkit.report.publish import publish


@pytest.fixture(scope="module")
def llama() -> Plan:
    raw = named_config("llama_tiny")
    family = family_of(raw)
    return build_plan(family.build(family.Config.from_hf(raw), rows=8), PlanChoices(name="llama/tiny"))


def test_publish(tmp_path: Path, llama: Plan) -> None:
    (tmp_path / "artifact").mkdir()
    (tmp_path / "artifact" / "kernel.cubin").write_bytes(b"cubin")
    (tmp_path / "plan.json").write_text(llama.to_json())
    (tmp_path / "log.txt").write_text("still written")
    gates = [Check("verify.ordering", "pass", 0, 0), Check(evidence.AUDITED, "pass", hashlib.sha256(b"cubin").hexdigest()),
             Check("gpu.rollout", "not_run", None, 64, "needs an H200 GPU")]
    made = publish(tmp_path, recipe="llama/tiny", recipe_digest="a" * 64, command="optkit run llama/tiny", checks=gates,
                   plan=llama, scope={"batch": [1]})
    assert evidence.load(tmp_path) == made and made.verdict == "verified except hardware (1)"
    assert set(made.provenance.files) == {"artifact/kernel.cubin", "plan.json", "trace.json"}
    assert list(made.cubins) == ["artifact/kernel.cubin"]
    assert evidence.verdict(evidence.reverify(tmp_path)) == "verified"
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["plan"] == "llama/tiny"
    page = (tmp_path / "report.html").read_text()
    assert "verified except hardware (1)" in page and 'id="timeline"' in page and 'id="cost"' in page


def test_a_broken_run_leaves_evidence_of_what_broke(tmp_path: Path) -> None:
    made = publish(tmp_path, recipe="llama/tiny", recipe_digest="a" * 64, command="optkit run llama/tiny",
                   checks=[Check("plan", "fail", None, None, "KeyError: 'x'")])
    assert made.verdict == "failed (1)"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["SHA256SUMS", "evidence.json", "report.html"]
    assert "KeyError" in (tmp_path / "report.html").read_text()
