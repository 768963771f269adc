"""A helper file as emit/kernels/memory.py is one, for the audit's tests: right helpers, then wrong ones."""

import cutlass.cute as cute
from cutlass import Int32, Uint32, Uint64

P = cute.arch.inline_ptx
V4 = "{{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"
SV4 = "[{$r0}], {{$r1},{$r2},{$r3},{$r4}};"


def ld_weight_v4(a):
    return P("ld.global.nc.v4.b32 " + V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def ld_input_b32(a):
    return P("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[a])


def ld_act_v4(a):
    return P("ld.relaxed.gpu.global.v4.b32 " + V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def st_act_v4(a, v):
    P("st.relaxed.gpu.global.v4.b32 " + SV4, read_only_args=[a, *v])


def ld_tag_b128(a):
    return P(
        "{ .reg .b128 q; .reg .b64 d; ld.relaxed.gpu.global.b128 q, [{$r0}]; mov.b128 {d, {$w2}}, q;"
        " mov.b64 {{$w0},{$w1}}, d; }",
        write_only_types=[Uint32, Uint32, Uint64],
        read_only_args=[a],
    )


def ld_sync_acquire(a):
    return P("ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[a])


def ld_sync_relaxed(a):
    return P("ld.relaxed.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[a])


def st_sync_b32(a, v):
    P("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[a, Uint32(v)])


def red_sync_release(a):
    P("red.release.gpu.global.add.u32 [{$r0}], {$r1};", read_only_args=[a, Uint32(1)])


def bulk_weight(dst, src, nbytes, bar):
    P(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[dst, src, Int32(nbytes), bar],
    )


# ---- wrong: what the audit must find
def ld_act_weak(a):
    return P("ld.global.v4.b32 " + V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def ld_act_nc(a):
    return P("ld.global.nc.v4.b32 " + V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def ld_act_cta(a):
    return P("ld.relaxed.cta.global.v4.b32 " + V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def st_act_weak(a, v):
    P("st.global.v4.b32 " + SV4, read_only_args=[a, *v])


def ld_input_nc(a):
    return P("ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[a])


def ld_tag_split(a):
    w = P("ld.relaxed.gpu.global.v2.b32 {{$w0},{$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[a])
    t = P("ld.relaxed.gpu.global.b64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[a + 8])
    return w[0], w[1], t


def ld_sync_acquire_unfenced(a):
    return P("ld.relaxed.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[a])


def red_sync_release_unfenced(a):
    P("red.relaxed.gpu.global.add.u32 [{$r0}], {$r1};", read_only_args=[a, Uint32(1)])


def ld_act_generic(a):
    return P("ld.v4.b32 " + V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def lds_but_global(a):
    return P("ld.relaxed.gpu.global.v4.b32 " + V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def bulk_act(dst, src, nbytes, bar):
    P(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[dst, src, Int32(nbytes), bar],
    )
