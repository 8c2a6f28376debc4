"""The report of a run, and its last line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_records import HAPPENED, emulated, job, record, run_record, sample
from watched_jobs import watched

from pipemorph.checkpoints import FINISHED
from pipemorph.control.decide.forecast import Forecast
from pipemorph.diagnose.formats.rank_traces import read_splits
from pipemorph.local.processes.supervision import AttemptOutcome, AttemptResult
from pipemorph.local.results.journal import RunView
from pipemorph.local.results.report import RunRecord, RunRecovery, write_report
from pipemorph.local.results.result_folder import ResultFolder
from pipemorph.local.run import _format_final_message
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import JobStatus
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph.terminal import render_parts
from pipemorph.views.explanation import explain_job
from pipemorph.views.explanation.explained_job import SlowPeriod


def test_the_summary_counts_iterations_of_earlier_runs() -> None:
    run, wanted = RunRecord(job(), 1.0), job().spec.trainer.iterations
    run.record_results(AttemptResult(AttemptOutcome.COMPLETED), [], [])
    assert (
        run.format_summary()
        == f"completed: {wanted} of {wanted} iterations (none reported), 0 adaptations"
    )
    run.record_results(AttemptResult(AttemptOutcome.INTERRUPTED), [sample(4), sample(5)], [])
    assert run.format_summary().startswith(
        f"interrupted: 6 of {wanted} iterations (resumed at 4), median"
    )
    run.record_results(AttemptResult(AttemptOutcome.INTERRUPTED), [sample(0), sample(1)], [])
    assert run.format_summary().startswith(f"interrupted: 2 of {wanted} iterations, median")
    run.first_iteration = 0
    run.record_results(AttemptResult(AttemptOutcome.INTERRUPTED), [sample(3), sample(5)], [])
    assert f"6 of {wanted} iterations (4 not reported), median" in run.format_summary()
    run.first_iteration = 3
    assert (
        f"6 of {wanted} iterations (resumed at 3, 1 not reported), median" in run.format_summary()
    )


def test_values_of_variables_are_not_in_the_report(tmp_path: Path) -> None:
    def pods(value: str) -> dict[str, list[dict[str, object]]]:
        kinds = ("containers", "initContainers", "ephemeralContainers")
        reference = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}
        env = [{"name": "HF_TOKEN", "value": value}, {"name": "EMPTY"}, reference]
        return {kind: [{"name": "trainer", "env": env}, {"name": kind}] for kind in kinds}

    found = job().model_dump(by_alias=True, exclude_none=True)
    found["spec"]["template"] = {"spec": pods("hf_secret")}
    run = RunRecord(PipeMorphJob.model_validate(found), 1.0)
    run.begin_attempt(1.0).record_result(AttemptResult(AttemptOutcome.COMPLETED), 2.0)
    run.record_results(AttemptResult(AttemptOutcome.COMPLETED), [], [])
    with ResultFolder.claim_folder(tmp_path / "out", force=False) as folder:
        write_report(folder, run)
    text = folder.report.read_text()
    assert "hf_secret" not in text
    report = json.loads(text)
    assert report["spec"]["template"]["spec"] == pods("(not in the report)")
    assert "hf_secret" in run.job.model_dump_json(), "ranks get it"
    explain_job(report)


def test_the_summary_gives_the_time_that_adapting_saved() -> None:
    run = RunRecord(job(), 1.0)
    run.record_results(
        AttemptResult(AttemptOutcome.COMPLETED),
        [sample(0)],
        [record(saved=12.34, change_seconds=1.0)],
    )
    assert run.format_summary().endswith("1 adaptation that saved 11.3 s (± 12.3 s)")
    run.record_results(AttemptResult(AttemptOutcome.COMPLETED), [sample(0)], [record(saved=-2.0)])
    assert run.format_summary().endswith("1 adaptation that cost 2.0 s (± 2.0 s)")
    run.record_results(AttemptResult(AttemptOutcome.COMPLETED), [sample(0)], [record()])
    assert run.format_summary().endswith("1 adaptation")


def test_slow_links_and_events_are_in_the_report(tmp_path: Path) -> None:
    folder = ResultFolder.claim_folder(tmp_path / "out", force=False)
    run = RunRecord(job(), 1.0)
    last = RunView(events=(HAPPENED,))
    late = SlowPeriod(link=1, begin=5, end=None, delay=0.06, column=2)
    run.record_results(AttemptResult(AttemptOutcome.COMPLETED), [], [], last, slow=[late])
    write_report(folder, run)
    report = json.loads(folder.report.read_text())
    slow = {"link": 1, "begin": 5, "end": None, "delay": 0.06, "column": 2}
    assert report["links"]["slow"] == [slow]
    assert report["events"] == [{"at": 1.0, "iteration": 5, "text": HAPPENED.text}]


SPREADS = {"work_spread": 0.4, "unexplained_spread": 0.3}


def test_the_plan_in_effect_is_predicted_next_to_measurements() -> None:
    known, _ = watched(4, 8, "adapted")
    version = known.outlook.running_plan.version
    assert version == 1
    ran = [
        sample(i).model_copy(update={"plan_version": i // 4, "seconds": 9.0 - i}) for i in range(8)
    ]
    run = RunRecord(known.job, 1.0, outlook=known.outlook)
    run.record_results(AttemptResult(AttemptOutcome.COMPLETED), ran, [])
    situation, plan = known.outlook.situation, known.outlook.running_plan
    own = Forecast(known.outlook.planning_spec, situation).predict_option(plan).seconds
    assert run.build_report([], [])["predicted"] == {
        "plan_version": 1, "seconds": own, "measured": 3.5,
    }  # fmt: skip
    assert run.build_report([], [])["work"] is None
    assert run.build_report([], [])["dispatch"] == {"kind": plan.dispatch.value, "reason": None}
    parallel = known.job.spec.parallelism.model_copy(update={"tensor": 2})
    held = known.job.spec.model_copy(update={"parallelism": parallel})
    run.job = known.job.model_copy(update={"spec": held})
    assert "need one order of ops" in run.build_report([], [])["dispatch"]["reason"]
    run.job = known.job
    run.iterations = [each.model_copy(update=SPREADS) for each in ran]
    work = run.build_report([], [])["work"]
    assert (work["spread"], work["unexplained"]) == (0.4, 0.3)
    assert 0.01 < work["reordering_gain"] < 0.4
    run.record_results(AttemptResult(AttemptOutcome.COMPLETED), ran, [])
    # The plan's own time is not measured yet; without op times there is no prediction.
    run.record_results(AttemptResult(AttemptOutcome.COMPLETED), ran[:4], [])
    assert run.build_report([], [])["predicted"]["measured"] is None
    run.outlook = None
    assert run.build_report([], [])["predicted"] is None


def test_how_each_rank_splits_its_backward_is_in_the_report(tmp_path: Path) -> None:
    folder = ResultFolder.claim_folder(tmp_path / "out", force=False)
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
        (AttemptOutcome.COMPLETED, "Complete", "AllRanksFinished"),
        (AttemptOutcome.FAILED, "Failed", "RankFailed"),
        (AttemptOutcome.DEADLINE, "Failed", "DeadlineExceeded"),
        (AttemptOutcome.INTERRUPTED, "Suspended", "Interrupted"),
    ],
)
def test_a_report_is_the_job_with_its_status(end: AttemptOutcome, state: str, reason: str) -> None:
    run = run_record(job())
    first, last = (
        AttemptResult(AttemptOutcome.FAILED, "rank 1 exited with 1", at=2.5),
        AttemptResult(end, "so \x1b[2J it ended"),
    )
    run.attempts[0].record_result(first, 2.5)
    run.begin_attempt(3.0).record_result(last, 61.0)
    run.recoveries = [
        RunRecovery(
            first,
            attempt=0,
            generation=generation,
            recovery_step="generation",
            iterations_done=4,
            seconds=1.5,
        )
        for generation in (1, 0)
    ]
    run.record_results(last, [sample(i) for i in range(8)], [record()])
    content = json.loads(json.dumps(run.build_report([], [])))
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
    shown = render_parts(explain_job(content).to_table())
    assert f"is {state}" in shown and "8 of 40 iterations in 1 min" in shown
    assert "rank 1 exited with 1" in shown and "\x1b" not in shown


@pytest.mark.parametrize(("status", "resumable"), [(1, True), (2, False)])
def test_input_that_was_unusable_is_not_to_be_run_again(
    status: int, resumable: bool, tmp_path: Path
) -> None:
    """Input such as a checkpoint that does not fit."""
    saved = tmp_path / "iteration-00000004"
    saved.mkdir()
    (saved / FINISHED).touch()
    run, folder = RunRecord(job(), 1.0), ResultFolder(tmp_path / "out")
    run.job.spec.checkpoint = Checkpoint(directory=str(tmp_path), every=1)
    text = _format_final_message(
        AttemptResult(AttemptOutcome.FAILED, "why", status=status), run, folder, "job.yaml", False
    )
    assert ("to resume from the newest checkpoint" in text) is resumable
