"""Edges: where they come from, which mechanism they get, when reuse needs one of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plan_cases import choices, edges_between, graph, stage, tiny, tiny_with

from optkit.plan.build import build_plan
from optkit.plan.choices import Sync
from optkit.plan.edges import derive, extent
from optkit.plan.errors import PlanError
from optkit.plan.types import Access, Buffer, Edge, Plan, Stage

SMS = 16


def make(name: str, reads: str = "", writes: str = "", tasks: int = 4, first_sm: int = 0, **kw) -> Stage:
    """A stage of one 16-column unit a task; it reads whole buffers and writes its own columns."""
    return Stage(
        name,
        "gemv",
        (),
        0,
        tasks,
        1,
        tasks,
        first_sm,
        "block",
        tuple(Access(b) for b in reads.split()),
        tuple(Access(b, step=16, span=16) for b in writes.split()),
        **kw,
    )


def edges_of(
    stages: list[Stage], mechanism: str = "counter", overrides=(), **kw
) -> list[tuple[str, str, str, str, str]]:
    names = {a.buffer for s in stages for a in (*s.reads, *s.writes)}
    buffers = {n: Buffer(n, "activation", "bf16", 8, 64) for n in names}
    found, _ = derive(stages, buffers, Sync(mechanism, overrides), SMS, **kw)
    return [(stages[e.src].name, stages[e.dst].name, e.buffer, e.kind, e.mechanism) for e in found]


def rederive(plan: Plan, stages: tuple[Stage, ...]) -> tuple[Edge, ...]:
    plain = {b.name: replace(b, layout="plain") for b in plan.buffers}
    return derive(stages, plain, Sync("counter"), plan.sms, frozenset({"logits"}))[0]


def test_dropping_a_read_drops_its_edge():
    plan = tiny()
    assert rederive(plan, plan.stages) == plan.edges
    at = plan.index["L1.og"]
    kda = plan.stages[at]
    (gone,) = [e for e in plan.edges if e.dst == at and e.buffer == "f@1"]
    poorer = replace(kda, reads=tuple(a for a in kda.reads if a.buffer != "f@1"))
    after = rederive(plan, (*plan.stages[:at], poorer, *plan.stages[at + 1 :]))
    assert gone not in after
    assert [e for e in plan.edges if e not in after and e.kind == "raw"] == [gone]


def test_a_reader_waits_for_each_part_it_reads_and_no_other():
    plan = tiny()
    assert {e.buffer for e in edges_between(plan, "L1.x_a.proj", "L1.og")} == {
        "q_raw@1",
        "k_raw@1",
        "v_raw@1",
        "g@1",
        "b@1",
    }
    assert {e.buffer for e in edges_between(plan, "L1.x_a.proj", "L1.f")} == {"fa@1"}


def test_partial_overwrite_leaves_two_writers():
    a = make("a", writes="x")
    b = replace(make("b"), writes=(Access("x", base=32, step=8, span=8),))  # columns 32..63
    c = make("c", reads="x")
    raw = [e[:3] for e in edges_of([a, b, c]) if e[3] == "raw"]
    assert raw == [("a", "c", "x"), ("b", "c", "x")]
    whole = replace(b, writes=(Access("x", base=0, step=16, span=16),))
    assert [e[:3] for e in edges_of([a, whole, c]) if e[3] == "raw"] == [("b", "c", "x")]


def test_extent_of_a_part():
    s = make("a", tasks=4)
    assert extent(Access("x", base=0, step=16, span=16, first=2, count=2), s, 64) == (0, 32)
    assert extent(Access("x", base=0, step=16, span=16), s, 50) == (0, 50)
    assert extent(Access("x", base=8), s, 50) == (8, 50)


def test_state_rows_are_always_counters():
    for mechanism in ("counter", "tagged"):
        (edge,) = edges_between(tiny(1, mechanism), "L3.insert", "L3.ol")
        assert (edge.buffer, edge.mechanism) == ("L3.kv", "counter")


def test_tagged_covers_what_can_carry_tags():
    plan = tiny(1, "tagged")
    layout = {b.name: b.layout for b in plan.buffers}
    assert layout["q_raw@1"] == layout["og@1"] == layout["P@2"] == layout["y@1"] == "tagged"
    # integers, routed columns, state and what leaves the step cannot
    assert layout["L1.uniq"] == layout["ids@1"] == layout["ea@1"] == layout["L3.kv"] == layout["logits"] == "plain"
    for e in plan.edges:
        assert (e.mechanism == "tagged") == (layout[e.buffer] == "tagged" and e.kind == "raw")


def test_narrow_rows_cannot_carry_tags():
    """Two bf16 heads fill half a tagged word."""
    plan = build_plan(graph("kimi_k3_tiny", 2), choices(2, "tagged"))
    assert plan.buffer["b@1"].width == 2 and plan.buffer["b@1"].layout == "plain"
    assert {e.mechanism for e in plan.edges if e.buffer == "b@1"} == {"counter"}


def test_grid_barrier_everywhere_but_in_mailboxes():
    """Device code writes mailboxes in tagged words, twice as large as plain ones, whatever orders the rest."""
    plan = tiny(2, "grid_barrier")
    boxes = {b.name for b in plan.buffers if b.klass == "mailbox"}
    assert boxes
    for e in plan.edges:
        assert e.mechanism == ("peer_mailbox" if e.buffer in boxes and e.kind == "raw" else "grid_barrier")
    assert {b.name for b in plan.buffers if b.layout == "tagged"} == boxes


def test_overrides_by_glob_first_match_counts():
    plan = tiny_with(sync__mechanism="tagged", sync__overrides=(("q_raw@1", "tagged"), ("*_raw@*", "counter")))
    kinds = {b: {e.mechanism for e in plan.edges if e.buffer == b} for b in ("q_raw@1", "q_raw@0", "k_raw@1", "og@1")}
    assert kinds == {"q_raw@1": {"tagged"}, "q_raw@0": {"counter"}, "k_raw@1": {"counter"}, "og@1": {"tagged"}}
    assert plan.buffer["k_raw@1"].layout == "plain"
    plan = tiny_with(sync__overrides=(("P@*", "tagged"),))
    assert plan.buffer["P@0"].layout == "tagged" and plan.buffer["og@1"].layout == "plain"


def test_impossible_overrides_are_refused():
    with pytest.raises(PlanError) as e:
        tiny_with(sync__overrides=(("L1.uniq", "tagged"), ("q_rau@1", "counter"), ("logits", "counter")))
    text = "\n".join(e.value.problems)
    assert len(e.value.problems) == 3
    assert "sync.overrides.L1.uniq = tagged: L1.uniq is scratch of i32; expected counter" in text
    assert "sync.overrides.q_rau@1: no buffer with a reader has such a name, did you mean 'q_raw@1'?" in text
    assert "sync.overrides.logits" in text


def test_same_sm_where_placement_and_words_agree():
    plan = tiny(2)
    a, b = stage(plan, "L1.up_all"), stage(plan, "P.1m")
    (edge,) = edges_between(plan, "L1.up_all", "P.1m")
    assert edge.mechanism == "same_sm" and a.first_sm == b.first_sm and a.units == b.units
    assert plan.buffer[edge.buffer].layout == "plain"
    own = Access("x", step=16, span=16)
    first, then = make("a", writes="x"), replace(make("b", writes="y"), reads=(own,))
    assert edges_of([first, then]) == [("a", "b", "x", "raw", "same_sm")]
    assert edges_of([first, replace(then, first_sm=1)]) == [("a", "b", "x", "raw", "counter")]  # another SM's words
    assert edges_of([first, replace(then, reads=(Access("x"),))]) == [("a", "b", "x", "raw", "counter")]
    elsewhere = make("c", reads="x", writes="z", first_sm=1)  # one more reader, on other SMs
    assert {e[4] for e in edges_of([first, then, elsewhere])} == {"counter"}


def test_reuse_without_a_chain_gets_an_edge():
    a, b = make("a", writes="x", tasks=1), make("b", "x", "y", tasks=1, first_sm=1)
    c = make("c", writes="x", tasks=1, first_sm=2)
    got = edges_of([a, b, c])
    assert ("b", "c", "x", "war", "counter") in got
    # b has seen a's store and c waits for b, so nothing more is needed for the overwritten word
    assert [e for e in got if e[3] == "waw"] == []


def test_reuse_without_a_reader_gets_a_waw_edge():
    a, c = make("a", writes="x", tasks=1), make("c", writes="x", tasks=1, first_sm=2)
    assert edges_of([a, c]) == [("a", "c", "x", "waw", "counter")]
    assert edges_of([a, replace(c, first_sm=0)]) == [
        ("a", "c", "x", "waw", "counter")
    ]  # no barrier between their stores


def apart(*stages: Stage) -> list[Stage]:
    """The stages on SMs of their own, so that program order proves nothing."""
    return [replace(s, first_sm=4 * k) for k, s in enumerate(stages)]


def test_a_chain_of_counters_proves_reuse():
    a, b, c, d = apart(make("a", writes="x"), make("b", "x", "y"), make("c", "y", "z"), make("d", "z", "x"))
    assert {e[3] for e in edges_of([a, b, c, d])} == {"raw"}
    # the chain breaks where c no longer reads what b made
    assert ("b", "d", "x", "war", "counter") in edges_of([a, b, replace(c, reads=()), d])


def test_program_order_of_the_sm_proves_reuse():
    """b's SMs run c later; whoever waits for c knows that b is over."""
    a, b, _, d = apart(make("a", writes="x"), make("b", "x", "y"), make("c"), make("d", "w", "x"))
    c = make("c", writes="w", first_sm=b.first_sm)
    assert [e for e in edges_of([a, b, c, d]) if e[3] == "war"] == []
    fewer = replace(c, tasks=2, units=2)
    assert ("b", "d", "x", "war", "counter") in edges_of([a, b, fewer, d])


