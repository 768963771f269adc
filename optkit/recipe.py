"""The recipe: a closed, typed schema of every key, and the checks that span several keys.

One dataclass per config group; each field carries its documentation, its unit and its range (`key`), from which
docs/recipe.md is generated and the range checks are made: a constraint is stated once. Recipes are plain data; no
code is ever named or run by one. Assumes nothing of models, plans or Hydra.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from omegaconf import MISSING

from optkit.errors import Problem

MAX_ROWS = 8
"""Token rows of one kernel: rows are the n dimension of an m16n8k16 matrix instruction, so 1 to 8 cost the same."""


MAX_SEED = 2**32 - 1
"""Seeds are combined with offsets and go to generators of 64 bits."""

ARCHES = r"sm_(90|100|103|107|110|120|121)a"
"""What the compiler knows and the kernel needs: bulk copies and 16-byte relaxed accesses begin with sm_90."""

MAX_SMS = 1024
"""Several times the largest GPU: proofs hold one clock per SM, so an absurd number would only fill the memory."""


class Mechanism(str, Enum):
    """How a consumer learns that a producer on another SM is done."""

    counter = "counter"
    tagged = "tagged"
    grid_barrier = "grid_barrier"


class Peers(str, Enum):
    """Who fills the mailboxes of the other tensor-parallel ranks."""

    emulated = "emulated"
    real = "real"


class Target(str, Enum):
    """What a Plan is emitted as."""

    megakernel = "megakernel"


class KvDtype(str, Enum):
    """Element type of attention caches."""

    bf16 = "bf16"


class StateDtype(str, Enum):
    """Element type of recurrent states."""

    f32 = "f32"


class WeightLayout(str, Enum):
    """How a rank's weight slices lie in device memory."""

    in_place = "in_place"


def key(default: Any, doc: str, *, ge: float | None = None, le: float | None = None, pattern: str = "") -> Any:
    """A documented field. `ge`/`le` bound a number (or every element of a list), `pattern` a string."""
    meta = {"doc": doc, "ge": ge, "le": le, "pattern": pattern}
    if isinstance(default, (list, dict)):
        kind = type(default)
        return field(default_factory=lambda: kind(default), metadata=meta)
    return field(default=default, metadata=meta)


@dataclass
class Model:
    """What is computed: an architecture, its shapes and its weights."""

    family: str = key(
        MISSING, "architecture family, a name registered in optkit/models; the config's `model_type` must belong to it"
    )
    config: str = key(
        MISSING, "shapes: a path to a Hugging Face config.json, or the name of a packaged one (optkit/models/configs)"
    )
    checkpoint: str | None = key(
        None, "directory with safetensors files (and index); null = random weights from `seed`"
    )
    seed: int = key(0, "seed of the random weights", ge=0, le=MAX_SEED)
    layers: list[int] | None = key(None, "half-open range [first, last) of layers to build; null = all", ge=0)
    qk_lora_norm_eps: float | None = key(
        None,
        "epsilon of the norms on the low-rank query and KV vectors; null = the family's own (1e-6 for Kimi K3)",
        ge=0,
    )


@dataclass
class Hardware:
    """Where it runs: one GPU type as data."""

    name: str = key(MISSING, "name as shown in reports and in an artifact's scope")
    arch: str = key(MISSING, "architecture that the kernel is compiled for", pattern=ARCHES)
    sms: int = key(MISSING, "streaming multiprocessors", ge=1, le=MAX_SMS)
    smem_kib: int = key(MISSING, "shared memory one CTA may use, KiB", ge=1)
    registers: int = key(MISSING, "32-bit registers of one SM", ge=1)
    memory_gb: float = key(MISSING, "usable device memory of one GPU, GB (1e9 bytes)", ge=0)
    read_gbs: float = key(
        MISSING, "read ceiling of device memory, GB/s; the denominator of every bandwidth figure", ge=0
    )
    tflops: float = key(MISSING, "dense bf16 matrix products, TFLOP/s, for the cost model", ge=0)
    hop_us: float = key(MISSING, "one counter edge between SMs: release, acquire and re-read of the data, µs", ge=0)
    tagged_hop_us: float = key(MISSING, "the same with tagged words, µs", ge=0)
    exchange_us: float = key(MISSING, "one exchange with a peer GPU through mailboxes, µs", ge=0)
    max_gpus_per_node: int = key(MISSING, "GPUs within one peer-to-peer domain: the largest tensor-parallel size", ge=1)


