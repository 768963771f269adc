"""KDA's recurrence and lower-bounded gate against transformers' torch implementation in glm5_next (fp32)."""

from __future__ import annotations

import types

import pytest
import torch
from model_steps import Model, caches, rel, rollout, step_inputs, tokens
from transformers.models.glm5_next import modeling_glm5_next as glm

from optkit.models import interpret

STEPS, ROWS, LAYER = 12, 3, 1


@pytest.fixture(scope="module")
def values(k3: Model) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor]:
    state = caches(k3.graph, ROWS)
    out = rollout(k3.graph, k3.exact, tokens(ROWS, STEPS), state=state)
    recurrent = state[f"L{LAYER}.recurrent"]
    assert isinstance(recurrent, torch.Tensor)
    return out, recurrent[torch.arange(ROWS, 0, -1)]


def glm_recurrence(
    k3: Model, values: list[dict[str, torch.Tensor]], lower_bound: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(o [rows, steps, D], state [rows, heads, V, K]) of glm5_next's modules on the same q, k, v and projections."""
    op = k3.graph.op(f"L{LAYER}.o")
    heads, dim = op.attr("heads"), op.attr("dim")
    sizes = {"linear_head_dim": dim, "linear_num_heads": heads, "hidden_size": 1, "linear_lower_bound": lower_bound}
    gate = glm.Glm5NextTextForgetGate(types.SimpleNamespace(**sizes))  # type: ignore[arg-type]
    gate.dt_bias.data = k3.weights[op.weight("dt_bias")].float()
    gate.A_log.data = k3.weights[op.weight("A_log")].float()
    gate.f_a_proj, gate.f_b_proj = torch.nn.Identity(), torch.nn.Identity()  # type: ignore[assignment]
    q, k, v, f, b = (torch.stack([s[name] for s in values], 1).float() for name in op.inputs)
    split = [t.unflatten(-1, (heads, dim)) for t in (q, k, v)]
    with torch.no_grad():
        o, state = glm.recurrent_kimi_delta_attention(
            *split, gate(f), torch.sigmoid(b), None, True, use_qk_l2norm_in_kernel=True
        )
    return o.flatten(2), state.transpose(-1, -2)  # glm keeps [K, V]


def test_recurrence_equals_glm5_next(k3: Model, values: tuple[list[dict[str, torch.Tensor]], torch.Tensor]) -> None:
    steps, state = values
    o, theirs = glm_recurrence(k3, steps, k3.config.gate_lower_bound)
    assert rel(torch.stack([s[f"L{LAYER}.o"] for s in steps], 1), o) < 1e-5
    assert rel(state, theirs) < 1e-5


def test_another_lower_bound_differs(k3: Model, values: tuple[list[dict[str, torch.Tensor]], torch.Tensor]) -> None:
    o, _ = glm_recurrence(k3, values[0], -4.5)
    assert rel(torch.stack([s[f"L{LAYER}.o"] for s in values[0]], 1), o) > 1e-2


def test_conv_equals_glm5_next(k3: Model, values: tuple[list[dict[str, torch.Tensor]], torch.Tensor]) -> None:
    op = k3.graph.op(f"L{LAYER}.conv")
    taps = torch.cat([k3.weights[op.weight(r)] for r in "qkv"]).double()
    raw = torch.stack([torch.cat([s[n] for n in op.inputs], -1) for s in values[0]], 2)  # [rows, 3D, steps]
    window = torch.zeros(ROWS, taps.shape[0], taps.shape[1] - 1, dtype=torch.float64)
    theirs = glm.causal_conv1d_update(raw, window, taps, activation="silu")
    ours = torch.stack([torch.cat([s[n] for n in op.outputs], -1) for s in values[0]], 2)
    assert rel(ours, theirs) < 1e-12


def test_gated_norm_equals_glm5_next(k3: Model, values: tuple[list[dict[str, torch.Tensor]], torch.Tensor]) -> None:
    op = k3.graph.op(f"L{LAYER}.og")
    norm = glm.Glm5NextTextRMSNormGated(op.attr("dim"), op.attr("eps"))
    norm.weight.data = k3.weights[op.weight("w")].float()
    o, g = (values[0][0][n].float().unflatten(-1, (op.attr("heads"), op.attr("dim"))) for n in op.inputs)
    with torch.no_grad():
        assert rel(values[0][0][f"L{LAYER}.og"], norm(o, g).flatten(1)) < 1e-5


def test_padding_slots_are_untouched(k3: Model) -> None:
    state = caches(k3.graph, ROWS)
    inputs = step_inputs(tokens(ROWS, 1)[0], 0)
    inputs["state_slot"] = torch.tensor([1, 0, -1], dtype=torch.int32)
    inputs["slot_mapping"] = torch.tensor([int(inputs["slot_mapping"][0]), -1, -1])
    inputs["seq_len"] = torch.tensor([1, 0, 0], dtype=torch.int32)
    out = interpret.run(k3.graph, k3.exact, inputs, state)
    for name in ("L0.q", "L0.o", "L0.og", "L3.ol"):
        assert out[name][0].abs().max() > 0
        assert torch.equal(out[name][1:], torch.zeros_like(out[name][1:]))
    for name, t in state.items():
        rows, index = (t.flatten(0, 1), int(inputs["slot_mapping"][0])) if name.endswith("kv") else (t, 1)
        touched = rows.flatten(1).abs().sum(-1).nonzero().flatten().tolist()
        assert touched == [index], f"{name}: wrote rows {touched}"
