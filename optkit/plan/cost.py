"""Distinct DRAM bytes and FLOPs of a step, read from the Plan alone, and the roofline they give.

Counted: every weight once, the experts actually selected, KV and recurrent state read and written. Not counted: what
stays in L2 (activations, mailboxes, a second reading of the same bytes). MXFP4 takes 1/2 + 1/32 bytes a weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from optkit.plan.types import Plan, Stage

MXFP4_BYTES = 0.5 + 1 / 32


@dataclass(frozen=True)
class Load:
    """What is asked of the step: `batch` token rows (one request each), `context` cached tokens of every request,
    `distinct_experts` of each MoE layer (None: the expectation under uniform independent routing)."""

    batch: int = 1
    context: int = 8192
    distinct_experts: float | None = None

    def experts(self, total: int, topk: int) -> float:
        """Distinct experts of one layer: E (1 - (1 - k/E)^batch), an upper bound for skewed routing."""
        if self.distinct_experts is not None:
            return min(self.distinct_experts, total, self.batch * topk)
        return total * (1 - (1 - topk / total) ** self.batch)


@dataclass(frozen=True)
class StageCost:
    """Bytes of one stage by kind, and its FLOPs (multiply and add counted apart)."""

    weights: float = 0.0
    experts: float = 0.0
    kv: float = 0.0
    state: float = 0.0
    flops: float = 0.0

    @property
    def bytes(self) -> float:
        return self.weights + self.experts + self.kv + self.state


@dataclass(frozen=True)
class StepCost:
    """Costs of all stages, in plan order."""

    load: Load
    stages: tuple[StageCost, ...]
    layers: tuple[int, ...] = field(repr=False)
    read_gbs: float = 0.0
    tflops: float = 0.0

    @property
    def bytes(self) -> float:
        return sum(s.bytes for s in self.stages)

    @property
    def flops(self) -> float:
        return sum(s.flops for s in self.stages)

    @property
    def roofline_us(self) -> float:
        """Time at the read ceiling or the arithmetic peak, whichever is longer."""
        return max(self.bytes / self.read_gbs / 1e3, self.flops / self.tflops / 1e6)

    def by_layer(self) -> dict[int, float]:
        """Bytes per layer; -1 is before the first, the number of layers after the last."""
        out: dict[int, float] = defaultdict(float)
        for layer, s in zip(self.layers, self.stages, strict=True):
            out[layer] += s.bytes
        return dict(out)


def step_cost(plan: Plan, load: Load) -> StepCost:
    """Cost of one step of this rank. `load.batch` may be at most the plan's rows."""
    if not 1 <= load.batch <= plan.rows:
        raise ValueError(f"batch = {load.batch}: expected 1 .. {plan.rows}")
    once = _Once()
    total_experts = {s.param("uniq"): s.param("experts") for s in plan.stages if s.body == "route"}
    costs = tuple(_RULES.get(s.body, _none)(s, load, once, total_experts) for s in plan.stages)
    return StepCost(load, costs, tuple(s.layer for s in plan.stages), plan.hw("read_gbs"), plan.hw("tflops"))


class _Once:
    """Bytes of a weight the first time the step reads it, then nothing."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, name: str, nbytes: float) -> float:
        if not name or name in self.seen:
            return 0.0
        self.seen.add(name)
        return nbytes


_Rule = Callable[[Stage, Load, _Once, dict[str, int]], StageCost]


def _none(s: Stage, load: Load, once: _Once, experts: dict[str, int]) -> StageCost:
    return StageCost()


def _prologue(s: Stage, once: _Once) -> float:
    x = s.param("x")
    return sum(once(x[k], 2 * x["width"]) for k in ("norm", "mix_norm", "mix_proj"))


def _gemv(s: Stage, load: Load, once: _Once, experts: dict[str, int]) -> StageCost:
    nbytes, flops = _prologue(s, once), 0.0
    for p in s.param("parts"):
        for w in (p["weight"], p["weight2"]):
            nbytes += once(w, 2 * p["m"] * p["k"])
            flops += 2 * p["m"] * p["k"] * load.batch if w else 0
    return StageCost(weights=nbytes, flops=flops)


def _mixnorm(s: Stage, load: Load, once: _Once, experts: dict[str, int]) -> StageCost:
    x = s.param("x")
    return StageCost(weights=_prologue(s, once), flops=6.0 * len(x["inputs"]) * x["width"] * load.batch)


def _embed(s: Stage, load: Load, once: _Once, experts: dict[str, int]) -> StageCost:
    return StageCost(weights=2.0 * s.param("width") * load.batch)


def _kda(s: Stage, load: Load, once: _Once, experts: dict[str, int]) -> StageCost:
    heads, d, taps = s.param("heads"), s.param("dim"), s.param("taps")
    weights = sum(once(s.param(k), 4 * heads * d * taps) for k in ("q_conv", "k_conv", "v_conv"))
    weights += (
        once(s.param("A_log"), 4 * heads) + once(s.param("dt_bias"), 4 * heads * d) + once(s.param("o_norm"), 4 * d)
    )
    state = 2 * (4 * heads * d * d + 2 * (taps - 1) * 3 * heads * d)  # read and written
    return StageCost(weights=weights, state=float(state * load.batch), flops=7.0 * heads * d * d * load.batch)


def _mla_insert(s: Stage, load: Load, once: _Once, experts: dict[str, int]) -> StageCost:
    row = s.param("lora") + s.param("rope")
    return StageCost(weights=once(s.param("weight"), 2 * s.param("lora")), kv=2.0 * row * load.batch)


def _rope_insert(s: Stage, load: Load, once: _Once, experts: dict[str, int]) -> StageCost:
    return StageCost(kv=2.0 * 2 * s.param("kv_heads") * s.param("dim") * load.batch)


def _attn(s: Stage, load: Load, once: _Once, experts: dict[str, int]) -> StageCost:
    groups, dqk, dv = s.param("groups"), s.param("dqk"), s.param("dv")
    row = dqk if s.param("kind") == "mla" else groups * (dqk + dv)  # one latent row serves keys and values
    tokens = load.batch * load.context
    return StageCost(kv=2.0 * row * tokens, flops=2.0 * groups * s.param("heads_per_group") * (dqk + dv) * tokens)


def _route(s: Stage, load: Load, once: _Once, experts: dict[str, int]) -> StageCost:
    return StageCost(weights=once(s.param("bias"), 4 * s.param("experts")))


def _experts(matrices: int) -> _Rule:
    def rule(s: Stage, load: Load, once: _Once, experts: dict[str, int]) -> StageCost:
        size = matrices * s.param("inter") * s.param("latent")
        hit = load.experts(experts[s.param("uniq")], s.param("topk"))
        return StageCost(experts=hit * size * MXFP4_BYTES, flops=2.0 * size * s.param("topk") * load.batch)

    return rule


_RULES: dict[str, _Rule] = {
    "gemv": _gemv,
    "mixnorm": _mixnorm,
    "embed": _embed,
    "kda": _kda,
    "mla_insert": _mla_insert,
    "rope_insert": _rope_insert,
    "attn": _attn,
    "route": _route,
    "expert_gate_up": _experts(2),
    "expert_down": _experts(1),
}


def total(costs: Iterable[StageCost]) -> StageCost:
    """Sum of stage costs."""
    out = [0.0] * 5
    for c in costs:
        for k, v in enumerate((c.weights, c.experts, c.kv, c.state, c.flops)):
            out[k] += v
    return StageCost(*out)
