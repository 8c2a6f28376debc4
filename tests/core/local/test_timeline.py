"""The timeline of a run, as a trace and as a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from run_records import MICROBATCHES, STAGES, emulated, job, record, run_record, write_trace

from pipemorph.diagnose.formats.rank_traces import StageTrace, TraceIndex
from pipemorph.local.results import timeline as timeline_module
from pipemorph.local.results.report import write_report
from pipemorph.local.results.result_folder import ResultFolder
from pipemorph.local.results.timeline import (
    build_timelines,
    choose_panels,
    reconstruct_messages,
    write_timeline,
)
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.spec.sections.faults import Fault


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


def test_panels_show_the_change_before_during_and_after() -> None:
    panels = choose_panels(list(range(20)), [record()], [])
    assert [(p.iteration, p.label) for p in panels] == [
        (3, "undisturbed"),
        (5, "disturbed"),
        (7, "disturbed"),
    ]
    assert panels[1].delays == {0: 0.03}


def test_panels_show_the_column_with_the_slowest_link(tmp_path: Path) -> None:
    late = ((0, 0.01, 0), (1, 0.04, 1), (2, 0.02, 1))
    links = [{"link": i, "health": "slow", "delay": d, "replica": r} for i, d, r in late]
    panels = choose_panels(list(range(20)), [record(links=links)], [])
    assert [panel.column for panel in panels] == [1, 1, 1]
    assert panels[1].delays == {1: 0.04, 2: 0.02}
    fault = Fault(link=0, replica=2, from_iteration=5, delay_ms=30.0)
    assert {panel.column for panel in choose_panels(list(range(20)), [], [fault])} == {2}

    write_trace(tmp_path, 8, ranks=2 * STAGES)
    with (tmp_path / "ops-rank2.jsonl").open() as file:
        lines = [line.replace('"F", 1,', '"F", 0,') for line in file]
    (tmp_path / "ops-rank2.jsonl").write_text("".join(lines))
    run = run_record(job(parallelism={"stages": STAGES, "replicas": 2}), 8)
    drawn = [replace(panel, delays={}) for panel in panels]
    made = build_timelines(TraceIndex.from_folder(tmp_path), drawn, run)
    assert made[0].title.startswith("iteration 3, replica 1, undisturbed")
    assert [len(each.stages) for each in made] == [STAGES] * 3
    assert [op.microbatch for op in made[0].stages[0]][:2] == [0, 0], "of the other column"


def test_a_panel_names_the_plan_that_ran(tmp_path: Path) -> None:
    """The plan of the change may have been undone by then."""
    write_trace(tmp_path, 8)
    for path in tmp_path.glob("ops-rank*.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        ran = [line | {"plan_version": (0, 1, 2)[line["iteration"] // 3]} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in ran))
    panels = choose_panels(list(range(8)), [record()], [])
    drawn = [replace(panel, delays={}) for panel in panels]
    made = build_timelines(TraceIndex.from_folder(tmp_path), drawn, run_record(job(), 8))
    assert [", ".join(each.title.split(", ")[:3]) for each in made] == [
        "iteration 3, undisturbed, plan v1",
        "iteration 5, disturbed, plan v1",
        "iteration 7, disturbed, plan v2",
    ]


def test_panels_of_a_fault_no_plan_answered() -> None:
    fault = Fault(link=0, from_iteration=5, to_iteration=9, delay_ms=30.0)
    panels = choose_panels(list(range(20)), [], [fault])
    assert [(p.iteration, p.delays) for p in panels] == [(4, {}), (6, {0: 0.03})]


def test_a_panel_where_nothing_happened() -> None:
    assert [p.iteration for p in choose_panels([3, 4, 5], [], [])] == [4]


def test_a_message_arrives_when_the_wait_for_it_ended() -> None:
    sender = StageTrace(0, 0, 0, 0, 0, (TimedOp(OpKind.F, 0, 0, 1), TimedOp(OpKind.F, 1, 1, 2)))
    receiver = StageTrace(
        1, 1, 0, 0, 0,
        ops=(TimedOp(OpKind.F, 0, 7, 8), TimedOp(OpKind.F, 1, 8, 9)),
        waits=(TimedOp(OpKind.F, 0, 0, 7),),
    )  # fmt: skip
    found = reconstruct_messages([sender, receiver], {0: 5.0})
    assert [(m.microbatch, m.sent, m.arrived) for m in found] == [(0, 1, 7), (1, 2, 7.0)]
