"""`audit(cubin)`: what the compiler made of the kernel, against the memory classes of docs/design.md, section 2.

Needs nvdisasm and no GPU. The cubin must be compiled with line information, and all global memory must be touched
through one helper file (emit/kernels/memory.py), each access inside the helper function of its class.

Rules: every access maps to a helper and has one of the forms of its class (access.py); a load or store of data is
reached only through a wait (loads: RAW, stores: WAR); an acquire drops L1 before the next data load; a release has a
fence between it and the data stores before it; a bulk copy of activations has a proxy fence; registers stay below the
declared ceiling, and nothing lives in local memory.

A *wait* is a loop around a poll (ld_sync with acquire, ld_tag, ld_mail) that touches no data: leaving it is what allows
a load. Where the number of waits is a run-time value, or one thread waits for its CTA, the branch around the waits
counts as passing them, if what it skips does nothing but wait. Not proven here: that it is the *right* wait (that is
the Plan's proof, proofs.py), and order inside one unrolled chain of several waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from optkit.checks import Check, from_findings
from optkit.plan.types import Plan
from optkit.verify import access as A
from optkit.verify import cfg, elf, sass

NAMES = ("audit.access", "audit.guarded", "audit.fences", "audit.registers", "audit.local_memory")
MEMORY = Path(__file__).parent.parent / "emit" / "kernels" / "memory.py"
"""The helpers of the megakernel; read as text, so that nothing of CuTe DSL is imported."""
Match = Callable[[sass.Instruction], bool]
REGISTER_FILE = 65536  # 32-bit registers of one SM, all GPUs since sm_35


def audit(
    cubin: bytes | Path, plan: Plan | None = None, memory: Path = MEMORY, ceiling: int | None = None, repeat: str = ""
) -> list[Check]:
    """Audit one cubin (all its kernels).

    `plan`: the largest register ceiling of its bodies is the kernel's (`ceiling` overrides it). `memory`: the helper
    file the kernel was compiled from. Never raises for a bad cubin: an unreadable one fails every check.
    """
    try:
        data = cubin.read_bytes() if isinstance(cubin, Path) else cubin
        figures = {r.name: r for r in elf.resources(data)}
        functions = sass.disassemble(data)
        table = A.helpers(memory)
    except (OSError, SyntaxError, elf.CubinError, sass.DisassemblyError) as e:
        return [Check(n, "fail", None, 0, f"nothing could be audited: {e}", repeat) for n in NAMES]
    limit = ceiling if ceiling is not None else max((s.regs for s in plan.stages), default=0) if plan else None
    kernels = [_Kernel(f, memory, table) for f in functions]
    return [
        *_code_checks(kernels, memory, repeat),
        _registers([figures[f.name] for f in functions], plan, limit, repeat),
        from_findings(
            "audit.local_memory",
            [x for k in kernels for x in k.local(figures[k.f.name])],
            "no stack frame, no spill, no local access",
            repeat,
        ),
    ]


def audit_code(functions: Sequence[sass.Function], memory: Path = MEMORY, repeat: str = "") -> list[Check]:
    """The three checks on instructions alone: access, guarded, fences."""
    table = A.helpers(memory)
    return _code_checks([_Kernel(f, memory, table) for f in functions], memory, repeat)


def _code_checks(kernels: list[_Kernel], memory: Path, repeat: str) -> list[Check]:
    classes: Counter[str] = sum((k.classes for k in kernels), Counter())
    seen = ", ".join(f"{n} {k}" for k, n in sorted(classes.items())) or "none"
    access = [x for k in kernels for x in k.access()]
    if not classes and not access:
        access = [f"the kernel touches no global memory through {memory.name}, or carries no line information"]
    return [
        from_findings("audit.access", access, f"every global access has a form of its class ({seen})", repeat),
        from_findings(
            "audit.guarded",
            [x for k in kernels for x in k.guarded()],
            f"{sum(classes[c] for c in A.GUARDED)} loads and stores of data, each behind a wait on every path",
            repeat,
        ),
        from_findings(
            "audit.fences",
            [x for k in kernels for x in k.fences()],
            "releases follow a CTA barrier and a membar, acquires drop L1, bulk copies of activations follow a proxy fence",
            repeat,
        ),
    ]


def _registers(figures: list[elf.Resources], plan: Plan | None, limit: int | None, repeat: str) -> Check:
    worst = max(figures, key=lambda r: r.registers)
    threads = worst.threads or (plan.threads if plan else 0)
    findings = []
    if limit is not None and worst.registers > limit:
        findings.append(f"{worst.name}: {worst.registers} registers, the bodies declare at most {limit}")
    if -(-worst.registers // 8) * 8 * threads > REGISTER_FILE:
        findings.append(f"{worst.name}: {worst.registers} registers x {threads} threads do not fit {REGISTER_FILE}")
    if plan and worst.threads and worst.threads != plan.threads:
        findings.append(f"{worst.name}: compiled for {worst.threads} threads, the Plan says {plan.threads}")
    return Check(
        "audit.registers",
        "fail" if findings else "pass",
        worst.registers,
        limit,
        "; ".join(findings) or "registers a thread, of the largest ceiling a body declares",
        repeat,
    )


def _cta_barrier(i: sass.Instruction) -> bool:
    return i.parts[:2] == ("BAR", "SYNC")


class _Kernel:
    """One kernel with the helper of every access."""

    def __init__(self, f: sass.Function, memory: Path, table: list[A.Helper]) -> None:
        self.f = f
        self.memory = memory
        self.graph = cfg.build(f)
        self.helper = {k: A.helper_of(i, memory, table) for k, i in enumerate(f.code) if A.is_access(i)}
        self.klass = {k: h.klass for k, h in self.helper.items() if h is not None and h.klass}
        self.classes = Counter(self.klass.values())
        self.quiet = [
            all(self.klass.get(k, "") in A.QUIET for k in range(s, e) if k in self.helper) for s, e in self.graph.blocks
        ]

    def _at(self, k: int) -> str:
        i = self.f.code[k]
        where = "no line information"
        if i.frames:
            file, line = i.frames[0]
            where = f"{Path(file).name}:{line}"
        h = self.helper.get(k)
        return f"{i} ({where}{', ' + h.name if h else ''})"

    def access(self) -> list[str]:
        """Accesses outside the helpers, or of a form their class forbids."""
        out = []
        for k, h in self.helper.items():
            i = self.f.code[k]
            if i.parts[0] in A.LOCAL:
                continue
            if i.parts[0] in A.GENERIC:
                out.append(f"{self._at(k)}: a generic access, whose memory class cannot be told")
            elif h is None:
                out.append(f"{self._at(k)}: a global access outside the helpers of {self.memory.name}")
            elif not h.klass:
                out.append(f"{self._at(k)}: a global access in {h.name}, which belongs to no memory class")
            elif problem := A.RULES[h.klass].problem(i):
                out.append(f"{self._at(k)}: class {h.klass}: {problem}")
        return out

    def local(self, r: elf.Resources) -> list[str]:
        """Local memory in use: a stack frame, spills, local loads and stores."""
        out = [f"{r.name}: stack frame of {max(r.frame, r.stack)} bytes a thread"] if r.frame or r.stack else []
        return out + [
            f"{self._at(k)}: a spill or local array" for k in self.helper if self.f.code[k].parts[0] in A.LOCAL
        ]

    # -- waits
    def _polls(self) -> list[int]:
        return [
            k
            for k, h in self.helper.items()
            if h and (h.klass in ("ld_tag", "ld_mail") or (h.klass == "ld_sync" and h.acquires))
        ]

    def _passed(self) -> frozenset[tuple[int, int]]:
        """Edges of the graph that are taken only after a wait: out of a wait loop, or around code that only waits."""
        g = self.graph
        loops = [loop for loop in g.loops() if all(self.quiet[b] for b in loop)]
        waits: set[frozenset[int]] = set()
        for k in self._polls():
            around = next((loop for loop in loops if g.block_of[k] in loop), None)
            if around is not None:
                waits.add(around)
        cut = {(b, s) for loop in waits for b in loop for s in g.succ[b] if s not in loop}
        for b, ss in enumerate(g.succ):
            if len(ss) < 2 or any(b in loop for loop in waits):
                continue
            for into in ss:
                for around_ in ss:
                    if into != around_ and self._only_waits(into, frozenset((b, around_)), waits):
                        cut.add((b, around_))
        return frozenset(cut)

    def _only_waits(self, start: int, ends: frozenset[int], waits: set[frozenset[int]]) -> bool:
        """Whether the code from `start` up to `ends` touches no data, holds a whole wait loop, and gets to an end."""
        if start in ends or not self.quiet[start]:
            return False
        region, todo, joins = {start}, [start], False
        while todo:
            for s in self.graph.succ[todo.pop()]:
                if s in ends:
                    joins = True
                elif not self.quiet[s]:
                    return False
                elif s not in region:
                    region.add(s)
                    todo.append(s)
        return joins and any(loop <= region for loop in waits)

    def guarded(self) -> list[str]:
        """Loads and stores of data that some path reaches without a wait."""
        free = self.graph.reach(0, cut=self._passed())
        return [
            f"{self._at(k)}: reached without a wait before it"
            for k, c in self.klass.items()
            if c in A.GUARDED and self.graph.block_of[k] in free
        ]

    # -- fences
    def fences(self) -> list[str]:
        """Acquires without invalidation, releases without membar, bulk copies of activations without proxy fence."""
        out = []
        for k, h in self.helper.items():
            if h and h.acquires:
                hit = self._forward(k, lambda i: i.parts[:2] == ("CCTL", "IVALL"))
                if hit is not None:
                    out.append(f"{self._at(k)}: no CCTL.IVALL between this acquire and {self._at(hit)}")
            if (
                h
                and h.releases
                and self._unfenced(
                    k, lambda i: i.parts[0] == "MEMBAR" and bool({"GPU", "SYS"} & set(i.parts)), A.DATA_STORES
                )
            ):
                out.append(f"{self._at(k)}: a release without a gpu-scope MEMBAR between it and the stores before it")
            if h and h.releases and h.klass == "red_sync" and self._unfenced(k, _cta_barrier, A.GUARDED):
                out.append(f"{self._at(k)}: one thread releases for its CTA, and no CTA barrier lies between it and the data")
            if (
                h
                and h.klass == "bulk_act"
                and self._unfenced(k, lambda i: i.opcode.startswith("FENCE.VIEW.ASYNC"), ("ld_sync",))
            ):
                out.append(f"{self._at(k)}: a bulk copy of activations without fence.proxy.async after its wait")
        return out

    def _holds(self, k: int, at: int) -> bool:
        """Whether the fence at index `at` runs whenever the access k does."""
        return self.f.code[at].predicate in ("", self.f.code[k].predicate)

    def _forward(self, k: int, fence: Match) -> int | None:
        """An activation load reached from k before any fence."""
        g = self.graph
        todo, seen = [(k + 1, g.blocks[g.block_of[k]][1])], set()
        while todo:
            at, end = todo.pop()
            stopped = False
            for j in range(at, end):
                if fence(self.f.code[j]) and self._holds(k, j):
                    stopped = True
                    break
                if self.klass.get(j) in ("ld_act", "ld_state", "bulk_act"):
                    return j
            if not stopped:
                for s in g.succ[g.block_of[end - 1]]:
                    if s not in seen:
                        seen.add(s)
                        todo.append(g.blocks[s])
        return None

    def _unfenced(self, k: int, fence: Match, until: tuple[str, ...]) -> bool:
        """Whether a path backwards from k meets an access of `until`, or the entry, before a fence."""
        g = self.graph
        todo, seen = [(g.blocks[g.block_of[k]][0], k)], set()
        while todo:
            start, at = todo.pop()
            met = False
            for j in range(at - 1, start - 1, -1):
                if fence(self.f.code[j]) and self._holds(k, j):
                    met = True
                    break
                if self.klass.get(j, "") in until:
                    return True
            if met:
                continue
            b = g.block_of[start]
            if b == 0:
                return True
            for p in g.pred[b]:
                if p not in seen:
                    seen.add(p)
                    todo.append(g.blocks[p])
        return False
