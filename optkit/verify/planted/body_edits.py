"""What can be wrong in a stage's body, as patches of the CPU executor: the edits of body_faults.py.

A patch replaces a name in the executor's own modules and never in models.ops, which the reference uses. Products of sites are
context managers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch

from optkit.execute import executor
from optkit.execute.bodies import experts
from optkit.execute.memory import Memory
from optkit.plan.types import Plan, Stage
from optkit.verify.planted.registry import Site

Patch = Callable[[], AbstractContextManager[None]]
EDGE = 170
"""A length that only the rollout reaches: teacher-forced stages end at 162 tokens, boundary cases at 72."""


@contextmanager
def patched(owner: Any, name: str, new: Any) -> Iterator[None]:
    """One attribute (or dictionary entry) replaced for a while."""
    table = isinstance(owner, dict)
    old = owner[name] if table else getattr(owner, name)
    if table:
        owner[name] = new(old)
    else:
        setattr(owner, name, new(old))
    try:
        yield
    finally:
        if table:
            owner[name] = old
        else:
            setattr(owner, name, old)


def uses(plan: Plan, *bodies: str) -> bool:
    """Whether the Plan has a stage with one of these bodies."""
    return bool({s.body for s in plan.stages} & set(bodies))


def sites(
    owner: Any, name: str, wrong: Callable[[Any, int], Any], *bodies: str, n: int = 3
) -> Callable[[Plan], Iterable[Site]]:
    """Sites 0..n-1 of a wrong version of `owner.name`, for Plans that use one of `bodies`."""

    def make(plan: Plan) -> list[Site]:
        return [
            (f"variant {k}", lambda k=k: patched(owner, name, lambda old: wrong(old, k)))  # type: ignore[misc]
            for k in range(n)  # type: ignore[misc]
            if not bodies or uses(plan, *bodies)
        ]

    return make


Body = Callable[[Stage, Any, Memory], None]


def after(change: Callable[[Stage, Any, Memory, int], None]) -> Callable[[Body, int], Body]:
    """The body, then a change of what it stored."""

    def wrong(old: Body, k: int) -> Body:
        def run(stage: Stage, units: Any, mem: Memory) -> None:
            old(stage, units, mem)
            change(stage, units, mem, k)

        return run

    return wrong


def with_inputs(
    change: Callable[[dict[str, torch.Tensor], Memory, int], dict[str, torch.Tensor]],
) -> Callable[[Body, int], Body]:
    """The body, with other step inputs than vLLM gave."""

    def wrong(old: Body, k: int) -> Body:
        def run(stage: Stage, units: Any, mem: Memory) -> None:
            kept = mem.inputs
            mem.inputs = {**kept, **change(kept, mem, k)}
            try:
                old(stage, units, mem)
            finally:
                mem.inputs = kept

        return run

    return wrong


def swap_rows(key: str) -> Callable[[dict[str, torch.Tensor], Memory, int], dict[str, torch.Tensor]]:
    """Two rows exchange this input."""

    def change(inputs: dict[str, torch.Tensor], mem: Memory, k: int) -> dict[str, torch.Tensor]:
        t = inputs[key].clone()
        if len(t) > 1:
            t[[0, 1]] = t[[1, 0]]
        return {key: t}

    return change


def shift(
    key: str, by: int, live: Callable[[torch.Tensor], torch.Tensor] = lambda t: t >= 0
) -> Callable[[dict[str, torch.Tensor], Memory, int], dict[str, torch.Tensor]]:
    """Live rows' input moved by `by`."""
    return lambda inputs, mem, k: {key: torch.where(live(inputs[key]), inputs[key] + by, inputs[key])}


def foreign_slot(inputs: dict[str, torch.Tensor], mem: Memory, k: int) -> dict[str, torch.Tensor]:
    """Row 0 writes to a state slot that no row uses."""
    t = inputs["state_slot"].clone()
    t[0] = next(i for i in range(1, 16) if i not in t.tolist())
    return {"state_slot": t}


