"""Every decomposition equals its op's `ref` in float64 to 1e-12."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_steps import Model, caches, rel, rollout, tokens
from torch import Tensor

from optkit.models.graph import Op
from optkit.models.ops import OPS, StepContext, attention
from optkit.models.ops.mxfp4 import dequantise, quantise

EXACT = 1e-12


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def context(
    states: dict[str, Any] | None = None, seq_len: tuple[int, ...] = (1,), table: Tensor | None = None
) -> StepContext:
    n = len(seq_len)
    table = torch.arange(n * 8).reshape(n, 8).int() if table is None else table
    length = torch.tensor(seq_len, dtype=torch.int32)
    last = length.long() - 1
    slots = table[torch.arange(n), last // 16].long() * 16 + last % 16
    return StepContext(length, table, slots, torch.ones(n, dtype=torch.int32), 16, states or {})


def op(kind: str, states: tuple[tuple[str, str], ...] = (), **attrs: Any) -> Op:
    return Op("x", kind, (), ("y",), (), states, tuple(attrs.items()))


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_split_k(splits: int) -> None:
    x, w = randn(4, 192), randn(48, 192, seed=1)
    ref = OPS["linear"].ref(op("linear"), [x], {"w": w}, context())[0]
    assert rel(OPS["linear"].decompositions["split_k"](x, w, splits), ref) < EXACT


def test_deferred_norm() -> None:
    x, norm, w = randn(4, 192), randn(192, seed=2), randn(48, 192, seed=1)
    normed = OPS["rmsnorm"].ref(op("rmsnorm", eps=1e-5), [x], {"w": norm}, context())
    ref = OPS["linear"].ref(op("linear"), normed, {"w": w}, context())[0]
    assert rel(OPS["linear"].decompositions["deferred_norm"](x, norm, 1e-5, w), ref) < EXACT


@pytest.mark.parametrize("saved", [1, 3, 8])
def test_early_block_statistics(saved: int) -> None:
    rows = [randn(4, 96, seed=i) * (i + 1) for i in range(saved + 1)]
    norm, proj = randn(96, seed=20), randn(1, 96, seed=21)
    ref = OPS["attnres"].ref(op("attnres", eps=1e-5), rows, {"norm": norm, "proj": proj}, context())[0]
    how, u = OPS["attnres"].decompositions, (norm * proj).reshape(-1)
    early = how["block_statistics"](rows[:-1], u)
    assert early.shape == (4, 2 * saved)
    assert rel(how["mix_from_statistics"](rows[:-1], rows[-1], early, u, 1e-5), ref) < EXACT


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 400), splits=st.integers(1, 9))
def test_split_ranges_partition_the_tokens(tokens: int, splits: int) -> None:
    ranges = attention.split_ranges(tokens, splits)
    assert [t for r in ranges for t in r] == list(range(tokens))
    assert all(r.start % attention.CHUNK_TOKENS == 0 for r in ranges if len(r))


@pytest.mark.parametrize("tokens", [1, 63, 100])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_split_kv_mla(tokens: int, splits: int) -> None:
    heads, lora, nope, rope = 3, 32, 8, 4
    table = torch.tensor([[5, 1, 7, 0, 2, 6, 3, 4]], dtype=torch.int32)
    kv = randn(8, 16, lora + rope)
    ql, q = randn(1, heads * lora, seed=1), randn(1, heads * (nope + rope), seed=2)
    ctx = context({"L.kv": kv}, (tokens,), table)
    o = op("mla_attention", (("kv", "L.kv"),), heads=heads, lora=lora, nope=nope, rope=rope, scale=0.3)
    ref = OPS["mla_attention"].ref(o, [ql, q], {}, ctx)[0].reshape(heads, lora)
    rows = kv[table[0].long()].reshape(-1, lora + rope)[:tokens]
    query = torch.cat([ql.reshape(heads, lora), q.reshape(heads, -1)[:, nope:]], -1)
    got = OPS["mla_attention"].decompositions["split_kv"](query, rows, rows[:, :lora], 0.3, splits)
    assert rel(got, ref) < EXACT


@pytest.mark.parametrize("splits", [1, 3])
def test_split_kv_gqa(splits: int) -> None:
    heads, groups, dim, tokens = 6, 2, 8, 70
    k, v, q = randn(8, 16, groups, dim), randn(8, 16, groups, dim, seed=1), randn(1, heads * dim, seed=2)
    o = op("gqa_attention", (("kv_heads", "L.kv"),), heads=heads, kv_heads=groups, dim=dim, scale=0.4)
    ref = OPS["gqa_attention"].ref(o, [q], {}, context({"L.kv": (k, v)}, (tokens,)))[0].reshape(groups, -1, dim)
    for g in range(groups):
        keys, values = (t.reshape(-1, groups, dim)[:tokens, g] for t in (k, v))
        got = OPS["gqa_attention"].decompositions["split_kv"](q.reshape(groups, -1, dim)[g], keys, values, 0.4, splits)
        assert rel(got, ref[g]) < EXACT


def test_unabsorbed_mla_equals_the_graph(k3: Model) -> None:
    """kv_b expanded per token gives the value that the absorbed ops of the graph give."""
    state = caches(k3.graph, 2)
    values = rollout(k3.graph, k3.exact, tokens(2, 5), state=state)[-1]
    attend = k3.graph.op("L3.ol")
    w_uk, w_uv = (k3.weights[f"model.layers.3.self_attn.{n}"].double() for n in ("w_uk", "w_uv"))
    table = torch.randperm(8, generator=torch.Generator().manual_seed(5)).reshape(2, 4)
    for row in range(2):
        latent = state["L3.kv"][table[row, 0], :5]
        q = values["L3.q"][row].reshape(attend.attr("heads"), -1)
        got = OPS["mla_attention"].decompositions["unabsorbed"](
            q, latent, w_uk, w_uv, attend.attr("nope"), attend.attr("scale")
        )
        assert rel(got.flatten(), values["L3.ov"][row]) < EXACT


def test_mxfp4_round_trip_and_nibble_order() -> None:
    packed = torch.randint(0, 256, (5, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scales = torch.randint(100, 150, (5, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    value = dequantise(packed, scales, torch.float64)
    assert torch.equal(dequantise(*quantise(value), torch.float64), value)
    assert torch.equal(dequantise(packed, scales, torch.float32).double(), value)
    one = torch.zeros(1, 16, dtype=torch.uint8)
    one[0, 0] = 0x2 | 0xF << 4  # even column 1.0, odd column -6.0
    assert dequantise(one, torch.tensor([[128]], dtype=torch.uint8), torch.float64)[0, :3].tolist() == [2.0, -12.0, 0.0]


def test_quantise_is_within_half_a_step() -> None:
    w = randn(7, 64)
    back = dequantise(*quantise(w), torch.float64)
    largest = w.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert ((back - w).unflatten(-1, (-1, 32)).abs() <= largest / 4).all()
    assert rel(back, w) < 0.2
