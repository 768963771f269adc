"""The scope of an artifact, read off the graph and the plan it was made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optkit.export.manifest import Constant, Scope, config_digest
from optkit.models.graph import Graph
from optkit.plan.types import Plan

RANK_CONSTANTS = ("tp", "rank", "peers", "seed")
"""Graph constants that say which rank, not which model."""


def shape_constants(graph: Graph) -> dict[str, Constant]:
    """The model constants that an artifact and a checkpoint must agree on."""
    return {k: v for k, v in graph.constants if k not in RANK_CONSTANTS}


def scope_of(graph: Graph, plan: Plan, config_json: Mapping[str, Any], *, batch: Sequence[int], context: int,
             arch: str = "sm_90a", rows_per_request: int = 1, pp_rank: int = 0) -> Scope:
    """What a kernel made from `plan` accepts. `config_json` is the checkpoint's config.json as written.

    `batch` are the batch sizes that steps are padded up to, `context` the longest request in tokens. Raises
    pydantic.ValidationError where they make no scope.
    """
    parallel = dict(plan.parallel)
    tp = int(parallel["tp"])
    dtypes = {"activation": "bf16"}
    for state in graph.states:
        dtypes["kv" if state.kind.startswith("kv") else state.kind] = state.dtype
    emulated = tp > 1 and parallel["peers"] == "emulated"
    return Scope(
        family=graph.family, architectures=tuple(config_json.get("architectures") or ()), shape=shape_constants(graph),
        config_digest=config_digest(config_json), layers=graph.layers, batch=tuple(sorted(batch)), rows=plan.rows,
        rows_per_request=rows_per_request, context=context, tp=tp, pp=int(parallel["pp"]),
        rank=int(parallel["rank"]) if emulated else None, pp_rank=pp_rank, peers="emulated" if emulated else "real",
        dtypes=dtypes, block_size_multiple=1, arch=arch, sms=plan.sms)
