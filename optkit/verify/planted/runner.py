"""Plants the library's faults, runs the gates, prints who caught what: `optkit check --planted [RECIPE ...]`.

Faults are handed to worker processes one by one. A fault is tried at up to three sites; it is caught if at every site one
of the gates that should be is red, and a gate counts as having caught it if it is red at every site. It fails: a fault that
no gate catches, a gate that is red without any fault, a gate that has no fault of its own (with the whole library).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from optkit.verify.planted.registry import TARGETS, Fault, Subject, digest, library, spread

SCHEMA = "optkit-planted/1"
PLAN_GATES = (
    "edges",
    "arrivals",
    "tags",
    "liveness",
    "placement",
    "raw",
    "war",
    "waw",
    "within_stage",
    "never_written",
    "mailbox_reuse",
    "ring",
    "shared_memory",
    "registers",
    "index_sets",
)
GATES = (
    *(f"proof.{g}" for g in PLAN_GATES),
    "table.work",
    "table.waits",
    "table.tags",
    "table.addresses",
    "table.constants",
    "constants.config",
    "numerics.per_stage",
    "numerics.probes",
    "numerics.exact",
    "rollout.logits",
    "rollout.choices",
    "rollout.state",
    "boundary",
    "repeat.bits",
    "orders.bits",
    "audit.access",
    "audit.guarded",
    "audit.fences",
    "audit.local_memory",
)
"""The gates of a run on the CPU that the library judges."""


@dataclass
class Outcome:
    """What became of one fault. `red`: gates red at every site; `sites`: (where, red gates)."""

    key: str
    kind: str
    target: str
    variant: str
    recipe: str = ""
    expected: list[str] = field(default_factory=list)
    hardware: bool = False
    sites: list[tuple[str, list[str]]] = field(default_factory=list)
    red: list[str] = field(default_factory=list)
    caught: bool = False
    error: str = ""
    seconds: float = 0.0


_SUBJECTS: list[Subject] = []
_CACHE: Path | None = None
_TABLES: dict[tuple[str, str], Any] = {}


def _start(subjects: Sequence[Subject], cache: Path | None) -> None:
    """A worker's state. One torch thread: the work consists of many small operations."""
    global _SUBJECTS, _CACHE
    import torch

    torch.set_num_threads(1)
    _SUBJECTS, _CACHE = list(subjects), cache


def _base(fault: Fault, subject: Subject) -> Any:
    """What the fault's sites are listed in, None where the variant has none."""
    from optkit.verify.planted import device_faults, gates

    if fault.target == "plan":
        return subject.plan(fault.variant)
    if fault.target == "table":
        key = subject.name, fault.variant
        if key not in _TABLES:
            try:
                _TABLES[key] = gates.base_table(subject, fault.variant)
            except ValueError:  # no device body can do a stage of this variant: it has no table
                _TABLES[key] = None
        return _TABLES[key]
    if fault.target == "constant":
        return subject.plan()
    if fault.target == "body":
        return gates.small_model(subject.family, fault.variant).plan
    return dict(device_faults.sources())


def _judge(fault: Fault, subject: Subject, broken: Any, seed: int, only: frozenset[str], short: bool) -> set[str]:
    from optkit.verify.planted import gates

    if fault.target == "plan":
        return gates.proofs(broken)
    if fault.target == "table":
        return gates.table(broken)
    if fault.target == "constant":
        return gates.constants(subject, broken, seed, only, short)
    if fault.target == "body":
        return gates.bodies(subject, fault.variant, broken, seed, only, short)
    return _device(fault, subject, broken)


def _device(fault: Fault, subject: Subject, sources: dict[str, str]) -> set[str]:
    """Table offsets of changed sources; or the audit of the kernel they make, with the bodies that show the fault."""
    from dataclasses import replace

    from optkit.verify.planted import build, device_faults, gates
    from optkit.verify.table import check_table

    if fault in device_faults.MISPLACED:
        base = gates.base_table(subject, "own")
        with build.changed(sources) as folder:
            return gates.red(check_table(base.plan, base.table, base.book, folder))
    from optkit.emit.compile import KernelSpec

    spec = replace(KernelSpec.of(subject.plan()), bodies=device_faults.bodies_for(fault), tagged=True)
    return build.audited(sources, spec, _CACHE)


