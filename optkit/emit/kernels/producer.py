"""The producer warp: walks the same task list as the consumers and queues weight tiles into the shared-memory ring.

Static tiles are queued as far ahead as the ring is deep, past every edge that concerns activations only. Tiles of routed
experts wait for the step's list of distinct experts. A slot is refilled only after all 8 consumer warps have released
it; every warp waits for every lap of every slot in order, so a parity can never be mistaken for an older one.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, range_constexpr

from optkit.emit import layout as L
from optkit.emit.kernels import memory as M
from optkit.emit.kernels import moe
from optkit.emit.kernels.core import i32, i64, ring_wait, units_of, wait_counter

A = cute.arch


@cute.jit
def slot_for(c, it, nbytes):
    """Wait until the slot of tile `it` is free, then announce the bytes that will land in it."""
    s = it % c.slots
    stop = ring_wait(c, c.empty + s * 8, ((it // c.slots) & 1) ^ 1, 3)
    if c.lane == 0 and stop == Uint32(0):
        M.P(
            "{ .reg .b64 t; mbarrier.arrive.expect_tx.shared::cta.b64 t, [{$r0}], {$r1}; }",
            read_only_args=[c.full + s * 8, nbytes],
        )
    A.sync_warp()
    return c.ring + s * L.SLOT, c.full + s * 8, stop


@cute.jit
def queue_rows(c, slot, bar, lo, hi, n_lo, n_hi, pitch, offset, nbytes):
    """Copy up to 16 rows of `nbytes`: 8 from `lo`, 8 from `hi` (row pitch in global memory: `pitch`)."""
    row = c.lane & 7
    base = lo
    n = n_lo
    if c.lane >= 8:
        base = hi
        n = n_hi
    if c.lane < 16 and row < n:
        M.bulk_weight(slot + c.lane * L.PITCH, base + Int64(row) * pitch + offset, nbytes, bar)


@cute.jit
def queue_gemv(c, d, task, it, stop):
    """Tiles of a projection's units, part after part."""
    lo, hi, step = units_of(d, task)
    pb = Int32(L.PARTS)
    for u in cutlass.range(lo, hi, step, unroll=1):
        while u >= i32(d, pb + L.P_FIRST) + i32(d, pb + L.P_COUNT):
            pb += L.PART_WORDS
        k, m = i32(d, pb + L.P_K), i32(d, pb + L.P_M)
        local = u - i32(d, pb + L.P_FIRST)
        w, w2 = i64(d, pb + L.P_W), i64(d, pb + L.P_W2)
        pitch = Int64(k) * 2
        row0 = local * 16
        second = w + (Int64(row0) + 8) * pitch
        n_hi = cutlass.max(cutlass.min(m - row0 - 8, 8), 0)
        if w2 != Int64(0):
            row0 = local * 8
            second = w2 + Int64(row0) * pitch
            n_hi = cutlass.min(m - row0, 8)
        n_lo = cutlass.min(m - row0, 8)
        first = w + Int64(row0) * pitch
        for ch in cutlass.range((k + L.CHUNK_BF16 - 1) // L.CHUNK_BF16, unroll=1):
            nbytes = cutlass.min(k - ch * L.CHUNK_BF16, L.CHUNK_BF16) * 2
            if stop == Uint32(0):
                slot, bar, stop = slot_for(c, it, (n_lo + n_hi) * nbytes)
                if stop == Uint32(0):
                    queue_rows(c, slot, bar, first, second, n_lo, n_hi, pitch, Int64(ch) * (L.CHUNK_BF16 * 2), nbytes)
                    it += 1
    return it, stop


@cute.jit
def queue_scales(c, slot, bar, lo, hi, k, ch, groups):
    """ue8m0 scales of 8 + 8 rows: contiguous when the tile holds whole rows, else row by row (then a multiple of 16)."""
    per_row = k // 32
    if per_row == groups:
        if c.lane == 16:
            M.bulk_weight(slot + L.SCALES, lo, groups * 8, bar)
        if c.lane == 17:
            M.bulk_weight(slot + L.SCALES + groups * 8, hi, groups * 8, bar)
    else:
        row = c.lane & 7
        base = lo
        if c.lane >= 8:
            base = hi
        if c.lane < 16:
            M.bulk_weight(
                slot + L.SCALES + c.lane * groups,
                base + Int64(row) * per_row + Int64(ch) * (L.CHUNK_FP4 // 32),
                groups,
                bar,
            )


@cute.jit
def expert_ids(c, uniq, n):
    """The step's distinct experts, four a lane (expert u in lane u % 32): a read from L2 for every tile would cost more
    than the tile."""
    ids = [Int32(0) for _ in range(4)]
    for q in range_constexpr(4):
        u = c.lane + 32 * q
        if u < n:
            ids[q] = Int32(M.ld_act_b32(uniq + Int64(1 + u * (1 + L.ROWS)) * 4))
    return ids[0], ids[1], ids[2], ids[3]


@cute.jit
def expert_at(ids, u):
    """Expert u of `expert_ids`; all lanes ask for the same u."""
    v = ids[0]
    if u >= 32:
        v = ids[1]
    if u >= 64:
        v = ids[2]
    if u >= 96:
        v = ids[3]
    return A.shuffle_sync(v, u % 32)


@cute.jit
def queue_gate_up(c, d, task, it, stop):
    """8 gate and 8 up rows of one distinct expert per unit."""
    inter, latent = i32(d, L.PARAMS + moe.E_INTER), i32(d, L.PARAMS + moe.E_LATENT)
    uniq = i64(d, L.PARAMS + moe.E_UNIQ)
    n = moe.distinct(c, uniq, i32(d, L.PARAMS + moe.E_TOPK))
    ids = expert_ids(c, uniq, n)
    per = inter // 8
    lo, hi, step = units_of(d, task)
    for i in cutlass.range(lo, hi, step, unroll=1):
        u = i // per
        j = i - u * per
        if u < n and stop == Uint32(0):
            row = Int64(expert_at(ids, u)) * inter + Int64(j) * 8
            wp, sp = Int64(latent // 2), Int64(latent // 32)
            for ch in cutlass.range((latent + L.CHUNK_FP4 - 1) // L.CHUNK_FP4, unroll=1):
                cols = cutlass.min(latent - ch * L.CHUNK_FP4, L.CHUNK_FP4)
                if stop == Uint32(0):
                    slot, bar, stop = slot_for(c, it, 16 * (cols // 2) + 16 * (cols // 32))
                    if stop == Uint32(0):
                        queue_rows(
                            c,
                            slot,
                            bar,
                            i64(d, L.PARAMS + moe.E_W1) + row * wp,
                            i64(d, L.PARAMS + moe.E_W3) + row * wp,
                            8,
                            8,
                            wp,
                            Int64(ch) * (L.CHUNK_FP4 // 2),
                            cols // 2,
                        )
                        queue_scales(
                            c,
                            slot,
                            bar,
                            i64(d, L.PARAMS + moe.E_S1) + row * sp,
                            i64(d, L.PARAMS + moe.E_S3) + row * sp,
                            latent,
                            ch,
                            cols // 32,
                        )
                        it += 1
    return it, stop


@cute.jit
def queue_down(c, d, task, it, stop):
    """16 rows of W2 of every distinct expert, in list order, for each unit."""
    inter, latent = i32(d, L.PARAMS + moe.E_INTER), i32(d, L.PARAMS + moe.E_LATENT)
    uniq = i64(d, L.PARAMS + moe.E_UNIQ)
    n = moe.distinct(c, uniq, i32(d, L.PARAMS + moe.E_TOPK))
    ids = expert_ids(c, uniq, n)
    lo, hi, step = units_of(d, task)
    wp, sp = Int64(inter // 2), Int64(inter // 32)
    for u0 in cutlass.range(lo, hi, step, unroll=1):
        for u in cutlass.range(n, unroll=1):
            if stop == Uint32(0):
                row = Int64(expert_at(ids, u)) * latent + Int64(u0) * 16
                slot, bar, stop = slot_for(c, it, 16 * (inter // 2) + 16 * (inter // 32))
                if stop == Uint32(0):
                    w, s = i64(d, L.PARAMS + moe.E_W1) + row * wp, i64(d, L.PARAMS + moe.E_S1) + row * sp
                    queue_rows(c, slot, bar, w, w + 8 * wp, 8, 8, wp, Int64(0), inter // 2)
                    queue_scales(c, slot, bar, s, s + 8 * sp, inter, 0, inter // 32)
                    it += 1
    return it, stop


@cute.jit
def produce(c, d, task, it, stop):
    """Queue one stage's tiles. `stop` = 1 after an abort: nothing more is queued."""
    body = i32(d, L.BODY)
    streams = body == 0 or body == 11 or body == 12
    if streams and stop == Uint32(0):
        if i32(d, L.STREAM) == 1:  # queued only after the stage's own waits
            for w in cutlass.range(i32(d, L.N_WAITS), unroll=1):
                stop = stop | wait_counter(c, i64(d, L.WAITS + 2 * w), i32(d, L.WAITS + 2 * w + 1), 1, i32(d, L.TAG), w)
        if i64(d, L.INDEX_WAIT) != Int64(0):
            stop = stop | wait_counter(c, i64(d, L.INDEX_WAIT), i32(d, L.INDEX_ARRIVALS), 4, i32(d, L.TAG), 0)
        A.sync_warp()
        if body == 0:
            it, stop = queue_gemv(c, d, task, it, stop)
        if body == 11:
            it, stop = queue_gate_up(c, d, task, it, stop)
        if body == 12:
            it, stop = queue_down(c, d, task, it, stop)
    return it, stop


@cute.jit
def drain(c, it):
    """The copies in flight must land before the CTA may exit. Always, not only where this warp saw the abort: it may have
    queued its last tiles before consumers gave up. After a step that went well every one of them has landed already."""
    for i in cutlass.range(cutlass.max(it - c.slots, 0), it, unroll=1):
        bar = c.full + (i % c.slots) * 8
        parity = (i // c.slots) & 1
        M.P(
            "{ .reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [{$r0}], {$r1}; @!p bra W; }",
            read_only_args=[bar, parity],
        )
