"""The entry point against a stand-in for vLLM: what it registers, where, and how often it may run."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from optkit.export import vllm_plugin


@pytest.fixture
def registered(monkeypatch):
    """Registered architectures on a platform that is a CPU or not."""
    calls: dict[str, str] = {}

    def install(cpu: bool) -> dict[str, str]:
        vllm, platforms = ModuleType("vllm"), ModuleType("vllm.platforms")
        vllm.ModelRegistry = SimpleNamespace(register_model=calls.__setitem__)
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


def test_nothing_is_replaced_on_a_gpu(registered):
    calls = registered(cpu=False)
    vllm_plugin.register()
    assert calls == {}


def test_every_override_is_listed():
    listed = " ".join(vllm_plugin.CPU_OVERRIDES)
    assert all(arch in listed for arch in vllm_plugin.CPU_ARCHITECTURES)
