"""The live page in a real browser."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import numpy
import pytest
from browser import Browser
from matplotlib.image import imread
from watched_jobs import CHANGED_AT, NOW, RETURNED_AT, Case, watched

from pipemorph.diagnose.formats.rank_traces import TraceIndex
from pipemorph.local.live_page import LivePageServer, open_page_listener
from pipemorph.replay.baselines import ReplayedChange, ReplayResult, TrainingRun
from pipemorph.replay.link_trace import parse_trace
from pipemorph.replay.replay_page import render_replay_page as render_replay
from pipemorph.views.live_page.document_cache import render_live_page
from pipemorph.views.live_page.page_builder import (
    StageTrace,
    build_page_document,
    build_stored_iteration,
    find_slowest_column,
)
from pipemorph.views.live_page.page_document import PageDocument

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[3]
LARGEST = (64, 256)
SHOWN = "document.getElementById('now').textContent"
INK = """(() => { const c = document.getElementById('ops');
  const all = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  let n = 0; for (let i = 3; i < all.length; i += 4) n += all[i] > 0;
  return n / (all.length / 4); })()"""


@pytest.fixture(autouse=True)
def no_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    if "browser" not in request.fixturenames:
        yield
        return
    browser: Browser = request.getfixturevalue("browser")
    browser.look("about:blank")  # the live page of the test before would go on asking its server
    browser.errors.clear()
    browser.requests.clear()
    yield
    assert browser.errors == []


class Sight:
    """A run that goes on: each document has one more iteration."""

    def __init__(
        self, stages: int, microbatches: int, case: Case = "adapted", replicas: int = 1
    ) -> None:
        self.known, self.traces = watched(stages, microbatches, case, replicas=replicas)
        self.begun = 30
        self.index: TraceIndex | None = None
        self.folder = Path()

    def document(
        self, column: int | None, iteration: int | None, number: int, live: bool
    ) -> PageDocument:
        self.begun = min(self.begun + 1, len(self.known.samples))
        if column is None:
            column = find_slowest_column(self.known)
        if iteration is None:
            iteration = self.known.samples[self.begun - 1].index
        if self.index is not None:
            self.index.index_new_lines(self.folder)
            newest = self.index.list_iterations()[-1]
            found = self.index.read_iterations([newest])[newest]
            return build_page_document(self.known, found, column=column, number=number, live=live)
        version = self.known.samples[iteration].plan_version
        traces = [
            StageTrace(each.rank, each.stage, column, iteration, version, each.ops)
            for each in self.traces
            if each.replica == column
        ]
        known = replace(self.known, available=self.known.available[: self.begun])
        return build_page_document(known, traces, column=column, number=number, live=live)


def page_of(folder: Path, case: Case, stages: int = 4, microbatches: int = 12) -> str:
    known, traces = watched(stages, microbatches, case)
    path = folder / "page.html"
    path.write_text(render_live_page(build_page_document(known, traces, column=0, live=False)))
    return path.as_uri()


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [(4, 12), LARGEST])
def test_it_fits_its_window(
    browser: Browser, tmp_path: Path, width: int, dark: bool, size: tuple[int, int]
) -> None:
    browser.look(page_of(tmp_path, "adapted", *size), width=width, dark=dark)
    assert browser.eval("document.documentElement.scrollWidth") == width
    assert browser.eval(INK) > 0.2
    back = browser.eval("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(20, 24, 29)") is dark
    assert len(browser.requests) == 1, "it loads nothing"


def test_the_page_of_a_run_that_is_over_goes_to_the_nearest_picture(
    browser: Browser, tmp_path: Path
) -> None:
    known, traces = watched(4, 12, "recovered", replicas=2)
    page = build_page_document(known, traces, column=0, live=False)
    stored = [
        build_stored_iteration(
            known, [replace(each, iteration=at, plan_version=at // 20) for each in traces], column
        )
        for column, at in ((0, 59), (1, 59), (0, 40), (0, 20))
    ]
    path = tmp_path / "page.html"
    path.write_text(render_live_page(page.model_copy(update={"stored": stored})))
    browser.look(path.as_uri())
    drawn = "[shot.measured.iteration, shot.column]"
    browser.press("End")
    assert browser.eval(drawn) == [59, 0]
    browser.press("PageUp")
    assert browser.until(f"{SHOWN}.startsWith('iteration {RETURNED_AT}:')")
    assert browser.eval(drawn) == [40, 0]
    assert "the ops of iteration 40 are drawn: the nearest" in browser.eval(SHOWN)
    browser.press("Home")
    assert browser.eval(drawn) == [20, 0]
    browser.press("End")
    assert browser.eval(drawn) == [59, 0]
    browser.eval("$('column').value = 1; $('column').onchange({ target: $('column') })")
    assert browser.eval(drawn) == [59, 1]


OPENED = "$('opened').hidden ? '' : $('opened').textContent"


@pytest.mark.parametrize(
    ("case", "iterations", "expected"),
    [
        # Under the plan that was changed: not the longest one, nor the last one of the run.
        ("recovered", (59, 16, 30, 35, 20, 13, 5), (35, "the change of plan saved the most")),
        ("slow", (11, 12, 13, 14, 5), (13, "the most links are slow")),
        ("healthy", (11, 5, 3), (11, "")),
    ],
)
def test_the_page_of_a_run_that_is_over_opens_where_there_is_most_to_see(
    browser: Browser,
    tmp_path: Path,
    case: Case,
    iterations: Sequence[int],
    expected: tuple[int, str],
) -> None:
    known, traces = watched(4, 12, case)
    opened, why = expected
    if case == "recovered":
        _, traces = watched(4, 12, "adapted")
    stored = []
    for at in iterations:
        version = 0 if case != "recovered" else (at >= CHANGED_AT) + (at >= RETURNED_AT)
        rows = [replace(each, iteration=at, plan_version=version) for each in traces]
        stored.append(build_stored_iteration(known, rows, 0))
    page = build_page_document(known, traces, column=0, live=False)
    path = tmp_path / "page.html"
    path.write_text(render_live_page(page.model_copy(update={"stored": stored})))
    browser.look(path.as_uri())
    assert browser.eval("[shot.measured.iteration, shown()]") == [opened, opened if why else 11]
    text = browser.eval(OPENED)
    assert (f"Iteration {opened} is drawn first" in text and why in text) if why else not text
    assert any("saved in iteration" in each for each in cards(browser)) is (case == "recovered")
    # A saved page opens where it was saved, and says nothing of that.
    browser.press("Home")
    first = min(iterations)
    assert browser.until(f"shot.measured.iteration === {first} && $('opened').hidden")
    saved = tmp_path / "saved.html"
    saved.write_text(browser.eval("pageText()"))
    browser.look(saved.as_uri())
    assert browser.eval("shot.measured.iteration") == first and not browser.eval(OPENED)


def test_the_page_of_an_observed_job_names_no_plans(browser: Browser, tmp_path: Path) -> None:
    known, traces = watched(4, 12, "healthy")
    document = build_page_document(known, traces, column=0, live=False)
    path = tmp_path / "page.html"
    path.write_text(render_live_page(document.model_copy(update={"wanted": 0})))
    browser.look(path.as_uri())
    assert "plan" not in browser.eval("document.querySelector('.keys').innerText")
    room = browser.eval("document.getElementById('room').textContent")
    assert room.startswith("Microbatches in flight, by stage")
    assert "the plan has no limit" not in room


DRAWN = """((draw, height, ...more) => { const pen = new SvgPen(1200, height);
  draw(pen, ...more); return pen.parts; })"""
"""Function that draws as SVG, and returns the elements."""


def cards(browser: Browser) -> list[str]:
    return list(browser.eval("[...document.querySelectorAll('#stats div')].map(e => e.innerText)"))


def test_figures_are_those_of_the_pictures(browser: Browser, tmp_path: Path) -> None:
    """The saving of an iteration is what both pictures show, and has a figure beside it."""
    browser.look(page_of(tmp_path, "adapted", 8, 24))
    ran, other, normal = browser.eval("[shot.measured.seconds, shot.alternative.seconds, usual()]")
    now, saved, total, done = cards(browser)
    assert now.endswith(f"; {normal:.2f} s before any fault")
    assert saved.startswith(f"{other - ran:.2f} s") and f"against {other:.2f} s" in saved
    took = browser.eval("view.steps.seconds.reduce((a, b) => a + b)")
    assert f"saved so far: all iterations took {took:.1f} s (without the run" in total
    assert "and with the initial plan 57.0 s; " in total and done.startswith("40 of")
    # Each picture ends where its title says.
    assert browser.eval("picturesOf(shot).map(lengthOf)") == pytest.approx([1e6 * ran, 1e6 * other])


def test_both_pictures_have_the_time_outside_ops(browser: Browser, tmp_path: Path) -> None:
    known, traces = watched(8, 24)
    samples = list(known.samples)
    samples[-1] = samples[-1].model_copy(update={"seconds": samples[-1].seconds + 0.05})
    path = tmp_path / "page.html"
    known = replace(known, samples=samples)
    path.write_text(render_live_page(build_page_document(known, traces, column=0, live=False)))
    browser.look(path.as_uri())
    texts = browser.eval(f"{DRAWN}(drawPictures, picturesHeight(shot), shot, colours())")
    assert len([each for each in texts if ", 50 ms of it outside ops, " in each]) == 2
    assert "outside ops: from the last op" in browser.eval("$('kinds').textContent")
    browser.look(page_of(tmp_path, "adapted"))
    assert "outside ops" not in browser.eval("$('kinds').textContent")


def test_nothing_is_saved_under_the_initial_plan(browser: Browser, tmp_path: Path) -> None:
    browser.look(page_of(tmp_path, "recovered", 8, 24))
    assert not any("saved in iteration" in card for card in cards(browser))
    browser.look(page_of(tmp_path, "slow", 8, 24))
    assert cards(browser)[0].startswith("1.74 s"), "of the newest, not of the time before"


def test_changes_say_what_they_saved_and_cost_and_what_came_of_them(
    browser: Browser, tmp_path: Path
) -> None:
    known, traces = watched(4, 12, "recovered")
    change = known.changes[0]
    cost = change.model_copy(
        update={"change_seconds": 0.4, "saved": 8.6, "saved_until": 42, "measured": None}
    )
    known = replace(known, changes=[cost, known.changes[1]])
    path = tmp_path / "page.html"
    path.write_text(render_live_page(build_page_document(known, traces, column=0, live=False)))
    browser.look(path.as_uri())
    back, first = browser.eval(
        "[...document.querySelectorAll('#changes li')].map(e => e.innerText)"
    )
    assert f"decided in iteration {RETURNED_AT - 1}: a link recovered, none is slow" in back
    assert f"What had slowed the job was gone from iteration {RETURNED_AT - 2} on." in back
    assert f"here in iteration {RETURNED_AT - 1}." in back
    assert "cost of the change not measured" in back
    for text in ("not measured", "saved 8.6 s up to iteration 42", "the change itself cost 0.40 s"):
        assert text in first
    assert "yet" not in first and f"v1 in iterations {CHANGED_AT} to {RETURNED_AT - 1}" in first
    assert f"v2 since iteration {RETURNED_AT}" in back
    terms = browser.eval("$('terms').textContent")
    assert terms.startswith("Warm-up: forwards that") and " Delegated: the engine" in terms
    browser.look(page_of(tmp_path, "adapted"))
    assert "null" not in browser.eval("$('changes').innerText")
    browser.look(page_of(tmp_path, "healthy"))
    assert browser.eval("$('terms').textContent") == ""


def test_the_axis_ignores_outliers_and_marks_them(browser: Browser, tmp_path: Path) -> None:
    known, traces = watched(8, 24, "slow")
    samples = list(known.samples)
    for at, seconds in ((0, 50.0), (7, 9.0)):
        samples[at] = samples[at].model_copy(update={"seconds": seconds})
    known = replace(known, samples=samples)
    path = tmp_path / "page.html"
    path.write_text(render_live_page(build_page_document(known, traces, column=0, live=False)))
    browser.look(path.as_uri())
    longest = known.samples[-1].seconds
    assert longest < browser.eval("findMost(historyOf())") < 1.5 * longest
    assert browser.eval("historyOf().reference.value") == pytest.approx(
        known.samples[5].seconds, rel=0.05
    )
    texts = browser.eval(f"{DRAWN}(drawHistory, 500, colours(), historyOf())")
    assert any("; dashed: " in each and "before any fault" in each for each in texts)
    spikes = [each.split("↑ ")[1].split("<")[0] for each in texts if "↑" in each]
    assert spikes == ["50.00 s", "9.00 s"]


def test_the_slow_link_is_drawn_with_its_messages(browser: Browser, tmp_path: Path) -> None:
    browser.look(page_of(tmp_path, "adapted", 8, 24))
    (link,) = browser.eval("slowLinks(shot.measured)")
    assert (link["row"], link["text"], len(link["messages"])) == (3, "+60 ms, delegated", 48)
    late = [arrived - sent for _, sent, arrived in link["messages"]]
    assert min(late) > 0 and max(late) == 60_000
    browser.look(page_of(tmp_path, "healthy"))
    assert browser.eval("slowLinks(shot.measured)") == []


def test_a_slow_link_that_is_delegated_is_drawn_slow(browser: Browser, tmp_path: Path) -> None:
    """Delegation is a strip below the state; plans and links have no colour of an op."""
    browser.look(page_of(tmp_path, "recovered"))
    drawn = f"{DRAWN}(drawHistory, 500, colours(), historyOf())"
    mine = 'part.startsWith(`<path fill="${colours()(name)}`)'
    slow, strips = browser.eval(f"['delayed', 'ink'].map(name => {drawn}.filter(part => {mine}))")
    assert (len(slow), len(strips)) == (2, 2), "before the change; slow, then healthy, delegated"
    begins = [each.split(' d="M')[1].split()[0] for each in (slow[1], strips[0])]
    assert begins[0] == begins[1]
    legend = browser.eval("laneEntries(colours()).map(([colour, name]) => [colour, name])")
    assert any("link delegated" in name for _, name in legend)
    ops = browser.eval("kindEntries(colours()).slice(0, 3).map(each => each[0])")
    assert not {colour for colour, _ in legend} & set(ops)


@pytest.mark.parametrize("case", get_args(Case))
def test_every_case_is_drawn(browser: Browser, tmp_path: Path, case: Case) -> None:
    browser.look(page_of(tmp_path, case, 8, 24))
    assert browser.eval(INK) > 0.2
    state = {"recovering": "Restarting", "failed": "Failed"}.get(case, "Running")
    assert browser.eval("document.getElementById('state').textContent") == state


def test_keys_go_through_iterations_and_changes(browser: Browser, tmp_path: Path) -> None:
    browser.look(page_of(tmp_path, "recovered"))

    def at(iteration: int) -> bool:
        return bool(browser.until(f"{SHOWN}.startsWith('iteration {iteration}:')"))

    assert at(59)
    for key, iteration in (
        ("ArrowLeft", 58), ("ArrowLeft", 57), ("ArrowRight", 58), ("PageUp", RETURNED_AT),
        ("PageUp", CHANGED_AT), ("PageDown", RETURNED_AT), ("Home", 0), ("ArrowLeft", 0),
        ("End", 59),
    ):  # fmt: skip
        browser.press(key)
        assert at(iteration), key


def test_it_follows_a_run_until_it_ends(browser: Browser) -> None:
    sight = Sight(4, 12)
    number = "document.getElementById('now').textContent"
    with open_page_listener(0) as listener, LivePageServer(sight.document, listener) as server:
        browser.look(server.url)
        first = browser.eval(number)
        browser.until(f"{number} !== {first!r}")
        # A paused page stays as it is, and sends no requests.
        browser.press(" ")
        browser.until("document.getElementById('pause').textContent === 'resume'")
        begun = sight.begun
        held = browser.eval(f"new Promise(done => setTimeout(() => done({number}), 2500))")
        assert sight.begun == begun and held == browser.eval(number)
        browser.press("ArrowLeft")
        browser.until(f"{number} !== {held!r}")
        # While the run has no time for it, an older iteration is requested again.
        seconds, server.documents.budget.seconds_remaining = (
            server.documents.budget.seconds_remaining,
            -1.0,
        )
        wanted = browser.eval("shown()") - 3
        browser.eval(f"void goTo({wanted})")
        browser.until(f"{number}.includes('are being fetched')")
        server.documents.budget.seconds_remaining = seconds
        browser.until(f"shot.measured.iteration === {wanted}")
        browser.press("End")
        browser.press(" ")
        browser.until("document.getElementById('pause').textContent === 'pause'")
        server.announce_end()
        browser.until("document.getElementById('pause').textContent === 'not live'")
        assert all(url.startswith(server.url) for url in browser.requests)


def test_it_shows_that_pictures_come_less_often(browser: Browser) -> None:
    """Pictures of a large job cost more than the viewers' budget."""
    paced = "document.getElementById('paced')"
    with (
        open_page_listener(0) as listener,
        LivePageServer(Sight(4, 12).document, listener) as server,
    ):
        browser.look(server.url)
        browser.until("live && !fetching")
        assert browser.eval(f"{paced}.hidden")
        budget = server.documents.budget
        seconds, budget.seconds_remaining = budget.seconds_remaining, -2.0
        browser.until(f"!{paced}.hidden")
        text = browser.eval(f"{paced}.textContent")
        assert "as of" in text and "5% of a core" in text
        # An older iteration has to wait as well.
        browser.eval("void goTo(shown() - 3)")
        browser.until("document.getElementById('now').textContent.includes('5% of a core')")
        budget.seconds_remaining = seconds
        browser.until(f"{paced}.hidden")
    browser.errors.clear()


