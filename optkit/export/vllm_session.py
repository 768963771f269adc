"""One engine's decision: is the artifact that was asked for used, and if not, why; and what is then said or refused.

Every model class of the plug-in asks here, on any platform. Nothing happens where vLLM was started without an "optkit"
entry in --additional-config.

Runs inside vLLM (0.32, 0.33) only.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence

from vllm.config import VllmConfig

from optkit.export.backend import StepCounter, log
from optkit.export.manifest import Artifact
from optkit.export.support import block_size_reasons, unsupported
from optkit.export.vllm_config import Options, facts, refuse

_said: set[str] = set()
"""Warnings of this process: a model built again, or from parts, decides again but says it once."""


class Session:
    """`artifact` is the one in use, or None. `fallback` names what runs every step without one, for the log.

    Args:
        state_dtypes: kind of recurrent state -> its dtype in the caches; None takes those that the model's graph says.
        more: further reasons against any artifact, known only to the caller.

    Raises:
        ArtifactError: a damaged artifact, in any mode; ValueError: bad options, or, where the artifact is required,
        every reason why it cannot be used.
    """

    def __init__(
        self,
        config: VllmConfig,
        fallback: str,
        *,
        state_dtypes: Callable[[], Mapping[str, str]] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        self.fallback = fallback
        self.speaks = config.parallel_config.rank == 0  # one voice for all ranks of an engine
        self.artifact: Artifact | None = None
        self.counter = StepCounter()
        self.options = Options.of(config)
        if self.options is None:
            return
        artifact = self.options.load(config)  # digests first
        reasons = unsupported(artifact.manifest, facts(config, state_dtypes() if state_dtypes else None))
        if not self.refused(artifact, [*reasons, *more]):
            self.artifact = artifact
            self.counter.artifact = artifact.digest
            log.info(
                "optkit: artifact %s active for decode steps, digest %s, verdict: %s",
                artifact.path,
                artifact.digest,
                artifact.manifest.verdict.status,
            )
            atexit.register(lambda: log.info("optkit: %s", self.counter.summary()))
        self.counter.save()

    def refused(self, artifact: Artifact, reasons: Sequence[str]) -> bool:
        """Says why, once, if there are reasons. Raises ValueError with all of them where the artifact is required."""
        if not reasons:
            return False
        mode = self.options.mode if self.options is not None else "auto"
        refuse(artifact, mode, reasons, self.fallback, self._say)
        self.artifact = None
        self.counter.artifact, self.counter.reasons = "", tuple(reasons)
        self.counter.save()
        return True

    def _say(self, words: str) -> None:
        if self.speaks and words not in _said:
            _said.add(words)
            log.warning("%s", words)

    def settled(self, block_size: int) -> None:
        """The last requirement, known only when vLLM has allocated the caches."""
        if self.artifact is not None:
            self.refused(self.artifact, block_size_reasons(self.artifact.manifest, block_size))
