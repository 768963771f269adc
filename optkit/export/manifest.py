"""The artifact: what a run hands over to serving, and how its integrity is checked.

An artifact is one flat directory: `manifest.json`, `plan.json`, `recipe.yaml` and, when a kernel was emitted,
`kernel.cubin`. The manifest lists the sha256 of every other file and carries its own digest, so a change of any byte
is refused before anything in it is used. (This detects damage and mix-ups; it is not a signature.)

May assume only the standard library and pydantic.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

SCHEMA = "optkit-artifact/1"
MANIFEST, PLAN, RECIPE, CUBIN = "manifest.json", "plan.json", "recipe.yaml", "kernel.cubin"
VLLM_RANGE = ("0.32", "0.34")
"""vLLM versions the plugin was run with: at least the first, below the second."""

_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_SHA256 = r"^[0-9a-f]{64}$"
Scalar = bool | int | float | str | None
Constant = Scalar | tuple[Scalar, ...]


class ArtifactError(ValueError):
    """An artifact that must not be used. The message names the file or field and what was expected."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Scope(_Model):
    """Exactly what the artifact accepts; anything else runs vLLM's own path."""

    family: str
    architectures: tuple[str, ...] = Field(min_length=1)
    """Names as in config.json."""
    shape: dict[str, Constant]
    """Model constants by name, compared one by one with the ones the engine's checkpoint gives."""
    config_digest: str = Field(pattern=_SHA256)
    """`config_digest` of the checkpoint's config.json."""
    layers: tuple[int, int]
    """Half-open range of layers that the kernel computes."""
    batch: tuple[int, ...] = Field(min_length=1)
    """Batch sizes that decode steps are padded up to, ascending."""
    rows: int = Field(ge=1)
    """Token class: most rows a step may have."""
    rows_per_request: int = Field(default=1, ge=1)
    context: int = Field(ge=1)
    """Most tokens of one request, prompt included."""
    tp: int = Field(ge=1)
    pp: int = Field(ge=1)
    rank: int | None = Field(default=None, ge=0)
    """The one tensor-parallel rank the plan is for; None = one plan for every rank."""
    pp_rank: int = Field(default=0, ge=0)
    """The pipeline stage that `layers` is."""
    peers: Literal["real", "emulated"] = "real"
    dtypes: dict[str, str]
    """activation, kv, conv, recurrent -> bf16 | f32 (those that the model has)."""
    block_size_multiple: int = Field(default=1, ge=1)
    block_size_max: int = Field(default=4096, ge=1)
    """Cache block sizes accepted at run time: multiples of the one, up to the other."""
    arch: str
    """GPU architecture of the kernel, for example sm_90a."""
    sms: int = Field(ge=1)

    @field_validator("batch")
    @classmethod
    def _ascending(cls, v: tuple[int, ...]) -> tuple[int, ...]:
        if list(v) != sorted(set(v)) or v[0] < 1:
            raise ValueError(f"expected ascending positive batch sizes, got {list(v)}")
        return v


class Hardware(_Model):
    """Evidence from a GPU, matched by the sha256 of the cubin it ran."""

    cubin_sha256: str = Field(pattern=_SHA256)
    gpu: str
    evidence_sha256: str = Field(pattern=_SHA256)


class Verdict(_Model):
    """The run's verdict. `not_run` counts the checks that only a machine with the GPU can finish."""

    status: Literal["verified", "verified except hardware", "failed"]
    not_run: int = Field(default=0, ge=0)
    hardware: Hardware | None = None

    @classmethod
    def parse(cls, words: str) -> Verdict:
        """From a run's verdict: "verified", "verified except hardware (3)", "failed (2)"; all else counts as failed."""
        m = re.fullmatch(r"(verified except hardware|verified|failed)(?: \((\d+)\))?", words)
        if m is None or m[1] == "failed":
            return cls(status="failed")
        return cls.model_validate({"status": m[1], "not_run": int(m[2] or 0)})


