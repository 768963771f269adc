"""Projections: x staged once per CTA (copied, normalised or mixed from saved rows), 16-row weight tiles from the ring.

One mma tile is 16 weight rows by 16 columns of K, with the class's 8 token rows as N, so 1 to 8 rows cost the same.
Each of the 8 warps takes every eighth group of 32 columns of a tile; the order of K inside a dot product is free, so a
lane reads 16 contiguous bytes of its weight row and of its token row and feeds two mma with them. Partial sums meet in
shared memory and are added in warp order: the same bits every time.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from optkit.emit import layout as L
from optkit.emit.kernels import memory as M
from optkit.emit.kernels.arith import (
    bf16_hi,
    bf16_lo,
    exp,
    interleave8,
    mma,
    pack_bf16,
    round_bf16,
    rsqrt,
    sigmoid,
    tanh,
)
from optkit.emit.kernels.core import (
    block_sum,
    csync,
    f32,
    i32,
    i64,
    load1,
    load4,
    load8,
    load8_words,
    operand,
    send4,
    store2_f32,
    store4,
    tile_done,
    tile_wait,
    units_of,
)

A = cute.arch


@cute.jit
def weight8(a):
    """8 bf16 weights at address a as Float32."""
    w0, w1, w2, w3 = M.ld_weight_v4(a)
    return (bf16_lo(w0), bf16_hi(w0), bf16_lo(w1), bf16_hi(w1), bf16_lo(w2), bf16_hi(w2), bf16_lo(w3), bf16_hi(w3))


@cute.jit
def stage_copy(c, op, rows, width, pitch, permute):
    """Copy rows of a buffer into the x area as bf16; `permute` puts each 8 in the order MXFP4 unpacks."""
    n8 = width // 8
    for i in cutlass.range(c.tid, rows * n8, 256, unroll=1):
        r = i // n8
        j = i - r * n8
        w0, w1, w2, w3 = load8_words(c, op, r * width + j * 8)
        if const_expr(permute):
            w0, w1, w2, w3 = interleave8(w0, w1, w2, w3)
        M.sts_v4(c.x + r * pitch + j * 16, w0, w1, w2, w3)


@cute.jit
def stage_rmsnorm(c, d, op, width, pitch):
    """x = RMSNorm(row) * w, fp32 arithmetic, one rounding."""
    n8 = width // 8
    norm = i64(d, L.PARAMS + L.X_NORM)
    for r in cutlass.range(c.rows, unroll=1):
        s = Float32(0.0)
        for j in cutlass.range(c.tid, n8, 256, unroll=1):
            f = load8(c, op, r * width + j * 8)
            for q in range_constexpr(8):
                s = s + f[q] * f[q]
        total = block_sum(c, s, 0)
        scale = rsqrt(total / Float32(width) + f32(d, L.PARAMS + L.X_EPS))
        for j in cutlass.range(c.tid, n8, 256, unroll=1):
            f = load8(c, op, r * width + j * 8)
            w = weight8(norm + Int64(j) * 16)
            y = [f[q] * scale * w[q] for q in range(8)]
            M.sts_v4(
                c.x + r * pitch + j * 16,
                pack_bf16(y[0], y[1]),
                pack_bf16(y[2], y[3]),
                pack_bf16(y[4], y[5]),
                pack_bf16(y[6], y[7]),
            )


@cute.jit
def row_dots(c, d, op, r, j, norm, proj, width):
    """Contribution of 8 columns to (v . v, v . u) with u = norm * proj."""
    f = load8(c, op, r * width + j * 8)
    w = weight8(norm + Int64(j) * 16)
    p = weight8(proj + Int64(j) * 16)
    vv = Float32(0.0)
    vu = Float32(0.0)
    for q in range_constexpr(8):
        vv = vv + f[q] * f[q]
        vu = vu + f[q] * (w[q] * p[q])
    return vv, vu


@cute.jit
def saved_dots(c, d, i, r, width):
    """(v . v, v . u) of mix input i for row r, over all consumer threads."""
    op = operand(d, L.PARAMS + L.X_IN + 2 * i)
    norm, proj = i64(d, L.PARAMS + L.X_MIX_NORM), i64(d, L.PARAMS + L.X_MIX_PROJ)
    vv = Float32(0.0)
    vu = Float32(0.0)
    for j in cutlass.range(c.tid, width // 8, 256, unroll=1):
        a, b = row_dots(c, d, op, r, j, norm, proj, width)
        vv = vv + a
        vu = vu + b
    return block_sum(c, vv, 0), block_sum(c, vu, 1)


@cute.jit
def mix_weights(c, d, r, width):
    """Softmax weights of the mix of row r into c.mix[0..n); ends with a barrier."""
    n = i32(d, L.PARAMS + L.X_N)
    stats = operand(d, L.PARAMS + L.X_STATS)
    for i in cutlass.range(n, unroll=1):
        vv = Float32(0.0)
        vu = Float32(0.0)
        if stats.addr != Int64(0) and i < n - 1:
            vv, vu = load1(c, stats, r * stats.width + 2 * i), load1(c, stats, r * stats.width + 2 * i + 1)
        else:
            vv, vu = saved_dots(c, d, i, r, width)
        if c.tid == 0:
            M.sts_f32(c.mix + i * 4, vu * rsqrt(vv / Float32(width) + f32(d, L.PARAMS + L.X_MIX_EPS)))
    if c.tid == 0:
        top = M.lds_f32(c.mix)
        for i in cutlass.range(1, n, unroll=1):
            top = A.fmax(top, M.lds_f32(c.mix + i * 4))
        total = Float32(0.0)
        for i in cutlass.range(n, unroll=1):
            e = exp(M.lds_f32(c.mix + i * 4) - top)
            total = total + e
            M.sts_f32(c.mix + i * 4, e)
        for i in cutlass.range(n, unroll=1):
            M.sts_f32(c.mix + i * 4, M.lds_f32(c.mix + i * 4) / total)
    csync()


@cute.jit
def mix8(c, d, n, r, j, width):
    """8 columns of the mix: sum of a_i v_i in input order."""
    h = [Float32(0.0) for _ in range(8)]
    for i in cutlass.range(n, unroll=1):
        f = load8(c, operand(d, L.PARAMS + L.X_IN + 2 * i), r * width + j * 8)
        a = M.lds_f32(c.mix + i * 4)
        for q in range_constexpr(8):
            h[q] = h[q] + a * f[q]
    return h[0], h[1], h[2], h[3], h[4], h[5], h[6], h[7]


@cute.jit
def mix_row(c, d, r, width, pitch, to_smem):
    """Row r: attention-residual mix, then RMSNorm if there is a norm weight; to the x area or to the out operand."""
    n = i32(d, L.PARAMS + L.X_N)
    n8 = width // 8
    norm = i64(d, L.PARAMS + L.X_NORM)
    scale = Float32(1.0)
    if i32(d, L.PARAMS + L.X_PROLOGUE) == 2:
        mix_weights(c, d, r, width)
    else:
        if c.tid == 0:
            M.sts_f32(c.mix, Float32(1.0))
        csync()
    if norm != Int64(0):
        s = Float32(0.0)
        for j in cutlass.range(c.tid, n8, 256, unroll=1):
            h = mix8(c, d, n, r, j, width)
            for q in range_constexpr(8):
                s = s + h[q] * h[q]
        scale = rsqrt(block_sum(c, s, 0) / Float32(width) + f32(d, L.PARAMS + L.X_EPS))
    for j in cutlass.range(c.tid, n8, 256, unroll=1):
        h = mix8(c, d, n, r, j, width)
        y = [h[q] for q in range(8)]
        if norm != Int64(0):
            w = weight8(norm + Int64(j) * 16)
            for q in range_constexpr(8):
                y[q] = y[q] * scale * w[q]
        if const_expr(to_smem):
            M.sts_v4(
                c.x + r * pitch + j * 16,
                pack_bf16(y[0], y[1]),
                pack_bf16(y[2], y[3]),
                pack_bf16(y[4], y[5]),
                pack_bf16(y[6], y[7]),
            )
        else:
            out = operand(d, L.PARAMS + L.X_OUT)
            store4(c, out, r * width + j * 8, y[0], y[1], y[2], y[3])
            store4(c, out, r * width + j * 8 + 4, y[4], y[5], y[6], y[7])
    csync()


@cute.jit
def stage_x(c, d):
    """The prologue of a projection: x for all rows into the x area; ends with a barrier."""
    kind, width = i32(d, L.PARAMS + L.X_PROLOGUE), i32(d, L.PARAMS + L.X_WIDTH)
    pitch = width * 2 + 64
    if kind == 0:
        stage_copy(c, operand(d, L.PARAMS + L.X_IN), c.rows, width, pitch, False)
    if kind == 1:
        stage_rmsnorm(c, d, operand(d, L.PARAMS + L.X_IN), width, pitch)
    if kind == 2:
        for r in cutlass.range(c.rows, unroll=1):
            mix_row(c, d, r, width, pitch, True)
    csync()


@cute.jit
def tile_mma(c, slot, x, acc, groups):
    """acc += tile . x over this warp's groups of 32 columns; `x` = shared address of column 0 of token row n."""
    a0, a1, a2, a3 = acc
    for q in cutlass.range(c.warp, groups, L.WARPS, unroll=1):
        wa = slot + c.g * L.PITCH + q * 64 + c.t * 16
        lo = M.lds_v4(wa)
        hi = M.lds_v4(wa + 8 * L.PITCH)
        b = M.lds_v4(x + q * 64 + c.t * 16)
        a0, a1, a2, a3 = mma(lo[0], hi[0], lo[1], hi[1], b[0], b[1], a0, a1, a2, a3)
        a0, a1, a2, a3 = mma(lo[2], hi[2], lo[3], hi[3], b[2], b[3], a0, a1, a2, a3)
    return a0, a1, a2, a3


