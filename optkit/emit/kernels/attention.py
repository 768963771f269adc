"""Paged attention for decode, MLA (one latent row per token) and GQA (K and V per kv head), split over tokens.

Heads are the M of the mma (up to 16), tokens its N, so K rows are read once for all heads of a group. 64 tokens are
staged at a time; softmax is online in fp32; the probabilities are rounded to bf16 for the second product (fp32 sum of
the unrounded ones), as flash attention does. Caches are addressed by (base, block table, block size, strides) only.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, range_constexpr

from optkit.emit import layout as L
from optkit.emit.kernels import memory as M
from optkit.emit.kernels.arith import (
    bf16_hi,
    bf16_lo,
    exp,
    ldmatrix_x2_trans,
    low32,
    mma,
    pack_bf16,
    rsqrt,
    warp_max,
    warp_sum,
)
from optkit.emit.kernels.core import (
    block_sum,
    csync,
    f32,
    i32,
    i64,
    load1,
    load2_f32,
    load4,
    load8_words,
    operand,
    rt_i64,
    store4,
    units_of,
)

A = cute.arch
NEG = -1.0e30
# params of attn and attn_combine
(
    T_KIND,
    T_GROUPS,
    T_HPG,
    T_DQK,
    T_DV,
    T_SCALE,
    T_SPLITS,
    T_K,
    T_K_BLOCK,
    T_K_ROW,
    T_K_HEAD,
    T_V,
    T_V_BLOCK,
    T_V_ROW,
    T_V_HEAD,
    T_LORA,
    T_QROW,
    T_NOPE,
) = range(18)
T_Q, T_QL, T_OUT, T_TABLE = 18, 20, 22, 24
# params of mla_insert and rope_insert
(I_KV, I_BLOCK, I_ROW, I_LORA, I_ROPE, I_NORM, I_EPS) = range(7)
I_IN, I_MAPPING = 8, 10
(R_K, R_K_BLOCK, R_K_ROW, R_K_HEAD, R_V, R_V_BLOCK, R_V_ROW, R_V_HEAD, R_HEADS, R_KV_HEADS, R_DIM, R_TABLE) = range(12)
R_Q, R_KIN, R_VIN, R_OUT, R_MAPPING = 12, 14, 16, 18, 20


@cute.jit
def new_row(c, row, mapping, base, block_stride, row_stride):
    """(address of the new cache row of token `row`, 1 if it may be written). A negative slot is padding."""
    slot = M.ld_input_b64(mapping + Int64(row) * 8)
    bs = rt_i64(c, L.RT_BLOCK_SIZE)
    live = slot >= Int64(0)
    pos = cutlass.max(slot, Int64(0))
    block = pos // bs
    return base + block * block_stride + (pos - block * bs) * row_stride, live


@cute.jit
def mla_insert(c, d, task):
    """Cache row of a token: RMSNorm of the latent part, the rest as it is. Unit = one row."""
    op = operand(d, L.PARAMS + I_IN)
    lora, rope = i32(d, L.PARAMS + I_LORA), i32(d, L.PARAMS + I_ROPE)
    width = lora + rope
    lo, hi, step = units_of(d, task)
    for r in cutlass.range(lo, hi, step, unroll=1):
        if r < c.rows:
            s = Float32(0.0)
            for j in cutlass.range(c.tid, lora, 256, unroll=1):
                x = load1(c, op, r * width + j)
                s = s + x * x
            scale = rsqrt(block_sum(c, s, 0) / Float32(lora) + f32(d, L.PARAMS + I_EPS))
            addr, live = new_row(
                c,
                r,
                i64(d, L.PARAMS + I_MAPPING),
                i64(d, L.PARAMS + I_KV),
                i64(d, L.PARAMS + I_BLOCK),
                i64(d, L.PARAMS + I_ROW),
            )
            for j in cutlass.range(c.tid, width // 4, 256, unroll=1):
                x0, x1, x2, x3 = load4(c, op, r * width + j * 4)
                if j * 4 < lora:
                    w0, w1 = M.ld_weight_v2(i64(d, L.PARAMS + I_NORM) + Int64(j) * 8)
                    x0, x1 = x0 * scale * bf16_lo(w0), x1 * scale * bf16_hi(w0)
                    x2, x3 = x2 * scale * bf16_lo(w1), x3 * scale * bf16_hi(w1)
                p, q = pack_bf16(x0, x1), pack_bf16(x2, x3)
                if live:
                    M.st_state_b16(addr + Int64(j) * 8, p)
                    M.st_state_b16(addr + Int64(j) * 8 + 2, p >> Uint32(16))
                    M.st_state_b16(addr + Int64(j) * 8 + 4, q)
                    M.st_state_b16(addr + Int64(j) * 8 + 6, q >> Uint32(16))


@cute.jit
def rotate(c, d, op, base, i, half, table):
    """Rotated pair (i, i + half) of a head that starts at element `base` (rotate-half convention)."""
    cos = M.ld_weight_f32(table + Int64(i) * 8)
    sin = M.ld_weight_f32(table + Int64(i) * 8 + 4)
    a = load1(c, op, base + i)
    b = load1(c, op, base + i + half)
    return a * cos - b * sin, b * cos + a * sin


@cute.jit
def rope_insert(c, d, task):
    """Rotate q into its buffer, k into the cache, v into the cache. Unit = one row.

    The table holds (cos, sin) pairs [position, dim / 2], made in float64 on the host; position = length - 1.
    """
    heads, kv_heads, dim = i32(d, L.PARAMS + R_HEADS), i32(d, L.PARAMS + R_KV_HEADS), i32(d, L.PARAMS + R_DIM)
    half = dim // 2
    out = operand(d, L.PARAMS + R_OUT)
    lo, hi, step = units_of(d, task)
    for r in cutlass.range(lo, hi, step, unroll=1):
        if r < c.rows:
            pos = cutlass.max(M.ld_input_b32(rt_i64(c, L.RT_SEQ_LEN) + Int64(r) * 4) - 1, 0)
            table = i64(d, L.PARAMS + R_TABLE) + Int64(pos) * (half * 8)
            q, k, v = operand(d, L.PARAMS + R_Q), operand(d, L.PARAMS + R_KIN), operand(d, L.PARAMS + R_VIN)
            for i in cutlass.range(c.tid, heads * half // 4, 256, unroll=1):
                h = (i * 4) // half
                j = i * 4 - h * half
                base = (r * heads + h) * dim
                a = [rotate(c, d, q, base, j + e, half, table) for e in range(4)]
                store4(c, out, base + j, a[0][0], a[1][0], a[2][0], a[3][0])
                store4(c, out, base + j + half, a[0][1], a[1][1], a[2][1], a[3][1])
            ka, live = new_row(
                c,
                r,
                i64(d, L.PARAMS + R_MAPPING),
                i64(d, L.PARAMS + R_K),
                i64(d, L.PARAMS + R_K_BLOCK),
                i64(d, L.PARAMS + R_K_ROW),
            )
            va, same = new_row(
                c,
                r,
                i64(d, L.PARAMS + R_MAPPING),
                i64(d, L.PARAMS + R_V),
                i64(d, L.PARAMS + R_V_BLOCK),
                i64(d, L.PARAMS + R_V_ROW),
            )
            for i in cutlass.range(c.tid, kv_heads * half, 256, unroll=1):
                h = i // half
                j = i - h * half
                base = (r * kv_heads + h) * dim
                x, y = rotate(c, d, k, base, j, half, table)
                ha = ka + Int64(h) * i64(d, L.PARAMS + R_K_HEAD) + Int64(j) * 2
                hv = va + Int64(h) * i64(d, L.PARAMS + R_V_HEAD) + Int64(j) * 2
                v0 = load1(c, v, base + j)
                v1 = load1(c, v, base + j + half)
                if live and same:
                    M.st_state_b16(ha, pack_bf16(x, x))
                    M.st_state_b16(ha + Int64(half) * 2, pack_bf16(y, y))
                    M.st_state_b16(hv, pack_bf16(v0, v0))
                    M.st_state_b16(hv + Int64(half) * 2, pack_bf16(v1, v1))


@cute.jit
def stage_rows(c, row, dst, blocks, base, block_stride, row_stride, tok0, length, width, pitch):
    """64 cache rows of request `row` from token tok0 into shared memory; rows past the length become zero."""
    n8 = width // 8
    bs = low_i32(rt_i64(c, L.RT_BLOCK_SIZE))
    table = blocks + Int64(row) * rt_i64(c, L.RT_TABLE_STRIDE) * 4
    for i in cutlass.range(c.tid, 64 * n8, 256, unroll=1):
        j = i // n8
        e = i - j * n8
        w0 = Uint32(0)
        w1 = Uint32(0)
        w2 = Uint32(0)
        w3 = Uint32(0)
        if tok0 + j < length:
            block = (tok0 + j) // bs
            phys = M.ld_input_b32(table + Int64(block) * 4)
            addr = base + Int64(phys) * block_stride + Int64(tok0 + j - block * bs) * row_stride + Int64(e) * 16
            w0, w1, w2, w3 = M.ld_state_v4(addr)
        M.sts_v4(dst + j * pitch + e * 16, w0, w1, w2, w3)


def low_i32(x):
    """The low word of an Int64 as Int32."""
    return Int32(low32(x))


@cute.jit
def stage_queries(c, d, row, group, qs, pitch):
    """16 query rows (heads of the group, zero rows beyond) into shared memory: [latent query | positionless part] or q."""
    hpg, dqk, lora = i32(d, L.PARAMS + T_HPG), i32(d, L.PARAMS + T_DQK), i32(d, L.PARAMS + T_LORA)
    q, ql = operand(d, L.PARAMS + T_Q), operand(d, L.PARAMS + T_QL)
    qrow, nope = i32(d, L.PARAMS + T_QROW), i32(d, L.PARAMS + T_NOPE)
    n8 = dqk // 8
    for i in cutlass.range(c.tid, 16 * n8, 256, unroll=1):
        h = i // n8
        e = (i - h * n8) * 8
        w0 = Uint32(0)
        w1 = Uint32(0)
        w2 = Uint32(0)
        w3 = Uint32(0)
        if h < hpg:
            head = group * hpg + h
            if e < lora:
                w0, w1, w2, w3 = load8_words(c, ql, row * ql.width + head * lora + e)
            else:
                w0, w1, w2, w3 = load8_words(c, q, row * q.width + head * qrow + nope + e - lora)
        M.sts_v4(qs + h * pitch + e * 2, w0, w1, w2, w3)


@cute.jit
def scores(c, qs, ks, ss, pitch, dqk, scale, tok0, length):
    """Scaled scores of 16 heads x 64 tokens, fp32, masked past the length; each warp does 8 tokens."""
    a0 = Float32(0.0)
    a1 = Float32(0.0)
    a2 = Float32(0.0)
    a3 = Float32(0.0)
    for q in cutlass.range(dqk // 32, unroll=1):
        lo = M.lds_v4(qs + c.g * pitch + q * 64 + c.t * 16)
        hi = M.lds_v4(qs + (c.g + 8) * pitch + q * 64 + c.t * 16)
        b = M.lds_v4(ks + (c.warp * 8 + c.g) * pitch + q * 64 + c.t * 16)
        a0, a1, a2, a3 = mma(lo[0], hi[0], lo[1], hi[1], b[0], b[1], a0, a1, a2, a3)
        a0, a1, a2, a3 = mma(lo[2], hi[2], lo[3], hi[3], b[2], b[3], a0, a1, a2, a3)
    col = c.warp * 8 + 2 * c.t
    x = [a0 * scale, a1 * scale, a2 * scale, a3 * scale]
    for i in range_constexpr(4):
        v = x[i]
        if tok0 + col + (i & 1) >= length:
            v = Float32(NEG)
        M.sts_f32(ss + ((c.g + 8 * (i // 2)) * 64 + col + (i & 1)) * 4, v)


@cute.jit
def soften(c, ss, ps, ml):
    """Online softmax of 64 new tokens: warp w does heads 2w, 2w+1. ml = [m 16][l 16][alpha 16] fp32."""
    for i in range_constexpr(2):
        h = c.warp * 2 + i
        x = M.lds_f32(ss + (h * 64 + c.lane * 2) * 4)
        y = M.lds_f32(ss + (h * 64 + c.lane * 2 + 1) * 4)
        old = M.lds_f32(ml + h * 4)
        top = A.fmax(warp_max(A.fmax(x, y)), old)
        px = exp(x - top)
        py = exp(y - top)
        if x <= Float32(NEG):
            px = Float32(0.0)
        if y <= Float32(NEG):
            py = Float32(0.0)
        alpha = exp(old - top)
        total = warp_sum(px + py) + alpha * M.lds_f32(ml + 64 + h * 4)
        A.sync_warp()
        if c.lane == 0:
            M.sts_f32(ml + h * 4, top)
            M.sts_f32(ml + 64 + h * 4, total)
            M.sts_f32(ml + 128 + h * 4, alpha)
        M.sts_b32(ps + h * 192 + c.lane * 4, pack_bf16(px, py))


@cute.jit
def attn(c, d, task):
    """Unit = (row, group of heads, split): partial or final attention output.

    Shared memory in the x area: queries [16], K rows [64] (and V rows [64] for GQA) with pitch 2 d + 64, scores fp32
    [16][64], probabilities bf16 [16][64 + 32], m, l, alpha [3][16]; the outputs reuse the K rows.
    """
    groups, splits, hpg = i32(d, L.PARAMS + T_GROUPS), i32(d, L.PARAMS + T_SPLITS), i32(d, L.PARAMS + T_HPG)
    dqk, dv, scale = i32(d, L.PARAMS + T_DQK), i32(d, L.PARAMS + T_DV), f32(d, L.PARAMS + T_SCALE)
    pitch, vpitch = dqk * 2 + 64, dv * 2 + 64
    gqa = i32(d, L.PARAMS + T_KIND) == 1
    qs = c.x
    ks = qs + 16 * pitch
    vs = ks
    if gqa:
        vs = ks + 64 * pitch
    else:
        vpitch = pitch
    ss = vs + 64 * vpitch
    ps = ss + 4096
    ml = ps + 3072
    out = operand(d, L.PARAMS + T_OUT)
    per_warp = dv // 64  # 8-column tiles of the output a warp owns
    lo, hi, step = units_of(d, task)
    for u in cutlass.range(lo, hi, step, unroll=1):
        row = u // (groups * splits)
        group = (u // splits) % groups
        split = u % splits
        if row < c.rows:
            length = M.ld_input_b32(rt_i64(c, L.RT_SEQ_LEN) + Int64(row) * 4)
            chunks = (length + 63) // 64
            first = (split * chunks) // splits
            last = ((split + 1) * chunks) // splits
            kbase = i64(d, L.PARAMS + T_K) + Int64(group) * i64(d, L.PARAMS + T_K_HEAD)
            vbase = i64(d, L.PARAMS + T_V) + Int64(group) * i64(d, L.PARAMS + T_V_HEAD)
            stage_queries(c, d, row, group, qs, pitch)
            if c.tid < 48:
                init = Float32(0.0)
                if c.tid < 16:
                    init = Float32(NEG)
                M.sts_f32(ml + c.tid * 4, init)
            acc = [Float32(0.0) for _ in range(32)]
            for ch in cutlass.range(first, last, unroll=1):
                stage_rows(
                    c,
                    row,
                    ks,
                    i64(d, L.PARAMS + T_TABLE),
                    kbase,
                    i64(d, L.PARAMS + T_K_BLOCK),
                    i64(d, L.PARAMS + T_K_ROW),
                    ch * 64,
                    length,
                    dqk,
                    pitch,
                )
                if gqa:
                    stage_rows(
                        c,
                        row,
                        vs,
                        i64(d, L.PARAMS + T_TABLE),
                        vbase,
                        i64(d, L.PARAMS + T_V_BLOCK),
                        i64(d, L.PARAMS + T_V_ROW),
                        ch * 64,
                        length,
                        dv,
                        vpitch,
                    )
                csync()
                scores(c, qs, ks, ss, pitch, dqk, scale, ch * 64, length)
                csync()
                soften(c, ss, ps, ml)
                csync()
                lo_a = M.lds_f32(ml + 128 + c.g * 4)
                hi_a = M.lds_f32(ml + 128 + (c.g + 8) * 4)
                for i in range_constexpr(8):
                    acc[4 * i], acc[4 * i + 1] = acc[4 * i] * lo_a, acc[4 * i + 1] * lo_a
                    acc[4 * i + 2], acc[4 * i + 3] = acc[4 * i + 2] * hi_a, acc[4 * i + 3] * hi_a
                for kk in range_constexpr(4):
                    pa = ps + c.g * 192 + kk * 32 + c.t * 4
                    p = (M.lds_b32(pa), M.lds_b32(pa + 8 * 192), M.lds_b32(pa + 16), M.lds_b32(pa + 8 * 192 + 16))
                    for i in range_constexpr(8):
                        if i < per_warp:
                            col = (c.warp * per_warp + i) * 8
                            va = vs + (kk * 16 + (c.lane & 15)) * vpitch + col * 2
                            b0, b1 = ldmatrix_x2_trans(va)
                            acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3] = mma(
                                p[0],
                                p[1],
                                p[2],
                                p[3],
                                b0,
                                b1,
                                acc[4 * i],
                                acc[4 * i + 1],
                                acc[4 * i + 2],
                                acc[4 * i + 3],
                            )
                csync()
            csync()
            os = ks  # [16][dv + 4] fp32
            for i in range_constexpr(8):
                if i < per_warp:
                    col = (c.warp * per_warp + i) * 8 + 2 * c.t
                    M.sts_v2f(os + (c.g * (dv + 4) + col) * 4, acc[4 * i], acc[4 * i + 1])
                    M.sts_v2f(os + ((c.g + 8) * (dv + 4) + col) * 4, acc[4 * i + 2], acc[4 * i + 3])
            csync()
            n4 = dv // 4
            for i in cutlass.range(c.tid, hpg * n4, 256, unroll=1):
                h = i // n4
                e = (i - h * n4) * 4
                o0, o1, o2, o3 = M.lds_v4f(os + (h * (dv + 4) + e) * 4)
                if splits == 1:
                    total = M.lds_f32(ml + 64 + h * 4)
                    inv = Float32(1.0) / A.fmax(total, Float32(1.0e-30))
                    store4(c, out, row * out.width + (group * hpg + h) * dv + e, o0 * inv, o1 * inv, o2 * inv, o3 * inv)
                else:
                    store4(c, out, partial_at(row, out.width, group, splits, split, hpg, h, dv) + 4 + e, o0, o1, o2, o3)
            if splits > 1 and c.tid < hpg:
                store4(
                    c,
                    out,
                    partial_at(row, out.width, group, splits, split, hpg, c.tid, dv),
                    M.lds_f32(ml + c.tid * 4),
                    M.lds_f32(ml + 64 + c.tid * 4),
                    Float32(0.0),
                    Float32(0.0),
                )
            csync()


def partial_at(row, width, group, splits, split, hpg, h, dv):
    """Element of a head's partial: [m, l, 0, 0, o...] of dv + 4 floats per (row, group, split, head)."""
    return row * width + ((group * splits + split) * hpg + h) * (dv + 4)


