"""The tables of docs/planted-faults.md, made from the library: `python -m optkit.verify.planted.doc docs/planted-faults.md`.

A test compares the file with what this module would write.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from optkit.verify.planted.registry import KINDS, TARGETS, digest, library

BEGIN, END = "<!-- generated: python -m optkit.verify.planted.doc -->", "<!-- end -->"


def table() -> str:
    """Kinds by target, and the library's size and digest."""
    faults = library()
    count = Counter((f.kind, "gpu" if f.hardware else f.target) for f in faults)
    columns = (*TARGETS, "gpu")
    lines = [
        f"{len(faults)} faults, {sum(not f.hardware for f in faults)} of them judged without a GPU; library `{digest(faults)[:12]}`.",
        "",
        "| kind | " + " | ".join(columns) + " |",
        "|---|" + "--:|" * len(columns),
    ]
    lines += [f"| {k} | " + " | ".join(str(count[k, c] or "") for c in columns) + " |" for k in KINDS]
    total = Counter("gpu" if f.hardware else f.target for f in faults)
    return "\n".join([*lines, "| **all** | " + " | ".join(f"**{total[c]}**" for c in columns) + " |"])


def filled(text: str) -> str:
    """The document with its generated part made anew. Raises ValueError where the markers are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main(path: Path) -> None:
    """Rewrite the file's generated part."""
    path.write_text(filled(path.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
