"""Named, reversible packings between checkpoint tensors and what one rank keeps resident.

A packing knows the checkpoint tensors it reads (whole-model shapes), how one rank's resident tensor is cut from them,
and how it is written back. Nothing is lost, so a fallback path can run on the one resident copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from optkit.models.graph import MX_GROUP, Weight

Resident = Tensor | tuple[Tensor, Tensor]
Region = tuple[slice, ...]
Read = Callable[[str, Region], Tensor]
"""read(name, region): a part of a checkpoint tensor; the region may name fewer axes than the tensor has."""
Write = Callable[[str, Region, Tensor], None]
ALL = slice(None)


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor of the whole model. `longer`: its first axis may have a padded tail."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # bf16 | f32 | i32 | u8 | i8 | e4m3 | e8m0
    longer: bool = False


@dataclass(frozen=True)
class Packing:
    """sources(w, ranks) / pack(w, ranks, rank, read) -> resident / unpack(w, ranks, rank, resident, write)."""

    sources: Callable[[Weight, int], tuple[Source, ...]]
    pack: Callable[[Weight, int, int, Read], Resident]
    unpack: Callable[[Weight, int, int, Resident, Write], None]


def whole_shape(w: Weight, ranks: int) -> tuple[int, ...]:
    """The resident shape of an unsharded model."""
    return tuple(n * ranks if axis == w.shard else n for axis, n in enumerate(w.shape))


def shard_region(w: Weight, rank: int) -> Region:
    """Where this rank's part lies in the whole tensor."""
    return tuple(slice(rank * n, (rank + 1) * n) if axis == w.shard else ALL for axis, n in enumerate(w.shape))


def _tensor(resident: Resident) -> Tensor:
    assert isinstance(resident, Tensor)
    return resident


def _plain() -> Packing:
    """As in the checkpoint."""
    return Packing(
        lambda w, ranks: (Source(w.source[0], whole_shape(w, ranks), w.dtype),),
        lambda w, ranks, rank, read: read(w.source[0], shard_region(w, rank)),
        lambda w, ranks, rank, t, write: write(w.source[0], shard_region(w, rank), _tensor(t)),
    )


def _depthwise() -> Packing:
    """[channels, 1, taps] of a depthwise convolution -> [channels, taps]."""

    def source(w: Weight, ranks: int) -> tuple[Source, ...]:
        channels, taps = whole_shape(w, ranks)
        return (Source(w.source[0], (channels, 1, taps), w.dtype),)

    return Packing(
        source,
        lambda w, ranks, rank, read: read(w.source[0], shard_region(w, rank)[:1]).squeeze(1),
        lambda w, ranks, rank, t, write: write(w.source[0], shard_region(w, rank)[:1], _tensor(t)[:, None]),
    )


def _padded_tail() -> Packing:
    """A vector stored longer than it is (A_log: 128 for 96 heads): the first elements count."""
    plain = _plain()
    return Packing(
        lambda w, ranks: (Source(w.source[0], whole_shape(w, ranks), w.dtype, longer=True),), plain.pack, plain.unpack
    )


def _kv_b(role: str) -> Packing:
    """kv_b_proj [heads * (nope + v), lora] -> "uk": [heads * lora, nope], transposed per head; "uv": [heads * v, lora].

    Absorbed attention applies W_UK^T to the query, so each head's block is stored as that product's [out, in].
    """

    def sizes(w: Weight, ranks: int) -> tuple[int, int, int, int]:
        args = dict(w.pack_args)
        return args["heads"] // ranks, args["nope"], args["v"], w.shape[0] // (args["heads"] // ranks)

    def source(w: Weight, ranks: int) -> tuple[Source, ...]:
        heads, nope, v, per_head = sizes(w, ranks)
        return (Source(w.source[0], (heads * ranks * (nope + v), per_head if role == "uk" else w.shape[1]), w.dtype),)

    def regions(w: Weight, ranks: int, rank: int) -> list[Region]:
        """Rows of kv_b per head of this rank."""
        heads, nope, v, _ = sizes(w, ranks)
        first, size = (0, nope) if role == "uk" else (nope, v)
        starts = [(rank * heads + h) * (nope + v) + first for h in range(heads)]
        return [(slice(s, s + size),) for s in starts]

    def pack(w: Weight, ranks: int, rank: int, read: Read) -> Resident:
        parts = [read(w.source[0], region) for region in regions(w, ranks, rank)]
        return torch.cat([p.T for p in parts] if role == "uk" else parts).contiguous()

    def unpack(w: Weight, ranks: int, rank: int, t: Resident, write: Write) -> None:
        blocks = _tensor(t).chunk(sizes(w, ranks)[0])
        for region, block in zip(regions(w, ranks, rank), blocks, strict=True):
            write(w.source[0], region, block.T if role == "uk" else block)

    return Packing(source, pack, unpack)


STORED_BYTES = {"u8": torch.uint8, "i8": torch.int8, "e8m0": torch.float8_e8m0fnu}
"""Types that a checkpoint gives to what is kept resident as plain bytes."""