@dataclass
class Parallel:
    """How the model is spread over GPUs."""

    tp: int = key(1, "tensor-parallel ranks", ge=1)
    pp: int = key(1, "pipeline stages", ge=1)
    rank: int = key(0, "the tensor-parallel rank that is emitted and run", ge=0)
    stage: int = key(0, "the pipeline stage that is emitted and run", ge=0)
    peers: Peers = key(
        Peers.emulated,
        "who fills the other ranks' mailboxes: `emulated` = this GPU, by a fixed seeded transform of its own partial; "
        "`real` = the peer GPUs",
    )


@dataclass
class Cache:
    """Persistent state, in vLLM's layouts."""

    block_size: int = key(16, "tokens in one KV block", ge=1)
    kv_dtype: KvDtype = key(KvDtype.bf16, "element type of the KV caches")
    recurrent_dtype: StateDtype = key(StateDtype.f32, "element type of the recurrent states")
    blocks: int | None = key(
        None, "KV blocks in the pool; null = just enough for the largest batch at full context", ge=1
    )
    slots: int | None = key(None, "recurrent state slots, slot 0 being padding; null = largest batch + 1", ge=2)


@dataclass
class Layout:
    """Weight layout."""

    weights: WeightLayout = key(
        WeightLayout.in_place, "`in_place`: the kernel reads the slices as vLLM holds them, no second copy"
    )


@dataclass
class Fusion:
    """Named fusions; each can be switched alone."""

    norm_projection: bool = key(
        True, "norm (and residual mix) recomputed inside each projection task instead of a stage of its own"
    )
    packed_projections: bool = key(True, "projections of one input in one stage instead of one stage each")
    gate_up_act: bool = key(True, "activation in the epilogue of the gate and up projections")
    residual_add: bool = key(True, "residual add in the epilogue of the output projections")
    value_gate: bool = key(True, "sigmoid output gate in the epilogue of the value projection")


@dataclass
class Overlap:
    """Named overlaps; each can be switched alone."""

    weight_stream: bool = key(True, "weight tiles queued past the edges a stage still waits for")
    shared_expert_early: bool = key(True, "shared expert computed while the router decides")
    early_block_stats: bool = key(
        True, "statistics of saved residual rows computed before the projection that completes the mix"
    )
    ring_slots: int | None = key(None, "weight tiles in flight per SM; null = as many as shared memory holds", ge=2)


@dataclass
class Sync:
    """Hand-over between SMs."""

    mechanism: Mechanism = key(Mechanism.counter, "mechanism of every edge between SMs that is not overridden")
    overrides: dict[str, Mechanism] = key({}, "buffer name pattern (`*`, `?`) to mechanism; the first match counts")


@dataclass
class Emit:
    """Code generation."""

    target: Target = key(Target.megakernel, "one persistent kernel for the whole step")
    line_info: bool = key(True, "line information in the cubin; the audit of compiled code needs it")
    probe_archs: list[str] = key(
        ["sm_100a", "sm_103a"],
        "further architectures that one stage is compiled for, as a probe",
        pattern=ARCHES,
    )


@dataclass
class Tune:
    """Choices left to measurement."""

    sms: int | None = key(None, "SMs the kernel occupies; null = all", ge=1)
    kv_splits: int | None = key(
        None, "splits of the KV sequence per attention task; null = by context and SM count", ge=1, le=256
    )


