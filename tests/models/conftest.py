"""Shared tiny models. One thread: the suite shares a small machine, and sums keep their order."""

from __future__ import annotations

import pytest
import torch
from model_steps import Model, tiny

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def k3() -> Model:
    """Tiny Kimi K3, random weights."""
    return tiny("kimi_k3_tiny")


@pytest.fixture(scope="session")
def llama() -> Model:
    """Tiny Llama, random weights."""
    return tiny("llama_tiny")


@pytest.fixture(scope="session")
def deepseek() -> Model:
    """Tiny DeepSeek-V4.1 with every layer type, random weights."""
    return tiny("deepseek_v41_tiny")