def _experts(packed: str, scale: str) -> Packing:
    """Per-expert packed and scale tensors -> stacks uint8 [E, out, in/2] and [E, out, in/32]; the stored types vary."""
    per_column, stored = (2, MX_GROUP), (packed, scale)

    def source(w: Weight, ranks: int) -> tuple[Source, ...]:
        experts, out, width = whole_shape(w, ranks)
        return tuple(
            Source(name.format(e), (out, width // per), dtype)
            for e in range(experts)
            for name, per, dtype in zip(w.source, per_column, stored, strict=True)
        )

    def region(w: Weight, rank: int, per: int) -> Region:
        _, rows, cols = shard_region(w, rank)
        return rows, ALL if cols == ALL else slice(cols.start // per, cols.stop // per)

    def pack(w: Weight, ranks: int, rank: int, read: Read) -> Resident:
        experts, out, width = w.shape
        stacks = tuple(torch.empty(experts, out, width // per, dtype=torch.uint8) for per in per_column)
        for name, stack, per in zip(w.source, stacks, per_column, strict=True):
            for e in range(experts):
                stack[e] = read(name.format(e), region(w, rank, per)).view(torch.uint8)
        return stacks[0], stacks[1]

    def unpack(w: Weight, ranks: int, rank: int, t: Resident, write: Write) -> None:
        for name, stack, per, dtype in zip(w.source, t, per_column, stored, strict=True):
            for e, part in enumerate(stack):
                write(name.format(e), region(w, rank, per), part.view(STORED_BYTES[dtype]))

    return Packing(source, pack, unpack)


def _scaled_e4m3(row_block: int) -> Packing:
    """e4m3 [out, in] and its ue8m0 scales, one per row_block rows and 32 columns, as uint8; a rank's part has whole
    groups."""
    block = (row_block, MX_GROUP)

    def source(w: Weight, ranks: int) -> tuple[Source, ...]:
        shape = whole_shape(w, ranks)
        scales = tuple(-(-n // per) for n, per in zip(shape, block, strict=True))
        return Source(w.source[0], shape, "e4m3"), Source(w.source[1], scales, "e8m0")

    def region(w: Weight, rank: int) -> Region:
        return tuple(
            part if part == ALL else slice(part.start // per, part.stop // per)
            for part, per in zip(shard_region(w, rank), block, strict=True)
        )

    def pack(w: Weight, ranks: int, rank: int, read: Read) -> Resident:
        return read(w.source[0], shard_region(w, rank)), read(w.source[1], region(w, rank)).view(torch.uint8)

    def unpack(w: Weight, ranks: int, rank: int, t: Resident, write: Write) -> None:
        write(w.source[0], shard_region(w, rank), t[0])
        write(w.source[1], region(w, rank), t[1].view(torch.float8_e8m0fnu))

    return Packing(source, pack, unpack)


def _token_classes() -> Packing:
    """The classes of tokenizer.json's tokens (models/token_classes.py); ids behind its last token get class 0."""

    def pack(w: Weight, ranks: int, rank: int, read: Read) -> Resident:
        classes, expected = _tensor(read(w.source[0], (ALL,))), dict(w.pack_args)["classes"]
        if (found := len(classes.unique())) != expected:
            raise ValueError(f"{w.source[0]}: {found} token classes: expected {expected}, which the hash constants fit")
        return torch.cat([classes, classes.new_zeros(w.shape[0] - classes.shape[0])])

    return Packing(
        lambda w, ranks: (Source(w.source[0], w.shape, "i32"),),
        pack,
        lambda w, ranks, rank, t, write: write(w.source[0], (ALL,), _tensor(t)),
    )


PACKINGS: Mapping[str, Packing] = {
    "plain": _plain(),
    "depthwise": _depthwise(),
    "padded_tail": _padded_tail(),
    "kv_b_uk": _kv_b("uk"),
    "kv_b_uv": _kv_b("uv"),
    "experts": _experts("u8", "u8"),
    "experts_e8m0": _experts("i8", "e8m0"),
    "fp8_block": _scaled_e4m3(MX_GROUP),
    "mxfp8": _scaled_e4m3(1),
    "token_classes": _token_classes(),
}


def sources(w: Weight, ranks: int) -> tuple[Source, ...]:
    """The checkpoint tensors of `w`, with whole-model shapes. `ranks` is the size that w.shape belongs to."""
    return PACKINGS[w.pack].sources(w, ranks)


def pack(w: Weight, ranks: int, rank: int, read: Read) -> Resident:
    """The resident tensor of one rank."""
    return PACKINGS[w.pack].pack(w, ranks, rank, read)


def unpack(w: Weight, ranks: int, rank: int, resident: Resident, write: Write) -> None:
    """The inverse of `pack`: writes this rank's part back into the checkpoint tensors."""
    PACKINGS[w.pack].unpack(w, ranks, rank, resident, write)
