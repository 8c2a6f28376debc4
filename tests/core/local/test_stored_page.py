"""``page.json`` of a run that is over, and ``pipemorph view``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from run_records import emulated, run_record, write_trace
from watched_jobs import CHANGED_AT, RETURNED_AT, watched

from pipemorph.cli import main
from pipemorph.local.processes.supervision import AttemptOutcome, AttemptResult
from pipemorph.local.results import stored_page
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.results.report import RunRecord, write_report
from pipemorph.local.results.result_folder import ResultFolder
from pipemorph.local.results.stored_page import read_page, write_page
from pipemorph.views.live_page.page_builder import StageTrace
from pipemorph.views.live_page.page_document import PageDocument


class Ops:
    """Traces with equal ops in every iteration, under the plan of that time."""

    def __init__(self, traces: Sequence[StageTrace], iterations: int) -> None:
        self.traces, self.iterations = traces, iterations

    def list_iterations(self, column: int) -> list[int]:
        return list(range(self.iterations))

    def read_iteration(self, column: int, iteration: int) -> list[StageTrace]:
        plan = (iteration >= CHANGED_AT) + (iteration >= RETURNED_AT)
        return [replace(each, iteration=iteration, plan_version=plan) for each in self.traces]


def store(root: Path, replicas: int = 1, iterations: int = 60) -> PageDocument:
    """A run in which a link was slow for a while, stored and read again."""
    known, traces = watched(4, 12, "recovered", replicas=replicas)
    journal = RunJournal(_lanes=known.link_history)
    journal.add_earlier_iterations(known.samples)
    run = RunRecord(known.job, 1.0, training=known.status.training, outlook=known.outlook)
    ending = AttemptResult(AttemptOutcome.COMPLETED)
    run.begin_attempt(2.0).record_result(ending, 90.0)
    run.record_results(ending, list(known.samples), list(known.changes))
    root.mkdir(parents=True, exist_ok=True)
    folder = ResultFolder(root)
    write_report(folder, run)
    write_page(folder, run, journal, Ops(traces, iterations))
    return read_page(folder)


def test_the_page_says_what_explain_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = store(tmp_path)
    assert (page.live, page.status.state, page.done) == (False, "Complete", 60)
    spans = [(span.kind, span.delegated) for span in page.links[1].spans]
    assert spans[-3:] == [("slow", True), ("healthy", True), ("healthy", False)]
    assert main(["explain", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for label, line in page.explanation:
        assert f"{label} {line}".strip() in printed


def test_pictures_are_bounded_and_around_the_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_page, "MOST_PICTURES", 18)
    page = store(tmp_path, replicas=2)
    mine = [each.measured.iteration for each in page.stored if each.column == page.column]
    assert 12 <= len(mine) <= 18 and mine[0] == 59
    assert {each + i for each in (CHANGED_AT, RETURNED_AT) for i in (-1, 0, 2)} <= set(mine)
    assert max(b - a for a, b in zip([0, *sorted(mine)], sorted(mine), strict=False)) <= 6
    others = [each for each in page.stored if each.column != page.column]
    assert [each.measured.iteration for each in others] == [59]
    late = next(each for each in page.stored if each.measured.iteration == CHANGED_AT)
    assert late.alternative is not None
    assert late.alternative.span_us > late.measured.span_us

    ops = 4 * 12 * 3
    monkeypatch.setattr(stored_page, "MOST_OPS", 5 * ops)
    assert len(store(tmp_path, replicas=2).stored) == 5
    monkeypatch.setattr(stored_page, "MOST_OPS", 1)
    assert len(store(tmp_path).stored) == 1


def test_long_runs_have_iterations_from_everywhere(tmp_path: Path) -> None:
    found = sorted(each.measured.iteration for each in store(tmp_path, iterations=5000).stored)
    assert 50 < len(found) <= stored_page.MOST_PICTURES
    assert max(b - a for a, b in zip([0, *found], found, strict=False)) < 200


def test_ops_come_from_the_folder_by_default(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", 8)
    write_page(ResultFolder(tmp_path), run_record(emulated()), RunJournal())
    page = read_page(ResultFolder(tmp_path))
    assert page.emulated
    assert page.available == list(range(8))
    assert page.measured is not None and page.measured.iteration == 7


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store(tmp_path / "a run")
    for name in ("a run", "a run/report.json"):
        (tmp_path / "a run" / "page.html").unlink(missing_ok=True)
        assert main(["view", str(tmp_path / name)]) == 0
        address = capsys.readouterr().out.strip().removeprefix("view: ")
        assert address == (tmp_path / "a run" / "page.html").as_uri()
        assert "job-of-4" in (tmp_path / "a run" / "page.html").read_text()
    assert main(["view", str(tmp_path / "a run"), "--out", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").exists()


def test_folders_without_a_page_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(folder: Path) -> str:
        assert main(["view", str(folder)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "nothere: no such folder; name the folder of a run" in refusal(tmp_path / "nothere")
    (tmp_path / "file").touch()
    assert "file: is no folder" in refusal(tmp_path / "file")
    assert "is not the folder of a run: it has no report.json" in refusal(tmp_path)
    with ResultFolder.claim_folder(tmp_path / "run", force=False):
        assert "the run is not over; --watch serves its live page" in refusal(tmp_path / "run")
    assert "was cut off before it wrote its report and its page" in refusal(tmp_path / "run")
    (tmp_path / "run" / "report.json").write_text("{}")
    assert "an earlier version of PipeMorph wrote it" in refusal(tmp_path / "run")
    page = tmp_path / "run" / "page.json"
    store(tmp_path / "run")
    later = json.loads(page.read_text()) | {"lens": 1}
    for text, why in (
        (json.dumps(later), "lens: Extra inputs are not permitted"),
        ("{", "Invalid JSON"),
        ("", "Invalid JSON"),
    ):
        page.write_text(text)
        line = refusal(tmp_path / "run")
        assert why in line and "view it with the version of the run" in line