def test_a_page_in_the_background_receives_the_last_state(browser: Browser) -> None:
    """A hidden page sends no requests while the run goes on, and the run is gone afterwards."""
    sight = Sight(4, 12)
    with open_page_listener(0) as listener, LivePageServer(sight.document, listener) as server:
        browser.look(server.url)
        browser.eval("Object.defineProperty(document, 'hidden', { get: () => true })")
        browser.eval("void document.dispatchEvent(new Event('visibilitychange'))")
        browser.until("waitingForEnd && !fetching")
        begun = sight.begun
        browser.eval("new Promise(done => setTimeout(done, 1500))")
        assert sight.begun == begun
        server.announce_end()
    browser.until("!live && view.number > 0 && !view.live")
    assert "The run is over" in browser.eval("document.getElementById('gone').textContent")


@pytest.mark.parametrize(("pending", "text"), [(True, "not in force yet"), (False, "never in")])
def test_a_plan_that_was_never_in_force_is_not_about_to_come(
    browser: Browser, tmp_path: Path, pending: bool, text: str
) -> None:
    known, traces = watched(4, 12)
    change = known.changes[0].model_copy(update={"applied_at_iteration": None})
    versions = {"applied_plan_version": 0, "wanted_plan_version": int(pending)}
    training = known.status.training.model_copy(update=versions)
    status = known.status.model_copy(update={"training": training})
    view = build_page_document(
        replace(known, changes=[change], status=status), traces, column=0, live=False
    )
    path = tmp_path / "page.html"
    path.write_text(render_live_page(view))
    browser.look(path.as_uri())
    assert text in browser.eval("document.getElementById('changes').textContent")


