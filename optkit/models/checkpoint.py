"""Reading and writing Hugging Face checkpoints: config.json, safetensors shards, index file.

Everything that is wrong with a checkpoint is found from the headers before any weight is read, and named in one
CheckpointError: missing, misshapen, mistyped and unexpected tensors, shards that are damaged or absent. Tensor names
may carry the multimodal wrapper's prefix; the wrapper's vision tensors are ignored.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from optkit.models import families, packing
from optkit.models.config import ConfigError
from optkit.models.graph import Graph, Weight
from optkit.models.packing import Region, Resident, Source
from optkit.models.random_weights import has_tied_head, random_weight
from optkit.models.token_classes import token_classes, write_tokenizer
from optkit.models.tokenizer import write_word_tokenizer

INDEX = "model.safetensors.index.json"
DTYPE_NAMES = {"BF16": "bf16", "F32": "f32", "U8": "u8", "F16": "f16", "F64": "f64", "I32": "i32", "I64": "i64"}
DTYPE_NAMES |= {"I8": "i8", "F8_E4M3": "e4m3", "F8_E8M0": "e8m0"}
TORCH_DTYPE = {"bf16": torch.bfloat16, "f32": torch.float32, "i32": torch.int32, **packing.STORED_BYTES}
TORCH_DTYPE |= {"e4m3": torch.float8_e4m3fn}
TOKENIZER = "tokenizer.json"
"""Stands among the tensors as one: the classes of its tokens, for families that read them."""
TAIL = 128
"""A vector stored with a padded tail is written as the next multiple of 128 elements, as published files have it."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; one line per mistake, all of them at once."""


@dataclass(frozen=True)
class Found:
    """One tensor of a checkpoint: where it is and what its header says."""

    file: str
    stored_name: str
    shape: tuple[int, ...]
    dtype: str


