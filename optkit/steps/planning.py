"""Recipe to proven Plan: the steps `model`, `plan` and `check`.

They leave "source" (ModelSource), "graphs" and "plans" by pipeline stage, "graph" and "plan" of the stage that is
emitted and run.
"""

from __future__ import annotations

from dataclasses import replace

from optkit.pipeline import Context
from optkit.recipe import Recipe


def model(recipe: Recipe, context: Context) -> None:
    """The model's configuration and the graph of every pipeline stage."""
    from optkit.build import build_graph, model_source, verify_weights

    source = model_source(context.resolved)
    graphs = {s: build_graph(context.resolved, source, s) for s in range(recipe.parallel.pp)}
    for one in graphs.values():
        verify_weights(context.resolved, one)
    graph = graphs[recipe.parallel.stage]
    context.results.update(source=source, graphs=graphs, graph=graph)
    context.note(
        f"{graph.family}, layers {graph.layers[0]} to {graph.layers[1] - 1}, {len(graph.ops)} ops, "
        f"{sum(w.nbytes for w in graph.weights) / 1e9:.3f} GB of weights per GPU"
    )


def plan(recipe: Recipe, context: Context) -> None:
    """One Plan per pipeline stage; plan.json is that of the stage which is emitted and run."""
    from optkit.build import plan_choices
    from optkit.plan.build import build_plan

    choices = plan_choices(context.resolved)
    plans = {s: build_plan(g, choices) for s, g in context.results["graphs"].items()}
    chosen = plans[recipe.parallel.stage]
    context.results.update(plans=plans, plan=chosen)
    if context.run is not None:
        context.run.text("plan.json", chosen.to_json())
    needed = dict(chosen.memory)["total"] / 1e9
    context.note(
        f"{len(chosen.stages)} stages, {len(chosen.edges)} edges, {chosen.sms} SMs, ring of {chosen.ring_slots} tiles, "
        f"{needed:.1f} of {recipe.hardware.memory_gb:g} GB per GPU, plan {chosen.digest[:6]}"
    )


def check(recipe: Recipe, context: Context) -> None:
    """The proofs on the Plan of every pipeline stage, its constants against config.json, and the table the kernel would
    walk held against it. A stage that no device body can do refuses the recipe."""
    from optkit.emit.lower import limits
    from optkit.errors import UserError
    from optkit.verify.constants import check_constants
    from optkit.verify.proofs import prove
    from optkit.verify.table import audit_table

    plans, graphs, config = context.results["plans"], context.results["graphs"], context.results["source"].config_json
    epsilon = recipe.model.qk_lora_norm_eps
    keys = {} if epsilon is None else {"qk_lora_norm_eps": epsilon}
    again = f"optkit check {context.target}"
    suffix = {s: f"@stage{s}" if len(plans) > 1 else "" for s in plans}
    for stage, one in plans.items():
        context.take(prove(one, again), suffix=suffix[stage])
        context.take([check_constants(one, graphs[stage], config, keys, again)], suffix=suffix[stage])
    if any(c.status == "fail" for c in context.checks):
        return  # a Plan that is wrong in itself has no table to speak of
    beyond = dict.fromkeys(line for one in plans.values() for line in limits(one))
    if beyond:
        raise UserError(beyond)
    for stage, one in plans.items():
        # mailboxes of real peers are other processes' memory: their words are those of the emulated ones
        here = replace(one, parallel=tuple({**dict(one.parallel), "peers": "emulated"}.items()))
        context.take(audit_table(here, graphs[stage], again), suffix=suffix[stage])