def test_a_run_that_is_gone_is_shown(browser: Browser) -> None:
    with (
        open_page_listener(0) as listener,
        LivePageServer(Sight(4, 12).document, listener) as server,
    ):
        browser.look(server.url)
    browser.until("!document.getElementById('gone').hidden")
    text = browser.eval("document.getElementById('gone').textContent")
    assert all(each in text for each in ("does not answer", "next try", "reload", "report.json"))
    # Requests become rarer, and one is sent at once when the page is shown again.
    browser.until("failed >= 3")
    assert browser.eval("live && nextPoll > performance.now() + 1000")
    browser.eval("void document.dispatchEvent(new Event('visibilitychange'))")
    browser.until("failed >= 4")
    browser.errors.clear()  # Errors of the lost connections.


def test_the_saved_page_equals_the_page_without_the_run(browser: Browser, tmp_path: Path) -> None:
    with (
        open_page_listener(0) as listener,
        LivePageServer(Sight(4, 12).document, listener) as server,
    ):
        browser.look(server.url)
        browser.press(" ")
        text = browser.eval("pageText()")
        reason = browser.eval("document.getElementById('story').textContent")
    browser.look("about:blank")
    browser.errors.clear()
    browser.requests.clear()
    saved = tmp_path / "saved.html"
    saved.write_text(text)
    browser.look(saved.as_uri())
    assert browser.eval("document.getElementById('story').textContent") == reason
    assert browser.eval("document.getElementById('pause').textContent") == "not live"
    assert browser.eval(INK) > 0.2
    assert browser.eval("pageText()") == text and len(browser.requests) == 1


