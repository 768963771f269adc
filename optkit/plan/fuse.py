"""Ops -> stages: pattern rules over op kinds and dataflow (never over architecture names).

`fuse` returns stages without placement: body, ops, and params in which buffers are still graph values (type `V`).
Rules, each behind its switch where it has one:

* a norm (with the mix before it) becomes the prologue of the projections that read it      norm_projection
* linears of the same input become parts of one stage                                      packed_projections
* gate, up and activation become one "act" part                                            gate_up_act
* the last summand of a residual sum gets the sum as its epilogue (or its reduction does)  residual_add
* a product with sigmoid(gate) becomes the epilogue of the projection before it            value_gate
* conv + recurrence + gated norm are one stage; collectives become a mailbox epilogue and an elementwise stage
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from optkit.models.emulation import emulation_coefficients
from optkit.models.graph import Graph, Op, Value
from optkit.plan.bodies import PARTIAL_EXTRA, TILE_ROWS, V
from optkit.plan.choices import PlanChoices
from optkit.plan.errors import PlanError
from optkit.plan.types import Record

NO_ACT = {"act": "", "beta": 0.0, "linear_beta": 0.0}


@dataclass
class Proto:
    """A stage before placement. `order` is its preferred place (position of its first op in the graph)."""

    name: str
    body: str
    ops: tuple[str, ...]
    layer: int
    params: dict[str, Any]
    order: tuple[float, float] = (0.0, 0.0)


@dataclass
class Fused:
    """All stages of a graph (unordered), the values the planner added, and which values are mailboxes."""

    protos: list[Proto]
    extra: dict[str, Value] = field(default_factory=dict)
    mailboxes: dict[str, int] = field(default_factory=dict)  # value -> ranks


@dataclass
class Epilogue:
    """What happens to the output of one linear before it is stored."""

    kind: str
    out: str
    dtype: str
    absorbed: tuple[str, ...] = ()
    gate: str = ""
    add: tuple[str, ...] = ()
    up: Op | None = None
    act: dict[str, Any] = field(default_factory=lambda: dict(NO_ACT))
    coeffs: tuple[float, ...] = ()


class _Fuser:
    def __init__(self, graph: Graph, choices: PlanChoices) -> None:
        self.g, self.c = graph, choices
        self.position = {op.name: i for i, op in enumerate(graph.ops)}
        self.uses: dict[str, list[Op]] = defaultdict(list)
        for op in graph.ops:
            for v in dict.fromkeys(op.inputs):
                self.uses[v].append(op)
        self.made = {v: op for op in graph.ops for v in op.outputs}
        self.done: set[str] = set()
        self.out = Fused([])
        self.prologues: dict[str, Record] = {}
        self.prologue_ops: dict[str, tuple[str, ...]] = {}
        self.problems: list[str] = []

    # -- helpers ------------------------------------------------------------------------------------------------

    def sole(self, value: str) -> Op | None:
        """The only op that reads this value, if there is exactly one and the value does not leave the graph."""
        users = self.uses[value]
        return users[0] if len(users) == 1 and value not in self.g.outputs else None

    def emit(
        self, name: str, body: str, ops: tuple[str, ...], params: dict[str, Any], first: Op | None = None
    ) -> Proto:
        op = first or self.g.op(ops[0])
        proto = Proto(name, body, ops, op.layer, params, (float(self.position[op.name]), 0.0))
        self.out.protos.append(proto)
        self.done.update(ops)
        return proto

    def value(self, name: str) -> Value:
        return self.out.extra.get(name) or self.g.value(name)

    def add_value(self, name: str, width: int, dtype: str) -> V:
        self.out.extra[name] = Value(name, width, dtype)
        return V(name)

    # -- prologues ----------------------------------------------------------------------------------------------

    def plain_x(self, value: str, width: int) -> Record:
        return Record(
            prologue="copy",
            width=width,
            inputs=(V(value),),
            norm="",
            eps=0.0,
            mix_norm="",
            mix_proj="",
            mix_eps=0.0,
            stats="",
        )

    def x_of(self, value: str, width: int) -> Record:
        return self.prologues.get(value) or self.plain_x(value, width)

    def norms(self) -> None:
        """Norms and mixes: prologue of their projections, or a stage of their own."""
        for op in self.g.ops:
            user = self.sole(op.outputs[0]) if op.kind == "attnres" else op
            if user is None or (user is not op and user.kind != "rmsnorm"):
                self.norm_stage(op.outputs[0], self.mix(op, None), (op.name,))
            if op.kind != "rmsnorm":
                continue
            before = self.made.get(op.inputs[0])
            fused_mix = before is not None and before.kind == "attnres" and self.sole(op.inputs[0]) is op
            if fused_mix:
                assert before is not None
                x = self.mix(before, op)
                ops: tuple[str, ...] = (before.name, op.name)
            else:
                x = Record(
                    self.plain_x(op.inputs[0], self.g.value(op.outputs[0]).width),
                    prologue="rmsnorm",
                    norm=op.weight("w"),
                    eps=op.attr("eps"),
                )
                ops = (op.name,)
            value = op.outputs[0]
            projections = self.uses[value]
            if (
                self.c.fusion.norm_projection
                and projections
                and value not in self.g.outputs
                and all(u.kind in ("linear", "grouped_linear") for u in projections)
            ):
                self.prologues[value] = x
                self.prologue_ops[value] = ops
                self.done.update(ops)
            else:
                self.norm_stage(value, x, ops)

    def mix(self, op: Op, norm: Op | None) -> Record:
        stats: str = ""
        if self.c.overlap.early_block_stats:
            saved = op.inputs[:-1]
            stats = self.add_value(f"{(norm or op).outputs[0]}.stats", 2 * len(saved), "f32")
            self.emit(
                stats,
                "blockstats",
                (),
                {
                    "inputs": tuple(V(v) for v in saved),
                    "mix_norm": op.weight("norm"),
                    "mix_proj": op.weight("proj"),
                    "out": stats,
                    "prefix": V(op.inputs[-1]),
                },
                first=op,
            )
        return Record(
            prologue="mixnorm",
            width=self.g.value(op.outputs[0]).width,
            inputs=tuple(V(v) for v in op.inputs),
            norm=norm.weight("w") if norm else "",
            eps=norm.attr("eps") if norm else 0.0,
            mix_norm=op.weight("norm"),
            mix_proj=op.weight("proj"),
            mix_eps=op.attr("eps"),
            stats=stats,
        )

    def norm_stage(self, value: str, x: Record, ops: tuple[str, ...]) -> None:
        self.emit(value, "mixnorm", ops, {"x": x, "out": V(value)})

    # -- epilogues ----------------------------------------------------------------------------------------------

    def epilogue(self, op: Op) -> Epilogue:
        """How a linear ends; ops it swallows are marked done."""
        y = op.outputs[0]
        user = self.sole(y)
        plain = Epilogue("store", y, self.g.value(y).dtype)
        if user is None:
            return plain
        if user.kind in ("all_reduce", "all_gather"):
            return Epilogue("mailbox", y, "f32", coeffs=self.mailbox(y, user))
        if user.kind == "sigmoid_mul" and self.c.fusion.value_gate and user.inputs[0] == y:
            return Epilogue(
                "gate", user.outputs[0], self.g.value(user.outputs[0]).dtype, (user.name,), gate=user.inputs[1]
            )
        if user.kind == "act_mul" and self.c.fusion.gate_up_act and user.inputs[0] == y:
            up = self.made.get(user.inputs[1])
            if (
                up is not None
                and up.kind == op.kind == "linear"
                and up.inputs == op.inputs
                and self.sole(user.inputs[1]) is user
            ):
                return Epilogue(
                    "act",
                    user.outputs[0],
                    self.g.value(user.outputs[0]).dtype,
                    (up.name, user.name),
                    up=up,
                    act={k: user.attr(k) for k in NO_ACT},
                )
        if user.kind == "add" and self.summand(user) == y:
            others = tuple(v for v in user.inputs[1:] if v != y)
            return Epilogue("add", user.outputs[0], "bf16", (user.name,), add=(user.inputs[0], *others))
        return plain

    def summand(self, add: Op) -> str:
        """The summand whose producer also does the sum: the last one made by a linear or a reduction; "" if none."""
        if not self.c.fusion.residual_add:
            return ""
        able = [
            v
            for v in add.inputs[1:]
            if self.sole(v) is add
            and v in self.made
            and self.made[v].kind in ("linear", "grouped_linear", "all_reduce")
        ]
        return max(able, key=lambda v: self.position[self.made[v].name]) if able else ""

    def mailbox(self, value: str, collective: Op) -> tuple[float, ...]:
        """Mark a value as a mailbox; returns the factor of every slot (all ones but for emulated peers)."""
        ranks = collective.attr("ranks")
        self.out.mailboxes[value] = ranks
        if self.c.parallel.peers == "real":
            return (1.0,) * ranks
        return tuple(float(x) for x in emulation_coefficients(collective.attr("seed"), ranks, collective.attr("rank")))

    # -- linears ------------------------------------------------------------------------------------------------

    def part(self, op: Op, e: Epilogue) -> Record:
        w = self.g.weight(op.weight("w"))
        groups = op.attr("groups") if op.kind == "grouped_linear" else 1
        m, k = w.shape[-2], w.shape[-1]
        if groups > 1 and (m // groups) % TILE_ROWS:
            self.problems.append(f"{op.name}: {m // groups} output rows a group, expected a multiple of {TILE_ROWS}")
        step = TILE_ROWS // 2 if e.kind == "act" else TILE_ROWS
        return Record(
            op=op.name,
            weight=w.name,
            weight2=e.up.weight("w") if e.up else "",
            m=m,
            k=k,
            first=0,
            count=ceil(m / step),
            groups=groups,
            x_stride=op.attr("x_stride") if groups > 1 else 0,
            x_offset=op.attr("x_offset") if groups > 1 else 0,
            epilogue=e.kind,
            out=V(e.out),
            dtype=e.dtype,
            add=tuple(V(v) for v in e.add),
            gate=V(e.gate) if e.gate else "",
            coeffs=e.coeffs,
            **e.act,
        )

    def linears(self) -> None:
        """Every linear as a part of some gemv stage."""
        packs: dict[tuple[str, str], list[tuple[Op, Epilogue]]] = {}
        for op in self.g.ops:
            if op.kind not in ("linear", "grouped_linear") or op.name in self.done:
                continue
            e = self.epilogue(op)
            self.done.update((op.name, *e.absorbed))
            alone = op.kind != "linear" or e.add or e.gate or not self.c.fusion.packed_projections
            packs.setdefault((op.inputs[0], op.name if alone else ""), []).append((op, e))
        for (x, alone), members in packs.items():
            parts, first = [], 0
            ops: list[str] = []
            for op, e in members:
                part = Record(self.part(op, e), first=first)
                first += part["count"]
                parts.append(part)
                ops += [op.name, *e.absorbed]
            width = self.g.value(x).width if x in {v.name for v in self.g.values} else parts[0]["k"]
            name = members[0][0].name if alone or len(parts) == 1 else f"{x}.proj"
            self.emit(
                name,
                "gemv",
                (*self.prologue_ops.get(x, ()), *ops),
                {"x": self.x_of(x, width), "parts": tuple(parts)},
                first=members[0][0],
            )

    # -- everything else ----------------------------------------------------------------------------------------

    def ew(self, name: str, ops: tuple[str, ...], mode: str, inputs: tuple[str, ...], out: str, **more: Any) -> None:
        params = {
            "mode": mode,
            "inputs": tuple(V(v) for v in inputs),
            "out": V(out),
            "width": self.g.value(out).width,
            "dtype": self.g.value(out).dtype,
            **NO_ACT,
            **more,
        }
        self.emit(name, "ew", ops, params)

    def exchanged(self, op: Op) -> None:
        """A collective can only read what its producer put into a mailbox."""
        if op.inputs[0] not in self.out.mailboxes:
            self.problems.append(
                f"{op.name}: its input {op.inputs[0]} has another reader or leaves the graph, so it cannot be a mailbox"
            )

    def do_all_reduce(self, op: Op) -> None:
        self.exchanged(op)
        user = self.sole(op.outputs[0])
        if user is not None and user.kind == "add" and self.summand(user) == op.outputs[0]:
            others = tuple(v for v in user.inputs[1:] if v != op.outputs[0])
            self.ew(user.name, (op.name, user.name), "reduce", (op.inputs[0], user.inputs[0], *others), user.outputs[0])
        else:
            self.ew(op.name, (op.name,), "reduce", (op.inputs[0],), op.outputs[0])

    def do_all_gather(self, op: Op) -> None:
        self.exchanged(op)
        self.ew(op.name, (op.name,), "gather", (op.inputs[0],), op.outputs[0])

    def do_act_mul(self, op: Op) -> None:
        self.ew(op.name, (op.name,), "act_mul", op.inputs, op.outputs[0], **{k: op.attr(k) for k in NO_ACT})

    def do_sigmoid_mul(self, op: Op) -> None:
        self.ew(op.name, (op.name,), "sigmoid_mul", op.inputs, op.outputs[0])

    def do_add(self, op: Op) -> None:
        self.ew(op.name, (op.name,), "add", op.inputs, op.outputs[0])

    def collective_coeffs(self, value: str) -> tuple[float, ...]:
        user = self.sole(value)
        return self.mailbox(value, user) if user is not None and user.kind in ("all_reduce", "all_gather") else ()

    def do_embed(self, op: Op) -> None:
        w = self.g.weight(op.weight("w"))
        self.emit(
            op.name,
            "embed",
            (op.name,),
            {
                "weight": w.name,
                "vocab_start": op.attr("vocab_start"),
                "vocab_rows": w.shape[0],
                "width": w.shape[1],
                "out": V(op.outputs[0]),
                "coeffs": self.collective_coeffs(op.outputs[0]),
            },
        )

    def do_gated_norm(self, op: Op) -> None:
        rec = self.made[op.inputs[0]]
        conv = self.made[rec.inputs[0]]
        if rec.kind != "kda_recurrence" or conv.kind != "kda_conv" or rec.inputs[:3] != conv.outputs:
            self.problems.append(
                f"{op.name}: gated_norm needs the output of kda_conv -> kda_recurrence as its first input"
            )
            return
        q, k, v = conv.inputs
        f, b = rec.inputs[3:]
        self.emit(
            op.name,
            "kda",
            (conv.name, rec.name, op.name),
            {
                "heads": rec.attr("heads"),
                "dim": rec.attr("dim"),
                "taps": self.g.weight(conv.weight("q")).shape[1],
                "lower_bound": rec.attr("lower_bound"),
                "l2_eps": rec.attr("l2_eps"),
                "eps": op.attr("eps"),
                "q": V(q),
                "k": V(k),
                "v": V(v),
                "f": V(f),
                "b": V(b),
                "g": V(op.inputs[1]),
                "conv": V(conv.state("conv")),
                "recurrent": V(rec.state("recurrent")),
                "q_conv": conv.weight("q"),
                "k_conv": conv.weight("k"),
                "v_conv": conv.weight("v"),
                "A_log": rec.weight("A_log"),
                "dt_bias": rec.weight("dt_bias"),
                "o_norm": op.weight("w"),
                "out": V(op.outputs[0]),
            },
            first=op,
        )

    def do_mla_insert(self, op: Op) -> None:
        lora = self.g.weight(op.weight("w")).shape[0]
        self.emit(
            op.name,
            "mla_insert",
            (op.name,),
            {
                "kva": V(op.inputs[0]),
                "weight": op.weight("w"),
                "eps": op.attr("eps"),
                "kv": V(op.state("kv")),
                "lora": lora,
                "rope": self.g.value(op.inputs[0]).width - lora,
            },
        )

    def do_rope_insert(self, op: Op) -> None:
        q, k, v = op.inputs
        self.emit(
            op.name,
            "rope_insert",
            (op.name,),
            {
                "q": V(q),
                "k": V(k),
                "v": V(v),
                "out": V(op.outputs[0]),
                "kv": V(op.state("kv_heads")),
                **{a: op.attr(a) for a in ("heads", "kv_heads", "dim", "theta", "scaling")},
            },
        )

    def attention(self, op: Op, params: dict[str, Any]) -> None:
        """One attn stage, and a combine where the row is split."""
        rows, groups = self.g.rows, params["groups"]
        splits = self.c.tune.kv_splits or auto_splits(self.c, rows, groups)
        params = {**params, "splits": splits}
        out = op.outputs[0]
        if splits == 1:
            self.emit(op.name, "attn", (op.name,), {**params, "out": V(out)})
            return
        width = groups * splits * params["heads_per_group"] * (params["dv"] + PARTIAL_EXTRA)
        part = self.add_value(f"{out}.part", width, "f32")
        self.emit(op.name, "attn", (op.name,), {**params, "out": part})
        self.emit(f"{op.name}.combine", "attn_combine", (), {**params, "partial": part, "out": V(out)}, first=op)

    def do_mla_attention(self, op: Op) -> None:
        ql, q = op.inputs
        lora, rope = op.attr("lora"), op.attr("rope")
        heads = op.attr("heads")
        groups = next(g for g in range(1, heads + 1) if heads % g == 0 and heads // g <= TILE_ROWS)  # M of the mma
        params = {"kind": "mla", "q": V(q), "ql": V(ql), "kv": V(op.state("kv")), "groups": groups,
                  "heads_per_group": heads // groups, "dqk": lora + rope, "dv": lora, "scale": op.attr("scale"),
                  "nope": op.attr("nope"), "rope": rope}
        self.attention(op, params)

    def do_gqa_attention(self, op: Op) -> None:
        groups, dim = op.attr("kv_heads"), op.attr("dim")
        self.attention(
            op,
            {
                "kind": "gqa",
                "q": V(op.inputs[0]),
                "ql": "",
                "kv": V(op.state("kv_heads")),
                "groups": groups,
                "heads_per_group": op.attr("heads") // groups,
                "dqk": dim,
                "dv": dim,
                "scale": op.attr("scale"),
                "nope": dim,
                "rope": 0,
            },
        )

    def do_route(self, op: Op) -> None:
        ids, wts = op.outputs
        topk, rows = op.attr("topk"), self.g.rows
        uniq = self.add_value(ids.removesuffix("ids") + "uniq", 1 + rows * topk * (1 + rows), "i32")
        self.emit(
            op.name,
            "route",
            (op.name,),
            {
                "logits": V(op.inputs[0]),
                "bias": op.weight("bias"),
                "experts": self.g.value(op.inputs[0]).width,
                "topk": topk,
                "scale": op.attr("scale"),
                "ids": V(ids),
                "wts": V(wts),
                "uniq": uniq,
            },
        )

    def uniq_of(self, ids: str) -> V:
        return V(ids.removesuffix("ids") + "uniq")

    def do_expert_gate_up(self, op: Op) -> None:
        z, ids = op.inputs
        _, inter, latent = self.g.weight(op.weight("w1")).shape
        self.emit(
            op.name,
            "expert_gate_up",
            (op.name,),
            {
                "z": V(z),
                "uniq": self.uniq_of(ids),
                "w1": op.weight("w1"),
                "w3": op.weight("w3"),
                "inter": inter,
                "latent": latent,
                "topk": op.attr("topk"),
                **{k: op.attr(k) for k in NO_ACT},
                "out": V(op.outputs[0]),
            },
        )

    def do_expert_down(self, op: Op) -> None:
        ea, ids, wts = op.inputs
        _, latent, inter = self.g.weight(op.weight("w2")).shape
        out = op.outputs[0]
        self.emit(
            op.name,
            "expert_down",
            (op.name,),
            {
                "ea": V(ea),
                "uniq": self.uniq_of(ids),
                "wts": V(wts),
                "w2": op.weight("w2"),
                "inter": inter,
                "latent": latent,
                "topk": op.attr("topk"),
                "out": V(out),
                "coeffs": self.collective_coeffs(out),
            },
        )

    def run(self) -> Fused:
        self.norms()
        self.linears()
        for op in self.g.ops:
            if op.name in self.done or op.kind in ("kda_conv", "kda_recurrence"):
                continue
            rule: Callable[[Op], None] | None = getattr(self, f"do_{op.kind}", None)
            if rule is None:
                self.problems.append(f"{op.name}: no stage body computes op kind {op.kind!r} here")
                continue
            rule(op)
        left = [op.name for op in self.g.ops if op.name not in self.done]
        if left and not self.problems:
            self.problems.append(f"ops without a stage: {', '.join(left)}")
        for value in self.out.mailboxes:
            if self.made[value].kind not in ("linear", "expert_down", "embed"):
                self.problems.append(
                    f"{self.made[value].name}: op kind {self.made[value].kind!r} cannot feed a collective"
                )
        if self.problems:
            raise PlanError(self.problems)
        return self.out


def auto_splits(c: PlanChoices, rows: int, groups: int) -> int:
    """Splits of one attention row: fill the SMs, at least four 64-token chunks a split at the recipe's context."""
    return max(1, min(c.sms // (rows * groups), c.decode.context // 256))


def fuse(graph: Graph, choices: PlanChoices) -> Fused:
    """All stages of a graph, unordered. Raises PlanError naming every op that no rule can place."""
    return _Fuser(graph, choices).run()
