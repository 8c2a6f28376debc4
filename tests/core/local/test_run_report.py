"""The report of a run, and its last line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_records import HAPPENED, emulated, job, record, run_record, sample
from watched_jobs import watched

from pipemorph.api.sections.trainer import Checkpoint
from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import JobStatus
from pipemorph.checkpoints import FINISHED
from pipemorph.control.decide.forecast import Forecast
from pipemorph.explain import explain_job
from pipemorph.explain.cluster_job import SlowTime
from pipemorph.local.host import _final_message
from pipemorph.local.processes.supervise import End, Ending
from pipemorph.local.results.history import View
from pipemorph.local.results.outputs import OutFolder
from pipemorph.local.results.report import Recovery, RunRecord, write_report
from pipemorph.local.results.traces import read_splits
from pipemorph.terminal import render


def test_the_summary_counts_iterations_of_earlier_runs() -> None:
    run, wanted = RunRecord(job(), 1.0), job().spec.trainer.iterations
    run.finish(Ending(End.COMPLETED), [], [])
    assert (
        run.summary()
        == f"completed: {wanted} of {wanted} iterations (none reported), 0 adaptations"
    )
    run.finish(Ending(End.INTERRUPTED), [sample(4), sample(5)], [])
    assert run.summary().startswith(f"interrupted: 6 of {wanted} iterations (resumed at 4), median")
    run.finish(Ending(End.INTERRUPTED), [sample(0), sample(1)], [])
    assert run.summary().startswith(f"interrupted: 2 of {wanted} iterations, median")
    run.began = 0
    run.finish(Ending(End.INTERRUPTED), [sample(3), sample(5)], [])
    assert f"6 of {wanted} iterations (4 not reported), median" in run.summary()
    run.began = 3
    assert f"6 of {wanted} iterations (resumed at 3, 1 not reported), median" in run.summary()


def test_values_of_variables_are_not_in_the_report(tmp_path: Path) -> None:
    def pods(value: str) -> dict[str, list[dict[str, object]]]:
        kinds = ("containers", "initContainers", "ephemeralContainers")
        reference = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
        env = [{"name": "HF_TOKEN", "value": value}, {"name": "EMPTY"}, reference]
        return {kind: [{"name": "trainer", "env": env}, {"name": kind}] for kind in kinds}

    found = job().model_dump(by_alias=True, exclude_none=True)
    found["spec"]["template"] = {"spec": pods("hf_secret")}
    run = RunRecord(PipeMorphJob.model_validate(found), 1.0)
    run.begin_attempt(1.0).end(Ending(End.COMPLETED), 2.0)
    run.finish(Ending(End.COMPLETED), [], [])
    with OutFolder.claim(tmp_path / "out", force=False) as folder:
        write_report(folder, run)
    text = folder.report.read_text()
    assert "hf_secret" not in text
    report = json.loads(text)
    assert report["spec"]["template"]["spec"] == pods("(not in the report)")
    assert "hf_secret" in run.job.model_dump_json(), "ranks get it"
    explain_job(report)


def test_the_summary_says_what_adapting_has_saved() -> None:
    run = RunRecord(job(), 1.0)
    run.finish(Ending(End.COMPLETED), [sample(0)], [record(saved=12.34, change_seconds=1.0)])
    assert run.summary().endswith("1 adaptation that saved 11.3 s (± 12.3 s)")
    run.finish(Ending(End.COMPLETED), [sample(0)], [record(saved=-2.0)])
    assert run.summary().endswith("1 adaptation that cost 2.0 s (± 2.0 s)")
    run.finish(Ending(End.COMPLETED), [sample(0)], [record()])
    assert run.summary().endswith("1 adaptation")


def test_slow_links_and_events_are_in_the_report(tmp_path: Path) -> None:
    folder = OutFolder.claim(tmp_path / "out", force=False)
    run = RunRecord(job(), 1.0)
    last = View(events=(HAPPENED,))
    late = SlowTime(link=1, begin=5, end=None, delay=0.06, column=2)
    run.finish(Ending(End.COMPLETED), [], [], last, slow=[late])
    write_report(folder, run)
    report = json.loads(folder.report.read_text())
    slow = {"link": 1, "begin": 5, "end": None, "delay": 0.06, "column": 2}
    assert report["links"]["slow"] == [slow]
    assert report["events"] == [{"at": 1.0, "iteration": 5, "text": HAPPENED.text}]


def test_the_plan_in_effect_is_predicted_beside_what_was_measured() -> None:
    known, _ = watched(4, 8, "adapted")
    version = known.outlook.running.version
    assert version == 1
    ran = [
        sample(i).model_copy(update={"plan_version": i // 4, "seconds": 9.0 - i}) for i in range(8)
    ]
    run = RunRecord(known.job, 1.0, outlook=known.outlook)
    run.finish(Ending(End.COMPLETED), ran, [])
    situation, plan = known.outlook.situation, known.outlook.running
    own = Forecast(known.outlook.rules, situation).of(plan).seconds
    assert run.content([], [])["predicted"] == {
        "plan_version": 1, "seconds": own, "measured": 3.5,
    }  # fmt: skip
    # None of the plan's own was measured yet, and where op times are unknown there is nothing.
    run.finish(Ending(End.COMPLETED), ran[:4], [])
    assert run.content([], [])["predicted"]["measured"] is None
    run.outlook = None
    assert run.content([], [])["predicted"] is None


def test_how_each_rank_splits_its_backward_is_in_the_report(tmp_path: Path) -> None:
    folder = OutFolder.claim(tmp_path / "out", force=False)
    assert read_splits(folder.trace) == []
    for rank in (10, 2):
        content = {"rank": rank, "split": "deferred", "not_deferred": []}
        (folder.trace / f"split-rank{rank}.json").write_text(json.dumps(content))
    (folder.trace / "split-rank3.json").write_text('{"rank": 3, "spl')
    write_report(folder, run_record(emulated()))
    found = json.loads(folder.report.read_text())["split"]
    assert [(each["rank"], each["split"]) for each in found] == [(2, "deferred"), (10, "deferred")]


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        (End.COMPLETED, "Complete", "AllRanksFinished"),
        (End.FAILED, "Failed", "RankFailed"),
        (End.DEADLINE, "Failed", "DeadlineExceeded"),
        (End.INTERRUPTED, "Suspended", "Interrupted"),
    ],
)
def test_a_report_is_the_job_with_its_status(end: End, state: str, reason: str) -> None:
    run = run_record(job())
    first, last = (
        Ending(End.FAILED, "rank 1 exited with 1", at=2.5),
        Ending(end, "so \x1b[2J it ended"),
    )
    run.attempts[0].end(first, 2.5)
    run.begin_attempt(3.0).end(last, 61.0)
    run.recoveries = [
        Recovery(first, attempt=0, generation=generation, rung="generation", done=4, seconds=1.5)
        for generation in (1, 0)
    ]
    run.finish(last, [sample(i) for i in range(8)], [record()])
    content = json.loads(json.dumps(run.content([], [])))
    assert PipeMorphJob.model_validate({k: content[k] for k in ("kind", "metadata", "spec")} | {
        "apiVersion": content["apiVersion"]
    }) == job()  # fmt: skip
    status = JobStatus.model_validate(content["status"])
    (over,) = status.conditions
    assert (status.state, over.type, over.reason) == (state, state, reason)
    assert (status.start_time, status.completion_time) == (
        "1970-01-01T00:00:01Z", "1970-01-01T00:01:01Z",
    )  # fmt: skip
    assert (status.restarts, status.attempts[0].message) == (1, "rank 1 exited with 1")
    assert status.recoveries is not None and status.recoveries.count == 1
    shown = render(explain_job(content).page())
    assert f"is {state}" in shown and "8 of 40 iterations in 1 min" in shown
    assert "rank 1 exited with 1" in shown and "\x1b" not in shown


@pytest.mark.parametrize(("status", "told"), [(1, True), (2, False)])
def test_input_that_was_unusable_is_not_to_be_run_again(
    status: int, told: bool, tmp_path: Path
) -> None:
    """As a checkpoint that does not fit."""
    saved = tmp_path / "iteration-00000004"
    saved.mkdir()
    (saved / FINISHED).touch()
    run, folder = RunRecord(job(), 1.0), OutFolder(tmp_path / "out")
    run.job.spec.checkpoint = Checkpoint(directory=str(tmp_path), every=1)
    text = _final_message(Ending(End.FAILED, "why", status=status), run, folder, "job.yaml", False)
    assert ("to resume from the newest checkpoint" in text) is told
