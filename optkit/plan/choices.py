"""What the planner may choose from, as plain data: the planner's own view of a recipe.

The planner never imports the recipe schema; whoever has a recipe passes its groups as dicts to
`PlanChoices.from_dicts`. Every key here changes the Plan; unknown keys are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from optkit.plan.errors import PlanError, did_you_mean

FUSIONS = ("norm_projection", "packed_projections", "gate_up_act", "residual_add", "value_gate")
OVERLAPS = ("weight_stream", "shared_expert_early", "early_block_stats")
SYNC_MECHANISMS = ("counter", "tagged", "grid_barrier")


@dataclass(frozen=True)
class Hardware:
    """One GPU as data. `smem` bytes a CTA may use; `memory` bytes usable for weights, caches and workspace;
    `read_gbs` the measured read ceiling in GB/s; `tflops` dense bf16; `hop_us` the cost of one counter edge
    (release, acquire, re-read of x: about 1.4 us measured on an H200); `exchange_us` one peer-mailbox hop."""

    name: str = "h200"
    sms: int = 132
    smem: int = 227 * 1024
    registers: int = 65536
    memory: int = 141_000_000_000
    read_gbs: float = 4530.0
    tflops: float = 780.0
    hop_us: float = 1.4
    tagged_hop_us: float = 0.86
    exchange_us: float = 2.0


@dataclass(frozen=True)
class Parallel:
    """Ranks. `peers` "emulated": one GPU plays `rank`; "real": every rank runs the same Plan (SPMD)."""

    tp: int = 1
    pp: int = 1
    rank: int = 0
    peers: str = "emulated"


@dataclass(frozen=True)
class Decode:
    """`batch` requests the memory check assumes (largest of the served batches), `context` tokens each,
    `rows` the token class of the kernel."""

    batch: int = 8
    context: int = 8192
    rows: int = 8


@dataclass(frozen=True)
class Tune:
    """0 = chosen by the planner. `sms` CTAs of the kernel, `kv_splits` splits of one attention row,
    `ring_slots` weight tiles in flight per SM."""

    sms: int = 0
    kv_splits: int = 0
    ring_slots: int = 0


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
    """What runs while something else is waited for; each switch stands alone."""

    weight_stream: bool = True
    shared_expert_early: bool = True
    early_block_stats: bool = True


@dataclass(frozen=True)
class Sync:
    """`mechanism` of the edges, and exceptions as (buffer glob, mechanism) pairs."""

    mechanism: str = "counter"
    overrides: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Cache:
    """`block_size` tokens of one KV block; only sizes the block table: the kernel takes it at run time."""

    block_size: int = 16


@dataclass(frozen=True)
class PlanChoices:
    """All choices of one Plan."""

    name: str = "plan"
    recipe_digest: str = ""
    hardware: Hardware = field(default_factory=Hardware)
    parallel: Parallel = field(default_factory=Parallel)
    decode: Decode = field(default_factory=Decode)
    fusion: Fusion = field(default_factory=Fusion)
    overlap: Overlap = field(default_factory=Overlap)
    sync: Sync = field(default_factory=Sync)
    cache: Cache = field(default_factory=Cache)
    tune: Tune = field(default_factory=Tune)

    @classmethod
    def from_dicts(cls, *, name: str = "plan", recipe_digest: str = "",
                   **groups: Mapping[str, Any]) -> PlanChoices:
        """Build from plain dicts, one per group (`hardware=…, fusion=…, …`); groups left out keep their defaults.

        Raises PlanError with one line per unknown group, unknown key, wrong type or value out of range.
        """
        kinds = {"hardware": Hardware, "parallel": Parallel, "decode": Decode, "fusion": Fusion, "overlap": Overlap,
                 "sync": Sync, "cache": Cache, "tune": Tune}
        problems: list[str] = []
        made: dict[str, Any] = {}
        for group, values in groups.items():
            if group not in kinds:
                problems.append(f"{group}: unknown group of plan choices{did_you_mean(group, kinds)}")
                continue
            made[group] = _group(kinds[group], group, values, problems)
        if problems:
            raise PlanError(problems)
        choices = cls(name=name, recipe_digest=recipe_digest, **made)
        problems = choices.problems()
        if problems:
            raise PlanError(problems)
        return choices

    def problems(self) -> list[str]:
        """Values that cannot be planned, one line each."""
        out: list[str] = []
        if self.sync.mechanism not in SYNC_MECHANISMS:
            out.append(f"sync.mechanism = {self.sync.mechanism!r}: expected one of {', '.join(SYNC_MECHANISMS)}"
                       f"{did_you_mean(self.sync.mechanism, SYNC_MECHANISMS)}")
        for glob, mechanism in self.sync.overrides:
            if mechanism not in SYNC_MECHANISMS[:2]:
                out.append(f"sync.overrides.{glob} = {mechanism!r}: expected counter or tagged")
        if self.parallel.peers not in ("emulated", "real"):
            out.append(f"parallel.peers = {self.parallel.peers!r}: expected emulated or real")
        if self.decode.rows != 8:
            out.append(f"decode.rows = {self.decode.rows}: expected 8, the only token class (tokens are the N of an mma)")
        for key, value, low in (("decode.batch", self.decode.batch, 1), ("decode.context", self.decode.context, 1),
                                ("parallel.tp", self.parallel.tp, 1), ("parallel.pp", self.parallel.pp, 1),
                                ("cache.block_size", self.cache.block_size, 1), ("hardware.sms", self.hardware.sms, 1),
                                ("tune.sms", self.tune.sms, 0), ("tune.kv_splits", self.tune.kv_splits, 0),
                                ("tune.ring_slots", self.tune.ring_slots, 0)):
            if value < low:
                out.append(f"{key} = {value}: expected at least {low}")
        if self.decode.batch > self.decode.rows:
            out.append(f"decode.batch = {self.decode.batch}: expected at most {self.decode.rows} (the kernel's token class)")
        if not 0 <= self.parallel.rank < self.parallel.tp:
            out.append(f"parallel.rank = {self.parallel.rank}: expected 0 .. {self.parallel.tp - 1} (parallel.tp)")
        if self.tune.sms > self.hardware.sms:
            out.append(f"tune.sms = {self.tune.sms}: {self.hardware.name} has {self.hardware.sms}")
        return out

    def but(self, **changes: Any) -> PlanChoices:
        """A copy in which `group__key=value` replaces one key (or `key=value` one top-level field)."""
        out = self
        for key, value in changes.items():
            group, _, leaf = key.partition("__")
            out = replace(out, **{group: replace(getattr(out, group), **{leaf: value}) if leaf else value})
        return out


def _group(kind: Any, group: str, values: Mapping[str, Any], problems: list[str]) -> Any:
    known = {f.name: f for f in fields(kind)}
    good: dict[str, Any] = {}
    for key, value in values.items():
        if key not in known:
            problems.append(f"{group}.{key}: unknown key{did_you_mean(key, known)}")
            continue
        default = known[key].default
        if key == "overrides":
            value = tuple(tuple(x) for x in (value.items() if isinstance(value, Mapping) else value))
        elif isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        elif type(value) is not type(default):
            problems.append(f"{group}.{key} = {value!r}: expected {type(default).__name__}")
            continue
        good[key] = value
    return kind(**good)
