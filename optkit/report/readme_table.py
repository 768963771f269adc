"""The README's table of measured figures, made from the results committed under benchmarks/.

`python -m optkit.report.readme_table` prints the table, `--write` puts it into README.md; a test fails when the
README and the results disagree. A figure that was not measured is an empty cell. A result is one JSON file of the
schema ``optkit-benchmark/1`` (docs/evidence.md); it may hold more than the table shows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

BEGIN, END = "<!-- figures: made by optkit.report.readme_table, do not edit -->", "<!-- end of figures -->"
PLANNED = (("kimi_k3/tiny", "NVIDIA H200"), ("llama/tiny", "NVIDIA H200"),
           ("kimi_k3/h200_tp8_slice", "NVIDIA H200"))
"""What the table lists even before it was measured."""
HEADER = ("recipe", "GPU", "batch", "steps checked", "result", "worst stage error ÷ its limit", "step, µs",
          "vLLM’s own path, µs", "file")


class Row(BaseModel):
    """One batch size of a result. Errors are shares of the stage's limit (1 = at the limit), times in microseconds."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    batch: int = Field(ge=1)
    status: Literal["pass", "fail"]
    steps: int | None = Field(default=None, ge=1)
    worst_of_limit: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    step_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    baseline_us: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Result(BaseModel):
    """One committed result: a recipe on a GPU. `command` repeats it, `cubin_sha256` says which kernel ran."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    schema_: Literal["optkit-benchmark/1"] = Field(alias="schema")
    recipe: str
    gpu: str
    driver: str
    time: str
    command: str
    cubin_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    rows: tuple[Row, ...] = Field(min_length=1)


def load(folder: Path) -> list[tuple[str, Result]]:
    """(relative path, result) of every ``*.json`` below `folder` with the schema, in order of path.

    Raises ValueError naming file and field for a result that does not fit the schema, or two of one recipe and GPU.
    """
    found: list[tuple[str, Result]] = []
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder.parent).as_posix()
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not str(data.get("schema", "")).startswith("optkit-benchmark/"):
            continue
        try:
            result = Result.model_validate(data)
        except ValidationError as e:
            first = e.errors()[0]
            raise ValueError(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        if twin := next((n for n, r in found if (r.recipe, r.gpu) == (result.recipe, result.gpu)), None):
            raise ValueError(f"{name}: {twin} holds {result.recipe} on {result.gpu} already")
        found.append((name, result))
    return found


def table(results: Sequence[tuple[str, Result]]) -> str:
    """Markdown: one line per recipe, GPU and batch; recipes that wait to be measured have a line with empty cells."""
    measured = {(r.recipe, r.gpu): (name, r) for name, r in results}
    lines = ["| " + " | ".join(HEADER) + " |", "|---|---|--:|--:|---|--:|--:|--:|---|"]
    for key in dict.fromkeys([*PLANNED, *measured]):
        name, result = measured.get(key, ("", None))
        for row in result.rows if result else ():
            cells = (*key, str(row.batch), _cell(row.steps, "{}"), "passed" if row.status == "pass" else "**failed**",
                     _cell(row.worst_of_limit, "{:.2f}"), _cell(row.step_us, "{:,.1f}"),
                     _cell(row.baseline_us, "{:,.1f}"), f"[json]({name})")
            lines.append("| " + " | ".join(cells) + " |")
        if result is None:
            lines.append("| " + " | ".join(key) + " |" + "  |" * (len(HEADER) - 2))
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def filled(readme: str, text: str) -> str:
    """`readme` with what stands between the two markers replaced. Raises ValueError unless each occurs once."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README.md: expected one line {BEGIN!r} and, after it, one line {END!r}")
    return readme[:readme.index(BEGIN)] + f"{BEGIN}\n{text}\n" + readme[readme.index(END):]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit 0; 1 where --check finds a difference; 2 for a result that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m optkit.report.readme_table", description="README figures")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="put the table into README.md")
    group.add_argument("--check", action="store_true", help="exit 1 if README.md shows anything else")
    args = parser.parse_args(argv)
    readme = args.root / "README.md"
    try:
        text = table(load(args.root / "benchmarks"))
        if not (args.write or args.check):
            print(text)
            return 0
        before = readme.read_text(encoding="utf-8")
        after = filled(before, text)
    except ValueError as e:
        print(f"readme_table: {e}", file=sys.stderr)
        return 2
    if args.write and after != before:
        readme.write_text(after, encoding="utf-8")
    if args.check and after != before:
        print("README.md: the table of figures is not the one that benchmarks/ gives; run "
              "python -m optkit.report.readme_table --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