def run_one(key: str, quick: bool = False) -> Outcome:
    """Plant one fault at its sites; `quick`: only its expected gates, to see that they catch it."""
    from optkit.verify.planted.gates import CONFIG, NUMERIC

    fault = next(f for f in library() if f.key == key)
    out = Outcome(key, fault.kind, fault.target, fault.variant, expected=list(fault.gates), hardware=fault.hardware)
    start = time.perf_counter()
    try:
        for subject in _SUBJECTS:
            base = _base(fault, subject)
            sites = [] if base is None else list(fault.sites(base))
            if sites:
                break
        else:
            out.error = "applies to none of these recipes"
            return out
        out.recipe = subject.name
        only = frozenset((CONFIG, *NUMERIC)) if not quick else frozenset(fault.gates)
        for seed, (where, make) in enumerate(spread(sites)):
            red = _judge(fault, subject, make(), seed, only, quick)
            out.sites.append((where, sorted(red)))
            only = frozenset(red)
            if not red:
                break
        out.red = sorted(set.intersection(*(set(r) for _, r in out.sites)))
        out.caught = all(set(r) & set(fault.gates) for _, r in out.sites)
    except Exception as e:  # a fault that cannot be planted is a defect of the library: it is reported, not raised
        out.error = f"{type(e).__name__}: {e}"
    finally:
        out.seconds = time.perf_counter() - start
    return out


def _control(i: int, seed: int) -> tuple[str, list[str]]:
    from optkit.verify.planted import gates

    return f"{_SUBJECTS[i].name}, seed {seed}", sorted(gates.control(_SUBJECTS[i], seed))


