"""The entry point against a stand-in for vLLM: what it registers, where, and how often it may run."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from optkit.export import vllm_plugin


@pytest.fixture
def registered(monkeypatch):
    """Registered architectures on a platform that is a CPU or not."""
    calls: dict[str, str] = {}

    def install(cpu: bool, known=tuple(vllm_plugin.OWN_CLASSES)) -> dict[str, str]:
        vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
        vllm.__version__ = "0.33.0"
        vllm.ModelRegistry = SimpleNamespace(register_model=calls.__setitem__, get_supported_archs=lambda: set(known))
        platforms.current_platform = SimpleNamespace(is_cpu=lambda: cpu)
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
        return calls

    return install


def test_cpu_architectures(registered):
    calls = registered(cpu=True)
    vllm_plugin.register()
    vllm_plugin.register()
    assert calls == vllm_plugin.CPU_ARCHITECTURES


def test_guards_on_a_gpu(registered):
    """Each architecture of the CPU is guarded there too; the name changes with vLLM's version."""
    calls = registered(cpu=False)
    vllm_plugin.register()
    vllm_plugin.register()
    assert calls == {a: f"optkit.export.vllm_guard:{a}@0.33.0" for a in vllm_plugin.CPU_ARCHITECTURES}


def test_only_what_vllm_has_is_guarded(registered):
    calls = registered(cpu=False, known=("LlamaForCausalLM", "Other"))
    vllm_plugin.register()
    assert set(calls) == {"LlamaForCausalLM"}


def test_every_override_is_listed():
    listed = " ".join(vllm_plugin.CPU_OVERRIDES)
    assert all(arch in listed for arch in vllm_plugin.CPU_ARCHITECTURES)