@cute.jit
def reduce_tile(c, acc, parity):
    """Sum the warps' partial tiles in warp order. Returns, in warp 0, row n = lane / 4, rows m = 4 (lane % 4) + 0..3."""
    base = c.red + parity * 4096
    wb = base + c.warp * 512
    M.sts_f32(wb + ((2 * c.t) * 16 + c.g) * 4, acc[0])
    M.sts_f32(wb + ((2 * c.t + 1) * 16 + c.g) * 4, acc[1])
    M.sts_f32(wb + ((2 * c.t) * 16 + c.g + 8) * 4, acc[2])
    M.sts_f32(wb + ((2 * c.t + 1) * 16 + c.g + 8) * 4, acc[3])
    csync()
    y = [Float32(0.0) for _ in range(4)]
    if c.warp == 0:
        for w in range_constexpr(L.WARPS):
            v = M.lds_v4f(base + w * 512 + c.lane * 16)
            for q in range_constexpr(4):
                y[q] = y[q] + v[q]
    return y[0], y[1], y[2], y[3]


@cute.jit
def activate(act, beta, linear_beta, g, u):
    """silu(g) u, or SiTU: beta tanh(g / beta) sigmoid(g) * linear_beta tanh(u / linear_beta)."""
    out = Float32(0.0)
    if act == 0:
        out = g * sigmoid(g) * u
    else:
        out = beta * tanh(g / beta) * sigmoid(g) * (linear_beta * tanh(u / linear_beta))
    return out


