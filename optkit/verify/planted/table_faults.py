"""Faults of the descriptor table: the Plan is right, one word of what the device reads is not. Base: Lowered.

Everything here is found by reading the table back (verify/table.py); most of it would hang a GPU or give plausible numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from optkit.emit import layout as L
from optkit.plan.types import Plan, Stage
from optkit.verify.planted.registry import Fault, Site
from optkit.verify.table import Book, device_names


@dataclass(frozen=True)
class Lowered:
    """A Plan with its table and the book of addresses; products are Lowered with copies."""

    plan: Plan
    table: np.ndarray
    book: Book


def word(base: Lowered, i: int, at: int, value: int) -> Lowered:
    """One word of one descriptor replaced."""
    table = base.table.copy()
    table[i, at] = np.uint64(value & 0xFFFFFFFFFFFFFFFF).astype(np.int64)
    return Lowered(base.plan, table, base.book)


def words(
    at: int | Callable[[Lowered, int], Iterable[int]],
    change: Callable[[int], int],
    test: Callable[[Stage], bool] = lambda s: True,
    held: Callable[[int], bool] = lambda v: True,
) -> Callable[[Lowered], Iterable[Site]]:
    """Sites: word(s) `at` of every stage that passes `test` and holds something that passes `held`."""

    def sites(base: Lowered) -> list[Site]:
        out: list[Site] = []
        for i, s in enumerate(base.plan.stages):
            if not test(s):
                continue
            for w in [at] if isinstance(at, int) else at(base, i):
                v = int(np.int64(base.table[i, w]).astype(np.uint64))
                if held(v) and change(v) != v:
                    out.append((f"{s.name} word {w}", lambda i=i, w=w, v=v: word(base, i, w, change(v))))  # type: ignore[misc]
        return out

    return sites


def waits(offset: int) -> Callable[[Lowered, int], Iterable[int]]:
    """Words of the waits of a stage: 0 = counter, 1 = arrivals."""
    return lambda base, i: [L.WAITS + 2 * k + offset for k in range(int(base.table[i, L.N_WAITS]))]


def named(file: str, name: str) -> int:
    """The descriptor word of a device name."""
    return L.PARAMS + device_names()[file][name]


def parts(field: int) -> Callable[[Lowered, int], Iterable[int]]:
    """A field of every part of a gemv stage."""
    return lambda base, i: [
        L.PARTS + k * L.PART_WORDS + field for k in range(len(base.plan.stages[i].param("parts", ())))
    ]


def body(*names: str) -> Callable[[Stage], bool]:
    """Stages with one of these bodies."""
    return lambda s: s.body in names


def tenfold(v: int) -> int:
    """Ten times the float in a word."""
    return L.f32_bits(10 * float(np.uint32(v & 0xFFFFFFFF).view(np.float32)))


def swap_words(
    a: int,
    b: int,
    test: Callable[[Stage], bool],
    offsets: Callable[[Lowered, int], Iterable[int]] = lambda base, i: [0],
) -> Callable[[Lowered], Iterable[Site]]:
    """Sites: words a and b (from each offset) exchanged."""

    def sites(base: Lowered) -> list[Site]:
        out: list[Site] = []
        for i, s in enumerate(base.plan.stages):
            for o in offsets(base, i) if test(s) else ():
                x, y = int(base.table[i, o + a]), int(base.table[i, o + b])
                if x and y and x != y:
                    out.append(
                        (
                            f"{s.name} words {o + a}, {o + b}",
                            lambda i=i, o=o, x=x, y=y: word(word(base, i, o + a, y), i, o + b, x),  # type: ignore[misc]
                        )
                    )  # type: ignore[misc]
        return out

    return sites


def drop_wait(base: Lowered) -> list[Site]:
    """The last wait of a stage is not made."""
    return [
        (s.name, lambda i=i: word(base, i, L.N_WAITS, int(base.table[i, L.N_WAITS]) - 1))  # type: ignore[misc]
        for i, s in enumerate(base.plan.stages)
        if base.table[i, L.N_WAITS] > 0
    ]


def moved(
    kind: Callable[[Lowered, str], bool], by: Callable[[Lowered, str], int]
) -> Callable[[Lowered], Iterable[Site]]:
    """Sites: a region of device memory moved by so many bytes, in the book and so in the table."""

    def sites(base: Lowered) -> list[Site]:
        def make(name: str) -> Lowered:
            from optkit.emit.lower import lower

            book = Book(
                base.book.graph,
                base.plan,
                base.book.positions,
                dict(base.book.regions),
                dict(base.book.arrays),
                base.book.top,
            )
            at, size = book.regions[name]
            book.regions[name] = (at + by(base, name), size)
            return Lowered(base.plan, lower(base.plan, book.addresses()), book)

        return [(n, lambda n=n: make(n)) for n in base.book.regions if kind(base, n)]  # type: ignore[misc]

    return sites


def onto(base: Lowered, name: str, last: int = 0) -> int:
    """How far to move a region onto the one before it: to its start, or onto its `last` bytes."""
    order = sorted((at, size, n) for n, (at, size) in base.book.regions.items())
    i = [n for _, _, n in order].index(name)
    if not i:
        return 0
    at, size, _ = order[i - 1]
    return (at + (size - last if last else 0)) // 16 * 16 - order[i][0]


def is_buffer(base: Lowered, name: str) -> bool:
    """Whether a region holds a buffer of the step."""
    return name in base.plan.buffer and base.plan.buffer[name].klass in ("activation", "scratch")


def line(base: Lowered, step: int) -> list[Site]:
    """Counters `step` bytes apart: several on one cache line, or on one word."""
    sync = base.book.regions["sync"][0] + L.SYNC_COUNTERS

    def make() -> Lowered:
        table = base.table.copy()

        def at(a: int) -> int:
            n, rest = divmod(a - sync, L.LINE)
            return sync + n * step if a >= sync and not rest and n < len(base.plan.stages) else a

        for i in range(len(table)):
            for w in (L.SIGNAL, L.INDEX_WAIT, *(L.WAITS + 2 * k for k in range(int(table[i, L.N_WAITS])))):
                table[i, w] = at(int(table[i, w]))
        return Lowered(base.plan, table, base.book)

    return [(f"counters {step} bytes apart", make)]


def next_slot(base: Lowered) -> list[Site]:
    """Every peer's partial goes to the same mailbox slot."""
    out: list[Site] = []
    for i, s in enumerate(base.plan.stages):
        at = next(
            (
                L.PARTS + k * L.PART_WORDS + L.P_PEERS
                for k, p in enumerate(s.param("parts", ()))
                if p["epilogue"] == "mailbox"
            ),
            0,
        )
        if at:

            def make(i: int = i, at: int = at) -> Lowered:
                book = Book(
                    base.book.graph,
                    base.plan,
                    base.book.positions,
                    dict(base.book.regions),
                    dict(base.book.arrays),
                    base.book.top,
                )
                old = book.arrays[int(base.table[i, at])]
                b = Lowered(base.plan, base.table, book)
                return Lowered(base.plan, word(b, i, at, book.constant(np.repeat(old[:1], len(old)))).table, book)

            out.append((s.name, make))
    return out