@cute.jit
def attn_combine(c, d, task):
    """Softmax-weighted sum of the splits in split order. Unit = (row, group)."""
    groups, splits, hpg, dv = (
        i32(d, L.PARAMS + T_GROUPS),
        i32(d, L.PARAMS + T_SPLITS),
        i32(d, L.PARAMS + T_HPG),
        i32(d, L.PARAMS + T_DV),
    )
    part, out = operand(d, L.PARAMS + T_Q), operand(d, L.PARAMS + T_OUT)
    n4 = dv // 4
    lo, hi, step = units_of(d, task)
    for u in cutlass.range(lo, hi, step, unroll=1):
        row = u // groups
        group = u - row * groups
        if row < c.rows:
            # weight of (head, split) = exp(m - top) / total, once a row: [16][splits] fp32 in the x area
            for i in cutlass.range(c.tid, hpg * splits, 256, unroll=1):
                h = i // splits
                at = partial_at(row, part.width, group, splits, i - h * splits, hpg, h, dv)
                m, den = load2_f32(c, part, at)
                M.sts_v2f(c.x + i * 8, m, den)
            csync()
            for i in cutlass.range(c.tid, hpg * splits, 256, unroll=1):
                h = i // splits
                top = Float32(NEG)
                for s in cutlass.range(splits, unroll=1):
                    top = A.fmax(top, M.lds_f32(c.x + (h * splits + s) * 8))
                total = Float32(0.0)
                for s in cutlass.range(splits, unroll=1):
                    ms = M.lds_f32(c.x + (h * splits + s) * 8)
                    total = total + exp(ms - top) * M.lds_f32(c.x + (h * splits + s) * 8 + 4)
                w = exp(M.lds_f32(c.x + i * 8) - top) / A.fmax(total, Float32(1.0e-30))
                M.sts_f32(c.x + hpg * splits * 8 + i * 4, w)
            csync()
            for i in cutlass.range(c.tid, hpg * n4, 256, unroll=1):
                h = i // n4
                e = (i - h * n4) * 4
                y = [Float32(0.0) for _ in range(4)]
                for s in cutlass.range(splits, unroll=4):
                    w = M.lds_f32(c.x + hpg * splits * 8 + (h * splits + s) * 4)
                    o = load4(c, part, partial_at(row, part.width, group, splits, s, hpg, h, dv) + 4 + e)
                    for q in range_constexpr(4):
                        y[q] = y[q] + w * o[q]
                store4(c, out, row * out.width + (group * hpg + h) * dv + e, y[0], y[1], y[2], y[3])
            csync()
