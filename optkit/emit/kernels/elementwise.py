"""Small stages: embedding rows, elementwise ops on 64 columns, reductions and gathers of mailboxes."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from optkit.emit import layout as L
from optkit.emit.kernels import memory as M
from optkit.emit.kernels.arith import bf16_hi, bf16_lo, round_bf16, sigmoid
from optkit.emit.kernels.core import f32, i32, i64, load4, operand, recv4, rt_i64, send4, store4, units_of
from optkit.emit.kernels.dense import activate

# params of ew, relative to PARAMS
(EW_MODE, EW_WIDTH, EW_N, EW_ACT, EW_BETA, EW_LINEAR_BETA, EW_RANKS, EW_SHARD) = range(8)
EW_IN, EW_OUT = 8, 20
# params of embed
(EM_TABLE, EM_START, EM_ROWS, EM_WIDTH, EM_OUT, EM_OUT_META, EM_RANKS, EM_PEERS, EM_COEFFS) = range(9)


@cute.jit
def ew(c, d, task):
    """Unit = 64 columns of all rows; 16 threads a row, 4 columns a thread."""
    mode, width, n = i32(d, L.PARAMS + EW_MODE), i32(d, L.PARAMS + EW_WIDTH), i32(d, L.PARAMS + EW_N)
    out = operand(d, L.PARAMS + EW_OUT)
    row = c.tid // 16
    lo, hi, step = units_of(d, task)
    for u in cutlass.range(lo, hi, step, unroll=1):
        col = u * 64 + (c.tid % 16) * 4
        if row < c.rows and col < width:
            first = operand(d, L.PARAMS + EW_IN)
            e = row * width + col
            y0 = Float32(0.0)
            y1 = Float32(0.0)
            y2 = Float32(0.0)
            y3 = Float32(0.0)
            if mode == 0:  # p' = bf16(p + bf16(a + b + ...))
                for i in cutlass.range(1, n, unroll=1):
                    a = load4(c, operand(d, L.PARAMS + EW_IN + 2 * i), e)
                    y0, y1, y2, y3 = y0 + a[0], y1 + a[1], y2 + a[2], y3 + a[3]
                p = load4(c, first, e)
                y0, y1, y2, y3 = (
                    p[0] + round_bf16(y0),
                    p[1] + round_bf16(y1),
                    p[2] + round_bf16(y2),
                    p[3] + round_bf16(y3),
                )
            if mode == 1:
                g = load4(c, first, e)
                v = load4(c, operand(d, L.PARAMS + EW_IN + 2), e)
                act, b, lb = i32(d, L.PARAMS + EW_ACT), f32(d, L.PARAMS + EW_BETA), f32(d, L.PARAMS + EW_LINEAR_BETA)
                y0, y1, y2, y3 = (
                    activate(act, b, lb, g[0], v[0]),
                    activate(act, b, lb, g[1], v[1]),
                    activate(act, b, lb, g[2], v[2]),
                    activate(act, b, lb, g[3], v[3]),
                )
            if mode == 2:
                a = load4(c, first, e)
                g = load4(c, operand(d, L.PARAMS + EW_IN + 2), e)
                y0, y1, y2, y3 = a[0] * sigmoid(g[0]), a[1] * sigmoid(g[1]), a[2] * sigmoid(g[2]), a[3] * sigmoid(g[3])
            if mode == 3:  # sum over ranks in rank order, one rounding; then the residual
                for r in cutlass.range(i32(d, L.PARAMS + EW_RANKS), unroll=1):
                    a = recv4(c, first, r, L.ROWS, row, col)
                    y0, y1, y2, y3 = y0 + a[0], y1 + a[1], y2 + a[2], y3 + a[3]
                if n > 1:
                    for i in cutlass.range(2, n, unroll=1):
                        a = load4(c, operand(d, L.PARAMS + EW_IN + 2 * i), e)
                        y0, y1, y2, y3 = y0 + a[0], y1 + a[1], y2 + a[2], y3 + a[3]
                    p = load4(c, operand(d, L.PARAMS + EW_IN + 2), e)
                    y0, y1, y2, y3 = (
                        p[0] + round_bf16(y0),
                        p[1] + round_bf16(y1),
                        p[2] + round_bf16(y2),
                        p[3] + round_bf16(y3),
                    )
            if mode == 4:
                shard = i32(d, L.PARAMS + EW_SHARD)
                r = col // shard
                y0, y1, y2, y3 = recv4(c, first, r, L.ROWS, row, col - r * shard)
            store4(c, out, e, y0, y1, y2, y3)


@cute.jit
def embed(c, d, task):
    """Row of the embedding table for each token; tokens of another shard give zeros (a partial for the exchange)."""
    width, out = i32(d, L.PARAMS + EM_WIDTH), operand(d, L.PARAMS + EM_OUT)
    ranks = i32(d, L.PARAMS + EM_RANKS)
    lo, hi, step = units_of(d, task)
    for r in cutlass.range(lo, hi, step, unroll=1):
        if r < c.rows:
            token = M.ld_input_b32(rt_i64(c, L.RT_TOKEN) + Int64(r) * 4) - i32(d, L.PARAMS + EM_START)
            mine = token >= 0 and token < i32(d, L.PARAMS + EM_ROWS)
            for j in cutlass.range(c.tid, width // 4, 256, unroll=1):
                f0 = Float32(0.0)
                f1 = Float32(0.0)
                f2 = Float32(0.0)
                f3 = Float32(0.0)
                if mine:
                    w0, w1 = M.ld_weight_v2(i64(d, L.PARAMS + EM_TABLE) + (Int64(token) * width + j * 4) * 2)
                    f0, f1, f2, f3 = bf16_lo(w0), bf16_hi(w0), bf16_lo(w1), bf16_hi(w1)
                if ranks > 0:
                    send4(
                        c,
                        i64(d, L.PARAMS + EM_PEERS),
                        i64(d, L.PARAMS + EM_COEFFS),
                        ranks,
                        out,
                        r,
                        c.rows,
                        j * 4,
                        f0,
                        f1,
                        f2,
                        f3,
                    )
                else:
                    store4(c, out, r * width + j * 4, f0, f1, f2, f3)