def foreign_copy(stage: Stage, units: Any, mem: Memory, k: int) -> None:
    """Beside its own, a long request's row also writes a slot that no row uses."""
    slots = mem.inputs["state_slot"].tolist()
    if int(mem.inputs["seq_len"].max()) > EDGE + k:
        held = mem.caches[stage.param("recurrent")]
        assert isinstance(held, torch.Tensor)
        held[next(i for i in range(1, len(held)) if i not in slots)] = held[slots[0]]


def null_block(inputs: dict[str, torch.Tensor], mem: Memory, k: int) -> dict[str, torch.Tensor]:
    """Row 0 writes to a token of block 0, which is nobody's."""
    t = inputs["slot_mapping"].clone()
    t[0] = 3
    return {"slot_mapping": t}


def padding_written(key: str) -> Callable[[dict[str, torch.Tensor], Memory, int], dict[str, torch.Tensor]]:
    """Padding rows are taken for live ones: they write slot 1, or token 1."""
    low = 0 if key == "slot_mapping" else 1
    return lambda inputs, mem, k: {key: torch.where(inputs[key] < low, torch.full_like(inputs[key], 1), inputs[key])}


def late(
    change: Callable[[dict[str, torch.Tensor], Memory, int], dict[str, torch.Tensor]],
) -> Callable[[dict[str, torch.Tensor], Memory, int], dict[str, torch.Tensor]]:
    """The change only where a request is longer than EDGE."""
    return lambda inputs, mem, k: change(inputs, mem, k) if int(inputs["seq_len"].max()) > EDGE + k else {}


def window(inputs: dict[str, torch.Tensor], mem: Memory, k: int) -> dict[str, torch.Tensor]:
    """The page table has room for EDGE tokens: what lies beyond is not seen."""
    return {"seq_len": inputs["seq_len"].clamp(max=EDGE + k - 16)}


