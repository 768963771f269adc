"""Routed experts: top-k, then MXFP4 gate/up and down for the distinct experts of the step.

Work is cut by slot of the step's list of distinct experts, not by expert: the list (`uniq`) has a static bound and names,
for every row, the index k with which the row chose the expert, or -1. A weight tile is therefore read once for all rows.
e2m1 pairs unpack in the order (p, p + 4), so x is staged with each 8 values interleaved the same way; ue8m0 scales
(one per 32 columns) multiply the fp32 accumulator of a group.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr

from optkit.emit import layout as L
from optkit.emit.kernels import memory as M
from optkit.emit.kernels.arith import exp2_scale, mma, sigmoid, unpack_e2m1
from optkit.emit.kernels.core import (
    csync,
    f32,
    i32,
    i64,
    load1,
    load4,
    operand,
    send4,
    store4,
    tile_done,
    tile_wait,
    units_of,
)
from optkit.emit.kernels.dense import activate, reduce_tile, stage_copy

A = cute.arch
# params of route
(RO_EXPERTS, RO_TOPK, RO_SCALE, RO_BIAS, RO_IDS, RO_UNIQ) = range(6)
RO_LOGITS, RO_WTS = 6, 8
# params of the expert stages
(
    E_INTER,
    E_LATENT,
    E_TOPK,
    E_ACT,
    E_BETA,
    E_LINEAR_BETA,
    E_UNIQ,
    E_W1,
    E_S1,
    E_W3,
    E_S3,
    E_RANKS,
    E_PEERS,
    E_COEFFS,
) = range(14)
E_IN, E_OUT, E_WTS = 14, 16, 18


@cute.jit
def route(c, d, task):
    """One task: warp r selects for row r; then the list of distinct experts in first-appearance order.

    Shared memory in the x area: scores s + bias [8][E] and s [8][E] fp32; then ids [8][topk], first flags, ranks and the
    expert of each rank [8 topk].
    """
    experts, topk = i32(d, L.PARAMS + RO_EXPERTS), i32(d, L.PARAMS + RO_TOPK)
    logits, wts = operand(d, L.PARAMS + RO_LOGITS), operand(d, L.PARAMS + RO_WTS)
    ids_out, uniq = i64(d, L.PARAMS + RO_IDS), i64(d, L.PARAMS + RO_UNIQ)
    row = c.warp
    gates = c.x + L.ROWS * experts * 4
    ids = gates + L.ROWS * experts * 4
    sel = ids + 512
    rank = sel + 512
    owner = rank + 512
    bias = i64(d, L.PARAMS + RO_BIAS)
    for i in cutlass.range(c.tid, c.rows * (experts // 4), 256, unroll=1):
        r = i // (experts // 4)
        col = (i - r * (experts // 4)) * 4
        x = load4(c, logits, r * logits.width + col)
        b = M.ld_weight_v4f(bias + Int64(col) * 4)
        s = [sigmoid(v) for v in x]
        at = (r * experts + col) * 4
        M.sts_v4f(gates + at, s[0], s[1], s[2], s[3])
        M.sts_v4f(c.x + at, s[0] + b[0], s[1] + b[1], s[2] + b[2], s[3] + b[3])
    csync()
    if row < c.rows:
        sc = c.x + row * experts * 4
        total = Float32(0.0)
        for k in cutlass.range(topk, unroll=1):
            best = Float32(-1.0e30)
            at = Int32(1 << 30)
            for i in cutlass.range(c.lane, experts, 32, unroll=1):
                v = M.lds_f32(sc + i * 4)
                if v > best:  # ids rise along the loop, so equal scores keep the lower id
                    best = v
                    at = i
            for o in (16, 8, 4, 2, 1):
                ov = A.shuffle_sync_bfly(best, offset=o)
                oi = A.shuffle_sync_bfly(at, offset=o)
                if ov > best or (ov == best and oi < at):
                    best = ov
                    at = oi
            at = cutlass.min(at, experts - 1)
            s = M.lds_f32(gates + (row * experts + at) * 4)
            total = total + s
            A.sync_warp()
            if c.lane == 0:
                M.sts_f32(sc + at * 4, Float32(-2.0e30))
                M.sts_b32(ids + (row * topk + k) * 4, at)
                M.sts_f32(sel + (row * topk + k) * 4, s)
            A.sync_warp()
        for k in cutlass.range(c.lane, topk // 4, 32, unroll=1):
            w = [M.lds_f32(sel + (row * topk + k * 4 + q) * 4) for q in range(4)]
            inv = f32(d, L.PARAMS + RO_SCALE) / (total + Float32(1.0e-20))
            store4(c, wts, row * topk + k * 4, w[0] * inv, w[1] * inv, w[2] * inv, w[3] * inv)
            for q in range_constexpr(4):
                M.st_act_b32(ids_out + Int64(row * topk + k * 4 + q) * 4, M.lds_b32(ids + (row * topk + k * 4 + q) * 4))
    csync()
    n = c.rows * topk
    mine = c.tid
    first = Int32(0)
    if mine < n:
        e = M.lds_i32(ids + mine * 4)
        first = Int32(1)
        for v in cutlass.range(mine, unroll=1):
            if M.lds_i32(ids + v * 4) == e:
                first = Int32(0)
    if mine < 128:
        M.sts_b32(sel + mine * 4, first)
    csync()
    if mine < 128:
        before = Int32(0)
        for v in cutlass.range(mine, unroll=1):
            before += M.lds_i32(sel + v * 4)
        M.sts_b32(rank + mine * 4, before)
        if first == 1:
            M.sts_b32(owner + before * 4, M.lds_i32(ids + mine * 4))
    csync()
    last = M.lds_i32(rank + (n - 1) * 4) + M.lds_i32(sel + (n - 1) * 4)
    stride = 1 + L.ROWS
    for i in cutlass.range(c.tid, L.ROWS * topk * L.ROWS, 256, unroll=1):
        u = i // L.ROWS
        r = i - u * L.ROWS
        k = Int32(-1)
        expert = Int32(-1)
        if u < last:
            expert = M.lds_i32(owner + u * 4)
        if expert >= 0 and r < c.rows:
            for q in cutlass.range(topk, unroll=1):
                if M.lds_i32(ids + (r * topk + q) * 4) == expert:
                    k = q
        M.st_act_b32(uniq + Int64(1 + u * stride + 1 + r) * 4, k)
        if r == 0:
            M.st_act_b32(uniq + Int64(1 + u * stride) * 4, expert)
    if c.tid == 0:
        M.st_act_b32(uniq, last)


@cute.jit
def distinct(c, uniq, topk):
    """Number of distinct experts of the step, clipped to its bound (an aborted step may leave anything)."""
    return cutlass.max(cutlass.min(Int32(M.ld_act_b32(uniq)), L.ROWS * topk), 0)


@cute.jit
def fp4_tile(c, slot, x, mask, acc, groups, scale_pitch, weight_lo, weight_hi):
    """acc += scaled tile . x over this warp's groups of 32 columns.

    `mask` is all ones, or zero where token row c.g has no part in this tile: its x then counts as zeros, whatever stands
    there (a routing weight of 0 would not do: 0 times the NaN of another request is NaN). `weight_lo`, `weight_hi`
    multiply the two token columns this lane accumulates (1 for gate/up, the routing weight for down). Scales lie at
    SCALES: row m at m * scale_pitch, one byte per group.
    """
    a0, a1, a2, a3 = acc
    zero = Float32(0.0)
    for q in cutlass.range(c.warp, groups, L.WARPS, unroll=1):
        wa = slot + c.g * L.PITCH + q * 16 + c.t * 4
        lo = unpack_e2m1(M.lds_b32(wa))
        hi = unpack_e2m1(M.lds_b32(wa + 8 * L.PITCH))
        b = M.lds_v4(x + q * 64 + c.t * 16)
        d0, d1, d2, d3 = mma(lo[0], hi[0], lo[1], hi[1], b[0] & mask, b[1] & mask, zero, zero, zero, zero)
        d0, d1, d2, d3 = mma(lo[2], hi[2], lo[3], hi[3], b[2] & mask, b[3] & mask, d0, d1, d2, d3)
        s_lo = exp2_scale(M.lds_u8(slot + L.SCALES + c.g * scale_pitch + q))
        s_hi = exp2_scale(M.lds_u8(slot + L.SCALES + (c.g + 8) * scale_pitch + q))
        a0 = a0 + d0 * (s_lo * weight_lo)
        a1 = a1 + d1 * (s_lo * weight_hi)
        a2 = a2 + d2 * (s_hi * weight_lo)
        a3 = a3 + d3 * (s_hi * weight_hi)
    return a0, a1, a2, a3


@cute.jit
def expert_gate_up(c, d, task, it):
    """act(W1 z, W3 z) for 8 rows of one distinct expert per unit. Returns the ring position."""
    inter, latent, topk = i32(d, L.PARAMS + E_INTER), i32(d, L.PARAMS + E_LATENT), i32(d, L.PARAMS + E_TOPK)
    uniq, out = i64(d, L.PARAMS + E_UNIQ), operand(d, L.PARAMS + E_OUT)
    pitch = latent * 2 + 64
    stage_copy(c, operand(d, L.PARAMS + E_IN), c.rows, latent, pitch, True)
    csync()
    n = distinct(c, uniq, topk)
    per = inter // 8
    lo, hi, step = units_of(d, task)
    one = Float32(1.0)
    every = Uint32(0xFFFFFFFF)
    parity = Int32(0)
    for i in cutlass.range(lo, hi, step, unroll=1):
        u = i // per
        j = i - u * per
        if u < n:
            acc = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
            for ch in cutlass.range((latent + L.CHUNK_FP4 - 1) // L.CHUNK_FP4, unroll=1):
                cols = cutlass.min(latent - ch * L.CHUNK_FP4, L.CHUNK_FP4)
                slot = tile_wait(c, it)
                acc = fp4_tile(
                    c, slot, c.x + c.g * pitch + ch * (L.CHUNK_FP4 * 2), every, acc, cols // 32, cols // 32, one, one
                )
                tile_done(c, it)
                it += 1
            y0, y1, y2, y3 = reduce_tile(c, acc, parity)
            parity = parity ^ 1
            if c.warp == 0:
                v = [A.shuffle_sync_bfly(x, offset=2) for x in (y0, y1, y2, y3)]
                act, b, lb = i32(d, L.PARAMS + E_ACT), f32(d, L.PARAMS + E_BETA), f32(d, L.PARAMS + E_LINEAR_BETA)
                k = Int32(-1)
                if c.g < c.rows:
                    k = Int32(M.ld_act_b32(uniq + Int64(1 + u * (1 + L.ROWS) + 1 + c.g) * 4))
                if k >= 0 and c.t < 2:
                    store4(
                        c,
                        out,
                        c.g * out.width + k * inter + j * 8 + 4 * c.t,
                        activate(act, b, lb, y0, v[0]),
                        activate(act, b, lb, y1, v[1]),
                        activate(act, b, lb, y2, v[2]),
                        activate(act, b, lb, y3, v[3]),
                    )
    return it


@cute.jit
def member(c, table, u, n):
    """(k index of row n in the u-th distinct expert or -1) from the copy of `uniq` in shared memory."""
    k = Int32(-1)
    if n < c.rows:
        k = M.lds_i32(table + (1 + u * (1 + L.ROWS) + 1 + n) * 4)
    return k


@cute.jit
def expert_down(c, d, task, it):
    """y = sum over distinct experts, in list order, of w_k W2 a_k for 16 output rows per unit.

    Shared memory in the x area: activations [rows * topk] with pitch 2 inter + 64, then `uniq`, then the weights.
    """
    inter, latent, topk = i32(d, L.PARAMS + E_INTER), i32(d, L.PARAMS + E_LATENT), i32(d, L.PARAMS + E_TOPK)
    uniq, out = i64(d, L.PARAMS + E_UNIQ), operand(d, L.PARAMS + E_OUT)
    wts = operand(d, L.PARAMS + E_WTS)
    pitch = inter * 2 + 64
    table = c.x + L.ROWS * topk * pitch
    weights = table + (1 + L.ROWS * topk * (1 + L.ROWS)) * 4
    stage_copy(c, operand(d, L.PARAMS + E_IN), c.rows * topk, inter, pitch, True)
    for i in cutlass.range(c.tid, 1 + L.ROWS * topk * (1 + L.ROWS), 256, unroll=1):
        M.sts_b32(table + i * 4, M.ld_act_b32(uniq + Int64(i) * 4))
    for i in cutlass.range(c.tid, c.rows * topk, 256, unroll=1):
        M.sts_f32(weights + i * 4, load1(c, wts, i))
    csync()
    n = distinct(c, uniq, topk)
    lo, hi, step = units_of(d, task)
    parity = Int32(0)
    for u0 in cutlass.range(lo, hi, step, unroll=1):
        acc = (Float32(0.0), Float32(0.0), Float32(0.0), Float32(0.0))
        for u in cutlass.range(n, unroll=1):
            kx = member(c, table, u, c.g)
            ka = member(c, table, u, 2 * c.t)
            kb = member(c, table, u, 2 * c.t + 1)
            wa = Float32(0.0)
            wb = Float32(0.0)
            if ka >= 0:
                wa = M.lds_f32(weights + (2 * c.t * topk + ka) * 4)
            if kb >= 0:
                wb = M.lds_f32(weights + ((2 * c.t + 1) * topk + kb) * 4)
            src = Int32(0)
            mask = Uint32(0)
            if kx >= 0:
                src = c.g * topk + kx
                mask = Uint32(0xFFFFFFFF)
            slot = tile_wait(c, it)
            acc = fp4_tile(c, slot, c.x + src * pitch, mask, acc, inter // 32, inter // 32, wa, wb)
            tile_done(c, it)
            it += 1
        y = reduce_tile(c, acc, parity)
        parity = parity ^ 1
        col = u0 * 16 + 4 * c.t
        if c.warp == 0 and c.g < c.rows and col < latent:
            ranks = i32(d, L.PARAMS + E_RANKS)
            if ranks > 0:
                send4(
                    c,
                    i64(d, L.PARAMS + E_PEERS),
                    i64(d, L.PARAMS + E_COEFFS),
                    ranks,
                    out,
                    c.g,
                    c.rows,
                    col,
                    y[0],
                    y[1],
                    y[2],
                    y[3],
                )
            else:
                store4(c, out, c.g * out.width + col, y[0], y[1], y[2], y[3])
    return it
