"""Planted faults in compiled code: the kernel's own SASS with one instruction changed, as a compiler or an edit might.

Each must turn its check of the audit red. The fault is made in the disassembly, so it can be planted in any kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from optkit.checks import Check
from optkit.verify import access as A
from optkit.verify import sass
from optkit.verify.audit import MEMORY, audit_code

Code = list[sass.Instruction]


@dataclass(frozen=True)
class CodeFault:
    """`make` changes a copy of the code, False if there is nothing to break; the check `red` must then fail."""

    name: str
    red: str
    make: Callable[[Code, dict[str, list[int]]], bool]


def _opcode(code: Code, k: int, old: str, new: str) -> None:
    code[k] = replace(code[k], opcode=code[k].opcode.replace(old, new))


def weak_load(code: Code, at: dict[str, list[int]]) -> bool:
    """The strong load of an activation becomes a plain one."""
    for k in at.get("ld_act", [])[-1:]:
        _opcode(code, k, ".STRONG.GPU", "")
        return True
    return False


def constant_load(code: Code, at: dict[str, list[int]]) -> bool:
    """It becomes a non-coherent one."""
    for k in at.get("ld_act", [])[:1]:
        _opcode(code, k, ".STRONG.GPU", ".CONSTANT")
        return True
    return False


def weak_store(code: Code, at: dict[str, list[int]]) -> bool:
    """The strong store of an activation becomes a plain one."""
    for k in (at.get("st_act") or at.get("st_tag") or [])[:1]:
        _opcode(code, k, ".STRONG.GPU", "")
        return True
    return False


def stray_access(code: Code, at: dict[str, list[int]]) -> bool:
    """An access from outside the helper file."""
    for k in at.get("ld_act", [])[:1]:
        code[k] = replace(code[k], frames=(("elsewhere.py", 1),))
        return True
    return False


def no_wait(code: Code, at: dict[str, list[int]]) -> bool:
    """No poll is left: the waits are gone."""
    polls = [k for c in ("ld_sync", "ld_tag", "ld_mail") for k in at.get(c, [])]
    for k in polls:
        code[k] = replace(code[k], opcode="MOV", operands="R0, R0")
    return bool(polls) and bool(at.get("ld_act"))


def early_load(code: Code, at: dict[str, list[int]]) -> bool:
    """The first activation load is made at the kernel's start, in place of its first instruction."""
    for k in at.get("ld_act", [])[:1]:
        code[0] = replace(code[k], offset=code[0].offset, predicate="")
        return True
    return False


def no_invalidation(code: Code, at: dict[str, list[int]]) -> bool:
    """Acquires no longer drop L1."""
    hits = [k for k, i in enumerate(code) if i.parts[:2] == ("CCTL", "IVALL")]
    for k in hits:
        code[k] = replace(code[k], opcode="NOP", operands="")
    return bool(hits) and bool(at.get("ld_act"))


def no_membar(code: Code, at: dict[str, list[int]]) -> bool:
    """Releases no longer wait for the stores before them."""
    hits = [k for k, i in enumerate(code) if i.parts[0] == "MEMBAR"]
    for k in hits:
        code[k] = replace(code[k], opcode="NOP", operands="")
    return bool(hits)


def no_barrier(code: Code, at: dict[str, list[int]]) -> bool:
    """The one thread that releases no longer waits for the other threads of its CTA."""
    hits = [k for k, i in enumerate(code) if i.parts[:2] == ("BAR", "SYNC")]
    for k in hits:
        code[k] = replace(code[k], opcode="NOP", operands="")
    return bool(hits) and bool(at.get("red_sync"))


FAULTS: tuple[CodeFault, ...] = (
    CodeFault("weak_load", "audit.access", weak_load),
    CodeFault("constant_load", "audit.access", constant_load),
    CodeFault("weak_store", "audit.access", weak_store),
    CodeFault("stray_access", "audit.access", stray_access),
    CodeFault("no_wait", "audit.guarded", no_wait),
    CodeFault("early_load", "audit.guarded", early_load),
    CodeFault("no_invalidation", "audit.fences", no_invalidation),
    CodeFault("no_membar", "audit.fences", no_membar),
    CodeFault("no_barrier", "audit.fences", no_barrier),
)


def plant(cubin: bytes, memory: Path = MEMORY) -> list[tuple[CodeFault, bool]]:
    """(fault, caught) for each fault that the first kernel of the cubin has room for. Raises DisassemblyError."""
    f = sass.disassemble(cubin)[0]
    table = A.helpers(memory)
    at: dict[str, list[int]] = {}
    for k, i in enumerate(f.code):
        h = A.helper_of(i, memory, table) if A.is_access(i) else None
        if h is not None and h.klass:
            at.setdefault(h.klass, []).append(k)
    out = []
    for fault in FAULTS:
        code = list(f.code)
        if fault.make(code, at):
            checks = audit_code([replace(f, code=tuple(code))], memory)
            out.append((fault, any(c.name == fault.red and c.status == "fail" for c in checks)))
    return out


def catch_rate(cubin: bytes, memory: Path = MEMORY, repeat: str = "") -> Check:
    """Share of the planted faults that the audit catches; everything below 1 fails."""
    try:
        results = plant(cubin, memory)
    except sass.DisassemblyError as e:
        return Check("audit.planted_faults", "fail", None, 1.0, str(e), repeat)
    missed = [f.name for f, caught in results if not caught]
    rate = 1 - len(missed) / max(len(results), 1)
    good = bool(results) and not missed
    reason = (
        f"missed: {', '.join(missed)}" if missed else f"{len(results)} of {len(FAULTS)} faults planted in this kernel"
    )
    return Check("audit.planted_faults", "pass" if good else "fail", rate, 1.0, reason, repeat)
