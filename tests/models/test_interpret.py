"""The interpreter: bf16 rounding points, adoption of another implementation's choices, input checks."""

from __future__ import annotations

import pytest
import torch
from model_steps import Model, caches, rel, rollout, step_inputs, tokens

from optkit.models import interpret
from optkit.models.graph import Op
from optkit.models.ops import OPS, ChoiceError, Choices, StepContext
from optkit.models.random_weights import random_weights


def test_bf16_rounds_every_value(k3: Model) -> None:
    state = caches(k3.graph, 2, "bf16")
    out = interpret.run(k3.graph, k3.weights, step_inputs(tokens(2, 1)[0], 0), state, "bf16")
    for v in k3.graph.values:
        assert out[v.name].dtype == interpret.TORCH_DTYPE[v.dtype], v.name
    for s in k3.graph.states:
        assert state[s.name].dtype == interpret.TORCH_DTYPE[s.dtype]


def test_add_rounds_the_delta_first(k3: Model) -> None:
    out = interpret.run(k3.graph, k3.weights, step_inputs(tokens(2, 1)[0], 0), caches(k3.graph, 2, "bf16"), "bf16")
    op = k3.graph.op("P.1m")
    p, *terms = (out[n].float() for n in op.inputs)
    assert torch.equal(out["P.1m"], (p + sum(terms).bfloat16().float()).bfloat16())


@pytest.mark.parametrize(("name", "limit"), [("k3", 0.1), ("llama", 0.03)])
def test_bf16_is_near_float64(name: str, limit: float, request: pytest.FixtureRequest) -> None:
    """With the top-k choices adopted, several steps stay within a bf16-sized error; never zero error."""
    model: Model = request.getfixturevalue(name)
    ids = tokens(3, 4)
    low, high = caches(model.graph, 3, "bf16"), caches(model.graph, 3)
    for i, t in enumerate(ids):
        inputs = step_inputs(t, i)
        ours = interpret.run(model.graph, model.weights, inputs, low, "bf16")
        choices = Choices({k: v for k, v in ours.items() if k.endswith(".ids")}, 0.05)
        ref = interpret.run(model.graph, model.exact, inputs, high, "f64", choices)
        assert 2**-9 < rel(ours["logits"], ref["logits"]) < limit


def test_choices_within_the_score_error_are_adopted(k3: Model) -> None:
    ids = tokens(2, 1)[0]
    plain = interpret.run(k3.graph, k3.exact, step_inputs(ids, 0), caches(k3.graph, 2))
    bias = k3.weights["model.layers.1.block_sparse_moe.gate.e_score_correction_bias"].double()
    score = torch.sigmoid(plain["L1.logits"]) + bias
    order = score.sort(-1, descending=True)
    swapped = order.indices[:, :4].clone()
    swapped[1, 3] = order.indices[1, 4]
    gap = float(order.values[1, 3] - order.values[1, 4])

    def run(error: float, choice: torch.Tensor) -> tuple[dict[str, torch.Tensor], Choices]:
        choices = Choices({"L1.ids": choice.int()}, error)
        return interpret.run(k3.graph, k3.exact, step_inputs(ids, 0), caches(k3.graph, 2), adopt=choices), choices

    out, choices = run(gap * 1.01, swapped)
    assert torch.equal(out["L1.ids"].long(), swapped)
    assert choices.adopted == [("L1.ids", 1, pytest.approx(gap))]
    assert rel(out["L1.wts"].sum(-1), torch.ones(2)) < 1e-12
    with pytest.raises(ChoiceError, match=r"L1.ids row 1: .*score gap"):
        run(gap * 0.99, swapped)
    reordered = order.indices[:, [1, 0, 2, 3]]
    assert torch.equal(run(0.0, reordered)[0]["L1.ids"].long(), reordered)
    with pytest.raises(ChoiceError, match="distinct expert ids"):
        run(1.0, torch.zeros(2, 4))


def test_ties_go_to_the_lower_id() -> None:
    empty = torch.zeros(1, dtype=torch.int32)
    ctx = StepContext(empty, empty, empty, empty, 1, {})
    op = Op("r", "route", ("l",), ("ids", "wts"), (), (), (("scale", 1.0), ("topk", 3)))
    ids, wts = OPS["route"].ref(op, [torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0]]).double()], {"bias": torch.zeros(5)}, ctx)
    assert ids.tolist() == [[1, 3, 0]]
    assert wts.sum().item() == pytest.approx(1)


def test_same_bits_each_time_and_any_page_layout(k3: Model) -> None:
    ids = tokens(2, 2)
    a, b = (rollout(k3.graph, k3.weights, ids, "bf16") for _ in range(2))
    assert torch.equal(a[-1]["logits"], b[-1]["logits"])
    state = {  # views with gaps between rows, as an engine's shared pool has them
        n: torch.cat([t, torch.full_like(t, float("nan"))], -1)[..., : t.shape[-1]]
        for n, t in caches(k3.graph, 2, "bf16").items()
    }
    assert torch.equal(rollout(k3.graph, k3.weights, ids, "bf16", state)[-1]["logits"], a[-1]["logits"])


def test_missing_inputs_are_named(k3: Model) -> None:
    inputs = step_inputs(tokens(2, 1)[0], 0)
    del inputs["state_slot"]
    with pytest.raises(ValueError, match="lack state_slot, L0.conv"):
        interpret.run(k3.graph, k3.weights, inputs, {})
    with pytest.raises(ValueError, match="precision: 'fp8'"):
        interpret.allocate_caches(k3.graph, 1, 1, 16, "fp8")


def test_random_weights_do_not_depend_on_the_slice(k3: Model) -> None:
    part = random_weights(k3.build(layers=(2, 4)), seed=3)
    assert all(
        torch.equal(t, k3.weights[n]) if isinstance(t, torch.Tensor) else torch.equal(t[0], k3.weights[n][0])
        for n, t in part.items()
    )
    biases = [t for n, t in part.items() if n.endswith(("e_score_correction_bias", "dt_bias", "A_log"))]
    assert biases and all(b.abs().min() > 0 for b in biases)
