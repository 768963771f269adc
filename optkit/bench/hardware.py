"""Run a compiled kernel on a GPU against float64: `python -m optkit.bench.hardware RUN_DIR ... --out FILE`.

Needs torch, numpy and cuda.bindings only (no CuTe DSL, no Hydra). A RUN_DIR holds `model.json` (what to build) and
`artifact/` (plan.json, kernel.cubin, manifest.json). The same gates as on the CPU, with the kernel as the runner: every
stage alone, teacher-forced, through slice launches of the same cubin; rollouts with state carried in paged caches; the same
bits again. Results are JSON, one record a check.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from optkit.bench.names import CHECKPOINT, name
from optkit.checks import Check, check
from optkit.emit.lower import signalling
from optkit.export.launch import GpuRunner, KernelAbort, LaunchFacts, Module
from optkit.models.checkpoint import load
from optkit.models.families import family_of
from optkit.models.graph import Graph
from optkit.models.random_weights import random_weights
from optkit.plan.compress import from_json
from optkit.plan.types import Plan
from optkit.validate.gates import MIN_SAMPLES
from optkit.validate.groups import groups
from optkit.validate.numerics import Numerics
from optkit.validate.orders import run_bits, same_bits
from optkit.validate.per_stage import per_stage
from optkit.validate.rollout import rollout
from optkit.validate.scenario import Scenario

DISTURBANCES = 24
SHUFFLES = (0, 1, 5, 7, 13, 17, 131)
"""Multipliers coprime to 132 SMs; 0 leaves the order alone."""
REGISTERS = 224
"""288 threads x 224 = 64512 of 65536 registers."""


def build_graph(model: dict[str, Any]) -> Graph:
    """The graph that `model.json` describes: an HF config and the arguments of the family's `build`."""
    family = family_of(model["config"])
    args = dict(model["build"])
    if args.get("layers"):
        args["layers"] = tuple(args["layers"])
    return family.build(replace(family.Config.from_hf(model["config"]), **model.get("keys", {})), **args)


