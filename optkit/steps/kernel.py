"""Plan to machine code: the step `emit`. It leaves "kernel" (emit.compile.Kernel), None where the recipe emits none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.pipeline import Context
from optkit.recipe import Recipe

if TYPE_CHECKING:
    from optkit.emit.compile import Kernel

PROBE_BODY = "gemv"
"""The stage body compiled for the other architectures: it holds the ring, the mma and the edges."""

MAX_PLANTED_STAGES = 300
"""Plans up to this size are proven again with every planted fault (a second for tiny K3); larger ones take minutes."""


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs: $OPTKIT_CACHE, by default ~/.cache/optkit."""
    return Path(os.environ.get("OPTKIT_CACHE") or "~/.cache/optkit").expanduser()


def emit(recipe: Recipe, context: Context) -> None:
    """Compile the kernel for the recipe's GPU, audit it, and compile a probe for the other architectures."""
    from dataclasses import replace

    from optkit.emit.compile import KernelSpec, compile_cached
    from optkit.verify import code_faults, faults
    from optkit.verify.audit import audit

    plan = context.results["plan"]
    spec = KernelSpec.of(plan)
    kernel = compile_cached(spec, recipe.hardware.arch, cache_folder() / "kernels", recipe.emit.line_info)
    context.results["kernel"] = kernel
    if context.run is not None:
        context.run.text("kernel.ptx", kernel.ptx)
    context.check(
        "emit.kernel",
        True,
        value=len(kernel.cubin),
        reason=f"{kernel.arch}: {len(spec.bodies)} stage bodies for "
        f"{len(plan.stages)} stages, {_compiled(kernel)}",
    )
    limit = recipe.hardware.smem_kib * 1024
    context.check(
        "emit.shared_memory",
        kernel.smem <= limit,
        value=kernel.smem,
        threshold=limit,
        reason="dynamic shared memory of the compiled kernel, bytes",
    )
    context.take(audit(kernel.cubin, plan))
    if len(plan.stages) <= MAX_PLANTED_STAGES:
        context.take([faults.catch_rate(plan), code_faults.catch_rate(kernel.cubin)])
    for arch in recipe.emit.probe_archs:
        probe = compile_cached(replace(spec, bodies=(PROBE_BODY,)), arch, cache_folder() / "kernels", line_info=False)
        context.check(
            f"emit.probe.{arch}",
            True,
            value=len(probe.cubin),
            reason=f"the {PROBE_BODY} stage compiles for {arch}, {_compiled(probe)}",
        )
    context.note(f"{kernel.arch} cubin of {len(kernel.cubin) // 1024} KiB, {kernel.smem} bytes of shared memory")


def _compiled(kernel: Kernel) -> str:
    return f"{kernel.seconds:.1f} s to compile" + (", kept from an earlier run" if kernel.cached else "")
