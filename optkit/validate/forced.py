"""Teacher-forced numerics: every stage alone, from float64 inputs rounded to its buffers' dtypes.

The reference is float64 on those same rounded inputs, so errors do not add up along the model and each stage answers for
itself. States are outputs too; state elements that no active row owns must keep their bits.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optkit.execute.bodies.experts import distinct
from optkit.execute.contents import Contents, Source, contents
from optkit.execute.memory import DTYPES
from optkit.execute.runner import StageRunner
from optkit.models import interpret
from optkit.models.graph import Graph
from optkit.models.ops import ChoiceError, Choices, StateTensor
from optkit.models.ops.attnres import block_statistics
from optkit.plan.types import Plan, Stage
from optkit.validate.gates import judge, row_errors
from optkit.validate.numerics import Numerics
from optkit.validate.reference import AnyWeights, active_rows, reference_weights, run_ops, state_rows
from optkit.validate.scenario import Scenario, tensors, upcast

TIE = 1e-5
"""Largest gap of sigmoid scores at which f32 and float64 may order two experts differently (f32 sigmoid: a few 1e-7)."""


def short(name: str) -> str:
    """Value, state or op name without its layer: "L3.og" -> "og", "P.3a" -> "P.a"."""
    return re.sub(r"^P\.\d+", "P.", re.sub(r"^L\d+\.", "", name))


def state_labels(tensors_of_state: int) -> tuple[str, ...]:
    """How a state's tensors are told apart in the name of an output."""
    return ("state",) if tensors_of_state == 1 else ("state K", "state V")


@dataclass
class Samples:
    """Errors by stage output, of the runner and of the plain bf16 implementation, and outright mistakes."""

    errors: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    band: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)

    def add(self, key: str, got: tuple[Tensor, Tensor], plain: tuple[Tensor, Tensor]) -> None:
        """Rows of one output: (runner's, exact) and (plain implementation's, exact), each [R, ...]."""
        self.errors[key] += row_errors(*got).tolist()
        self.band[key] += row_errors(*plain).tolist()

    def numerics(self) -> list[Numerics]:
        """One row per output, judged."""
        return [judge(key, self.errors[key], self.band[key]) for key in sorted(self.errors)]


@dataclass
class Case:
    """One stage at one step: its ops, the numbers it was given, its states before, and the active rows."""

    stage: Stage
    ops: tuple[str, ...]
    env: dict[str, Tensor]
    inputs: dict[str, Tensor]
    held: dict[str, StateTensor]
    rows: Tensor


@dataclass
class Result:
    """Values by name and states after a stage."""

    values: dict[str, Tensor]
    states: dict[str, StateTensor]


