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
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from optkit.export.launch import GpuRunner, LaunchFacts, Module
from optkit.models.families import family_of
from optkit.models.graph import Graph
from optkit.models.random_weights import random_weights
from optkit.plan.compress import from_json
from optkit.plan.types import Plan
from optkit.validate.check import Check, check
from optkit.validate.orders import run_bits, same_bits
from optkit.validate.per_stage import per_stage
from optkit.validate.rollout import rollout
from optkit.validate.scenario import Scenario


def build_graph(model: dict[str, Any]) -> Graph:
    """The graph that `model.json` describes: an HF config and the arguments of the family's `build`."""
    family = family_of(model["config"])
    args = dict(model["build"])
    if args.get("layers"):
        args["layers"] = tuple(args["layers"])
    return family.build(family.Config.from_hf(model["config"], **model.get("keys", {})), **args)


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
        self.module = Module(cubin, LaunchFacts(kernel["name"], kernel["grid"][0], kernel["block"][0], kernel["dynamic_smem"]))
        self.device = torch.device("cuda")
        self.weights = random_weights(self.graph, self.model["seed"], self.device)

    def runner(self, scenario: Scenario) -> GpuRunner:
        """A runner bound to fresh caches of the scenario."""
        return GpuRunner(self.plan, self.graph, self.weights, scenario.caches("bf16"), self.module,
                         max_blocks=scenario.blocks_per_row, block_size=scenario.block_size,
                         positions=max(scenario.starts) + scenario.steps + 1)

    def scenario(self, batch: int, steps: int, **kw: Any) -> Scenario:
        """A scenario on this GPU."""
        return Scenario(self.graph, batch, steps, device=self.device, **kw)


def renamed(checks: list[Check], suffix: str) -> list[Check]:
    """Checks with a suffix that says how they were run."""
    return [Check(f"hardware.{c.name}{suffix}", c.status, c.value, c.threshold, c.reason, c.repeat) for c in checks]


def measure(run: Path, batches: list[int], steps: int, stage_batch: list[int], stage_steps: int, launches: int,
            starts: tuple[int, ...] = ()) -> dict[str, Any]:
    """All checks of one run directory as a JSON-able record."""
    begun = time.time()
    bench = Bench(run)
    command = f"python -m optkit.bench.hardware {run.name}"
    checks: list[Check] = [
        check("hardware.registers", bench.module.local_bytes == 0, bench.module.registers, 224,
              f"{bench.module.local_bytes} bytes of local memory", command)]
    numerics: list[dict[str, Any]] = []

    def attempt(name: str, fn: Any) -> None:
        at = time.time()
        try:
            got, rows = fn()
        except Exception as e:  # every kind of failure is a result here: the rest of the table must still be made
            got, rows = [check(name, False, None, None, f"{type(e).__name__}: {e}", command)], []
        checks.extend(renamed(got, f" {name}"))
        numerics.extend({**asdict(r), "run": name} for r in rows)
        for c in got:
            print(f"  {c.status:4} {c.name:22} {name:12} {c.value!s:>10} / {c.threshold!s:<6} {c.reason[:300]} ({time.time() - at:.1f} s)",
                  flush=True)

    def stages(batch: int) -> Any:
        s = bench.scenario(batch, stage_steps, starts=starts[:batch])
        return per_stage(bench.runner(s), bench.graph, bench.weights, s, command)

    def roll(batch: int) -> Any:
        s = bench.scenario(batch, steps, starts=starts[:batch])
        return rollout(bench.runner(s), bench.graph, bench.weights, s, command)

    def bits(batch: int) -> Any:
        s = bench.scenario(batch, 4, starts=starts[:batch])
        runner = bench.runner(s)
        want = run_bits(runner, s)
        bad = sum(not same_bits(run_bits(runner, s), want) for _ in range(max(launches // 4, 1)))
        return [check("repeat.bits", bad == 0, bad, 0, f"{max(launches // 4, 1)} repetitions of 4 steps", command)], []

    print(f"{run.name}: plan {bench.plan.name}, {len(bench.plan.stages)} stages, {bench.module.registers} registers", flush=True)
    for b in stage_batch:
        attempt(f"batch {b}", lambda b=b: stages(b))
    for b in batches:
        attempt(f"batch {b}", lambda b=b: roll(b))
    attempt(f"batch {batches[-1]}", lambda: bits(batches[-1]))
    p = torch.cuda.get_device_properties(0)
    return {"run": run.name, "plan": bench.plan.name, "plan_digest": bench.plan.digest, "cubin_sha256": bench.sha256,
            "checks": [c.as_dict() for c in checks], "numerics": numerics,
            "provenance": {"gpu": p.name, "sms": p.multi_processor_count, "torch": torch.__version__,
                           "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(begun)), "seconds": round(time.time() - begun, 1),
                           "peers": dict(bench.plan.parallel)["peers"] if dict(bench.plan.parallel)["tp"] > 1 else "none"}}


def main(argv: list[str] | None = None) -> int:
    """Entry point; exit 1 if a check failed."""
    parser = argparse.ArgumentParser(prog="python -m optkit.bench.hardware", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories (model.json and artifact/)")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON results go")
    parser.add_argument("--batches", default="1,2,4,8", help="batch sizes of the rollouts")
    parser.add_argument("--steps", type=int, default=64, help="steps of a rollout")
    parser.add_argument("--stage-batches", default="8", help="batch sizes of the teacher-forced checks")
    parser.add_argument("--stage-steps", type=int, default=32, help="steps of the teacher-forced checks (rows x steps >= 256)")
    parser.add_argument("--launches", type=int, default=100, help="repeated launches that must give the same bits")
    args = parser.parse_args(argv)
    numbers = [[int(x) for x in s.split(",") if x] for s in (args.batches, args.stage_batches)]
    results = [measure(run, numbers[0], args.steps, numbers[1], args.stage_steps, args.launches) for run in args.runs]
    tmp = args.out.with_suffix(".tmp")
    tmp.write_text(json.dumps(results, indent=1))
    tmp.replace(args.out)
    failed = sum(c["status"] == "fail" for r in results for c in r["checks"])
    total = sum(len(r["checks"]) for r in results)
    print(f"{total - failed} of {total} checks passed; {args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
