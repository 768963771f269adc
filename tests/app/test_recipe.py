"""The schema, composition and its sources, and the checks that span keys."""

from __future__ import annotations

import ast
import typing
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from optkit.compose import COMMAND_LINE, SCHEMA_DEFAULT, flow, resolve
from optkit.docgen import _hint, render
from optkit.errors import Problem, UserError
from optkit.locate import CONF, PACKAGED, group_options, list_recipes
from optkit.recipe import GROUPS, Limits, Recipe, problems, schema_fields

RECIPES = sorted(p.relative_to(PACKAGED).with_suffix("").as_posix() for p in PACKAGED.rglob("*.yaml"))
KEYS = [k for k, _ in schema_fields()]


def wrong(target: str, *overrides: str) -> list[Problem]:
    with pytest.raises(UserError) as caught:
        resolve(target, overrides)
    return [p for p in caught.value.problems if isinstance(p, Problem)]


@pytest.mark.parametrize("name", RECIPES)
def test_packaged_recipes_resolve(name: str) -> None:
    resolved = resolve(name)
    assert resolved.recipe.decode.batch
    assert set(resolved.tree) == set(GROUPS)
    assert next(r for r in list_recipes() if r.name == name).description


@pytest.mark.parametrize("group", GROUPS)
def test_every_option_of_a_group_composes_and_differs(group: str) -> None:
    seen: dict[str, str] = {}
    for option in group_options(group):
        tree = str(resolve("kimi_k3/tiny", [f"{group}={option}"], cross_checks=False).tree[group])
        assert (CONF / group / f"{option}.yaml").read_text().startswith("# "), "an option opens with what it is"
        assert tree not in seen, f"{group}: {option} equals {seen.get(tree)}"
        seen[tree] = option


def test_documentation_is_fresh() -> None:
    written = (Path(__file__).resolve().parents[2] / "docs" / "recipe.md").read_text()
    assert written == render(), "run: python -m optkit.docgen > docs/recipe.md"
    for key in KEYS:
        assert f"`{key}`" in written


def test_a_number_is_a_one_element_list(tmp_path: Path) -> None:
    assert resolve("kimi_k3/tiny", ["decode.batch=4"]).recipe.decode.batch == [4]
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults:\n  - override /model: llama/tiny\ndecode: {batch: 2}\n")
    assert resolve(str(mine)).recipe.decode.batch == [2]
    assert resolve("kimi_k3/tiny", ["decode.batch=4"]).digest == resolve("kimi_k3/tiny", ["decode.batch=[4]"]).digest


def other_values(key: str) -> tuple[Any, Any, Any]:
    """Three valid values of a key's type, different from each other."""
    hint = _hint(key)
    for a in typing.get_args(hint):
        if a is not type(None) and typing.get_origin(hint) not in (list, dict):
            hint = a
    origin = typing.get_origin(hint)
    if origin is list:
        return ([1, 2], [2, 3], [3, 4]) if typing.get_args(hint)[0] is int else (["sm_80a"], ["sm_81a"], ["sm_82a"])
    if origin is dict:
        return {"a": "counter"}, {"a": "tagged"}, {"a": "grid_barrier"}
    if isinstance(hint, type) and issubclass(hint, Enum):
        names = [m.name for m in hint]
        return names[0], names[-1], names[0]
    if hint is bool:
        return True, False, True
    return {int: (5, 6, 7), float: (5.5, 6.5, 7.5), str: ("sm_70a", "sm_71a", "sm_72a")}[hint]


