"""Put merged hardware evidence into an artifact: the manifest carries the verdict that the plugin asks for."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from optkit.evidence import Bundle
from optkit.export.manifest import MANIFEST, Hardware, Verdict, set_verdict


def seal(run_dir: Path, evidence: Bundle) -> Iterable[str]:
    """Set the verdict in `artifact/manifest.json`; returns the paths rewritten, relative to the run directory."""
    artifact = run_dir / "artifact"
    if not artifact.is_dir():
        return []
    verdict = Verdict.parse(evidence.verdict)
    if evidence.hardware:
        newest = evidence.hardware[-1]
        verdict = verdict.model_copy(
            update={"hardware": Hardware(cubin_sha256=newest.cubin_sha256, gpu=newest.gpu, evidence_sha256=newest.digest)}
        )
    set_verdict(artifact, verdict)
    return [f"artifact/{MANIFEST}"]
