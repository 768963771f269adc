"""The faults that only a GPU shows, compiled here: `python -m optkit.verify.planted.device --out DIR RUN ...`.

Every RUN is a run directory (`optkit run`): its Plan, model.json and right cubin go along. A fault is compiled for the first
RUN whose Plan has the bodies that show it. Ordering faults are compiled with a delay before the work of every fifth CTA, and
so is a kernel without any fault, which must pass everything. `python -m optkit.bench.planted DIR` judges them on the GPU,
without CuTe DSL. Cubins are kept as .xz; compiled ones are not compiled again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from optkit.plan.compress import from_json
from optkit.plan.types import Plan
from optkit.verify.planted.build import changed, key_of
from optkit.verify.planted.device_faults import DELAY, FAULTS, Edit, Sources, sources
from optkit.verify.planted.registry import Fault, digest, library

SCHEMA = "optkit-planted-device/1"
DELAYED = "device: right kernel, delayed"
"""The control: no fault, the same delay."""


def made(fault: Fault | None, delayed: bool) -> Sources:
    """The changed sources of a fault (None: none), with the delay where asked for."""
    out = dict(sources())
    if fault is not None:
        ((_, make),) = fault.sites(out)
        out = make()
    return DELAY.apply(out) if delayed else out


def needs_delay(fault: Fault) -> bool:
    """Whether the fault is one of order: any of several gates may see it."""
    return len(fault.gates) > 2


def bodies_of_edit(fault: Fault) -> tuple[str, ...]:
    """One of these bodies must be in a Plan for the fault to do anything; () = any Plan."""
    shows = {("attention.py", "rotate"): ("rope_insert",), ("moe.py", ""): ("route",), ("kda.py", ""): ("kda",)}
    first: Edit | None = getattr(fault.sites, "first", None)
    if first is None:
        return ()
    return shows.get((first.file, first.within)) or shows.get((first.file, "")) or ()


def choose(fault: Fault, plans: dict[str, Plan]) -> str | None:
    """The run that shows a fault: faults of counters want the Plan with the most counter edges."""
    need = bodies_of_edit(fault)
    fit = [n for n, p in plans.items() if not need or {s.body for s in p.stages} & set(need)]
    if "counter" in fault.name or "wait" in fault.name or "signal" in fault.name:
        fit.sort(key=lambda n: -sum(e.mechanism == "counter" for e in plans[n].edges) / len(plans[n].edges))
    if "tag" in fault.name.split():  # not "stage"
        fit.sort(key=lambda n: -sum(e.mechanism == "tagged" for e in plans[n].edges))
    if "rmsnorm" in fault.name:
        fit.sort(
            key=lambda n: -sum(bool(s.param("x")) and s.param("x")["prologue"] == "rmsnorm" for s in plans[n].stages)
        )
    return fit[0] if fit else None


def _compile(name: str, plan_json: str, delayed: bool, target: str) -> tuple[str, dict[str, Any] | str]:
    """One cubin, unless it is there already: (name, facts or why not)."""
    from optkit.emit.compile import KernelSpec, compile_kernel

    fault = next((f for f in FAULTS if f.name == name), None)
    text, spec = made(fault, delayed), KernelSpec.of(from_json(plan_json))
    at = Path(target) / f"{key_of(text, spec, 'sm_90a')}.cubin.xz"
    facts = at.with_suffix(".json")
    if not facts.exists():
        with changed(text):
            try:
                kernel = compile_kernel(spec, line_info=False)
            except RuntimeError as e:
                return name, str(e).splitlines()[0]
        at.write_bytes(lzma.compress(kernel.cubin, preset=9))
        facts.write_text(
            json.dumps(
                {
                    "cubin": at.name,
                    "sha256": kernel.sha256,
                    "kernel": kernel.name,
                    "grid": kernel.spec.grid,
                    "threads": kernel.threads,
                    "smem": kernel.smem,
                }
            )
        )
    return name, json.loads(facts.read_text())


def bundle(runs: list[Path], out: Path, jobs: int) -> dict[str, Any]:
    """Write the bundle; returns its index. Raises OSError for a run directory that lacks model.json or artifact/."""
    plans: dict[str, Plan] = {}
    texts: dict[str, str] = {}
    cubins = out / "cubins"
    cubins.mkdir(parents=True, exist_ok=True)
    for run in runs:
        name = "-".join(run.resolve().parts[-3:-1])
        to = out / name / "artifact"
        to.mkdir(parents=True, exist_ok=True)
        shutil.copy(run / "model.json", out / name / "model.json")
        texts[name] = (run / "artifact" / "plan.json").read_text()
        for part in ("plan.json", "manifest.json", "kernel.cubin"):
            shutil.copy(run / "artifact" / part, to / part)
        plans[name] = from_json(texts[name])
    tasks: list[tuple[str, str, bool, str, list[str]]] = []
    for f in (f for f in FAULTS if f.hardware):
        at = choose(f, plans)
        if at is None:
            print(f"{f.name}: no run has a body that shows it", file=sys.stderr)
            continue
        tasks.append((f.name, at, needs_delay(f), f.kind, list(f.gates)))
    tasks += [(f"{DELAYED}, {n}", n, True, "", []) for n in plans]
    entries = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = [(t, pool.submit(_compile, t[0], texts[t[1]], t[2], str(cubins))) for t in tasks]
        for (name, at, delayed, kind, gates), job in waiting:
            _, facts = job.result()
            if isinstance(facts, str):
                print(f"{name}: does not compile: {facts}", file=sys.stderr)
                continue
            entries.append({**facts, "name": name, "run": at, "delayed": delayed, "kind": kind, "gates": gates})
            print(f"{name}: {at}, {(cubins / facts['cubin']).stat().st_size // 1024} KiB", flush=True)
    index = {"schema": SCHEMA, "library": digest(library()), "faults": entries}
    text = json.dumps(index, indent=1, sort_keys=True) + "\n"
    (out / "faults.json").write_text(text)
    print(
        f"{out}: {len(entries)} cubins, {sum(f.stat().st_size for f in out.rglob('*') if f.is_file()) / 1e6:.1f} MB, "
        f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"
    )
    return index


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m optkit.verify.planted.device", description=__doc__.splitlines()[0])
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="run directories with model.json and artifact/"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the bundle")
    parser.add_argument("--jobs", type=int, default=min(os.cpu_count() or 1, 2), metavar="N")
    args = parser.parse_args(argv)
    index = bundle(args.runs, args.out, args.jobs)
    return 0 if len(index["faults"]) > sum(f.hardware for f in FAULTS) else 1


if __name__ == "__main__":
    raise SystemExit(main())
