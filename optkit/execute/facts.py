"""Facts about data-dependent indices, checked where the proofs only assume them (Plan.index_sets).

The router promises distinct experts in a row and a table that splits the (row, k) pairs; vLLM promises that live rows
share no KV slot, no page that one of them writes, and no state slot. In validation mode every step is held to that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from optkit.execute.memory import ExecutionError, Memory
from optkit.plan.types import IndexSet, Stage

CONTRACT = "contract:"
LOWEST = {"slot_mapping": 0, "state_slot": 1}
"""Smallest index of a live row; anything below is padding (the facts negative_is_padding, nonpositive_is_padding)."""


def _repeated(values: list[int]) -> list[int]:
    """Values that occur more than once."""
    return sorted(v for v, n in Counter(values).items() if n > 1)


def _injective(mem: Memory, s: IndexSet, stage: Stage | None) -> str:
    twice = _repeated([v for v in mem.input(s.value).flatten().tolist() if v >= LOWEST[s.value]])
    return f"live rows share {twice}" if twice else ""


def _written_pages(mem: Memory, s: IndexSet, stage: Stage | None) -> str:
    """The page that a live row writes belongs to no other live row (pages that are only read may be shared)."""
    size, table = mem.block_size, mem.input("block_table")
    live = [r for r, slot in enumerate(mem.input("slot_mapping").tolist()) if slot >= 0]
    pages = {r: set(table[r, : -(-int(mem.input("seq_len")[r]) // size)].tolist()) for r in live}
    wrote = {r: int(mem.input("slot_mapping")[r]) // size for r in live}
    shared = sorted({wrote[r] for r in live for other in live if other != r and wrote[r] in pages[other]})
    return f"a live row writes pages {shared} of another" if shared else ""


def _distinct_in_row(mem: Memory, s: IndexSet, stage: Stage | None) -> str:
    bad = [r for r, ids in enumerate(mem.data[s.value][: mem.rows].tolist()) if len(set(ids)) != len(ids)]
    return f"rows {bad} name an expert twice" if bad else ""


def _slots(mem: Memory, s: IndexSet) -> list[list[int]]:
    """Used slots of a uniq table: [expert, k of row 0, k of row 1, ...]."""
    table, stride = mem.data[s.value][0].tolist(), 1 + mem.class_rows
    return [table[1 + u * stride : 1 + (u + 1) * stride] for u in range(max(0, min(table[0], s.bound)))]


def _partition(mem: Memory, s: IndexSet, stage: Stage | None) -> str:
    """Every (row, k) of an active row in exactly one slot, every slot another expert."""
    pairs = Counter((r, k) for slot in _slots(mem, s) for r, k in enumerate(slot[1:]) if k >= 0)
    wanted = {(r, k) for r in range(mem.rows) for k in range(s.bound // mem.class_rows)}
    if pairs != Counter(wanted):
        return f"{sum(pairs.values())} (row, k) pairs in slots, expected each of {len(wanted)} once"
    twice = _repeated([slot[0] for slot in _slots(mem, s)])
    return f"experts {twice} have two slots" if twice else ""


def _in_range(mem: Memory, s: IndexSet, stage: Stage | None) -> str:
    assert stage is not None
    uniq = s.value == stage.param("uniq")
    experts = [x[0] for x in _slots(mem, s)] if uniq else mem.data[s.value][: mem.rows].flatten().tolist()
    out = sorted({e for e in experts if not 0 <= e < stage.param("experts")})
    return f"experts {out}: expected 0..{stage.param('experts') - 1}" if out else ""


FACTS: dict[str, Callable[[Memory, IndexSet, Stage | None], str]] = {
    "injective": _injective,
    "injective_blocks_of_live_rows": _written_pages,
    "distinct_in_row": _distinct_in_row,
    "partition": _partition,
    "in_range": _in_range,
    "negative_is_padding": lambda mem, s, stage: "",  # what LOWEST and the bodies' masks mean, nothing to check
    "nonpositive_is_padding": lambda mem, s, stage: "",
}


def check_facts(mem: Memory, producer: str, stage: Stage | None = None) -> None:
    """Checks the index sets that `producer` (a stage's name, or "contract:...") has just made.

    Raises ExecutionError naming set, producer and fact; KeyError for a fact that nobody can check.
    """
    for s in mem.plan.index_sets:
        if s.producer != producer:
            continue
        for fact in s.facts:
            wrong = FACTS[fact](mem, s, stage)
            if wrong:
                raise ExecutionError(f"index set {s.value!r} of {s.producer}: {fact} does not hold: {wrong}")
