"""vLLM's own classes on a GPU with an artifact named: refused, or run unchanged with every reason logged once.

vLLM is a stand-in (its configuration's fields, a platform that says CUDA, a class of its own); configuration, graph,
artifact and rules are the real ones.
"""

import importlib
import json
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from optkit.export.backend import GPU_BACKEND_MISSING
from optkit.export.manifest import PLAN, ArtifactError, Verdict, Versions, write_artifact
from optkit.export.scope import scope_of
from optkit.models.families import family_of, named_config
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices

NAMES = ("vllm_session", "vllm_config", "vllm_guard")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    config = named_config("llama_tiny")
    family = family_of(config)
    graph = family.build(family.Config.from_hf(config), rows=8)
    plan = build_plan(graph, PlanChoices.from_dicts(name="llama_tiny"))
    scope = scope_of(graph, plan, config, batch=[1, 2, 4], context=512)
    return write_artifact(
        tmp_path_factory.mktemp("artifact") / "a", name="llama_tiny", plan_json=plan.to_json(), recipe="model: x\n",
        recipe_digest="0" * 64, scope=scope, verdict=Verdict(status="verified except hardware", not_run=1),
        versions=Versions(optkit="0", torch="2"))


@pytest.fixture
def own(monkeypatch):
    """vLLM's own Llama as the guard finds it, on a machine with an H200."""
    class LlamaForCausalLM(torch.nn.Module):
        """vLLM's."""

        def __init__(self, *, vllm_config, prefix="", layer_type=None):
            super().__init__()
            self.built_with = (vllm_config, prefix, layer_type)

    modules = {n: ModuleType(n) for n in ("vllm", "vllm.config", "vllm.platforms", "vllm.model_executor",
                                          "vllm.model_executor.models", "vllm.model_executor.models.llama")}
    modules["vllm"].__version__ = "0.33.0+cu130"
    modules["vllm.config"].VllmConfig = SimpleNamespace
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    modules["vllm.model_executor.models.llama"].LlamaForCausalLM = LlamaForCausalLM
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(logging.getLogger("vllm.optkit"), "propagate", True)
    for name in NAMES:
        monkeypatch.delitem(sys.modules, f"optkit.export.{name}", raising=False)
    yield LlamaForCausalLM
    for name in NAMES:  # bound to the stand-in
        sys.modules.pop(f"optkit.export.{name}", None)


@pytest.fixture
def engine(tmp_path):
    """VllmConfig of an engine for tiny Llama that the artifact fits, but for what a GPU needs."""
    (tmp_path / "config.json").write_text(json.dumps(named_config("llama_tiny")))

    def make(optkit=None, rank=0, **parallel):
        return SimpleNamespace(
            additional_config={} if optkit is None else {"optkit": optkit},
            model_config=SimpleNamespace(model=str(tmp_path), dtype=torch.bfloat16, max_model_len=512,
                                         is_hybrid=False, runner_type="generate"),
            parallel_config=SimpleNamespace(**{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "rank": rank,
                                               "data_parallel_size": 1} | parallel),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            cache_config=SimpleNamespace(block_size=16, cache_dtype="auto", enable_prefix_caching=True),
            speculative_config=None, lora_config=None, kv_transfer_config=None)

    return make


def guard(name="LlamaForCausalLM@0.33.0"):
    return getattr(importlib.import_module("optkit.export.vllm_guard"), name)


def test_without_an_entry_it_is_vllms_own(own, engine, caplog):
    config = engine()
    model = guard()(vllm_config=config, prefix="p", layer_type=int)
    assert isinstance(model, own) and type(model).__name__ == own.__name__ and type(model).forward is own.forward
    assert model.built_with == (config, "p", int)
    assert caplog.records == []


def test_auto_says_why_once_and_runs_vllms_own(own, engine, artifact, caplog):
    cls = guard()
    models = [cls(vllm_config=engine({"artifact": str(artifact.path)})) for _ in range(2)]
    assert all(isinstance(m, own) for m in models)
    (record,) = caplog.records
    words = record.getMessage()
    assert record.levelno == logging.WARNING and "is not used, vLLM's own model runs every step, because: " in words
    assert words.split("because: ")[1].split("; ") == ["kernel: the artifact holds none", *GPU_BACKEND_MISSING.split("; ")]


def test_other_ranks_are_silent(own, engine, artifact, caplog):
    options = {"artifact": str(artifact.path)}
    guard()(vllm_config=engine(options, rank=1, tensor_parallel_size=2))
    assert caplog.records == []


def test_require_refuses_with_every_reason(own, engine, artifact):
    config = engine({"artifact": str(artifact.path), "mode": "require"}, tensor_parallel_size=2)
    config.scheduler_config.max_num_seqs = 64
    config.lora_config = object()
    with pytest.raises(ValueError, match="is required but cannot be used") as e:
        guard()(vllm_config=config)
    for reason in ("kernel: the artifact holds none", "tensor parallel size: engine has 2, artifact accepts 1",
                   "max_num_seqs: engine has 64", "feature: LoRA", GPU_BACKEND_MISSING):
        assert f"  - {reason}" in str(e.value)


def test_a_model_without_a_graph_is_a_reason(own, engine, artifact, caplog):
    """An architecture name that is covered with a configuration that is not: no crash, no artifact."""
    options = {"artifact": str(artifact.path)}
    config = engine(options, tensor_parallel_size=3)  # divides no heads
    assert isinstance(guard()(vllm_config=config), own)
    words = caplog.records[0].getMessage()
    assert "model: " in words and "tensor parallel size: engine has 3" in words and GPU_BACKEND_MISSING in words


@pytest.mark.parametrize("mode", ["auto", "require"])
def test_a_damaged_artifact_is_refused_before_anything_else(own, engine, artifact, tmp_path, mode):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(artifact.path, copy)
    (copy / PLAN).write_bytes((copy / PLAN).read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(ArtifactError, match="plan.json has sha256"):
        guard()(vllm_config=engine({"artifact": str(copy), "mode": mode}))


def test_a_bad_option_is_refused(own, engine):
    with pytest.raises(ValueError, match="did you mean artifact"):
        guard()(vllm_config=engine({"artefact": "x"}))


def test_states_are_what_vllms_class_says(own, engine):
    """A recurrent state in another dtype than the kernel's must be seen: it is vLLM that allocates it on a GPU."""
    own.get_mamba_state_dtype_from_config = classmethod(lambda cls, config: (torch.bfloat16, torch.float32))
    from optkit.export.vllm_guard import state_dtypes

    assert state_dtypes(own, engine())() == {"conv": "bf16", "recurrent": "f32"}


def test_unknown_names_have_no_class(own):
    with pytest.raises(AttributeError, match="QwenForCausalLM"):
        guard("QwenForCausalLM@0.33.0")