@dataclass
class Validate:
    """How much numerical evidence a run gathers, and its gates."""

    rollout_steps: int = key(64, "steps of the rollout with state carried over", ge=1)
    rollout_batch: int = key(
        4, "requests in the rollout; the largest `decode.batch` where that is smaller", ge=1, le=MAX_ROWS
    )
    order_seeds: int = key(8, "random task orders executed on the CPU", ge=1)
    order_steps: int = key(2, "steps per task order", ge=1)
    samples: int = key(256, "token rows behind the noise band of each stage; the gate needs 256", ge=256)
    seed: int = key(0, "seed of inputs and task orders", ge=0, le=MAX_SEED)



@dataclass
class Bench:
    """What the hardware checks run on a GPU (`python -m optkit.bench.hardware`)."""

    steps: int = key(64, "steps of each rollout on the GPU, state carried", ge=1)
    launches: int = key(1000, "repeated launches that must give the same bits", ge=1)


@dataclass
class Export:
    """The artifact."""

    vllm: bool = key(True, "write an artifact that vLLM's plugin can load")
    name: str | None = key(
        None, "name in the manifest; null = the recipe's name", pattern=r"[A-Za-z0-9][A-Za-z0-9._/-]*"
    )


@dataclass
class Decode:
    """The steps the kernel accepts."""

    batch: list[int] = key(
        MISSING, "batch sizes, one kernel serves them all; a single number is a one-element list", ge=1, le=MAX_ROWS
    )
    context: int = key(MISSING, "longest sequence, tokens", ge=1)
    rows_per_request: int = key(
        1, "token rows per request in one step; only 1 can be built yet (more: uniform verify steps)", ge=1, le=MAX_ROWS
    )


@dataclass
class Recipe:
    """Everything that decides what is built, how it is checked and what is exported."""

    model: Model = field(default_factory=Model)
    hardware: Hardware = field(default_factory=Hardware)
    parallel: Parallel = field(default_factory=Parallel)
    decode: Decode = field(default_factory=Decode)
    cache: Cache = field(default_factory=Cache)
    layout: Layout = field(default_factory=Layout)
    fusion: Fusion = field(default_factory=Fusion)
    overlap: Overlap = field(default_factory=Overlap)
    sync: Sync = field(default_factory=Sync)
    emit: Emit = field(default_factory=Emit)
    tune: Tune = field(default_factory=Tune)
    validate: Validate = field(default_factory=Validate)
    bench: Bench = field(default_factory=Bench)
    export: Export = field(default_factory=Export)


GROUPS = tuple(f.name for f in fields(Recipe))


@dataclass(frozen=True)
class Limits:
    """What a model's configuration allows: its layers, and its longest sequence in tokens.

    Which dimensions tensor parallelism cuts, and so what `parallel.tp` must divide, is known to the family's graph
    alone and checked there.
    """

    layers: int
    max_context: int


def schema_fields() -> Iterator[tuple[str, Any]]:
    """(dotted key, dataclass field) of every leaf of the schema, in order."""
    for group in fields(Recipe):
        section = group.default_factory  # type: ignore[misc]
        assert is_dataclass(section)
        for f in fields(section):
            yield f"{group.name}.{f.name}", f


