"""The roofline picture: where points and the ceiling lie, what bounds a stage, and what is left out."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from optkit.report.inputs import CostRow, Slice
from optkit.report.roofline import HEIGHT, MAX_POINTS, WIDTH, busy_us, roofline

GBS = 4000.0


def row(name: str, nbytes: float, least: float | None = None, body: str = "gemv") -> CostRow:
    return CostRow(name, nbytes, 0, 0, 0, nbytes, 0.0, nbytes / GBS / 1e3 if least is None else least, body)


def circles(picture: str, cls: str) -> dict[str, tuple[float, float]]:
    found = {}
    for g in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}g"):
        title = next(iter(g)).text or ""
        for c in g:
            if c.attrib.get("class") == cls:
                found[title.split(" ")[0]] = (float(c.attrib["cx"]), float(c.attrib["cy"]))
    return found


def test_a_ring_on_the_line_is_bound_by_memory_and_one_above_by_arithmetic() -> None:
    drawn = roofline([row("small", 1e5), row("large", 1e8), row("math", 1e6, 40.0)], GBS)
    assert drawn is not None and (drawn.shown, drawn.total, drawn.by_arithmetic) == (3, 3, 1)
    at = circles(drawn.picture, "least")
    line = next(e for e in ET.fromstring(drawn.picture).iter() if e.attrib.get("class") == "ceiling")
    x1, y1, x2, y2 = (float(line.attrib[k]) for k in ("x1", "y1", "x2", "y2"))

    def below(name: str) -> float:
        x, y = at[name]
        return y - (y1 + (y2 - y1) * (x - x1) / (x2 - x1))

    assert abs(below("small")) < 0.1 and abs(below("large")) < 0.1
    assert below("math") < -50, "SVG counts downwards: 40 us lie far above the line"
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in at.values())


def test_simulated_times_stand_above_their_stage() -> None:
    slices = [Slice(0, "a", 0.0, 9.0, "wait"), Slice(0, "a", 9.0, 11.0, "gemv"), Slice(1, "a", 10.0, 13.0, "gemv"),
              Slice(1, "a", 0.0, 99.0, "stream")]
    assert busy_us(slices) == {"a": 4.0}, "from the first to the last work; waits and streams are none"
    drawn = roofline([row("a", 1e6), row("b", 2e6)], GBS, slices)
    assert drawn is not None
    least, simulated = circles(drawn.picture, "least"), circles(drawn.picture, "simulated")
    assert simulated.keys() == {"a"} and simulated["a"][0] == least["a"][0] and simulated["a"][1] < least["a"][1]
    assert "simulated 4 µs" in drawn.picture


def test_the_stages_that_move_most_are_kept() -> None:
    drawn = roofline([row(f"s{i}", 1e3 * (1 + i)) for i in range(MAX_POINTS + 50)], GBS)
    assert drawn is not None and (drawn.shown, drawn.total) == (MAX_POINTS, MAX_POINTS + 50)
    assert "s449" in circles(drawn.picture, "least") and "s49" not in circles(drawn.picture, "least")


@pytest.mark.parametrize("rows", [[], [row("none", 0.0, 1.0)]])
def test_nothing_to_draw(rows: list[CostRow]) -> None:
    assert roofline(rows, GBS) is None


def test_one_stage_alone_is_drawn() -> None:
    drawn = roofline([row("only", 1e6)], GBS)
    assert drawn is not None
    assert all(math.isfinite(v) for v in circles(drawn.picture, "least")["only"])
