"""The seam between vLLM's model and whatever computes a decode step.

`DecodeBackend` is all that the vLLM model knows of a kernel: bind the caches, run one step. `CpuBackend` runs the
artifact's plan through the CPU executor, `TorchBackend` interprets the graph (prefill and fallback). `StepCounter`
says which of them computed what, so that a test, or an operator, can tell a step that went through the artifact from
one that fell back.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from optkit.export.manifest import Artifact
    from optkit.models.graph import Graph

log = logging.getLogger("vllm.optkit")  # vLLM configures handlers for its own names only
STATS_ENV = "OPTKIT_STATS"


GPU_BACKEND_MISSING = (
    "decode backend: this version has none for a GPU inside vLLM; the kernel runs on one outside of it "
    "(optkit.export.launch.GpuRunner, optkit.bench.hardware)"
)
"""The one reason that stands against every artifact on a GPU, until a DecodeBackend over GpuRunner takes vLLM's sharded
weights and caches."""


class DecodeBackend(Protocol):
    """Computes one new token for each of `rows` requests."""

    name: str

    def bind(self, caches: Mapping[str, Any]) -> None:
        """Take the caches by state name (`Graph.states`). vLLM binds twice: for profiling and for real."""

    def step(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """One step. `inputs` as `Graph.inputs`, [rows, ...], padded to a batch size of the artifact; padding has
        slot_mapping -1 and state_slot 0. Writes the caches in place; returns float32 logits [rows, vocab]."""


class CpuBackend:
    """The artifact's plan on the CPU executor, on the same caches and weights as the fallback."""

    name = "cpu executor"

    def __init__(self, artifact: Artifact, graph: Graph, weights: Mapping[str, Any]) -> None:
        from optkit.plan.compress import from_json

        self.plan = from_json(artifact.plan_json)
        if self.plan.digest != artifact.manifest.plan_digest:
            raise ValueError(f"artifact {artifact.path}: plan.json does not expand to the plan it was made from")
        self.graph, self.weights = graph, weights

    def bind(self, caches: Mapping[str, Any]) -> None:
        from optkit.execute import Executor

        self.executor = Executor(self.plan, self.graph, self.weights, dict(caches))

    def step(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self.executor.step(inputs)


class TorchBackend:
    """The graph, op by op, with bf16 rounding points: simple, exact, slow. Takes any number of rows."""

    name = "torch"

    def __init__(self, graph: Graph, weights: Mapping[str, Any]) -> None:
        from optkit.models.interpret import cast_weights

        self.graph, self.weights = graph, cast_weights(graph, weights, "bf16")

    def bind(self, caches: Mapping[str, Any]) -> None:
        self.caches = caches

    def step(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        from optkit.models.interpret import run

        return run(self.graph, self.weights, inputs, self.caches, "bf16")[self.graph.outputs[0]]


@dataclass
class StepCounter:
    """Counts of model steps by path. With OPTKIT_STATS=FILE the counts are kept in that file, as JSON."""

    artifact: str = ""  # digest; "" = none active
    reasons: tuple[str, ...] = ()
    decode_executor: int = 0
    decode_fallback: int = 0
    prefill: int = 0
    """Steps with at least one prompt token (prefill and mixed)."""

    def count(self, what: str) -> None:
        setattr(self, what, getattr(self, what) + 1)
        self.save()

    def save(self) -> None:
        if path := os.environ.get(STATS_ENV):
            tmp = Path(f"{path}.{os.getpid()}")
            tmp.write_text(json.dumps(asdict(self)))
            os.replace(tmp, path)  # a reader never sees half a file

    def summary(self) -> str:
        return (f"decode steps through the artifact: {self.decode_executor}, decode steps through the fallback: "
                f"{self.decode_fallback}, prefill and mixed steps: {self.prefill}")
