"""NeMo AutoModel's DeepSeek-V4.1 (other people, full sequence, fp32) on this project's random checkpoint tensors.

Not in requirements/: nemo-automodel 0.7.0 pins a CUDA stack. It runs on a CPU beside the test environment when
installed with `pip install --no-deps nemo-automodel==0.7.0`. Released names and types go through its own loader.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optkit.models import checkpoint

REASON = "needs nemo-automodel 0.7.0, installed with --no-deps"


def nemo_logits(
    hf: dict[str, Any], directory: Path, ids: Tensor, grids: bool, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """Logits [tokens, vocab] in fp32 of the sequence `ids`, from a directory that checkpoint.write_random made.

    `grids` False: caches and index queries are not rounded to their grids.
    """
    pytest.importorskip("nemo_automodel", reason=REASON)
    from nemo_automodel.components.models.common import BackendConfig
    from nemo_automodel.components.models.deepseek_v41 import attention
    from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
    from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
    from safetensors.torch import load_file
    from transformers import PreTrainedTokenizerFast

    if not grids:
        monkeypatch.setattr(attention, "quantize_cache", lambda values, **_: values)
    config = DeepseekV41Config(
        text_config={**hf["text_config"], "dtype": "float32"}, vision_config={"num_hidden_layers": 0}
    )
    backend = BackendConfig(
        attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch_mm", dispatcher="torch", rope="torch"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / checkpoint.TOKENIZER))
    model = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=tokenizer).float().eval()
    tensors = {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}
    model.state_dict_adapter.dtype = torch.float32
    loaded = model.load_state_dict(model.state_dict_adapter.from_hf(tensors), strict=False)
    left = [n for n in loaded.missing_keys if not n.endswith("bias_vl")]
    assert not left and not loaded.unexpected_keys, (left, loaded.unexpected_keys)
    with torch.no_grad():
        out = model(ids[None].long())
    logits = getattr(out, "logits", out)
    assert isinstance(logits, Tensor)
    return logits[0].float()
