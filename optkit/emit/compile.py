"""Compile the kernel of a Plan to PTX and cubin, on a machine without a GPU. The only host file that imports CuTe DSL.

The kernel depends on the Plan only through `KernelSpec`: grid, ring slots, bytes of the x area, bodies, tagged words.
Everything else is in the descriptor table, so Plans of any depth share a cubin.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from optkit.emit import layout as L
from optkit.emit.lower import bodies_of, x_bytes
from optkit.plan.types import Plan

KERNEL_PREFIX = "optkit_decode"
PARAMS = (("table", 0, 8), ("rt", 8, 8), ("n", 16, 4), ("lo", 20, 4), ("hi", 24, 4))


@dataclass(frozen=True)
class KernelSpec:
    """What a cubin is specialised on."""

    grid: int
    slots: int
    x_bytes: int
    bodies: tuple[str, ...]
    tagged: bool

    @classmethod
    def of(cls, plan: Plan) -> KernelSpec:
        """The specification of a Plan's kernel."""
        return cls(
            plan.sms,
            plan.ring_slots,
            x_bytes(plan),
            bodies_of(plan),
            any(b.layout == "tagged" and b.klass != "mailbox" for b in plan.buffers),
        )


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel and its launch facts.

    `smem`: dynamic shared memory, bytes. `seconds`: what compiling took; `cached`: in an earlier run.
    """

    spec: KernelSpec
    arch: str
    name: str
    smem: int
    threads: int
    cubin: bytes
    ptx: str
    seconds: float
    cached: bool = field(default=False, compare=False)

    @property
    def params(self) -> tuple[tuple[str, int, int], ...]:
        """(name, byte offset, size) of the kernel's parameters, as megakernel.py declares them."""
        return PARAMS

    @property
    def sha256(self) -> str:
        """Digest of the cubin."""
        return hashlib.sha256(self.cubin).hexdigest()


def compile_kernel(spec: KernelSpec, arch: str = "sm_90a", line_info: bool = True) -> Kernel:
    """Compile for `arch`. Raises RuntimeError with the DSL's or ptxas's own words.

    Line information maps every access in SASS to its helper, which the audit needs; it adds no instruction.
    """
    import cutlass.cute as cute
    from cutlass import Int32, Int64
    from cutlass.cute.runtime import make_fake_stream

    from optkit.emit.kernels.megakernel import Megakernel

    start = time.perf_counter()
    kernel = Megakernel(spec.grid, spec.slots, spec.x_bytes, spec.bodies, spec.tagged)
    kernel.kernel.set_name_prefix(KERNEL_PREFIX, remove_cutlass_symbol=True, keep_mangled_name=False)
    with tempfile.TemporaryDirectory(prefix="optkit-emit-") as tmp:
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {tmp}"
        try:
            cute.compile(
                kernel,
                Int64(0),
                Int64(0),
                Int32(0),
                Int32(0),
                Int32(0),
                make_fake_stream(),
                options=options + (" --generate-line-info" if line_info else ""),
            )
        except Exception as e:  # the DSL raises many kinds; all mean that this specification cannot be built
            raise RuntimeError(f"emit: {arch}: the kernel does not compile: {e}") from e
        cubin = next(Path(tmp).glob("*.cubin")).read_bytes()
        ptx = next(Path(tmp).glob("*.ptx")).read_text()
    name = next(line.split()[2].split("(")[0] for line in ptx.splitlines() if line.startswith(".visible .entry"))
    return Kernel(spec, arch, name, smem_of(spec), L.THREADS, cubin, ptx, time.perf_counter() - start)


def smem_of(spec: KernelSpec) -> int:
    """Dynamic shared memory of the kernel: the allocations of megakernel.py in order, each at its alignment."""
    size = 0
    for nbytes, align in (
        (spec.slots * L.SLOT, 1024),
        (spec.x_bytes, 128),
        (L.RED_BYTES, 128),
        (2 * L.DESC_WORDS * 8, 16),
        (L.MISC_BYTES, 16),
        (2 * spec.slots * 8, 16),
    ):
        size = -(-size // align) * align + nbytes
    return size


def compile_cached(spec: KernelSpec, arch: str, cache: Path, line_info: bool = True) -> Kernel:
    """`compile_kernel`, kept in `cache` under the digest of specification, device sources and compiler version."""
    import json

    key = hashlib.sha256(
        json.dumps([asdict(spec), arch, line_info, source_digest(), dsl_version()], sort_keys=True).encode()
    )
    at = cache / key.hexdigest()[:32]
    files = (at / "kernel.cubin", at / "kernel.ptx", at / "facts.json")
    with suppress(OSError, ValueError, KeyError, TypeError):  # absent or damaged: compiled again
        facts = json.loads(files[2].read_text())
        cubin, ptx = files[0].read_bytes(), files[1].read_bytes()
        if facts["sha256"] == hashlib.sha256(cubin + ptx).hexdigest():
            return Kernel(spec, arch, facts["name"], facts["smem"], facts["threads"], cubin, ptx.decode(), facts["seconds"], cached=True)
    k = compile_kernel(spec, arch, line_info)
    ptx = k.ptx.encode()
    digest = hashlib.sha256(k.cubin + ptx).hexdigest()
    facts = {"name": k.name, "smem": k.smem, "threads": k.threads, "seconds": k.seconds, "sha256": digest}
    with suppress(OSError):  # a cache that cannot be written only costs the time
        at.mkdir(parents=True, exist_ok=True)
        for f, data in zip(files, (k.cubin, ptx, json.dumps(facts).encode()), strict=True):
            tmp = f.with_suffix(f".{os.getpid()}")
            tmp.write_bytes(data)
            tmp.replace(f)
    return k


def source_digest() -> str:
    """Digest of all device sources and the layout."""
    here = Path(__file__).parent
    h = hashlib.sha256()
    for f in sorted([here / "layout.py", *(here / "kernels").glob("*.py")]):
        h.update(f.name.encode() + f.read_bytes())
    return h.hexdigest()


def dsl_version() -> str:
    """Version of the installed CuTe DSL."""
    from importlib.metadata import version

    return version("nvidia-cutlass-dsl")
