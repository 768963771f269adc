"""Control flow of one SASS function: basic blocks, edges, natural loops.

Errs on the side of more paths: a label that any instruction names (BSSY, WARPSYNC.COLLECTIVE, CALL) counts as a place
where control may go, a returning call may come back after each call, and a branch is unconditional only if it has
neither predicate nor condition operand.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

import networkx as nx  # type: ignore[import-untyped]

from optkit.verify.sass import Function

ENDS = ("EXIT", "BRA", "BRX", "JMP", "JMX", "RET", "BSYNC", "KILL", "BREAK", "CALL", "WARPSYNC", "BRXU", "JMXU", "BPT")


@dataclass(frozen=True)
class Graph:
    """Blocks are half-open ranges of instruction indices; block 0 is the entry."""

    blocks: tuple[tuple[int, int], ...]
    succ: tuple[tuple[int, ...], ...]
    pred: tuple[tuple[int, ...], ...]
    block_of: tuple[int, ...]  # block of each instruction

    def loops(self) -> list[frozenset[int]]:
        """Natural loops, one per back edge, smallest first."""
        g = nx.DiGraph((b, s) for b, ss in enumerate(self.succ) for s in ss)
        g.add_node(0)
        idom = nx.immediate_dominators(g, 0)
        out = []
        for b, ss in enumerate(self.succ):
            for head in ss:
                if b in idom and _dominates(idom, head, b):
                    body, todo = {head, b}, [b] if b != head else []
                    while todo:
                        for p in self.pred[todo.pop()]:
                            if p not in body and p in idom:
                                body.add(p)
                                todo.append(p)
                    out.append(frozenset(body))
        return sorted(out, key=len)

    def reach(
        self, start: int, stop: frozenset[int] = frozenset(), cut: frozenset[tuple[int, int]] = frozenset()
    ) -> set[int]:
        """Blocks reachable from `start` (itself included) without entering `stop` and without the edges `cut`."""
        if start in stop:
            return set()
        seen, todo = {start}, [start]
        while todo:
            b = todo.pop()
            for s in self.succ[b]:
                if s not in seen and s not in stop and (b, s) not in cut:
                    seen.add(s)
                    todo.append(s)
        return seen


def _dominates(idom: dict[int, int], a: int, b: int) -> bool:
    while b != a:
        up = idom.get(b, b)
        if up in (b, None):
            return False
        b = up
    return True


def build(f: Function) -> Graph:
    """The control-flow graph of a function."""
    n = len(f.code)
    named = {f.labels[t] for i in f.code for t in i.labels if t in f.labels}
    leaders = {0, *(x for x in named if x < n)}
    for k, i in enumerate(f.code):
        if i.parts[0] in ENDS and k + 1 < n:
            leaders.add(k + 1)
    starts = sorted(leaders)
    blocks = tuple(zip(starts, [*starts[1:], n], strict=True))
    block_at = {s: b for b, (s, _) in enumerate(blocks)}
    block_of = [b for b, (s, e) in enumerate(blocks) for _ in range(s, e)]
    returns = tuple(block_at[k + 1] for k, i in enumerate(f.code) if i.parts[0] == "CALL" and k + 1 < n)
    reconverge = _reconvergence(f)
    succ: list[tuple[int, ...]] = []
    for b, (_, end) in enumerate(blocks):
        last = f.code[end - 1]
        op = last.parts[0]
        to = {
            block_at[f.labels[t]]
            for k in range(blocks[b][0], end)
            for t in f.code[k].labels
            if t in f.labels and f.labels[t] < n and f.code[k].parts[0] != "BSSY"
        }
        falls = True
        if op in ("EXIT", "KILL"):
            falls = bool(last.predicate) or _has_condition(last.operands)
        elif op in ("BRA", "BRX", "JMP", "JMX", "BRXU", "JMXU"):
            falls = bool(last.predicate) or _has_condition(last.operands) or bool({"DIV", "CONV"} & set(last.parts))
        elif op == "RET":
            to |= set(returns)
            falls = bool(last.predicate)
        elif op in ("BSYNC", "BREAK"):
            to |= {block_at[x] for x in reconverge.get(end - 1, ()) if x in block_at}
        if falls and b + 1 < len(blocks):
            to.add(b + 1)
        succ.append(tuple(sorted(to)))
    pred: dict[int, list[int]] = defaultdict(list)
    for b, ss in enumerate(succ):
        for s in ss:
            pred[s].append(b)
    return Graph(blocks, tuple(succ), tuple(tuple(pred[b]) for b in range(len(blocks))), tuple(block_of))


def _has_condition(operands: str) -> bool:
    """Whether a branch has a predicate among its operands, as in `BRA !P0, `(.L_x_1)` or `BRA.U UP0, ...`."""
    return bool(re.match(r"!?U?P[0-9T]", operands))


def _reconvergence(f: Function) -> dict[int, tuple[int, ...]]:
    """Where a BSYNC may continue: the targets of the BSSY that set the same barrier register."""
    targets: dict[str, list[int]] = defaultdict(list)
    for i in f.code:
        if i.parts[0] == "BSSY" and i.labels:
            targets[i.operands.split(",")[0].strip()].append(f.labels.get(i.labels[0], -1))
    out: dict[int, tuple[int, ...]] = {}
    for k, i in enumerate(f.code):
        if i.parts[0] in ("BSYNC", "BREAK"):
            after = [t for t in targets[i.operands.split(",")[-1].strip()] if t > k]
            out[k] = (min(after),) if after else ()
    return out