@cute.jit
def epilogue(c, d, pb, row0, y):
    """What happens to 4 output columns of token row n = lane / 4 (warp 0 only)."""
    kind, m = i32(d, pb + L.P_EPILOGUE), i32(d, pb + L.P_M)
    n = c.g
    q = c.t
    out = operand(d, pb + L.P_OUT)
    y0, y1, y2, y3 = y
    col = row0 + 4 * q
    live = n < c.rows and col < m
    if kind == 1:
        beta, linear_beta, act = f32(d, pb + L.P_BETA), f32(d, pb + L.P_LINEAR_BETA), i32(d, pb + L.P_ACT)
        u = [A.shuffle_sync_bfly(v, offset=2) for v in (y0, y1, y2, y3)]
        y0, y1, y2, y3 = (
            activate(act, beta, linear_beta, y0, u[0]),
            activate(act, beta, linear_beta, y1, u[1]),
            activate(act, beta, linear_beta, y2, u[2]),
            activate(act, beta, linear_beta, y3, u[3]),
        )
        live = live and q < 2
    if live:
        if kind == 2:
            p = load4(c, operand(d, pb + L.P_ADD0), n * out.width + col)
            extras = i32(d, pb + L.P_N_ADD)
            for i in cutlass.range(1, extras, unroll=1):
                e = load4(c, operand(d, pb + L.P_ADD0 + 2 * i), n * out.width + col)
                y0, y1, y2, y3 = y0 + e[0], y1 + e[1], y2 + e[2], y3 + e[3]
            y0, y1, y2, y3 = (
                p[0] + round_bf16(y0),
                p[1] + round_bf16(y1),
                p[2] + round_bf16(y2),
                p[3] + round_bf16(y3),
            )
        if kind == 3:
            g = load4(c, operand(d, pb + L.P_ADD0), n * out.width + col)
            y0, y1, y2, y3 = (
                round_bf16(y0) * sigmoid(g[0]),
                round_bf16(y1) * sigmoid(g[1]),
                round_bf16(y2) * sigmoid(g[2]),
                round_bf16(y3) * sigmoid(g[3]),
            )
        if kind == 4:
            send4(
                c,
                i64(d, pb + L.P_PEERS),
                i64(d, pb + L.P_COEFFS),
                i32(d, pb + L.P_N_ADD),
                out,
                n,
                c.rows,
                col,
                y0,
                y1,
                y2,
                y3,
            )
        else:
            store4(c, out, n * out.width + col, y0, y1, y2, y3)


