"""What a run hands over: the steps `export` (artifact for vLLM) and `evidence` (evidence.json, report.html, trace.json)."""

from __future__ import annotations

import optkit
from optkit.pipeline import Context, verdict
from optkit.recipe import Recipe

NOT_COVERED = (
    "prefill and mixed batches",
    "more rows a step than the token class",
    "LoRA",
    "speculative decoding",
    "quantised KV caches",
)


def export(recipe: Recipe, context: Context) -> None:
    """Write `artifact/` and read it back through the loader that vLLM uses."""
    run, plan, kernel = context.run, context.results["plan"], context.results.get("kernel")
    if run is None or not recipe.export.vllm:
        return
    from optkit.emit.compile import dsl_version
    from optkit.export import manifest as m
    from optkit.export.scope import scope_of

    scope = scope_of(
        context.results["graph"],
        plan,
        context.results["source"].config_json,
        batch=recipe.decode.batch,
        context=recipe.decode.context,
        arch=recipe.hardware.arch,
        rows_per_request=recipe.decode.rows_per_request,
        pp_rank=recipe.parallel.stage,
    )
    facts = (
        None
        if kernel is None
        else m.Kernel(
            name=kernel.name,
            grid=(kernel.spec.grid, 1, 1),
            block=(kernel.threads, 1, 1),
            dynamic_smem=kernel.smem,
            params=tuple(m.Param(name=n, offset=o, size=s) for n, o, s in kernel.params),
        )
    )
    import torch

    artifact = m.write_artifact(
        run.path / "artifact",
        name=recipe.export.name or context.resolved.name,
        plan_json=plan.to_json(),
        recipe=context.resolved.yaml(),
        recipe_digest=context.resolved.digest,
        scope=scope,
        verdict=m.Verdict.parse(verdict(context.checks)),
        kernel=facts,
        cubin=None if kernel is None else kernel.cubin,
        versions=m.Versions(
            optkit=optkit.__version__, torch=torch.__version__, cutlass_dsl=None if kernel is None else dsl_version()
        ),
    )
    context.results["scope"] = scope.model_dump(mode="json")
    context.check(
        "export.artifact",
        True,
        value=len(artifact.manifest.files),
        reason="files of the artifact, read back through the loader that checks every digest",
    )


MAX_ABLATED_STAGES = 300
"""Plans up to this size are planned again without each choice (half a second for tiny K3); for 93 layers it would be a minute."""


def evidence(recipe: Recipe, context: Context) -> None:
    """evidence.json from every check of the run; the report and the simulated timeline beside it."""
    if context.run is None:
        return
    from optkit.plan.cost import Load
    from optkit.report.publish import publish

    load = Load(batch=min(recipe.decode.batch), context=recipe.decode.context)
    plan = context.results.get("plan")
    ablations: list[tuple[str, float, float]] = []
    if plan is not None and len(plan.stages) <= MAX_ABLATED_STAGES:
        from optkit.build import plan_choices
        from optkit.plan.ablate import ablate

        ablations = ablate(context.results["graph"], plan_choices(context.resolved), load)
    publish(
        context.run.path,
        recipe=context.resolved.name,
        recipe_digest=context.resolved.digest,
        command=context.repeat,
        checks=context.checks,
        numerics=context.results.get("numerics", ()),
        scope=context.results.get("scope", {}),
        not_covered=NOT_COVERED,
        plan=plan,
        load=load,
        ablations=ablations,
    )
    context.note(f"simulated: batch {load.batch}, {load.context} tokens of context")
