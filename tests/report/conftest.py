"""A hand-made plan and evidence, small enough to read: three layers of two kinds with every edge mechanism but one."""

from __future__ import annotations

from pathlib import Path

import pytest

from optkit.evidence import Check, Provenance, StageNumerics, provenance
from optkit.plan.cost import Load, StageCost, StepCost
from optkit.plan.types import Edge, Plan, Segment, Stage, Stream

SMS = 132
LAYER = (  # short name, body, fused operations, tasks, units, tiles of 18 kB per unit
    ("x_a", "mixnorm", ("h_a", "x_a"), 8, 8, 0),
    ("qkv", "gemv", ("q_raw", "k_raw", "v_raw", "g", "fa", "b"), 132, 264, 2),
    ("o", "kda", ("q", "o", "og"), 64, 64, 0),
    ("ya", "gemv", ("ya", "P.a"), 56, 56, 2),
    ("route", "route", ("ids", "wts"), 1, 1, 0),
    ("shared", "gemv", ("sgate", "sup", "sact"), 48, 48, 2),
    ("experts", "expert_gate_up", ("ea",), 132, 512, 1),
    ("down", "expert_down", ("y", "P.m"), 56, 56, 4),
)
DENSE = LAYER[:4] + (("gate_up", "gemv", ("gate", "up", "act"), 96, 96, 2), ("ym", "gemv", ("ym",), 56, 56, 3))
MECHANISM = {"mixnorm": "tagged", "kda": "counter", "route": "grid_barrier", "expert_down": "peer_mailbox"}


@pytest.fixture(scope="session")
def plan() -> Plan:
    stages: list[Stage] = []
    edges: list[Edge] = []
    for layer, template in enumerate((DENSE, LAYER, LAYER)):
        for short, body, ops, tasks, units, tiles in template:
            i = len(stages)
            index = f"L{layer}.ids" if body.startswith("expert") else ""
            streams = (Stream(f"w.{layer}.{short}", 16, 512, tiles, 18432, index=index,
                              repeat=3 if body == "expert_down" else 1),) if tiles else ()
            stages.append(Stage(f"L{layer}.{short}", body, tuple(f"L{layer}.{o}" for o in ops), layer, units, 1, tasks,
                                (i * 37) % SMS, "block", (), (), streams,
                                (("stream", "after_wait" if index else "ahead"),) if tiles else (), 9000, 128))
            if i:
                edges.append(Edge(i - 1, i, f"L{layer}.buf{i}", "raw", MECHANISM.get(body, "counter")))
            if i > 2:
                edges.append(Edge(i - 3, i, f"L{layer}.far{i}", "war", "same_sm" if i % 2 else "tagged"))
    return Plan("hand/made", "0" * 64, (("name", "h200"),), SMS, 8, (("tp", 1),), tuple(stages),
                (Segment("dense", 0, 1), Segment("kda_moe", 1, 2)), (), tuple(edges), (), 11, 18432, 288,
                (("fusion", {"norm_projection": True}), ("overlap", {"weight_stream": False}),
                 ("sync", {"mechanism": "counter", "overrides": ()})),
                (("weights", 7_340_032), ("kv", 1_048_576), ("total", 8_388_608)))


@pytest.fixture(scope="session")
def timeline(plan: Plan) -> list[tuple[int, str, float, float, str]]:
    """Every task waits 0.4 us, then works; its weight stream runs one stage ahead."""
    rows: list[tuple[int, str, float, float, str]] = []
    for i, s in enumerate(plan.stages):
        start = 2.0 * i
        for t in range(s.tasks):
            sm = s.sm_of(t, plan.sms)
            rows += [(sm, s.name, start, start + 0.4, "wait"), (sm, s.name, start + 0.4, start + 1.9, "compute")]
            if s.streams:
                rows.append((sm, s.name, max(0.0, start - 1.5), start + 0.5, "stream"))
    return rows


@pytest.fixture(scope="session")
def cost(plan: Plan) -> StepCost:
    stages = tuple(StageCost(weights=1e6 * (i + 1), kv=5e4 * (i % 2), flops=8e6) if s.streams else StageCost()
                   for i, s in enumerate(plan.stages))
    return StepCost(Load(4, 8192), stages, tuple(s.layer for s in plan.stages), 4530.0, 780.0)


@pytest.fixture()
def checks() -> list[Check]:
    return [Check("verify/ordering", "pass", 0, 0), Check("verify/liveness", "pass", 11, 4),
            Check("audit/sm_90a", "pass", 0, 0, "", "optkit check hand/made --audit"),
            Check("numerics/median", "pass", 1.07, 1.25), Check("numerics/maximum", "pass", 1.41, 2.0),
            Check("gpu/rollout", "not_run", None, 64, "needs an H200 GPU", "optkit run hand/made bench=gpu")]


@pytest.fixture()
def numerics(plan: Plan) -> list[StageNumerics]:
    band = 2.0 ** -9
    return [StageNumerics(stage=s.name, n=256, median=band * (0.5 + i % 5 / 8), max=band * (1.0 + i % 7 / 8),
                          band_median=band * (1 + i % 3 / 4), band_max=band * (1 + i % 3 / 4), status="pass")
            for i, s in enumerate(plan.stages)]


@pytest.fixture()
def run_dir(tmp_path: Path) -> Path:
    """A run directory with a plan and an artifact, but no evidence yet."""
    (tmp_path / "artifact").mkdir()
    (tmp_path / "plan.json").write_text('{"plan":1}')
    (tmp_path / "artifact" / "step.cubin").write_bytes(b"\x7fELF one")
    (tmp_path / "artifact" / "manifest.json").write_text('{"verdict": {"status": "verified except hardware", "not_run": 1}}')
    return tmp_path


@pytest.fixture()
def prov(run_dir: Path) -> Provenance:
    from optkit.evidence import sha256
    return provenance(recipe="hand/made", recipe_digest="a" * 64, plan_digest=sha256(run_dir / "plan.json"),
                      root=run_dir, files=[p for p in run_dir.rglob("*") if p.is_file()])
