"""The library of planted faults: large enough, every kind there, every Plan and table fault caught, a miss noticed.

Device faults take some 5 s each to compile: one in ten runs here, another tenth with every commit
(OPTKIT_TENTH, 0 .. 9, set by scripts/test.sh).
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from optkit.emit.lower import limits
from optkit.models import families
from optkit.plan.choices import PlanChoices
from optkit.plan.types import Edge
from optkit.verify import proofs
from optkit.verify.constants import check_constants
from optkit.verify.planted import doc, gates, runner, table_faults
from optkit.verify.planted.device_faults import AUDITED, HARDWARE, MISPLACED, Edit, sources
from optkit.verify.planted.registry import KINDS, VARIANTS, Fault, Subject, digest, library, spread
from optkit.verify.table import audit_table, check_table, device_names, lowered

CONFIGS = {"k3": ("kimi_k3_tiny", "tagged"), "llama": ("llama_tiny", "counter")}
NAMED = 25
"""The kinds that the specification of the library names come first in KINDS."""


@cache
def subject(name: str) -> Subject:
    config, mechanism = CONFIGS[name]
    choices = PlanChoices.from_dicts(name=name, sync={"mechanism": mechanism}, decode={"context": 256})
    return Subject(name, families.named_config(config), {}, {"rows": 8}, choices)


@pytest.fixture(autouse=True)
def _worker() -> None:
    runner._start([subject("k3"), subject("llama")], None)


def planted(fault: Fault) -> runner.Outcome:
    return runner.run_one(fault.key, quick=True)


def test_the_library_is_large_and_names_every_kind() -> None:
    faults = library()
    assert len(faults) >= 200
    assert len([f for f in faults if not f.hardware]) >= 200
    assert {f.kind for f in faults} >= set(KINDS[:NAMED])
    assert {f.kind for f in faults} == set(KINDS), "a kind without a fault"
    assert all(f.gates for f in faults)
    assert len(HARDWARE) <= 24


def test_the_digest_follows_the_library() -> None:
    faults = library()
    assert digest(faults) == digest(list(reversed(faults)))
    assert digest(faults) != digest([replace(faults[0], kind="deadlock"), *faults[1:]])


@pytest.mark.parametrize("fault", library(["plan"]), ids=lambda f: f.name)
def test_plan_faults_are_caught(fault: Fault) -> None:
    out = planted(fault)
    assert out.caught and not out.error, out


@pytest.mark.parametrize("fault", library(["table"]), ids=lambda f: f.name)
def test_table_faults_are_caught(fault: Fault) -> None:
    out = planted(fault)
    assert out.caught and not out.error, out


@pytest.mark.parametrize("fault", library(["constant", "body"]), ids=lambda f: f.name)
def test_numeric_faults_are_caught(fault: Fault) -> None:
    out = planted(fault)
    assert out.caught and not out.error, out


@pytest.mark.parametrize("fault", MISPLACED, ids=lambda f: f.name)
def test_fields_that_the_device_reads_elsewhere_are_caught(fault: Fault) -> None:
    out = planted(fault)
    assert out.caught and not out.error, out


def tenth() -> list[Fault]:
    return [f for i, f in enumerate(AUDITED) if i % 10 == int(os.environ.get("OPTKIT_TENTH", "0"))]


@pytest.mark.parametrize("fault", tenth(), ids=lambda f: f.name)
def test_a_tenth_of_the_device_faults_is_caught(fault: Fault) -> None:
    pytest.importorskip("cutlass")
    out = planted(fault)
    assert out.caught and not out.error, out


@pytest.mark.parametrize("fault", [f for f in library() if f.target == "device"], ids=lambda f: f.name)
def test_device_edits_still_find_their_text(fault: Fault) -> None:
    ((_, make),) = fault.sites(dict(sources()))
    changed = make()
    assert changed != dict(sources())
    for name, text in changed.items():
        compile(text, name, "exec")


def test_an_edit_whose_text_is_gone_says_so() -> None:
    with pytest.raises(ValueError, match="is not there"):
        Edit("core.py", "load4", "no such text", "").apply(dict(sources()))


# ---- the runner itself
def test_sites_are_spread() -> None:
    assert spread(list(range(9))) == [0, 4, 8]
    assert spread([1, 2]) == [1, 2]


def test_a_fault_caught_at_one_site_only_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = subject("k3").plan("counter")
    edge = next(e for e in plan.edges if e.kind == "raw")
    good = lambda: plan  # noqa: E731
    bad = lambda: replace(plan, edges=(*plan.edges, Edge(edge.dst, edge.src, edge.buffer, "raw", "counter")))  # noqa: E731
    half = Fault("half", "deadlock", "plan", ("proof.liveness",), lambda p: [("a", bad), ("b", good)], "counter")
    monkeypatch.setattr(runner, "library", lambda *a: [half])
    out = planted(half)
    assert not out.caught and [r for _, r in out.sites][1] == []
    whole = replace(half, sites=lambda p: [("a", bad), ("b", bad)])
    monkeypatch.setattr(runner, "library", lambda *a: [whole])
    assert planted(whole).caught


def outcome(key: str, red: list[str], caught: bool = True, **kw: object) -> runner.Outcome:
    return runner.Outcome(
        key, "deadlock", "plan", "own", expected=["proof.raw"], sites=[("x", red)], red=red, caught=caught, **kw
    )  # type: ignore[arg-type]


def test_a_missed_fault_a_red_control_and_a_gate_without_its_own_fail() -> None:
    every = [outcome(g, [g]) for g in runner.GATES]
    assert runner.Report(every, [], "", 0.0, True).failed == []
    missed = runner.Report([*every, outcome("quiet", [], caught=False)], [], "", 0.0, True)
    assert "not caught: quiet" in missed.failed[0]
    assert "red without a fault" in runner.Report(every, [("k3", ["proof.raw"])], "", 0.0, True).failed[0]
    shared = [outcome("both", ["proof.raw", "proof.war"]), *[o for o in every if o.key != "proof.war"]]
    assert runner.Report(shared, [], "", 0.0, True).failed == ["no fault that only proof.war catches"]


def test_the_table_has_a_digest_that_times_do_not_change() -> None:
    a = runner.Report([outcome("a", ["proof.raw"], seconds=1.0)], [], "d", 1.0, False)
    b = runner.Report([outcome("a", ["proof.raw"], seconds=2.0)], [], "d", 9.0, False)
    assert a.digest == b.digest
    assert a.digest != runner.Report([outcome("a", ["proof.war"])], [], "d", 1.0, False).digest


# ---- the gates that came with the library
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "real"])
def test_right_tables_and_constants_pass(name: str, variant: str) -> None:
    s = subject(name)
    assert check_constants(s.plan(variant), s.graph(variant), s.config).status == "pass"
    if limits(s.plan(variant)):  # no device body can do a stage of it: there is no table
        return
    assert {c.name: c.reason for c in audit_table(s.plan(variant), s.graph(variant)) if c.status != "pass"} == {}


def test_any_changed_word_is_found() -> None:
    s = subject("llama")
    table, book = lowered(s.plan(), s.graph())
    rng = np.random.default_rng(0)
    missed = []
    for _ in range(200):
        i, w = int(rng.integers(table.shape[0])), int(rng.integers(table.shape[1]))
        broken = table_faults.word(
            table_faults.Lowered(s.plan(), table, book), i, w, int(table[i, w]) ^ (1 << int(rng.integers(40)))
        )
        if not gates.red(check_table(s.plan(), broken.table, book)):
            missed.append((i, w))
    # words 8-31 of the layout word of a plain operand name a producer that nobody reads
    assert len(missed) <= 8, missed


def test_a_plan_that_cannot_be_lowered_fails_in_words() -> None:
    s = subject("llama")
    plan = s.plan()
    broken = replace(
        plan,
        stages=tuple(
            replace(x, params=tuple({**dict(x.params), "dv": 96}.items())) if x.body == "attn" else x
            for x in plan.stages
        ),
    )
    got = audit_table(broken, s.graph())
    assert all(c.status == "fail" and "cannot be lowered" in c.reason for c in got)


def test_a_constant_that_no_rule_explains_is_a_finding() -> None:
    s = subject("llama")
    plan = s.plan()
    odd = replace(
        plan,
        stages=tuple(
            replace(x, params=tuple(sorted((*x.params, ("slope", 0.5))))) if x.body == "embed" else x
            for x in plan.stages
        ),
    )
    got = check_constants(odd, s.graph(), s.config)
    assert got.status == "fail" and "no rule says which key" in got.reason


def test_device_names_are_read_from_the_sources(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("(A, B) = range(2)\nC = 7\nD, E = 3, 4\n")
    assert device_names(tmp_path) == {"a": {"A": 0, "B": 1, "C": 7, "D": 3, "E": 4}}


def test_a_reader_of_columns_that_only_an_older_value_has_is_unordered() -> None:
    """A unit of a projection is left out; the buffer's previous value, long visible, fills the gap."""
    plan = subject("k3").plan()
    at = plan.index["L4.sh"]
    s = plan.stages[at]
    broken = replace(
        plan, stages=tuple(replace(x, units=s.units - 1, tasks=s.units - 1) if x == s else x for x in plan.stages)
    )
    reasons = [c.reason for c in proofs.prove(broken) if c.name == "proof.never_written"]
    assert "an older value's" in reasons[0]


def test_the_document_is_up_to_date() -> None:
    path = Path(__file__).resolve().parents[2] / "docs/planted-faults.md"
    assert doc.filled(path.read_text()) == path.read_text(), (
        "python -m optkit.verify.planted.doc docs/planted-faults.md"
    )
