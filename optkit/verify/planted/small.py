"""Models small enough to run hundreds of times, with every kind of layer of their family, for the gates that execute.

Plain data, a config.json a family with other sizes: K K M K layers, two layers a block, 8 experts; two Llama layers. A few
SMs, so that tasks hold several units and stages share SMs.
"""

from __future__ import annotations

import copy
from typing import Any

from optkit.models import families

SMS = 12
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_k3": (
        "kimi_k3_tiny",
        {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "attn_res_block_size": 2,
            "intermediate_size": 96,
            "kv_lora_rank": 64,
            "q_lora_rank": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "moe_intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_token": 3,
            "routed_expert_hidden_size": 64,
            "vocab_size": 96,
            "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 32, "num_heads": 4},
        },
    ),
    "llama": (
        "llama_tiny",
        {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "intermediate_size": 192,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 96,
        },
    ),
}
"""Family -> (packaged configuration, the sizes that replace its own)."""


def config(family: str) -> dict[str, Any]:
    """The small config.json of a family. Raises KeyError for a family that has none."""
    name, sizes = SIZES[family]
    out = copy.deepcopy(families.named_config(name))
    text = out.get("text_config", out)
    for k, v in sizes.items():
        text[k] = {**text[k], **v} if isinstance(v, dict) else v
    return out