NAME = "job-of-4-iteration-39"


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_the_button_saves_an_svg(browser: Browser, tmp_path: Path, dark: bool, width: int) -> None:
    browser.look(page_of(tmp_path, "failed"), dark=dark, width=width)
    saved = browser.download("#svg", tmp_path)
    assert saved.name == f"{NAME}.svg"
    root = ElementTree.fromstring(saved.read_text())
    assert root.tag.endswith("svg") and float(root.attrib["height"]) > 300
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    words = " ".join(node.text or "" for node in texts)
    for text in ("iteration 39", "+60 ms", "F forward", "idle, link", "saved"):
        assert text in words, text
    browser.look(saved.as_uri(), width=width)
    # The picture is whole at its right edge, however narrow the page was.
    right = browser.eval(
        "Math.max(...[...document.querySelectorAll('text')]"
        ".map(each => each.getBoundingClientRect().right))"
    )
    assert right <= float(root.attrib["width"]) + 1


@pytest.mark.parametrize("dark", [False, True])
def test_the_button_saves_a_png(browser: Browser, tmp_path: Path, dark: bool) -> None:
    browser.look(page_of(tmp_path, "failed"), dark=dark)
    saved = browser.download("#png", tmp_path)
    assert saved.name == f"{NAME}.png"
    width, height = browser.eval("(({width, height}) => [width, height])(sheet())")
    pixels = (255 * imread(saved)).round().astype(int)
    assert pixels.shape[:2] == (2 * height, 2 * width)
    assert (pixels[..., 3] == 255).all(), "seen on any background"
    back = (20, 24, 29) if dark else (255, 255, 255)
    assert tuple(pixels[-1, -1, :3]) == back
    # The PNG equals the SVG, which the tests above read: ops of each kind, in its colour.
    drawn = {tuple(colour) for colour in numpy.unique(pixels[..., :3].reshape(-1, 3), axis=0)}
    for fill in browser.eval("kindEntries(colours()).map(each => each[0]).filter(Boolean)"):
        assert tuple(int(fill[i : i + 2], 16) for i in (1, 3, 5)) in drawn, fill


