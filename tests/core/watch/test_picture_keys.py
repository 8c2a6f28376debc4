"""Ops of a timeline's page by keys alone, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser
from watched_jobs import watched

from pipemorph.planning import Link, Policy, Problem, StageTimes, plan
from pipemorph.views.live_page.document_cache import render_live_page
from pipemorph.views.live_page.page_builder import build_page_document
from pipemorph.views.pictures import Timeline, render_html

pytestmark = pytest.mark.full

SAID = "$('now').textContent"
TIMES = StageTimes(forward=10, backward_input=12, backward_weight=8)


def open_page(browser: Browser, folder: Path, stages: int = 4, **view: object) -> None:
    """Open the page of a plan whose first link is slow, and go to its picture by Tab."""
    links = (Link(delay=20), *(Link(),) * (stages - 2))
    problem = Problem(microbatches=2 * stages, stages=(TIMES,) * stages, links=links)
    planned = plan(problem, Policy.ZERO_BUBBLE)
    path = folder / "plan.html"
    path.write_text(render_html(Timeline.from_simulation(planned.simulation, planned.problem)))
    browser.errors.clear()
    browser.look(path.as_uri(), **view)  # type: ignore[arg-type]
    for _ in range(9):
        browser.press("Tab")
        if browser.eval("document.activeElement.id") == "time":
            return
    raise AssertionError("no Tab leads to the picture")


def press(browser: Browser, *keys: str) -> str:
    """Text after the keys, once the picture is drawn."""
    for key in keys:
        browser.press(key)
    return str(browser.eval(f"new Promise(done => requestAnimationFrame(() => done({SAID})))"))


def test_arrows_reach_every_op_and_show_what_the_pointer_shows(
    browser: Browser, tmp_path: Path
) -> None:
    open_page(browser, tmp_path)
    first = press(browser, "ArrowRight")
    assert first.startswith("F forward of microbatch 0, stage 0: 0 – 10 ms (10 ms)")
    reached = {first, *(press(browser, "ArrowRight") for _ in range(23))}
    assert len(reached) == 24, "each op of the stage"
    assert press(browser, "ArrowRight") in reached, "it stays on the last"
    assert press(browser, "End", "Home") == first
    below = press(browser, "ArrowDown")
    assert below.startswith("F forward of microbatch 0, stage 1: 30 – 40 ms (10 ms)")
    assert "arrived at 30 ms (20 ms on the link)" in below
    last = press(browser, "ArrowDown", "ArrowDown", "ArrowDown", "End")
    assert last.startswith("W backward, weights of microbatch 7, stage 3: ")
    point = """(() => { const { start, end, index } = cursor.find(), canvas = $('time');
      const { tops, h } = placeRows(D, 2, MOST), box = canvas.getBoundingClientRect();
      const at = { clientX: box.left + frameOf(canvas).x((start + end) / 2),
                   clientY: box.top + tops[index] + h / 2 };
      canvas.dispatchEvent(new PointerEvent('pointermove', at)); })()"""
    browser.eval("about()")
    browser.eval(point)
    assert browser.eval(SAID) == last
    assert browser.errors == []


def test_it_is_announced_framed_and_one_tab_stop(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path)
    pixels = "$('time').toDataURL()"
    assert browser.eval("document.querySelectorAll('canvas[tabindex]').length") == 1
    assert browser.eval("$('time').role") == "application"
    hint, plain = browser.eval(SAID), browser.eval(pixels)
    said = press(browser, "ArrowDown")
    assert browser.eval("$('now').getAttribute('aria-live')") == "polite"
    assert browser.eval(pixels) != plain
    press(browser, "Tab")
    assert browser.eval("document.activeElement.id") != "time", "no trap"
    assert browser.eval(pixels) == plain
    browser.eval("$('time').focus()")
    assert press(browser) == said, "the op is kept"
    assert press(browser, "Escape") == hint
    assert browser.eval("document.activeElement === document.body")
    assert browser.eval(pixels) == plain
    assert browser.eval("$('now').getAttribute('aria-live')") == "off"


def test_the_range_follows_the_op(browser: Browser, tmp_path: Path) -> None:
    open_page(browser, tmp_path)
    press(browser, "+", "+", "+")
    whole, shown = browser.eval("[WHOLE, zoom.to - zoom.from]")
    assert shown < 0.4 * whole
    browser.eval("zoom.show(0.5 * WHOLE, 0.5 * WHOLE + zoom.to - zoom.from)")
    begin = browser.eval("zoom.from")
    press(browser, "ArrowUp")
    start, end = browser.eval("[cursor.find().start, cursor.find().end]")
    assert start <= begin + 20e3 and end >= begin - 20e3, "it begins in the shown range"
    press(browser, "End")
    assert browser.eval("zoom.to >= cursor.find().end - 1 && zoom.from > 0.5 * WHOLE")
    assert browser.eval("zoom.to - zoom.from") == pytest.approx(shown)


def test_ops_of_the_live_page_are_reached(browser: Browser, tmp_path: Path) -> None:
    known, traces = watched(4, 12, "adapted")
    path = tmp_path / "page.html"
    path.write_text(render_live_page(build_page_document(known, traces, column=0, live=False)))
    browser.look(path.as_uri())
    status = browser.eval(SAID)
    browser.eval("$('ops').focus()")
    first = press(browser, "ArrowRight")
    assert first.startswith("stage 0: F forward of microbatch 0, ")
    assert press(browser, "ArrowDown").startswith("stage 1: F forward of microbatch ")
    pixels = browser.eval("$('ops').toDataURL()")
    browser.eval("refresh()")
    assert press(browser).startswith("stage 1: F forward"), "a new document keeps the op"
    assert browser.eval("$('now').getAttribute('aria-live')") == "off"
    assert browser.eval("$('ops').toDataURL()") == pixels
    # Outside of the picture the same keys go through the iterations.
    assert press(browser, "Escape") == status
    assert browser.eval("$('ops').toDataURL()") != pixels
    iteration = browser.eval("shown()")
    press(browser, "ArrowLeft")
    assert browser.until(f"shown() === {iteration - 1}")


def test_keys_are_quick_on_64_stages(browser: Browser, tmp_path: Path) -> None:
    """No op has an element of its own: the page grows by no node, and a key draws once."""
    open_page(browser, tmp_path, 64, width=390, dark=True)
    assert browser.eval("document.querySelectorAll('*').length") < 1200
    press(browser, *["ArrowDown"] * 70, "End")
    assert browser.eval("cursor.find().index") == 63
    assert browser.eval("document.documentElement.scrollWidth") == 390
