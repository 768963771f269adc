"""What the planner may choose from, as plain data: the planner's own view of a recipe.

The planner never imports the recipe schema; whoever has a recipe passes its groups as dicts to
`PlanChoices.from_dicts`. The keys are those of the recipe groups of the same names; unknown keys are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any

from optkit.plan.errors import PlanError, did_you_mean

FUSIONS = ("norm_projection", "packed_projections", "gate_up_act", "residual_add", "value_gate")
OVERLAPS = ("weight_stream", "shared_expert_early", "early_block_stats")
SYNC_MECHANISMS = ("counter", "tagged", "grid_barrier")
TOKEN_CLASS = 8  # rows of the kernel: tokens are the N of an m16n8k16 mma


@dataclass(frozen=True)
class Hardware:
    """One GPU as data. `smem_kib` KiB a CTA may use, `memory_gb` usable GB (1e9 bytes), `read_gbs` the read ceiling.

    The last four are for the cost model only: dense bf16 TFLOP/s; the cost in microseconds of handing a vector to all
    SMs by a counter (release, acquire, re-read of x: 1.4 measured on an H200), by tagged words (0.86), and of one
    exchange between GPUs.
    """

    name: str = "h200"
    arch: str = "sm_90a"
    sms: int = 132
    smem_kib: int = 227
    registers: int = 65536
    memory_gb: float = 141.0
    read_gbs: float = 4530.0
    l2_mb: float = 50.0
    peer_gbs: float = 450.0
    max_gpus_per_node: int = 8
    tflops: float = 780.0
    hop_us: float = 1.4
    tagged_hop_us: float = 0.86
    exchange_us: float = 2.0

    @property
    def smem(self) -> int:
        """Bytes of shared memory of one CTA."""
        return self.smem_kib * 1024

    @property
    def memory(self) -> int:
        """Usable bytes of one GPU."""
        return round(self.memory_gb * 1e9)


@dataclass(frozen=True)
class Parallel:
    """Ranks. `peers` "emulated": one GPU plays `rank`; "real": every rank runs the same Plan (SPMD)."""

    tp: int = 1
    pp: int = 1
    rank: int = 0
    stage: int = 0
    peers: str = "emulated"


@dataclass(frozen=True)
class Decode:
    """Batches that one kernel serves, tokens of the longest sequence, token rows per request."""

    batch: tuple[int, ...] = (1, 2, 4, 8)
    context: int = 8192
    rows_per_request: int = 1


@dataclass(frozen=True)
class Cache:
    """vLLM's caches: tokens of a KV block, dtypes, blocks and state slots (None = enough for the largest batch)."""

    block_size: int = 16
    kv_dtype: str = "bf16"
    recurrent_dtype: str = "f32"
    blocks: int | None = None
    slots: int | None = None


@dataclass(frozen=True)
class Fusion:
    """Which ops share a stage; each switch stands alone (docs/contracts.md, "Fusions")."""

    norm_projection: bool = True
    packed_projections: bool = True
    gate_up_act: bool = True
    residual_add: bool = True
    value_gate: bool = True


@dataclass(frozen=True)
class Overlap:
    """What runs while something else is waited for; each switch stands alone. `ring_slots` None = all that fit."""

    weight_stream: bool = True
    shared_expert_early: bool = True
    early_block_stats: bool = True
    ring_slots: int | None = None


@dataclass(frozen=True)
class Sync:
    """`mechanism` of the edges, and exceptions as (buffer glob, mechanism) pairs; the first match counts."""

    mechanism: str = "counter"
    overrides: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Tune:
    """`sms` CTAs of the kernel (None = all), `kv_splits` splits of one attention row (None = by context and SMs)."""

    sms: int | None = None
    kv_splits: int | None = None


GROUPS: dict[str, type[Any]] = {
    "hardware": Hardware,
    "parallel": Parallel,
    "decode": Decode,
    "cache": Cache,
    "fusion": Fusion,
    "overlap": Overlap,
    "sync": Sync,
    "tune": Tune,
}


