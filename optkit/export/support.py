"""Does this artifact fit this engine? `unsupported` lists every unmet requirement at once.

`Facts` are gathered by the plugin from vLLM's configuration; nothing here imports vLLM or torch, so the rules can be
tested alone. Default-deny: a feature that the kernel was not built for is a reason, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from optkit.export.manifest import CUBIN, Constant, Manifest


@dataclass(frozen=True)
class Facts:
    """What the engine is going to run. `features` names what is switched on and changes a decode step."""

    device: str  # cpu | cuda (any accelerator; `arch` says which)
    vllm: str
    architectures: tuple[str, ...]
    config_digest: str
    shape: Mapping[str, Constant]
    dtypes: Mapping[str, str]
    block_size: int
    max_num_seqs: int
    max_model_len: int
    tp: int = 1
    pp: int = 1
    rank: int = 0
    pp_rank: int = 0
    arch: str = ""  # cuda only: sm_90a, ...
    sms: int = 0  # cuda only
    features: tuple[str, ...] = field(default=())
    model_error: str = ""  # why no decode step could be made of the checkpoint's config.json; shape is empty then


def unsupported(m: Manifest, f: Facts) -> list[str]:
    """Every reason why decode steps of engine `f` may not run through artifact `m`; empty when it fits."""
    s, out = m.scope, []

    def need(ok: bool, what: str, have: object, expected: object) -> None:
        if not ok:
            out.append(f"{what}: engine has {have}, artifact accepts {expected}")

    if m.verdict.status == "failed":
        out.append("verdict: the run that made this artifact failed its checks")
    if f.device == "cuda":
        _gpu(m, f, out, need)
    low, high = m.versions.vllm
    need(_release(low) <= _release(f.vllm) < _release(high), "vLLM version", f.vllm, f">={low},<{high}")
    need(bool(set(f.architectures) & set(s.architectures)), "architecture", _join(f.architectures),
         _join(s.architectures))
    if f.model_error:
        out.append(f"model: {f.model_error}")
    else:
        for key in sorted(set(s.shape) | set(f.shape)):
            need(f.shape.get(key) == s.shape.get(key), f"model constant {key}", f.shape.get(key), s.shape.get(key))
        for key in sorted(set(s.dtypes) | set(f.dtypes)):
            need(f.dtypes.get(key) == s.dtypes.get(key), f"{key} dtype", f.dtypes.get(key), s.dtypes.get(key))
    need(f.config_digest == s.config_digest, "config.json digest", f.config_digest[:16], s.config_digest[:16])
    need(f.tp == s.tp, "tensor parallel size", f.tp, s.tp)
    need(f.pp == s.pp, "pipeline parallel size", f.pp, s.pp)
    need(s.rank is None or f.rank == s.rank, "tensor parallel rank", f.rank, s.rank)
    need(f.pp_rank == s.pp_rank, "pipeline stage", f.pp_rank, s.pp_rank)
    if s.peers == "emulated":
        out.append("peers: the artifact emulates its peers on one GPU (for measurement only), serving needs real ranks")
    out += block_size_reasons(m, f.block_size)
    need(f.max_num_seqs <= s.batch[-1], "max_num_seqs", f.max_num_seqs, f"at most {s.batch[-1]}")
    need(f.max_model_len <= s.context, "max_model_len", f.max_model_len, f"at most {s.context}")
    if s.rows_per_request != 1:
        out.append(f"rows per request: the artifact computes {s.rows_per_request} rows a request, a decode step has 1")
    for feature in f.features:
        out.append(f"feature: {feature} is on, the artifact was not built for it")
    return out


def block_size_reasons(m: Manifest, block_size: int) -> list[str]:
    """The rule for the cache block size alone: vLLM settles it only when it allocates the caches."""
    s = m.scope
    if block_size % s.block_size_multiple == 0 and block_size <= s.block_size_max:
        return []
    return [f"cache block size: engine has {block_size}, artifact accepts multiples of {s.block_size_multiple} up to "
            f"{s.block_size_max}"]


def _gpu(m: Manifest, f: Facts, out: list[str], need) -> None:  # type: ignore[no-untyped-def]
    need(f.arch == m.scope.arch, "GPU architecture", f.arch, m.scope.arch)
    need(f.sms == m.scope.sms, "SMs", f.sms, m.scope.sms)
    if m.kernel is None:
        out.append("kernel: the artifact holds none")
        return
    hw = m.verdict.hardware
    if hw is None or hw.cubin_sha256 != m.files[CUBIN].sha256:
        out.append(f"verdict: no hardware evidence for this cubin ({m.verdict.not_run} checks not run); "
                   "run them on the GPU and add them with `optkit evidence merge`")


def _release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version: 0.33.0+cu130 -> (0, 33, 0); padded to three."""
    nums = [int(n) for n in re.match(r"(\d+(?:\.\d+)*)?", version).group(0).split(".") if n]  # type: ignore[union-attr]
    return tuple((nums + [0, 0, 0])[:3])


def _join(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
