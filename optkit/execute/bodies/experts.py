"""Routing and routed experts. Experts are addressed by slot of the `uniq` table, so counts are static.

uniq i32 [1, 1 + S (1 + R)]: number of distinct experts, then per slot the expert and, per class row, the k at which
that row chose it, or -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from optkit.execute.bodies.common import class_rows, elementwise, runs
from optkit.execute.bodies.gemv import round_bf16
from optkit.execute.memory import Memory
from optkit.models.ops import activation
from optkit.plan.types import Stage


def top_k(logits: torch.Tensor, bias: torch.Tensor, topk: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [R, E] -> ids [R, topk] by falling sigmoid + bias (ties: lower id), weights [R, topk]."""
    s = torch.sigmoid(logits)
    ids = torch.sort(s + bias, dim=-1, descending=True, stable=True).indices[:, :topk]
    chosen = s.gather(-1, ids)
    total = chosen[:, :1]
    for k in range(1, topk):
        total = total + chosen[:, k : k + 1]
    return ids, chosen / (total + 1e-20) * scale


def distinct(ids: list[list[int]], class_size: int) -> list[int]:
    """The uniq table of the active rows' ids, experts in first-appearance order over (row, k); unused slots are -1."""
    topk = len(ids[0])
    slots: dict[int, list[int]] = {}
    for row, chosen in enumerate(ids):
        for k, expert in enumerate(chosen):
            slots.setdefault(expert, [-1] * class_size)[row] = k
    table = [len(slots)]
    for expert, where in slots.items():
        table += [expert, *where]
    return table + [-1] * (1 + class_size * topk * (1 + class_size) - len(table))


def route(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """logits -> ids, wts, uniq; one unit."""
    for _ in units:
        logits = class_rows(mem, stage.param("logits"))
        ids, wts = top_k(logits, mem.weights.dense(stage.param("bias")), stage.param("topk"), stage.param("scale"))
        ids, wts = ids[: mem.rows].int(), wts[: mem.rows]
        mem.store(stage.param("ids"), ids)
        mem.store(stage.param("wts"), wts)
        table = torch.tensor([distinct(ids.tolist(), mem.class_rows)], dtype=torch.int32, device=mem.device)
        mem.store(stage.param("uniq"), table)
        mem.choices[stage.name] = ids.clone()


@dataclass(frozen=True)
class Slot:
    """One distinct expert of the step and the (row, k) pairs that chose it."""

    expert: int
    pairs: tuple[tuple[int, int], ...]


def slots_of(mem: Memory, name: str) -> list[Slot]:
    """The uniq table read back."""
    table = mem.load(name)[0].tolist()
    stride = 1 + mem.class_rows
    out = []
    for u in range(table[0]):
        expert, *where = table[1 + u * stride : 1 + (u + 1) * stride]
        out.append(Slot(expert, tuple((r, k) for r, k in enumerate(where) if k >= 0)))
    return out


def expert_gate_up(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """Units (slot u, 8 gate and 8 up rows j): act(W1_e z, W3_e z) of the rows that chose the expert; no slot, no work."""
    inter, topk = stage.param("inter"), stage.param("topk")
    per = inter // 8
    slots = slots_of(mem, stage.param("uniq"))
    z = round_bf16(class_rows(mem, stage.param("z")))
    by_slot: dict[int, list[int]] = {}
    for i in units:
        if i // per < len(slots):
            by_slot.setdefault(i // per, []).append(i % per)
    if not by_slot:
        return
    whole = torch.empty((mem.rows, topk * inter), device=mem.device)
    complete = len(by_slot) == len(slots) and all(len(j) == per for j in by_slot.values())
    for u, columns in by_slot.items():
        w1 = mem.weights.expert_tiles(stage.param("w1"), slots[u].expert, 8)
        w3 = mem.weights.expert_tiles(stage.param("w3"), slots[u].expert, 8)
        for lo, hi in runs(columns):
            a = _gate_up(stage, z, w1[lo:hi], w3[lo:hi]).transpose(0, 1).flatten(1)
            for r, k in slots[u].pairs:
                whole[r, k * inter + lo * 8 : k * inter + hi * 8] = a[r]
                if not complete:
                    mem.store(stage.param("out"), a[r : r + 1], (r, r + 1), k * inter + lo * 8)
    if complete:  # every unit of every slot: the table is a partition, so all columns of all rows are there
        mem.store(stage.param("out"), whole)


def _gate_up(stage: Stage, z: torch.Tensor, w1: torch.Tensor, w3: torch.Tensor) -> torch.Tensor:
    """z [rows, L], tiles [n, 8, L] -> [n, rows, 8]."""
    x = z.expand(len(w1), *z.shape)
    gate, up = torch.bmm(x, w1.transpose(1, 2)), torch.bmm(x, w3.transpose(1, 2))
    return elementwise(
        lambda g, u: activation(stage.param("act"), g, u, stage.param("beta"), stage.param("linear_beta")), gate, up
    )


def expert_down(stage: Stage, units: Sequence[int], mem: Memory) -> None:
    """16 rows of y[r] = sum over slots, in order, of wts[r, k] * (W2_e ea[r, k]); mailbox slot p: coeffs[p] *."""
    inter, coeffs = stage.param("inter"), stage.param("coeffs")
    slots = slots_of(mem, stage.param("uniq"))
    ea, wts = mem.load(stage.param("ea")).float(), mem.load(stage.param("wts"))
    x = torch.zeros((len(slots), mem.class_rows, inter), device=mem.device)
    share = torch.zeros((len(slots), mem.class_rows, 1), device=mem.device)
    for n, slot in enumerate(slots):
        for r, k in slot.pairs:
            x[n, r] = ea[r, k * inter : (k + 1) * inter]
            share[n, r] = wts[r, k]
    for lo, hi in runs(units):
        y = torch.zeros((hi - lo, mem.class_rows, 16), device=mem.device)
        for n, slot in enumerate(slots):
            w = mem.weights.expert_tiles(stage.param("w2"), slot.expert, 16)[lo:hi]
            y += torch.bmm(x[n].expand(hi - lo, *x.shape[1:]), w.transpose(1, 2)) * share[n]
        y = y.transpose(0, 1).flatten(1)[: mem.rows]
        if coeffs:
            y = torch.stack([c * y for c in coeffs])
        mem.store(stage.param("out"), y, None, lo * 16)
