"""What every body uses: the CTA's context, descriptors, operands, bounded waits, the weight ring, shared-memory layout.

A `Ctx` is a Python object that exists while the kernel is traced; its attributes are registers. Consumer threads are
tid 0..255 (warps 0..7) and meet at named barrier 1; the producer warp is warp 8.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64, range_constexpr

from optkit.emit import layout as L
from optkit.emit.kernels import memory as M
from optkit.emit.kernels.arith import as_f32, bf16_hi, bf16_lo, low32, pack_bf16

A = cute.arch
CONSUMERS = 256


class Ctx:
    """Registers and shared-memory addresses of one CTA, read only. Shared addresses are Int32 bytes, global ones Int64.

    Helpers are functions, not methods: the DSL treats an object whose method is called inside a run-time loop as a value
    that the loop carries.
    """

    def __init__(self, slots, **kw):
        self.slots = slots
        self.__dict__.update(kw)


class Operand:
    """A buffer as an op sees it: address, dtype, layout, producing stage, row width in elements."""

    def __init__(self, addr, bits, width):
        self.addr, self.bits, self.width = addr, bits, width


def csync():
    """All consumer threads meet."""
    A.barrier(barrier_id=1, number_of_threads=CONSUMERS)


def rt_i64(c, i):
    """Word i of the run-time block."""
    return M.ld_table_b64(c.rt + i * 8)


def i64(d, i):
    """Word i of the descriptor at shared address d; i may be a run-time value."""
    return M.lds_b64(d + i * 8)


def i32(d, i):
    """Low half of word i."""
    return M.lds_i32(d + i * 8)


def f32(d, i):
    """Float in word i."""
    return M.lds_f32(d + i * 8)


def operand(d, i):
    """The operand in words i, i + 1."""
    return Operand(i64(d, i), M.lds_b32(d + i * 8 + 8), M.lds_i32(d + i * 8 + 12))


def is_f32(op):
    """Whether a buffer holds fp32."""
    return (op.bits & Uint32(15)) == Uint32(1)


def is_tagged(c, op):
    """Whether a buffer holds tagged words; decided while tracing where the Plan has none (no polling code at all)."""
    if not c.tagged:
        return False
    return (op.bits & Uint32(L.META_TAGGED)) != Uint32(0)


def tag_of(c, op):
    """The tag a buffer's producer writes in this launch."""
    return (c.epoch << Uint64(16)) | Uint64(op.bits >> Uint32(8))


@cute.jit
def fail(c, code, stage, edge):
    """Record the first failure in one 64-bit word (layout.HEALTH_FIELDS) and set the abort word that every wait polls."""
    what = (
        Uint64(code)
        | Uint64(edge) << Uint64(8)
        | Uint64(stage & 0xFFFF) << Uint64(16)
        | Uint64(c.bid) << Uint64(32)
        | (c.epoch & Uint64(0xFFFF)) << Uint64(48)
    )
    M.atom_sync_claim(c.sync_base + L.SYNC_HEALTH, what)
    M.st_sync_b32(c.sync_base + L.SYNC_ABORT, 1)


@cute.jit
def pause(c, stage, place):
    """With a delay seed, sleep up to 16 us at about one in four (stage, CTA, place); costs a compare without one."""
    if c.delay != Uint32(0):
        h = (
            c.delay
            ^ (Uint32(stage) * Uint32(0x9E3779B1))
            ^ (Uint32(c.bid) * Uint32(0x85EBCA77))
            ^ Uint32(place * 0xC2B2AE3D & 0xFFFFFFFF)
        )
        h = (h ^ (h >> Uint32(15))) * Uint32(0x2C1B3C6D)
        h = h ^ (h >> Uint32(12))
        if (h & Uint32(3)) == Uint32(0):
            M.P("nanosleep.u32 {$r0};", read_only_args=[(h >> Uint32(8)) & Uint32(0x3FFF)])


@cute.jit
def late(c, stage):
    """Whether the launch is past its deadline. A later stage gets 100 us more, so that the wait whose producer is really
    missing gives up first and is the one that gets recorded, not one of those behind it."""
    return A.globaltimer() - c.start > c.timeout + Int64(stage & 0xFFFF) * 100000


