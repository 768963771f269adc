"""The binary layout shared by the host (lowering) and the device code: stage descriptors, run-time block, sync words.

Plain integers, no CuTe DSL: the serving process lowers a Plan with this file alone. A descriptor is DESC_WORDS 64-bit
words; floats are their fp32 bits in the low half of a word; an operand is two words, (address, meta).
"""

from __future__ import annotations

import struct

ROWS = 8  # token rows of one kernel class (the N of mma.m16n8k16)
WARPS = 8  # consumer warps
THREADS = 288  # 8 consumer warps and one producer warp
TILE_ROWS = 16
CHUNK_BF16 = 512  # columns of one bf16 tile
CHUNK_FP4 = 2048  # columns of one MXFP4 tile
PITCH = 1088  # bytes of a tile row in shared memory: 1024 of data, then 64 so that rows g and g+1 use other banks
SCALES = 16 * PITCH  # offset of a tile's ue8m0 scales
SLOT = SCALES + 1024
MAX_DV = 512  # value width of attention: a warp accumulates at most 8 tiles of 8 columns
KV_CHUNK = 64  # tokens staged at once by attention
RED_BYTES = 8192  # two parities of 8 warps x 16 rows x 8 tokens fp32
MISC_BYTES = 512

# ---- descriptor words
DESC_WORDS = 288
(
    BODY,
    UNITS,
    TASKS,
    FIRST_SM,
    ASSIGN,
    PER_ROW,
    N_WAITS,
    SIGNAL,
    TAG,
    STREAM,
    INDEX_WAIT,
    INDEX_ARRIVALS,
    ALL_SMS,
) = range(13)
WAITS = 16  # N_WAITS x (counter address, arrivals per epoch)
MAX_WAITS = 12
PARAMS = 40
PARTS = 96
PART_WORDS = 24
MAX_PARTS = 8
MAX_INPUTS = 10

BODIES = (
    "gemv",
    "mixnorm",
    "blockstats",
    "embed",
    "kda",
    "mla_insert",
    "rope_insert",
    "attn",
    "attn_combine",
    "ew",
    "route",
    "expert_gate_up",
    "expert_down",
)
EPILOGUES = ("store", "act", "add", "gate", "mailbox")
PROLOGUES = ("copy", "rmsnorm", "mixnorm")
ACTS = ("silu", "situ")
EW_MODES = ("add", "act_mul", "sigmoid_mul", "reduce", "gather")
DTYPES = ("bf16", "f32", "i32")

# ---- fields of a gemv part, relative to PARTS + part * PART_WORDS
(
    P_FIRST,
    P_COUNT,
    P_M,
    P_K,
    P_W,
    P_W2,
    P_GROUP_ROWS,
    P_X_STRIDE,
    P_X_OFFSET,
    P_EPILOGUE,
    P_ACT,
    P_OUT,
    P_OUT_META,
    P_BETA,
    P_LINEAR_BETA,
    P_N_ADD,
    P_ADD0,
    P_ADD0_META,
    P_ADD1,
    P_ADD1_META,
    P_ADD2,
    P_ADD2_META,
    P_PEERS,
    P_COEFFS,
) = range(24)

# ---- prologue (gemv, mixnorm, blockstats), relative to PARAMS
(X_PROLOGUE, X_WIDTH, X_NORM, X_EPS, X_MIX_NORM, X_MIX_PROJ, X_MIX_EPS, X_N, X_STATS, X_STATS_META, X_IN) = range(11)
X_OUT = X_IN + 2 * MAX_INPUTS  # out operand of mixnorm and blockstats

# ---- run-time block: 64-bit words written by the host
(
    RT_ROWS,
    RT_TOKEN,
    RT_SEQ_LEN,
    RT_BLOCK_TABLE,
    RT_TABLE_STRIDE,
    RT_SLOT_MAPPING,
    RT_STATE_SLOT,
    RT_BLOCK_SIZE,
    RT_SYNC,
    RT_TIMEOUT,
    RT_DELAY,
    RT_SHUFFLE,
) = range(12)
RT_WORDS = 16
# RT_DELAY: 0, or the seed of pauses of up to 16 us before waits, signals and weight copies (a test of ordering).
# RT_SHUFFLE: 0, or a | b << 32: CTA i plays SM (a i + b) mod grid, a coprime to the grid.

# ---- sync region, one 128-byte line per word
LINE = 128
SYNC_ENTERED, SYNC_EXITED, SYNC_ABORT, SYNC_HEALTH = 0, LINE, 2 * LINE, 3 * LINE
SYNC_COUNTERS = 4 * LINE
HEALTH_FIELDS = (
    ("code", 0, 8),
    ("edge", 8, 8),
    ("stage", 16, 16),
    ("sm", 32, 16),
    ("epoch", 48, 16),
)  # name, shift, bits
# `stage` is the waiting stage + 1; for a tagged word the stage + 1 that should have written it
HEALTH_CODES = {
    1: "wait on a counter",
    2: "wait for a tagged word",
    3: "wait on a full ring slot",
    4: "wait on an index",
    5: "a second launch while one was running",
}

# ---- operand meta
META_TAGGED = 1 << 4


def f32_bits(x: float) -> int:
    """The fp32 bits of x as an unsigned integer."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def meta(dtype: str, width: int, *, tagged: bool = False, producer: int = 0) -> int:
    """Operand meta word: bits 0-3 dtype, 4 tagged, 8-31 producing stage + 1 (the tag), 32-63 row width."""
    return (
        DTYPES.index(dtype)
        | (META_TAGGED if tagged else 0)
        | (producer & 0xFFFFFF) << 8
        | width << 32
    )


def tag(epoch: int, stage: int) -> int:
    """Tag of a word that stage index `stage` writes in launch `epoch` (1, 2, ...). 48 bits of epoch never wrap."""
    return (epoch << 16) | (stage + 1)