# ---- routing
def top_k(change: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]) -> Callable[[Any, int], Any]:
    """top_k with other selection scores: change(sigmoid, bias, variant)."""

    def wrong(old: Any, k: int) -> Any:
        def run(logits: torch.Tensor, bias: torch.Tensor, topk: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
            s = torch.sigmoid(logits)
            ids = change(s, bias, topk)
            chosen = s.gather(-1, ids)
            return ids, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale

        return run

    return wrong


def order(t: torch.Tensor) -> torch.Tensor:
    """Indices by falling score; ties: the lower index."""
    return torch.sort(t, dim=-1, descending=True, stable=True).indices


def weights_of(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Any, int], Any]:
    """top_k with other weights: change(ids' weights, sigmoids)."""

    def wrong(old: Any, k: int) -> Any:
        def run(logits: torch.Tensor, bias: torch.Tensor, topk: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
            ids, w = old(logits, bias, topk, scale)
            return ids, change(w, torch.sigmoid(logits).gather(-1, ids))

        return run

    return wrong


def table_of(change: Callable[[list[int], int], list[int]]) -> Callable[[Any, int], Any]:
    """Another table of distinct experts: change(table, class size)."""
    return lambda old, k: lambda ids, rows: change(old(ids, rows), rows)


def reversed_slots(table: list[int], rows: int) -> list[int]:
    """The same experts in another order: results agree but for rounding."""
    n, w = table[0], 1 + rows
    slots = [table[1 + u * w : 1 + (u + 1) * w] for u in range(n)]
    return [n, *(v for s in reversed(slots) for v in s), *table[1 + n * w :]]


def lost_row(table: list[int], rows: int) -> list[int]:
    """One row's choice of the first expert is lost."""
    out = list(table)
    at = next(i for i in range(2, 2 + rows) if out[i] >= 0)
    out[at] = -1
    return out


def export_other_row(old: Any, k: int) -> Any:
    """Choices are exported for the row before."""

    def run(self: Any) -> dict[str, torch.Tensor]:
        return {n: t.roll(1, 0) for n, t in old(self).items()}

    return run


# ---- products
def product(
    change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> Callable[[Any, int], Any]:
    """tile_product of changed operands."""
    return lambda old, k: lambda x, tiles: old(*change(x, tiles))


def lose_k(x: torch.Tensor, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The last 32 columns of K are lost."""
    t = tiles.clone()
    t[..., -32:] = 0
    return x, t


def twice_k(x: torch.Tensor, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first 32 columns of K count twice."""
    t = tiles.clone()
    t[..., :32] *= 2
    return x, t


def one_warp(x: torch.Tensor, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The partial sum of one of 8 warps is lost: every eighth group of 16 columns."""
    t = tiles.clone()
    for c in range(16, t.shape[-1], 128):
        t[..., c : c + 16] = 0
    return x, t


def last_row(x: torch.Tensor, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row 15 of a tile is not there."""
    t = tiles.clone()
    t[:, -1] = 0
    return x, t


def coarse(bits: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rounded to so many mantissa bits."""

    def run(x: torch.Tensor) -> torch.Tensor:
        m, e = torch.frexp(x.float())
        return torch.ldexp(torch.round(m * 2**bits) / 2**bits, e)

    return run


def truncated(x: torch.Tensor) -> torch.Tensor:
    """Towards zero instead of to nearest even."""
    return (x.contiguous().view(torch.int32) & -65536).view(torch.float32)


# ---- attention
def ranges(change: Callable[[list[range], int], list[range]]) -> Callable[[Any, int], Any]:
    """Other token ranges: change(ranges, tokens)."""
    return lambda old, k: lambda tokens, splits, *a: change(old(tokens, splits, *a), tokens)


def lost_split(r: list[range], tokens: int) -> list[range]:
    """The last split that holds tokens gives nothing."""
    at = max((i for i, x in enumerate(r) if x), default=-1)
    return [range(x.start, x.start) if i == at and len(r) > 1 and at > 0 else x for i, x in enumerate(r)]


def double_split(r: list[range], tokens: int) -> list[range]:
    """The second split starts where the first one did."""
    at = [i for i, x in enumerate(r) if x]
    return [range(r[at[0]].start, x.stop) if len(at) > 1 and i == at[1] else x for i, x in enumerate(r)]


def boundary(by: int) -> Callable[[list[range], int], list[range]]:
    """Splits begin `by` tokens later."""
    return lambda r, tokens: [range(min(x.start + by, x.stop), x.stop) if x.start else x for x in r]


def one_less(old: Any, k: int) -> Any:
    """Attention does not see the newest token."""
    return lambda mem, row: max(old(mem, row) - 1, 0)


def wrong_softmax(old: Any, k: int) -> Any:
    """Partials are averaged, not weighted."""

    def run(parts: list[Any]) -> torch.Tensor:
        return torch.stack([p[2] / p[1][:, None] for p in parts]).mean(0)

    return run


def other_pages(inputs: dict[str, torch.Tensor], mem: Memory, k: int) -> dict[str, torch.Tensor]:
    """Rows look into each other's pages."""
    return {"block_table": inputs["block_table"].roll(1, 0)}


def page_off(inputs: dict[str, torch.Tensor], mem: Memory, k: int) -> dict[str, torch.Tensor]:
    """Pages of a request in the wrong order from the second on."""
    t = inputs["block_table"].clone()
    if t.shape[1] > 2:
        t[:, [0, 1]] = t[:, [1, 0]]
    return {"block_table": t}


# ---- runner
def batch_one(old: Any, k: int) -> Any:
    """A step of a single row takes its token for padding."""

    def run(self: Any, inputs: Any) -> torch.Tensor:
        if len(inputs["token"]) == 1:
            inputs = {**inputs, "token": torch.zeros_like(inputs["token"])}
        return old(self, inputs)

    return run


def packed_padding(old: Any, k: int) -> Any:
    """Padding is taken to be the last rows: with n live rows, the first n are run."""

    def run(self: Any, inputs: Any) -> torch.Tensor:
        live = inputs["seq_len"] > 0
        n = int(live.sum())
        if n < len(live):
            inputs = {**inputs, "token": torch.where(torch.arange(len(live)) < n, inputs["token"], 0)}
        return old(self, inputs)

    return run


def long_rows(old: Any, k: int) -> Any:
    """From EDGE tokens on, a step gets the tokens of the step before."""

    def run(self: Any, inputs: Any) -> torch.Tensor:
        before = self.__dict__.setdefault("_before", inputs["token"])
        self.__dict__["_before"] = inputs["token"]
        if int(inputs["seq_len"].max()) > EDGE + k and len(before) == len(inputs["token"]):
            inputs = {**inputs, "token": before}
        return old(self, inputs)

    return run


def late_bias(old: Any, k: int) -> Any:
    """From EDGE tokens on, the router selects without its bias."""

    def run(stage: Stage, units: Any, mem: Memory) -> None:
        lost = int(mem.inputs["seq_len"].max()) > EDGE + k
        context = patched(
            experts, "top_k", lambda f: lambda logits, bias, topk, scale: f(logits, torch.zeros_like(bias), topk, scale)
        )
        if lost:
            with context:
                old(stage, units, mem)
        else:
            old(stage, units, mem)

    return run


def accumulates(old: Body, k: int) -> Body:
    """Results accumulate on what was in their place, scaled down to far below the band; NaN (poison) counts as nothing."""

    def run(stage: Stage, units: Any, mem: Memory) -> None:
        names = {a.buffer for a in stage.writes if a.buffer in mem.data and mem.data[a.buffer].dtype == torch.float32}
        was = {n: mem.data[n].clone() for n in names}
        old(stage, units, mem)
        for n, t in was.items():
            new = mem.data[n] != t  # what this call wrote; NaN differs from everything
            mem.data[n][...] = torch.where(new, mem.data[n] + torch.nan_to_num(t) * 2.0 ** -(12 + k), mem.data[n])

    return run


def restless(old: Body, k: int) -> Body:
    """Results depend on how often the stage has run (an order of summation that changes)."""
    calls = [0]

    def run(stage: Stage, units: Any, mem: Memory) -> None:
        old(stage, units, mem)
        calls[0] += 1
        for a in stage.writes:
            t = mem.data.get(a.buffer)
            if t is not None and t.dtype == torch.float32:
                t.mul_(1 + (calls[0] % 3) * 2.0**-22)

    return run


def scaled(by: float) -> Callable[[Stage, Any, Memory, int], None]:
    """All float results of the stage times `by`, for whole-stage calls."""

    def change(stage: Stage, units: Any, mem: Memory, k: int) -> None:
        for a in stage.writes:
            t = mem.data.get(a.buffer)
            if t is not None and t.is_floating_point():
                t.mul_(by)

    return change


def unsaved(key: str) -> Callable[[Body, int], Body]:
    """The state that `key` names is not written back."""

    def wrong(old: Body, k: int) -> Body:
        def run(stage: Stage, units: Any, mem: Memory) -> None:
            held = mem.caches[stage.param(key)]
            kept = [t.clone() for t in (held if isinstance(held, tuple) else (held,))]
            old(stage, units, mem)
            for t, was in zip(held if isinstance(held, tuple) else (held,), kept, strict=True):
                t.copy_(was)

        return run

    return wrong


def hidden_read(plan: Plan) -> list[Site]:
    """A stage reads a buffer that its Accesses do not name: the edges, derived from them, cannot know."""

    def make(i: int) -> AbstractContextManager[None]:
        name = plan.stages[i].name

        def wrong(old: Any) -> Any:
            def init(self: Any, p: Plan, *args: Any, **kw: Any) -> None:
                first = next(
                    (
                        a.buffer
                        for s in p.stages[1:]
                        if s.name == name
                        for a in s.reads
                        if a.buffer in p.buffer and p.buffer[a.buffer].klass == "activation"
                    ),
                    None,
                )
                p = replace(
                    p,
                    stages=tuple(
                        replace(s, reads=tuple(a for a in s.reads if a.buffer != first)) if s.name == name else s
                        for s in p.stages
                    ),
                )
                old(self, p, *args, **kw)

            return init

        return patched(executor.Executor, "__init__", wrong)

    at = [i for i, s in enumerate(plan.stages) if s.body == "gemv" and i > 0]
    return [(plan.stages[i].name, lambda i=i: make(i)) for i in (at[0], at[len(at) // 2], at[-1])]  # type: ignore[misc]
