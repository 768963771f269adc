"""Runs a Plan on torch tensors: whole steps or slices, stage by stage or task by task in a given order.

Assumes caches in vLLM's paged layouts (models.ops.base.StateTensor), updated in place. The same bits come out whatever
the order: see bodies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from optkit.execute.bodies import BODIES
from optkit.execute.contents import contents
from optkit.execute.facts import CONTRACT, check_facts
from optkit.execute.memory import ExecutionError, Guard, Memory, poison_value
from optkit.execute.runner import Tensors
from optkit.execute.schedule import Scheduler
from optkit.execute.weights import WeightStore
from optkit.models.graph import Graph, step_name
from optkit.models.ops import StateTensor, WeightTensor
from optkit.plan.types import Plan


class Executor:
    """A StageRunner on the CPU.

    Args:
        plan: the Plan.
        graph: the graph it was made from (names of outputs and states).
        weights: Weight name -> resident tensor, MXFP4 as (packed, scales).
        caches: State name -> paged tensor, or (K, V); bound, not copied.
        order: "stage" runs whole stages in one call each (fastest); an int seeds a random task order; "inverted",
            "greedy" and "starve:N" are adversarial orders (see schedule).
        checked: poisons memory at the start of each step, checks that every read sees the right writer's value and that
            the facts hold which the proofs assume of indices (see facts).
        accesses: with `checked` and a task order, also checks that tasks touch only what their Accesses declare.

    Raises:
        ValueError: a stage body, weight or state that is missing, all of them in one message.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        weights: Mapping[str, WeightTensor],
        caches: dict[str, StateTensor],
        *,
        order: int | str = "stage",
        checked: bool = False,
        accesses: bool = True,
        device: torch.device | str = "cpu",
    ) -> None:
        missing = sorted({s.body for s in plan.stages} - BODIES.keys())
        problems = [f"body {b!r}: not one of {', '.join(BODIES)}" for b in missing]
        problems += [f"weight {w.name!r} is missing" for w in graph.weights if w.name not in weights]
        problems += [f"state {s.name!r} has no cache" for s in graph.states if s.name not in caches]
        if problems:
            raise ValueError(f"plan {plan.name!r} cannot run: " + "; ".join(problems))
        self.plan, self.graph, self.caches = plan, graph, caches
        self.device = torch.device(device)
        self.order, self.checked, self.accesses = order, checked, accesses
        content = contents(plan, graph)[-1].after
        self._outputs = {s.value: b for b, s in content.items() if s.kind == "value" and s.value in graph.outputs}
        self._ids = {s.name: graph.op(s.ops[0]).outputs[0] for s in plan.stages if s.body == "route"}
        paged = [caches[s.name] for s in graph.states if s.kind.startswith("kv")]
        block_size = (paged[0] if isinstance(paged[0], torch.Tensor) else paged[0][0]).shape[1] if paged else 1
        self.memory = Memory(plan, WeightStore(weights), caches, self.device, block_size)

    def choices(self) -> dict[str, torch.Tensor]:
        """Top-k choices of the last step by ids value, i32 [rows, topk]."""
        return {self._ids[stage]: ids for stage, ids in self.memory.choices.items()}

    @torch.no_grad()
    def step(self, inputs: Tensors) -> torch.Tensor:
        """One decode step: f32 logits [rows, V] (a copy); caches are updated in place.

        Raises ExecutionError (Deadlock among them) naming stage, task and buffer.
        """
        mem = self.memory
        mem.begin(inputs, poison=self.checked)
        mem.choices.clear()
        if self.checked:
            for producer in {x.producer for x in self.plan.index_sets if x.producer.startswith(CONTRACT)}:
                check_facts(mem, producer)
            self._poison_new_rows()
        self._run(0, len(self.plan.stages))
        return self.outputs()[self.graph.outputs[0]]

    def outputs(self) -> dict[str, torch.Tensor]:
        """Copies of the graph's outputs after the last step, [rows, width]."""
        mem = self.memory
        return {name: mem.data[buffer][: mem.rows].clone() for name, buffer in self._outputs.items()}

    @torch.no_grad()
    def run_stages(self, first: int, last: int, inputs: Tensors, inject: Tensors) -> dict[str, torch.Tensor]:
        """Stages [first, last) from poisoned memory with `inject` written first; see StageRunner.run_stages."""
        mem = self.memory
        mem.begin(inputs, poison=True)
        for name, value in inject.items():
            data = mem.data[name]
            rows = min(value.shape[-2], data.shape[-2])
            data[..., :rows, :] = value[..., :rows, :].to(data.dtype)
        self._run(first, last, injected=frozenset(inject))
        names = dict.fromkeys(a.buffer for s in self.plan.stages[first:last] for a in s.writes if a.buffer in mem.data)
        return {name: mem.data[name].clone() for name in names}

    def _run(self, first: int, last: int, injected: frozenset[str] = frozenset()) -> None:
        if self.order == "stage":
            for index in range(first, last):
                self._run_units(index, range(self.plan.stages[index].units), injected, accesses=False)
            return
        for group in Scheduler(self.plan, self.memory.rows, self.order, first, last):
            index = group[0].stage
            units = sorted(u for task in group for u in self.plan.stages[index].units_of(task.index))
            if units:
                self._run_units(index, units, injected, accesses=self.accesses)

    def _run_units(self, index: int, units: Sequence[int], injected: frozenset[str], *, accesses: bool) -> None:
        mem, stage = self.memory, self.plan.stages[index]
        mem.stage = index
        mem.guard = Guard(self.plan, index, units, accesses=accesses, injected=injected) if self.checked else None
        try:
            BODIES[stage.body](stage, units, mem)
        except ExecutionError:
            raise
        except Exception as e:
            raise ExecutionError(
                f"stage {index} {stage.name!r} (body {stage.body}, units {units[0]}..{units[-1]}): "
                f"{type(e).__name__}: {e}"
            ) from e

        if self.checked and stage.body == "route":
            check_facts(mem, stage.name, stage)

    def _poison_new_rows(self) -> None:
        """NaN where this step's KV rows will go: an attention task that overtakes the insert is seen."""
        for state in self.graph.states:
            if state.kind in ("kv", "kv_heads"):
                slots = self.memory.inputs[step_name(self.memory.inputs, "slot_mapping", state.layer)]
                slots = slots[slots >= 0].long()
                cache = self.caches[state.name]
                for t in cache if isinstance(cache, tuple) else (cache,):
                    t[slots // t.shape[1], slots % t.shape[1]] = poison_value(t.dtype)
