"""The op families of DeepSeek-V4.1: decompositions, grids, selections, verify steps with rejected rows, bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_steps import BLOCK_SIZE, LOOKBACK, Model, caches, rel, rollout, step_inputs, tokens
from numpy_deepseek import bf16, fp8, mx4, nv4
from torch import Tensor

from optkit.models import interpret
from optkit.models.graph import Op
from optkit.models.ops import OPS, ChoiceError, Choices, StepContext, cache_formats, indexer
from optkit.models.ops.latent_cache import pool
from optkit.models.ops.rotary import rotate_tail
from optkit.models.ops.sparse_attention import attend_with_sink
from optkit.models.ops.streams import collapse, expand, sinkhorn

EXACT = 1e-12


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def op(kind: str, **attrs: Any) -> Op:
    return Op("o", kind, ("x",), ("y",), (), (), tuple(sorted(attrs.items())))


def no_context() -> StepContext:
    empty = torch.zeros(1, dtype=torch.int32)
    return StepContext(empty, empty, empty, empty, 1, {})


@pytest.mark.parametrize("splits", [1, 3, 8])
def test_split_scores(splits: int) -> None:
    x, w = randn(3, 4 * 40), randn(24, 4 * 40, seed=1)
    ref = OPS["stream_scores"].ref(op("stream_scores", eps=1e-20), [x], {"w": w}, no_context())[0]
    assert rel(OPS["stream_scores"].decompositions["split_scores"](x, w, 1e-20, splits), ref) < EXACT


def test_equal_streams() -> None:
    p, w = randn(3, 40), randn(24, 4 * 40, seed=1)
    ref = OPS["stream_scores"].ref(op("stream_scores", eps=1e-20), [p.repeat(1, 4)], {"w": w}, no_context())[0]
    assert rel(OPS["stream_scores"].decompositions["equal_streams"](p, w, 1e-20, 4), ref) < EXACT


def test_collapse_ahead() -> None:
    y, x, pre, post, mix = randn(3, 40), randn(3, 160, seed=1), randn(3, 4, seed=2), randn(3, 4, seed=3), randn(3, 16)
    ref = collapse(expand(y, x, post, mix), pre)
    assert rel(OPS["stream_collapse"].decompositions["collapse_ahead"](y, x, pre, post, mix), ref) < EXACT


def test_sinkhorn_is_doubly_stochastic() -> None:
    c = sinkhorn(randn(5, 4, 4), 20, 1e-6)
    assert (c.sum(-1) - 1).abs().max() < 1e-4 and (c.sum(-2) - 1).abs().max() < 1e-5


def test_pool_pair() -> None:
    a, g = randn(2, 64), 3 * randn(2, 64, seed=1)
    assert rel(OPS["gated_pool"].decompositions["pool_pair"](a, g), pool(a, g)) < EXACT


@given(st.integers(1, 90), st.integers(1, 6), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_split_rows_with_sink(rows: int, splits: int, seed: int) -> None:
    q, k, sink = randn(4, 32, seed=seed), randn(rows, 32, seed=seed + 1), 5 * randn(4, seed=seed + 2)
    got = OPS["sparse_attention"].decompositions["split_rows"](q, k, sink, 0.4, splits)
    assert rel(got, attend_with_sink(q, k, sink, 0.4)) < EXACT


@given(st.integers(0, 70), st.integers(1, 12), st.integers(1, 7), st.sampled_from([1, 4, 8]), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_split_top_is_exact_with_ties(n: int, k: int, splits: int, align: int, seed: int) -> None:
    """Many equal scores and masked keys: the split choice is the whole one, and the brute-force one."""
    scores = torch.randint(-1, 4, (n,), generator=torch.Generator().manual_seed(seed)).double()
    scores[scores < 0] = -torch.inf
    want = sorted(sorted((t for t in range(n) if scores[t] > -torch.inf), key=lambda t: (-scores[t], t))[:k])
    assert indexer.top(scores, k).tolist() == want
    assert indexer.split_top(scores, k, splits, align).tolist() == want


def test_rotation_turns_back() -> None:
    x, p = randn(3, 2, 32), torch.tensor([0, 7, 100_000])
    y = rotate_tail(x, p, 8, 160000.0, ("yarn", 16.0, 32.0, 1.0, 65536.0))
    assert torch.equal(y[0], x[0]) and torch.equal(y[..., :24], x[..., :24]) and rel(y[1:], x[1:]) > 0.1
    assert rel(rotate_tail(y, p, 8, 160000.0, ("yarn", 16.0, 32.0, 1.0, 65536.0), inverse=True), x) < EXACT


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_grids_equal_numpy_and_casts(dtype: torch.dtype) -> None:
    scale = 10 ** (6 * torch.rand(64, 1, generator=torch.Generator().manual_seed(2)).double() - 4)
    x = (randn(64, 128) * scale).float()  # in f32, so that both precisions see the same values
    x[0] = 0
    x[1, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])  # ties of e2m1
    y = x.double().numpy()
    expected = {
        "fp8_32": fp8(y, 32),
        "nvfp4_16": nv4(y),
        "mxfp4_32": mx4(y),
        "fp8_row": fp8(y, 128),
        "fp8_64_tail": np.concatenate([fp8(y[:, :64], 64), bf16(y[:, 64:])], -1),
    }
    for name, want in expected.items():
        got = cache_formats.round_rows(x.to(dtype), name, 64)
        assert torch.equal(got.double(), torch.from_numpy(want)), name
        assert torch.equal(got.to(torch.bfloat16).to(dtype), got), f"{name}: not exact in bf16"
    assert torch.equal(cache_formats.round_e4m3(x.clamp(-448, 448)), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())
    assert torch.equal(cache_formats.round_bf16(x), x.bfloat16().float())
    with pytest.raises(ValueError, match="format: 'int8': expected one of none, fp8_32"):
        cache_formats.round_rows(x, "int8")


def verify_step(ids: Tensor, first: int, table: Tensor) -> dict[str, Tensor]:
    """One request's tokens at positions first, first + 1, ... as rows of one step."""
    rows = ids.shape[0] - first
    at = torch.arange(first, ids.shape[0])
    lookback = torch.full((rows, LOOKBACK), -1, dtype=torch.int32)
    for r, p in enumerate(at.tolist()):
        for i in range(min(p, LOOKBACK)):
            lookback[r, i] = ids[p - 1 - i]
    return {
        "token": ids[first:],
        "lookback": lookback,
        "seq_len": (at + 1).int(),
        "block_table": table.expand(rows, -1),
        "slot_mapping": table[0, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE,
        "state_slot": torch.ones(rows, dtype=torch.int32),
    }


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rejected_rows_leave_no_trace(deepseek: Model, accepted: int) -> None:
    """Steps of 4 rows of which `accepted` + 1 stay, then one row: as if the rejected ones had never been."""
    ids = tokens(1, 40)[:, 0]
    table = step_inputs(ids[:1], 0)["block_table"]
    want = rollout(deepseek.graph, deepseek.exact, ids[:, None])
    state = caches(deepseek.graph, 1)
    done = 0
    while done + 4 < 30:
        guess = torch.cat([ids[: done + accepted + 1], (ids[done + accepted + 1 : done + 4] + 1) % 512])
        out = interpret.run(deepseek.graph, deepseek.exact, verify_step(guess, done, table), state)
        for r in range(accepted + 1):
            assert rel(out["logits"][r], want[done + r]["logits"][0]) < 1e-10
        done += accepted + 1
    out = interpret.run(deepseek.graph, deepseek.exact, verify_step(ids[: done + 1], done, table), state)
    assert rel(out["logits"][0], want[done]["logits"][0]) < 1e-10


def test_padding_rows_write_nothing(deepseek: Model) -> None:
    ids = tokens(2, 3)
    state, alone = caches(deepseek.graph, 2), caches(deepseek.graph, 2)
    for i, t in enumerate(ids):
        inputs = step_inputs(t, i, before=ids)
        padded = {n: v.clone() for n, v in inputs.items()}
        padded["slot_mapping"][1], padded["state_slot"][1], padded["seq_len"][1] = -1, 0, 0
        out = interpret.run(deepseek.graph, deepseek.exact, padded, state)
        first = {n: v[:1] for n, v in inputs.items()}
        want = interpret.run(deepseek.graph, deepseek.exact, first, alone)
        assert rel(out["logits"][:1], want["logits"]) < 1e-10
        assert torch.isfinite(out["logits"]).all() and (out["L4.sel"][1] == -1).all()
    for name in state:  # the batch's size may change the last bits of a product, so not equal bit by bit
        assert torch.allclose(state[name], alone[name], rtol=0, atol=1e-9), name


@pytest.mark.parametrize(("cache_format", "limit"), [("none", 0.1), ("official", 0.25)])
def test_bf16_is_near_float64(deepseek: Model, cache_format: str, limit: float) -> None:
    """The float64 run adopts the bf16 run's experts, keys and blocks; its caches are its own.

    The e2m1 grid of compressed rows steps by up to a third of a value, so a bf16-sized error may move a row by that much.
    """
    graph, ids = deepseek.build(cache_format=cache_format), tokens(2, 20)
    low, high = caches(graph, 2, "bf16"), caches(graph, 2)
    errors = []
    for i, t in enumerate(ids):
        inputs = step_inputs(t, i, before=ids)
        ours = interpret.run(graph, deepseek.weights, inputs, low, "bf16")
        choices = {k: v for k, v in ours.items() if k.endswith((".ids", ".sel", ".blocks"))}
        adopted = Choices(choices, 0.2, 3.0)
        ref = interpret.run(graph, deepseek.exact, inputs, high, "f64", adopted)
        errors.append(rel(ours["logits"], ref["logits"]))
    assert 2**-9 < min(errors) and max(errors) < limit


def test_cache_groups_have_tables_and_block_sizes_of_their_own(deepseek: Model) -> None:
    """As in vLLM: small pages for windows, others for compressed rows and keys; the same values as with one table."""
    ids = tokens(2, 22)
    want = rollout(deepseek.graph, deepseek.exact, ids)
    state, small = caches(deepseek.graph, 2), BLOCK_SIZE // 4
    tables = torch.randperm(2 * 16, generator=torch.Generator().manual_seed(9)).reshape(2, 16).int()
    for s in deepseek.graph.states:
        if s.window:
            state[s.name] = torch.zeros(2 * 16, small, *s.shape, dtype=torch.float64)
    for i, t in enumerate(ids):
        inputs = step_inputs(t, i, before=ids)
        for s in deepseek.graph.states:
            if s.window:
                inputs[f"block_table@{s.name}"] = tables
                inputs[f"slot_mapping@{s.name}"] = tables[:, i // small].long() * small + i % small
        inputs["state_slot@L2.ring"] = torch.tensor([2, 1], dtype=torch.int32)
        inputs["block_table@4"] = inputs["block_table"].flip(
            0
        )  # rows swap pages: layer 4's states, read by 5 and 6 too
        inputs["slot_mapping@4"] = inputs["slot_mapping"].flip(0)
        out = interpret.run(deepseek.graph, deepseek.exact, inputs, state)
        assert rel(out["logits"], want[i]["logits"]) < 1e-10


def test_chosen_keys_are_adopted_within_the_score_error(deepseek: Model) -> None:
    ids = tokens(1, 20)
    want = rollout(deepseek.graph, deepseek.exact, ids)[-1]["L4.sel"]
    left = next(t for t in range(20) if t not in want[0].tolist())
    swapped = want.clone()
    swapped[0, 0] = left

    def run(sel: Tensor, error: float) -> Choices:
        state = caches(deepseek.graph, 1)
        for i, t in enumerate(ids[:-1]):
            interpret.run(deepseek.graph, deepseek.exact, step_inputs(t, i, before=ids), state)
        choices = Choices({"L4.sel": sel}, 0.0, error)
        last = step_inputs(ids[-1], 19, before=ids)
        out = interpret.run(deepseek.graph, deepseek.exact, last, state, adopt=choices)
        assert torch.equal(out["L4.sel"], sel)
        return choices

    (name, row, gap), *more = run(swapped, 1e9).adopted
    assert (name, row, more) == ("L4.sel", 0, []) and gap > 0
    with pytest.raises(ChoiceError, match=r"L4.sel row 0: chose .*score gap"):
        run(swapped, gap * 0.99)
    with pytest.raises(ChoiceError, match="expected 8 distinct key ids"):
        run(torch.zeros_like(want), 1e9)