@dataclass(frozen=True)
class PlanChoices:
    """All choices of one Plan."""

    name: str = "plan"
    recipe_digest: str = ""
    hardware: Hardware = field(default_factory=Hardware)
    parallel: Parallel = field(default_factory=Parallel)
    decode: Decode = field(default_factory=Decode)
    cache: Cache = field(default_factory=Cache)
    fusion: Fusion = field(default_factory=Fusion)
    overlap: Overlap = field(default_factory=Overlap)
    sync: Sync = field(default_factory=Sync)
    tune: Tune = field(default_factory=Tune)

    @classmethod
    def from_dicts(cls, *, name: str = "plan", recipe_digest: str = "", **groups: Mapping[str, Any]) -> PlanChoices:
        """Build from plain dicts, one per group (`hardware=…, fusion=…, …`); groups left out keep their defaults.

        Raises PlanError with one line per unknown group, unknown key, wrong type or value out of range.
        """
        problems: list[str] = []
        made: dict[str, Any] = {}
        for group, values in groups.items():
            if group not in GROUPS:
                problems.append(f"{group}: unknown group of plan choices{did_you_mean(group, GROUPS)}")
                continue
            made[group] = _group(group, values, problems)
        if problems:
            raise PlanError(problems)
        choices = cls(name=name, recipe_digest=recipe_digest, **made)
        problems = choices.problems()
        if problems:
            raise PlanError(problems)
        return choices

    @property
    def largest_batch(self) -> int:
        return max(self.decode.batch)

    @property
    def sms(self) -> int:
        """CTAs of the kernel, one per SM."""
        return self.tune.sms or self.hardware.sms

    def problems(self) -> list[str]:
        """Values that cannot be planned, one line each."""
        return list(self._words()) + list(self._numbers())

    def _words(self) -> Iterator[str]:
        sync, cache = self.sync, self.cache
        if sync.mechanism not in SYNC_MECHANISMS:
            yield (
                f"sync.mechanism = {sync.mechanism!r}: expected one of {', '.join(SYNC_MECHANISMS)}"
                f"{did_you_mean(sync.mechanism, SYNC_MECHANISMS)}"
            )
        for glob, mechanism in sync.overrides:
            if mechanism not in ("counter", "tagged"):
                yield f"sync.overrides.{glob} = {mechanism!r}: expected counter or tagged"
        if self.parallel.peers not in ("emulated", "real"):
            yield f"parallel.peers = {self.parallel.peers!r}: expected emulated or real"
        if (cache.kv_dtype, cache.recurrent_dtype) != ("bf16", "f32"):
            yield (
                f"cache.kv_dtype, cache.recurrent_dtype = {cache.kv_dtype}, {cache.recurrent_dtype}: "
                "expected bf16, f32 (the only ones the bodies read)"
            )

    def _numbers(self) -> Iterator[str]:
        p, d, c = self.parallel, self.decode, self.cache
        lows: list[tuple[str, int | None, int]] = [
            ("decode.context", d.context, 1),
            ("decode.rows_per_request", d.rows_per_request, 1),
            ("parallel.tp", p.tp, 1),
            ("parallel.pp", p.pp, 1),
            ("cache.block_size", c.block_size, 1),
            ("hardware.sms", self.hardware.sms, 1),
            ("tune.sms", self.tune.sms, 1),
            ("tune.kv_splits", self.tune.kv_splits, 1),
            ("overlap.ring_slots", self.overlap.ring_slots, 2),
        ]
        for key, value, low in lows:
            if value is not None and value < low:
                yield f"{key} = {value}: expected at least {low}"
        if not d.batch or min(d.batch) < 1:
            yield f"decode.batch = {list(d.batch)}: expected at least one batch size, each at least 1"
        elif max(d.batch) * d.rows_per_request > TOKEN_CLASS:
            yield (
                f"decode.batch = {list(d.batch)}: {max(d.batch)} x decode.rows_per_request {d.rows_per_request} rows "
                f"asked, the kernel's token class has {TOKEN_CLASS}"
            )
        for key, value, count in (("rank", p.rank, p.tp), ("stage", p.stage, p.pp)):
            if not 0 <= value < max(count, 1):
                yield f"parallel.{key} = {value}: expected 0 .. {count - 1}"
        if self.tune.sms is not None and self.tune.sms > self.hardware.sms:
            yield f"tune.sms = {self.tune.sms}: {self.hardware.name} has {self.hardware.sms}"

    def but(self, **changes: Any) -> PlanChoices:
        """A copy in which `group__key=value` replaces one key (or `key=value` one top-level field)."""
        out = self
        for key, value in changes.items():
            group, _, leaf = key.partition("__")
            out = replace(out, **{group: replace(getattr(out, group), **{leaf: value}) if leaf else value})
        return out


def _group(group: str, values: Mapping[str, Any], problems: list[str]) -> Any:
    """One group from a dict; wrong keys and types become lines of `problems`."""
    kind = GROUPS[group]
    known = {f.name: f for f in fields(kind)}
    good: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            problems.append(f"{group}.{key}: unknown key{did_you_mean(key, known)}")
            continue
        default = known[key].default
        value = value.value if isinstance(value, Enum) else value
        if key == "overrides":
            pairs = value.items() if isinstance(value, Mapping) else value
            value = tuple((str(g), m.value if isinstance(m, Enum) else m) for g, m in pairs)
        elif key == "batch":
            value = (value,) if isinstance(value, int) else tuple(value)
        elif isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        expected = int if default is None else type(default)
        if type(value) is not expected and not (default is None and value is None):
            problems.append(f"{group}.{key} = {value!r}: expected {expected.__name__}")
            continue
        good[key] = value
    return kind(**good)
