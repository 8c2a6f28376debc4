"""The page of a diagnosis in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from op_traces import PlayedJob, make_table

from pipemorph.diagnose.diagnosis import diagnose
from pipemorph.diagnose.formats.registry import Recording
from pipemorph.diagnose.pictures.picture_files import render_picture_files

pytestmark = pytest.mark.full

INK = """[...document.querySelectorAll('canvas')].map(c => {
  const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  let n = 0; for (let i = 3; i < all.length; i += 4) n += all[i] > 0;
  return n / (all.length / 4); })"""


def slow_worker(step: int, replica: int, stage: int, *op: Any) -> float:
    return float(op[-1] * (1.5 if (replica, stage) == (1, 2) else 1.0))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


def write_page(folder: Path, job: PlayedJob) -> str:
    found = diagnose(Recording(make_table(job.operations()), "<b>op tables</b>", []))
    path = folder / "diagnosis.html"
    path.write_text(render_picture_files(found, [Path("a<img>.csv")])["diagnosis.html"])
    return path.as_uri()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    job = PlayedJob(replicas=2, seconds=slow_worker)
    return write_page(tmp_path_factory.mktemp("page"), job)


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_its_window(browser: Browser, page: str, width: int, dark: bool) -> None:
    browser.errors.clear()
    browser.requests.clear()
    browser.look(page, width=width, dark=dark)
    assert browser.eval("document.documentElement.scrollWidth") == width
    ink = browser.eval(INK)
    assert len(ink) > 4 and min(ink) > 0.1
    back = browser.eval("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(20, 24, 29)") is dark
    assert browser.errors == [] and len(browser.requests) == 1, "it loads nothing"


def test_one_replica_can_be_drawn_and_ops_are_named(browser: Browser, page: str) -> None:
    browser.look(page)
    assert browser.eval("document.getElementById('title').textContent") == "Diagnosis of a<img>.csv"
    assert browser.eval("document.querySelectorAll('img, #story b').length") == 0
    canvas = "document.querySelector('#pictures canvas')"
    before = browser.eval(f"{canvas}.clientHeight")
    point = (
        f"{canvas}.dispatchEvent(new PointerEvent('pointermove', {{bubbles: true,"
        f" clientX: {canvas}.getBoundingClientRect().left + 95,"
        f" clientY: {canvas}.getBoundingClientRect().top + 10}}))"
    )
    browser.eval(point)
    said = browser.eval("document.getElementById('now').textContent")
    assert said.startswith("dp0-stage0 (rank 0): forward-compute of microbatch 0: 10 ms")
    browser.eval("""(() => { const s = document.getElementById('replica'); s.value = '1';
      s.dispatchEvent(new Event('change')); })()""")
    assert browser.until(f"{canvas}.clientHeight < {before}")
    browser.eval(point)
    assert browser.eval("document.getElementById('now').textContent").startswith("dp1-stage0")
    assert browser.eval("document.querySelector('#map td.named').textContent").endswith("◆")
    assert browser.errors == []


def test_the_slow_link_is_drawn_with_its_replica(browser: Browser, tmp_path: Path) -> None:
    def late(step: int, replica: int, source: int, target: int) -> float:
        return 0.03 if replica == 1 and {source, target} == {1, 2} else 0.002

    browser.look(write_page(tmp_path, PlayedJob(replicas=2, delay=late)))
    legend = "document.getElementById('kinds').textContent"
    assert "messages on a slow link" in browser.eval(legend)
    bands = """canvases.map(([t]) => { const step = shownStep(t);
      return step.links.map(l => `${step.rows[l.row].name} ${l.name} ${l.text}`)[0]; })"""
    assert browser.eval(bands)[:2] == [
        "dp1-stage1 link 1 30 ms per message", "dp1-stage1 link 1 2 ms per message",
    ]  # fmt: skip
    # Messages have the colour of no op; the row of the next stage is below the band.
    drawn = """(() => { const [t, canvas] = canvases[0], g = canvas.getContext('2d');
      const { h, tops } = placeRows(shownStep(t), BEGIN, MOST);
      const all = g.getImageData(frame().edge, tops[5] + h, 600, BAND).data;
      let n = 0; for (let i = 0; i < all.length; i += 4) n += all[i] > 220 && all[i + 2] < 120;
      return [n, tops[6] - tops[5] - h]; })()"""
    messages, room = browser.eval(drawn)
    assert messages > 50 and room == browser.eval("BAND")
    for replica, rows in (("1", [1]), ("0", [])):
        browser.eval(f"(replica = {replica}, draw())")
        assert browser.eval("shownStep(D.timelines[0]).links.map(l => l.row)") == rows
        browser.eval("new Promise(requestAnimationFrame)")
    assert browser.errors == []


def test_keys_reach_ops_in_each_picture(browser: Browser, page: str) -> None:
    browser.look(page)
    said = "document.getElementById('now').textContent"
    pictures = browser.eval("canvases.length")
    assert browser.eval("document.querySelectorAll('#pictures [tabindex]').length") == pictures
    browser.eval("document.getElementById('replica').focus()")
    for key in ("Tab",) * 4 + ("ArrowRight",):  # three buttons
        browser.press(key)
    first = "dp0-stage0 (rank 0): forward-compute of microbatch 0: 10 ms, at 0 ms"
    assert browser.eval(said) == first
    for key in ("ArrowDown",) * 6:
        browser.press(key)
    browser.press("ArrowRight")
    assert browser.eval(said).startswith("dp1-stage2 (rank 5): forward-recv of microbatch 0: ")
    browser.press("Tab")
    browser.press("End")
    assert browser.eval(said).startswith("dp0-stage0 (rank 0): forward-compute of microbatch 0: ")
    assert browser.eval("[...cursors.values()].filter(each => each.place).length") == 2
    assert browser.errors == []
