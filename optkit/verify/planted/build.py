"""Compiles a kernel from changed device sources, and keeps what the audit said by digest of sources, specification, compiler.

`compile_kernel` imports `optkit.emit.kernels`. Here that package is looked for first in a folder with the changed copy, and
forgotten again afterwards, so that every fault is compiled by the very code that compiles the real kernel.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from optkit.verify.audit import audit
from optkit.verify.planted.device_faults import Sources
from optkit.verify.table import KERNELS

if TYPE_CHECKING:
    from optkit.emit.compile import Kernel, KernelSpec

PACKAGE = "optkit.emit.kernels"


def _forget() -> None:
    for name in [m for m in sys.modules if m == PACKAGE or m.startswith(PACKAGE + ".")]:
        del sys.modules[name]
    emit = sys.modules.get("optkit.emit")
    if emit is not None and hasattr(emit, "kernels"):
        del emit.kernels


@contextmanager
def changed(sources: Sources) -> Iterator[Path]:
    """A folder `kernels` with these sources, from which optkit.emit.kernels is imported meanwhile."""
    import optkit.emit

    with tempfile.TemporaryDirectory(prefix="optkit-planted-") as tmp:
        folder = Path(tmp) / "kernels"
        folder.mkdir()
        for name, text in sources.items():
            (folder / name).write_text(text)
        kept = list(optkit.emit.__path__)
        _forget()
        optkit.emit.__path__[:] = [tmp, *kept]
        try:
            yield folder
        finally:
            optkit.emit.__path__[:] = kept
            _forget()


def compiled(sources: Sources, spec: KernelSpec, arch: str = "sm_90a") -> tuple[Kernel, Path]:
    """The kernel of changed sources, with line information. Raises RuntimeError where it does not compile."""
    from optkit.emit.compile import compile_kernel

    with changed(sources) as folder:
        return compile_kernel(spec, arch), folder


def key_of(sources: Sources, spec: KernelSpec, arch: str) -> str:
    """Digest of all that decides what the audit says, the audit's own sources included."""
    from optkit.emit.compile import dsl_version

    h = hashlib.sha256(
        json.dumps([asdict(spec), arch, dsl_version(), sorted(sources.items())], sort_keys=True).encode()
    )
    verify = Path(__file__).parent.parent
    for name in ("access.py", "audit.py", "cfg.py", "elf.py", "sass.py"):
        h.update((verify / name).read_bytes())
    h.update((KERNELS.parent / "layout.py").read_bytes())
    return h.hexdigest()[:32]


def audited(sources: Sources, spec: KernelSpec, cache: Path | None = None, arch: str = "sm_90a") -> set[str]:
    """Checks of the audit that are red for a kernel of these sources. A kernel that does not compile is "emit.kernel"."""
    at = None if cache is None else cache / f"{key_of(sources, spec, arch)}.json"
    if at is not None and at.exists():
        return set(json.loads(at.read_text()))
    from optkit.emit.compile import compile_kernel

    with changed(sources) as folder:
        try:
            kernel = compile_kernel(spec, arch)
        except RuntimeError:
            return {"emit.kernel"}
        red = {c.name for c in audit(kernel.cubin, memory=folder / "memory.py") if c.status == "fail"}
    if at is not None:
        at.parent.mkdir(parents=True, exist_ok=True)
        tmp = at.with_suffix(f".{os.getpid()}")
        tmp.write_text(json.dumps(sorted(red)))
        tmp.replace(at)
    return red
