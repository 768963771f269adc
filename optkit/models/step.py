"""What the architecture files share when they build a decode step: projections, norms, adds and exchanges.

Row-parallel products are f32 partials where tp > 1: they are summed across ranks before they are rounded.
"""

from __future__ import annotations

import zlib
from dataclasses import asdict
from typing import Any

from optkit.models.graph import Builder, Graph

STEP_INPUTS = ("seq_len", "block_table", "slot_mapping", "state_slot")


class StepBuilder:
    """One rank's graph in the making. `config` is the family's frozen dataclass with hidden_size, num_layers,
    vocab_size, rms_norm_eps; its fields become the graph's constants."""

    def __init__(
        self,
        family: str,
        config: Any,
        *,
        rows: int,
        tp: int,
        rank: int,
        layers: tuple[int, int] | None,
        peers: str,
        seed: int,
    ) -> None:
        if rows < 1:
            raise ValueError(f"rows: {rows}: expected >= 1")
        if not 0 <= rank < tp:
            raise ValueError(f"rank: {rank}: expected 0 <= rank < tp = {tp}")
        if peers not in ("emulated", "real"):
            raise ValueError(f"peers: {peers!r}: expected 'emulated' or 'real'")
        first, last = layers if layers is not None else (0, config.num_layers)
        if not 0 <= first < last <= config.num_layers:
            raise ValueError(
                f"layers: ({first}, {last}): expected 0 <= first < last <= {config.num_layers}, the model's layers"
            )
        self.family, self.config, self.rows, self.tp, self.rank = family, config, rows, tp, rank
        self.layers, self.peers, self.seed = (first, last), peers, seed
        self.partial = "f32" if tp > 1 else "bf16"
        self.b = Builder()

    def graph(
        self,
        carried: tuple[str, ...],
        outputs: tuple[str, ...],
        lookback: bool = False,
        **constants: Any,
    ) -> Graph:
        """The finished graph; `carried` are the inputs that an earlier stage hands over (else the token is read).
        `lookback`: some op reads the token and the ones before it. `constants` are build choices beside the config."""
        first, last = self.layers
        stage = "" if self.layers == (0, self.config.num_layers) else f"[{first}:{last}]"
        extra = {"tp": self.tp, "rank": self.rank, "peers": self.peers if self.tp > 1 else "none", "seed": self.seed}
        extra |= constants
        token = () if carried and not lookback else ("token",)
        return self.b.build(
            name=self.family + stage,
            family=self.family,
            rows=self.rows,
            layers=self.layers,
            inputs=(*token, *STEP_INPUTS, *(("lookback",) if lookback else ()), *carried),
            outputs=outputs,
            constants=tuple(sorted({**asdict(self.config), **extra}.items())),
        )

    # `name` is the value's (and the op's) full name, `w` the weight's checkpoint name

    def matrix(self, w: str, m: int, k: int, shard: int = -1, form: str = "bf16") -> str:
        """W [m, k] on this rank; form "fp8_block" has its scales beside it, under the name with .scale."""
        if form != "fp8_block":
            return self.b.weight(w, (m, k), form, shard=shard)
        source = (w, w.removesuffix(".weight") + ".scale")
        return self.b.weight(w, (m, k), form, source, form, shard)

    def linear(
        self,
        name: str,
        x: str,
        w: str,
        m: int,
        k: int,
        layer: int,
        dtype: str = "bf16",
        shard: int = -1,
        form: str = "bf16",
    ) -> str:
        """y = W x with W [m, k] on this rank."""
        w = self.matrix(w, m, k, shard, form)
        return self.b.add(name, "linear", (x,), ((name, m, dtype),), weights={"w": w}, layer=layer)[0]

    def norm(self, name: str, x: str, w: str, width: int, layer: int, eps: float | None = None) -> str:
        """RMSNorm; eps defaults to the model's."""
        w = self.b.weight(w, (width,))
        return self.b.add(
            name,
            "rmsnorm",
            (x,),
            ((name, width, "bf16"),),
            weights={"w": w},
            layer=layer,
            eps=self.config.rms_norm_eps if eps is None else eps,
        )[0]

    def add(self, name: str, terms: tuple[str, ...], layer: int) -> str:
        """p + (a + b + ...)."""
        return self.b.add(name, "add", terms, ((name, self.config.hidden_size, "bf16"),), layer=layer)[0]

    def exchange(self, kind: str, name: str, x: str, width: int, dtype: str, layer: int) -> str:
        """all_reduce or all_gather of x; x itself where tp == 1. The seed depends on the op's place, not on its layer,
        so that repeated layers stay equal."""
        if self.tp == 1:
            return x
        seed = zlib.crc32(f"{self.seed}:{name.rpartition('.')[2]}".encode())
        return self.b.add(
            name,
            kind,
            (x,),
            ((name, width, dtype),),
            layer=layer,
            ranks=self.tp,
            rank=self.rank,
            seed=seed,
            peers=self.peers,
        )[0]

    def embed(self, table: str = "model.embed_tokens.weight") -> str:
        """The token's row of the sharded embedding table, summed over the ranks: "P.in"."""
        hidden, vocab = self.config.hidden_size, self.config.vocab_size // self.tp
        w = self.b.weight(table, (vocab, hidden), shard=0)
        name = "P.in" if self.tp == 1 else "P.in_part"
        self.b.add(
            "embed", "embed", ("token",), ((name, hidden, "bf16"),), weights={"w": w}, vocab_start=self.rank * vocab
        )
        return self.exchange("all_reduce", "P.in", name, hidden, "bf16", -1)
