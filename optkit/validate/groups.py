"""Cache groups: vLLM gives single layers a block table, slot mapping and state slots of their own.

`Regrouped` moves every second layer of each kind of state to other blocks and slots and tells the runner so through the
layer's own step inputs. Nothing else changes, so every output must keep its bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from optkit.checks import Check, check
from optkit.execute.runner import StageRunner
from optkit.models.graph import Graph, State
from optkit.models.ops import StateTensor
from optkit.validate.scenario import Scenario

NAMES = {
    "kv": ("block_table", "slot_mapping"),
    "kv_heads": ("block_table", "slot_mapping"),
    "conv": ("state_slot",),
    "recurrent": ("state_slot",),
}


class Regrouped:
    """A scenario in which the layers `moved` belong to a second cache group."""

    def __init__(self, graph: Graph, scenario: Scenario) -> None:
        self.graph, self.scenario = graph, scenario
        device = scenario.device
        self.blocks = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.arange(scenario.blocks - 1).flip(0)]).to(
            device
        )
        self.slots = torch.cat([torch.zeros(1, dtype=torch.long), 1 + torch.arange(scenario.slots - 1).flip(0)]).to(
            device
        )
        kinds: dict[str, list[int]] = {}
        for s in graph.states:
            kinds.setdefault(s.kind, []).append(s.layer)
        self.moved = {s.name: s for s in graph.states if kinds[s.kind].index(s.layer) % 2}
        self.own = tuple(dict.fromkeys(f"{n}@{s.layer}" for s in self.moved.values() for n in NAMES[s.kind]))

    def caches(self) -> dict[str, StateTensor]:
        """The scenario's caches, moved layers at their new places."""
        return {
            k: self._move(self.moved[k], t) if k in self.moved else t for k, t in self.scenario.caches("bf16").items()
        }

    def _move(self, state: State, t: StateTensor) -> StateTensor:
        to = self.blocks if state.kind.startswith("kv") else self.slots

        def moved(x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            y[to] = x
            return y

        return (moved(t[0]), moved(t[1])) if isinstance(t, tuple) else moved(t)

    def inputs(self, step: int) -> dict[str, Tensor]:
        """The step's inputs with those of the moved layers."""
        base = self.scenario.inputs(step)
        size = self.scenario.block_size
        made: dict[str, Tensor] = {}
        if "block_table" in base:
            made["block_table"] = self.blocks[base["block_table"].long()].int()
            at = base["slot_mapping"]
            there = self.blocks[at.clamp(min=0) // size] * size + at.clamp(min=0) % size
            made["slot_mapping"] = torch.where(at < 0, at, there)
        if "state_slot" in base:
            made["state_slot"] = self.slots[base["state_slot"].long()].int()
        return base | {name: made[name.partition("@")[0]] for name in self.own}


def groups(
    make: Callable[[dict[str, StateTensor], tuple[str, ...]], StageRunner],
    graph: Graph,
    scenario: Scenario,
    command: str = "",
) -> Check:
    """ "groups.bits": outputs with every second layer in another cache group, bit by bit those with one group.

    `make(caches, own)` binds a runner to caches; `own` names the step inputs that single layers have for themselves.
    """
    other = Regrouped(graph, scenario)
    if not other.own:
        return check("groups.bits", True, 0, 0, "one layer of each kind: nothing to move", command)
    one, two = make(scenario.caches("bf16"), ()), make(other.caches(), other.own)
    different = 0
    for t in range(scenario.steps):
        one.step(scenario.inputs(t))
        two.step(other.inputs(t))
        different += sum(
            not torch.equal(a, b) for a, b in zip(one.outputs().values(), two.outputs().values(), strict=True)
        )
    return check(
        "groups.bits",
        different == 0,
        different,
        0,
        f"{len(other.moved)} of {len(graph.states)} states in a second cache group, {scenario.steps} steps",
        command,
    )
