"""report.html: one self-contained page made from the evidence and, where given, the Plan and its cost.

No script, no font and no image is loaded from anywhere; pictures are inline SVG. Every value is escaped by the
template engine. Sections whose data was not given are left out, never filled with placeholders.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from optkit.evidence import Bundle, Check, write_text
from optkit.plan.cost import StepCost
from optkit.plan.types import MECHANISMS, Plan
from optkit.report import inputs, svg
from optkit.report.numerics_plot import drawn, numerics_plot
from optkit.report.plan_picture import kinds, layer_picture
from optkit.report.timeline import timeline as draw_timeline

WORDS = {"pass": "passed", "fail": "failed", "not_run": "needs a GPU"}
MAX_KINDS = 8
"""Kinds of layers drawn: Kimi K3 has four (dense, KDA, MLA, last) and their variants with a saved block row."""
SHAPE = "shape."
"""Scope entries that are constants of the model: some thirty, folded away so that the checks stay near the top."""
WORST = 12
COST_ROWS = 400
"""Longest cost table: a 93-layer plan has some 1,700 stages, and its layers of one kind cost the same."""


def write_report(path: Path, evidence: Bundle, *, plan: Plan | None = None, cost: StepCost | None = None,
                 timeline: Any = (), ablations: Iterable[Any] = ()) -> None:
    """Write report.html to `path` (renamed into place). Arguments as for `render`."""
    text = render(evidence, plan=plan, cost=cost, timeline=timeline, ablations=ablations)
    write_text(path, text)


def render(evidence: Bundle, *, plan: Plan | None = None, cost: StepCost | None = None, timeline: Any = (),
           ablations: Iterable[Any] = ()) -> str:
    """The page as text.

    `cost` is what `plan.cost.step_cost` says of the plan, `timeline` what `plan.timeline.simulate`
    gives, `ablations` rows of (choice, with_us, without_us[, measured]). Cost and timeline need the
    `plan` they are about (ValueError).
    """
    slices = inputs.slices(timeline, plan)
    if plan is None and (slices or cost is not None):
        raise ValueError("report: a cost or a timeline was given without its plan")
    rows = inputs.cost_rows(cost, plan) if cost is not None and plan is not None else []
    environment = jinja2.Environment(loader=jinja2.PackageLoader("optkit.report"), autoescape=True,
                                     undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(number=number, megabytes=megabytes, microseconds=lambda v: f"{v:,.2f}")
    shown = drawn(evidence.numerics)
    layers = [] if plan is None else kinds(plan)
    scope = _flat(evidence.scope)
    return environment.get_template("report.html.j2").render(
        evidence=evidence, words=WORDS, state=_state(evidence), counts=Counter(c.status for c in evidence.checks),
        groups=_groups(evidence.checks, evidence.provenance.command), plan=plan,
        scope=[row for row in scope if not row[0].startswith(SHAPE)],
        shape=[(key.removeprefix(SHAPE), value) for key, value in scope if key.startswith(SHAPE)],
        choices=_choices(plan) if plan else [],
        numerics_svg=numerics_plot(shown) if shown else None, numerics_shown=len(shown),
        worst=sorted(evidence.numerics, key=lambda r: -r.share)[:WORST],
        pictures=[(k.title, layer_picture(plan, k)) for k in layers[:MAX_KINDS]] if plan else [],
        hidden_kinds=max(0, len(layers) - MAX_KINDS),
        mechanisms=[(m, svg.MECHANISM[m], n) for m, n in _mechanisms(plan)] if plan else [],
        timeline=draw_timeline(slices, plan) if slices and plan else None,
        cost=cost, costs=rows[:COST_ROWS], cost_count=len(rows), ablations=[inputs.Ablation(*a) for a in ablations])


def _state(evidence: Bundle) -> str:
    if evidence.failed:
        return "fail"
    return "not_run" if any(c.status == "not_run" for c in evidence.checks) else "pass"


def _groups(checks: Sequence[Check], command: str) -> list[tuple[str, str, list[Check]]]:
    """(name, command that repeats most of them, checks) by the part of the name before the first "." or "/".

    Failures first within each. A group of one keeps the page's `command`.
    """
    groups: dict[str, list[Check]] = {}
    for c in checks:
        head, *rest = re.split(r"[./]", c.name, maxsplit=1)
        groups.setdefault(head if rest else "", []).append(c)
    order = ("fail", "not_run", "pass")
    return [(name, Counter(c.repeat for c in members).most_common(1)[0][0] if len(members) > 1 else command,
             sorted(members, key=lambda c: order.index(c.status))) for name, members in groups.items()]


def _mechanisms(plan: Plan) -> list[tuple[str, int]]:
    found = Counter(e.mechanism for e in plan.edges)
    return [(m, found[m]) for m in MECHANISMS if found[m]]


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested mappings as ("a.b", "value") rows; sequences joined by commas."""
    rows: list[tuple[str, str]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            rows += _flat(value, f"{prefix}{key}.")
        else:
            rows.append((prefix + str(key), _shown(value)))
    return rows


def _choices(plan: Plan) -> list[tuple[str, list[str]]]:
    """(group, ["key value", ...]) of the choices that the plan was made with."""
    return [(group, [f"{k} {v}" for k, v in _flat(values)] if isinstance(values, Mapping) else [_shown(values)])
            for group, values in plan.choices]


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value)) or "none"
    if value is None:
        return "automatic"
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def number(value: Any) -> str:
    """A value for a table cell: floats to 4 significant digits, digests to 12 places, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value[:12]}…" if re.fullmatch(r"[0-9a-f]{40,64}", str(value)) else str(value)


def megabytes(value: float) -> str:
    """Bytes as MB (10^6) or GB (10^9), three significant places."""
    return f"{value / 1e9:,.3f} GB" if value >= 1e9 else f"{value / 1e6:,.3f} MB"