def test_tagged_words_prove_only_what_was_polled():
    a, b, c, d = apart(make("a", writes="x"), make("b", "x", "y"), make("c", "y", "z"), make("d", "z", "x"))
    assert {e[3] for e in edges_of([a, b, c, d], "tagged")} == {"raw"}  # every unit polls every word
    one_word_each = replace(c, reads=(Access("y", step=16, span=16),))
    assert ("b", "d", "x", "war", "counter") in edges_of([a, b, one_word_each, d], "tagged")
    routed = replace(c, assign="cyclic")  # may have nothing to do, so may poll nothing
    assert ("b", "d", "x", "war", "counter") in edges_of([a, b, routed, d], "tagged")


def test_work_that_may_be_absent_proves_nothing():
    """A routed unit, or one of a row beyond the run-time count, neither polls nor is polled for certain."""
    a, b, c = apart(make("a", writes="x"), make("b", "x", "y"), make("c", "y", "x"))
    war = ("b", "c", "x", "war", "counter")
    assert war not in edges_of([a, b, c], "tagged")
    assert war in edges_of([a, b, replace(c, assign="cyclic")], "tagged")
    assert war in edges_of([a, replace(b, assign="cyclic"), c], "tagged")
    assert war in edges_of([a, replace(b, row_units=4), c], "tagged")


def test_one_part_of_a_task_says_nothing_of_the_rest():
    """Who polled the words of the first unit does not know that the second, of the same task, has done its reads."""
    a, b, c = apart(make("a", writes="x"), make("b", "x", tasks=1), make("c", "y1", "x"))
    own = {"step": 16, "span": 16, "count": 1}
    two = replace(b, units=2, writes=(Access("y1", first=0, **own), Access("y2", first=1, **own)))
    one = replace(b, writes=(Access("y1", step=16, span=16),))
    war = ("b", "c", "x", "war", "counter")
    assert war in edges_of([a, two, c], "tagged")
    assert war not in edges_of([a, one, c], "tagged")


def test_tags_publish_no_other_memory():
    """A plain store overwritten later must be visible; a tagged chain does not make it so."""
    a, b, c = apart(make("a", writes="x t"), make("b", "x t", "y"), make("c", "y", "x"))
    got = edges_of([a, b, c], "tagged", overrides=(("x", "counter"),))
    assert ("a", "c", "x", "waw", "counter") in got
    assert [e for e in edges_of([a, b, c], "tagged") if e[3] != "raw"] == []  # tagged x: b polled every old word
    assert [e for e in edges_of([a, b, c]) if e[3] != "raw"] == []  # counters: visible through b