def coefficient(base: Lowered) -> list[Site]:
    """A peer's coefficient is lost: its partial counts twice."""
    out: list[Site] = []
    for i, s in enumerate(base.plan.stages):
        at = next(
            (
                L.PARTS + k * L.PART_WORDS + L.P_COEFFS
                for k, p in enumerate(s.param("parts", ()))
                if p["epilogue"] == "mailbox"
            ),
            0,
        )
        if at:

            def make(i: int = i, at: int = at) -> Lowered:
                book = Book(
                    base.book.graph,
                    base.plan,
                    base.book.positions,
                    dict(base.book.regions),
                    dict(base.book.arrays),
                    base.book.top,
                )
                old = book.arrays[int(base.table[i, at])].copy()
                old[-1] *= 2
                return Lowered(base.plan, word(base, i, at, book.constant(old)).table, book)

            out.append((s.name, make))
    return out


def rotary(theta: float, shift: int) -> Callable[[Lowered], Iterable[Site]]:
    """The rotary table for another base, or one position off."""

    def sites(base: Lowered) -> list[Site]:
        from optkit.emit.lower import rope_table

        out: list[Site] = []
        at = named("attention", "R_TABLE")
        for i, s in enumerate(base.plan.stages):
            if s.body == "rope_insert":

                def make(i: int = i, s: Stage = s) -> Lowered:
                    book = Book(
                        base.book.graph,
                        base.plan,
                        base.book.positions,
                        dict(base.book.regions),
                        dict(base.book.arrays),
                        base.book.top,
                    )
                    t = rope_table(
                        s.param("dim"), s.param("theta") * theta, s.param("scaling"), base.book.positions + shift
                    )[shift:]
                    return Lowered(base.plan, word(base, i, at, book.constant(t)).table, book)

                out.append((s.name, make))
        return out

    return sites