@dataclass
class Report:
    """All outcomes, the controls (red gates without a fault), the library's digest, and the time."""

    outcomes: list[Outcome]
    controls: list[tuple[str, list[str]]]
    library: str
    seconds: float
    whole: bool

    @property
    def planted(self) -> list[Outcome]:
        """Faults that this machine can judge and that apply to the recipes."""
        return [o for o in self.outcomes if not o.hardware and o.sites]

    @property
    def missed(self) -> list[Outcome]:
        """Faults that no expected gate caught at every site, and those that could not be planted."""
        return [o for o in self.planted if not o.caught] + [
            o
            for o in self.outcomes
            if o.error and not o.sites and not o.hardware and (self.whole or not o.error.startswith("applies"))
        ]

    def by_gate(self) -> dict[str, tuple[int, int, list[str]]]:
        """Gate -> (caught, planted for it, faults that only it catches)."""
        out = {}
        for g in GATES:
            hit = [o for o in self.planted if g in o.red]
            out[g] = (
                len(hit),
                len([o for o in self.planted if g in o.expected or g in o.red]),
                [o.key for o in hit if o.red == [g]],
            )
        return out

    @property
    def without_own(self) -> list[str]:
        """Gates without a fault that only they catch."""
        return [g for g, (_, _, own) in self.by_gate().items() if not own] if self.whole else []

    @property
    def failed(self) -> list[str]:
        """Why the suite fails, one line each."""
        lines = [f"not caught: {o.key} ({o.recipe}, {o.variant}): {o.error or o.sites}" for o in self.missed]
        lines += [f"red without a fault ({where}): {', '.join(red)}" for where, red in self.controls if red]
        return lines + [f"no fault that only {g} catches" for g in self.without_own]

    def table(self) -> dict[str, Any]:
        """The table as JSON, without times: the same library on the same code gives the same bytes."""
        rows = [
            {k: v for k, v in asdict(o).items() if k != "seconds"} for o in sorted(self.outcomes, key=lambda o: o.key)
        ]
        return {
            "schema": SCHEMA,
            "library": self.library,
            "faults": rows,
            "gates": {g: {"caught": c, "planted": n, "own": len(own)} for g, (c, n, own) in self.by_gate().items()},
        }

    @property
    def digest(self) -> str:
        """sha256 of `table`: what a bundle cites."""
        return hashlib.sha256(json.dumps(self.table(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def plant(
    subjects: Sequence[Subject],
    targets: Sequence[str] = TARGETS,
    *,
    faults: Sequence[Fault] | None = None,
    jobs: int = 2,
    cache: Path | None = None,
    quick: bool = False,
    controls: bool = True,
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Run the faults of these targets (or `faults`) on these recipes in `jobs` processes."""
    start = time.perf_counter()
    chosen = list(faults) if faults is not None else library(targets)
    here = [f for f in chosen if not f.hardware]
    order = sorted(here, key=lambda f: ("device", "body", "constant", "plan", "table").index(f.target))
    outcomes = [
        Outcome(f.key, f.kind, f.target, f.variant, expected=list(f.gates), hardware=True) for f in chosen if f.hardware
    ]
    red: list[tuple[str, list[str]]] = []
    with ProcessPoolExecutor(
        max(1, jobs), mp_context=get_context("spawn"), initializer=_start, initargs=(subjects, cache)
    ) as pool:
        waiting: dict[Any, str] = {pool.submit(run_one, f.key, quick): f.key for f in order}
        if controls:
            waiting |= {pool.submit(_control, i, seed): "" for i in range(len(subjects)) for seed in range(3)}
        for done in as_completed(waiting):
            if not waiting[done]:
                red.append(done.result())
                continue
            o = done.result()
            outcomes.append(o)
            if o.sites and not o.caught or o.error:
                progress(f"NOT CAUGHT {o.key}: {o.error or o.sites}")
    whole = set(f.key for f in chosen) == set(f.key for f in library())
    return Report(outcomes, sorted(red), digest(library()), time.perf_counter() - start, whole)


def show(report: Report, out: Callable[[str], None] = print) -> None:
    """Per gate caught / planted, its own faults, and time; then what fails."""
    seconds: dict[str, float] = dict.fromkeys(GATES, 0.0)
    for o in report.planted:
        for g in o.red:
            seconds[g] = seconds.get(g, 0.0) + o.seconds / len(o.red)
    out(f"{'gate':24} {'caught/planted':>15} {'own':>5} {'seconds':>8}")
    for g, (caught, n, own) in report.by_gate().items():
        out(f"{g:24} {f'{caught}/{n}':>15} {len(own):5} {seconds[g]:8.1f}")
    for target in TARGETS:
        mine = [o for o in report.planted if o.target == target]
        if mine:
            out(
                f"{target + ' faults':24} {f'{sum(o.caught for o in mine)}/{len(mine)}':>15} {'':5} {sum(o.seconds for o in mine):8.1f}"
            )
    gpu = [o for o in report.outcomes if o.hardware]
    if gpu:
        out(f"{'needs a GPU':24} {len(gpu):>15}")
    for line in report.failed:
        out(f"FAILED {line}")
    caught = sum(o.caught for o in report.planted)
    out(f"{caught} of {len(report.planted)} planted faults caught, {report.seconds:.0f} s, table {report.digest[:12]}")


def main(
    subjects: Sequence[Subject],
    *,
    out: Path | None = None,
    jobs: int | None = None,
    cache: Path | None = None,
    targets: Iterable[str] = TARGETS,
) -> int:
    """Run the library, print the table, write it to `out`; 1 if anything went uncaught."""
    report = plant(
        subjects,
        tuple(targets),
        jobs=jobs or min(os.cpu_count() or 1, 2),
        cache=cache,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    show(report)
    if out is not None:
        out.write_text(json.dumps({**report.table(), "digest": report.digest}, indent=1, sort_keys=True) + "\n")
        print(f"{out}")
    return 1 if report.failed else 0
