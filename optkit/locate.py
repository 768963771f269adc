"""Where recipes and group options are found: in $OPTKIT_RECIPES, in ./recipes, and in the package.

Assumes only the folder layout of `optkit/conf`; loads no Hydra, so that listing is quick.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from optkit.errors import UserError, did_you_mean

CONF = Path(__file__).resolve().parent / "conf"
PACKAGED = CONF / "recipe"
ENV = "OPTKIT_RECIPES"


@dataclass(frozen=True)
class RecipeFile:
    """A recipe on disk. `name` is what the user types; a packaged recipe's name is its path below conf/recipe."""

    name: str
    path: Path
    packaged: bool

    @property
    def description(self) -> str:
        """The first comment line that is not Hydra's package header, without a closing full stop."""
        for line in self.path.read_text(encoding="utf-8").splitlines():
            text = line.removeprefix("#").strip()
            if line.startswith("#") and text and not text.startswith("@package"):
                return text.rstrip(".")
            if not line.startswith("#"):
                break
        return ""


def search_folders() -> list[Path]:
    """Folders that hold recipes by name, the user's first. The same folder reached twice counts once."""
    folders = [Path(os.environ[ENV])] if os.environ.get(ENV) else []
    folders += [Path("recipes"), PACKAGED]
    unique: dict[Path, Path] = {}
    for folder in folders:
        if folder.is_dir():
            unique.setdefault(folder.resolve(), folder)
    return list(unique.values())


def list_recipes() -> Iterator[RecipeFile]:
    """Every recipe that can be named, in name order within each folder."""
    for folder in search_folders():
        for path in sorted(folder.rglob("*.yaml")):
            yield RecipeFile(path.relative_to(folder).with_suffix("").as_posix(), path.resolve(), _packaged(path))


def ignored_files() -> list[Path]:
    """Files in recipe folders that look like recipes and are none, because their name does not end in .yaml."""
    return [p for folder in search_folders() for p in sorted(folder.rglob("*.yml"))]


def find_recipe(target: str) -> RecipeFile:
    """The recipe a user means by a name or a path.

    Raises UserError for an unknown or ambiguous name, a missing file, and a file that does not end in .yaml.
    """
    path = Path(target).expanduser()
    if target.endswith(".yaml") or target.endswith(".yml") or target.startswith((".", "/", "~")):
        if path.suffix == ".yml":
            raise UserError(f"{target}: expected a file name that ends in .yaml, Hydra ignores .yml")
        if not path.is_file():
            found = "this is a folder" if path.is_dir() else "there is no such file"
            raise UserError(f"{target}: expected the path of a recipe file, {found}")
        if path.suffix != ".yaml":
            raise UserError(f"{target}: expected a file name that ends in .yaml")
        packaged = _packaged(path)
        name = path.resolve().relative_to(PACKAGED).with_suffix("").as_posix() if packaged else path.stem
        return RecipeFile(name, path.resolve(), packaged)
    matches = {r.path: r for r in list_recipes() if r.name == target}
    if len(matches) > 1:
        files = " and ".join(str(p) for p in matches)
        raise UserError(f"recipe {target!r} is ambiguous: {files}; give the path of the one you mean")
    if matches:
        return next(iter(matches.values()))
    for other in ignored_files():
        if other.with_suffix("").as_posix().endswith(target):
            raise UserError(f"recipe {target!r}: {other} is ignored, its name must end in .yaml")
    names = [r.name for r in list_recipes()]
    hint = did_you_mean(target, names) or f"known: {', '.join(names)}"
    raise UserError(f"recipe {target!r}: expected a recipe's name or a path ending in .yaml; {hint}")


@cache
def group_options(group: str) -> tuple[str, ...]:
    """The options of a config group, e.g. ("b200", "gb300", "h200")."""
    folder = CONF / group
    return tuple(p.relative_to(folder).with_suffix("").as_posix() for p in sorted(folder.rglob("*.yaml")))


def _packaged(path: Path) -> bool:
    return path.resolve().is_relative_to(PACKAGED)
