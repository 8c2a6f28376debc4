"""Comparison of two runs, in sentences and on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser
from watched_jobs import CHANGED_AT, SLOW_AT, Case, watched

from pipemorph.cli import main
from pipemorph.errors import InputError
from pipemorph.views.live_page.page_builder import build_page_document, build_stored_iteration
from pipemorph.views.live_page.page_document import IterationTimes, PageDocument
from pipemorph.views.live_page.run_comparison import RunComparison, render_comparison


def page(
    case: Case, seconds: Sequence[float] | None = None, stages: int = 4, microbatches: int = 12
) -> PageDocument:
    """Page of a run that is over. ``seconds``: of its iterations, from the first."""
    known, traces = watched(stages, microbatches, case)
    made = build_page_document(known, traces, column=0, live=False)
    stored = []
    for iteration in (SLOW_AT - 2, CHANGED_AT - 1, CHANGED_AT, 30, 39):
        version = 1 if case != "slow" and iteration >= CHANGED_AT else 0
        moved = [replace(each, iteration=iteration, plan_version=version) for each in traces]
        stored.append(build_stored_iteration(known, moved, 0))
    steps = made.steps
    if seconds is not None:
        steps = IterationTimes(index=list(range(len(seconds))), seconds=list(seconds))
    return made.model_copy(update={"stored": stored, "steps": steps})


def wave(count: int, base: float, late: float = 0.0) -> list[float]:
    """Seconds of iterations, of which those from CHANGED_AT on take longer."""
    return [base + 0.01 * (i % 2) + late * (i >= CHANGED_AT) for i in range(count)]


def compare(first: PageDocument, second: PageDocument) -> dict[str, str]:
    return dict(RunComparison.from_pages(("A", "B"), (first, second)).build_rows())


def test_the_faster_run_is_named_with_the_spread_and_the_iteration() -> None:
    rows = compare(page("adapted", wave(40, 0.5)), page("slow", wave(40, 0.5, late=0.2)))
    # 25 of 39 iterations take 0.2 s longer.
    assert rows["result"] == (
        "A took 0.505 s per iteration, B 0.633 s: 20.2% less (± 0.0%), over 39 iterations, 1 to 39"
    )
    assert rows["where"] == (
        "since iteration 15, up to 39: A 0.505 s per iteration, B 0.705 s, 100% of the difference"
    )
    swapped = compare(page("slow", wave(40, 0.5, late=0.2)), page("adapted", wave(40, 0.5)))
    assert swapped["result"].startswith("B took 0.505 s per iteration, A 0.633 s: 20.2% less")


def test_the_difference_is_traced_to_links_plan_and_stages() -> None:
    rows = compare(page("adapted", wave(40, 0.5)), page("slow", wave(40, 0.5, late=0.2)))
    assert rows["links"] == (
        "in iteration 27: link 1 (stage 1 to 2): +60 ms, delegated in A, +60 ms in B"
    )
    assert rows["plan"].startswith("in iteration 27: A ran plan v1 (warm-up ")
    assert rows["plan"].endswith("link 1 delegated), B ran the initial plan")
    assert rows["stages"] == "their ops take the same time in both, within 5%"
    assert rows["from"].startswith("per iteration B spends ")
    assert "ms more in waits for messages on links" in rows["from"]
    assert "(mean of the ranks, by the ops of 3 and 3 iterations)" in rows["from"]


def test_a_stage_that_takes_longer_is_named() -> None:
    usual, slow = page("slow", wave(40, 0.5)), page("slow", wave(40, 0.5, late=0.2))
    stored = []
    for each in slow.stored:
        rows = list(each.measured.rows)
        rows[2] = rows[2].model_copy(update={"durations": [2 * d for d in rows[2].durations]})
        longer = each.measured.model_copy(update={"rows": rows})
        stored.append(each.model_copy(update={"measured": longer}))
    rows = compare(usual, slow.model_copy(update={"stored": stored}))
    assert rows["stages"] == "stage 2: ops of 312 ms in A, 624 ms in B"
    assert rows["plan"] == "in iteration 26: the initial plan in both"
    assert "link 1 (stage 1 to 2): +60 ms in both" in rows["links"]


def test_runs_that_differ_by_chance_do_not_differ() -> None:
    noise = [0.5 + 0.04 * ((7 * i) % 5) for i in range(40)]
    other = [0.5 + 0.04 * ((3 * i + 1) % 5) for i in range(40)]
    rows = compare(page("slow", noise), page("slow", other))
    assert rows["result"].startswith("no difference beyond the spread: ")
    assert "where" not in rows


def test_one_outlier_hides_no_difference_and_widens_the_spread() -> None:
    late = wave(40, 0.5, late=0.2)
    late[5] = 9.0
    rows = compare(page("adapted", wave(40, 0.5)), page("slow", late))
    assert "since iteration 15, up to 39" in rows["where"]
    assert "(± 0.0%)" not in rows["result"]


def test_runs_without_ops_are_compared_by_their_times() -> None:
    bare = page("adapted", wave(40, 0.5)).model_copy(update={"stored": [], "measured": None})
    rows = compare(bare, page("slow", wave(40, 0.7)))
    assert "from" not in rows and "stages" not in rows
    assert rows["result"].startswith("A took 0.505 s")


def test_other_shapes_and_short_runs_are_refused() -> None:
    four = page("slow")
    for other, why in (
        (page("slow", stages=8), "A has 4 stages, 12 microbatches and B has 8 stages, 12 micro"),
        (page("slow", microbatches=16), "B has 4 stages, 16 microbatches; runs with as many"),
        (page("slow", [0.5, 0.5, 0.5]), "A and B have 2 iterations in common after the first"),
        (page("slow", []), "have 0 iterations in common"),
    ):
        with pytest.raises(InputError, match=why):
            RunComparison.from_pages(("A", "B"), (four, other))


def test_the_command_prints_the_sentences_and_writes_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("fast", wave(40, 0.5)), ("late", wave(40, 0.6)), ("short", [0.5])):
        (tmp_path / name).mkdir()
        document = page("adapted", seconds).model_dump_json()
        (tmp_path / name / "page.json").write_text(document)
    assert main(["view", str(tmp_path / "fast"), str(tmp_path / "late")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("result  fast took 0.505 s per iteration, late 0.605 s: 16.5% less")
    written = tmp_path / "fast" / "comparison.html"
    assert f"view: {written.as_uri()}" in printed
    assert '"names": ["fast", "late"]' in written.read_text()
    assert main(["view", str(tmp_path / "fast"), str(tmp_path / "short")]) == 2
    assert "fast and short have 0 iterations in common" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("width", "dark", "stages"),
    [(390, True, 4), (1200, False, 8), (390, False, 64), (1200, True, 64)],
)
def test_both_runs_are_drawn(
    browser: Browser, tmp_path: Path, width: int, dark: bool, stages: int
) -> None:
    pages = page("adapted", wave(40, 0.5), stages), page("slow", wave(40, 0.5, 0.2), stages)
    path = tmp_path / "comparison.html"
    path.write_text(render_comparison(RunComparison.from_pages(("A", "B"), pages)))
    browser.errors.clear()
    browser.look(path.as_uri(), width=width, dark=dark)
    assert browser.errors == []
    assert browser.eval("document.documentElement.scrollWidth") == width
    assert browser.eval("$('title').textContent") == "A and B"
    assert browser.eval("picturesOf(shot).length") == 2
    assert browser.eval("historyOf().series.map(each => each.index.length)") == [40, 40]
    browser.press("Home")
    assert browser.until("$('now').textContent.startsWith('iteration 0: A 500 ms, B 500 ms')")
    assert browser.eval("[shot.measured.iteration, shot.alternative.iteration]") == [10, 10]
    heads = browser.eval("[...document.querySelectorAll('#idle')][0].parentNode.innerText")
    assert "A" in heads.split() and "B" in heads.split()
