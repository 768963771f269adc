"""Small kernels for the audit: one clean, with all shapes of waits the megakernel has, and one for each defect.

`data` is an activation buffer, `sync` a counter. A case is a function (data, sync, n, tid), traced into a kernel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, Uint64

from . import memory as M

A = cute.arch


@cute.jit
def wait(sync, target):
    """A bounded wait as the megakernel's: polls an abort word now and then, gives up after a while."""
    stop = Uint32(0)
    spins = Int32(0)
    while M.ld_sync_acquire(sync) < Uint32(target) and stop == Uint32(0):
        spins += 1
        if (spins & 255) == 255:
            stop = M.ld_sync_relaxed(sync + 128)
        if spins > 1000000:
            M.st_sync_b32(sync + 128, 1)
            stop = Uint32(1)
    return stop


@cute.jit
def clean(data, sync, n, tid):
    """n waits by one thread, a CTA barrier, loads or tagged words, stores, a release: a run-time loop of stages."""
    for s in cutlass.range(M.ld_input_b32(sync + 256), unroll=1):
        if tid == 0:
            for w in cutlass.range(n, unroll=1):
                wait(sync + Int64(w) * 128, s)
        A.sync_threads()
        if s % 3 == 1:
            v = M.ld_act_v4(data + Int64(tid) * 16)
            w = M.ld_weight_v4(data + 65536 + Int64(tid) * 16)
            M.st_act_v4(data + 4096 + Int64(tid) * 16, [v[i] + w[i] for i in range(4)])
        if s % 3 == 2:
            p0, p1, t = M.ld_tag_b128(data + 8192)
            while t != Uint64(7):
                p0, p1, t = M.ld_tag_b128(data + 8192)
            M.st_act_v4(data + 12288 + Int64(tid) * 16, [p0, p1, p0, p1])
        A.sync_threads()
        if tid == 0:
            M.red_sync_release(sync + 384)


@cute.jit
def weak_load(data, sync, n, tid):
    wait(sync, n)
    M.st_act_v4(data + 4096 + Int64(tid) * 16, M.ld_act_weak(data + Int64(tid) * 16))


@cute.jit
def nc_load(data, sync, n, tid):
    wait(sync, n)
    M.st_act_v4(data + 4096 + Int64(tid) * 16, M.ld_act_nc(data + Int64(tid) * 16))


@cute.jit
def cta_scope(data, sync, n, tid):
    wait(sync, n)
    M.st_act_v4(data + 4096 + Int64(tid) * 16, M.ld_act_cta(data + Int64(tid) * 16))


@cute.jit
def weak_store(data, sync, n, tid):
    wait(sync, n)
    M.st_act_weak(data + 4096 + Int64(tid) * 16, M.ld_act_v4(data + Int64(tid) * 16))


@cute.jit
def nc_input(data, sync, n, tid):
    M.st_sync_b32(sync + 512, Uint32(M.ld_input_nc(data)))


@cute.jit
def unmapped(data, sync, n, tid):
    wait(sync, n)
    x = cute.make_tensor(cute.make_ptr(Uint32, data, cute.AddressSpace.gmem, assumed_align=16), cute.make_layout(64))
    M.st_sync_b32(sync + 512, x[tid])


@cute.jit
def wrong_helper(data, sync, n, tid):
    wait(sync, n)
    M.st_act_v4(data + 4096, M.lds_but_global(data + Int64(tid) * 16))


@cute.jit
def generic(data, sync, n, tid):
    wait(sync, n)
    M.st_act_v4(data + 4096, M.ld_act_generic(data + Int64(tid) * 16))


@cute.jit
def split_tag(data, sync, n, tid):
    p0, p1, t = M.ld_tag_split(data)
    while t != Uint64(7):
        p0, p1, t = M.ld_tag_split(data)
    M.st_act_v4(data + 4096 + Int64(tid) * 16, [p0, p1, p0, p1])


@cute.jit
def hoisted(data, sync, n, tid):
    """The load stands before the wait."""
    v = M.ld_act_v4(data + Int64(tid) * 16)
    wait(sync, n)
    M.st_act_v4(data + 4096 + Int64(tid) * 16, v)


@cute.jit
def hoisted_in_loop(data, sync, n, tid):
    """The same in a stage loop: an earlier stage's wait does not excuse it on the first turn."""
    for s in cutlass.range(n, unroll=1):
        v = M.ld_act_v4(data + Int64(tid) * 16)
        wait(sync, s)
        M.st_act_v4(data + 4096 + Int64(tid) * 16, v)


