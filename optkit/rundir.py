"""The folder of one run: unique, complete or absent, with a `latest` link beside it.

Every file is written under a temporary name and renamed, so a reader never sees half a file; a refused run leaves
nothing behind. Assumes a POSIX file system (atomic rename, symbolic links).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def utc_stamp(now: datetime | None = None) -> str:
    """`20261130T154500Z`, to the second."""
    return (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes 0600; artifacts are read by other users' servers
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def unique_folder(parent: Path, stem: str) -> Path:
    """Create `parent/stem`, or `parent/stem-2`, `-3`, ... where it exists. Safe against simultaneous callers."""
    number = 1
    while True:
        parent.mkdir(parents=True, exist_ok=True)
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(exist_ok=False)  # the one atomic step: two runs in one second never share a folder
            return path
        except FileExistsError:
            number += 1
        except FileNotFoundError:  # a refused run has just removed the empty parent
            continue


class RunDir:
    """One run's folder."""

    def __init__(self, path: Path, made: tuple[Path, ...] = ()) -> None:
        self.path = path
        self._made = made  # parents that did not exist before, innermost first

    @classmethod
    def create(cls, root: Path, name: str, digest: str) -> RunDir:
        """`root/<recipe>/<UTC time>-<6 hex of the recipe digest>/`, new for every run."""
        parent = (root / name).absolute()
        made = tuple(p for p in (parent, *parent.parents) if not p.exists())
        return cls(unique_folder(parent, f"{utc_stamp()}-{digest[:6]}"), made)

    def text(self, name: str, content: str) -> Path:
        """Write a text file below the run's folder; returns its path."""
        write_text(self.path / name, content)
        return self.path / name

    def json(self, name: str, content: Any) -> Path:
        """Write JSON, indented and with sorted keys."""
        return self.text(name, json.dumps(content, indent=1, sort_keys=True) + "\n")

    def folder(self, name: str, fill: Callable[[Path], None]) -> Path:
        """Make a sub-folder in one step: `fill` writes into a temporary one, which is then renamed."""
        target = self.path / name
        temporary = Path(tempfile.mkdtemp(dir=self.path, prefix=f".{name}."))
        try:
            fill(temporary)
            os.chmod(temporary, 0o755)
            os.rename(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return target

    def link_latest(self) -> Path:
        """Point `latest` beside this folder at it, replacing an older link in one step."""
        link = self.path.parent / "latest"
        temporary = self.path.parent / f".latest.{os.getpid()}.{self.path.name}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(self.path.name)
        os.replace(temporary, link)
        return link

    def discard(self) -> None:
        """Remove the folder of a refused run, and the parents made for it unless others use them by now."""
        shutil.rmtree(self.path, ignore_errors=True)
        for parent in self._made:
            try:
                parent.rmdir()
            except OSError:
                return