class Versions(_Model):
    """What the artifact was made with, and the vLLM versions whose plugin interface it is for."""

    optkit: str
    torch: str
    cutlass_dsl: str | None = None
    vllm: tuple[str, str] = VLLM_RANGE
    """At least the first, below the second."""


class Param(_Model):
    """One kernel parameter: name, byte offset and size in the parameter space."""

    name: str
    offset: int = Field(ge=0)
    size: int = Field(ge=1)


class Kernel(_Model):
    """Launch facts of `kernel.cubin`."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    dynamic_smem: int = Field(ge=0)
    """bytes"""
    cooperative: bool = True
    params: tuple[Param, ...]


class File(_Model):
    """One file beside the manifest."""

    sha256: str = Field(pattern=_SHA256)
    size: int = Field(ge=0)
    """bytes"""


class Manifest(_Model):
    """manifest.json. `digest` is the sha256 of the canonical bytes of all other fields."""

    schema_: str = Field(default=SCHEMA, alias="schema", pattern=f"^{SCHEMA}$")
    name: str
    scope: Scope
    verdict: Verdict
    versions: Versions
    recipe_digest: str = Field(pattern=_SHA256)
    plan_digest: str = Field(pattern=_SHA256)
    kernel: Kernel | None
    files: dict[str, File]
    digest: str = ""

    def sealed(self) -> Manifest:
        """The same manifest with its digest filled in."""
        return self.model_copy(update={"digest": _sha256(self._canonical(without_digest=True))})

    def to_bytes(self) -> bytes:
        return self._canonical() + b"\n"

    def _canonical(self, without_digest: bool = False) -> bytes:
        data = self.model_dump(mode="json", by_alias=True, exclude={"digest"} if without_digest else None)
        return json.dumps(data, sort_keys=True, indent=1, ensure_ascii=True).encode()


@dataclass(frozen=True)
class Artifact:
    """A verified artifact. `files` holds the very bytes that were hashed, so later changes on disk do not matter."""

    path: Path
    manifest: Manifest
    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def plan_json(self) -> str:
        return self.files[PLAN].decode()

    @property
    def cubin(self) -> bytes | None:
        return self.files.get(CUBIN)


_UNRELATED = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map")


def config_digest(config: Mapping[str, Any]) -> str:
    """sha256 of a checkpoint's config.json without the keys that do not change the model (canonical JSON)."""
    kept = {k: v for k, v in config.items() if k not in _UNRELATED}
    return _sha256(json.dumps(kept, sort_keys=True, separators=(",", ":")).encode())


def write_artifact(
    directory: str | os.PathLike[str],
    *,
    name: str,
    plan_json: str,
    recipe: str,
    recipe_digest: str,
    scope: Scope,
    verdict: Verdict,
    versions: Versions,
    kernel: Kernel | None = None,
    cubin: bytes | None = None,
) -> Artifact:
    """Write an artifact in one step (temporary directory, then rename) and return it as loaded from disk.

    Raises ArtifactError where the directory exists already, or only one of `kernel` and `cubin` is given.
    """
    target = Path(directory)
    if target.exists() or target.is_symlink():
        raise ArtifactError(f"artifact {target}: exists already; expected a directory that does not exist yet")
    if (kernel is None) != (cubin is None):
        raise ArtifactError(f"artifact {target}: kernel facts and cubin belong together, got only one of them")
    files = {PLAN: plan_json.encode(), RECIPE: recipe.encode()}
    if cubin is not None:
        files[CUBIN] = cubin
    manifest = Manifest(
        name=name, scope=scope, verdict=verdict, versions=versions, recipe_digest=recipe_digest,
        plan_digest=_sha256(files[PLAN]), kernel=kernel,
        files={name: File(sha256=_sha256(data), size=len(data)) for name, data in sorted(files.items())},
    ).sealed()
    target.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        for name, data in [*files.items(), (MANIFEST, manifest.to_bytes())]:
            (tmp / name).write_bytes(data)
        tmp.chmod(0o755)  # mkdtemp makes it private; the serving user need not be the building one
        tmp.rename(target)
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    return load_artifact(target)


