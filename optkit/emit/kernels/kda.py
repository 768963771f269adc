"""Kimi Delta Attention, one head of one token row per unit: short convolution, gated delta rule, gated norm.

Everything is fp32 in registers and shared memory; only the gated output is rounded (bf16). The state row block of a
head, [V, K] fp32, passes through registers once: a lane holds 4 columns of 16 rows, so a warp reads whole 512-byte rows.
With the decayed state D: r = D k, s = D q, delta = beta (v - r), S' = D + delta k^T, o = S' q = s + delta (k . q), so
both products take one pass (the delta rule, then the read-out of the updated state).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, range_constexpr

from optkit.emit import layout as L
from optkit.emit.kernels import memory as M
from optkit.emit.kernels.arith import bf16_lo, exp, pack_bf16, rsqrt, sigmoid, warp_sum
from optkit.emit.kernels.core import csync, f32, i32, i64, load1, operand, store4, units_of

DIM = 128
# params, relative to PARAMS; operands take two words
(
    K_HEADS,
    K_LOWER,
    K_L2_EPS,
    K_EPS,
    K_CONV,
    K_CONV_STRIDE,
    K_REC,
    K_REC_STRIDE,
    K_WQ,
    K_WK,
    K_WV,
    K_A_LOG,
    K_DT_BIAS,
    K_O_NORM,
) = range(14)
K_Q, K_K, K_V, K_F, K_B, K_G, K_OUT, K_SLOTS = 14, 16, 18, 20, 22, 24, 26, 28


@cute.jit
def conv_channel(c, d, part, ch, head, row, slot, live):
    """One channel of q, k or v: 4-tap causal convolution over the saved raw rows and this one, then SiLU; saves the window."""
    heads = i32(d, L.PARAMS + K_HEADS)
    width = heads * DIM
    col = head * DIM + ch
    x = load1(c, operand(d, L.PARAMS + K_Q + 2 * part), row * width + col)
    w = M.ld_weight_v4f(i64(d, L.PARAMS + K_WQ + part) + Int64(col) * 16)
    base = i64(d, L.PARAMS + K_CONV) + Int64(slot) * i64(d, L.PARAMS + K_CONV_STRIDE) + Int64(part * width + col) * 2
    pitch = Int64(width) * 6  # 3 parts of bf16
    r0 = M.ld_state_b16(base)
    r1 = M.ld_state_b16(base + pitch)
    r2 = M.ld_state_b16(base + 2 * pitch)
    raw = pack_bf16(x, Float32(0.0))
    y = bf16_lo(r0) * w[0] + bf16_lo(r1) * w[1] + bf16_lo(r2) * w[2] + x * w[3]
    if live:
        M.st_state_b16(base, r1)
        M.st_state_b16(base + pitch, r2)
        M.st_state_b16(base + 2 * pitch, raw)
    return y * sigmoid(y)


@cute.jit
def recur(c, d, slot, head, live, q, k, alpha):
    """16 rows of this warp: decay, delta rule, read-out. q, k, alpha: this lane's 4 columns. Writes o to shared memory."""
    base = (
        i64(d, L.PARAMS + K_REC)
        + Int64(slot) * i64(d, L.PARAMS + K_REC_STRIDE)
        + (Int64(head) * DIM * DIM + Int64(c.warp) * 16 * DIM + c.lane * 4) * 4
    )
    kq = warp_sum(k[0] * q[0] + k[1] * q[1] + k[2] * q[2] + k[3] * q[3])
    beta = M.lds_f32(c.x + 2048)
    for h in cutlass.range(4, unroll=1):
        s = [M.ld_state_v4f(base + (h * 4 + i) * (DIM * 4)) for i in range(4)]
        for i in range_constexpr(4):
            v = h * 4 + i
            e = [s[i][j] * alpha[j] for j in range(4)]
            r = warp_sum(e[0] * k[0] + e[1] * k[1] + e[2] * k[2] + e[3] * k[3])
            o = warp_sum(e[0] * q[0] + e[1] * q[1] + e[2] * q[2] + e[3] * q[3])
            delta = beta * (M.lds_f32(c.x + 1024 + (c.warp * 16 + v) * 4) - r)
            if live:
                M.st_state_v4f(
                    base + v * (DIM * 4),
                    e[0] + delta * k[0],
                    e[1] + delta * k[1],
                    e[2] + delta * k[2],
                    e[3] + delta * k[3],
                )
            if c.lane == 0:
                M.sts_f32(c.x + 2560 + (c.warp * 16 + v) * 4, o + delta * kq)