class Bench:
    """One run directory on the current GPU."""

    def __init__(self, run: Path):
        self.run = run
        artifact = run / "artifact"
        self.model = json.loads((run / "model.json").read_text())
        self.plan: Plan = from_json((artifact / "plan.json").read_text())
        self.graph = build_graph(self.model)
        manifest = json.loads((artifact / "manifest.json").read_text())
        kernel = manifest["kernel"]
        cubin = (artifact / "kernel.cubin").read_bytes()
        self.sha256 = hashlib.sha256(cubin).hexdigest()
        self.module = Module(
            cubin, LaunchFacts(kernel["name"], kernel["grid"][0], kernel["block"][0], kernel["dynamic_smem"])
        )
        self.device = torch.device("cuda")
        self.weights = self._weights()

    def _weights(self) -> dict[str, Any]:
        """The run's own checkpoint, or random weights of the same seed drawn on the device."""
        if not (self.run / CHECKPOINT).is_dir():
            return random_weights(self.graph, self.model["seed"], self.device)

        def there(t: Any) -> Any:
            return tuple(x.to(self.device) for x in t) if isinstance(t, tuple) else t.to(self.device)

        return {k: there(t) for k, t in load(self.run / CHECKPOINT, self.graph).items()}

    def runner(self, scenario: Scenario) -> GpuRunner:
        """A runner bound to fresh caches of the scenario."""
        return self.bind(scenario, scenario.caches("bf16"))

    def bind(self, scenario: Scenario, caches: dict[str, Any], own: tuple[str, ...] = ()) -> GpuRunner:
        """A runner bound to these caches; `own` as GpuRunner takes it."""
        return GpuRunner(
            self.plan,
            self.graph,
            self.weights,
            caches,
            self.module,
            own=own,
            max_blocks=scenario.blocks_per_row,
            block_size=scenario.block_size,
            positions=max(scenario.starts) + scenario.steps + 1,
        )

    def step_us(self, batch: int, replays: int = 50) -> float:
        """Median time of one step replayed as a CUDA graph, in microseconds. The same inputs every time, so small
        models are served by L2 and routed experts repeat: a figure of overhead, not of bandwidth."""
        s = self.scenario(batch, 1)
        runner = self.runner(s)
        runner.step(s.inputs(0))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            runner.launch()
        times = []
        for _ in range(replays):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1e3)
        runner.raise_if_aborted()
        return sorted(times)[replays // 2]

    def digest(self, s: Scenario) -> str:
        """sha256 of the outputs and caches of a scenario, from a runner of its own."""
        h = hashlib.sha256()
        for t in run_bits(self.runner(s), s):
            h.update(t.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return h.hexdigest()

    def scenario(self, batch: int, steps: int, **kw: Any) -> Scenario:
        """A scenario on this GPU."""
        return Scenario(self.graph, batch, steps, device=self.device, **kw)


def measure(
    run: Path, batches: list[int], steps: int, stage_batch: list[int], stage_steps: int, launches: int, command: str
) -> tuple[dict[str, Any], dict[int, float]]:
    """All checks of one run directory: a hardware record ("optkit-hardware/1") that `optkit evidence merge` takes, and
    microseconds of a step by batch."""
    begun = time.time()
    bench = Bench(run)
    checks: list[Check] = []
    numerics: list[dict[str, Any]] = []

    def attempt(
        names: tuple[str, ...], batch: int | None, fn: Callable[[], tuple[list[Check], list[Numerics]]]
    ) -> None:
        at = time.time()
        try:
            got, rows = fn()
        except Exception as e:  # every kind of failure is a result here: the rest of the table must still be made
            got, rows = [check(n, False, None, None, f"{type(e).__name__}: {e}") for n in names], []
        for c in got:
            checks.append(replace(c, name=name(c.name, batch), repeat=command))
            print(
                f"  {c.status:4} {checks[-1].name:36} {c.value!s:>10} / {c.threshold!s:<8} {c.reason[:200]} "
                f"({time.time() - at:.1f} s)",
                flush=True,
            )
        numerics.extend({**asdict(r), "stage": f"{r.stage}@batch{batch}"} for r in rows)

    def stages(batch: int) -> tuple[list[Check], list[Numerics]]:
        s = bench.scenario(batch, stage_steps)
        return per_stage(bench.runner(s), bench.graph, bench.weights, s, command)

    def roll(batch: int) -> tuple[list[Check], list[Numerics]]:
        s = bench.scenario(batch, max(steps, -(-MIN_SAMPLES // batch)))
        return rollout(bench.runner(s), bench.graph, bench.weights, s, command)

    def transitions() -> tuple[list[Check], list[Numerics]]:
        """8 -> 1 -> 4 -> 8 rows on one runner: one epoch, one set of counters and tags for all batches."""
        scenarios = {b: bench.scenario(b, 2) for b in (8, 1, 4)}
        runners = {b: bench.runner(s) for b, s in scenarios.items()}
        want = {b: run_bits(runners[b], s) for b, s in scenarios.items()}
        shared, bad = runners[8], []
        for b in (8, 1, 4, 8):
            runners[b].adopt(shared)
            bad += [] if same_bits(run_bits(runners[b], scenarios[b]), want[b]) else [b]
        return [
            check("transitions.bits", not bad, len(bad), 0, f"batches 8, 1, 4, 8 after one another; different: {bad}")
        ], []

    def epochs() -> tuple[list[Check], list[Numerics]]:
        """Launches on both sides of the one where every 32-bit counter wraps: the same bits."""
        s = bench.scenario(4, 4)
        runner = bench.runner(s)
        want = run_bits(runner, s)
        runner.start_at(2**32 - 2)
        same = same_bits(run_bits(runner, s), want)
        passed = runner.epoch - 2**32
        return [
            check(
                "epochs.bits",
                same and passed > 0,
                passed,
                None,
                f"{s.steps} launches from number 2^32 - 1 on; "
                f"{'the same bits' if same else 'different bits'}, launches past 2^32 as value",
            )
        ], []

    def disturbed() -> tuple[list[Check], list[Numerics]]:
        """Seeded pauses before waits, signals and copies, SMs in another order, workspace poisoned: the same bits."""
        s = bench.scenario(8, 2)
        runner = bench.runner(s)
        want, bad = run_bits(runner, s), []
        for seed in range(1, DISTURBANCES + 1):
            runner.disturb(delay=seed * 2654435761, shuffle=(SHUFFLES[seed % len(SHUFFLES)], seed))
            runner.poison()
            bad += [] if same_bits(run_bits(runner, s), want) else [seed]
        return [
            check(
                "disturbed.bits",
                not bad,
                len(bad),
                0,
                f"{DISTURBANCES} seeds of pauses and SM orders on poisoned buffers; different: {bad}",
            )
        ], []

    def cache_groups() -> tuple[list[Check], list[Numerics]]:
        s = bench.scenario(4, 4)
        return [groups(lambda caches, own: bench.bind(s, caches, own), bench.graph, s)], []

    def lifetimes() -> tuple[list[Check], list[Numerics]]:
        """Create, destroy, create; then two processes at once on this GPU."""
        s = bench.scenario(4, 3)
        want = bench.digest(s)
        again = bench.digest(s)
        command = [sys.executable, "-m", "optkit.bench.hardware", str(run), "--digest", "--out", "."]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        said = [p.communicate(timeout=120)[0].strip().splitlines()[-1:] for p in both]
        return [
            check(
                "lifetimes.bits",
                again == want and said == [[want], [want]],
                sum(x == [want] for x in said) + (again == want),
                3,
                "a second runner after the first is gone, and two processes at once, give the same bits",
            )
        ], []

    def abort() -> tuple[list[Check], list[Numerics]]:
        """A planted missing signal must end the launch and be named; after a reset the same bits as before."""
        s = bench.scenario(2, 1)
        runner = bench.runner(s)
        want = run_bits(runner, s)
        victim = max(signalling(bench.plan))
        seen = ""
        with runner.without_signal(victim):
            try:
                runner.step(s.inputs(0))
            except KernelAbort as e:
                seen = str(e)
        runner.reset()
        again = same_bits(run_bits(runner, s), want)
        named = bench.plan.stages[victim].name in seen
        return [
            check(
                "abort.named",
                named and again,
                int(named) + int(again),
                2,
                f"signal of {bench.plan.stages[victim].name} left out: {seen or 'nothing was raised'}; after reset "
                f"{'the same bits' if again else 'different bits'}",
            )
        ], []

    def bits(batch: int) -> tuple[list[Check], list[Numerics]]:
        s = bench.scenario(batch, 4)
        runner = bench.runner(s)
        want = run_bits(runner, s)
        n = -(-launches // s.steps)
        bad = sum(not same_bits(run_bits(runner, s), want) for _ in range(n))
        return [
            check("repeat.bits", bad == 0, bad, 0, f"{n} repetitions of {s.steps} launches, outputs and caches")
        ], []

    m = bench.module
    print(f"{run}: plan {bench.plan.name}, {len(bench.plan.stages)} stages, {m.registers} registers", flush=True)
    attempt(
        ("registers",),
        None,
        lambda: (
            [
                check(
                    "registers",
                    m.local_bytes == 0 and m.registers <= REGISTERS,
                    m.registers,
                    REGISTERS,
                    f"{m.local_bytes} bytes of local memory a thread",
                )
            ],
            [],
        ),
    )
    for b in stage_batch:
        attempt(("numerics.per_stage", "numerics.exact"), b, lambda b=b: stages(b))  # type: ignore[misc]
    for b in batches:
        attempt(("rollout.logits", "rollout.choices"), b, lambda b=b: roll(b))  # type: ignore[misc]
    attempt(("repeat.bits",), batches[-1], lambda: bits(batches[-1]))
    attempt(("transitions.bits",), None, transitions)
    attempt(("epochs.bits",), None, epochs)
    attempt(("disturbed.bits",), None, disturbed)
    attempt(("groups.bits",), None, cache_groups)
    attempt(("lifetimes.bits",), None, lifetimes)
    attempt(("abort.named",), None, abort)
    times = {b: bench.step_us(b) for b in batches}
    print("  step, us: " + ", ".join(f"batch {b} {t:.1f}" for b, t in times.items()), flush=True)
    return {
        "schema": "optkit-hardware/1",
        "cubin_sha256": bench.sha256,
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver_version(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)),
        "command": command,
        "versions": {
            "torch": torch.__version__,
            "plan": bench.plan.digest,
            "peers": dict(bench.plan.parallel)["peers"] if dict(bench.plan.parallel)["tp"] > 1 else "none",
        },
        "checks": [c.as_dict() for c in checks],
        "numerics": numerics,
    }, times


def recipe_of(run: Path) -> str:
    """The recipe that the artifact is named after: "kimi_k3/tiny", or "mine" for ./mine.yaml."""
    return str(json.loads((run / "artifact" / "manifest.json").read_text(encoding="utf-8"))["name"])


def benchmark(recipe: str, record: dict[str, Any], times: dict[int, float], steps: int) -> dict[str, Any]:
    """The committed figures of a recipe ("optkit-benchmark/1"): one row a batch size."""
    rows = []
    for b, us in times.items():
        mine = [c for c in record["checks"] if c["name"].endswith(f"@batch{b}")]
        logits = next(c for c in mine if "rollout.logits" in c["name"])
        rows.append(
            {
                "batch": b,
                "status": "fail" if any(c["status"] == "fail" for c in mine) else "pass",
                "steps": max(steps, -(-MIN_SAMPLES // b)),
                "worst_of_limit": logits["value"],
                "step_us": round(us, 1),
            }
        )
    return {
        "schema": "optkit-benchmark/1",
        "recipe": recipe,
        "rows": rows,
        **{k: record[k] for k in ("gpu", "driver", "time", "command", "cubin_sha256", "versions")},
    }


def save(path: Path, data: dict[str, Any]) -> None:
    """Write JSON in one step."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(json.dumps(data, indent=1) + "\n")
    tmp.replace(path)


def driver_version() -> str:
    """Version of the display driver."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        return found.stdout.strip().splitlines()[0] if found.returncode == 0 and found.stdout.strip() else "unknown"


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m optkit.bench.hardware", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories (model.json and artifact/)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results, two JSON files a run")
    parser.add_argument("--batches", default="1,2,4,8", help="batch sizes of the rollouts")
    parser.add_argument("--steps", type=int, default=64, help="steps of a rollout")
    parser.add_argument("--stage-batches", default="8", help="batch sizes of the teacher-forced checks")
    parser.add_argument(
        "--stage-steps", type=int, default=32, help="steps of the teacher-forced checks (rows x steps >= 256)"
    )
    parser.add_argument("--launches", type=int, default=1000, help="repeated launches that must give the same bits")
    parser.add_argument(
        "--digest", action="store_true", help="only print the digest of a few steps (used by the checks)"
    )
    args = parser.parse_args(argv)
    if args.digest:
        bench = Bench(args.runs[0])
        print(bench.digest(bench.scenario(4, 3)))
        return 0
    numbers = [[int(x) for x in s.split(",") if x] for s in (args.batches, args.stage_batches)]
    args.out.mkdir(parents=True, exist_ok=True)
    failed = total = 0
    for run in args.runs:
        command = (
            f"python -m optkit.bench.hardware {run} --batches {args.batches} --steps {args.steps} --stage-batches "
            f"{args.stage_batches} --stage-steps {args.stage_steps} --launches {args.launches} --out {args.out}"
        )
        record, times = measure(run, numbers[0], args.steps, numbers[1], args.stage_steps, args.launches, command)
        stem = recipe_of(run).replace("/", "-")
        save(args.out / f"{stem}.hardware.json", record)
        save(args.out / f"{stem}.json", benchmark(recipe_of(run), record, times, args.steps))
        bad = sum(c["status"] == "fail" for c in record["checks"])
        failed, total = failed + bad, total + len(record["checks"])
        print(f"{run}: {len(record['checks']) - bad} of {len(record['checks'])} checks passed")
        print(f"  {args.out}/{stem}.json: the figures, as benchmarks/ takes them")
        print(f"  next: optkit evidence merge {run} {args.out}/{stem}.hardware.json")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
