"""A scope read off a real graph and plan fits the checkpoint it was made for, and only that."""

from dataclasses import replace

import pytest

from optkit.export.manifest import Verdict
from optkit.export.scope import scope_of
from optkit.models.families import family_of, named_config
from optkit.plan.build import build_plan
from optkit.plan.choices import PlanChoices


@pytest.mark.parametrize("name, kinds", [("kimi_k3_tiny", {"activation", "kv", "conv", "recurrent"}),
                                         ("llama_tiny", {"activation", "kv"})])
def test_scope_of_tiny_models(name, kinds):
    config = named_config(name)
    family = family_of(config)
    graph = family.build(family.Config.from_hf(config), rows=8)
    plan = build_plan(graph, PlanChoices.from_dicts(name=name))
    s = scope_of(graph, plan, config, batch=[4, 1, 2], context=512)
    assert s.batch == (1, 2, 4) and s.layers == graph.layers and set(s.dtypes) == kinds and s.sms == 132
    assert s.peers == "real" and s.rank is None and s.tp == 1
    assert s.shape["hidden_size"] == dict(graph.constants)["hidden_size"] and "rank" not in s.shape
    other = scope_of(replace(graph), plan, config | {"vocab_size": 7}, batch=[1], context=512)
    assert other.config_digest != s.config_digest
    assert type(s).model_validate_json(s.model_dump_json()) == s


@pytest.mark.parametrize("words, status, not_run", [
    ("verified", "verified", 0), ("verified except hardware (3)", "verified except hardware", 3),
    ("failed (2)", "failed", 0), ("nothing checked", "failed", 0)])
def test_verdict_words(words, status, not_run):
    assert Verdict.parse(words) == Verdict(status=status, not_run=not_run)
