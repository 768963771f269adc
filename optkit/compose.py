"""From a recipe's name or path and overrides to one complete, typed `Recipe`, with the source of every value.

Hydra composes. Around it stands what Hydra 1.3 does not do: every layer (schema, group files, recipe, command line)
is compared with the schema first, so that all mistakes are reported at once, each with its file; `+key`, keys without
a value and recipes that touch `hydra` are refused; an ambiguous name is an error. Assumes that every config group
lies in the package `optkit.conf`; recipes may lie anywhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import optkit
from optkit.docgen import type_text
from optkit.errors import Problem, UserError, did_you_mean
from optkit.locate import CONF, RecipeFile, find_recipe, group_options
from optkit.recipe import GROUPS, Recipe, problems, schema_fields

COMMAND_LINE = "command line"
SCHEMA_DEFAULT = "schema default"
_OUTSIDE = "outside_recipe"  # the name under which a recipe from outside the package is handed to Hydra


@dataclass(frozen=True)
class Layer:
    """One source of values: its label, and its leaves by dotted key."""

    source: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Resolved:
    """A recipe with nothing left open.

    `target` is what the user typed. `tree` is the plain nested data (JSON-able); `layers` are all sources, weakest
    first.
    """

    target: str
    name: str
    file: Path
    overrides: tuple[str, ...]
    recipe: Recipe
    tree: dict[str, Any]
    layers: tuple[Layer, ...]

    @property
    def digest(self) -> str:
        """sha256 of the resolved content and optkit's version: the same content has the same digest anywhere."""
        text = json.dumps({"optkit": optkit.__version__, "recipe": self.tree}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def history(self, dotted: str) -> list[tuple[str, Any]]:
        """(source, value) of every layer that sets a key, weakest first; the last one counts."""
        return [(layer.source, layer.values[dotted]) for layer in self.layers if dotted in layer.values]

    def source(self, dotted: str) -> str:
        """Where the value of a key comes from."""
        history = self.history(dotted)
        return history[-1][0] if history else self.file.name

    def yaml(self, sources: bool = False) -> str:
        """The resolved recipe as YAML that can be loaded again; with `sources`, each value's source as a comment."""
        lines = []
        for group, section in self.tree.items():
            lines.append(f"{group}:")
            for name, value in section.items():
                line = f"  {name}: {flow(value)}"
                lines.append(f"{line:<44}  # {self.source(f'{group}.{name}')}" if sources else line)
        return "\n".join(lines) + "\n"


def flow(value: Any) -> str:
    """A value as one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False).removesuffix("\n...\n").strip()


def resolve(target: str, overrides: Iterable[str] = (), *, cross_checks: bool = True) -> Resolved:
    """Compose one recipe. Raises UserError with every problem found.

    `target` is a recipe name or a path to a .yaml file. With `cross_checks` the checks of `recipe.problems` that need
    no model configuration are made as well.
    """
    file = find_recipe(target)
    parsed = parse_overrides(list(overrides))
    found, usable = _command_line(parsed)
    node = None
    if not file.packaged:
        node = load_recipe_file(file)
        found += _defaults_list(node, file)
    else:
        found += _defaults_list(load_recipe_file(file), file)
    if any("defaults list" in p.where or p.key in GROUPS for p in found):
        raise UserError(found)  # without its groups nothing more can be composed
    return _compose(target, file, node, tuple(overrides), usable, found, cross_checks)


def _compose(
    target: str,
    file: RecipeFile,
    node: DictConfig | None,
    given: tuple[str, ...],
    overrides: list[Override],
    found: list[Problem],
    cross_checks: bool,
) -> Resolved:
    store = ConfigStore.instance()
    store.store(name="schema", node=Recipe)
    choice = file.name
    if node is not None:
        store.store(group="recipe", name=_OUTSIDE, node=node, package="_global_")
        choice = _OUTSIDE
    texts = [f"recipe={choice}", *(_hydra_text(o) for o in overrides if not _unusable(o, found))]
    try:
        with initialize_config_module("optkit.conf", version_base="1.3"):
            layers = list(_layers(texts, file))
            for layer in layers:
                if layer.source not in (COMMAND_LINE, SCHEMA_DEFAULT):  # the command line was checked when parsed
                    found += _lint(layer)
            if found:
                raise UserError(found)
            cfg = compose("config", overrides=texts)
    except HydraException as err:
        raise UserError(_first_sentence(err, file)) from err
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        if missing:
            unset = f"not set by {_label(file)} nor on the command line"
            raise UserError(Problem(k, None, f"a value of type {type_text(k)}", unset) for k in missing)
        plain = OmegaConf.to_container(cfg, resolve=True)
        closed = OmegaConf.merge(OmegaConf.structured(Recipe), plain)  # a second merge: the schema stays closed
        recipe = OmegaConf.to_object(closed)
    except OmegaConfBaseException as err:
        raise UserError(_first_sentence(err, file)) from err
    assert isinstance(recipe, Recipe)
    tree = OmegaConf.to_container(closed, enum_to_str=True)
    assert isinstance(tree, dict)
    resolved = Resolved(
        target, file.name, file.path, given, recipe, {str(k): v for k, v in tree.items()}, tuple(layers)
    )
    if cross_checks:
        wrong = problems(recipe, resolved.source)
        if wrong:
            raise UserError(wrong)
    return resolved


def load_recipe_file(file: RecipeFile) -> DictConfig:
    """A recipe's own content, with single numbers turned into one-element lists where the schema wants a list."""
    try:
        node = OmegaConf.load(file.path)
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise UserError(f"{file.path}{line}: not valid YAML: {getattr(err, 'problem', err)}") from err
    except (OSError, UnicodeDecodeError) as err:
        raise UserError(f"{file.path}: cannot be read: {err}") from err
    if not isinstance(node, DictConfig):
        raise UserError(f"{file.path}: expected a mapping of keys at the top, got {type(node).__name__}")
    for dotted in _LIST_KEYS:
        value = OmegaConf.select(node, dotted, throw_on_resolution_failure=False)
        if value is not None and not OmegaConf.is_list(value) and isinstance(value, (int, float, str)):
            OmegaConf.update(node, dotted, [value])
    return node


def parse_overrides(overrides: list[str]) -> list[Override]:
    """Command-line overrides by Hydra's own grammar. Raises UserError with one line per override it cannot read."""
    parser, parsed, wrong = OverridesParser.create(), [], []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as err:
            why = str(err).splitlines()[0]
            if "token recognition" in why:  # Hydra's grammar takes plain ASCII words; everything else goes in quotes
                why += f"; quote the value: {text.partition('=')[0]}='...'"
            wrong.append(f"{text!r}: expected key=value ({COMMAND_LINE}): {why}")
    if wrong:
        raise UserError(wrong)
    return parsed


def _command_line(overrides: list[Override]) -> tuple[list[Problem], list[Override]]:
    """Problems of the command line, and the overrides that Hydra may see."""
    found: list[Problem] = []
    known = [k for k, _ in schema_fields()]
    for o in overrides:
        name, value = o.key_or_group, o.get_value_string() if o.type.name != "DEL" else None
        if o.is_add() or o.is_force_add():
            found.append(
                Problem(
                    f"{o.input_line}",
                    None,
                    "key=value without '+': the schema is closed",
                    COMMAND_LINE,
                    did_you_mean(name, known),
                )
            )
        elif o.is_delete():
            found.append(Problem(f"{o.input_line}", None, "key=value: keys cannot be deleted", COMMAND_LINE))
        elif name == "hydra" or name.startswith(("hydra.", "hydra/")):
            found.append(
                Problem(name, value, "no hydra setting here; launchers belong to `optkit sweep`", COMMAND_LINE)
            )
        elif o.is_sweep_override():
            found.append(Problem(name, value, "one value; several make a sweep: `optkit sweep`", COMMAND_LINE))
        elif name == "recipe":
            found.append(Problem(name, value, "one recipe per run, given as the first word", COMMAND_LINE))
        elif name in GROUPS:
            found += _option(name, value, COMMAND_LINE)
        elif name not in known and not name.startswith("sync.overrides."):
            found.append(_unknown(name, value, COMMAND_LINE))
        else:
            found += _typed(name, _listed(name, o.value()), COMMAND_LINE)
    return found, overrides


def _option(group: str, value: Any, where: str) -> list[Problem]:
    options = group_options(group)
    if value in options or (value in (None, "null") and where != COMMAND_LINE):  # null: the recipe itself sets every key
        return []
    return [Problem(group, value, f"one of {', '.join(options)}", where, did_you_mean(str(value), options))]


def _defaults_list(node: DictConfig, file: RecipeFile) -> list[Problem]:
    """Problems in a recipe's defaults list: unknown groups and options, and anything that touches hydra."""
    where = f"{_label(file)}, defaults list"
    found: list[Problem] = []
    if "hydra" in node:
        found.append(Problem("hydra", None, "no hydra settings in a recipe: a sweep would ignore them", where))
    for entry in OmegaConf.to_container(node, resolve=False).get("defaults", []):  # type: ignore[union-attr]
        for group, value in entry.items() if isinstance(entry, dict) else [(str(entry), None)]:
            bare = str(group).removeprefix("optional ").removeprefix("override ").strip().lstrip("/")
            if bare.split("/")[0].split("@")[0] == "hydra":
                found.append(
                    Problem(str(group), value, "no hydra settings in a recipe: a sweep would ignore them", where)
                )
            elif isinstance(entry, dict) and str(group).startswith("override "):
                if bare in GROUPS:
                    found += _option(bare, value, where)
                else:
                    found.append(
                        Problem(str(group), value, f"a group: {', '.join(GROUPS)}", where, did_you_mean(bare, GROUPS))
                    )
    return found


def _layers(texts: list[str], file: RecipeFile) -> Iterator[Layer]:
    """Every source that Hydra is about to merge, in its order."""
    loader = GlobalHydra.instance().config_loader()
    defaults = loader.compute_defaults_list("config", texts, RunMode.RUN)
    for d in defaults.defaults:
        if d.config_path is None or (d.package or "").startswith("hydra"):
            continue
        result = loader.repository.load_config(d.config_path)  # type: ignore[attr-defined]
        if result is None:
            continue
        plain = OmegaConf.to_container(result.config, resolve=False, enum_to_str=True)
        assert isinstance(plain, dict)
        source = SCHEMA_DEFAULT if d.config_path == "schema" else f"conf/{d.config_path}.yaml"
        if d.config_path == f"recipe/{_OUTSIDE}":
            source = _label(file)
        values = dict(_leaves({d.package: plain} if d.package else plain))
        if source == SCHEMA_DEFAULT:
            values = {k: v for k, v in values.items() if v != "???"}
        yield Layer(source, values)
    command: dict[str, Any] = {}
    for o in defaults.config_overrides:
        if o.key_or_group.startswith("sync.overrides."):
            command.setdefault("sync.overrides", {})[o.key_or_group.removeprefix("sync.overrides.")] = o.value()
        else:
            command[o.key_or_group] = o.value()
    yield Layer(COMMAND_LINE, command)


def _leaves(tree: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """(dotted key, value) down to the schema's two levels; deeper content is one value."""
    for group, section in tree.items():
        if group == "defaults":
            continue
        if isinstance(section, dict):
            yield from ((f"{group}.{name}", value) for name, value in section.items())
        else:
            yield str(group), section


def _lint(layer: Layer) -> list[Problem]:
    found: list[Problem] = []
    known = {k for k, _ in schema_fields()}
    for dotted, value in layer.values.items():
        if dotted not in known:
            found.append(_unknown(dotted, value, layer.source))
        elif value != "???":
            found += _typed(dotted, value, layer.source)
    return found


def _unknown(dotted: str, value: Any, where: str) -> Problem:
    if "." not in dotted and dotted in GROUPS:
        return Problem(dotted, value, "a mapping of keys", where)
    known = [k for k, _ in schema_fields()]
    return Problem(
        dotted,
        value,
        "a key of the recipe schema (docs/recipe.md)",
        where,
        did_you_mean(dotted, known if "." in dotted else [*known, *GROUPS, "recipe"]),
    )


@cache
def _scratch() -> DictConfig:
    """A structured config to try single values on. Making one takes 10 ms, and a recipe has 200 values to try."""
    return OmegaConf.structured(Recipe)


def _typed(dotted: str, value: Any, where: str) -> list[Problem]:
    """Whether a value has the type of its key; OmegaConf decides."""
    if isinstance(value, str) and "${" in value:
        return []  # an interpolation: known only after composition, checked by the closing merge
    expected = type_text(dotted)
    if expected.startswith("text") and value is not None and not isinstance(value, str):
        return [Problem(dotted, value, f"{expected}, quoted", where)]  # OmegaConf would make '4.1' of 4.10
    if isinstance(value, bool) and not expected.startswith("true or false"):
        return [Problem(dotted, value, expected, where)]  # OmegaConf would take true for 1
    try:
        OmegaConf.update(_scratch(), dotted, value)
    except OmegaConfBaseException:
        return [Problem(dotted, value, type_text(dotted), where)]
    return []


_LIST_KEYS = tuple(k for k, f in schema_fields() if str(f.type).startswith("list"))


def _listed(dotted: str, value: Any) -> Any:
    return [value] if dotted in _LIST_KEYS and value is not None and not isinstance(value, list) else value


def _hydra_text(o: Override) -> str:
    """An override as Hydra gets it: a single value of a list key becomes a one-element list."""
    if o.key_or_group in _LIST_KEYS and o.value() is not None and not isinstance(o.value(), list):
        return f"{o.key_or_group}=[{o.get_value_element_as_str()}]"
    return str(o.input_line)


def _unusable(o: Override, found: list[Problem]) -> bool:
    """Whether a problem was already reported for this override, so that the rest can still be looked at."""
    return any(p.where == COMMAND_LINE and p.key in (o.key_or_group, o.input_line) for p in found)


def _label(file: RecipeFile) -> str:
    if file.packaged:
        return f"conf/{file.path.relative_to(CONF)}"
    near = file.path.is_relative_to(Path.cwd())
    return str(file.path.relative_to(Path.cwd()) if near else file.path)


def _first_sentence(err: Exception, file: RecipeFile) -> str:
    """Hydra's or OmegaConf's message as one line."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    useful = [line for line in lines if not line.startswith(("full_key", "object_type", "reference_type"))]
    key = getattr(err, "full_key", None)
    return f"{_label(file)}: {f'{key}: ' if key else ''}{useful[0] if useful else type(err).__name__}"
