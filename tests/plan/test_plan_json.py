"""Plan JSON: same choices, same bytes; exact round trip; size does not grow with depth; the full model in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from plan_cases import GB300, choices, graph, llama, tiny, tiny_with
from test_plan_switches import small_graph

from optkit.plan.build import build_plan
from optkit.plan.compress import compress, from_json, groups_of
from optkit.plan.errors import PlanError
from optkit.plan.types import Plan, Record

GOLDEN = "211475c5f93ea5e780c684b6cbbad09a3b939c9d5a6eb4583ec979d34c50bb69"
"""Digest of the small plan. It changes only when the planner is meant to decide otherwise: then look at the diff of
`to_json` and put the new digest here."""

LIMIT_S = 10.0


def small() -> Plan:
    return build_plan(small_graph(), choices())


@pytest.mark.parametrize("make", [tiny, llama])
@pytest.mark.parametrize("mechanism", ["counter", "tagged"])
@pytest.mark.parametrize("tp", [1, 2])
def test_round_trip(make, mechanism, tp):
    plan = make(tp, mechanism)
    text = plan.to_json()
    back = from_json(text)
    assert back == plan
    assert back.to_json() == text and back.digest == plan.digest
    assert hash(back) == hash(plan)


def test_round_trip_keeps_what_json_would_lose():
    """Tuples, records and defaults come back as they were."""
    back = from_json(tiny().to_json())
    part = back.stages[1].param("parts")[0]
    assert isinstance(part, Record) and isinstance(back.stages[1].param("parts"), tuple) and part["add"] == ()


def test_golden_digest():
    assert small().digest == GOLDEN


def test_same_bytes_in_another_process():
    code = "from test_plan_json import small, tiny; print(small().digest, tiny(2, 'tagged').digest)"
    here = os.path.dirname(__file__)
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join([here, os.getcwd()])}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.split() == [small().digest, tiny(2, "tagged").digest]


def test_every_choice_reaches_the_digest():
    base = tiny().digest
    changed = [
        tiny_with(overlap__ring_slots=3),
        tiny_with(tune__sms=66),
        tiny_with(tune__kv_splits=2),
        tiny_with(cache__block_size=32),
        tiny_with(decode__context=512),
        tiny_with(sync__mechanism="tagged"),
    ]
    assert len({base, *(p.digest for p in changed)}) == 7


def test_instances_follow_the_layers():
    plan = tiny()
    groups = groups_of(plan.stages)
    assert [g[0] for g in groups] == [-1, *range(9), 9]
    assert sum(s.count for s in plan.segments) == len(groups)
    bodies = [s.body for s in plan.segments for _ in range(s.count)]
    assert bodies[2] == bodies[3] == bodies[5] and bodies[4] == bodies[8] and bodies[2] != bodies[4] != bodies[1]


def test_a_damaged_json_is_not_the_same_plan():
    data = compress(tiny())
    data["bodies"][data["segments"][2]["body"]][0]["smem"] = 1
    assert from_json(json.dumps(data)) != tiny()


def _timed(*args, **kw) -> tuple[Plan, str]:
    start = time.process_time()
    plan = build_plan(graph(*args), choices(context=8192, **kw))
    text = plan.to_json()
    assert time.process_time() - start < LIMIT_S
    assert len(text) <= 5_000_000
    return plan, text


def test_full_kimi_k3_on_gb300():
    plan, text = _timed("kimi_k3", 8, parallel={"tp": 8}, mechanism="tagged", hardware=GB300)
    assert max(s.layer for s in plan.stages) == 93 and len(plan.stages) > 1500
    assert from_json(text) == plan
    assert len({s.body for s in plan.segments}) <= 8  # bodies do not grow with depth
    assert {e.kind for e in plan.edges} == {"raw"}  # at size, the stages between prove every reuse


@pytest.mark.parametrize("layers", [(0, 46), (46, 93)])
def test_full_kimi_k3_in_two_pipeline_stages_on_h200(layers):
    plan, text = _timed(
        "kimi_k3", 8, layers, parallel={"tp": 8, "pp": 2, "stage": int(layers[0] > 0)}, mechanism="tagged"
    )
    assert from_json(text) == plan
    assert 95e9 < dict(plan.memory)["total"] < 103e9


def test_full_kimi_k3_does_not_fit_eight_h200():
    with pytest.raises(PlanError) as e:
        build_plan(graph("kimi_k3", 8), choices(8, context=8192))
    (line,) = e.value.problems
    assert "198.1 GB needed per GPU, 141 there on h200" in line and "weights 195.8" in line
