"""Writes docs/recipe.md from the schema: every key with type, default, range and meaning, and every option.

`python -m optkit.docgen` prints it; a test compares the file with what is printed. Assumes only the schema and the
folder optkit/conf.
"""

from __future__ import annotations

import sys
import types
import typing
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import Field, fields
from enum import Enum
from functools import cache
from typing import Any

import yaml

from optkit.locate import CONF, group_options
from optkit.recipe import Recipe, range_text, schema_fields

HEADER = """# Every key of a recipe

Generated from the schema (`python -m optkit.docgen > docs/recipe.md`); do not edit.

A recipe chooses one option per group (`defaults`) and may set single keys on top. What counts, strongest first: the
command line, the recipe, the group's option, the schema's default. `optkit show RECIPE` prints the resolved recipe
with the source of every value, `optkit show RECIPE --why KEY` the whole history of one. `???` means: no default, some
layer has to set it.
"""


def _hint(dotted: str) -> Any:
    group, name = dotted.split(".")
    section = typing.get_type_hints(Recipe)[group]
    return typing.get_type_hints(section)[name]


@cache
def type_text(dotted: str) -> str:
    """The type of a key in words: "int", "list of int", "one of counter, tagged, grid_barrier", "text or null"."""
    if dotted.count(".") > 1:  # one entry of a mapping key
        return _words(typing.get_args(_hint(".".join(dotted.split(".")[:2])))[1])
    return _words(_hint(dotted))


def _words(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if a is type(None) else _words(a) for a in args)
    if origin is list:
        return f"list of {_words(args[0])}"
    if origin is dict:
        return f"mapping from {_words(args[0])} to {_words(args[1])}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        names = [m.name for m in hint]
        return f"one of {', '.join(names)}" if len(names) > 1 else names[0]
    return {int: "int", float: "number", str: "text", bool: "true or false"}[hint]


def _default(f: Field[Any]) -> str:
    value = f.default_factory() if f.default_factory is not NO_DEFAULT else f.default
    if isinstance(value, Enum):
        value = value.name
    text = yaml.safe_dump(value, default_flow_style=True).replace("\n...", "").strip()
    return "???" if value == "???" else text


def render() -> str:
    """The whole document."""
    out = [HEADER]
    keys = dict(schema_fields())
    for group in fields(Recipe):
        section = group.default_factory
        doc = (section.__doc__ or "").strip()  # type: ignore[union-attr]
        out.append(f"\n## {group.name}\n\n{doc}\n")
        out.append("| key | type | default | meaning |\n|---|---|---|---|")
        for dotted, f in keys.items():
            if dotted.startswith(group.name + "."):
                limits = range_text(f.metadata)
                kind = type_text(dotted) + (f", {limits}" if limits else "")
                out.append(f"| `{dotted}` | {kind.replace('|', '&#124;')} | `{_default(f)}` | {f.metadata['doc']} |")
        out.append("\n| option | what it is |\n|---|---|")
        for option in group_options(group.name):
            first = (CONF / group.name / f"{option}.yaml").read_text(encoding="utf-8").splitlines()[0]
            out.append(f"| `{group.name}={option}` | {first.removeprefix('#').strip()} |")
    return "\n".join(out) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render())
