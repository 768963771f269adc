"""The clocks against brute force on random little Plans: nothing that they accept may be unordered, word by word."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hand_plans import make
from order_oracle import unordered

from optkit.plan.types import Access, Buffer, Edge, Plan, Stage
from optkit.verify.order import check_order

ROWS, WIDTH = 2, 4


def mixed(rng: random.Random, tagged: bool = True) -> Plan:
    """A chain of 5 to 9 stages over few buffers, with all RAW edges, and WAR edges dropped at random."""
    sms = rng.choice((2, 3))
    layouts = {f"b{k}": "tagged" if tagged and rng.random() < 0.75 else "plain" for k in range(4)}
    buffers = [Buffer(n, "activation", "bf16", ROWS, WIDTH, layout) for n, layout in layouts.items()]
    stages: list[Stage] = []
    written: list[str] = []
    for i in range(rng.randint(5, 9)):
        body = rng.choice(("gemv", "gemv", "ew", "kda"))
        reads = tuple(rng.sample(written[-3:], min(len(written[-3:]), rng.choice((1, 1, 2))))) if written else ()
        out = rng.choice([n for n in layouts if n not in reads])
        if body == "kda":
            shape, acc = (ROWS * 2, ROWS), {"rows": "unit", "step": 2, "span": 2}
        else:
            shape, acc = (WIDTH // 2, 1), {"step": 2, "span": 2}
        read = {"step": 0, "span": 0} if body == "gemv" else acc
        stages.append(
            Stage(
                f"s{i}",
                body,
                (),
                0,
                shape[0],
                shape[1],
                rng.randint(1, min(sms, shape[0])),
                rng.randrange(sms),
                "block",
                tuple(Access(r, **read) for r in dict.fromkeys(reads)),
                (Access(out, **acc),),
            )
        )
        written = [w for w in written if w != out] + [out]
    plan = make(stages, buffers, sms=sms, rows=ROWS)
    extra = []
    for j, s in enumerate(stages):
        for i in range(j):
            for b in {a.buffer for a in stages[i].reads} & {a.buffer for a in s.writes}:
                if rng.random() < 0.5:
                    extra.append(Edge(i, j, b, "war", "counter"))
    kept = [e for e in plan.edges if rng.random() < 0.97]
    return replace(plan, edges=(*kept, *extra))


def tagged_chain(rng: random.Random) -> Plan:
    """Each stage reads the one before; 2 or 3 tagged buffers in turn, no WAR edges: reuse rests on what tags tell."""
    sms, turn = rng.choice((2, 3, 4)), rng.choice((2, 3, 3))
    buffers = [Buffer(f"b{k}", "activation", "bf16", ROWS, WIDTH, "tagged") for k in range(turn)]
    stages: list[Stage] = []
    for i in range(rng.randint(4, 8)):
        body = rng.choice(("gemv", "gemv", "ew", "kda"))
        shape = (ROWS * 2, ROWS) if body == "kda" else (WIDTH // 2, 1)
        acc = {"rows": "unit" if body == "kda" else "all", "step": 2, "span": 2}
        read = {"step": 0, "span": 0} if body == "gemv" else acc
        reads = [f"b{(i - 1) % turn}"] if i else []
        if turn == 3 and i > 1 and rng.random() < 0.3:
            reads.append(f"b{(i - 2) % turn}")
        stages.append(
            Stage(
                f"s{i}",
                body,
                (),
                0,
                shape[0],
                shape[1],
                rng.randint(1, min(sms, shape[0])),
                rng.randrange(sms),
                "block",
                tuple(Access(r, **read) for r in reads),
                (Access(f"b{i % turn}", **acc),),
            )
        )
    return make(stages, buffers, sms=sms, rows=ROWS)


def _try(plans: Callable[[random.Random], Plan], seeds: range) -> tuple[int, int, list[int], list[int]]:
    accepted = refused = 0
    unsound, strict = [], []
    for seed in seeds:
        rng = random.Random(seed)
        plan = plans(rng)
        ours = {v.kind for v in check_order(plan).violations}
        theirs = [x for rows in range(1, ROWS + 1) for x in unordered(plan, rows, rng)]
        accepted, refused = accepted + (not ours), refused + bool(ours)
        if theirs and not ours:  # an overwritten older write shows as our WAW
            unsound.append(seed)
        if ours - {"waw"} and not theirs:
            strict.append(seed)
    return accepted, refused, unsound, strict


def test_counter_plans_agree_with_brute_force_both_ways() -> None:
    accepted, refused, unsound, strict = _try(partial(mixed, tagged=False), range(300))
    assert accepted > 20 and refused > 20
    assert unsound == [] and strict == []


def test_tagged_plans_are_never_accepted_wrongly() -> None:
    accepted, refused, unsound, _ = _try(mixed, range(1000, 1200))
    assert accepted > 10 and refused > 20
    assert unsound == []


def test_reuse_that_rests_on_tags_is_never_accepted_wrongly() -> None:
    accepted, refused, unsound, strict = _try(tagged_chain, range(400))
    assert accepted > 40 and refused > 40
    assert unsound == []
    assert len(strict) < 100  # brute force decides one random dependency, the proof all of them