def F(name: str, kind: str, gate: str, sites: Callable[[Lowered], Iterable[Site]], variant: str = "own") -> Fault:
    """A fault of the table: `gate` names one or more of the table checks, without "table."."""
    return Fault(name, kind, "table", tuple(f"table.{g}" for g in gate.split()), sites, variant)


def neighbour(base: Lowered) -> list[Site]:
    """A projection's weight is that of the next projection."""
    at = [i for i, s in enumerate(base.plan.stages) if s.body == "gemv"]
    w = L.PARTS + L.P_W
    return [
        (base.plan.stages[i].name, lambda i=i, j=j: word(base, i, w, int(base.table[j, w])))  # type: ignore[misc]
        for i, j in zip(at, at[1:], strict=False)
    ]


def gemv_operand(base: Lowered, i: int) -> Iterable[int]:
    """Meta words of the inputs of a prologue."""
    x = base.plan.stages[i].param("x")
    return [L.PARAMS + L.X_IN + 2 * k + 1 for k in range(len(x["inputs"]))] if x else []


def tagged(v: int) -> bool:
    """Whether a meta word says that the buffer is tagged."""
    return bool(v & L.META_TAGGED)


def up(v: int) -> int:
    """One more."""
    return v + 1


def down(v: int) -> int:
    """One less."""
    return v - 1