def load_artifact(directory: str | os.PathLike[str]) -> Artifact:
    """Verify every digest, then return the artifact with the verified bytes.

    Raises ArtifactError naming the first of: no directory, a file that is missing, unlisted, a link or not a plain
    file, a bad file name, any byte that differs, a manifest of another schema.
    """
    root = Path(directory)
    if not root.is_dir():
        raise ArtifactError(f"artifact {root}: no such directory")
    present = {e.name: e for e in os.scandir(root)}
    for name, entry in sorted(present.items()):
        if not entry.is_file(follow_symlinks=False):
            raise ArtifactError(f"artifact {root}: {name} is not a plain file (links and folders are refused)")
    if MANIFEST not in present:
        raise ArtifactError(f"artifact {root}: {MANIFEST} is missing")
    manifest = _parse_manifest(root, _read(root / MANIFEST))
    for name in sorted(manifest.files):
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise ArtifactError(f"artifact {root}: {MANIFEST} lists {name!r}; expected a plain file name")
    if missing := sorted(set(manifest.files) - set(present)):
        raise ArtifactError(f"artifact {root}: {', '.join(missing)} listed in {MANIFEST} but missing")
    if unlisted := sorted(set(present) - set(manifest.files) - {MANIFEST}):
        raise ArtifactError(f"artifact {root}: {', '.join(unlisted)} not listed in {MANIFEST}")
    files: dict[str, bytes] = {}
    for name, fact in sorted(manifest.files.items()):
        data = _read(root / name)
        if len(data) != fact.size or _sha256(data) != fact.sha256:
            raise ArtifactError(f"artifact {root}: {name} has sha256 {_sha256(data)[:16]}…, the manifest says "
                                f"{fact.sha256[:16]}…: the file was changed or damaged")
        files[name] = data
    for name in (PLAN, RECIPE):
        if name not in files:
            raise ArtifactError(f"artifact {root}: {name} is missing")
    if (manifest.kernel is None) != (CUBIN not in files):
        raise ArtifactError(f"artifact {root}: kernel facts and {CUBIN} belong together, found only one of them")
    if manifest.files[PLAN].sha256 != manifest.plan_digest:
        raise ArtifactError(f"artifact {root}: plan_digest does not match {PLAN}")
    return Artifact(root, manifest, files)


def set_verdict(directory: str | os.PathLike[str], verdict: Verdict) -> Artifact:
    """Replace the verdict of a verified artifact (used when hardware evidence arrives later).

    Raises ArtifactError where the evidence is of another cubin than the artifact's.
    """
    art = load_artifact(directory)
    if verdict.hardware is not None:
        own = art.manifest.files.get(CUBIN)
        if own is None or own.sha256 != verdict.hardware.cubin_sha256:
            raise ArtifactError(f"artifact {art.path}: hardware evidence is of cubin "
                                f"{verdict.hardware.cubin_sha256[:16]}…, this artifact holds "
                                f"{own.sha256[:16] + '…' if own else 'none'}")
    manifest = art.manifest.model_copy(update={"verdict": verdict, "digest": ""}).sealed()
    fd, tmp = tempfile.mkstemp(prefix=f".{art.path.name}.", dir=art.path.resolve().parent)
    with os.fdopen(fd, "wb") as f:
        f.write(manifest.to_bytes())
    os.chmod(tmp, 0o644)
    os.replace(tmp, art.path / MANIFEST)
    return load_artifact(directory)


def _parse_manifest(root: Path, data: bytes) -> Manifest:
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ArtifactError(f"artifact {root}: {MANIFEST} is not JSON ({e})") from None
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema != SCHEMA:
        raise ArtifactError(f"artifact {root}: {MANIFEST} has schema {schema!r}; expected {SCHEMA!r}")
    try:
        manifest = Manifest.model_validate(raw)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ArtifactError(f"artifact {root}: {MANIFEST}: {where}: {first['msg']}") from None
    if manifest.sealed().to_bytes() != data:
        raise ArtifactError(f"artifact {root}: {MANIFEST} does not match its own digest: it was changed or damaged")
    return manifest


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    with os.fdopen(fd, "rb") as f:
        return f.read()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
