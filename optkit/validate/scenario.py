"""A decode situation to run: tokens, ragged requests in shuffled pages, and caches that already hold a past.

The past is random but in range (unit normal rows, decayed states), rounded to the states' dtypes, so that every
implementation starts from the same bits. Slot 0 and block 0 belong to nobody, as in vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from optkit.models.graph import Graph
from optkit.models.interpret import allocate_caches
from optkit.models.ops import StateTensor

RECURRENT_STD = 0.1
"""Spread of a random recurrent state: the size that K3's decayed delta rule settles at for unit keys and values."""


@dataclass
class Scenario:
    """`batch` requests for `steps` steps.

    starts: tokens each request already holds (default: ragged, across page and 64-token chunk edges); padding: rows
    that are padding (slot_mapping -1, state_slot 0, seq_len 0) as vLLM pads a captured batch.
    """

    graph: Graph
    batch: int
    steps: int
    seed: int = 0
    block_size: int = 16
    starts: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    blocks: int = 0
    slots: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.seed)
        if not 1 <= self.batch <= self.graph.rows:
            raise ValueError(f"batch: {self.batch}: expected 1..{self.graph.rows}, the graph's rows")
        if not self.starts:
            # page edge - 1, inside the first chunk, chunk edge, several chunks: repeated with a shift
            ragged = (self.block_size - 1, 3, 63, 130, 0, 64, self.block_size, 90)
            self.starts = tuple(ragged[r % 8] for r in range(self.batch))
        if len(self.starts) != self.batch:
            raise ValueError(f"starts: {self.starts}: expected {self.batch} lengths")
        self.blocks_per_row = -(-(max(self.starts) + self.steps) // self.block_size)
        blocks, slots = (
            1 + self.batch * self.blocks_per_row,
            1 + self.batch + 1,
        )  # a spare slot that must stay untouched
        self.blocks, self.slots = self.blocks or blocks, self.slots or slots
        if self.blocks < blocks or self.slots < slots:
            raise ValueError(f"blocks, slots: {self.blocks}, {self.slots}: expected at least {blocks}, {slots}")
        order = (torch.randperm(self.blocks - 1, generator=gen) + 1)[: blocks - 1]
        self.block_table = order.view(self.batch, self.blocks_per_row).int()
        self.state_slot = (torch.randperm(self.slots - 1, generator=gen) + 1)[: self.batch].int()
        # one rank with emulated peers embeds only tokens of its own vocabulary shard: draw from it
        constants = dict(self.graph.constants)
        shard = constants["vocab_size"] // constants["tp"]
        self.tokens = constants["rank"] * shard + torch.randint(
            0, shard, (self.steps, self.batch), generator=gen, dtype=torch.int32
        )
        self.carried = {
            name: torch.randn((self.steps, self.batch, constants["hidden_size"]), generator=gen).bfloat16()
            for name in self.graph.inputs
            if name.startswith("in.")
        }

    def inputs(self, step: int) -> dict[str, Tensor]:
        """The step's inputs on `device`, one row a request."""
        length = torch.tensor(self.starts) + step + 1
        pos = length - 1
        block = self.block_table[torch.arange(self.batch), pos // self.block_size].long()
        values = {
            "token": self.tokens[step].clone(),
            "seq_len": length.int(),
            "block_table": self.block_table.clone(),
            "slot_mapping": block * self.block_size + pos % self.block_size,
            "state_slot": self.state_slot.clone(),
        }
        for r in self.padding:
            values["seq_len"][r], values["slot_mapping"][r], values["state_slot"][r] = 0, -1, 0
        values |= {name: t[step] for name, t in self.carried.items()}
        return {k: v.to(self.device) for k, v in values.items() if k in self.graph.inputs}

    def active(self) -> list[int]:
        """Rows that are not padding."""
        return [r for r in range(self.batch) if r not in self.padding]

    def caches(self, precision: str = "bf16") -> dict[str, StateTensor]:
        """Fresh caches with the random past: "bf16" in the states' dtypes, "f64" the same numbers in float64."""
        stored = allocate_caches(self.graph, self.slots, self.blocks, self.block_size, "bf16", self.device)
        gen = torch.Generator().manual_seed(self.seed + 1)
        for state in self.graph.states:
            std = RECURRENT_STD if state.kind == "recurrent" else 1.0
            held = stored[state.name]
            for t in held if isinstance(held, tuple) else (held,):
                t.copy_(torch.randn(t.shape, generator=gen) * std)
        return stored if precision == "bf16" else upcast(stored)


def upcast(caches: dict[str, StateTensor]) -> dict[str, StateTensor]:
    """The same numbers in float64."""
    return {k: (t[0].double(), t[1].double()) if isinstance(t, tuple) else t.double() for k, t in caches.items()}


def tensors(t: StateTensor) -> tuple[Tensor, ...]:
    """One state's tensors: (t,) or (K, V)."""
    return t if isinstance(t, tuple) else (t,)


def copy_caches(into: dict[str, StateTensor], source: dict[str, StateTensor]) -> None:
    """Writes `source` into bound caches in place, with their dtype."""
    for name, t in source.items():
        for a, b in zip(tensors(into[name]), tensors(t), strict=True):
            a.copy_(b)