@cute.jit
def give_up(c, spins, code, stage, edge):
    """1 when a wait must end: somebody aborted, or the launch is late (then this wait aborts it). Asked every 256 polls."""
    out = Uint32(0)
    if (spins & 255) == 255:
        out = M.ld_sync_relaxed(c.sync_base + L.SYNC_ABORT)
        if out == Uint32(0) and late(c, stage + (1 if code == 2 else 0)):  # a tagged wait stands behind its producer's
            fail(c, code, stage, edge)
            out = Uint32(1)
    return out


@cute.jit
def wait_counter(c, addr, arrivals, code, stage, edge):
    """Acquire until the monotone counter has this launch's arrivals; returns 1 if given up. Signed difference: wraps."""
    target = low32(c.epoch) * Uint32(arrivals)
    stop = Uint32(0)
    spins = Int32(0)
    while Int32(M.ld_sync_acquire(addr) - target) < 0 and stop == Uint32(0):
        spins += 1
        stop = give_up(c, spins, code, stage, edge)
    return stop


@cute.jit
def poll_tag(c, addr, tag):
    """Read a tagged word until it carries `tag` exactly; a later epoch must not pass."""
    p0, p1, t = M.ld_tag_b128(addr)
    stop = Uint32(0)
    spins = Int32(0)
    while t != tag and stop == Uint32(0):
        p0, p1, t = M.ld_tag_b128(addr)
        spins += 1
        stop = give_up(c, spins, 2, Int32(low32(tag)), 0)
    return p0, p1


@cute.jit
def poll_tag2(c, a, b, tag):
    """Two tagged words at once: one trip to L2 where two single polls take two."""
    p0, p1, t = M.ld_tag_b128(a)
    q0, q1, v = M.ld_tag_b128(b)
    stop = Uint32(0)
    spins = Int32(0)
    while (t != tag or v != tag) and stop == Uint32(0):
        p0, p1, t = M.ld_tag_b128(a)
        q0, q1, v = M.ld_tag_b128(b)
        spins += 1
        stop = give_up(c, spins, 2, Int32(low32(tag)), 0)
    return p0, p1, q0, q1


@cute.jit
def poll_mail(c, addr, tag):
    """The same for a mailbox word that a peer writes."""
    p0, p1, t = M.ld_mail_b128(addr)
    stop = Uint32(0)
    spins = Int32(0)
    while t != tag and stop == Uint32(0):
        p0, p1, t = M.ld_mail_b128(addr)
        spins += 1
        stop = give_up(c, spins, 2, Int32(low32(tag)), 1)
    return p0, p1


@cute.jit
def load4(c, op, e):
    """Elements e..e+3 of an activation buffer as 4 Float32 (e a multiple of 4; flat index in elements)."""
    f0 = Float32(0.0)
    f1 = Float32(0.0)
    f2 = Float32(0.0)
    f3 = Float32(0.0)
    if is_f32(op):
        if is_tagged(c, op):
            at = op.addr + Int64(e) * 8
            a0, a1, a2, a3 = poll_tag2(c, at, at + 16, tag_of(c, op))
            f0, f1, f2, f3 = as_f32(a0), as_f32(a1), as_f32(a2), as_f32(a3)
        else:
            b0, b1, b2, b3 = M.ld_act_v4(op.addr + Int64(e) * 4)
            f0, f1, f2, f3 = as_f32(b0), as_f32(b1), as_f32(b2), as_f32(b3)
    else:
        w0 = Uint32(0)
        w1 = Uint32(0)
        if is_tagged(c, op):
            w0, w1 = poll_tag(c, op.addr + Int64(e) * 4, tag_of(c, op))
        else:
            w0, w1 = M.ld_act_v2(op.addr + Int64(e) * 2)
        f0, f1, f2, f3 = bf16_lo(w0), bf16_hi(w0), bf16_lo(w1), bf16_hi(w1)
    return f0, f1, f2, f3


