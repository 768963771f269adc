"""DeepSeek-V4.1's step against numpy (float64, second writing) at 48 positions, in every cache format.

The tiny configuration has every layer type; within 48 positions its window wraps, its clamp bites, and the candidate
blocks and the top-k both cut.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from model_steps import Model, built, caches, rel, rollout, tokens
from numpy_deepseek import NumpyDeepseek
from torch import Tensor

from optkit.models import families
from optkit.models.graph import Graph, Op
from optkit.models.ops import OPS
from optkit.models.ops.quantised import expand

STEPS, ROWS = 48, 2
EXACT = 1e-9  # a wrong variant moves the logits by more than 1e-3


def plain(model: Model) -> dict[str, Any]:
    """All weights in float64 by released names; routed experts stacked, under ffn.w1 and so on."""
    out = {}
    for name, w in model.weights.items():
        if name.endswith("token_classes"):
            out[name] = w.numpy()
        elif isinstance(w, tuple) and w[0].dtype == torch.uint8:
            out[name.replace(".experts.", ".")] = expand(w, torch.float64).numpy()
        else:
            out[name] = expand(w, torch.float64).numpy()
    return out


@pytest.fixture(scope="module", params=["official", "none", "h200"])
def pair(deepseek: Model, request: pytest.FixtureRequest) -> tuple[Graph, list[Tensor], NumpyDeepseek]:
    """The graph in one cache format, and numpy's logits of row 0."""
    oracle = NumpyDeepseek(deepseek.config, plain(deepseek), request.param)
    expected = [torch.from_numpy(oracle.step(int(t[0]))) for t in tokens(ROWS, STEPS)]
    return deepseek.build(cache_format=request.param), expected, oracle


def test_float64_equals_numpy(deepseek: Model, pair: tuple[Graph, list[Tensor], NumpyDeepseek]) -> None:
    graph, expected, oracle = pair
    out = rollout(graph, deepseek.exact, tokens(ROWS, STEPS))
    assert max(rel(o["logits"][0], e) for o, e in zip(out, expected, strict=True)) < EXACT
    c = deepseek.config
    assert 0.005 < oracle.clamped / oracle.activations < 0.5
    assert STEPS > 2 * c.window
    last = {n: int((out[-1][n][0] >= 0).sum()) for n in ("L2.sel", "L4.sel", "L6.sel", "L4.blocks")}
    assert last == {"L2.sel": c.index_topk, "L4.sel": c.index_topk, "L6.sel": c.index_topk, "L4.blocks": 3}
    outside = [~np.isin(o["L4.sel"][0].numpy() // c.candidate_block_size, o["L4.blocks"][0].numpy()) for o in out[20:]]
    assert any(o.any() for o in outside), "the candidate blocks cut nothing that the top-k took"


def test_another_schedule_equals_numpy() -> None:
    """Groups of four tokens, two sources in one stretch, a re-index without candidate blocks, no Engram, one o group."""
    hf = copy.deepcopy(families.named_config("deepseek_v41_tiny"))
    hf["text_config"] |= {
        "num_hidden_layers": 5,
        "compress_ratios": [4, 4, 4, 0, 4],
        "kv_source_layer_ids": [0, 2],
        "index_source_layer_ids": [0, 1, 2],
        "candidate_source_layer_id": -1,
        "engram_layer_ids": [],
        "engram_num_embeddings": [],
        "o_groups": 1,
        "index_topk": 3,
    }
    model = built(hf)
    assert "lookback" not in model.graph.inputs
    oracle = NumpyDeepseek(model.config, plain(model), "official")
    ids = tokens(1, 28)
    for t, o in zip(ids, rollout(model.graph, model.exact, ids), strict=True):
        assert rel(o["logits"][0], torch.from_numpy(oracle.step(int(t[0])))) < EXACT
    assert (o["L1.sel"] >= 0).all()  # three of seven groups: the top-k cut


def attr(op: Op, **changes: Any) -> Op:
    return dataclasses.replace(op, attrs=tuple(sorted({**dict(op.attrs), **changes}.items())))


def without_blocks(op: Op) -> Op:
    return dataclasses.replace(op, inputs=op.inputs[:2])


VARIANTS: dict[str, tuple[str, Any]] = {
    "window": ("sparse_attention", lambda op: attr(op, window=op.attr("window") - 1)),
    "no_candidates": ("index_select", without_blocks),
    "fewer_keys": ("index_select", lambda op: attr(op, topk=op.attr("topk") - 1)),
    "fewer_blocks": ("index_select", lambda op: attr(op, keep_blocks=max(op.attr("keep_blocks") - 1, 0))),
    "no_inverse": ("rope_tail", lambda op: attr(op, inverse=False)),
    "no_yarn": ("rope_tail", lambda op: attr(op, scaling=())),
    "wrong_grid": ("latent_insert", lambda op: attr(op, format="none")),
    "no_clamp": ("expert_gate_up", lambda op: attr(op, act="silu")),
    "shared_no_clamp": ("act_mul", lambda op: attr(op, act="silu")),
    "sigmoid_router": ("route", lambda op: attr(op, score="sigmoid")),
    "one_iteration": ("stream_gates", lambda op: attr(op, iterations=op.attr("iterations") // 10)),
    "post_factor": ("stream_gates", lambda op: attr(op, post_factor=1.0)),
    "hash": ("ngram_hash", lambda op: attr(op, multipliers=op.attr("multipliers")[::-1])),
    "pad": ("ngram_hash", lambda op: attr(op, pad_token=op.attr("pad_token") + 1)),
}


@pytest.fixture(scope="module")
def official(deepseek: Model) -> list[Tensor]:
    return [o["logits"] for o in rollout(deepseek.graph, deepseek.exact, tokens(1, 28))]


@pytest.mark.parametrize("variant", [*VARIANTS, "no_sink", "unshifted_pre", "transposed_mix"])
def test_wrong_variants_move_the_logits(
    variant: str, deepseek: Model, official: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, weights = deepseek.graph, dict(deepseek.exact)
    if variant == "no_sink":
        weights.update({n: torch.full_like(w, -100.0) for n, w in weights.items() if n.endswith("attn_sink")})
    elif variant == "unshifted_pre":

        def own(op: Op) -> Op:  # read this site's coefficients
            site = op.name.replace("h_", "pre_")
            return dataclasses.replace(op, inputs=(op.inputs[0], site)) if op.kind == "stream_collapse" else op

        ops = tuple(own(op) if op.layer < deepseek.config.num_layers else op for op in graph.ops)
        graph = dataclasses.replace(graph, ops=ops)
    elif variant == "transposed_mix":
        right = OPS["stream_gates"]

        def transposed(op: Op, *rest: Any) -> list[Tensor]:
            pre, post, mix = right.ref(op, *rest)
            return [pre, post, mix.unflatten(-1, (4, 4)).mT.flatten(-2)]

        monkeypatch.setitem(OPS, "stream_gates", dataclasses.replace(right, ref=transposed))
    else:
        kind, change = VARIANTS[variant]
        graph = dataclasses.replace(graph, ops=tuple(change(op) if op.kind == kind else op for op in graph.ops))
    out = rollout(graph, weights, tokens(1, 28), state=caches(graph, 1))
    assert max(rel(o["logits"], e) for o, e in zip(out, official, strict=True)) > 1e-3
