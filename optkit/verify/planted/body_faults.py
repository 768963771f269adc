"""Faults of a stage's body, planted in the CPU executor: the same mistakes that a device body can make. Product of a site: a
context manager under which the executor is wrong and the reference is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from optkit.execute import executor, memory
from optkit.execute.bodies import BODIES, attention, common, elementwise, experts, gemv, kda, rows
from optkit.plan.types import Plan
from optkit.verify.planted.body_edits import (
    accumulates,
    after,
    batch_one,
    boundary,
    coarse,
    double_split,
    export_other_row,
    foreign_copy,
    foreign_slot,
    hidden_read,
    last_row,
    late,
    late_bias,
    long_rows,
    lose_k,
    lost_row,
    lost_split,
    null_block,
    one_less,
    one_warp,
    order,
    other_pages,
    packed_padding,
    padding_written,
    page_off,
    product,
    ranges,
    restless,
    reversed_slots,
    scaled,
    shift,
    sites,
    swap_rows,
    table_of,
    top_k,
    truncated,
    twice_k,
    unsaved,
    weights_of,
    window,
    with_inputs,
    wrong_softmax,
)
from optkit.verify.planted.registry import Fault, Site

S, P, X = "numerics.per_stage", "numerics.probes", "numerics.exact"
LOGITS, CHOICES, STATE, EDGES, REPEAT, ORDERS = (
    "rollout.logits",
    "rollout.choices",
    "rollout.state",
    "boundary",
    "repeat.bits",
    "orders.bits",
)


def F(name: str, kind: str, where: Callable[[Plan], Iterable[Site]], *gates: str, variant: str = "splits") -> Fault:
    """A body fault: name, kind, sites, the gates that must see it (teacher-forced stages by default)."""
    return Fault(name, kind, "body", gates or (S,), where, variant)


K3 = ("kda",)
FAULTS: tuple[Fault, ...] = (
    # ---- routing
    F(
        "top-k without the best",
        "top-k off by one",
        sites(experts, "top_k", top_k(lambda s, b, n: order(s + b)[:, 1 : n + 1]), "route"),
        X,
    ),
    F(
        "top-k takes the next instead of the last",
        "top-k off by one",
        sites(
            experts,
            "top_k",
            top_k(lambda s, b, n: torch.cat([order(s + b)[:, : n - 1], order(s + b)[:, n : n + 1]], 1)),
            "route",
        ),
        X,
    ),
    F(
        "selection without the bias",
        "wrong arithmetic",
        sites(experts, "top_k", top_k(lambda s, b, n: order(s)[:, :n]), "route"),
        X,
    ),
    F(
        "selection of the smallest",
        "top-k off by one",
        sites(experts, "top_k", top_k(lambda s, b, n: order(-s - b)[:, :n]), "route"),
        X,
    ),
    F("weights not normalised", "missing scale", sites(experts, "top_k", weights_of(lambda w, s: s), "route"), S),
    F(
        "weights of the other order",
        "wrong operand",
        sites(experts, "top_k", weights_of(lambda w, s: w.flip(-1)), "route"),
        S,
    ),
    F(
        "weights in bf16",
        "wrong arithmetic",
        sites(experts, "top_k", weights_of(lambda w, s: coarse(6)(w)), "route"),
        S,
    ),
    F(
        "one expert lost from the table",
        "lost work",
        sites(experts, "distinct", table_of(lambda t, r: [t[0] - 1, *t[1:]]), "route"),
        X,
    ),
    F("one row's choice lost", "lost work", sites(experts, "distinct", table_of(lost_row), "route"), X),
    F(
        "experts listed in another order",
        "nondeterminism",
        sites(experts, "distinct", table_of(reversed_slots), "route"),
        X,
    ),
    F(
        "an expert listed with its neighbour's weights",
        "wrong address",
        sites(experts, "distinct", table_of(lambda t, r: [t[0], t[1] ^ 1, *t[2:]]), "route"),
        X,
    ),
    F(
        "choices exported for another row",
        "wrong operand",
        sites(executor.Executor, "choices", export_other_row, "route"),
        CHOICES,
        LOGITS,
    ),
    # ---- products
    F("last columns of K lost", "split-K partial", sites(gemv, "tile_product", product(lose_k)), S),
    F("first columns of K counted twice", "split-K partial", sites(gemv, "tile_product", product(twice_k)), S),
    F("partial sum of one warp lost", "split-K partial", sites(gemv, "tile_product", product(one_warp)), S),
    F("last row of a tile lost", "lost work", sites(gemv, "tile_product", product(last_row)), S),
    F(
        "operand truncated instead of rounded",
        "wrong arithmetic",
        sites(gemv, "round_bf16", lambda old, k: truncated),
        S,
    ),
    F(
        "residual sum rounded coarsely",
        "wrong arithmetic",
        sites(gemv, "round_bf16", lambda old, k: lambda x: coarse(7)(x)),
        S,
    ),
    F(
        "activation of gate alone",
        "wrong arithmetic",
        sites(gemv, "activation", lambda old, k: lambda a, g, u, b, lb: old(a, g, torch.ones_like(u), b, lb)),
        S,
    ),
    F(
        "experts' activation of gate alone",
        "wrong arithmetic",
        sites(
            experts,
            "activation",
            lambda old, k: lambda a, g, u, b, lb: old(a, g, torch.ones_like(u), b, lb),
            "expert_gate_up",
        ),
        S,
    ),
    F(
        "up branch not clipped",
        "wrong arithmetic",
        sites(gemv, "activation", lambda old, k: lambda a, g, u, b, lb: old(a, g, u, b, 1e6 if lb else lb), "kda"),
        P,
    ),
    F(
        "mean of squares over half the row",
        "wrong arithmetic",
        sites(common, "rms_scale", lambda old, k: lambda h, eps: old(h[..., : h.shape[-1] // 2], eps)),
        S,
    ),
    F(
        "norm divides by the sum",
        "missing scale",
        sites(common, "rms_scale", lambda old, k: lambda h, eps: old(h, eps) * h.shape[-1] ** -0.5),
        S,
    ),
    F(
        "mix of equal shares",
        "wrong arithmetic",
        sites(
            common,
            "mix_from_statistics",
            lambda old, k: lambda saved, p, stats, u, eps: torch.stack([*saved, p], 1).mean(1),
            "kda",
        ),
        S,
    ),
    F(
        "mix without the newest row",
        "lost work",
        sites(
            common,
            "mix_from_statistics",
            lambda old, k: lambda saved, p, stats, u, eps: old(saved, p * 0, stats, u, eps),
            "kda",
        ),
        S,
    ),
    F(
        "statistics of the wrong direction",
        "wrong operand",
        sites(rows, "mix_direction", lambda old, k: lambda mem, n, p: old(mem, n, p).roll(1), "blockstats"),
        S,
    ),
    F(
        "expert outputs without their weights",
        "missing scale",
        sites(BODIES, "expert_down", after(scaled(2.0)), "expert_down"),
        S,
    ),
    F(
        "epsilon of a norm x 10 in the body",
        "epsilon x 10",
        sites(common, "rms_scale", lambda old, k: lambda h, eps: old(h, 10 * eps)),
        P,
    ),
    # ---- KDA
    F(
        "decay of one",
        "wrong arithmetic",
        sites(kda, "decay", lambda old, k: lambda *a: torch.ones_like(old(*a)), "kda"),
        S,
    ),
    F("decay squared", "wrong arithmetic", sites(kda, "decay", lambda old, k: lambda *a: old(*a) ** 2, "kda"), S),
    F("decay in bf16", "wrong arithmetic", sites(kda, "decay", lambda old, k: lambda *a: coarse(5)(old(*a)), "kda"), S),
    F(
        "old state read out",
        "stale value",
        sites(kda, "_delta", lambda old, k: lambda s, q, *a: (old(s, q, *a)[0], (s @ q[..., None])[..., 0]), "kda"),
        S,
    ),
    F(
        "key not normalised in the update",
        "wrong arithmetic",
        sites(kda, "_delta", lambda old, k: lambda s, q, kk, *a: old(s, q, 2 * kk, *a), "kda"),
        S,
    ),
    F(
        "beta not squashed",
        "wrong arithmetic",
        sites(kda, "_delta", lambda old, k: lambda s, q, kk, v, a, b: old(s, q, kk, v, a, torch.logit(b)), "kda"),
        S,
    ),
    F(
        "query not scaled",
        "missing scale",
        sites(kda, "_delta", lambda old, k: lambda s, q, *a: old(s, q * 2, *a), "kda"),
        P,
        S,
    ),
    F(
        "state in bf16",
        "wrong arithmetic",
        sites(kda, "_delta", lambda old, k: lambda *a: (coarse(6)(old(*a)[0]), old(*a)[1]), "kda"),
        S,
        LOGITS,
    ),
    F(
        "state transposed",
        "state in the wrong slot",
        sites(kda, "_delta", lambda old, k: lambda *a: (old(*a)[0].transpose(-1, -2), old(*a)[1]), "kda"),
        S,
    ),
    F(
        "KDA rows exchange their slots",
        "state in the wrong slot",
        sites(BODIES, "kda", with_inputs(swap_rows("state_slot")), "kda"),
        S,
    ),
    F(
        "KDA row writes a slot of nobody",
        "state in the wrong slot",
        sites(BODIES, "kda", with_inputs(foreign_slot), "kda"),
        X,
    ),
    F(
        "KDA padding row written",
        "padding row written",
        sites(BODIES, "kda", with_inputs(padding_written("state_slot")), "kda"),
        EDGES,
    ),
    F("recurrent state not saved", "stale value", sites(BODIES, "kda", unsaved("recurrent"), "kda"), S),
    F("convolution window not saved", "stale value", sites(BODIES, "kda", unsaved("conv"), "kda"), S),
    # ---- caches
    F(
        "MLA rows exchange their slots",
        "state in the wrong slot",
        sites(BODIES, "mla_insert", with_inputs(swap_rows("slot_mapping")), "mla_insert"),
        S,
    ),
    F(
        "MLA row goes to block 0",
        "state in the wrong slot",
        sites(BODIES, "mla_insert", with_inputs(null_block), "mla_insert"),
        X,
    ),
    F(
        "MLA row one token late",
        "state in the wrong slot",
        sites(BODIES, "mla_insert", with_inputs(shift("slot_mapping", 1)), "mla_insert"),
        S,
        X,
    ),
    F(
        "MLA padding row written",
        "padding row written",
        sites(BODIES, "mla_insert", with_inputs(padding_written("slot_mapping")), "mla_insert"),
        EDGES,
    ),
    F("MLA row not saved", "stale value", sites(BODIES, "mla_insert", unsaved("kv"), "mla_insert"), S),
    F(
        "rotary rows exchange their slots",
        "state in the wrong slot",
        sites(BODIES, "rope_insert", with_inputs(swap_rows("slot_mapping")), "rope_insert"),
        S,
    ),
    F(
        "rotary row goes to block 0",
        "state in the wrong slot",
        sites(BODIES, "rope_insert", with_inputs(null_block), "rope_insert"),
        X,
    ),
    F(
        "rotary padding row written",
        "padding row written",
        sites(BODIES, "rope_insert", with_inputs(padding_written("slot_mapping")), "rope_insert"),
        EDGES,
    ),
    F(
        "rotary position one off",
        "wrong RoPE base",
        sites(BODIES, "rope_insert", with_inputs(shift("seq_len", 1)), "rope_insert"),
        S,
    ),
    F(
        "rotary position zero",
        "wrong RoPE base",
        sites(attention, "rotate", lambda old, k: lambda t, pos, *a: old(t, pos * 0, *a), "rope_insert"),
        S,
    ),
    F(
        "neighbouring pairs rotated",
        "wrong RoPE base",
        sites(attention, "rotate", lambda old, k: lambda t, pos, *a: old(t.roll(1, -1), pos, *a), "rope_insert"),
        S,
    ),
    # ---- attention
    F("last split lost", "split-K partial", sites(attention, "split_ranges", ranges(lost_split)), S),
    F("a split counted twice", "split-K partial", sites(attention, "split_ranges", ranges(double_split)), S),
    F("splits leave a token between them", "split-K partial", sites(attention, "split_ranges", ranges(boundary(1))), S),
    F("newest token not seen", "wrong masking", sites(attention, "_length", one_less), S),
    F("splits averaged", "split-K partial", sites(attention, "attention_combine", wrong_softmax), S),
    F("pages of another request", "wrong address", sites(BODIES, "attn", with_inputs(other_pages)), S),
    F("pages in the wrong order", "wrong address", sites(BODIES, "attn", with_inputs(page_off)), S),
    F(
        "context cut where tables end",
        "wrong masking",
        sites(BODIES, "attn", with_inputs(late(window)), "rope_insert"),
        LOGITS,
    ),
    F(
        "scores in bf16",
        "wrong arithmetic",
        sites(
            attention,
            "attention_part",
            lambda old, k: (
                lambda q, kk, v, s: (
                    old(q, kk, v, s)
                    if not len(kk)
                    else (old(q, kk, v, s)[0], old(q, kk, v, s)[1] * 1.02, old(q, kk, v, s)[2])
                )
            ),
        ),
        S,
    ),
    # ---- whole steps
    F("a single row taken for padding", "padding row written", sites(executor.Executor, "step", batch_one), EDGES),
    F("padding taken to be last", "padding row written", sites(executor.Executor, "step", packed_padding), EDGES),
    F("tokens of the step before in long requests", "stale value", sites(executor.Executor, "step", long_rows), LOGITS),
    F("bias lost in long requests", "wrong constant", sites(BODIES, "route", late_bias, "route"), CHOICES),
    F(
        "a copy in a foreign slot in long requests",
        "state in the wrong slot",
        sites(BODIES, "kda", after(foreign_copy), "kda"),
        STATE,
    ),
    F("results accumulate on leftovers", "stale value", sites(BODIES, "gemv", accumulates), REPEAT),
    F("sums in changing order", "nondeterminism", sites(BODIES, "gemv", restless), REPEAT, ORDERS),
    F("a read that the Plan does not name", "undeclared access", hidden_read, ORDERS),
    F(
        "padding rows computed",
        "padding row written",
        sites(memory.Memory, "active", lambda old, k: lambda self, name: self.plan.buffer[name].rows),
        ORDERS,
        S,
    ),
    F(
        "reduction without one rank",
        "split-K partial",
        sites(elementwise, "_add", lambda old, k: lambda p, terms: old(p, [0.5 * terms[0], *terms[1:]]), "ew"),
        S,
        variant="unfused",
    ),
)