def read_config(directory: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises CheckpointError if it is absent or not a JSON mapping."""
    path = Path(directory) / "config.json"
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing: expected a checkpoint's config.json") from None
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path}: damaged: {e}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON mapping, got {type(data).__name__}")
    return data


def checkpoint_weights(module: ModuleType, config: Any) -> tuple[Weight, ...]:
    """Every weight of the unsharded model, those that no step reads included."""
    return (*module.build(config, rows=1).weights, *module.unused_weights(config))


def _parallel(graph: Graph) -> tuple[int, int]:
    constants = dict(graph.constants)
    return int(constants["tp"]), int(constants["rank"])


def _graph(target: Any, tp: int, rank: int) -> Graph:
    if isinstance(target, Graph):
        return target
    return families.module_of(target).build(target, rows=1, tp=tp, rank=rank)


def _shards(directory: Path, problems: list[str]) -> dict[str, set[str] | None]:
    """Shard file name -> the tensor names that the index promises there (None without an index)."""
    index = directory / INDEX
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            promised: dict[str, set[str] | None] = {}
            for name, file in weight_map.items():
                if not isinstance(file, str) or Path(file).name != file:  # never a file outside the checkpoint
                    problems.append(f"{index}: {name}: {file!r}: expected the name of a file beside the index")
                    continue
                names = promised.setdefault(file, set())
                assert names is not None
                names.add(name)
            return promised
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            problems.append(f"{index}: damaged: {type(e).__name__}: {e}; expected a JSON mapping with weight_map")
            return {}
    files = sorted(p.name for p in directory.glob("*.safetensors"))
    if not files:
        problems.append(f"{directory}: no *.safetensors file: expected model.safetensors or shards with {INDEX}")
    return dict.fromkeys(files)


class Checkpoint:
    """An open checkpoint directory; use as a context manager. `found` maps names without wrapper prefix to tensors."""

    def __init__(self, directory: str | Path, module: ModuleType) -> None:
        self.directory, self.module = Path(directory), module
        self.problems: list[str] = []  # files that are damaged or absent: what they held is not known
        self.misplaced: list[str] = []  # what the index says against the headers
        self.found: dict[str, Found] = {}
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Checkpoint:
        for file, promised in _shards(self.directory, self.problems).items():
            path = self.directory / file
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
            except FileNotFoundError:
                self.problems.append(f"{path}: missing: {INDEX} names this file")
                continue
            except (SafetensorError, OSError) as e:
                self.problems.append(f"{path}: damaged safetensors file: {e}")
                continue
            self._files[file] = handle
            names = set(handle.keys())
            for name in sorted((promised or set()) - names):
                self.misplaced.append(f"{path}: {name}: missing: {INDEX} places it in this file")
            for name in sorted(names):
                self._note(file, name, handle)
        self._note_tokenizer()
        return self

    def _note_tokenizer(self) -> None:
        path = self.directory / TOKENIZER
        if not getattr(self.module, "READS_TOKENIZER", False) or not path.exists():
            return
        try:
            self._classes = token_classes(path)
        except ValueError as e:
            self.problems.append(str(e))
            return
        self.found[TOKENIZER] = Found(TOKENIZER, TOKENIZER, tuple(self._classes.shape), "i32")

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _note(self, file: str, stored: str, handle: Any) -> None:
        name = stored.removeprefix(self.module.WRAPPER_PREFIX)
        view = handle.get_slice(stored)
        if name in self.found:
            other = self.found[name]
            self.misplaced.append(f"{name}: stored twice, in {other.file} and {file}: expected once")
        dtype = view.get_dtype()
        self.found[name] = Found(file, stored, tuple(view.get_shape()), DTYPE_NAMES.get(dtype, dtype))

    def read(self, name: str, region: Region) -> Tensor:
        """A part of a tensor, contiguous."""
        where = self.found[name]
        if name == TOKENIZER:
            return self._classes
        try:
            return self._files[where.file].get_slice(where.stored_name)[region].contiguous()
        except (SafetensorError, OSError) as e:
            raise CheckpointError(f"{self.directory / where.file}: {name}: damaged safetensors file: {e}") from None


def _mistakes(graph: Graph, found: Mapping[str, Found], module: ModuleType) -> Iterator[str]:
    """What the headers say against the graph: every missing, misshapen, mistyped, unexpected tensor."""
    ranks, _ = _parallel(graph)
    needed = {s.name: s for w in graph.weights for s in packing.sources(w, ranks)}
    for name, source in needed.items():
        if name not in found:
            yield f"{name}: missing: expected {source.dtype} {list(source.shape)}"
            continue
        have = found[name]
        shape = (
            (source.shape[0], *have.shape[1:]) if source.longer and have.shape[:1] >= source.shape[:1] else have.shape
        )
        if name == TOKENIZER and have.shape <= source.shape:
            shape = source.shape  # embeddings are padded beyond the tokenizer; the ids behind it never occur
        if shape != source.shape:
            least = "at least " if source.longer else ""
            yield f"{name}: shape {list(have.shape)} in {have.file}: expected {least}{list(source.shape)}"
        if have.dtype != source.dtype:
            yield f"{name}: dtype {have.dtype} in {have.file}: expected {source.dtype}"
    constants = dict(graph.constants)
    config = module.Config(**{f.name: constants[f.name] for f in fields(module.Config)})
    whole = {s.name for w in checkpoint_weights(module, config) for s in packing.sources(w, 1)}
    for name in sorted(set(found) - whole):
        if not module.ignores(name, constants):
            yield f"{name}: unexpected tensor in {found[name].file}: not part of {graph.family}"


def compare_config(graph: Graph, config_json: Mapping[str, Any]) -> list[str]:
    """The model constants of `graph` against a config.json, field by field; one line per difference."""
    try:
        theirs = asdict(families.family_of(config_json).Config.from_hf(config_json))
    except ConfigError as e:
        return str(e).splitlines()
    if families.family_of(config_json).FAMILY != graph.family:
        return [f"config.json: model_type: {config_json['model_type']!r}: expected one of family {graph.family}"]
    ours = dict(graph.constants)
    return [f"config.json: {k}: {v!r}: expected {ours[k]!r}, as planned" for k, v in theirs.items() if v != ours[k]]


def _verify(checkpoint: Checkpoint, graph: Graph) -> None:
    problems = compare_config(graph, read_config(checkpoint.directory)) + checkpoint.problems + checkpoint.misplaced
    if not checkpoint.problems:
        problems += _mistakes(graph, checkpoint.found, checkpoint.module)
    if problems:
        raise CheckpointError("\n".join(problems))


def verify(directory: str | Path, graph: Graph) -> None:
    """Hold config.json and every header against the graph; reads no weight. Raises CheckpointError as `load` does."""
    with Checkpoint(directory, families.FAMILIES[graph.family]) as checkpoint:
        _verify(checkpoint, graph)


def load(directory: str | Path, target: Any, tp: int = 1, rank: int = 0) -> dict[str, Resident]:
    """One rank's resident weights by name; "mxfp4" weights are (packed, scales).

    `target` is a Graph (which knows its tp and rank) or a family's Config. Raises CheckpointError that lists everything
    wrong, config.json included.
    """
    graph = _graph(target, tp, rank)
    module = families.FAMILIES[graph.family]
    ranks, rank = _parallel(graph)
    with Checkpoint(directory, module) as checkpoint:
        _verify(checkpoint, graph)
        return {w.name: packing.pack(w, ranks, rank, checkpoint.read) for w in graph.weights}


def from_tensors(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Resident]:
    """The same from whole checkpoint tensors in memory, with the same checks."""
    module = families.FAMILIES[graph.family]
    by_dtype = {v: k for k, v in TORCH_DTYPE.items()}
    plain = {n.removeprefix(module.WRAPPER_PREFIX): t for n, t in tensors.items()}
    found = {n: Found("memory", n, tuple(t.shape), by_dtype.get(t.dtype, str(t.dtype))) for n, t in plain.items()}
    if problems := list(_mistakes(graph, found, module)):
        raise CheckpointError("\n".join(problems))
    ranks, rank = _parallel(graph)
    return {
        w.name: packing.pack(w, ranks, rank, lambda name, region: plain[name][region].contiguous())
        for w in graph.weights
    }


def _stored_shape(source: Source) -> tuple[int, ...]:
    return (-(-source.shape[0] // TAIL) * TAIL, *source.shape[1:]) if source.longer else source.shape


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """All bits zero, also for types that have no zero."""
    return torch.zeros(*shape[:-1], shape[-1] * dtype.itemsize, dtype=torch.uint8).view(dtype)


def _groups(weights: tuple[Weight, ...]) -> list[list[Weight]]:
    """Weights that share checkpoint tensors, together."""
    groups: dict[tuple[str, ...], list[Weight]] = {}
    for w in weights:
        groups.setdefault(w.source, []).append(w)
    return list(groups.values())


def random_tensors(config_json: Mapping[str, Any], seed: int = 0) -> Iterator[dict[str, Tensor]]:
    """Random checkpoint tensors of a whole model, by names without wrapper prefix, a few at a time."""
    module = families.family_of(config_json)
    config = module.Config.from_hf(config_json)
    tied = has_tied_head(module.build(config, rows=1))
    for group in _groups(checkpoint_weights(module, config)):
        out = {s.name: _blank(_stored_shape(s), TORCH_DTYPE[s.dtype]) for w in group for s in packing.sources(w, 1)}

        def write(name: str, region: Region, part: Tensor, out: dict[str, Tensor] = out) -> None:
            if all(s == slice(None) for s in region):
                region = tuple(slice(0, n) for n in part.shape)
            out[name][region] = part

        for w in group:
            packing.unpack(w, 1, 0, random_weight(w, seed, tied_head=tied), write)
        yield out


def write_random(directory: str | Path, config_json: Mapping[str, Any], seed: int = 0, shards: int = 1) -> Path:
    """Writes config.json, random safetensors (with an index where shards > 1) and a tokenizer of the words t0 t1 ...,
    for any config of a known family.

    A wrapper config (text_config) gets wrapper names. The directory must not exist or be empty; it appears only when
    complete. Raises ConfigError for a config that no family takes, ValueError for a used directory.
    """
    directory = Path(directory)
    if directory.exists() and any(directory.iterdir()):
        raise ValueError(f"{directory}: exists and is not empty: expected a new directory")
    if shards < 1:
        raise ValueError(f"shards: {shards}: expected >= 1")
    module = families.family_of(config_json)
    module.Config.from_hf(config_json)  # raises before anything is written
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        _write_into(partial, module, config_json, seed, shards)
        partial.chmod(0o755)  # mkdtemp makes it private
        if directory.exists():
            directory.rmdir()
        os.replace(partial, directory)
    except BaseException:  # a full disk, Ctrl-C: no half checkpoint stays
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory


def _write_into(partial: Path, module: ModuleType, config_json: Mapping[str, Any], seed: int, shards: int) -> None:
    """The files of `write_random`, into an empty directory."""
    prefix = module.WRAPPER_PREFIX if "text_config" in config_json else ""
    whole = checkpoint_weights(module, module.Config.from_hf(config_json))
    limit = sum(w.nbytes for w in whole) / shards
    batch: dict[str, Tensor] = {}
    weight_map: dict[str, str] = {}
    written = 0
    names = [
        f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors" for i in range(shards)
    ]
    index = 0
    for group in random_tensors(config_json, seed):
        if index + 1 < shards and written >= limit * (index + 1):
            save_file(batch, partial / names[index], metadata={"format": "pt"})
            batch = {}
            index += 1
        if TOKENIZER in group:
            write_tokenizer(partial / TOKENIZER, group.pop(TOKENIZER))
        for name, t in group.items():
            batch[prefix + name] = t
            weight_map[prefix + name] = names[index]
            written += t.numel() * t.element_size()
    save_file(batch, partial / names[index], metadata={"format": "pt"})
    if shards > 1:
        body = {"metadata": {"total_size": written}, "weight_map": weight_map}
        (partial / INDEX).write_text(json.dumps(body, indent=1, sort_keys=True))
    (partial / "config.json").write_text(json.dumps(config_json, indent=2))
    if not getattr(module, "READS_TOKENIZER", False):  # then it stands among the tensors and was written with them
        write_word_tokenizer(partial, config_json.get("text_config", config_json)["vocab_size"])
