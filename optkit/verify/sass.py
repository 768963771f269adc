"""Disassembly of a cubin with nvdisasm (package nvidia-cuda-nvdisasm; no GPU needed) and its text as data.

The kernel must be compiled with line information: every instruction then carries the source frames that nvdisasm
prints above it, innermost first. CuTe DSL 4.8 attributes inline PTX to the call's line in the innermost Python helper
and writes no "inlined at" chain; chains are read where a compiler writes them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path


class DisassemblyError(RuntimeError):
    """nvdisasm is missing, refuses the cubin, or prints what this parser does not know."""


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction. `predicate` "" or e.g. "@!P0"; `labels` are the labels among its operands."""

    offset: int
    predicate: str
    opcode: str
    operands: str
    labels: tuple[str, ...]
    frames: tuple[tuple[str, int], ...]

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Opcode and modifiers: ("LDG", "E", "128", "STRONG", "GPU")."""
        return tuple(self.opcode.split("."))

    def __str__(self) -> str:
        guard = f"{self.predicate} " if self.predicate else ""
        return f"/*{self.offset:04x}*/ {guard}{self.opcode} {self.operands}".rstrip()


@dataclass(frozen=True)
class Function:
    """One kernel: instructions in address order and the index each label stands at."""

    name: str
    code: tuple[Instruction, ...]
    labels: dict[str, int]


def find_nvdisasm() -> Path:
    """Path of nvdisasm: $NVDISASM, the installed package nvidia-cuda-nvdisasm, $CUDA_HOME, or PATH.

    Raises DisassemblyError that says what to install.
    """
    tried: list[Path] = []
    if os.environ.get("NVDISASM"):
        tried.append(Path(os.environ["NVDISASM"]))
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        tried += sorted(Path(root).glob("cu*/bin/nvdisasm"), reverse=True) + sorted(Path(root).glob("*/bin/nvdisasm"))
    if os.environ.get("CUDA_HOME"):
        tried.append(Path(os.environ["CUDA_HOME"]) / "bin" / "nvdisasm")
    on_path = shutil.which("nvdisasm")
    tried += [Path(on_path)] if on_path else []
    for path in tried:
        if path.is_file():
            return path
    raise DisassemblyError("nvdisasm not found: install nvidia-cuda-nvdisasm (>= 13), or name it in $NVDISASM")


@lru_cache(maxsize=8)
def disassemble(cubin: bytes) -> tuple[Function, ...]:
    """All kernels of a cubin, with source lines. Raises DisassemblyError."""
    tool = find_nvdisasm()
    with tempfile.TemporaryDirectory() as d:
        path = Path(d) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run([tool, "-gi", "-c", path], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise DisassemblyError(f"nvdisasm: {(done.stderr or done.stdout).strip().splitlines()[-1:] or done.returncode}")
    return tuple(parse(done.stdout))


_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_FRAME = re.compile(r'^\s*//## File "([^"]+)", line (\d+)(?: inlined at "([^"]+)", line (\d+))?')
_LABEL = re.compile(r"^([.\w$]+):\s*$")
_TARGET = re.compile(r"`\(([.\w$]+)\)")
_TARGETS = re.compile(r'BRANCH_TARGETS\s+([^"]+)"')


def parse(text: str) -> list[Function]:
    """nvdisasm's text as functions. Raises DisassemblyError if a code line cannot be read."""
    out: list[Function] = []
    name = ""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    frames: tuple[tuple[str, int], ...] = ()
    fresh = True  # the next frame line starts a new location

    def close() -> None:
        if name and code:
            out.append(Function(name, tuple(code), dict(labels)))

    for line in text.splitlines():
        if line.strip().startswith(".section"):
            close()
            m = re.search(r"\.text\.([\w$.]+)", line)
            name, code, labels, frames, fresh = (m.group(1) if m else ""), [], {}, (), True
            continue
        if m := _FRAME.match(line):
            here = [(m.group(1), int(m.group(2)))] + ([(m.group(3), int(m.group(4)))] if m.group(3) else [])
            frames = tuple(here) if fresh else (*frames, *(f for f in here if f not in frames))
            fresh = False
        elif m := _INSTRUCTION.match(line):
            rest = line[m.end(3) :]
            many = _TARGETS.search(rest)
            targets = tuple(_TARGET.findall(rest)) + (tuple(re.findall(r"\.L_x_\d+", many.group(1))) if many else ())
            code.append(Instruction(int(m.group(1), 16), m.group(2) or "", m.group(3), m.group(4), targets, frames))
            fresh = True
        elif m := _LABEL.match(line):
            labels[m.group(1)] = len(code)
        elif name and re.match(r"^\s*/\*[0-9a-f]{4,}\*/\s+\S", line):
            raise DisassemblyError(f"cannot read this line of nvdisasm: {line.strip()}")
    close()
    return out