@cute.jit
def kda(c, d, task):
    """Shared memory in the x area, fp32: q at 0, k at 512, v at 1024, alpha at 1536, beta at 2048, o at 2560."""
    heads = i32(d, L.PARAMS + K_HEADS)
    width = heads * DIM
    out = operand(d, L.PARAMS + K_OUT)
    lo, hi, step = units_of(d, task)
    for u in cutlass.range(lo, hi, step, unroll=1):
        row = u // heads
        head = u - row * heads
        if row < c.rows:
            state = M.ld_input_b32(i64(d, L.PARAMS + K_SLOTS) + Int64(row) * 4)
            live = state > 0
            slot = cutlass.max(state, 0)
            part = c.tid // DIM
            M.sts_f32(c.x + c.tid * 4, conv_channel(c, d, part, c.tid - part * DIM, head, row, slot, live))
            if c.tid < DIM:
                M.sts_f32(c.x + 1024 + c.tid * 4, conv_channel(c, d, 2, c.tid, head, row, slot, live))
            else:
                ch = c.tid - DIM
                f = load1(c, operand(d, L.PARAMS + K_F), row * width + head * DIM + ch)
                f = f + M.ld_weight_f32(i64(d, L.PARAMS + K_DT_BIAS) + Int64(head * DIM + ch) * 4)
                a = exp(M.ld_weight_f32(i64(d, L.PARAMS + K_A_LOG) + Int64(head) * 4))
                M.sts_f32(c.x + 1536 + ch * 4, exp(f32(d, L.PARAMS + K_LOWER) * sigmoid(a * f)))
            if c.tid == 0:
                b = load1(c, operand(d, L.PARAMS + K_B), row * heads + head)
                M.sts_f32(c.x + 2048, sigmoid(b))
            csync()
            q = M.lds_v4f(c.x + c.lane * 16)
            k = M.lds_v4f(c.x + 512 + c.lane * 16)
            alpha = M.lds_v4f(c.x + 1536 + c.lane * 16)
            eps = f32(d, L.PARAMS + K_L2_EPS)
            qs = rsqrt(warp_sum(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3]) + eps) * Float32(DIM**-0.5)
            ks = rsqrt(warp_sum(k[0] * k[0] + k[1] * k[1] + k[2] * k[2] + k[3] * k[3]) + eps)
            recur(c, d, slot, head, live, [v * qs for v in q], [v * ks for v in k], alpha)
            csync()
            if c.warp == 0:
                o = M.lds_v4f(c.x + 2560 + c.lane * 16)
                ss = warp_sum(o[0] * o[0] + o[1] * o[1] + o[2] * o[2] + o[3] * o[3])
                scale = rsqrt(ss / Float32(DIM) + f32(d, L.PARAMS + K_EPS))
                w = M.ld_weight_v4f(i64(d, L.PARAMS + K_O_NORM) + Int64(c.lane) * 16)
                col = row * width + head * DIM + c.lane * 4
                gate = operand(d, L.PARAMS + K_G)
                y = [o[i] * scale * w[i] * sigmoid(load1(c, gate, col + i)) for i in range(4)]
                zero = Float32(0.0)
                if live:
                    store4(c, out, col, y[0], y[1], y[2], y[3])
                else:
                    store4(c, out, col, zero, zero, zero, zero)
            csync()
