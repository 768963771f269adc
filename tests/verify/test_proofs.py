"""Proofs: right Plans pass, and each rule turns red for a Plan that breaks it, naming what is missing."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hand_plans import HIDDEN, ROWS, SMS, but, gemv, heads, make, toy, without

from optkit.checks import Check
from optkit.models import kimi_k3, llama
from optkit.models.families import named_config
from optkit.plan.build import build_plan
from optkit.plan.choices import Hardware, Parallel, PlanChoices, Sync
from optkit.plan.types import Access, Buffer, Edge, Plan, Stage
from optkit.verify import faults
from optkit.verify.proofs import failed, prove


def status(plan: Plan) -> dict[str, Check]:
    return {c.name: c for c in prove(plan)}


def reasons(plan: Plan, check: str) -> str:
    c = status(plan)[check]
    assert c.status == "fail", f"{check} passed"
    return c.reason


def planned(
    config: str,
    tp: int = 1,
    peers: str = "emulated",
    hardware: Hardware | None = None,
    layers: tuple[int, int] | None = None,
    mechanism: str = "counter",
) -> Plan:
    family = kimi_k3 if config.startswith("kimi") else llama
    kw = {"layers": layers} if layers else {}
    graph = family.build(family.Config.from_hf(named_config(config)), rows=8, tp=tp, peers=peers, **kw)
    return build_plan(
        graph,
        PlanChoices(
            parallel=Parallel(tp=tp, peers=peers), sync=Sync(mechanism=mechanism), hardware=hardware or Hardware()
        ),
    )


@pytest.mark.parametrize("layout", ["plain", "tagged"])
def test_a_right_plan_passes_every_check(layout: str) -> None:
    checks = prove(toy(layout), repeat="optkit check toy")
    assert failed(checks) == []
    assert all(c.repeat == "optkit check toy" for c in checks)
    assert len({c.name for c in checks}) == len(checks) >= 16


@pytest.mark.parametrize("mechanism", ["counter", "tagged", "grid_barrier"])
@pytest.mark.parametrize(("config", "tp"), [("kimi_k3_tiny", 1), ("kimi_k3_tiny", 2), ("llama_tiny", 1)])
def test_planned_models_pass(config: str, tp: int, mechanism: str) -> None:
    assert failed(prove(planned(config, tp, mechanism=mechanism))) == []


@pytest.mark.parametrize("mechanism", ["counter", "tagged"])
def test_all_93_layers_are_proven_in_seconds(mechanism: str) -> None:
    plan = planned("kimi_k3", 8, "real", Hardware(name="gb300", sms=148, memory_gb=270.0), mechanism=mechanism)
    assert len(plan.stages) > 1000
    start = time.process_time()
    assert failed(prove(plan)) == []
    assert time.process_time() - start < 10


@pytest.mark.parametrize("layout", ["plain", "tagged"])
@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda f: f.name)
def test_planted_faults_turn_their_check_red(fault: faults.Fault, layout: str) -> None:
    plan = planned("kimi_k3_tiny", 2) if fault.name == "one_mailbox" else toy(layout)
    broken = fault.make(plan)
    assert broken is not None
    red = {c.name for c in prove(broken) if c.status == "fail"}
    assert red & set(fault.red), f"only {red} turned red"


def test_catch_rate_is_one_and_counts_what_applies() -> None:
    check = faults.catch_rate(toy())
    assert (check.status, check.value) == ("pass", 1.0)
    assert f"{len(faults.FAULTS) - 1} of {len(faults.FAULTS)}" in check.reason  # no mailbox in the toy


@pytest.mark.parametrize("mechanism", ["counter", "grid_barrier"])
def test_a_fault_that_chains_make_harmless_does_not_count(mechanism: str) -> None:
    """In two layers of a rank, later stages on the writer's SMs tell the reader of the cache row anyway."""
    plan = planned("kimi_k3", tp=8, layers=(2, 4), mechanism=mechanism)
    assert faults.tagged_state(plan) is None
    check = faults.catch_rate(plan)
    assert check.status == "pass", check.reason


