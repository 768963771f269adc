"""Where a step's time goes: `python -m optkit.bench.stages RUN_DIR --batch 1 --out FILE`.

Times launches of the first i stages of the same cubin as CUDA graphs; stage i is the difference of two neighbours, so it
holds what the stage adds to the critical path. Weights are read again every time, so what fits L2 looks better than in a
step with other experts: use it to find what is slow, not to publish.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from optkit.bench.hardware import Bench, recipe_of, save
from optkit.export.launch import GpuRunner
from optkit.plan.cost import Load, step_cost


def replay_us(runner: GpuRunner, first: int, last: int, replays: int = 30) -> float:
    """Median microseconds of stages [first, last) as one replayed graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        runner.launch(first, last)
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[replays // 2]


def stage_times(bench: Bench, batch: int) -> dict[str, Any]:
    """Whole step, empty launch and every stage, in microseconds, beside the stage's bytes."""
    s = bench.scenario(batch, 1)
    runner = bench.runner(s)
    runner.step(s.inputs(0))
    n = len(bench.plan.stages)
    ends = [replay_us(runner, 0, i) for i in range(n + 1)]
    runner.raise_if_aborted()
    cost = step_cost(bench.plan, Load(batch=batch, context=max(s.starts) + 1))
    rows = [
        {"stage": st.name, "body": st.body, "us": round(ends[i + 1] - ends[i], 2), "mb": round(c.bytes / 1e6, 3)}
        for i, (st, c) in enumerate(zip(bench.plan.stages, cost.stages, strict=True))
    ]
    return {
        "batch": batch,
        "step_us": round(ends[n], 1),
        "empty_us": round(ends[0], 1),
        "mb": round(cost.bytes / 1e6, 1),
        "roofline_us": round(cost.roofline_us, 1),
        "stages": rows,
    }


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m optkit.bench.stages", description="time stage by stage on a GPU")
    parser.add_argument("run", type=Path, help="run directory (model.json and artifact/)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args(argv)
    got = {
        "recipe": recipe_of(args.run),
        "gpu": torch.cuda.get_device_name(0),
        **stage_times(Bench(args.run), args.batch),
    }
    save(args.out, got)
    print(
        f"{got['recipe']} batch {args.batch}: step {got['step_us']} us, empty launch {got['empty_us']} us, "
        f"{got['mb']} MB = {got['roofline_us']} us at the read ceiling"
    )
    by_body: dict[str, float] = {}
    for r in got["stages"]:
        by_body[r["body"]] = by_body.get(r["body"], 0.0) + r["us"]
    for body, us in sorted(by_body.items(), key=lambda x: -x[1]):
        print(f"  {body:16} {us:8.1f} us")
    for r in sorted(got["stages"], key=lambda r: -r["us"])[:14]:
        print(f"  {r['us']:8.2f} us {r['mb']:9.3f} MB  {r['stage']} ({r['body']})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
