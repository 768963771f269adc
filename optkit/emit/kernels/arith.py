"""Register arithmetic: conversions, matrix fragments, activations, reductions. No memory access."""

import cutlass.cute as cute
from cutlass import Float32, Uint32

P = cute.arch.inline_ptx


def bf16_lo(w):
    """Low bf16 of a word as Float32."""
    return P("{ .reg .b32 t; shl.b32 t, {$r0}, 16; mov.b32 {$w0}, t; }", write_only_types=[Float32], read_only_args=[w])


def bf16_hi(w):
    """High bf16 of a word as Float32."""
    return P(
        "{ .reg .b32 t; and.b32 t, {$r0}, 0xffff0000; mov.b32 {$w0}, t; }",
        write_only_types=[Float32],
        read_only_args=[w],
    )


def pack_bf16(lo, hi):
    """Two floats rounded to nearest even, packed lo | hi << 16."""
    return P("cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[Uint32], read_only_args=[lo, hi])


def round_bf16(x):
    """x rounded to bf16, as Float32."""
    return bf16_lo(pack_bf16(x, Float32(0.0)))


def as_u32(x):
    """The bits of a Float32."""
    return P("mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[x])


def as_f32(x):
    """A Float32 from its bits (Uint32)."""
    return P("mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def low32(x):
    """The low word of an Int64 as Uint32."""
    return P("{ .reg .b32 h; mov.b64 {{$w0}, h}, {$r0}; }", write_only_types=[Uint32], read_only_args=[x])


def prmt(a, b, sel):
    """Byte permutation of two words; sel is a Python int."""
    return P(f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, 0x{sel:x};", write_only_types=[Uint32], read_only_args=[a, b])


def interleave8(w0, w1, w2, w3):
    """8 bf16 in order 0..7 -> pairs (0,4) (1,5) (2,6) (3,7): the order in which e2m1 nibbles unpack."""
    return (prmt(w0, w2, 0x5410), prmt(w0, w2, 0x7632), prmt(w1, w3, 0x5410), prmt(w1, w3, 0x7632))


def unpack_e2m1(q):
    """8 nibbles of a word -> 4 words of bf16 pairs (p, p + 4), exact.

    A nibble is s e e m; s at bit 15 and eem at bits 8..6 of a bf16 read as value * 2^-126, subnormals included, so
    one multiplication by 2^126 is exact.
    """
    out = []
    for p in range(4):
        a, b = 12 - 4 * p, 6 - 4 * p
        s = q << Uint32(a) if a else q
        m = q << Uint32(b) if b > 0 else q >> Uint32(-b)
        w = (m & Uint32(0x01C001C0)) | (s & Uint32(0x80008000))
        out.append(
            P(
                "{ .reg .b32 c; mov.b32 c, 0x7e807e80; mul.rn.bf16x2 {$w0}, {$r0}, c; }",
                write_only_types=[Uint32],
                read_only_args=[w],
            )
        )
    return out


def exp2_scale(s):
    """2^(s - 127) for a ue8m0 byte s >= 1 in a Uint32."""
    return as_f32(s << Uint32(23))


def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """D = A[16x16] B[16x8] + C, bf16 operands, fp32 accumulation (PTX ISA, mma.m16n8k16)."""
    return P(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0},{$w1},{$w2},{$w3}},"
        " {{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r6},{$r7},{$r8},{$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
    )


def ldmatrix_x2_trans(addr):
    """Two transposed 8x8 bf16 matrices from shared memory."""
    return P(
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {{$w0},{$w1}}, [{$r0}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[addr],
    )


def exp(x):
    """e^x through ex2 with a full-precision argument product."""
    return cute.math.exp(x)


def sigmoid(x):
    """1 / (1 + e^-x)."""
    return Float32(1.0) / (Float32(1.0) + cute.math.exp(-x))


def tanh(x):
    """tanh without the approximate unit (its 2^-11 error would dominate the bf16 noise band)."""
    return cute.math.tanh(x)


def rsqrt(x):
    """1 / sqrt(x)."""
    return cute.math.rsqrt(x)


def warp_sum(x):
    """Sum over the 32 lanes, the same order every time."""
    for o in (16, 8, 4, 2, 1):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=o)
    return x


def warp_max(x):
    """Maximum over the 32 lanes."""
    for o in (16, 8, 4, 2, 1):
        x = cute.arch.fmax(x, cute.arch.shuffle_sync_bfly(x, offset=o))
    return x
