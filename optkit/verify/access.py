"""Which SASS each memory class may become (docs/design.md, section 2), and which class a SASS access belongs to.

The class of an access is the prefix of the helper function whose source lines it comes from, in the one file that may
touch global memory. What PTX an access was written as decides nothing here; what it became in SASS does.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path, PurePath

from optkit.verify.sass import Instruction

LOADS = ("LDG", "LDGMC")
STORES = ("STG",)
ATOMICS = ("RED", "REDG", "ATOM", "ATOMG", "REDGMC")
BULK = ("UBLKCP", "UBLKPF", "UBLKRED", "LDGSTS", "UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF")
GENERIC = ("LD", "ST")
LOCAL = ("LDL", "STL")
DATA_STORES = ("st_act", "st_state", "st_tag", "st_mail")
"""Classes of stores that a release must come after."""


@dataclass(frozen=True)
class Rule:
    """What the accesses of a class may look like. `scopes`: allowed scopes of a STRONG access; "" allows a weak one."""

    kinds: tuple[str, ...]
    scopes: tuple[str, ...]
    constant: bool = False
    width: str = ""  # required access width in bits, for words that must be one access

    def problem(self, i: Instruction) -> str:
        """Why the instruction does not fit, or ""."""
        if i.parts[0] not in self.kinds:
            return f"{i.parts[0]} is none of {', '.join(self.kinds)}"
        if i.parts[0] in BULK:
            return ""
        if "CONSTANT" in i.parts:
            return "" if self.constant else "a non-coherent (CONSTANT) load may be moved above a wait"
        scope = scope_of(i)
        if scope not in self.scopes:
            want = " or ".join(f"STRONG.{s}" if s else "weak" for s in self.scopes)
            return f"{'a weak access' if not scope else 'scope ' + scope}, expected {want}"
        if self.width and self.width not in i.parts:
            return f"expected one access of {self.width} bits"
        return ""


GPU = ("GPU", "SYS")
RULES: dict[str, Rule] = {
    "ld_weight": Rule(LOADS, ("", *GPU), constant=True),
    "ld_table": Rule(LOADS, ("", *GPU), constant=True),
    "ld_input": Rule(LOADS, ("", *GPU)),
    "ld_act": Rule(LOADS, GPU),
    "st_act": Rule(STORES, GPU),
    "ld_state": Rule(LOADS, GPU),
    "st_state": Rule(STORES, GPU),
    "ld_tag": Rule(LOADS, GPU, width="128"),
    "st_tag": Rule(STORES, GPU, width="128"),
    "ld_mail": Rule(LOADS, ("SYS",), width="128"),
    "st_mail": Rule(STORES, ("SYS",), width="128"),
    "ld_sync": Rule(LOADS, GPU),
    "st_sync": Rule(STORES, GPU),
    "red_sync": Rule(("RED", "REDG", "ATOMG"), GPU),
    "atom_sync": Rule(("ATOMG",), GPU),
    "bulk_weight": Rule(("UBLKCP", "UBLKPF"), ()),
    "bulk_table": Rule(("UBLKCP", "UBLKPF"), ()),
    "bulk_state": Rule(("UBLKCP",), ()),
    "bulk_act": Rule(("UBLKCP",), ()),
}
GUARDED = ("ld_act", "ld_state", "bulk_act", *DATA_STORES)
"""Classes that only a wait allows: loads (RAW), and stores too (WAR). State may be read earlier by bulk copy only."""
QUIET = ("ld_sync", "st_sync", "red_sync", "atom_sync", "ld_tag", "ld_mail", "ld_table", "ld_weight", "ld_input")
"""Classes that code which only waits may contain."""


def scope_of(i: Instruction) -> str:
    """ "GPU", "SYS", "SM", "CTA" of a STRONG access, "" of a weak one."""
    if "STRONG" not in i.parts:
        return ""
    at = i.parts.index("STRONG")
    return i.parts[at + 1] if at + 1 < len(i.parts) else "?"


def is_access(i: Instruction) -> bool:
    """Whether the instruction touches global memory, or might (generic, local)."""
    return i.parts[0] in (*LOADS, *STORES, *ATOMICS, *BULK, *GENERIC, *LOCAL)


@dataclass(frozen=True)
class Helper:
    """One function of the memory helper file: its lines and the PTX it is written with."""

    name: str
    first: int
    last: int
    ptx: str

    @property
    def klass(self) -> str:
        """Longest rule that prefixes the name, or ""."""
        return max((r for r in RULES if self.name == r or self.name.startswith(r + "_")), key=len, default="")

    @property
    def acquires(self) -> bool:
        return self.klass in ("ld_sync", "atom_sync") and (
            ".acquire" in self.ptx or ".acq_rel" in self.ptx or "acquire" in self.name
        )

    @property
    def releases(self) -> bool:
        return self.klass in ("red_sync", "st_sync", "atom_sync") and (
            ".release" in self.ptx or ".acq_rel" in self.ptx or "release" in self.name
        )


def helpers(memory: Path) -> list[Helper]:
    """The functions of the helper file, by its syntax tree. Raises OSError or SyntaxError."""
    tree = ast.parse(memory.read_text(), str(memory))
    out = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            text = "".join(
                n.value
                for n in ast.walk(node)
                if isinstance(n, ast.Constant)
                and isinstance(n.value, str)
                and n.value != ast.get_docstring(node, clean=False)
            )
            out.append(Helper(node.name, first, node.end_lineno or node.lineno, text))
    return out


def helper_of(i: Instruction, memory: Path, table: list[Helper]) -> Helper | None:
    """The helper an instruction comes from: the innermost source frame that lies in the helper file.

    Files are compared by their last two path components: a cubin keeps the paths of the machine that compiled it.
    """
    tail = memory.resolve().parts[-2:]
    for file, line in i.frames:
        if PurePath(file).parts[-2:] == tail:
            return next((h for h in table if h.first <= line <= h.last), None)
    return None
