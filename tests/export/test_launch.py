"""Addresses of bound caches: any padding between slots, blocks and heads; what device code cannot read is refused."""

import pytest
import torch

from optkit.export.launch import state_address
from optkit.models.graph import State

CONV = State("L0.conv", "conv", (3, 24), "bf16", 0)
RECURRENT = State("L0.recurrent", "recurrent", (2, 4, 4), "f32", 0)
KV = State("L3.kv", "kv", (576,), "bf16", 3)
HEADS = State("L0.kv", "kv_heads", (2, 64), "bf16", 0)


def test_padded_slots_and_pages_keep_their_strides() -> None:
    page = torch.zeros(5, 1024, dtype=torch.bfloat16)
    conv = page[:, :72].view(5, 3, 24)
    at = state_address(CONV, conv)
    assert (at.base, at.block, at.row) == (page.data_ptr(), 2048, 48)
    rows = torch.zeros(7, 32, 640, dtype=torch.bfloat16)[..., :576]
    at = state_address(KV, rows)
    assert (at.block, at.row, at.head) == (32 * 1280, 1280, 0)


def test_keys_and_values_side_by_side_in_one_page() -> None:
    """vLLM's layout: [blocks, heads, block_size, K then V]."""
    pages = torch.zeros(6, 2, 16, 128, dtype=torch.bfloat16).transpose(1, 2)
    at = state_address(HEADS, (pages[..., :64], pages[..., 64:]))
    assert (at.block, at.row, at.head) == (2 * 16 * 256, 256, 16 * 256)
    assert at.v == (at.base + 128, at.block, at.row, at.head)


@pytest.mark.parametrize(
    ("state", "cache", "message"),
    [
        (CONV, torch.zeros(5, 24, 3, dtype=torch.bfloat16).transpose(1, 2), "L0.conv: strides .* side by side"),
        (RECURRENT, torch.zeros(5, 2, 4, 8)[..., :4], "L0.recurrent: strides .* side by side"),
        (RECURRENT, torch.zeros(5 * 34)[: 5 * 33].view(5, 33)[:, :32].view(5, 2, 4, 4), "multiples of 16 bytes"),
        (KV, torch.zeros(2, 16, 1152, dtype=torch.bfloat16)[..., ::2], "L3.kv: stride 2 within a row: expected 1"),
        (KV, torch.zeros(2, 16, 580, dtype=torch.bfloat16)[..., :576], "multiples of 16 bytes"),
        (KV, torch.zeros(2, 16, 584, dtype=torch.bfloat16)[..., 1:577], "multiples of 16 bytes"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(state: State, cache: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state_address(state, cache)