many = body("gemv")
FAULTS: tuple[Fault, ...] = (
    # ---- work
    F("calls the next body", "wrong work", "work", words(L.BODY, up, lambda s: s.body != "expert_down")),
    F("one unit too few", "lost work", "work", words(L.UNITS, down)),
    F("one unit too many", "wrong work", "work", words(L.UNITS, up)),
    F("one task too few", "lost work", "work", words(L.TASKS, down)),
    F("one task too many", "wrong work", "work", words(L.TASKS, up)),
    F("first SM one off", "wrong work", "work", words(L.FIRST_SM, up)),
    F("block and cyclic exchanged", "wrong work", "work", words(L.ASSIGN, lambda v: v ^ 1)),
    F("units of a row", "wrong work", "work", words(L.PER_ROW, up)),
    F("arrival of every SM without a barrier", "wait on a wrong count", "work", words(L.ALL_SMS, lambda v: v ^ 1)),
    F("arrival of own SMs at a barrier", "wait on a wrong count", "work", words(L.ALL_SMS, lambda v: v ^ 1), "barrier"),
    F("a word nobody reads is set", "wrong shape", "work", words(L.DESC_WORDS - 1, lambda v: 7)),
    # ---- waits and signals
    F("last wait not made", "dropped wait", "waits", drop_wait),
    F("last wait not made, counters", "dropped wait", "waits", drop_wait, "counter"),
    F("no wait at the barrier", "dropped wait", "waits", words(L.N_WAITS, lambda v: 0, held=bool), "barrier"),
    F("one arrival too few", "wait on a wrong count", "waits", words(waits(1), down)),
    F("one arrival too many", "wait on a wrong count", "waits", words(waits(1), up)),
    F("no arrivals", "wait on a wrong count", "waits", words(waits(1), lambda v: 0)),
    F("arrivals of all SMs", "wait on a wrong count", "waits", words(waits(1), lambda v: 132 if v != 132 else 131)),
    F("counter of the next stage", "wrong wait", "waits", words(waits(0), lambda v: v + L.LINE)),
    F("counter of the stage before", "wrong wait", "waits", words(waits(0), lambda v: v - L.LINE)),
    F("waits on the abort word", "wrong wait", "waits", words(waits(0), lambda v: (1 << 33) + L.SYNC_ABORT)),
    F("signal dropped", "dropped signal", "waits", words(L.SIGNAL, lambda v: 0, held=bool)),
    F("signal dropped, counters", "dropped signal", "waits", words(L.SIGNAL, lambda v: 0, held=bool), "counter"),
    F("signal dropped at the barrier", "dropped signal", "waits", words(L.SIGNAL, lambda v: 0, held=bool), "barrier"),
    F(
        "signal to the next stage's counter",
        "dropped signal",
        "waits",
        words(L.SIGNAL, lambda v: v + L.LINE, held=bool),
    ),
    F(
        "signal into the health word",
        "dropped signal",
        "waits",
        words(L.SIGNAL, lambda v: (1 << 33) + L.SYNC_HEALTH, held=bool),
    ),
    F("index wait dropped", "dropped wait", "waits", words(L.INDEX_WAIT, lambda v: 0, held=bool)),
    F("index wait on another stage", "wrong wait", "waits", words(L.INDEX_WAIT, lambda v: v - L.LINE, held=bool)),
    F("index arrivals zero", "wait on a wrong count", "waits", words(L.INDEX_ARRIVALS, lambda v: 0, held=bool)),
    F("index arrivals one too many", "wait on a wrong count", "waits", words(L.INDEX_ARRIVALS, up, held=bool)),
    F(
        "tiles queued ahead where the Plan says after",
        "signal before write",
        "waits",
        words(L.STREAM, lambda v: 0, held=bool),
        "late",
    ),
    F("tiles queued after where the Plan says ahead", "wrong wait", "waits", words(L.STREAM, lambda v: 1, many)),
    F(
        "more waits than a descriptor holds",
        "wait on a wrong count",
        "waits",
        words(L.N_WAITS, lambda v: L.MAX_WAITS + 1),
    ),
    F("counters on half lines", "counter and flag on one line", "waits", lambda b: line(b, L.LINE // 2), "counter"),
    F("counters four bytes apart", "counter and flag on one line", "waits", lambda b: line(b, 4), "counter"),
    F("all counters one word", "epoch reused", "waits", lambda b: line(b, 0), "counter"),
    # ---- tags
    F(
        "tag one too high",
        "tag off by one",
        "tags",
        words(gemv_operand, lambda v: v + (1 << 8), many, tagged),
        "tagged",
    ),
    F("tag one too low", "tag off by one", "tags", words(gemv_operand, lambda v: v - (1 << 8), many, tagged), "tagged"),
    F(
        "tag of nobody",
        "tag off by one",
        "tags",
        words(gemv_operand, lambda v: v & ~0xFFFFFF00, many, tagged),
        "tagged",
    ),
    F(
        "own tag",
        "tag off by one",
        "tags",
        lambda b: [
            (
                s.name,
                lambda i=i: word(  # type: ignore[misc]
                    b, i, L.PARAMS + L.X_IN + 1, (int(b.table[i, L.PARAMS + L.X_IN + 1]) & ~0xFFFFFF00) | (i + 1) << 8
                ),
            )
            for i, s in enumerate(b.plan.stages)
            if s.body == "gemv" and tagged(int(b.table[i, L.PARAMS + L.X_IN + 1]))
        ],
        "tagged",
    ),  # type: ignore[misc]
    F(
        "result's tag one off",
        "tag off by one",
        "tags",
        words(parts(L.P_OUT_META), lambda v: v + (1 << 8), many, tagged),
        "tagged",
    ),
    F(
        "tagged words read as plain",
        "weak load of an activation",
        "tags",
        words(gemv_operand, lambda v: v & ~L.META_TAGGED, many, tagged),
        "tagged",
    ),
    F(
        "plain words read as tagged",
        "wrong mechanism",
        "tags",
        words(gemv_operand, lambda v: v | L.META_TAGGED, many),
        "counter",
    ),
    F(
        "result written without tags",
        "dropped signal",
        "tags",
        words(parts(L.P_OUT_META), lambda v: v & ~L.META_TAGGED, many, tagged),
        "tagged",
    ),
    F("bf16 read as fp32", "wrong shape", "tags", words(gemv_operand, lambda v: v ^ 1, many)),
    F("row width of an operand", "wrong shape", "tags", words(gemv_operand, lambda v: v + (8 << 32), many)),
    F(
        "residual's tag one off",
        "tag off by one",
        "tags",
        words(parts(L.P_ADD0_META), lambda v: v + (1 << 8), many, tagged),
        "tagged",
    ),
    F(
        "latent query's tag one off",
        "tag off by one",
        "tags",
        words(named("attention", "T_QL") + 1, lambda v: v - (1 << 8), body("attn"), tagged),
        "tagged",
    ),
    F(
        "routing weights' tag one off",
        "tag off by one",
        "tags",
        words(named("moe", "E_WTS") + 1, lambda v: v + (1 << 8), body("expert_down"), tagged),
        "tagged",
    ),
    F("stage names itself wrongly", "tag off by one", "waits", words(L.TAG, up)),
    # ---- addresses
    F("two buffers on the same bytes", "overlapping buffers", "addresses", moved(is_buffer, onto)),
    F("buffers overlap by a word", "overlapping buffers", "addresses", moved(is_buffer, lambda b, n: onto(b, n, 16))),
    F(
        "weights and activations overlap",
        "overlapping buffers",
        "addresses",
        moved(lambda b, n: n.startswith("model."), onto),
    ),
    F("buffer off a 16-byte boundary", "wrong address", "addresses", moved(is_buffer, lambda b, n: 8)),
    F(
        "state over another state",
        "overlapping buffers",
        "addresses",
        moved(
            lambda b, n: n.startswith("L") and (n.endswith("kv") or n.endswith("recurrent") or n.endswith(" V")), onto
        ),
    ),
    F("address cut to 32 bits", "wrong address", "addresses", words(parts(L.P_W), lambda v: v & 0xFFFFFFFF, many)),
    F("weight of another stage", "wrong operand", "addresses", neighbour),
    F(
        "gate and up weights exchanged",
        "swapped gate and up",
        "addresses",
        swap_words(
            L.P_W,
            L.P_W2,
            many,
            lambda b, i: [L.PARTS + k * L.PART_WORDS for k in range(len(b.plan.stages[i].param("parts", ())))],
        ),
    ),
    F(
        "experts' gate and up exchanged",
        "swapped gate and up",
        "addresses",
        swap_words(named("moe", "E_W1"), named("moe", "E_W3"), body("expert_gate_up")),
    ),
    F(
        "experts' gate scales exchanged",
        "swapped gate and up",
        "addresses",
        swap_words(named("moe", "E_S1"), named("moe", "E_S3"), body("expert_gate_up")),
    ),
    F(
        "conv and recurrent state exchanged",
        "wrong operand",
        "addresses",
        swap_words(named("kda", "K_CONV"), named("kda", "K_REC"), body("kda")),
    ),
    F(
        "q and k convolutions exchanged",
        "wrong operand",
        "addresses",
        swap_words(named("kda", "K_WQ"), named("kda", "K_WK"), body("kda")),
    ),
    F(
        "keys and values exchanged",
        "wrong operand",
        "addresses",
        swap_words(named("attention", "T_K"), named("attention", "T_V"), body("attn")),
    ),
    F(
        "keys and values exchanged on insert",
        "state in the wrong slot",
        "addresses",
        swap_words(named("attention", "R_K"), named("attention", "R_V"), body("rope_insert")),
    ),
    F(
        "stride of a state slot",
        "state in the wrong slot",
        "addresses",
        words(named("kda", "K_REC_STRIDE"), lambda v: v // 2, body("kda")),
    ),
    F(
        "stride of a cache page",
        "state in the wrong slot",
        "addresses",
        words(named("attention", "T_K_BLOCK"), lambda v: v // 2, body("attn")),
    ),
    F(
        "stride of a cache row",
        "state in the wrong slot",
        "addresses",
        words(named("attention", "I_ROW"), lambda v: v + 16, body("mla_insert")),
    ),
    F(
        "stride of a KV head",
        "state in the wrong slot",
        "addresses",
        words(named("attention", "T_K_HEAD"), lambda v: 2 * v, body("attn"), bool),
    ),
    F("norm weight missing", "wrong operand", "addresses", words(L.PARAMS + L.X_NORM, lambda v: 0, many, bool)),
    F(
        "mix projection is the mix norm",
        "wrong operand",
        "addresses",
        lambda b: [
            (s.name, lambda i=i: word(b, i, L.PARAMS + L.X_MIX_PROJ, int(b.table[i, L.PARAMS + L.X_MIX_NORM])))  # type: ignore[misc]
            for i, s in enumerate(b.plan.stages)
            if s.body == "gemv" and b.table[i, L.PARAMS + L.X_MIX_PROJ]
        ],
    ),  # type: ignore[misc]
    F(
        "residual added from the wrong row",
        "wrong operand",
        "addresses",
        swap_words(
            L.P_ADD0,
            L.P_ADD1,
            many,
            lambda b, i: [L.PARTS + k * L.PART_WORDS for k in range(len(b.plan.stages[i].param("parts", ())))],
        ),
    ),
    F(
        "choices exported over the experts' table",
        "overlapping buffers",
        "addresses",
        lambda b: [
            (s.name, lambda i=i: word(b, i, named("moe", "RO_IDS"), int(b.table[i, named("moe", "RO_UNIQ")])))  # type: ignore[misc]
            for i, s in enumerate(b.plan.stages)
            if s.body == "route"
        ],
    ),  # type: ignore[misc]
    # ---- constants
    F("norm epsilon x 10", "epsilon x 10", "constants", words(L.PARAMS + L.X_EPS, tenfold, many, bool)),
    F("mix epsilon x 10", "epsilon x 10", "constants", words(L.PARAMS + L.X_MIX_EPS, tenfold, many, bool)),
    F(
        "cache norm epsilon x 10",
        "epsilon x 10",
        "constants",
        words(named("attention", "I_EPS"), tenfold, body("mla_insert")),
    ),
    F("L2 epsilon x 10", "epsilon x 10", "constants", words(named("kda", "K_L2_EPS"), tenfold, body("kda"))),
    F(
        "score scale missing",
        "missing scale",
        "constants",
        words(named("attention", "T_SCALE"), lambda v: L.f32_bits(1.0), body("attn")),
    ),
    F(
        "routing scale missing",
        "missing scale",
        "constants",
        words(named("moe", "RO_SCALE"), lambda v: 0, body("route")),
    ),
    F(
        "decay bound of the other sign",
        "wrong constant",
        "constants",
        words(named("kda", "K_LOWER"), lambda v: v ^ 0x80000000, body("kda")),
    ),
    F(
        "clip of the linear branch x 10",
        "wrong constant",
        "constants",
        words(named("moe", "E_LINEAR_BETA"), tenfold, body("expert_gate_up"), bool),
    ),
    F(
        "silu for situ",
        "wrong constant",
        "constants",
        words(named("moe", "E_ACT"), lambda v: v ^ 1, body("expert_gate_up")),
    ),
    F("top-k one too many", "top-k off by one", "constants", words(named("moe", "RO_TOPK"), up, body("route"))),
    F(
        "top-k one too few downstream",
        "top-k off by one",
        "constants",
        words(named("moe", "E_TOPK"), down, body("expert_down")),
    ),
    F(
        "columns of a projection one chunk short",
        "split-K partial",
        "constants",
        words(parts(L.P_K), lambda v: v - 32, many),
    ),
    F("rows of a projection one tile short", "lost work", "constants", words(parts(L.P_M), lambda v: v - 16, many)),
    F("first unit of a part", "wrong work", "constants", words(parts(L.P_FIRST), up, many)),
    F(
        "stored where it should be added",
        "wrong constant",
        "constants",
        words(parts(L.P_EPILOGUE), lambda v: 0, many, bool),
    ),
    F(
        "residual mixed as a plain norm",
        "wrong constant",
        "constants",
        words(L.PARAMS + L.X_PROLOGUE, lambda v: 1, many, lambda v: v == 2),
    ),
    F("one row of the mix lost", "lost work", "constants", words(L.PARAMS + L.X_N, down, many, lambda v: v > 1)),
    F("one addend lost", "split-K partial", "constants", words(parts(L.P_N_ADD), down, many, lambda v: v > 1)),
    F(
        "one split of the context lost",
        "split-K partial",
        "constants",
        words(named("attention", "T_SPLITS"), down, body("attn_combine")),
        "splits",
    ),
    F(
        "one split combined twice",
        "split-K partial",
        "constants",
        words(named("attention", "T_SPLITS"), up, body("attn_combine")),
        "splits",
    ),
    F("heads of a group", "wrong shape", "constants", words(named("attention", "T_HPG"), down, body("attn"))),
    F(
        "vocabulary shifted by a row",
        "wrong constant",
        "constants",
        words(named("elementwise", "EM_START"), up, body("embed")),
    ),
    F("rotary base x 10", "wrong RoPE base", "constants", rotary(10.0, 0)),
    F("rotary table one position off", "wrong RoPE base", "constants", rotary(1.0, 1)),
    F("every peer in one mailbox slot", "overlapping buffers", "constants", next_slot, "ranks"),
    F("a peer's partial counted twice", "split-K partial", "constants", coefficient, "ranks"),
    F(
        "a rank lost in the reduction",
        "split-K partial",
        "constants",
        words(named("elementwise", "EW_RANKS"), down, body("ew"), bool),
        "ranks",
    ),
    F(
        "group rows of the latent query",
        "wrong shape",
        "constants",
        words(parts(L.P_X_STRIDE), lambda v: v - 64, many, bool),
    ),
)