def test_catch_rate_fails_for_a_fault_that_goes_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = faults.Fault("harmless", ("proof.raw",), lambda plan: plan)
    monkeypatch.setattr(faults, "FAULTS", (*faults.FAULTS, harmless))
    check = faults.catch_rate(toy())
    assert check.status == "fail" and "harmless" in check.reason


# ---- ordering
def test_a_missing_edge_is_named_with_buffer_stages_and_tasks() -> None:
    text = reasons(without(toy(), "L0.q", "L0.heads"), "proof.raw")
    for word in ("q@0", "L0.q task", "L0.heads task", "missing edge L0.q -> L0.heads (raw on q@0)", "SM"):
        assert word in text


def test_an_edge_implied_by_a_chain_may_be_dropped() -> None:
    plan = toy()
    slow = Edge(plan.index["embed"], plan.index["L0.heads"], "p@0", "raw", "counter")
    plan = but(plan, "L0.heads", reads=(*plan.stages[plan.index["L0.heads"]].reads, Access("p@0")))
    assert failed(prove(plan)) == []  # embed -> q -> heads
    assert failed(prove(replace(plan, edges=(*plan.edges, slow)))) == []


def _pair(mechanism: str, layout: str, readers_sm: int, klass: str = "activation") -> Plan:
    """w writes a and b; r reads both; only a has an edge (of the given mechanism)."""
    buffers = [
        Buffer("a", "activation", "bf16", ROWS, HIDDEN, layout),
        Buffer("b", klass, "bf16", ROWS, HIDDEN),
        Buffer("o", "activation", "bf16", ROWS, HIDDEN),
    ]
    w = Stage(
        "w",
        "ew",
        (),
        0,
        2,
        1,
        2,
        0,
        "block",
        (),
        (Access("a", step=64, span=64), Access("b", step=64, span=64)),
        regs=168,
    )
    r = Stage(
        "r",
        "ew",
        (),
        0,
        2,
        1,
        2,
        readers_sm,
        "block",
        (Access("a", step=64, span=64), Access("b", step=64, span=64)),
        (Access("o", step=64, span=64),),
        regs=168,
    )
    return make([w, r], buffers, edges=[Edge(0, 1, "a", "raw", mechanism)])


def test_a_counter_orders_all_buffers_a_tag_only_its_own_words() -> None:
    assert status(_pair("counter", "plain", 3))["proof.raw"].status == "pass"
    assert "b: write by w task" in reasons(_pair("tagged", "tagged", 3), "proof.raw")
    assert "b: write by w task" in reasons(_pair("tagged", "tagged", 3, klass="state"), "proof.raw")


def test_same_sm_orders_only_tasks_of_one_sm() -> None:
    assert status(_pair("same_sm", "plain", 0))["proof.raw"].status == "pass"
    assert "SM 1" in reasons(_pair("same_sm", "plain", 1), "proof.raw")


def test_tasks_of_one_sm_without_an_edge_are_not_ordered() -> None:
    plan = replace(_pair("same_sm", "plain", 0), edges=())
    assert "missing edge w -> r" in reasons(plan, "proof.raw")


def test_program_needs_the_same_units_on_the_same_sm() -> None:
    plan = _pair("program", "plain", 0)
    both = replace(plan, edges=(*plan.edges, Edge(0, 1, "b", "raw", "program")))
    assert status(both)["proof.raw"].status == "pass"
    shifted = but(both, "r", first_sm=2)
    assert "program does not reach this pair" in reasons(shifted, "proof.raw")


def test_state_over_a_tagged_edge_says_why() -> None:
    broken = faults.tagged_state(toy())
    assert broken is not None
    assert "state needs counter or grid_barrier" in reasons(broken, "proof.raw")


def _reuse(tagged: bool, extra_reader: bool) -> Plan:
    """a -> b -> a again: the second writer of a may start only when all readers of a are done."""
    layout = "tagged" if tagged else "plain"
    buffers = [Buffer(n, "activation", "bf16", ROWS, HIDDEN, layout) for n in ("a", "b", "side")]
    stages = [gemv("w1", (), "a", HIDDEN), gemv("r1", ("a",), "b", HIDDEN)]
    if extra_reader:
        stages.append(gemv("late", ("a",), "side", 16, tasks=1, first_sm=5))
    stages.append(gemv("w2", ("b",), "a", HIDDEN, tasks=3))
    return make(stages, buffers)


