"""Small pieces of the executor by hand: unit bookkeeping, expert tables, top-k, memory checks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optkit.execute.bodies.common import elementwise, row_blocks, runs
from optkit.execute.bodies.experts import distinct, top_k
from optkit.execute.bodies.gemv import tile_product
from optkit.execute.memory import merge, poisoned, unit_span
from optkit.execute.weights import WeightStore
from optkit.models.ops.mxfp4 import dequantise, quantise
from optkit.plan.types import Access, Stage


def test_runs() -> None:
    assert list(runs([0, 1, 2, 5, 7, 8])) == [(0, 3), (5, 6), (7, 9)]
    assert list(runs([])) == []


@given(st.sets(st.integers(0, 39)), st.integers(1, 8), st.integers(1, 8))
def test_row_blocks_cover_the_active_units_once(units: set[int], parts: int, rows: int) -> None:
    got = [
        r * parts + j
        for r0, r1, j0, j1 in row_blocks(sorted(units), parts, rows)
        for r in range(r0, r1)
        for j in range(j0, j1)
    ]
    assert sorted(got) == sorted(u for u in units if u < rows * parts)
    assert len(got) == len(set(got))


def test_merge() -> None:
    assert merge([(4, 6), (0, 2), (2, 3), (5, 9)]) == [(0, 3), (4, 9)]


def test_unit_span_follows_the_access() -> None:
    per_row = Stage("s", "kda", (), 0, 8, 4, 2, 0, "block", (), ())
    assert unit_span(per_row, Access("b", "unit", 10, 4, 4), 5, 100) == (2, 14, 18)
    packed = Stage("s", "gemv", (), 0, 8, 1, 2, 0, "block", (), ())
    part = Access("b", "all", 0, 16, 16, first=3, count=2)
    assert unit_span(packed, part, 2, 100) is None
    assert unit_span(packed, part, 4, 24) == (None, 16, 24)
    assert unit_span(packed, part, 5, 100) is None


def test_poison_is_nan_or_no_index() -> None:
    for poison in ("nan", "ones"):
        assert all(bool(torch.isnan(poisoned(d, poison))) for d in (torch.bfloat16, torch.float32))
    assert int(poisoned(torch.int32, "nan")) == -(2**31) and int(poisoned(torch.int32, "ones")) == -1
    for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int64):
        assert set(poisoned(dtype, "ones")[None].view(torch.uint8).tolist()) == {0xFF}


def test_distinct_lists_experts_in_first_appearance_order() -> None:
    # rows 0 and 1 of a class of 3; expert 7 first, chosen at k = 0 by row 0 and at k = 1 by row 1
    table = distinct([[7, 2], [5, 7]], 3)
    assert table[:13] == [3, 7, 0, 1, -1, 2, 1, -1, -1, 5, -1, 0, -1]
    assert len(table) == 1 + 6 * 4 and set(table[13:]) == {-1}


def test_top_k_breaks_ties_by_lower_id_and_leaves_the_bias_out_of_the_weights() -> None:
    logits = torch.tensor([[0.0, 2.0, 0.0, 0.0]])
    ids, wts = top_k(logits, torch.tensor([0.0, -1.0, 0.0, 0.5]), 3, 2.0)
    assert ids.tolist() == [[3, 0, 2]]
    assert torch.allclose(wts, torch.full((1, 3), 2 / 3))


@given(st.integers(1, 200), st.integers(1, 64))
def test_elementwise_gives_an_element_the_same_bits_alone(n: int, at: int) -> None:
    x = torch.linspace(-9, 9, 200)[:n]
    whole = elementwise(torch.sigmoid, x)
    assert torch.equal(elementwise(torch.sigmoid, x[at % n : at % n + 1]), whole[at % n : at % n + 1])
    assert torch.allclose(whole, torch.sigmoid(x))


def test_tile_product_gives_a_tile_the_same_bits_alone() -> None:
    gen = torch.Generator().manual_seed(0)
    x, tiles = torch.randn((8, 96), generator=gen), torch.randn((7, 16, 96), generator=gen)
    whole = tile_product(x, tiles)
    assert torch.allclose(whole, x @ tiles.flatten(0, 1).T, atol=1e-4)
    for i in range(7):
        assert torch.equal(tile_product(x, tiles[i : i + 1]), whole[:, 16 * i : 16 * i + 16])


def test_weight_store_pads_the_last_tile_with_zeros() -> None:
    w = torch.arange(18 * 4, dtype=torch.bfloat16).view(18, 4)
    tiles = WeightStore({"w": w}).tiles("w", 16)
    assert tiles.shape == (2, 16, 4)
    assert torch.equal(tiles.flatten(0, 1)[:18], w.float()) and not tiles[1, 2:].any()


def test_weight_store_expands_experts_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, scales = quantise(torch.randn((3, 16, 64), generator=torch.Generator().manual_seed(0)))
    want = dequantise(packed, scales, torch.float64)
    for limit in (1 << 29, 0):  # kept expanded, expanded at every use
        monkeypatch.setattr("optkit.execute.weights.EXPANDED_LIMIT", limit)
        got = WeightStore({"w": (packed, scales)}).expert_tiles("w", 1, 8)
        assert got.shape == (2, 8, 64) and torch.equal(got.flatten(0, 1).double(), want[1])


def test_weight_store_refuses_a_quantised_weight_as_dense() -> None:
    with pytest.raises(TypeError, match="weight 'w' is MXFP4"):
        WeightStore({"w": quantise(torch.ones(1, 32))}).dense("w")