def test_a_picture_that_cannot_be_made_is_reported(browser: Browser, tmp_path: Path) -> None:
    browser.look(page_of(tmp_path, "failed"))
    browser.eval("void (HTMLCanvasElement.prototype.toBlob = done => done(null))")
    browser.click("#png")
    text = browser.until("document.getElementById('gone').textContent")
    assert "makes no PNG of" in text and "save SVG" in text


@pytest.mark.times
def test_the_first_paint_of_the_largest_job(browser: Browser, tmp_path: Path) -> None:
    """Page of 64 stages × 256 microbatches: something within 1 s of the request, and within two
    the picture, for which the ranks' traces are read and the plan of the start is simulated."""
    sight = Sight(*LARGEST)
    for trace in sight.traces:
        line = {
            "rank": trace.rank, "stage": trace.stage, "replica": 0, "iteration": trace.iteration,
            "plan_version": trace.plan_version, "origin": NOW, "waits": [],
            "ops": [[op.kind.value, op.microbatch, round(op.start - NOW, 6),
                     round(op.end - NOW, 6)] for op in trace.ops],
        }  # fmt: skip
        text = json.dumps(line) + "\n"
        (tmp_path / f"ops-rank{trace.rank}.jsonl").write_text(20 * text)
    sight.index, sight.folder = TraceIndex(), tmp_path
    with open_page_listener(0) as listener, LivePageServer(sight.document, listener) as server:
        browser.look(server.url)
        drawn = browser.until("(performance.getEntriesByName('drawn')[0] || {}).startTime")
        assert browser.eval(INK) > 0.2
        assert browser.eval("shot.measured.rows.length === 64 && shot.alternative !== null")
        first = browser.eval("performance.getEntriesByType('paint')[0].startTime")
    browser.errors.clear()
    assert first < 1000 and drawn < 2000, (first, drawn)