@cute.jit
def load2_f32(c, op, e):
    """Elements e, e + 1 (e even) of an fp32 buffer."""
    a0 = Uint32(0)
    a1 = Uint32(0)
    if is_tagged(c, op):
        a0, a1 = poll_tag(c, op.addr + Int64(e) * 8, tag_of(c, op))
    else:
        a0, a1 = M.ld_act_v2(op.addr + Int64(e) * 4)
    return as_f32(a0), as_f32(a1)


@cute.jit
def load8_words(c, op, e):
    """Elements e..e+7 as 4 words of bf16 pairs; f32 buffers are rounded to nearest even."""
    w0 = Uint32(0)
    w1 = Uint32(0)
    w2 = Uint32(0)
    w3 = Uint32(0)
    if is_f32(op):
        a0, a1, a2, a3 = load4(c, op, e)
        b0, b1, b2, b3 = load4(c, op, e + 4)
        w0, w1, w2, w3 = pack_bf16(a0, a1), pack_bf16(a2, a3), pack_bf16(b0, b1), pack_bf16(b2, b3)
    else:
        if is_tagged(c, op):
            at = op.addr + Int64(e) * 4
            w0, w1, w2, w3 = poll_tag2(c, at, at + 16, tag_of(c, op))
        else:
            w0, w1, w2, w3 = M.ld_act_v4(op.addr + Int64(e) * 2)
    return w0, w1, w2, w3


@cute.jit
def load8(c, op, e):
    """Elements e..e+7 as 8 Float32."""
    f0 = Float32(0.0)
    f1 = Float32(0.0)
    f2 = Float32(0.0)
    f3 = Float32(0.0)
    f4 = Float32(0.0)
    f5 = Float32(0.0)
    f6 = Float32(0.0)
    f7 = Float32(0.0)
    if is_f32(op):
        f0, f1, f2, f3 = load4(c, op, e)
        f4, f5, f6, f7 = load4(c, op, e + 4)
    else:
        w0, w1, w2, w3 = load8_words(c, op, e)
        f0, f1, f2, f3 = bf16_lo(w0), bf16_hi(w0), bf16_lo(w1), bf16_hi(w1)
        f4, f5, f6, f7 = bf16_lo(w2), bf16_hi(w2), bf16_lo(w3), bf16_hi(w3)
    return f0, f1, f2, f3, f4, f5, f6, f7