def problems(recipe: Recipe, where: Callable[[str], str], limits: Limits | None = None) -> list[Problem]:
    """All mistakes in a complete recipe: ranges, patterns, and what several keys must agree on.

    `where` gives the source of a dotted key ("conf/hardware/h200.yaml", "command line"). `limits` adds what the
    model's configuration decides (context, layers).
    """
    found = list(_ranges(recipe, where))
    if found:  # the checks below may assume sane ranges; a value out of range is reported once
        return found

    def bad(dotted: str, expected: str, hint: str = "") -> None:
        group, name = dotted.split(".")
        found.append(Problem(dotted, _plain(getattr(getattr(recipe, group), name)), expected, where(dotted), hint))

    decode, parallel, cache, hw = recipe.decode, recipe.parallel, recipe.cache, recipe.hardware
    largest = max(decode.batch, default=0)
    if not decode.batch or len(set(decode.batch)) != len(decode.batch):
        bad("decode.batch", "at least one batch size, each once")
    elif largest * decode.rows_per_request > MAX_ROWS:
        bad(
            "decode.batch",
            f"batch x decode.rows_per_request <= {MAX_ROWS} rows, got {largest} x {decode.rows_per_request}",
        )
    elif decode.rows_per_request > 1:
        bad(
            "decode.rows_per_request",
            "1: rows of one request follow each other through its state and its cache, which no stage body does yet",
        )
    if parallel.rank >= parallel.tp:
        bad("parallel.rank", f"a rank below parallel.tp = {parallel.tp}")
    if parallel.stage >= parallel.pp:
        bad("parallel.stage", f"a stage below parallel.pp = {parallel.pp}")
    if parallel.tp > hw.max_gpus_per_node:
        bad("parallel.tp", f"at most hardware.max_gpus_per_node = {hw.max_gpus_per_node} on {hw.name}")
    if cache.blocks is not None:
        need = largest * -(-decode.context // cache.block_size)
        if cache.blocks < need:
            bad(
                "cache.blocks",
                f"at least {need}: batch {largest} x context {decode.context} in blocks of {cache.block_size}",
            )
    if cache.slots is not None and cache.slots <= largest:
        bad("cache.slots", f"at least {largest + 1}: one per request of the largest batch, and slot 0 for padding")
    if recipe.tune.sms is not None and recipe.tune.sms > hw.sms:
        bad("tune.sms", f"at most hardware.sms = {hw.sms} on {hw.name}")
    if recipe.validate.rollout_steps > decode.context:
        bad("validate.rollout_steps", f"at most decode.context = {decode.context}")
    layers = recipe.model.layers
    if layers is not None and (len(layers) != 2 or layers[0] >= layers[1]):
        bad("model.layers", "[first, last) with first < last")
        layers = None
    if limits is not None:
        if decode.context > limits.max_context:
            bad("decode.context", f"at most {limits.max_context}, the longest sequence of {recipe.model.config}")
        if layers is not None and layers[1] > limits.layers:
            bad("model.layers", f"a range within the {limits.layers} layers of {recipe.model.config}")
        if parallel.pp > limits.layers:
            bad("parallel.pp", f"at most {limits.layers}, the layers of {recipe.model.config}")
    return found


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _ranges(recipe: Recipe, where: Callable[[str], str]) -> Iterator[Problem]:
    for dotted, f in schema_fields():
        group, name = dotted.split(".")
        value = getattr(getattr(recipe, group), name)
        for item in value if isinstance(value, list) else [value]:
            expected = _violated(item, f.metadata)
            if expected:
                yield Problem(dotted, _plain(value), expected, where(dotted))
                break


def _violated(item: Any, meta: Mapping[str, Any]) -> str:
    """What `item` should have been, or "" where it is in range."""
    ge, le, pattern = meta["ge"], meta["le"], meta["pattern"]
    if isinstance(item, str):
        return f"text like {pattern}" if pattern and not re.fullmatch(pattern, item) else ""
    if item is None or isinstance(item, (bool, dict)):
        return ""
    if isinstance(item, float) and not math.isfinite(item):
        return "a finite number"
    if (ge is not None and item < ge) or (le is not None and item > le):
        return range_text(meta)
    return ""


def range_text(meta: Mapping[str, Any]) -> str:
    """`1 to 8`, `at least 1`, `` or a pattern: the range of a field in words."""
    ge, le, pattern = meta["ge"], meta["le"], meta["pattern"]
    if ge is not None and le is not None:
        return f"{ge} to {le}"
    if ge is not None:
        return f"at least {ge}"
    return f"text like {pattern}" if pattern else ""
