"""The timeline of a run, as a trace and as a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from run_records import MICROBATCHES, STAGES, emulated, job, record, run_record, sample, write_trace

from pipemorph.diagnose.formats.rank_traces import TraceIndex
from pipemorph.local.results import timeline as timeline_module
from pipemorph.local.results.report import RunRecord, write_report
from pipemorph.local.results.result_folder import ResultFolder
from pipemorph.local.results.timeline import (
    build_timelines,
    choose_panels,
    reconstruct_messages,
    write_timeline,
)
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.views.explanation.explained_job import SlowPeriod
from pipemorph.views.live_page.page_builder import StageTrace


def test_timeline_and_report_of_a_run(tmp_path: Path) -> None:
    folder = ResultFolder.claim_folder(tmp_path / "out", force=False)
    write_trace(folder.trace, 8)
    run = run_record(emulated())
    said: list[str] = []
    write_report(folder, run)
    write_timeline(folder, run, said.append)
    trace = json.loads(folder.timeline.read_text())
    ops = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(ops) == 8 * STAGES * MICROBATCHES * 2
    assert min(event["ts"] for event in ops) == 0
    assert {(event["pid"], event["tid"]) for event in ops} == {(0, 0), (0, 1)}
    (mark,) = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert mark["name"] == "plan v1 in force" and mark["ts"] == pytest.approx(6e6)
    assert "EMULATED" in trace["otherData"]["title"]
    assert folder.picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(folder.report.read_text())
    assert report["completed"] is True and report["emulated"] is True
    assert report["attempts"][0]["end"] == "completed"
    assert report["adaptations"][0]["routes"] == ["delegated"]
    assert said == [f"timeline: {folder.timeline}, {folder.picture}"]


def test_replicas_are_processes_of_the_trace(tmp_path: Path) -> None:
    folder = ResultFolder.claim_folder(tmp_path / "out", force=False)
    write_trace(folder.trace, 2, ranks=2 * STAGES)
    run = run_record(job(parallelism={"stages": STAGES, "replicas": 2}), 2)
    write_timeline(folder, run, lambda _: None)
    events = json.loads(folder.timeline.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "j, replica 0", 1: "j, replica 1"}


def test_a_long_run_keeps_its_most_useful_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_iteration = STAGES * MICROBATCHES * 2
    monkeypatch.setattr(timeline_module, "MOST_EVENTS", 30 * per_iteration)
    folder = ResultFolder.claim_folder(tmp_path / "out", force=False)
    write_trace(folder.trace, 500)
    run = run_record(job(), 500)
    run.adaptations = [record(detectable_at=200, applied_at_iteration=202)]
    write_timeline(folder, run, lambda _: None)
    recorded = json.loads(folder.timeline.read_text())["otherData"]
    assert recorded["iterations_recorded"] == 500
    assert len(recorded["iterations"]) == 30
    assert {0, 1, 2, 199, 200, 201, 202, 203, 499} <= set(recorded["iterations"])


def test_a_missing_trace_is_reported_and_not_drawn(tmp_path: Path) -> None:
    folder = ResultFolder.claim_folder(tmp_path / "out", force=False)
    said: list[str] = []
    write_timeline(folder, run_record(job(), 0), said.append)
    assert json.loads(folder.timeline.read_text())["traceEvents"] == []
    assert not folder.picture.exists()
    assert "no timeline" in said[0]


def phased_run(*phases: tuple[int, list[float]], slow: list[SlowPeriod]) -> RunRecord:
    """A run of phases: plan version, and seconds of its iterations."""
    run = run_record(job(parallelism={"stages": STAGES, "replicas": 2}), 0)
    each = [(version, seconds) for version, times in phases for seconds in times]
    run.iterations = [
        sample(i, plan_version=version).model_copy(update={"seconds": seconds})
        for i, (version, seconds) in enumerate(each)
    ]
    run.slow_links = slow
    return run


def slow(begin: int, end: int | None, delay: float = 0.06, column: int = 0) -> SlowPeriod:
    return SlowPeriod(link=0, begin=begin, end=end, delay=delay, column=column)


def test_each_phase_is_drawn_by_its_iteration_of_median_time() -> None:
    run = phased_run(
        (0, [9.0, 1.0, 1.2, 1.1, 5.0, 1.12]), (0, [3.0, 3.1, 3.2]), (1, [2.5, 2.0, 2.1, 7.0]),
        (2, [1.0, 1.0, 1.1]), (2, [4.0, 4.1, 9.0]),
        slow=[slow(6, 13), slow(16, None, 0.01)],
    )  # fmt: skip
    panels = choose_panels(range(19), run)
    assert [(p.iteration, p.label) for p in panels] == [
        (5, "no link slow; iterations 1–5"),
        (7, "link 0 +60 ms; iterations 6–8"),
        (11, "link 0 +60 ms; iterations 9–12"),
        (14, "no link slow; iterations 13–15"),
        (17, "link 0 +10 ms; iterations 16–18"),
    ]
    assert [panel.delays for panel in panels[:2]] == [{}, {0: 0.06}]
    assert choose_panels([5, 18], run)[-1].iteration == 18, "only the traced ones"


def test_the_longest_phases_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    run = phased_run(
        (0, [1.0] * 4), (1, [1.0]), (2, [1.0] * 3), (3, [1.0] * 2), (4, [1.0] * 9), slow=[]
    )
    assert [p.iteration for p in choose_panels(range(19), run)] == [2, 4, 6, 9, 11]
    monkeypatch.setattr(timeline_module, "MOST_PANELS", 2)
    assert [p.iteration for p in choose_panels(range(19), run)] == [2, 11]


def test_panels_show_the_column_with_the_slowest_link(tmp_path: Path) -> None:
    run = phased_run((0, [1.0] * 8), slow=[slow(1, 4, 0.01), slow(4, None, 0.04, 1)])
    panels = choose_panels(range(8), run)
    assert [panel.column for panel in panels] == [1, 1]
    assert [panel.delays for panel in panels] == [{}, {0: 0.04}]

    write_trace(tmp_path, 8, ranks=2 * STAGES)
    with (tmp_path / "ops-rank2.jsonl").open() as file:
        lines = [line.replace('"F", 1,', '"F", 0,') for line in file]
    (tmp_path / "ops-rank2.jsonl").write_text("".join(lines))
    drawn = [replace(panel, delays={}) for panel in panels]
    made = build_timelines(TraceIndex.from_folder(tmp_path), drawn, run)
    assert made[0].title.startswith("plan v0, replica 1, no link slow; iterations 1–3; iteration 2")
    assert [len(each.stages) for each in made] == [STAGES] * 2
    assert [op.microbatch for op in made[0].stages[0]][:2] == [0, 0], "of the other column"


def test_a_panel_names_the_plan_that_ran(tmp_path: Path) -> None:
    """The plan of the change may have been undone by then."""
    write_trace(tmp_path, 8)
    for path in tmp_path.glob("ops-rank*.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        ran = [line | {"plan_version": 2} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in ran))
    run = run_record(job(), 8)
    (made,) = build_timelines(TraceIndex.from_folder(tmp_path), choose_panels(range(8), run), run)
    assert made.title == "plan v2, no link slow; iterations 1–7; iteration 2: 1500 ms, idle 12%"


def test_panels_of_a_fault_that_nothing_detected() -> None:
    fault = {"link": 0, "fromIteration": 5, "toIteration": 9, "delayMs": 30.0}
    run = run_record(job(faults=[fault]), 20)
    found = [(p.iteration, p.delays) for p in choose_panels(range(20), run)]
    assert found == [(2, {}), (6, {0: 0.03}), (10, {})]


def test_a_panel_where_nothing_was_sampled() -> None:
    assert [p.iteration for p in choose_panels([3, 4, 5], run_record(job(), 0))] == [4]


def test_a_message_arrives_when_the_wait_for_it_ended() -> None:
    sender = StageTrace(0, 0, 0, 0, 0, (TimedOp(OpKind.F, 0, 0, 1), TimedOp(OpKind.F, 1, 1, 2)))
    receiver = StageTrace(
        1, 1, 0, 0, 0,
        ops=(TimedOp(OpKind.F, 0, 7, 8), TimedOp(OpKind.F, 1, 8, 9)),
        waits=(TimedOp(OpKind.F, 0, 0, 7),),
    )  # fmt: skip
    found = reconstruct_messages([sender, receiver], {0: 5.0})
    assert [(m.microbatch, m.sent, m.arrived) for m in found] == [(0, 1, 7), (1, 2, 7.0)]
