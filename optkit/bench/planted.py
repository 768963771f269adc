"""Planted faults on the GPU: `python -m optkit.bench.planted DIR [--out FILE]`, DIR made by optkit.verify.planted.device.

Needs torch, numpy and cuda.bindings only. Every kernel is judged in a process of its own, since a fault may leave the
device context unusable; a process that dies or never ends is what the gate `hardware.abort` is for. The right kernels, with
and without the delay that ordering faults are given, are judged first: any red gate there voids the run.

Gates: `hardware.numerics` (each stage alone, teacher-forced, and probes), `hardware.exact`, `hardware.rollout` (whole steps
with state carried), `hardware.boundary`, `hardware.bits` (the same bits from poisoned buffers, launch after launch),
`hardware.abort` (a launch gave up, or the process died).
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GATES = (
    "hardware.numerics",
    "hardware.exact",
    "hardware.rollout",
    "hardware.boundary",
    "hardware.bits",
    "hardware.abort",
)
SECONDS = 150
"""Longest time of one kernel's judgement; loading torch and the weights takes a few seconds of it."""
STEPS, POISONED = 4, 24


def judge(run: Path, entry: dict[str, Any], cubins: Path) -> list[str]:
    """Red gates of one kernel, on the current GPU."""
    import torch

    from optkit.bench.hardware import Bench
    from optkit.export.launch import KernelAbort, LaunchFacts, Module
    from optkit.validate import boundaries, per_stage
    from optkit.validate.boundaries import cases
    from optkit.validate.gates import FLOOR, MAX_FACTOR
    from optkit.validate.orders import run_bits, same_bits
    from optkit.validate.rollout import trace
    from optkit.validate.scenario import Scenario

    bench = Bench(run)
    if entry:
        cubin = lzma.decompress((cubins / entry["cubin"]).read_bytes())
        bench.module = Module(cubin, LaunchFacts(entry["kernel"], entry["grid"], entry["threads"], entry["smem"]))
    rows, red = bench.plan.rows, set()

    def attempt(gate: str, work: Callable[[], set[str]]) -> None:
        try:
            red.update(work())
        except KernelAbort as e:
            print(f"  {gate}: {e}", file=sys.stderr)
            red.update({gate, "hardware.abort"})

    def stages() -> set[str]:
        s = bench.scenario(rows, STEPS)
        got = per_stage(bench.runner(s), bench.graph, bench.weights, s, samples=STEPS * rows)[0]
        bad = [c for c in got if c.status == "fail" and not c.reason.startswith("fewer than")]
        for c in bad:
            print(f"  {c.name}: {c.reason[:300]}", file=sys.stderr)
        out = {"hardware.exact" if c.name == "numerics.exact" else "hardware.numerics" for c in bad}
        return out | ({"hardware.abort"} if any("gave up" in c.reason for c in bad) else set())

    def steps() -> set[str]:
        s = bench.scenario(rows, 16)
        got = trace(bench.runner(s), bench.graph, bench.weights, s)
        wrong = got.stopped or max(got.errors) > MAX_FACTOR * max(*got.band, FLOOR) or got.refused()
        if got.stopped:
            print(f"  rollout: {got.stopped[:300]}", file=sys.stderr)
        return ({"hardware.rollout"} if wrong else set()) | ({"hardware.abort"} if "gave up" in got.stopped else set())

    def edges() -> set[str]:
        named = cases(bench.graph, 16, 1 + rows * 10, rows + 2, bench.device)
        got = boundaries(
            bench.runner(max(named.values(), key=lambda s: s.blocks_per_row)), bench.graph, bench.weights, named
        )
        return {"hardware.boundary"} if any(c.status == "fail" for c in got) else set()

    def bits() -> set[str]:
        """Launches from poisoned buffers, every second time with seeded pauses, give the bits of the first run."""
        s: Scenario = bench.scenario(rows, 2)
        runner = bench.runner(s)
        want, launch = run_bits(runner, s), runner.launch

        def poisoned(*args: Any) -> None:
            runner.poison()
            launch(*args)

        runner.launch = poisoned  # type: ignore[assignment, method-assign]
        for i in range(POISONED):
            runner.disturb(delay=(i % 2) * (i + 1) * 2654435761)
            if not same_bits(run_bits(runner, s), want):
                return {"hardware.bits"}
        return set()

    for gate, work in (
        ("hardware.numerics", stages),
        ("hardware.rollout", steps),
        ("hardware.boundary", edges),
        ("hardware.bits", bits),
    ):
        attempt(gate, work)
    torch.cuda.synchronize()
    return sorted(red)


def apart(folder: Path, run: str, key: str) -> list[str]:
    """`judge` in a process of its own. One that dies or hangs is red for the gate of aborts."""
    command = [sys.executable, "-m", "optkit.bench.planted", str(folder), "--one", run, key]
    try:
        got = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ["hardware.abort", "process: no end"]
    print(got.stderr[-1500:], end="", file=sys.stderr)
    last = got.stdout.strip().splitlines()[-1:] or [""]
    if got.returncode or not last[0].startswith("["):
        return ["hardware.abort", f"process: exit {got.returncode}"]
    return json.loads(last[0])


def record(index: dict[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    """What `--out` holds: the library's digest, the GPU, and one row per kernel judged."""
    import torch

    name = torch.cuda.get_device_name(0)
    return {"schema": "optkit-planted-gpu/1", "library": index["library"], "gpu": name, "faults": results}


def main(argv: list[str] | None = None) -> int:
    """Entry point; 1 if a right kernel is red or a fault is caught by none of its gates."""
    parser = argparse.ArgumentParser(prog="python -m optkit.bench.planted", description=__doc__.splitlines()[0])
    parser.add_argument("dir", type=Path, metavar="DIR")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the results here, as JSON; rows already there stand"
    )
    parser.add_argument("--one", nargs=2, metavar=("RUN", "FAULT"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    index = json.loads((args.dir / "faults.json").read_text())
    entries = {e["name"]: e for e in index["faults"]}
    if args.one:
        print(json.dumps(judge(args.dir / args.one[0], entries.get(args.one[1], {}), args.dir / "cubins")))
        return 0
    runs = sorted({e["run"] for e in index["faults"]})
    jobs = [(r, {"name": "right kernel", "run": r, "gates": []}) for r in runs]
    jobs += [(e["run"], e) for e in sorted(index["faults"], key=lambda e: bool(e["gates"]))]
    results = json.loads(args.out.read_text())["faults"] if args.out and args.out.is_file() else []
    known = {(r["run"], r["name"], r["sha256"]) for r in results}
    for run, e in jobs:
        if (run, e["name"], e.get("sha256", "")) in known:
            continue
        begun = time.time()
        red = apart(args.dir, run, e["name"])
        ok = bool(set(red) & set(e["gates"])) if e["gates"] else not red
        row = {"name": e["name"], "run": run, "expected": e["gates"], "red": red, "caught": ok}
        results.append({**row, "sha256": e.get("sha256", ""), "seconds": round(time.time() - begun, 1)})
        print(
            f"{'ok' if ok else 'FAILED':7} {e['name']:60} {run:18} {', '.join(red) or 'green'} ({results[-1]['seconds']} s)",
            flush=True,
        )
        if args.out:  # after each, so that a run that is cut off goes on where it stopped
            args.out.write_text(json.dumps(record(index, results), indent=1) + "\n")
    planted = [r for r in results if r["expected"]]
    print(f"{sum(r['caught'] for r in planted)} of {len(planted)} faults caught on the GPU")
    failed = sum(not r["caught"] for r in results)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