class TeacherForced:
    """Runs stages one by one; `samples` collects what they do wrong.

    `scale` multiplies float inputs and recurrent state of every stage; `align` replaces the rows before a norm that feeds
    a gated activation by rows that drive single up-projections far out. See PROBES. `routing` gives every route op its
    logits [R, E] by its bias [E]; what follows from them is computed anew.
    """

    def __init__(
        self,
        runner: StageRunner,
        graph: Graph,
        weights: AnyWeights,
        scenario: Scenario,
        scale: float = 1.0,
        align: bool = False,
        routing: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.routing, self.run_stages = routing, runner.run_stages
        self.runner, self.graph, self.scenario, self.scale, self.align = runner, graph, scenario, scale, align
        self.plan: Plan = runner.plan
        both = reference_weights(graph, weights)
        self.w64, self.w32 = both.f64, both.bf16
        self.io = contents(self.plan, graph)
        self.first_user: dict[str, str] = {}
        for op in graph.ops:
            for _, state in op.states:
                self.first_user.setdefault(state, op.name)
        self.samples = Samples()
        # split attention, by partial buffer: the runner's own parts and what the stage was given, for the combine
        self.carry: dict[str, Tensor] = {}
        self.pending: dict[str, tuple[tuple[str, ...], dict[str, Tensor], dict[str, StateTensor]]] = {}

    def keys(self, index: int) -> list[str]:
        """Names of the outputs by which a stage is judged."""
        stage = self.plan.stages[index]
        out = [
            f"{stage.body}:{'stats' if s.kind == 'stats' else short(s.value)}"
            for s in self.io[index].writes.values()
            if s.kind in ("stats", "mailbox") or s.kind == "value" and self.graph.value(s.value).dtype != "i32"
        ]
        return out + [
            f"{stage.body}:{short(s)} {label}"
            for op in stage.ops
            for _, s in self.graph.op(op).states
            if self.first_user[s] in stage.ops
            for label in state_labels(len(tensors(self.runner.caches[s])))
        ]

    def lacking(self, samples: int) -> list[int]:
        """Stages with an output of fewer than `samples` samples, and the attention stages that they complete."""
        out = {
            i
            for i in range(len(self.plan.stages))
            if any(len(self.samples.errors.get(k, ())) < samples for k in self.keys(i))
        }
        parts = {b for i in out for b, s in self.io[i].reads.items() if s.kind == "partial"}
        return sorted(
            out
            | {
                i
                for i in range(len(self.plan.stages))
                if any(s.kind == "partial" and b in parts for b, s in self.io[i].writes.items())
            }
        )

    def step(self, t: int, caches64: dict[str, StateTensor], stages: Iterable[int] | None = None) -> None:
        """The given stages (default: all) at step t; caches64 moves on by one float64 step."""
        inputs = self.scenario.inputs(t)
        before = self._rounded(caches64)
        values = interpret.run(self.graph, self.w64, inputs, caches64, "f64")
        after = self._rounded(caches64)
        if self.routing is not None:
            values = self._routed(values, inputs, self.routing)
        for index in stages if stages is not None else range(len(self.plan.stages)):
            stage = self.plan.stages[index]
            held: dict[str, StateTensor] = {}
            for op in stage.ops:
                for _, state in self.graph.op(op).states:
                    held[state] = before[state] if self.first_user[state] in stage.ops else after[state]
            self._stage(index, stage, self._probed(stage, values), inputs, held)

    def _routed(
        self, values: Mapping[str, Tensor], inputs: dict[str, Tensor], routing: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """`values` with other logits, choices and shares for every route op."""
        out = dict(values)
        for op in self.graph.ops:
            if op.kind == "route":
                bias = self.w64[dict(op.weights)["bias"]]
                assert isinstance(bias, Tensor)
                out[op.inputs[0]] = routing(bias)
                out |= run_ops(self.graph, [op.name], out, self.w64, inputs, {}, self.scenario.block_size, "f64")
        return out

    def _rounded(self, caches: dict[str, StateTensor]) -> dict[str, StateTensor]:
        """Copies in the runner's cache dtypes, recurrent state scaled."""
        out: dict[str, StateTensor] = {}
        for state in self.graph.states:
            k = self.scale if state.kind in ("recurrent", "conv") else 1.0
            pair = [
                (k * a).to(b.dtype)
                for a, b in zip(tensors(caches[state.name]), tensors(self.runner.caches[state.name]), strict=True)
            ]
            out[state.name] = (pair[0], pair[1]) if len(pair) == 2 else pair[0]
        return out

    def _inject(
        self, io: Contents, values: Mapping[str, Tensor], inputs: dict[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(buffer -> injected tensor, value -> the same numbers for the reference)."""
        inject: dict[str, Tensor] = {}
        env: dict[str, Tensor] = {k: v for k, v in inputs.items() if k == "token" or k.startswith("in.")}

        def rounded(value: str, dtype: torch.dtype) -> Tensor:
            v = values[value]
            return (v * self.scale).to(dtype) if v.is_floating_point() else v

        for buffer, source in io.reads.items():
            if source.kind == "value" and not buffer.startswith("in."):
                inject[buffer] = env[source.value] = rounded(source.value, DTYPES[self.plan.buffer[buffer].dtype])
            elif source.kind == "mailbox":
                x = rounded(source.value, DTYPES[self.plan.buffer[buffer].dtype])
                env[source.value] = x
                inject[buffer] = torch.stack([c * x for c in source.coeffs])
            elif source.kind == "uniq":
                ids = env[source.value] = values[source.value]
                inject[buffer] = torch.tensor(
                    [distinct(ids.tolist(), self.plan.rows)], dtype=torch.int32, device=ids.device
                )
            elif source.kind == "partial":
                inject[buffer] = self.carry[buffer]
        for buffer, source in io.reads.items():
            if source.kind == "stats":
                for v in source.rows:
                    env.setdefault(v, rounded(v, torch.bfloat16))
                inject[buffer] = self._stats(source, env, torch.float64)
        return inject, env

    def _stats(self, source: Source, env: Mapping[str, Tensor], math: torch.dtype) -> Tensor:
        """Early statistics of rounded rows, [R, 2n]."""
        w = self.w64 if math == torch.float64 else self.w32
        norm, proj = w[source.norm], w[source.proj]
        assert isinstance(norm, Tensor) and isinstance(proj, Tensor)
        return block_statistics([env[v].to(math) for v in source.rows], norm * proj.reshape(-1))

    def _probed(self, stage: Stage, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """`values`, or with `align` the inputs of this stage replaced: row r, once normalised, is the direction of one up
        row, whose product is then |w| sqrt(width), far beyond what random rows reach."""
        parts = [p for p in stage.param("parts", ()) if p["epilogue"] == "act"]
        x = stage.param("x")
        if not self.align or not parts or not x["norm"]:
            return values
        up, norm = self.w64[parts[0]["weight2"]], self.w64[x["norm"]]
        assert isinstance(up, Tensor) and isinstance(norm, Tensor)
        rows = up[torch.arange(self.scenario.batch, device=up.device) * 7 % len(up)] / norm
        rows = rows / rows.square().mean(-1, keepdim=True).sqrt()
        read = [s.value for s in self.io[self.plan.index[stage.name]].reads.values() if s.kind == "value"]
        return {**values, **{v: rows for v in read if values[v].shape == rows.shape}}

    def _stage(
        self,
        index: int,
        stage: Stage,
        values: Mapping[str, Tensor],
        inputs: dict[str, Tensor],
        held: dict[str, StateTensor],
    ) -> None:
        io = self.io[index]
        inject, env = self._inject(io, values, inputs)
        for name, t in held.items():
            for a, b in zip(tensors(self.runner.caches[name]), tensors(t), strict=True):
                a.copy_(b)
        got = self.run_stages(index, index + 1, inputs, inject)
        ops = stage.ops
        if stage.body == "attn" and stage.param("splits") > 1:  # judged where the parts meet
            ((buffer, _),) = io.writes.items()
            self.carry[buffer], self.pending[buffer] = got[buffer], (ops, env, held)
            return
        if stage.body == "attn_combine":
            ops, env, held = self.pending[stage.param("partial")]
        rows = torch.nonzero(active_rows(self.graph, inputs)).flatten()
        case = Case(stage, ops, env, inputs, held, rows)
        plain = self._plain(case)
        try:
            want = self._reference(case, got)
            want_plain = self._reference(case, plain.values) if stage.body == "route" else want
        except ChoiceError as e:
            self.samples.wrong.append(f"{stage.name}: {e}")
            return
        for buffer, source in io.writes.items():
            self._output(case, source, got[buffer], plain.values, want.values, want_plain.values)
            if source.kind == "uniq" and got[buffer][0].tolist() != distinct(
                got[stage.param("ids")][: len(inputs["seq_len"])].tolist(), self.plan.rows
            ):
                self.samples.wrong.append(f"{stage.name}: the table of distinct experts does not follow from its ids")
        self._states(case, plain.states, want.states)

    def _plain(self, case: Case) -> Result:
        """The plain bf16 implementation of the stage's ops."""
        states = {k: (t[0].clone(), t[1].clone()) if isinstance(t, tuple) else t.clone() for k, t in case.held.items()}
        return Result(
            run_ops(self.graph, case.ops, case.env, self.w32, case.inputs, states, self.scenario.block_size, "bf16"),
            states,
        )

    def _reference(self, case: Case, got: Mapping[str, Tensor]) -> Result:
        """The stage's ops in float64; a route stage adopts the choices in `got` within a tie."""
        adopt = None
        if case.stage.body == "route":
            value = self.graph.op(case.ops[0]).outputs[0]
            ids = got[value] if value in got else got[case.stage.param("ids")]
            adopt = Choices({value: ids[: len(case.inputs["seq_len"])]}, TIE)
        states = upcast(case.held)
        return Result(
            run_ops(
                self.graph, case.ops, case.env, self.w64, case.inputs, states, self.scenario.block_size, "f64", adopt
            ),
            states,
        )

    def _output(
        self,
        case: Case,
        source: Source,
        out: Tensor,
        plain: Mapping[str, Tensor],
        want: Mapping[str, Tensor],
        want_plain: Mapping[str, Tensor],
    ) -> None:
        """One written buffer against its reference, row by row."""
        rows, key = case.rows, f"{case.stage.body}:{short(source.value)}"
        if source.kind == "stats":
            exact = self._stats(source, case.env, torch.float64)[rows]
            self.samples.add(
                f"{case.stage.body}:stats",
                (out[rows], exact),
                (self._stats(source, case.env, torch.float32)[rows], exact),
            )
        elif source.kind == "mailbox":
            c = torch.tensor(source.coeffs, dtype=torch.float64, device=out.device)[:, None]
            exact = want[source.value][rows, None] * c
            self.samples.add(
                key, (out[:, rows].transpose(0, 1), exact), (plain[source.value][rows, None].double() * c, exact)
            )
        elif source.kind == "value" and out.is_floating_point():
            self.samples.add(
                key, (out[rows], want[source.value][rows]), (plain[source.value][rows], want_plain[source.value][rows])
            )

    def _states(self, case: Case, plain: dict[str, StateTensor], want: dict[str, StateTensor]) -> None:
        """State rows of active rows against the reference; everything else must keep its bits."""
        for name in case.held:
            state = self.graph.state(name)
            if self.first_user[name] not in case.ops:
                continue
            of = [tensors(x[name]) for x in (self.runner.caches, plain, want, case.held)]
            for label, got, band, exact, old in zip(state_labels(len(of[0])), *of, strict=True):
                where = state_rows(state.kind, got, case.inputs, case.rows)
                self.samples.add(
                    f"{case.stage.body}:{short(name)} {label}", (got[where], exact[where]), (band[where], exact[where])
                )
                rest = got.clone()
                rest[where] = old[where]
                if not torch.equal(rest, old):
                    self.samples.wrong.append(
                        f"{case.stage.name}: wrote elements of state {name} that no active row owns"
                    )
