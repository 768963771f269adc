"""Faults of the device source: text edits of a copy of emit/kernels, compiled for the GPU on this machine and audited.

What the audit cannot see (a body's arithmetic, which wait it is, when a signal is given) is marked `hardware`: the edit is
compiled here, and the GPU's own gates must turn red (bench/planted.py). Base: the sources by file name; product: changed
sources.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from optkit.verify.planted.registry import Fault, Site
from optkit.verify.table import KERNELS

Sources = dict[str, str]


@dataclass(frozen=True)
class Edit:
    """`old` -> `new` in one function (or anywhere, with within = "") of a file: the first place where it stands."""

    file: str
    within: str
    old: str
    new: str

    def apply(self, sources: Sources) -> Sources:
        """The changed sources. Raises ValueError where the text is not there: the source has moved on."""
        text = sources[self.file]
        start = text.find(f"def {self.within}(") if self.within else 0
        end = text.find("\n@cute.jit", start + 1) if self.within else len(text)
        following = text.find("\ndef ", start + 1) if self.within else -1
        end = min(x for x in (end if end >= 0 else len(text), following if following >= 0 else len(text)))
        at = text.find(self.old, max(start, 0), end)
        length = len(self.old)
        if at < 0:  # the same tokens, broken into other lines by a formatter
            loose = re.compile(r"\s*".join(re.escape(t) for t in self.old.split())).search(text, max(start, 0), end)
            at, length = (loose.start(), loose.end() - loose.start()) if loose else (-1, 0)
        if start < 0 or at < 0:
            raise ValueError(f"{self.file}, {self.within or 'file'}: {self.old!r} is not there")
        return {**sources, self.file: text[:at] + self.new + text[at + length :]}


@cache
def sources(folder: Path = KERNELS) -> tuple[tuple[str, str], ...]:
    """(file name, text) of the device sources."""
    return tuple((p.name, p.read_text()) for p in sorted(folder.glob("*.py")))


def edits(*all_edits: Edit) -> Callable[[Sources], Iterable[Site]]:
    """One site: these edits together."""

    def make(base: Sources) -> Sources:
        for e in all_edits:
            base = e.apply(base)
        return base

    def sites(base: Sources) -> list[Site]:
        return [(f"{all_edits[0].file}: {all_edits[0].within}", lambda: make(base))]

    sites.first = all_edits[0]  # type: ignore[attr-defined]  # what the GPU bundle asks: which body shows it?
    return sites


def bodies_for(fault: Fault) -> tuple[str, ...]:
    """The bodies that a kernel needs to show this fault: few, to compile fast."""
    return BODIES.get(fault.name, ("gemv",))


BODIES: dict[str, tuple[str, ...]] = {}
ACCESS, GUARDED, FENCES = ("audit.access",), ("audit.guarded",), ("audit.fences",)


def A(name: str, kind: str, gates: tuple[str, ...], *e: Edit, bodies: tuple[str, ...] = ("ew",)) -> Fault:
    """A fault that the audit finds."""
    BODIES[name] = bodies
    return Fault(name, kind, "device", gates, edits(*e))


def memory(helper: str, old: str, new: str) -> Edit:
    """An edit of one helper of memory.py."""
    return Edit("memory.py", helper, old, new)


WEAK = "weak load of an activation"
NARROW = "scope too narrow"
REL = "relaxed for release"
AUDITED: tuple[Fault, ...] = (
    A("weak 16-byte load", WEAK, ACCESS, memory("ld_act_v4", "ld.relaxed.gpu.global", "ld.global"), bodies=("gemv",)),
    A("weak 8-byte load", WEAK, ACCESS, memory("ld_act_v2", "ld.relaxed.gpu.global", "ld.global")),
    A(
        "weak 4-byte load",
        WEAK,
        ACCESS,
        memory("ld_act_b32", "ld.relaxed.gpu.global", "ld.global"),
        bodies=("expert_gate_up",),
    ),
    A("weak 2-byte load", WEAK, ACCESS, memory("ld_act_b16", "ld.relaxed.gpu.global", "ld.global"), bodies=("kda",)),
    A("non-coherent load of an activation", WEAK, ACCESS, memory("ld_act_v2", "ld.relaxed.gpu.global", "ld.global.nc")),
    A(
        "non-coherent load of a wide activation",
        WEAK,
        ACCESS,
        memory("ld_act_v4", "ld.relaxed.gpu.global", "ld.global.nc"),
    ),
    A("load at CTA scope", NARROW, ACCESS, memory("ld_act_v2", ".relaxed.gpu", ".relaxed.cta")),
    A("weak 16-byte store", REL, ACCESS, memory("st_act_v4", "st.relaxed.gpu.global", "st.global")),
    A("weak 8-byte store", REL, ACCESS, memory("st_act_v2", "st.relaxed.gpu.global", "st.global")),
    A("weak 4-byte store", REL, ACCESS, memory("st_act_b32", "st.relaxed.gpu.global", "st.global"), bodies=("route",)),
    A("store at CTA scope", NARROW, ACCESS, memory("st_act_v2", ".relaxed.gpu", ".relaxed.cta")),
    A("weak load of a tagged word", WEAK, ACCESS, memory("ld_tag_b128", "ld.relaxed.gpu.global", "ld.global")),
    A(
        "tagged word in two loads",
        "relaxed for release",
        ACCESS,
        memory(
            "ld_tag_b128",
            '{ .reg .b128 q; .reg .b64 d; ld.relaxed.gpu.global.b128 q, [{$r0}]; mov.b128 {d, {$w2}}, q;"\n             " mov.b64 {{$w0},{$w1}}, d; }',
            '{ .reg .b64 d; ld.relaxed.gpu.global.b64 d, [{$r0}]; ld.relaxed.gpu.global.b64 {$w2}, [{$r0}+8];"\n             " mov.b64 {{$w0},{$w1}}, d; }',
        ),
    ),
    A(
        "tagged word in two stores",
        REL,
        ACCESS,
        memory(
            "st_tag_b128",
            'mov.b128 q, {d, {$r3}};"\n      " st.relaxed.gpu.global.b128 [{$r0}], q; }',
            'st.relaxed.gpu.global.b64 [{$r0}], d;"\n      " st.relaxed.gpu.global.b64 [{$r0}+8], {$r3}; }',
        ),
    ),
    A("weak store of a tagged word", REL, ACCESS, memory("st_tag_b128", "st.relaxed.gpu.global", "st.global")),
    A("tagged load at CTA scope", NARROW, ACCESS, memory("ld_tag_b128", ".relaxed.gpu", ".relaxed.cta")),
    A("mailbox load at GPU scope", NARROW, ACCESS, memory("ld_mail_b128", ".relaxed.sys", ".relaxed.gpu")),
    A(
        "mailbox store at GPU scope",
        NARROW,
        ACCESS,
        memory("st_mail_b128", ".relaxed.sys", ".relaxed.gpu"),
        bodies=("embed",),
    ),
    A("weak mailbox load", WEAK, ACCESS, memory("ld_mail_b128", "ld.relaxed.sys.global", "ld.global")),
    A(
        "weak load of a cache row",
        WEAK,
        ACCESS,
        memory("ld_state_v4", "ld.relaxed.gpu.global", "ld.global"),
        bodies=("attn",),
    ),
    A(
        "non-coherent load of a cache row",
        WEAK,
        ACCESS,
        memory("ld_state_v4", "ld.relaxed.gpu.global", "ld.global.nc"),
        bodies=("attn",),
    ),
    A(
        "weak load of a recurrent state",
        WEAK,
        ACCESS,
        memory("ld_state_v4f", "ld.relaxed.gpu.global", "ld.global"),
        bodies=("kda",),
    ),
    A(
        "weak load of a convolution window",
        WEAK,
        ACCESS,
        memory("ld_state_b16", "ld.relaxed.gpu.global", "ld.global"),
        bodies=("kda",),
    ),
    A(
        "weak store of a recurrent state",
        REL,
        ACCESS,
        memory("st_state_v4f", "st.relaxed.gpu.global", "st.global"),
        bodies=("kda",),
    ),
    A(
        "weak store of a cache row",
        REL,
        ACCESS,
        memory("st_state_b16", "st.relaxed.gpu.global", "st.global"),
        bodies=("mla_insert",),
    ),
    A(
        "non-coherent load of a step input",
        WEAK,
        ACCESS,
        memory("ld_input_b32", "ld.global.b32", "ld.global.nc.b32"),
        bodies=("embed",),
    ),
    A("generic load", "unmapped access", ACCESS, memory("ld_act_v2", ".gpu.global", ".gpu")),
    A(
        "load outside the helpers",
        "unmapped access",
        ACCESS,
        Edit(
            "core.py",
            "load4",
            "w0, w1 = M.ld_act_v2(op.addr + Int64(e) * 2)",
            'w0, w1 = M.P("ld.relaxed.gpu.global.v2.b32 {{$w0},{$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[op.addr + Int64(e) * 2])',
        ),
    ),
    A("acquire made relaxed", "relaxed for release", FENCES, memory("ld_sync_acquire", "ld.acquire", "ld.relaxed")),
    A("acquire at CTA scope", NARROW, (*FENCES, *ACCESS), memory("ld_sync_acquire", "acquire.gpu", "acquire.cta")),
    A("release made relaxed", REL, FENCES, memory("red_sync_release", "red.release", "red.relaxed")),
    A("release at CTA scope", NARROW, (*FENCES, *ACCESS), memory("red_sync_release", "release.gpu", "release.cta")),
    A("exit ticket made relaxed", REL, FENCES, memory("red_sync_release64", "red.release", "red.relaxed")),
    A("poll of the counter weak", WEAK, (*ACCESS, *FENCES), memory("ld_sync_acquire", "ld.acquire.gpu", "ld")),
    A(
        "wait left out",
        "dropped wait",
        GUARDED,
        Edit(
            "megakernel.py",
            "consume",
            "if wait_counter(c, i64(d, w), i32(d, w + 1), 1, i32(d, L.TAG), c.tid) != Uint32(0):",
            "if i32(d, w + 1) < 0:",
        ),
    ),
    A(
        "operand loaded before the wait",
        "load before wait",
        GUARDED,
        Edit(
            "megakernel.py",
            "consume",
            "            if mine and active and c.tid < i32(d, L.N_WAITS):\n",
            "            M.sts_b32(c.scratch + 192, M.ld_act_b32(i64(d, L.PARAMS + L.X_IN)))\n"
            "            if mine and active and c.tid < i32(d, L.N_WAITS):\n",
        ),
    ),
    A(
        "stage run before its waits",
        "signal before write",
        GUARDED,
        Edit(
            "megakernel.py",
            "consume",
            "            if mine and active and c.tid < i32(d, L.N_WAITS):\n",
            "            if active and task < i32(d, L.TASKS):\n                it = self.dispatch(c, d, task, it)\n"
            "            if mine and active and c.tid < i32(d, L.N_WAITS):\n",
        ),
    ),
    A(
        "result stored before the wait",
        "load before wait",
        GUARDED,
        Edit(
            "megakernel.py",
            "consume",
            "            if mine and active and c.tid < i32(d, L.N_WAITS):\n",
            "            M.st_act_b32(i64(d, L.PARAMS + L.X_IN), Uint32(0))\n"
            "            if mine and active and c.tid < i32(d, L.N_WAITS):\n",
        ),
    ),
    A(
        "index read before its wait",
        "dropped wait",
        GUARDED,
        Edit(
            "producer.py",
            "produce",
            "        if i64(d, L.INDEX_WAIT) != Int64(0):\n            stop = stop | wait_counter(c, i64(d, L.INDEX_WAIT), i32(d, L.INDEX_ARRIVALS), 4, i32(d, L.TAG), 0)\n",
            "",
        ),
        Edit(
            "producer.py",
            "produce",
            "            for w in cutlass.range(i32(d, L.N_WAITS), unroll=1):\n                stop = stop | wait_counter(c, i64(d, L.WAITS + 2 * w), i32(d, L.WAITS + 2 * w + 1), 1, i32(d, L.TAG), w)\n",
            "            stop = stop | Uint32(0)\n",
        ),
        bodies=("expert_gate_up",),
    ),
    A(
        "one poll instead of a wait",
        "no bound",
        GUARDED,
        Edit(
            "core.py",
            "wait_counter",
            "    while Int32(M.ld_sync_acquire(addr) - target) < 0 and stop == Uint32(0):\n        spins += 1\n        stop = give_up(c, spins, code, stage, edge)\n",
            "    if Int32(M.ld_sync_acquire(addr) - target) < 0:\n        stop = give_up(c, spins, code, stage, edge)\n",
        ),
    ),
    A(
        "activations copied in bulk without a proxy fence",
        "missing proxy fence",
        FENCES,
        Edit(
            "memory.py",
            "",
            "# ---- shared memory (not a class",
            'def bulk_act(dst, src, nbytes, bar):\n    """Activations to shared memory."""\n'
            '    P("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",\n'
            "      read_only_args=[dst, src, Int32(nbytes), bar])\n\n\n# ---- shared memory (not a class",
        ),
        Edit(
            "elementwise.py",
            "ew",
            "    row = c.tid // 16\n",
            "    row = c.tid // 16\n    M.bulk_act(c.x, operand(d, L.PARAMS + EW_IN).addr, 16, c.full)\n",
        ),
    ),
    A(
        "array that registers cannot index",
        "budget",
        ("audit.local_memory",),
        Edit("elementwise.py", "", "from cutlass import Float32, Int64", "from cutlass import Float32, Int32, Int64"),
        Edit(
            "elementwise.py",
            "ew",
            "    row = c.tid // 16\n",
            "    row = c.tid // 16\n    spill = cute.make_rmem_tensor(cute.make_layout(64), Int32)\n"
            "    for i in cutlass.range_constexpr(64):\n        spill[i] = c.tid * i\n"
            "    for i in cutlass.range(i32(d, L.UNITS), unroll=1):\n        spill[(i * 7) % 64] = Int32(i)\n"
            "    M.sts_b32(c.scratch + 192, spill[c.tid % 64])\n",
        ),
    ),
)


def T(name: str, kind: str, *e: Edit) -> Fault:
    """A field that the device reads elsewhere than the host writes it: found by reading the table back, nothing compiled."""
    return Fault(name, kind, "device", ("table.constants", "table.addresses", "table.tags", "table.work"), edits(*e))


MISPLACED: tuple[Fault, ...] = (
    T(
        "beta and clip read from each other's words",
        "wrong constant",
        Edit("moe.py", "", "E_BETA, E_LINEAR_BETA,", "E_LINEAR_BETA, E_BETA,"),
    ),
    T(
        "gate scales and weights read from each other's words",
        "swapped gate and up",
        Edit("moe.py", "", "E_W1, E_S1, E_W3", "E_S1, E_W1, E_W3"),
    ),
    T(
        "gate and up read from each other's words",
        "swapped gate and up",
        Edit("moe.py", "", "E_W1, E_S1, E_W3, E_S3", "E_W3, E_S3, E_W1, E_S1"),
    ),
    T(
        "epsilons of KDA read from each other's words",
        "epsilon x 10",
        Edit("kda.py", "", "K_L2_EPS, K_EPS", "K_EPS, K_L2_EPS"),
    ),
    T(
        "query and key convolutions read from each other's words",
        "wrong operand",
        Edit("kda.py", "", "K_WQ, K_WK", "K_WK, K_WQ"),
    ),
    T(
        "decay and gate operands exchanged",
        "wrong operand",
        Edit("kda.py", "", "K_Q, K_K, K_V, K_F, K_B, K_G", "K_Q, K_K, K_V, K_G, K_B, K_F"),
    ),
    T(
        "latent width and rotary width exchanged",
        "wrong shape",
        Edit("attention.py", "", "I_LORA, I_ROPE", "I_ROPE, I_LORA"),
    ),
    T(
        "groups and heads of a group exchanged",
        "wrong shape",
        Edit("attention.py", "", "T_GROUPS, T_HPG", "T_HPG, T_GROUPS"),
    ),
    T(
        "experts and top-k exchanged",
        "top-k off by one",
        Edit("moe.py", "", "RO_EXPERTS, RO_TOPK", "RO_TOPK, RO_EXPERTS"),
    ),
    T("choices and table exchanged", "wrong address", Edit("moe.py", "", "RO_IDS, RO_UNIQ", "RO_UNIQ, RO_IDS")),
    T(
        "first row and rows of the vocabulary exchanged",
        "wrong constant",
        Edit("elementwise.py", "", "EM_START, EM_ROWS", "EM_ROWS, EM_START"),
    ),
    T(
        "page and row strides exchanged",
        "state in the wrong slot",
        Edit("attention.py", "", "I_BLOCK, I_ROW", "I_ROW, I_BLOCK"),
    ),
    T(
        "two bodies exchanged in the switch",
        "wrong work",
        Edit("megakernel.py", "", "1: dense.mixnorm, 2: dense.blockstats", "1: dense.blockstats, 2: dense.mixnorm"),
    ),
)


def H(name: str, kind: str, *e: Edit, gates: tuple[str, ...] = ("hardware.numerics",)) -> Fault:
    """A fault that only the GPU shows."""
    return Fault(name, kind, "device", gates, edits(*e), hardware=True)


STAGES, STEPS, ABORT, BITS = "hardware.numerics", "hardware.rollout", "hardware.abort", "hardware.bits"
ANY = (STAGES, STEPS, ABORT, BITS)
HARDWARE: tuple[Fault, ...] = (
    H(
        "device: partial sums of one warp lost",
        "split-K partial",
        Edit("dense.py", "reduce_tile", "for w in range_constexpr(L.WARPS):", "for w in range_constexpr(L.WARPS - 1):"),
    ),
    H(
        "device: last chunk of K left out",
        "split-K partial",
        Edit(
            "dense.py",
            "tile_mma",
            "for q in cutlass.range(c.warp, groups, L.WARPS, unroll=1):",
            "for q in cutlass.range(c.warp, groups - 1, L.WARPS, unroll=1):",
        ),
    ),
    H(
        "device: gate and up exchanged in the epilogue",
        "swapped gate and up",
        Edit("dense.py", "activate", "out = g * sigmoid(g) * u", "out = u * sigmoid(u) * g"),
        Edit(
            "dense.py",
            "activate",
            "beta * tanh(g / beta) * sigmoid(g) * (linear_beta * tanh(u / linear_beta))",
            "beta * tanh(u / beta) * sigmoid(u) * (linear_beta * tanh(g / linear_beta))",
        ),
    ),
    H(
        "device: residual added before the rounding",
        "wrong arithmetic",
        Edit(
            "dense.py",
            "epilogue",
            "p[0] + round_bf16(y0), p[1] + round_bf16(y1), p[2] + round_bf16(y2)",
            "p[0], p[1], p[2]",
        ),
    ),
    H(
        "device: epsilon of the norm left out",
        "epsilon x 10",
        Edit("dense.py", "stage_rmsnorm", " + f32(d, L.PARAMS + L.X_EPS))", ")"),
        Edit("dense.py", "mix_row", " + f32(d, L.PARAMS + L.X_EPS))", ")"),
    ),
    H(
        "device: scores not scaled",
        "missing scale",
        Edit("attention.py", "scores", "x = [a0 * scale, a1 * scale, a2 * scale, a3 * scale]", "x = [a0, a1, a2, a3]"),
    ),
    H(
        "device: token after the last one seen",
        "wrong masking",
        Edit("attention.py", "scores", ">= length:", "> length:"),
    ),
    H(
        "device: old sum not rescaled",
        "wrong arithmetic",
        Edit("attention.py", "soften", "+ alpha * M.lds_f32(ml + 64 + h * 4)", "+ M.lds_f32(ml + 64 + h * 4)"),
    ),
    H(
        "device: newest row on the next page",
        "state in the wrong slot",
        Edit(
            "attention.py", "new_row", "return base + block * block_stride", "return base + (block + 1) * block_stride"
        ),
    ),
    H(
        "device: padding row writes the cache",
        "padding row written",
        Edit("attention.py", "new_row", "live = slot >= Int64(0)", "live = slot >= Int64(-1)"),
        gates=(STAGES, "hardware.boundary"),
    ),
    H(
        "device: wait on a counter for one arrival less",
        "wait on a wrong count",
        Edit(
            "core.py",
            "wait_counter",
            "target = low32(c.epoch) * Uint32(arrivals)",
            "target = low32(c.epoch) * Uint32(arrivals) - Uint32(1)",
        ),
        gates=ANY,
    ),
    H(
        "device: wait on the epoch before",
        "epoch reused",
        Edit("core.py", "wait_counter", "target = low32(c.epoch)", "target = (low32(c.epoch) - Uint32(1))"),
        gates=ANY,
    ),
    H(
        "device: counter compared for equality with one more",
        "!= for >=",
        Edit(
            "core.py",
            "wait_counter",
            "while Int32(M.ld_sync_acquire(addr) - target) < 0 and",
            "while M.ld_sync_acquire(addr) != target + Uint32(1) and",
        ),
        gates=ANY,
    ),
    H(
        "device: tag of the stage after",
        "tag off by one",
        Edit("core.py", "tag_of", "Uint64(op.bits >> Uint32(8))", "Uint64((op.bits >> Uint32(8)) + Uint32(1))"),
        gates=ANY,
    ),
    H(
        "device: any tag passes",
        "epoch reused",
        Edit("core.py", "poll_tag", "while t != tag and", "while t == Uint64(0) and"),
        gates=ANY,
    ),
    H(
        "device: signal before the stage",
        "signal before write",
        Edit(
            "megakernel.py",
            "consume",
            "            dead = M.lds_b32(c.flag)\n",
            "            dead = M.lds_b32(c.flag)\n            if mine and c.tid == 0 and i64(d, L.SIGNAL) != Int64(0):\n                M.red_sync_release(i64(d, L.SIGNAL), 1)\n",
        ),
        gates=ANY,
    ),
    H(
        "device: slot released before it is read",
        "slot released early",
        Edit(
            "dense.py",
            "gemv",
            "            acc = tile_mma(c, slot, xa + ch * (L.CHUNK_BF16 * 2), acc, cutlass.min(left, L.CHUNK_BF16) // 32)\n            tile_done(c, it)\n",
            '            tile_done(c, it)\n            M.P("nanosleep.u32 20000;", read_only_args=[])\n            acc = tile_mma(c, slot, xa + ch * (L.CHUNK_BF16 * 2), acc, cutlass.min(left, L.CHUNK_BF16) // 32)\n',
        ),
        gates=ANY,
    ),
    H(
        "device: tile read before it has landed",
        "ring one stage short",
        Edit("core.py", "tile_wait", "(it // c.slots) & 1, 3)", "((it // c.slots) & 1) ^ 1, 3)"),
        gates=ANY,
    ),
    H(
        "device: slot refilled before it is free",
        "ring shared between warps",
        Edit("producer.py", "slot_for", "((it // c.slots) & 1) ^ 1, 3)", "(it // c.slots) & 1, 3)"),
        gates=ANY,
    ),
    H(
        "device: one unit of a task left out",
        "lost work",
        Edit("core.py", "units_of", "hi = ((t + 1) * units) // tasks", "hi = ((t + 1) * units - 1) // tasks"),
        gates=ANY,
    ),
    H(
        "device: top-k takes the second best twice",
        "top-k off by one",
        Edit(
            "moe.py",
            "route",
            "M.sts_f32(sc + at * 4, Float32(-2.0e30))",
            "M.sts_f32(sc + ((at + 1) % experts) * 4, Float32(-2.0e30))",
        ),
        gates=("hardware.exact", *ANY),
    ),
    H(
        "device: expert scale of the row before",
        "missing scale",
        Edit(
            "moe.py",
            "fp4_tile",
            "s_hi = exp2_scale(M.lds_u8(slot + L.SCALES + (c.g + 8) * scale_pitch + q))",
            "s_hi = s_lo",
        ),
    ),
    H(
        "device: recurrent state written with the old decay",
        "wrong arithmetic",
        Edit("kda.py", "recur", "e = [s[i][j] * alpha[j] for j in range(4)]", "e = [s[i][j] for j in range(4)]"),
    ),
    H(
        "device: rotation by the negative angle",
        "wrong RoPE base",
        Edit(
            "attention.py",
            "rotate",
            "return a * cos - b * sin, b * cos + a * sin",
            "return a * cos + b * sin, b * cos - a * sin",
        ),
    ),
)
DELAY = Edit(
    "megakernel.py",
    "consume",
    "            if active and task < i32(d, L.TASKS) and dead == Uint32(0):\n",
    '            if c.bid % 5 == 2:\n                M.P("nanosleep.u32 20000;", read_only_args=[])\n'
    "            if active and task < i32(d, L.TASKS) and dead == Uint32(0):\n",
)
"""Not a fault: every fifth CTA starts each stage 20 us late, so that a wait which does not wait reads what is not there yet."""
FAULTS: tuple[Fault, ...] = (*AUDITED, *MISPLACED, *HARDWARE)