@cute.jit
def gemv(c, d, task, it):
    """y = W x for this task's 16-row units over all parts of the stage. Returns the ring position."""
    stage_x(c, d)
    pitch = i32(d, L.PARAMS + L.X_WIDTH) * 2 + 64
    lo, hi, step = units_of(d, task)
    pb = Int32(L.PARTS)
    for u in cutlass.range(lo, hi, step, unroll=1):
        while u >= i32(d, pb + L.P_FIRST) + i32(d, pb + L.P_COUNT):
            pb += L.PART_WORDS
        k = i32(d, pb + L.P_K)
        local = u - i32(d, pb + L.P_FIRST)
        row0 = local * 16
        if i64(d, pb + L.P_W2) != Int64(0):
            row0 = local * 8
        x0 = i32(d, pb + L.P_X_OFFSET) + (row0 // i32(d, pb + L.P_GROUP_ROWS)) * i32(d, pb + L.P_X_STRIDE)
        xa = c.x + c.g * pitch + x0 * 2
        acc = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        for ch in cutlass.range((k + L.CHUNK_BF16 - 1) // L.CHUNK_BF16, unroll=1):
            left = k - ch * L.CHUNK_BF16
            slot = tile_wait(c, it)
            acc = tile_mma(c, slot, xa + ch * (L.CHUNK_BF16 * 2), acc, cutlass.min(left, L.CHUNK_BF16) // 32)
            tile_done(c, it)
            it += 1
        y = reduce_tile(c, acc, u & 1)
        if c.warp == 0:
            epilogue(c, d, pb, row0, y)
    return it


@cute.jit
def mixnorm(c, d, task):
    """The prologue alone: unit = one row, result to the out operand."""
    width = i32(d, L.PARAMS + L.X_WIDTH)
    lo, hi, step = units_of(d, task)
    for r in cutlass.range(lo, hi, step, unroll=1):
        if r < c.rows:
            mix_row(c, d, r, width, Int32(0), False)


@cute.jit
def blockstats(c, d, task):
    """(v . v, v . u) of every saved row, before the prefix is known; unit = one token row."""
    width = i32(d, L.PARAMS + L.X_WIDTH)
    out = operand(d, L.PARAMS + L.X_OUT)
    lo, hi, step = units_of(d, task)
    for r in cutlass.range(lo, hi, step, unroll=1):
        if r < c.rows:
            n = i32(d, L.PARAMS + L.X_N)
            for i in cutlass.range(n, unroll=1):
                vv, vu = saved_dots(c, d, i, r, width)
                if c.tid == 0:
                    store2_f32(c, out, r * out.width + 2 * i, vv, vu)