def test_another_pipeline_of_many_is_chosen(browser: Browser) -> None:
    """Page of 64 stages × 64 replicas: it begins with the one of the slow link."""
    sight = Sight(64, 64, replicas=64)
    with open_page_listener(0) as listener, LivePageServer(sight.document, listener) as server:
        browser.look(server.url)
        assert browser.eval("document.getElementById('column').options.length") == 64
        assert browser.eval("[shot.column, shot.columns[shot.column]]") == [32, "replica 32"]
        assert "replica 32" in browser.eval("document.getElementById('story').textContent")
        slow, seconds = browser.eval("[shot.measured.span_us, shot.alternative.seconds]")
        browser.eval("document.getElementById('column').focus()")
        browser.press("ArrowDown")
        browser.until("shot.column === 33")
        assert browser.eval("shot.measured.rows.length") == 64 and browser.eval(INK) > 0.2
        assert browser.eval("shot.measured.span_us") < slow
        # Time of all under the plan of the start, whichever of them is drawn.
        assert browser.eval("shot.alternative.seconds") == pytest.approx(seconds, rel=0.05)
        # Later documents are of that pipeline, too.
        number = browser.eval("view.number")
        browser.until(f"view.number > {number} && view.column === 33 && shot.column === 33")
        assert browser.eval("document.documentElement.scrollWidth") == 1200