@pytest.mark.parametrize("tagged", [False, True])
def test_a_slot_is_reused_only_after_all_its_readers(tagged: bool) -> None:
    assert failed(prove(_reuse(tagged, extra_reader=False))) == []
    text = reasons(_reuse(tagged, extra_reader=True), "proof.war")
    assert "a: read by late task 0 (SM 5) is not ordered before the write by w2" in text


def _packed(unheard_part: bool) -> Plan:
    """p -> (q | f) packed on SMs 0-7, q -> heads -> o on SMs 8-11, then p is written again; nobody reads f."""
    buffers = [Buffer(n, "activation", "bf16", ROWS, HIDDEN, "tagged") for n in ("p", "q", "f", "h", "o")]
    buffers += [Buffer("s", "state", "f32", 16, HIDDEN), Buffer("state_slot", "input", "i32", ROWS, 1)]
    q, f = Access("q", step=16, span=16, first=0, count=8), Access("f", step=16, span=16, first=8, count=8)
    units = 16 if unheard_part else 8
    packed = replace(gemv("packed", ("p",), "q", HIDDEN), units=units, tasks=8, writes=(q, f) if unheard_part else (q,))
    late = [
        replace(s, tasks=4, first_sm=8)
        for s in (heads("heads", "q", "h", "s"), gemv("o", ("h",), "o", HIDDEN), gemv("again", ("o",), "p", HIDDEN))
    ]
    return make([replace(gemv("first", (), "p", HIDDEN), tasks=4, first_sm=8), packed, *late], buffers, sms=12)


def test_tasks_hear_together_what_no_task_hears_alone() -> None:
    assert status(_packed(unheard_part=False))["proof.war"].status == "pass"
    text = reasons(_packed(unheard_part=True), "proof.war")
    assert "p: read by packed task 4 (SM 4) is not ordered before the write by again" in text


def test_an_sm_whose_rows_may_be_absent_tells_nothing() -> None:
    """SMs 4-7 read p for words that nobody polls, then take part in `heads`: with one row only SM 4 is heard from."""
    plan = _packed(unheard_part=True)
    text = reasons(but(plan, "heads", first_sm=4), "proof.war")
    assert "p: read by packed task 5 (SM 5) is not ordered" in text
    i = plan.index["heads"]
    columns = Stage("heads", "ew", (), 0, 4, 1, 4, 4, "block", (Access("q", step=32, span=32),),
                    (Access("h", step=32, span=32),), regs=168)  # fmt: skip
    assert (
        status(replace(plan, stages=(*plan.stages[:i], columns, *plan.stages[i + 1 :])))["proof.war"].status == "pass"
    )


def test_an_index_read_by_the_lagging_producer_warp_blocks_reuse() -> None:
    """The list of experts is rewritten while an SM without experts may still fetch it for its empty share."""
    plan = toy(layers=3)
    assert failed(prove(plan)) == []
    stages = tuple(replace(s, streams=()) if s.body == "gemv" else s for s in plan.stages)
    text = reasons(replace(plan, stages=stages), "proof.war")
    assert "uniq@0" in text and "gate_up" in text


def test_two_values_alive_in_one_buffer() -> None:
    broken = faults.shared_buffer(toy())
    assert broken is not None
    assert any(status(broken)[f"proof.{k}"].status == "fail" for k in ("raw", "war", "waw"))


# ---- inside a stage
def test_overlapping_writes_of_one_stage_are_named() -> None:
    broken = faults.overlapping_tasks(toy())
    assert broken is not None
    assert "task 1 of the same stage may write" in reasons(broken, "proof.within_stage").replace("task 0", "task 1")


def test_state_rows_need_an_injective_slot() -> None:
    plan = toy()
    sets = tuple(x for x in plan.index_sets if x.value != "state_slot")
    assert "state_slot" in reasons(replace(plan, index_sets=sets), "proof.within_stage")


