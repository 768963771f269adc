"""Resource figures that the compiler writes into a cubin: registers, stack, static shared memory, threads.

Read from the ELF sections .nv.info, .nv.info.<kernel> and .nv.shared.<kernel> (attribute numbers as nvdisasm and
cuobjdump -res-usage print them), since cuobjdump is not in the package index.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

FRAME_SIZE, MIN_STACK_SIZE, REGCOUNT, REQNTID = 0x11, 0x12, 0x2F, 0x10
SIZED = 4  # format byte of an attribute with a length


class CubinError(ValueError):
    """Not a cubin, or a damaged one."""


@dataclass(frozen=True)
class Resources:
    """Figures of one kernel. `frame` and `stack` bytes per thread; `shared` static bytes; `threads` 0 if not fixed."""

    name: str
    registers: int
    frame: int
    stack: int
    shared: int
    threads: int


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    link: int
    size: int
    data: bytes


def resources(cubin: bytes) -> list[Resources]:
    """One entry per kernel. Raises CubinError."""
    try:
        return _resources(cubin)
    except (struct.error, IndexError, UnicodeDecodeError) as e:
        raise CubinError(f"damaged cubin of {len(cubin)} bytes: {e}") from e


def _resources(cubin: bytes) -> list[Resources]:
    sections = _sections(cubin)
    by_name = {s.name: s for s in sections}
    symbols = _symbols(sections)
    found: dict[int, dict[str, int]] = {}
    for name, key in ((REGCOUNT, "registers"), (FRAME_SIZE, "frame"), (MIN_STACK_SIZE, "stack")):
        for section in (s for s in sections if s.name.startswith(".nv.info")):
            for attribute, payload in _attributes(section.data):
                if attribute == name:
                    index, value = struct.unpack_from("<II", payload)
                    found.setdefault(index, {})[key] = value
    out = []
    for s in sections:
        if not s.name.startswith(".text."):
            continue
        kernel = s.name.removeprefix(".text.")
        index = next((i for i, n in symbols.items() if n == kernel and i in found), None)
        figures = found.get(index, {}) if index is not None else {}
        if "registers" not in figures:
            raise CubinError(f"kernel {kernel}: no register count in .nv.info")
        info = by_name.get(f".nv.info.{kernel}")
        ntid = (
            next((struct.unpack_from("<III", p) for a, p in _attributes(info.data) if a == REQNTID), (0, 0, 0))
            if info
            else (0, 0, 0)
        )
        shared = by_name.get(f".nv.shared.{kernel}")
        out.append(
            Resources(
                kernel,
                figures["registers"],
                figures.get("frame", 0),
                figures.get("stack", 0),
                shared.size if shared else 0,
                ntid[0] * ntid[1] * ntid[2],
            )
        )
    if not out:
        raise CubinError("no kernel in the cubin")
    return out


def _sections(cubin: bytes) -> list[_Section]:
    if cubin[:5] != b"\x7fELF\x02":
        raise CubinError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    heads = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    names = cubin[heads[names_at][4] : heads[names_at][4] + heads[names_at][5]]
    return [
        _Section(_string(names, h[0]), h[1], h[6], h[5], b"" if h[1] == 8 else cubin[h[4] : h[4] + h[5]]) for h in heads
    ]


def _symbols(sections: list[_Section]) -> dict[int, str]:
    table = next((s for s in sections if s.kind == 2), None)
    if table is None:
        raise CubinError("no symbol table")
    names = sections[table.link].data
    return {i: _string(names, struct.unpack_from("<I", table.data, i * 24)[0]) for i in range(len(table.data) // 24)}


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == SIZED:
            yield attribute, data[at : at + value]
            at += value


def _string(table: bytes, at: int) -> str:
    return table[at : table.index(b"\0", at)].decode()