def replay_page(folder: Path) -> str:
    trained = {name: TrainingRun((0.4,) * 40) for name in ("static", "adaptive", "oracle")}
    trained["1f1b"] = TrainingRun((0.5,) * 20, "link 2 is down")
    changes = [
        ReplayedChange(3, "", 0.3, 0.29, "why: link 1 is slow by 20 ms " * 5),
        ReplayedChange(21, "", -0.0004, None, "plan 2 from iteration 21; why: a link recovered"),
    ]
    lines = (
        '{"at_iteration": 2, "links": {"0": {"delay_ms": 20}, "1": {"gbps": 2.5}}}',
        '{"at_iteration": 20, "links": {"2": {"down": true}}}',
    )
    trace = parse_trace("\n".join(lines), 3, replicas=1)
    path = folder / "replay.html"
    path.write_text(render_replay(ReplayResult(40, trained, changes), trace, "a trace"))
    return path.as_uri()


CONTRASTS = """(() => {
  const linear = x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(x => linear(x / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const style = getComputedStyle, found = [];
  const behind = node => {
    while (style(node).backgroundColor === "rgba(0, 0, 0, 0)") node = node.parentElement;
    return style(node).backgroundColor;
  };
  const own = node => [...node.childNodes].some(each => each.nodeType === 3 && each.data.trim());
  for (const node of document.querySelectorAll("body *"))
    if (own(node) && node.getClientRects().length)
      found.push([node.textContent.slice(0, 30), ratio(style(node).color, behind(node))]);
  return found;
})()"""
"""Contrast of each text that is shown with its background."""


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_a_replay_can_be_read(
    browser: Browser, tmp_path: Path, dark: bool, width: int
) -> None:
    """The page is read by day and by night, at a desk and on a phone."""
    browser.look(replay_page(tmp_path), width=width, height=844, dark=dark)
    assert browser.eval("document.documentElement.scrollWidth") == width
    back = browser.eval("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(20, 24, 29)") is dark
    found = browser.eval(CONTRASTS)
    assert len(found) > 20 and [each for each in found if each[1] < 4.5] == []
    assert browser.eval(INK.replace("'ops'", "'history'")) > 0.05
    assert len(browser.requests) == 1, "it loads nothing"


