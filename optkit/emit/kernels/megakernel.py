"""One persistent kernel for a whole decode step: a loop over the table of stage descriptors with a switch over bodies.

One CTA per SM: 8 consumer warps run the stages in order, a ninth warp keeps the weight ring full. Code size does not
depend on depth. The epoch of a launch comes from a 64-bit ticket counter (this CTA's ticket // grid + 1), so replayed
graphs need no new arguments and nothing is cleared by the host. A launch may execute only stages [lo, hi): the others
arrive without doing anything, so counters stay in step with the epoch.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64, range_constexpr
from cutlass.memory.smem import SmemAllocator

from optkit.emit import layout as L
from optkit.emit.kernels import attention, dense, elementwise, kda, moe, producer
from optkit.emit.kernels import memory as M
from optkit.emit.kernels.core import Ctx, csync, fail, i32, i64, pause, wait_counter

A = cute.arch
DESC_BYTES = L.DESC_WORDS * 8


class Megakernel:
    """Trace-time constants of one kernel: grid, ring slots, bytes of the x area, the bodies to compile in, whether any buffer is tagged."""

    def __init__(self, grid: int, slots: int, x_bytes: int, bodies: tuple[str, ...], tagged: bool):
        self.grid, self.slots, self.x_bytes, self.tagged = grid, slots, x_bytes, tagged
        self.bodies = tuple(L.BODIES.index(b) for b in L.BODIES if b in bodies)

    @cute.jit
    def __call__(self, table: Int64, rt: Int64, n: Int32, lo: Int32, hi: Int32, stream: cuda.CUstream):
        """Launch cooperatively: all CTAs must be resident."""
        self.kernel(table, rt, n, lo, hi).launch(
            grid=(self.grid, 1, 1), block=(L.THREADS, 1, 1), cooperative=True, min_blocks_per_mp=1, stream=stream
        )

    @cute.kernel
    def kernel(self, table: Int64, rt: Int64, n: Int32, lo: Int32, hi: Int32):
        """Stages [lo, hi) of n; `table` = descriptors, `rt` = run-time block."""
        tid, _, _ = A.thread_idx()
        bid, _, _ = A.block_idx()
        warp = A.make_warp_uniform(A.warp_idx())
        lane = tid & 31
        smem = SmemAllocator()
        ring = smem.allocate_array(Uint32, self.slots * L.SLOT // 4, byte_alignment=1024)
        x = smem.allocate_array(Uint32, self.x_bytes // 4, byte_alignment=128)
        red = smem.allocate_array(Uint32, L.RED_BYTES // 4, byte_alignment=128)
        desc = smem.allocate_array(Int64, 2 * L.DESC_WORDS, byte_alignment=16)
        misc = smem.allocate_array(Uint32, L.MISC_BYTES // 4, byte_alignment=16)
        bars = smem.allocate_array(Int64, 2 * self.slots, byte_alignment=16)
        misc0, bars0 = Int32(misc.toint()), Int32(bars.toint())
        sync_base = M.ld_table_b64(rt + L.RT_SYNC * 8)
        if tid == 0:
            for s in range_constexpr(self.slots):
                A.mbarrier_init(bars + s, 1)
                A.mbarrier_init(bars + self.slots + s, L.WARPS)
            ticket = M.atom_sync_ticket(sync_base + L.SYNC_ENTERED)
            epoch = ticket // Uint64(self.grid)
            dead = M.ld_sync_relaxed(sync_base + L.SYNC_ABORT)
            if M.ld_sync_acquire64(sync_base + L.SYNC_EXITED) < epoch * Uint64(self.grid):
                dead = Uint32(2)
            M.sts_b64(misc0 + 256, Int64(epoch) + Int64(1))
            M.sts_b32(misc0 + 264, dead)
        A.mbarrier_init_fence()
        A.sync_threads()
        epoch = Uint64(M.lds_b64(misc0 + 256))
        shuffle = M.ld_table_b64(rt + L.RT_SHUFFLE * 8)
        if shuffle != Int64(0):
            bid = (bid * Int32(shuffle) + Int32(shuffle >> Int64(32))) % self.grid
        c = Ctx(
            self.slots,
            tagged=self.tagged,
            tid=tid,
            bid=bid,
            warp=warp,
            lane=lane,
            g=lane // 4,
            t=lane % 4,
            epoch=epoch,
            sync_base=sync_base,
            rows=Int32(M.ld_table_b64(rt + L.RT_ROWS * 8)),
            start=A.globaltimer(),
            timeout=M.ld_table_b64(rt + L.RT_TIMEOUT * 8),
            delay=Uint32(Int32(M.ld_table_b64(rt + L.RT_DELAY * 8))),
            ring=Int32(ring.toint()),
            x=Int32(x.toint()),
            red=Int32(red.toint()),
            scratch=misc0,
            mix=misc0 + 128,
            flag=misc0 + 264,
            full=bars0,
            empty=bars0 + self.slots * 8,
            rt=rt,
        )
        if warp == L.WARPS:
            self.produce(c, Int32(desc.toint()) + DESC_BYTES, table, n, lo, hi)
        else:
            self.consume(c, Int32(desc.toint()), table, n, lo, hi)

    @cute.jit
    def produce(self, c, d, table, n, lo, hi):
        """Role of warp 8."""
        it = Int32(0)
        stop = M.lds_b32(c.flag)
        for s in cutlass.range(n, unroll=1):
            for i in cutlass.range(c.lane, L.DESC_WORDS, 32, unroll=1):
                M.sts_b64(d + i * 8, M.ld_table_b64(table + Int64(s) * DESC_BYTES + Int64(i) * 8))
            A.sync_warp()
            task = (c.bid + self.grid - i32(d, L.FIRST_SM)) % self.grid
            if task < i32(d, L.TASKS) and s >= lo and s < hi:
                pause(c, s, 1)
                it, stop = producer.produce(c, d, task, it, stop)
            A.sync_warp()
        producer.drain(c, it)

    @cute.jit
    def consume(self, c, d, table, n, lo, hi):
        """Role of warps 0..7."""
        it = Int32(0)
        start = M.lds_b32(c.flag)
        if start == Uint32(2) and c.tid == 0:
            fail(c, 5, 0, 0)
        csync()
        for s in cutlass.range(n, unroll=1):
            for i in cutlass.range(c.tid, L.DESC_WORDS, 256, unroll=1):
                M.sts_b64(d + i * 8, M.ld_table_b64(table + Int64(s) * DESC_BYTES + Int64(i) * 8))
            csync()
            task = (c.bid + self.grid - i32(d, L.FIRST_SM)) % self.grid
            mine = task < i32(d, L.TASKS) or i32(d, L.ALL_SMS) == 1
            active = s >= lo and s < hi
            if active:
                pause(c, s, 2)
            if mine and active and c.tid < i32(d, L.N_WAITS):
                w = L.WAITS + 2 * c.tid
                if wait_counter(c, i64(d, w), i32(d, w + 1), 1, i32(d, L.TAG), c.tid) != Uint32(0):
                    M.sts_b32(c.flag, 1)
            csync()
            dead = M.lds_b32(c.flag)
            if active and task < i32(d, L.TASKS) and dead == Uint32(0):
                it = self.dispatch(c, d, task, it)
            signal = i64(d, L.SIGNAL)  # before the barrier: behind it others write the next descriptor over this one
            csync()
            if active:
                pause(c, s, 3)
            if mine and c.tid == 0 and signal != Int64(0):
                M.red_sync_release(signal, 1)
        csync()
        if c.tid == 0:
            M.red_sync_release64(c.sync_base + L.SYNC_EXITED, 1)

    @cute.jit
    def dispatch(self, c, d, task, it):
        """The switch over bodies; only those the Plan uses are compiled in."""
        body = i32(d, L.BODY)
        for b in self.bodies:
            if body == b:
                if cutlass.const_expr(b == 0):
                    it = dense.gemv(c, d, task, it)
                elif cutlass.const_expr(b == 11):
                    it = moe.expert_gate_up(c, d, task, it)
                elif cutlass.const_expr(b == 12):
                    it = moe.expert_down(c, d, task, it)
                else:
                    PLAIN[b](c, d, task)
        return it


PLAIN = {
    1: dense.mixnorm,
    2: dense.blockstats,
    3: elementwise.embed,
    4: kda.kda,
    5: attention.mla_insert,
    6: attention.rope_insert,
    7: attention.attn,
    8: attention.attn_combine,
    9: elementwise.ew,
    10: moe.route,
}