@cute.jit
def load1(c, op, e):
    """Element e as Float32 (any e)."""
    out = Float32(0.0)
    if is_tagged(c, op):
        if is_f32(op):
            a0, a1 = poll_tag(c, op.addr + Int64(e // 2) * 16, tag_of(c, op))
            out = as_f32(a0)
            if e % 2 == 1:
                out = as_f32(a1)
        else:
            b0, b1 = poll_tag(c, op.addr + Int64(e // 4) * 16, tag_of(c, op))
            w = b0
            if e % 4 >= 2:
                w = b1
            out = bf16_lo(w)
            if e % 2 == 1:
                out = bf16_hi(w)
    else:
        if is_f32(op):
            out = as_f32(M.ld_act_b32(op.addr + Int64(e) * 4))
        else:
            out = bf16_lo(M.ld_act_b16(op.addr + Int64(e) * 2))
    return out


@cute.jit
def store4(c, op, e, f0, f1, f2, f3):
    """Write elements e..e+3 (e a multiple of 4), rounded to the buffer's dtype, tagged where the layout says so."""
    if is_f32(op):
        if is_tagged(c, op):
            M.st_tag_b128(op.addr + Int64(e) * 8, f0, f1, tag_of(c, op))
            M.st_tag_b128(op.addr + Int64(e) * 8 + 16, f2, f3, tag_of(c, op))
        else:
            M.st_act_v4(op.addr + Int64(e) * 4, f0, f1, f2, f3)
    else:
        w0, w1 = pack_bf16(f0, f1), pack_bf16(f2, f3)
        if is_tagged(c, op):
            M.st_tag_b128(op.addr + Int64(e) * 4, w0, w1, tag_of(c, op))
        else:
            M.st_act_v2(op.addr + Int64(e) * 2, w0, w1)


@cute.jit
def store2_f32(c, op, e, f0, f1):
    """Write elements e, e + 1 (e even) of an fp32 buffer."""
    if is_tagged(c, op):
        M.st_tag_b128(op.addr + Int64(e) * 8, f0, f1, tag_of(c, op))
    else:
        M.st_act_v2(op.addr + Int64(e) * 4, f0, f1)


@cute.jit
def send4(c, peers, coeffs, ranks, op, n, rows, col, f0, f1, f2, f3):
    """Write 4 fp32 of row n to this rank's slot of every peer's mailbox, scaled by the peer's coefficient.

    `peers` is a table of mailbox-slot addresses, `coeffs` of floats: real peers have coefficient 1 and the address of
    their own memory; emulated ones are slots of this GPU's mailbox.
    """
    for p in cutlass.range(ranks, unroll=1):
        base = M.ld_table_b64(peers + Int64(p) * 8) + (Int64(n) * op.width + col) * 8
        s = M.ld_weight_f32(coeffs + Int64(p) * 4)
        M.st_mail_b128(base, f0 * s, f1 * s, tag_of(c, op))
        M.st_mail_b128(base + 16, f2 * s, f3 * s, tag_of(c, op))


@cute.jit
def recv4(c, op, rank, rows_class, n, col):
    """4 fp32 of row n, column col from mailbox slot `rank`."""
    a = op.addr + ((Int64(rank) * rows_class + n) * op.width + col) * 8
    a0, a1 = poll_mail(c, a, tag_of(c, op))
    a2, a3 = poll_mail(c, a + 16, tag_of(c, op))
    return as_f32(a0), as_f32(a1), as_f32(a2), as_f32(a3)


# ---- the weight ring
@cute.jit
def try_wait(bar, parity):
    """One mbarrier.try_wait: 1 if the phase with this parity has completed (the hardware suspends for a while)."""
    return M.P(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; selp.u32 {$w0}, 1, 0, p; }",
        write_only_types=[Uint32],
        read_only_args=[bar, parity],
    )


@cute.jit
def ring_wait(c, bar, parity, code):
    """Wait for a ring barrier's phase; ends early on abort. Returns 1 if given up."""
    stop = Uint32(0)
    spins = Int32(0)
    while try_wait(bar, parity) == Uint32(0) and stop == Uint32(0):
        spins += 1  # the hardware suspends each try for a while, so 256 of them are long enough between two questions
        stop = give_up(c, spins, code, 0xFFFF, 0)
    return stop


@cute.jit
def tile_wait(c, it):
    """Wait until tile number `it` of this CTA's stream has landed; returns its shared address."""
    s = it % c.slots
    ring_wait(c, c.full + s * 8, (it // c.slots) & 1, 3)
    return c.ring + s * L.SLOT


@cute.jit
def tile_done(c, it):
    """This warp has read tile `it`."""
    A.sync_warp()
    if c.lane == 0:
        M.P(
            "{ .reg .b64 t; mbarrier.arrive.shared::cta.b64 t, [{$r0}]; }",
            read_only_args=[c.empty + (it % c.slots) * 8],
        )


@cute.jit
def units_of(d, t):
    """(first unit, one past the last, step) of task t."""
    units, tasks = i32(d, L.UNITS), i32(d, L.TASKS)
    lo = t
    hi = units
    step = tasks
    if i32(d, L.ASSIGN) == 0:
        lo = (t * units) // tasks
        hi = ((t + 1) * units) // tasks
        step = Int32(1)
    return lo, hi, step


@cute.jit
def block_sum(c, value, slot):
    """Sum of `value` over the 256 consumer threads, to all of them; two barriers. `slot` picks a scratch area (0..3)."""
    v = value
    for o in (16, 8, 4, 2, 1):
        v = v + A.shuffle_sync_bfly(v, offset=o)
    if c.lane == 0:
        M.sts_f32(c.scratch + slot * 32 + c.warp * 4, v)
    csync()
    out = Float32(0.0)
    for w in range_constexpr(L.WARPS):
        out = out + M.lds_f32(c.scratch + slot * 32 + w * 4)
    csync()
    return out
