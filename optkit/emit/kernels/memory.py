"""The only functions that touch global memory: one helper per access of each memory class (docs/design.md, section 2).

The audit maps every global access in SASS to one of these functions by line information, so nothing outside this file
may load from or store to global memory. The prefix of a name is its class:

* ``ld_weight_*``, ``ld_table_*``  never written during a launch: non-coherent loads, hoistable;
* ``ld_input_*``   written before the launch: plain loads;
* ``ld_act_*``, ``st_act_*``  activations: strong (relaxed, gpu scope), after the edge's wait;
* ``ld_tag_*``, ``st_tag_*``  16-byte words of 8 payload bytes and a 64-bit tag, one .b128 access each;
* ``ld_state_*``, ``st_state_*``  persistent rows owned by vLLM: strong, like activations;
* ``st_mail_*``, ``ld_mail_*``  tagged words to and from peers, sys scope;
* ``ld_sync_*``, ``red_sync_*``, ``st_sync_*``  counters, tickets, abort and health words;
* ``bulk_*``  asynchronous copies of weights into shared memory, completing on an mbarrier.

Addresses are Int64 in global memory, Int32 in shared memory; vectors are tuples of registers.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

P = cute.arch.inline_ptx

_V4 = "{{$w0},{$w1},{$w2},{$w3}}, [{$r0}];"
_SV4 = "[{$r0}], {{$r1},{$r2},{$r3},{$r4}};"


# ---- weight, table: immutable during a launch
def ld_weight_v4(a):
    """16 bytes of a weight as 4 Uint32."""
    return P("ld.global.nc.v4.b32 " + _V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def ld_weight_b32(a):
    """4 bytes of a weight as Uint32."""
    return P("ld.global.nc.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[a])


def ld_weight_f32(a):
    """One float of a weight or host-made table."""
    return P("ld.global.nc.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[a])


def ld_weight_v4f(a):
    """Four floats of a weight or host-made table."""
    return P("ld.global.nc.v4.f32 " + _V4, write_only_types=[Float32] * 4, read_only_args=[a])


def ld_weight_v2(a):
    """8 bytes of a weight as 2 Uint32."""
    return P("ld.global.nc.v2.b32 {{$w0},{$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[a])


def ld_table_b64(a):
    """One 64-bit word of the descriptor or run-time table."""
    return P("ld.global.nc.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[a])


# ---- input: written before the launch
def ld_input_b32(a):
    """One int32 step input (token, length, block table entry, slot)."""
    return P("ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[a])


def ld_input_b64(a):
    """One int64 step input (slot mapping)."""
    return P("ld.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[a])


# ---- activation, scratch
def ld_act_v4(a):
    """16 bytes as 4 Uint32."""
    return P("ld.relaxed.gpu.global.v4.b32 " + _V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def ld_act_v2(a):
    """8 bytes as 2 Uint32."""
    return P("ld.relaxed.gpu.global.v2.b32 {{$w0},{$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[a])


def ld_act_b32(a):
    """4 bytes as Uint32."""
    return P("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[a])


def ld_act_b16(a):
    """2 bytes, zero-extended to Uint32."""
    return P(
        "{ .reg .b16 h; ld.relaxed.gpu.global.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Uint32],
        read_only_args=[a],
    )


def st_act_v4(a, v0, v1, v2, v3):
    """Store 4 Uint32 (16 bytes)."""
    P("st.relaxed.gpu.global.v4.b32 " + _SV4, read_only_args=[a, v0, v1, v2, v3])


def st_act_v2(a, v0, v1):
    """Store 2 Uint32 (8 bytes)."""
    P("st.relaxed.gpu.global.v2.b32 [{$r0}], {{$r1},{$r2}};", read_only_args=[a, v0, v1])


def st_act_b32(a, v):
    """Store one Uint32."""
    P("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[a, v])


# ---- tagged words: payload and tag in one 16-byte access
def ld_tag_b128(a):
    """(payload 0, payload 1, tag) of one tagged word."""
    return P(
        "{ .reg .b128 q; .reg .b64 d; ld.relaxed.gpu.global.b128 q, [{$r0}]; mov.b128 {d, {$w2}}, q;"
        " mov.b64 {{$w0},{$w1}}, d; }",
        write_only_types=[Uint32, Uint32, Uint64],
        read_only_args=[a],
    )


def st_tag_b128(a, v0, v1, tag):
    """Write one tagged word."""
    P(
        "{ .reg .b128 q; .reg .b64 d; mov.b64 d, {{$r1},{$r2}}; mov.b128 q, {d, {$r3}};"
        " st.relaxed.gpu.global.b128 [{$r0}], q; }",
        read_only_args=[a, v0, v1, tag],
    )


def ld_mail_b128(a):
    """(payload 0, payload 1, tag) of one mailbox word; a peer writes it."""
    return P(
        "{ .reg .b128 q; .reg .b64 d; ld.relaxed.sys.global.b128 q, [{$r0}]; mov.b128 {d, {$w2}}, q;"
        " mov.b64 {{$w0},{$w1}}, d; }",
        write_only_types=[Uint32, Uint32, Uint64],
        read_only_args=[a],
    )


def st_mail_b128(a, v0, v1, tag):
    """Write one mailbox word, here or at a peer."""
    P(
        "{ .reg .b128 q; .reg .b64 d; mov.b64 d, {{$r1},{$r2}}; mov.b128 q, {d, {$r3}};"
        " st.relaxed.sys.global.b128 [{$r0}], q; }",
        read_only_args=[a, v0, v1, tag],
    )


# ---- state owned by vLLM
def ld_state_v4(a):
    """16 bytes as 4 Uint32."""
    return P("ld.relaxed.gpu.global.v4.b32 " + _V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def ld_state_v4f(a):
    """16 bytes as 4 Float32."""
    return P("ld.relaxed.gpu.global.v4.f32 " + _V4, write_only_types=[Float32] * 4, read_only_args=[a])


def ld_state_b16(a):
    """2 bytes, zero-extended to Uint32."""
    return P(
        "{ .reg .b16 h; ld.relaxed.gpu.global.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Uint32],
        read_only_args=[a],
    )


def st_state_v4f(a, v0, v1, v2, v3):
    """Store 4 Float32."""
    P("st.relaxed.gpu.global.v4.f32 " + _SV4, read_only_args=[a, v0, v1, v2, v3])


def st_state_b16(a, v):
    """Store the low 2 bytes of a Uint32."""
    P("{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.relaxed.gpu.global.b16 [{$r0}], h; }", read_only_args=[a, v])


# ---- sync words
def ld_sync_acquire(a):
    """Acquire a 32-bit counter at gpu scope."""
    return P("ld.acquire.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[a])


def ld_sync_relaxed(a):
    """Relaxed read of a 32-bit sync word (abort)."""
    return P("ld.relaxed.gpu.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[a])


def ld_sync_acquire64(a):
    """Acquire a 64-bit ticket word."""
    return P("ld.acquire.gpu.global.u64 {$w0}, [{$r0}];", write_only_types=[Uint64], read_only_args=[a])


def red_sync_release(a, v):
    """Release one arrival on a 32-bit counter at gpu scope."""
    P("red.release.gpu.global.add.u32 [{$r0}], {$r1};", read_only_args=[a, Uint32(v)])


def red_sync_release64(a, v):
    """Release an addition to a 64-bit ticket word."""
    P("red.release.gpu.global.add.u64 [{$r0}], {$r1};", read_only_args=[a, Uint64(v)])


def atom_sync_ticket(a):
    """Take one 64-bit ticket (acq_rel)."""
    return P("atom.acq_rel.gpu.global.add.u64 {$w0}, [{$r0}], 1;", write_only_types=[Uint64], read_only_args=[a])


def atom_sync_claim(a, v):
    """Set a 64-bit word from 0 to v once (health: the first failure wins); returns the previous value."""
    return P(
        "atom.relaxed.gpu.global.cas.b64 {$w0}, [{$r0}], 0, {$r1};", write_only_types=[Uint64], read_only_args=[a, v]
    )


def st_sync_b32(a, v):
    """Relaxed store of a sync word."""
    P("st.relaxed.gpu.global.b32 [{$r0}], {$r1};", read_only_args=[a, Uint32(v)])


# ---- bulk copies of weights
def bulk_weight(dst, src, nbytes, bar):
    """nbytes (multiple of 16) of weights from global to shared; completes on the mbarrier at shared address bar."""
    P(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[dst, src, Int32(nbytes), bar],
    )


# ---- shared memory (not a class of the audit: only this CTA sees it)
def lds_v4(a):
    """16 bytes of shared memory as 4 Uint32."""
    return P("ld.shared.v4.b32 " + _V4, write_only_types=[Uint32] * 4, read_only_args=[a])


def lds_v4f(a):
    """16 bytes of shared memory as 4 Float32."""
    return P("ld.shared.v4.f32 " + _V4, write_only_types=[Float32] * 4, read_only_args=[a])


def lds_v2(a):
    """8 bytes of shared memory as 2 Uint32."""
    return P("ld.shared.v2.b32 {{$w0},{$w1}}, [{$r0}];", write_only_types=[Uint32] * 2, read_only_args=[a])


def lds_b32(a):
    """4 bytes of shared memory as Uint32."""
    return P("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[a])


def lds_i32(a):
    """4 bytes of shared memory as Int32."""
    return P("ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[a])


def lds_f32(a):
    """4 bytes of shared memory as Float32."""
    return P("ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[a])


def lds_b64(a):
    """8 bytes of shared memory as Int64."""
    return P("ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[a])


def lds_u8(a):
    """One byte of shared memory, zero-extended."""
    return P(
        "{ .reg .b16 h; ld.shared.u8 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }", write_only_types=[Uint32], read_only_args=[a]
    )


def sts_v4(a, v0, v1, v2, v3):
    """Store 4 Uint32 to shared memory."""
    P("st.shared.v4.b32 " + _SV4, read_only_args=[a, v0, v1, v2, v3])


def sts_v2(a, v0, v1):
    """Store 2 Uint32 to shared memory."""
    P("st.shared.v2.b32 [{$r0}], {{$r1},{$r2}};", read_only_args=[a, v0, v1])


def sts_v2f(a, v0, v1):
    """Store 2 Float32 to shared memory."""
    P("st.shared.v2.f32 [{$r0}], {{$r1},{$r2}};", read_only_args=[a, v0, v1])


def sts_v4f(a, v0, v1, v2, v3):
    """Store 4 Float32 to shared memory."""
    P("st.shared.v4.f32 " + _SV4, read_only_args=[a, v0, v1, v2, v3])


def sts_b32(a, v):
    """Store one Uint32 to shared memory."""
    P("st.shared.b32 [{$r0}], {$r1};", read_only_args=[a, v])


def sts_f32(a, v):
    """Store one Float32 to shared memory."""
    P("st.shared.f32 [{$r0}], {$r1};", read_only_args=[a, v])


def sts_b64(a, v):
    """Store one Int64 to shared memory."""
    P("st.shared.b64 [{$r0}], {$r1};", read_only_args=[a, v])


def sts_b16(a, v):
    """Store the low 2 bytes of a Uint32 to shared memory."""
    P("{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.shared.b16 [{$r0}], h; }", read_only_args=[a, v])