def test_command_line_beats_recipe_beats_group_beats_schema(tmp_path: Path) -> None:
    """For every leaf: which value wins, and which source is named for it."""
    mine = tmp_path / "mine.yaml"
    in_recipe = {key: other_values(key)[0] for key in KEYS}
    text = "defaults:\n  - override /model: kimi_k3/tiny\n"
    for group in GROUPS:
        inside = ", ".join(f"{k.split('.')[1]}: {flow(v)}" for k, v in in_recipe.items() if k.startswith(group + "."))
        text += f"{group}: {{{inside}}}\n"
    mine.write_text(text)
    without = resolve(str(mine), cross_checks=False)
    expected: dict[str, Any] = {}
    overrides = []
    for key in KEYS:
        value = other_values(key)[1]
        expected[key] = value
        overrides += [f"{key}.a={value['a']}"] if isinstance(value, dict) else [f"{key}={flow(value)}"]
    with_overrides = resolve(str(mine), overrides, cross_checks=False)
    packaged = resolve("kimi_k3/tiny")
    for key in KEYS:
        group, name = key.split(".")
        assert without.tree[group][name] == in_recipe[key], key
        assert without.source(key) == str(mine), key
        assert with_overrides.tree[group][name] == expected[key], key
        assert with_overrides.source(key) == COMMAND_LINE, key
        sources = [s for s, _ in packaged.history(key)]
        assert sources and all(s.startswith("conf/") or s == SCHEMA_DEFAULT for s in sources), key
        assert sources == sorted(sources, key=lambda s: (s != SCHEMA_DEFAULT, s.startswith("conf/recipe/"))), key


def test_sources_tell_what_hydra_merged() -> None:
    """The values of the layers, merged weakest first, are exactly the composed recipe."""
    overrides = ["decode.batch=4", "sync=tagged", "validate.samples=300"]
    resolved = resolve("kimi_k3/h200_tp8_slice", overrides)
    with initialize_config_module("optkit.conf", version_base="1.3"):
        cfg = compose("config", ["recipe=kimi_k3/h200_tp8_slice", "decode.batch=[4]", *overrides[1:]])
    composed = OmegaConf.to_container(cfg, enum_to_str=True)
    for key in KEYS:
        group, name = key.split(".")
        value = resolved.history(key)[-1][1]
        assert composed[group][name] == value == resolved.tree[group][name], key  # type: ignore[index,call-overload]


def test_n_mistakes_give_n_lines_each_with_its_file(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "defaults:\n  - override /model: kimi_k3/tiny\nmodel: {familly: x}\ndecode: {batch: 4, context: soon}\nsinc: 3\n"
    )
    found = wrong(str(mine), "fusion.value_gte=true", "validate.samples=many")
    assert {(p.key, p.where) for p in found} == {
        ("model.familly", str(mine)),
        ("decode.context", str(mine)),
        ("sinc", str(mine)),
        ("fusion.value_gte", COMMAND_LINE),
        ("validate.samples", COMMAND_LINE),
    }
    assert len(found) == 5
    hints = {p.key: p.hint for p in found}
    assert "'model.family'" in hints["model.familly"]
    assert "'sync'" in hints["sinc"]
    assert "'fusion.value_gate'" in hints["fusion.value_gte"]
    assert all("\n" not in str(p) for p in found)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["decode.batch=0"], "decode.batch"),
        (["decode.batch=[1,1]"], "decode.batch"),
        (["decode.batch=[]"], "decode.batch"),
        (["decode.batch=9"], "decode.batch"),
        (["decode.batch=8", "decode.rows_per_request=2"], "decode.batch"),
        (["decode.batch=4", "decode.rows_per_request=2"], "decode.rows_per_request"),
        (["decode.context=0"], "decode.context"),
        (["parallel.rank=1"], "parallel.rank"),
        (["parallel.stage=1"], "parallel.stage"),
        (["parallel.tp=16"], "parallel.tp"),
        (["cache.blocks=3"], "cache.blocks"),
        (["cache.slots=8"], "cache.slots"),
        (["tune.sms=133"], "tune.sms"),
        (["tune.kv_splits=0"], "tune.kv_splits"),
        (["overlap.ring_slots=1"], "overlap.ring_slots"),
        (["validate.rollout_steps=300"], "validate.rollout_steps"),
        (["model.layers=[3,3]"], "model.layers"),
        (["model.layers=[1]"], "model.layers"),
        (["hardware.arch=sm90"], "hardware.arch"),
        (["emit.probe_archs=[sm_100]"], "emit.probe_archs"),
    ],
)
def test_impossible_values_are_refused(overrides: list[str], key: str) -> None:
    found = wrong("kimi_k3/tiny", *overrides)
    assert [p.key for p in found] == [key]
    assert found[0].where == COMMAND_LINE


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("decode.context=long", "decode.context"),
        ("hardware.sms=1.5", "hardware.sms"),
        ("hardware.sms=true", "hardware.sms"),
        ("hardware.name=4.10", "hardware.name"),
        ("fusion.value_gate=maybe", "fusion.value_gate"),
        ("sync.mechanism=counters", "sync.mechanism"),
        ("decode.batch=[1,x]", "decode.batch"),
        ("decode={batch:1}", "decode"),
        ("decode=3", "decode"),
        ("model=kimi_k3/tny", "model"),
        ("recipe=llama/tiny", "recipe"),
        ("hydra.run.dir=x", "hydra.run.dir"),
        ("~decode.batch", "~decode.batch"),
    ],
)
def test_wrong_types_and_options_are_refused(override: str, key: str) -> None:
    assert [p.key for p in wrong("kimi_k3/tiny", override)] == [key]