def test_routed_writes_need_the_partition_fact() -> None:
    plan = toy()
    sets = tuple(replace(x, facts=("injective",)) if x.value.startswith("uniq") else x for x in plan.index_sets)
    assert "ea@0" in reasons(replace(plan, index_sets=sets), "proof.within_stage")


def test_weights_and_inputs_are_never_written() -> None:
    plan = toy()
    s = plan.stages[1]
    assert "never written" in reasons(but(plan, s.name, writes=(*s.writes, Access("token"))), "proof.waw")


# ---- rules
@pytest.mark.parametrize(("check", "plan", "words"), [
    ("proof.edges", lambda p: replace(p, edges=(replace(p.edges[0], buffer="no"), *p.edges[1:])), "no such buffer"),
    ("proof.edges", lambda p: replace(p, edges=(replace(p.edges[0], mechanism="tagged"),)), "carry no tag"),
    ("proof.edges", lambda p: replace(p, edges=(replace(p.edges[0], kind="war"), *p.edges[1:])), "does not read"),
    ("proof.edges", lambda p: replace(p, edges=(Edge(0, 99, "p@0", "raw", "counter"),)), "stages"),
    ("proof.arrivals", lambda p: but(p, "L0.q", first_sm=SMS), "first_sm 6"),
    ("proof.arrivals", lambda p: but(p, "L0.heads", row_units=3), "row"),
    ("proof.liveness", lambda p: replace(p, edges=(*p.edges, Edge(5, 5, "a@0", "raw", "counter"))), "deadlock"),
    ("proof.ring", lambda p: replace(p, ring_slot_bytes=1000), "multiples of 16"),
    ("proof.shared_memory", lambda p: replace(p, ring_slots=13), "249856"),
    ("proof.registers", lambda p: replace(p, threads=320), "224 registers"),
    ("proof.registers", lambda p: but(p, "L0.q", regs=0), "no register ceiling"),
    ("proof.index_sets", lambda p: replace(p, index_sets=()), "no declared index set"),
    ("proof.index_sets", lambda p: replace(p, index_sets=tuple(replace(x, bound=3) for x in p.index_sets)),
     "multiple of the 3"),
    ("proof.placement", lambda p: replace(p, hardware=(("sms", 4),)), "6 CTAs"),
    ("proof.tags", lambda p: replace(p, buffers=(*p.buffers, p.buffers[-1])), "occurs 2 times"),
])  # fmt: skip
def test_rules_name_what_is_wrong(check: str, plan, words: str) -> None:
    assert words in reasons(plan(toy()), check)


def test_tagged_words_are_not_split_between_tasks() -> None:
    plan = toy("tagged")
    s = plan.stages[plan.index["L0.q"]]
    text = reasons(but(plan, "L0.q", writes=(replace(s.writes[0], step=2, span=2),)), "proof.tags")
    assert "split a tagged word of 4 elements" in text


def test_static_tiles_behind_routed_ones_are_refused() -> None:
    plan = toy()
    s = plan.stages[plan.index["L0.gate_up"]]
    static = replace(s.streams[0], index="", weight="shared.w")
    assert "queued behind routed ones" in reasons(but(plan, s.name, streams=(*s.streams, static)), "proof.ring")


def test_an_empty_plan_fails() -> None:
    assert prove(replace(toy(), stages=()))[0].status == "fail"


def test_malformed_tasks_fail_the_order_checks_too() -> None:
    got = status(but(toy(), "L0.q", tasks=99))
    assert got["proof.arrivals"].status == got["proof.raw"].status == "fail"


# ---- mailboxes
def test_real_peers_need_peer_mailboxes() -> None:
    plan = planned("kimi_k3_tiny", 2, "real")
    assert failed(prove(plan)) == []
    local = tuple(replace(e, mechanism="counter") if e.mechanism == "peer_mailbox" else e for e in plan.edges)
    assert "real peers write this mailbox" in reasons(replace(plan, edges=local), "proof.edges")


def test_one_mailbox_for_all_exchanges_is_refused() -> None:
    broken = faults.one_mailbox(planned("kimi_k3_tiny", 2, "real"))
    assert broken is not None
    assert "faster peer" in reasons(broken, "proof.mailbox_reuse")
