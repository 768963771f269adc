"""Teacher-forced gates: every stage alone against float64, on ordinary inputs and on probes that make constants matter."""

from __future__ import annotations

from collections.abc import Mapping

from optkit.checks import Check, check
from optkit.execute.runner import StageRunner
from optkit.models.graph import Graph
from optkit.validate.forced import Samples, TeacherForced
from optkit.validate.gates import FLOOR, MAX_FACTOR, MIN_SAMPLES, excess, why
from optkit.validate.numerics import Numerics
from optkit.validate.reference import AnyWeights, reference_weights
from optkit.validate.scenario import Scenario

PROBES = (("small", 2.0**-12, False), ("large", 8.0, True))
"""Inputs that make constants matter: at 2^-12 every squared row lies far below every epsilon (smallest 1e-6), so results
go as eps^-1/2; times 8, or aligned with an up row, activations reach the linear clip (25)."""


def per_stage(
    runner: StageRunner,
    graph: Graph,
    weights: AnyWeights,
    scenario: Scenario,
    repeat: str = "",
    samples: int = MIN_SAMPLES,
) -> tuple[list[Check], list[Numerics]]:
    """Teacher-forced gates over the steps of `scenario`; a stage is left out once its outputs have `samples` samples.

    An output made once a step needs rows x steps >= 256. Returns the checks "numerics.per_stage" (all outputs within
    the band), "numerics.probes" (maxima within the band on the inputs of PROBES) and "numerics.exact" (choices, tables,
    state of other requests), and one Numerics row per output.
    """
    weights = reference_weights(graph, weights)
    forced = TeacherForced(runner, graph, weights, scenario)
    caches64 = scenario.caches("f64")
    probes: dict[str, Samples] = {}
    try:
        for t in range(scenario.steps):
            forced.step(t, caches64, forced.lacking(samples))
        for name, scale, align in PROBES:
            probe = TeacherForced(runner, graph, weights, scenario, scale, align)
            probes[name] = probe.samples
            probe.step(0, scenario.caches("f64"))
    except RuntimeError as e:
        return [check("numerics.per_stage", False, None, 1.0, f"the runner failed: {e}", repeat)], []
    rows = forced.samples.numerics()
    missing = {k for i in range(len(forced.plan.stages)) for k in forced.keys(i)} - {r.stage for r in rows}
    return [
        _band_check(rows, sorted(missing), repeat),
        _probe_check(probes, repeat),
        _exact_check([forced.samples, *probes.values()], repeat),
    ], rows


def _band_check(rows: list[Numerics], missing: list[str], repeat: str) -> Check:
    few = [r.stage for r in rows if r.n < MIN_SAMPLES] + missing
    bad = [why(r) for r in rows if excess(r) > 1]
    if few:
        bad.append(f"fewer than {MIN_SAMPLES} samples: {', '.join(few)}")
    worst = max(rows, key=excess)
    return check(
        "numerics.per_stage",
        not bad,
        round(excess(worst), 3),
        1.0,
        "; ".join(bad) or f"{len(rows)} outputs, closest to its gate: {worst.stage}",
        repeat,
    )


def _probe_check(probes: Mapping[str, Samples], repeat: str) -> Check:
    used = {
        f"{key} ({name})": max(errors) / (MAX_FACTOR * max(*samples.band[key], FLOOR))
        for name, samples in probes.items()
        for key, errors in samples.errors.items()
    }
    worst = max(used, key=lambda k: used[k])
    bad = [f"{k}: {v:.2f} x its gate" for k, v in used.items() if v > 1]
    return check(
        "numerics.probes",
        not bad,
        round(used[worst], 3),
        1.0,
        "; ".join(bad) or f"{len(used)} outputs, closest to its gate: {worst}",
        repeat,
    )


def _exact_check(samples: list[Samples], repeat: str) -> Check:
    wrong = [w for s in samples for w in s.wrong]
    return check(
        "numerics.exact",
        not wrong,
        len(wrong),
        0,
        "; ".join(wrong[:5]) or "choices, expert tables and state elements of other requests",
        repeat,
    )
