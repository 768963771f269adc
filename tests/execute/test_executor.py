"""The executor as a runner: whole steps, slices, caches in place, padding, refusals."""

from __future__ import annotations

import pytest
import torch
from micro import graph, plan, runner, weights

from optkit.execute import Executor, StageRunner
from optkit.execute.contents import contents
from optkit.execute.memory import ExecutionError
from optkit.models import interpret
from optkit.models.ops import Choices, StateTensor
from optkit.validate.gates import row_errors
from optkit.validate.scenario import Scenario, tensors


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same numbers as a view with a gap after every row and block, as in a page shared by several layers."""
    big = torch.full((t.shape[0], 2, *t.shape[1:-1], t.shape[-1] + 8), 7.0, dtype=t.dtype)
    view = big[:, 1, ..., : t.shape[-1]]
    view.copy_(t)
    assert not view.is_contiguous()
    return view


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_step_is_as_close_to_float64_as_the_plain_implementation(name: str) -> None:
    scenario = Scenario(graph(name), 4, 1)
    inputs = scenario.inputs(0)
    r = runner(name, scenario)
    logits = r.step(inputs)
    w64, w32 = (interpret.cast_weights(graph(name), weights(name), p) for p in ("f64", "bf16"))
    adopt = Choices(r.choices(), 0.1)
    want = interpret.run(graph(name), w64, inputs, scenario.caches("f64"), "f64", adopt)["logits"]
    plain = interpret.run(graph(name), w32, inputs, scenario.caches("bf16"), "bf16")["logits"]
    assert logits.dtype == torch.float32 and logits.shape == (4, 96)
    assert float(row_errors(logits, want).median()) < 0.05
    assert float(row_errors(logits, plain).median()) < 0.1


def test_is_a_stage_runner() -> None:
    assert isinstance(runner("llama", Scenario(graph("llama"), 1, 1)), StageRunner)


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_caches_may_have_any_strides(name: str) -> None:
    scenario = Scenario(graph(name), 3, 2)
    caches: dict[str, StateTensor] = {
        k: (strided(t[0]), strided(t[1])) if isinstance(t, tuple) else strided(t)
        for k, t in scenario.caches("bf16").items()
    }
    a, b = runner(name, scenario), Executor(plan(name), graph(name), weights(name), caches)
    for t in range(2):
        assert torch.equal(a.step(scenario.inputs(t)), b.step(scenario.inputs(t)))
    for key, t in caches.items():
        for x, y in zip(tensors(t), tensors(a.caches[key]), strict=True):
            assert torch.equal(x, y)
            gap = x.as_strided(x.shape[:-1] + (8,), x.stride(), x.storage_offset() + x.shape[-1])
            assert bool((gap == 7.0).all())


@pytest.mark.parametrize("name", ["k3", "llama"])
@pytest.mark.parametrize("padding", [(3,), (0, 2)])
def test_padded_rows_write_no_state_and_disturb_nobody(name: str, padding: tuple[int, ...]) -> None:
    full, padded = (Scenario(graph(name), 4, 1, padding=p) for p in ((), padding))
    a, b = runner(name, full), runner(name, padded, order=0, checked=True)
    want, got = a.step(full.inputs(0)), b.step(padded.inputs(0))
    live = padded.active()
    if (
        name == "llama"
    ):  # K3's experts are summed in first-appearance order over all rows, so bits of rows may differ there
        assert torch.equal(got[live], want[live])
    assert float(row_errors(got[live], want[live]).max()) < 0.2
    assert bool(torch.isfinite(got).all())
    fresh = padded.caches("bf16")
    slots = [int(padded.state_slot[r]) for r in padding]
    blocks = [int(b) for r in padding for b in padded.block_table[r]]
    for state in graph(name).states:
        mine = [0, *blocks] if state.kind.startswith("kv") else [0, *slots]
        for now, was in zip(tensors(b.caches[state.name]), tensors(fresh[state.name]), strict=True):
            assert torch.equal(now[mine], was[mine]), state.name


def test_row_count_must_fit_the_class() -> None:
    scenario = Scenario(graph("llama"), 8, 1)
    inputs = {k: torch.cat([v, v]) for k, v in scenario.inputs(0).items()}
    with pytest.raises(ExecutionError, match="rows=16: plan .* takes 1..8 rows a step"):
        runner("llama", scenario).step(inputs)


def test_missing_weights_and_caches_are_all_named() -> None:
    w, caches = dict(weights("llama")), Scenario(graph("llama"), 1, 1).caches("bf16")
    del w["model.embed_tokens.weight"], w["model.norm.weight"], caches["L1.kv"]
    with pytest.raises(
        ValueError,
        match="embed_tokens.weight' is missing; weight 'model.norm.weight' is missing; state 'L1.kv' has no cache",
    ):
        Executor(plan("llama"), graph("llama"), w, caches)


@pytest.mark.parametrize("name", ["k3", "llama"])
def test_slices_compose_to_the_step(name: str) -> None:
    """run_stages over every stage, each fed with what the ones before returned, gives the bits of one step."""
    scenario = Scenario(graph(name), 4, 1)
    inputs = scenario.inputs(0)
    whole, parts = runner(name, scenario), runner(name, scenario)
    want = whole.step(inputs)
    held: dict[str, torch.Tensor] = {}
    for i, stage in enumerate(plan(name).stages):
        reads = {a.buffer for a in stage.reads}
        held |= parts.run_stages(i, i + 1, inputs, {k: v for k, v in held.items() if k in reads})
    assert torch.equal(held["logits"][:4], want)
    for key in whole.caches:
        for x, y in zip(tensors(whole.caches[key]), tensors(parts.caches[key]), strict=True):
            assert torch.equal(x, y)


def test_slice_without_its_inputs_gives_poison() -> None:
    scenario = Scenario(graph("llama"), 2, 1)
    out = runner("llama", scenario).run_stages(1, 2, scenario.inputs(0), {})
    assert all(bool(torch.isnan(v).any()) for v in out.values() if v.is_floating_point())


def test_slice_in_task_order_gives_the_same_bits() -> None:
    scenario = Scenario(graph("k3"), 4, 1)
    gen = torch.Generator().manual_seed(0)
    p = plan("k3")
    i = next(i for i, s in enumerate(p.stages) if s.body == "kda")
    inject = {b: torch.randn((4, p.buffer[b].width), generator=gen) for b in contents(p, graph("k3"))[i].reads}
    a, b = (runner("k3", scenario, order=o).run_stages(i, i + 1, scenario.inputs(0), inject) for o in ("stage", 5))
    assert a.keys() == b.keys() and all(torch.equal(a[k][:4], b[k][:4]) for k in a)


def test_pipeline_stage_hands_over_prefix_and_saved_rows() -> None:
    layers = (1, 3)
    g = graph("k3", 1, layers)
    scenario = Scenario(g, 3, 1)
    inputs = scenario.inputs(0)
    assert "in.p" in inputs and "token" not in inputs
    r = runner("k3", scenario, layers=layers)
    r.step(inputs)
    want = interpret.run(
        g,
        interpret.cast_weights(g, weights("k3", 1, layers), "f64"),
        inputs,
        scenario.caches("f64"),
        "f64",
        Choices(r.choices(), 0.1),
    )
    assert r.outputs().keys() >= set(g.outputs) - set(g.inputs)
    for name, got in r.outputs().items():
        assert float(row_errors(got, want[name]).max()) < 0.02, name


def test_contents_name_the_value_in_every_buffer() -> None:
    p, g = plan("k3"), graph("k3")
    io = contents(p, g)
    assert {s.value for c in io for s in c.writes.values() if s.kind == "value"} <= {v.name for v in g.values}
    for stage, c in zip(p.stages, io, strict=True):
        needed = (
            {v for op in stage.ops for v in g.op(op).inputs}
            - {v for op in stage.ops for v in g.op(op).outputs}
            - {"token"}
        )
        have = {s.value for s in c.reads.values() if s.kind in ("value", "mailbox", "uniq")}
        assert needed <= have, stage.name


def test_choices_are_named_by_their_value() -> None:
    scenario = Scenario(graph("k3"), 2, 1)
    r = runner("k3", scenario)
    r.step(scenario.inputs(0))
    assert set(r.choices()) == {f"L{i}.ids" for i in (1, 2, 3)}
    for ids in r.choices().values():
        assert ids.shape == (2, 3) and ids.dtype == torch.int32
        assert all(len(set(row)) == 3 for row in ids.tolist())