def test_keys_go_through_a_replay(browser: Browser, tmp_path: Path) -> None:
    """Wherever the focus is, as on the live page."""
    browser.look(replay_page(tmp_path))
    shown = browser.eval("document.getElementById('changes').textContent")
    assert "promised 0.0%" in shown and "measured 29.0%" in shown

    def pressed(key: str) -> int:
        browser.press(key)
        return int(browser.eval(f"{SHOWN}.match(/^iteration (\\d+)/)[1]"))

    for key, iteration in (
        ("ArrowRight", 4), ("ArrowLeft", 3), ("PageDown", 21), ("PageDown", 21), ("PageUp", 3),
        ("End", 39), ("ArrowRight", 39), ("Home", 0), ("ArrowLeft", 0), ("ArrowUp", 0),
    ):  # fmt: skip
        assert pressed(key) == iteration, key
    browser.press("Tab")
    assert browser.eval("document.activeElement.id") == "history"
    assert [pressed("ArrowUp"), pressed("ArrowUp"), pressed("ArrowDown")] == [1, 2, 1]
    assert browser.eval("chart.getAttribute('aria-valuetext')").startswith("iteration 1; ")
    # On to the changes of plan, each a button.
    browser.press("Tab")
    assert browser.eval("document.activeElement.textContent").startswith("iteration 3")
    assert pressed("End") == 39
    browser.eval("void document.activeElement.click()")
    assert pressed("ArrowRight") == 4


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_real_run_is_watched(browser: Browser, tmp_path: Path) -> None:
    """An emulated job with a link that is slow for a while, from its start to its end."""
    text = (ROOT / "examples/emulated-14b.yaml").read_text()
    for old, new in (("iterations: 24", "iterations: 60"), ("toIteration: 16", "toIteration: 40")):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "job.yaml").write_text(text)
    command = [sys.executable, "-m", "pipemorph.cli", "run", "job.yaml", "--out", "out", "--watch"]
    host = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    url = next(line for line in host.stdout if line.startswith("watch: ")).split()[1]
    browser.look(url)
    story = "document.getElementById('story').textContent"
    for sentence in ("link 6 (stage 6 to 7) is late by up to", "plan 1 from iteration"):
        browser.until(f"{story}.includes({sentence!r})")
    browser.until("shot.alternative && shot.alternative.span_us > 1.3 * shot.measured.span_us")
    browser.until(f"{story}.includes('link 6 (stage 6 to 7) was late by up to')")
    browser.until("view.status.state === 'Complete' && !live")
    assert browser.eval("view.status.training.saved_seconds") > 5
    host.communicate(timeout=60)
    assert host.returncode == 0


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("browser")
def test_every_view_can_be_drawn(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "benchmarks/pictures.py", "--out", tmp_path, "--stages", "4"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    for case in ("healthy", "slow", "adapted", "recovered", "failed"):
        assert {f"live-4-{case}-{look}" for look in ("light", "dark", "phone")} <= drawn
    assert {"saved-4-adapted", "replay-4-failed"} <= drawn


@pytest.mark.soak
def test_ten_viewers_cost_five_per_cent_of_a_core() -> None:
    """Viewers of the largest job send a request each every second for a minute."""
    sight = Sight(*LARGEST)
    with open_page_listener(0) as listener, LivePageServer(sight.document, listener) as server:
        began, cpu = time.monotonic(), time.process_time()
        while time.monotonic() - began < 60:
            for viewer in range(10):
                server.documents.get((viewer % 2, None))
                server.documents.get((0, viewer))
            time.sleep(0.5)
        took = time.process_time() - cpu
    assert took < 3.0 + 0.05 * 60 + 1.0, took