@cute.jit
def early_store(data, sync, n, tid):
    """The slot is overwritten before the wait for its last readers."""
    M.st_act_v4(data + 4096 + Int64(tid) * 16, M.ld_weight_v4(data))
    wait(sync, n)
    M.st_act_v4(data + 8192 + Int64(tid) * 16, M.ld_act_v4(data + Int64(tid) * 16))


@cute.jit
def inside_wait(data, sync, n, tid):
    """The load is made while polling, so before the poll that succeeds."""
    x0 = Uint32(0)
    while M.ld_sync_acquire(sync) < Uint32(n):
        v = M.ld_act_v4(data + Int64(tid) * 16)
        x0 = v[0] + v[1] + v[2] + v[3]
    M.st_act_v4(data + 4096 + Int64(tid) * 16, [x0, x0, x0, x0])


@cute.jit
def no_loop(data, sync, n, tid):
    """One acquire without a loop waits for nothing."""
    x = M.ld_sync_acquire(sync)
    v = M.ld_act_v4(data + Int64(tid) * 16)
    M.st_act_v4(data + 4096 + Int64(tid) * 16, [v[0] + x, v[1], v[2], v[3]])


@cute.jit
def other_branch(data, sync, n, tid):
    """Only one kind of stage waits; the other reads without."""
    if n == 1:
        wait(sync, n)
        M.st_act_v4(data + 4096 + Int64(tid) * 16, M.ld_act_v4(data + Int64(tid) * 16))
    else:
        M.st_act_v4(data + 8192 + Int64(tid) * 16, M.ld_act_v4(data + 64 + Int64(tid) * 16))


@cute.jit
def acquire_unfenced(data, sync, n, tid):
    while M.ld_sync_acquire_unfenced(sync) < Uint32(n):
        pass
    M.st_act_v4(data + 4096 + Int64(tid) * 16, M.ld_act_v4(data + Int64(tid) * 16))


@cute.jit
def release_unfenced(data, sync, n, tid):
    wait(sync, n)
    M.st_act_v4(data + 4096 + Int64(tid) * 16, M.ld_act_v4(data + Int64(tid) * 16))
    A.sync_threads()
    if tid == 0:
        M.red_sync_release_unfenced(sync + 384)


@cute.jit
def bulk_without_proxy_fence(data, sync, n, tid):
    wait(sync, n)
    M.bulk_act(n * 16, data, n * 16, n * 8)


@cute.jit
def local_array(data, sync, n, tid):
    r = cute.make_rmem_tensor(cute.make_layout(64), Uint32)
    for i in cutlass.range_constexpr(64):
        r[i] = tid * i
    for i in cutlass.range(n, unroll=1):
        r[(i * 7) % 64] = Uint32(i)
    M.st_sync_b32(sync + 512, r[tid])


CASES = {
    f.__name__: f
    for f in (
        clean,
        weak_load,
        nc_load,
        cta_scope,
        weak_store,
        nc_input,
        unmapped,
        wrong_helper,
        generic,
        split_tag,
        hoisted,
        hoisted_in_loop,
        early_store,
        inside_wait,
        no_loop,
        other_branch,
        acquire_unfenced,
        release_unfenced,
        bulk_without_proxy_fence,
        local_array,
    )
}


class Kernel:
    """One case as a kernel of one warpgroup."""

    def __init__(self, case):
        self.case = case

    @cute.jit
    def __call__(self, data: Int64, sync: Int64, n: Int32):
        self.kernel(data, sync, n).launch(grid=(1, 1, 1), block=(128, 1, 1), min_blocks_per_mp=1)

    @cute.kernel
    def kernel(self, data: Int64, sync: Int64, n: Int32):
        tid, _, _ = A.thread_idx()
        self.case(data, sync, n, tid)


def compile_case(name, folder, line_info=True):
    """Compile a case for sm_90a; returns the cubin's bytes."""
    options = f"--gpu-arch sm_90a --keep-cubin --dump-dir {folder}" + (" --generate-line-info" if line_info else "")
    cute.compile(Kernel(CASES[name]), Int64(0), Int64(0), Int32(0), options=options)
    (cubin,) = folder.glob("*.cubin")
    return cubin.read_bytes()
