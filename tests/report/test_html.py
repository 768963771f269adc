"""report.html: tone of the verdict, sections, escaping, self-containedness, and what a real browser makes of it."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from optkit.evidence import Check, Provenance, StageNumerics, as_numerics, bundle
from optkit.plan.cost import StepCost
from optkit.plan.types import Plan
from optkit.report.html import render, write_report
from optkit.report.inputs import slices, stream_bytes
from optkit.report.numerics_plot import MAX_ROWS, drawn
from optkit.report.plan_picture import kinds, layer_picture
from optkit.report.timeline import MAX_SLICES, timeline

Page = Callable[..., str]


@pytest.fixture()
def page(checks: list[Check], prov: Provenance, numerics: list[StageNumerics], plan: Plan, timeline: list[Any],
         cost: StepCost) -> Page:
    def make(extra: tuple[Check, ...] = (), **kw: Any) -> str:
        evidence = bundle([*checks, *extra], prov, numerics=numerics, scope={"batch": [1, 2, 4, 8], "gpu": "sm_90a"},
                          not_covered=["prefill and mixed steps"])
        given: dict[str, Any] = {"plan": plan, "timeline": timeline, "cost": cost} | kw
        return render(evidence, **given)
    return make


def parsed(text: str) -> ET.Element:
    """The page as XML: fails unless every element is closed and every value escaped."""
    return ET.fromstring(text.removeprefix("<!DOCTYPE html>"))


def sections(text: str) -> list[str]:
    return [s.attrib["id"] for s in parsed(text).iter("section")]


def test_sections_and_words(page: Page) -> None:
    text = page(ablations=[("weight_stream", 30.0, 41.5)])
    assert sections(text) == ["scope", "checks", "numerics", "plan", "timeline", "cost", "memory", "ablations",
                              "provenance"]
    assert "verified except hardware (1)" in text and "+11.50" in text
    viewport = next(m for m in parsed(text).iter("meta") if m.attrib.get("name") == "viewport")
    assert viewport.attrib["content"] == "width=device-width, initial-scale=1", "a phone would show a desktop page"
    for a in parsed(text).iter("a"):
        assert f'id="{a.attrib["href"][1:]}"' in text


def test_a_command_that_repeats_a_whole_group_is_shown_once(prov: Provenance) -> None:
    there = "python -m optkit.bench.hardware RUN --out hardware"
    checks = [Check(f"hardware.{i}", "not_run", reason="needs a GPU", repeat=there) for i in range(5)]
    other = [Check("proof.raw", "pass", 0, 0, repeat="optkit check r"), Check("proof.war", "pass", 0, 0, repeat="optkit check r"),
             Check("proof.planted", "pass", 1, 1, repeat=prov.command)]
    scope = {"arch": "sm_90a", "shape": {"hidden_size": 256, "heads": 4}}
    page = parsed(render(bundle([*checks, *other], prov, scope=scope)))
    codes = [c.text for c in page.find(".//section[@id='checks']").iter("code")]  # type: ignore[union-attr]
    assert codes.count(there) == 1 and codes.count("optkit check r") == 1
    assert codes.count(prov.command) == 2, "in the text, and in the row that differs from its group"
    folded = next(page.iter("details"))
    assert "2 constants" in "".join(folded.itertext()) and "hidden_size" in "".join(folded.itertext())


def test_sections_without_data_are_left_out(checks: list[Check], prov: Provenance) -> None:
    assert sections(render(bundle(checks[:1], prov))) == ["checks", "provenance"]


def test_a_failing_check_turns_the_verdict_red(page: Page) -> None:
    def banner(text: str) -> tuple[str, str]:
        found = next(e for e in parsed(text).iter("div") if e.attrib.get("id") == "verdict")
        return found.attrib["class"], "".join(found.itertext())

    tone, words = banner(page())
    assert tone == "verdict not_run" and "0 failed" in words
    tone, words = banner(page((Check("verify/ring", "fail", 12, 11, "task holds 12 tiles, the ring has 11"),)))
    assert tone == "verdict fail" and "failed (1)" in words and "holds 12 tiles" in words


def test_everything_is_escaped(page: Page, plan: Plan, checks: list[Check], prov: Provenance,
                               cost: StepCost) -> None:
    evil = '<script>alert("x")</script>&\''
    text = page((Check(evil, "fail", evil, evil, evil, evil),))
    assert "<script" not in text and "&lt;script&gt;" in text
    from dataclasses import replace
    stage = replace(plan.stages[0], name=evil, body=evil, ops=(evil,))
    bad = replace(plan, stages=(stage, *plan.stages[1:]), choices=((evil, evil),))
    text = render(bundle(checks, prov, scope={evil: evil}, not_covered=[evil]), plan=bad,
                  timeline=[(0, evil, 0.0, 1.0, evil)], cost=cost, ablations=[(evil, 1.0, 2.0)])
    assert "<script" not in text
    parsed(text)


def test_nothing_is_loaded_from_elsewhere(page: Page) -> None:
    class Loads(HTMLParser):
        found: ClassVar[list[str]] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag in ("script", "link", "img", "iframe", "object", "embed", "base", "use", "image"):
                self.found.append(tag)
            self.found.extend(f"{tag} {k}={v}" for k, v in attrs if not (v or "").startswith("#")
                              and k in ("src", "href", "xlink:href", "data", "srcset"))

    text = page()
    loads = Loads()
    loads.feed(text)
    assert loads.found == []
    assert not re.search(r"@import|url\(", text)
    assert set(re.findall(r"https?://[^\"\s<]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_numerics_outside_its_limits_is_marked(checks: list[Check], prov: Provenance) -> None:
    cases = ((0.001, "pass"), (0.0, "pass"), (0.5, "fail"), (float("nan"), "fail"))
    rows = [as_numerics({"stage": f"kda:s{i}", "n": 9, "median": m, "max": 2 * m, "band_median": 0, "band_max": 0.002,
                         "status": status}) for i, (m, status) in enumerate(cases)]
    text = render(bundle([*checks, Check("numerics/x", "fail", 0.5, 0.002, "stage s2")], prov, numerics=rows))
    marks = [e for e in parsed(text).iter() if e.tag.endswith("}g")]
    assert [m.attrib["class"] for m in marks] == ["stage", "stage", "stage outside", "stage outside"]
    places = [float(m[4].attrib["cx"]) for m in marks]
    assert places[1] < places[0] < places[2] <= places[3], "a larger error is drawn further right"


def test_of_many_stages_the_closest_to_their_limits_are_drawn() -> None:
    rows = [StageNumerics(stage=f"s{i}", n=1, median=1e-5 * (i % 211), max=1e-3, band_median=0.01, band_max=0.01,
                          status="pass") for i in range(2 * MAX_ROWS)]
    kept = drawn(rows)
    assert len(kept) == MAX_ROWS and drawn(rows[:9]) == rows[:9]
    left = [r for r in rows if r not in kept]
    assert min(r.share for r in kept) >= max(r.share for r in left)
    assert [rows.index(r) for r in kept] == sorted(rows.index(r) for r in kept)


def test_plan_picture(plan: Plan) -> None:
    found = kinds(plan)
    assert [k.layers for k in found] == [(0,), (1, 2)]
    picture = ET.fromstring(layer_picture(plan, found[1]))
    words = [t.text for t in picture.iter() if t.tag.endswith("text")]
    names = [t.text for t in picture.iter() if t.attrib.get("class") == "name"]
    assert names == ["x_a", "qkv", "o", "ya", "route", "shared", "experts", "down"]
    assert "132 / 512" in words and "≤ 9.44 MB" in words  # 512 units of one 18,432-byte tile
    assert words.count("queued ahead") == 3, "qkv, ya and shared; routed weights wait for the router"
    paths = [p for p in picture.iter() if p.tag.endswith("path") and p.attrib.get("class", "").startswith("edge")]
    inside = [e for e in plan.edges if e.src in found[1].stages and e.dst in found[1].stages]
    entering = [e for e in plan.edges if e.src not in found[1].stages and e.dst in found[1].stages]
    assert sum("stub" not in p.attrib["class"] for p in paths) == len(inside)
    assert sum("stub" in p.attrib["class"] for p in paths) == len(
        {(e.dst, e.mechanism) for e in entering})
    assert {p.attrib["stroke"] for p in paths} >= {"var(--m-counter)", "var(--m-barrier)", "var(--m-peer)"}


def test_brackets_of_one_lane_do_not_overlap(plan: Plan) -> None:
    picture = ET.fromstring(layer_picture(plan, kinds(plan)[1]))
    lanes: dict[str, list[tuple[float, float]]] = {}
    for p in picture.iter():
        if p.attrib.get("class") == "edge":
            found = re.search(r"M \S+ (\S+) .* Q (\S+) .* V (\S+) Q", p.attrib["d"])
            assert found
            top, lane, bottom = found.groups()
            lanes.setdefault(lane, []).append((float(top), float(bottom)))
    assert len(lanes) > 2
    for spans in lanes.values():
        spans.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_strip_shows_the_sms_that_run_a_stage(plan: Plan) -> None:
    from dataclasses import replace
    stage = replace(plan.stages[0], tasks=10, first_sm=127)
    one = replace(plan, stages=(stage,), edges=())
    used = [r for r in ET.fromstring(layer_picture(one, kinds(one)[0])).iter() if r.attrib.get("class") == "used"]
    strip = next(r for r in ET.fromstring(layer_picture(one, kinds(one)[0])).iter() if r.attrib.get("class") == "strip")
    spans = [(float(r.attrib["x"]) - float(strip.attrib["x"]), float(r.attrib["width"])) for r in used]
    assert spans == [(127, 5), (0, 5)], "132 SMs on 132 pixels: SMs 127..131 and 0..4"


def test_a_long_timeline_is_cut_and_says_so(plan: Plan) -> None:
    rows = [(0, plan.stages[0].name, float(i), i + 1.0, "compute") for i in range(2 * MAX_SLICES)]
    drawn = timeline(slices(rows), plan)
    assert drawn.shown == f"the first {MAX_SLICES}.0 of {2 * MAX_SLICES}.0 µs, 1 of 1 SMs"
    assert drawn.picture.count("<rect") == MAX_SLICES
    assert timeline(slices(rows[:9]), plan).shown == "the whole step, 1 of 1 SMs"


def test_a_stage_of_the_next_layer_is_shown_where_it_runs(plan: Plan) -> None:
    from dataclasses import replace
    early = replace(plan.stages[6], name="L1.stats", body="blockstats")
    other = replace(plan, stages=(*plan.stages[:3], early, *plan.stages[3:6], *plan.stages[7:]), edges=())
    first = kinds(other)[0]
    assert (first.stages, first.guests) == ((0, 1, 2, 4, 5, 6), (3,))
    names = [t.text for t in ET.fromstring(layer_picture(other, first)).iter() if t.attrib.get("class") == "name"]
    assert names == ["x_a", "qkv", "o", "L1.stats", "ya", "gate_up", "ym"]


def test_switching_a_fusion_off_changes_the_picture(plan: Plan) -> None:
    from dataclasses import replace
    first = plan.stages[0]
    split = (replace(first, name="L0.h_a", ops=("L0.h_a",)), replace(first, name="L0.x_a", ops=("L0.x_a",)))
    edges = tuple(replace(e, src=e.src + 1, dst=e.dst + 1) for e in plan.edges)
    other = replace(plan, stages=split + plan.stages[1:], edges=edges)
    assert layer_picture(plan, kinds(plan)[0]) != layer_picture(other, kinds(other)[0])


def test_stream_bytes_counts_parts_once(plan: Plan) -> None:
    qkv = plan.stages[plan.index["L1.qkv"]]
    assert stream_bytes(qkv) == (264 * 2 * 18432, False)
    assert stream_bytes(plan.stages[plan.index["L1.experts"]]) == (512 * 18432, True)
    assert stream_bytes(plan.stages[plan.index["L1.down"]]) == (56 * 4 * 3 * 18432, True)


def test_timeline_needs_its_plan(page: Page) -> None:
    with pytest.raises(ValueError, match="without its plan"):
        page(plan=None, cost=None)
    with pytest.raises(ValueError, match="without its plan"):
        page(plan=None, timeline=())


def test_cost_table(page: Page, plan: Plan, cost: StepCost) -> None:
    section = next(s for s in parsed(page()).iter("section") if s.attrib["id"] == "cost")
    rows = [[c.text or "" for c in r] for r in section.iter("tr")]
    streaming = [s.name for s in plan.stages if s.streams]
    assert [r[0] for r in rows[1:]] == streaming, "stages that read nothing are left out"
    total = sum(float(r[5].replace(",", "")) for r in rows[1:])
    assert total == pytest.approx(cost.bytes / 1e6, abs=0.01)
    assert rows[1][6] == f"{2e6 / 4530e3 + 50e3 / 4530e3:.2f}", "bytes over GB/s, in microseconds"
    words = "".join(section.itertext())
    assert "4 rows at context 8,192" in words and f"{cost.roofline_us:,.2f} µs" in words


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """<script>addEventListener("load", () => {
  const r = document.documentElement, wide = [...document.querySelectorAll("body *")].filter(e =>
    !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + "." + e.className);
  document.title = [innerWidth, r.scrollWidth, r.scrollHeight, wide.slice(0, 3).join(" ")].join("|");
});</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_nothing_overflows(page: Page, tmp_path: Path, width: int) -> None:
    """Headless Chromium does not go below a 500-pixel window, so the page is measured inside a frame of the width."""
    unbroken = Check("verify/" + "long" * 40, "fail", "v" * 90, "t" * 90, "reason" * 40, "command" * 30)
    (tmp_path / "report.html").write_text(page((unbroken,)).replace("</head>", PROBE + "</head>"))
    (tmp_path / "frame.html").write_text(
        f"<!DOCTYPE html><title>-</title><iframe src='report.html' style='width:{width}px;height:900px;border:0' "
        "onload='setTimeout(() => document.title = this.contentDocument.title, 0)'></iframe>")
    assert BROWSER is not None
    done = subprocess.run([BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
                           f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000",
                           "--window-size=1400,1000", "--dump-dom", (tmp_path / "frame.html").as_uri()],
                          capture_output=True, text=True, timeout=90, check=False)
    found = re.search(r"<title>(\d+)\|(\d+)\|(\d+)\|(.*?)</title>", done.stdout)
    assert found, done.stdout[:500] + done.stderr[-500:]
    inner, scroll, height = (int(found[i]) for i in (1, 2, 3))
    assert inner == width and scroll <= width, f"page is {scroll} px wide in a window of {inner}: {found[4]}"
    assert found[4] == ""
    assert 1500 < height < 25000


def test_write_is_complete_or_absent(tmp_path: Path, checks: list[Check], prov: Provenance) -> None:
    write_report(tmp_path / "out.html", bundle(checks, prov))
    assert (tmp_path / "out.html").read_text().endswith("</html>")
    assert not list(tmp_path.glob(".out*"))
