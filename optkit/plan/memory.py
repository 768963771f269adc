"""Device bytes per GPU: weights of the rank, paged KV and states at the recipe's batch and context, workspace."""

from __future__ import annotations

from math import ceil

from optkit.models.graph import DTYPE_BYTES, Graph, State
from optkit.plan.choices import PlanChoices
from optkit.plan.types import Buffer


def state_bytes(s: State, choices: PlanChoices) -> int:
    """Bytes of one state for the largest batch of `decode.context` tokens each (KV in whole blocks)."""
    n = DTYPE_BYTES[s.dtype]
    for d in s.shape:
        n *= d
    if s.kind == "kv_heads":
        n *= 2  # keys and values
    cache = choices.cache
    if s.kind in ("kv", "kv_heads"):
        per_request = ceil(choices.decode.context / cache.block_size)
        return n * cache.block_size * (cache.blocks or choices.largest_batch * per_request)
    return n * (cache.slots or choices.largest_batch + 1)  # slot 0 is padding


def account(graph: Graph, buffers: tuple[Buffer, ...], choices: PlanChoices) -> tuple[tuple[str, int], ...]:
    """weights, kv, state, workspace, total, available: bytes on one GPU."""
    weights = sum(w.nbytes for w in graph.weights if w.place == "device")
    kv = sum(state_bytes(s, choices) for s in graph.states if s.kind in ("kv", "kv_heads"))
    state = sum(state_bytes(s, choices) for s in graph.states if s.kind not in ("kv", "kv_heads"))
    work = sum(b.nbytes for b in buffers if b.klass not in ("state", "input"))
    return (
        ("weights", weights),
        ("kv", kv),
        ("state", state),
        ("workspace", work),
        ("total", weights + kv + state + work),
        ("available", choices.hardware.memory),
    )


def problems(sizes: tuple[tuple[str, int], ...], graph: Graph, choices: PlanChoices) -> list[str]:
    """One line if the step does not fit."""
    s = dict(sizes)
    if s["total"] <= s["available"]:
        return []
    gb = {k: v / 1e9 for k, v in s.items()}
    d, p, hw = choices.decode, choices.parallel, choices.hardware
    return [
        f"memory: {graph.name} with parallel.tp = {p.tp}, parallel.pp = {p.pp}: {gb['total']:.1f} GB needed per GPU, "
        f"{gb['available']:.0f} there on {hw.name} (weights {gb['weights']:.1f}, KV {gb['kv']:.1f} and state "
        f"{gb['state']:.1f} for batch {choices.largest_batch} x decode.context = {d.context}, workspace "
        f"{gb['workspace']:.2f})"
    ]