def test_model_limits() -> None:
    recipe = resolve("kimi_k3/h200_tp8_slice").recipe
    where = resolve("kimi_k3/h200_tp8_slice").source
    assert problems(recipe, where, Limits(layers=4, max_context=8192)) == []
    assert [p.key for p in problems(recipe, where, Limits(layers=3, max_context=8191))] == [
        "decode.context",
        "model.layers",
    ]


def test_interpolations_are_checked_after_composition(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    text = "defaults:\n  - override /model: kimi_k3/tiny\ntune:\n  sms: {}\n"
    mine.write_text(text.format("${hardware.sms}"))
    assert resolve(str(mine)).recipe.tune.sms == 132
    for bad in ("${hardware.name}", "${hardware.smss}"):
        mine.write_text(text.format(bad))
        with pytest.raises(UserError, match="mine.yaml"):
            resolve(str(mine))


def test_schema_is_data_only() -> None:
    """Nothing in a recipe names code."""
    text = "".join(p.read_text() for p in CONF.rglob("*.yaml"))
    assert "_target_" not in text
    assert all(isinstance(f.metadata["doc"], str) and len(f.metadata["doc"]) > 10 for _, f in schema_fields())
    assert typing.get_type_hints(Recipe).keys() == set(GROUPS)


def names_read() -> set[str]:
    """Attributes that some code of the package loads, and (outside the schema) names it looks up as text."""
    found: set[str] = set()
    for path in CONF.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and path.name != "recipe.py":
                found.add(node.value)
    return found


def test_every_key_is_read_somewhere() -> None:
    """A key that nothing reads would change nothing. A key with one allowed value states scope: nothing to change."""
    read = names_read()
    for key in KEYS:
        hint = _hint(key)
        if isinstance(hint, type) and issubclass(hint, Enum) and len(hint) == 1:
            continue
        assert key.split(".")[1] in read, f"{key} is read nowhere"


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("hardware.memory_gb", "nan", "a finite number"),
        ("hardware.memory_gb", "inf", "a finite number"),
        ("hardware.sms", "100000", "1 to 1024"),
        ("hardware.arch", "sm_999a", "text like sm_(90"),
        ("emit.probe_archs", "[sm_80a]", "text like sm_(90"),
        ("tune.kv_splits", "100000", "1 to 256"),
        ("model.seed", "99999999999999999999", "0 to 4294967295"),
    ],
)
def test_absurd_numbers_are_refused_by_name(key: str, value: str, expected: str) -> None:
    (problem,) = wrong("kimi_k3/tiny", f"{key}={value}")
    assert problem.key == key and problem.expected.startswith(expected)
