"""Progress, traces and pictures of a local run, without starting one."""

from __future__ import annotations

import errno
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from watched_jobs import watched

from pipemorph.api.spec import Fault, PipeMorphJob
from pipemorph.control.controller import JobController
from pipemorph.control.decide.forecast import Forecast
from pipemorph.control.observe.events import Event
from pipemorph.control.observed.links import Health, LinkHealth
from pipemorph.control.record.history import Decision
from pipemorph.control.record.worth import Worth
from pipemorph.local.processes.supervise import End, Ending
from pipemorph.local.progress import (
    Progress,
    headline,
    links_phrase,
    rails_phrase,
    stragglers_phrase,
)
from pipemorph.local.results import timeline as timeline_module
from pipemorph.local.results.history import Journal, View
from pipemorph.local.results.outputs import OutFolder
from pipemorph.local.results.report import RunRecord, write_report
from pipemorph.local.results.timeline import choose_panels, messages, timelines, write_timeline
from pipemorph.local.results.traces import StageTrace, TraceIndex, read_faults, read_splits
from pipemorph.planning.ir import OpKind
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.wire import (
    PROTOCOL,
    AdaptationRecord,
    FallenLink,
    IterationSample,
    LinkHealthReport,
    RailHealth,
    RailsView,
    RailTrouble,
    Straggler,
    StragglersView,
    TransportsView,
)

STAGES, MICROBATCHES = 2, 3


def job(**spec: Any) -> PipeMorphJob:
    base: dict[str, Any] = {
        "parallelism": {"stages": STAGES},
        "schedule": {"microbatches": MICROBATCHES},
        "trainer": {"module": "m", "iterations": 40},
    }
    return PipeMorphJob.model_validate(
        {
            "apiVersion": "pipemorph.io/v1alpha1",
            "kind": "PipeMorphJob",
            "metadata": {"name": "j"},
            "spec": base | spec,
        }
    )


def emulated(**spec: Any) -> PipeMorphJob:
    times = {"forward": 1.0, "backwardInput": 1.0, "backwardWeight": 1.0}
    emulation = {"stageTimes": [times], "messageBytes": 1 << 18, "standsForBytes": 1 << 24}
    return job(emulation=emulation, **spec)


def sample(index: int, *, plan_version: int = 0) -> IterationSample:
    return IterationSample(
        index=index, seconds=1.5, loss=2.25, plan_version=plan_version, bubble_fraction=0.125
    )


def record(**fields: Any) -> AdaptationRecord:
    values: dict[str, Any] = {
        "plan_version": 1,
        "kind": "adapt",
        "detected_at": 100.0,
        "detected_at_iteration": 5,
        "detectable_at": 4,
        "applied_at_iteration": 6,
        "reason": "link 0 is slow",
        "links": [{"link": 0, "health": "slow", "delay": 0.03, "replica": 0}],
        "warmup_before": [2, 1],
        "warmup_after": [3, 1],
        "routes": ["delegated"],
        "predicted_seconds_before": 2.0,
        "predicted_seconds_after": 1.0,
    }
    return AdaptationRecord(**values | fields)


# --- progress --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, view: View, samples: list[IterationSample], **kind: Any) -> str:
    journal = Journal(view=view, _unseen=samples)
    progress = Progress(stream, kind.get("job", job()), journal, clock=lambda: 0.0)
    progress.update()
    progress.close()
    return stream.getvalue()


def test_a_plain_line_has_it_all() -> None:
    links = (LinkHealth(0, Health.SLOW, delay=0.0301),)
    shown = show(io.StringIO(), View(links=links), [sample(11, plan_version=3)])
    assert shown == (
        "iteration 11 of 40 (30%, 42.0 s left)  loss 2.2500  1.500 s/it  slow link 0 +30 ms"
        "  plan v3  bubble 12%\n"
    )


def test_the_time_left_is_that_of_the_newest_iterations() -> None:
    """Of their median: a single late one says little of the next ones."""
    taken = [9.0] * 28 + [1.0, 1.0, 20.0, 1.0, 1.0]
    samples = [sample(i).model_copy(update={"seconds": each}) for i, each in enumerate(taken)]
    assert " (82%, 7.0 s left) " in show(io.StringIO(), View(), samples)


def test_the_last_iteration_leaves_no_time() -> None:
    assert show(io.StringIO(), View(), [sample(39)]).startswith("iteration 39 of 40 (100%)  loss")


def test_what_other_ranks_had_finished_is_not_what_new_ranks_went_on_with() -> None:
    """They report both. Of several iterations in a report only the last has just finished."""
    made = job()
    journal, controller = Journal(), JobController(made.spec)
    for number, (indices, now) in enumerate([((6,), 100.0), ((7, 8), 109.0)], start=1):
        report = LinkHealthReport(
            namespace="default",
            job="j",
            attempt=0,
            sequence=number,
            sent_at=now,
            state="training",
            iteration=indices[-1],
            protocol=PROTOCOL,
            observed_plan_version=0,
            applied_plan_version=0,
            iterations=[sample(index) for index in indices],
        )
        journal.take(report, controller, now)
    assert journal.first() == (6, 100.0)
    assert journal.first(7) == (7, 109.0 - sample(8).seconds)
    assert journal.first(9) is None
    journal.view = View(state="training", plan_version=3, worth=Worth(7.0, 1.0))
    journal.forget_view()
    assert journal.first() is None and journal.done() == 9
    assert journal.view == View(plan_version=3, worth=Worth(7.0, 1.0)), "what is over stays"


def test_a_view_has_the_plan_that_the_ranks_run_and_the_one_that_they_should() -> None:
    made = job()
    journal, controller = Journal(), JobController(made.spec)
    controller._plans.wanted = replace(controller.wanted, version=2)
    report = LinkHealthReport(
        namespace="default",
        job="j",
        attempt=0,
        sequence=1,
        sent_at=1.0,
        state="training",
        iteration=3,
        protocol=PROTOCOL,
        observed_plan_version=0,
        applied_plan_version=0,
    )
    journal.take(report, controller, 1.0)
    assert (journal.view.plan_version, journal.view.wanted_version) == (0, 2)


def test_plain_lines_of_a_fast_job_are_thinned_but_the_last_is_there() -> None:
    journal, stream, now = Journal(), io.StringIO(), 0.0
    progress = Progress(stream, job(), journal, clock=lambda: now)
    for index in range(40):
        journal._unseen.append(sample(index))
        now = index * 0.1
        progress.update()
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 10
    assert lines[0].startswith("iteration 0 ") and lines[-1].startswith("iteration 39 ")


def test_a_terminal_has_one_live_line_and_events_above_it() -> None:
    decision = Decision(
        at=1.0,
        iteration=5,
        kind="adapt",
        reason="link 0 is slow; and more",
        line="plan v1: link 0 is slow",
        plan_version=1,
    )
    view = View(decisions=(decision,), adaptations=(record(),))
    stream = Terminal()
    journal = Journal(_unseen=[sample(4)])
    progress = Progress(stream, job(), journal)
    progress.update()
    journal.view = view
    progress.update()
    progress.update()
    progress.close()
    shown = stream.getvalue()
    assert shown.count("plan v1: link 0 is slow\n") == 1
    assert shown.count("plan v1: in effect since iteration 6\n") == 1
    assert shown.count("\n") == 3
    assert "\r\x1b[2Kplan v1: link" in shown, "the live line is erased before an event"


def test_the_gain_of_a_change_is_told_once_its_figures_are_complete() -> None:
    journal, stream = Journal(), io.StringIO()
    progress = Progress(stream, job(), journal, clock=lambda: 0.0)
    for index in range(20):
        measured = None if index < 6 else 0.5 if index < 13 else 0.47
        journal.view = View(adaptations=(record(promised=0.5, measured=measured),))
        journal._unseen.append(sample(index, plan_version=index > 5))
        progress.update()
        told = "gain" in stream.getvalue()
        assert told == (index >= 13), "the change is in effect from iteration 6, and 8 count"
    progress.close()
    assert stream.getvalue().count("plan v1: gain promised 50%, measured 47%\n") == 1


@pytest.mark.parametrize(
    ("fields", "newest", "told"),
    [
        ({}, sample(8, plan_version=1), True),
        ({"measured": None}, sample(8, plan_version=1), False),
        ({"promised": None}, sample(8, plan_version=1), False),
        ({"kind": "revert"}, sample(8, plan_version=1), False),
        ({"applied_at_iteration": None}, sample(8), False),
    ],
)
def test_at_the_end_a_gain_is_told_as_far_as_it_is_known(
    fields: dict[str, Any], newest: IterationSample, told: bool
) -> None:
    view = View(adaptations=(record(**{"promised": 0.5, "measured": 0.4} | fields),))
    shown = show(io.StringIO(), view, [newest])
    assert ("plan v1: gain promised 50%, measured 40%\n" in shown) == told


def test_a_plan_that_is_replaced_early_is_judged_by_what_there_is() -> None:
    view = View(adaptations=(record(promised=0.5, measured=0.4),))
    journal, stream = Journal(view=view, _unseen=[sample(8, plan_version=2)]), io.StringIO()
    Progress(stream, job(), journal, clock=lambda: 0.0).update()
    assert "gain promised 50%, measured 40%" in stream.getvalue()


RAILS = RailsView(
    health=RailHealth.SICK,
    ports=2,
    sick_count=1,
    sick=(RailTrouble(1, 0, "mlx5_0", 1, "DOWN", "is DOWN"),),
)
FALLEN = FallenLink(2, 0, "forward", "rdma", "tcp", 1, "mlx5_0 port 1: port error")
TRANSPORTS = TransportsView(
    links=("gloo", "gloo", "tcp"), fallen_count=1, fallen=(FALLEN,), fallbacks=1
)
HAPPENED = Event(7, 1.0, 5, "link 2 of replica 0 fell back from rdma to tcp")


def test_a_fallback_is_told_once_and_stays_on_the_line() -> None:
    view = View(rails=RAILS, transports=TRANSPORTS, events=(HAPPENED,))
    stream = io.StringIO()
    progress = Progress(stream, job(), Journal(view=view, _unseen=[sample(4)]), clock=lambda: 0.0)
    progress.update()
    progress.update()
    progress.close()
    happened, line = stream.getvalue().splitlines()
    assert happened == HAPPENED.text
    assert "  link 2 fell back to tcp, 1 sick RDMA port  plan v0  bubble" in line


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "pipemorph run: standard output cannot be written: No space left on device; stopping\n",
        ),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), ""),
    ],
)
def test_an_output_that_takes_no_more_stops_the_run_and_says_why_once(
    error: OSError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    stopped: list[bool] = []
    progress = Progress(Full(), job(), Journal(), on_closed=lambda: stopped.append(True))
    progress.note("one")
    progress.note("two")
    assert stopped == [True]
    assert capsys.readouterr().err == said


def test_nothing_is_said_of_rails_that_are_not_there() -> None:
    assert rails_phrase(RailsView(), TransportsView()) == ""
    many = tuple(replace(FALLEN, link=i) for i in range(5))
    assert rails_phrase(RailsView(), TransportsView(fallen=many)) == (
        "link 0 fell back to tcp, link 1 fell back to tcp, link 2 fell back to tcp, "
        "2 more fell back"
    )


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


def test_the_summary_says_what_adapting_has_saved() -> None:
    run = RunRecord(job(), 1.0)
    run.finish(Ending(End.COMPLETED), [sample(0)], [record(saved=12.34, change_seconds=1.0)])
    assert run.summary().endswith("1 adaptations that saved 11.3 s")
    run.finish(Ending(End.COMPLETED), [sample(0)], [record(saved=-2.0)])
    assert run.summary().endswith("1 adaptations that cost 2.0 s")
    run.finish(Ending(End.COMPLETED), [sample(0)], [record()])
    assert run.summary().endswith("1 adaptations")


def test_rails_and_transports_of_the_end_are_in_the_report(tmp_path: Path) -> None:
    folder = OutFolder.claim(tmp_path / "out", force=False)
    run = RunRecord(job(), 1.0)
    last = View(rails=RAILS, transports=TRANSPORTS, events=(HAPPENED,))
    run.finish(Ending(End.COMPLETED), [], [], last)
    write_report(folder, run)
    report = json.loads(folder.report.read_text())
    assert report["links"]["transports"] == ["gloo", "gloo", "tcp"]
    assert report["links"]["fallbacks"] == 1
    assert report["links"]["fallen"][0]["trouble"] == "mlx5_0 port 1: port error"
    assert report["rails"]["health"] == "sick"
    assert report["rails"]["sick"][0]["what"] == "is DOWN"
    assert report["rails"]["events"] == [{"at": 1.0, "iteration": 5, "text": HAPPENED.text}]


def test_the_plan_in_effect_is_predicted_beside_what_was_measured() -> None:
    known, _ = watched(4, 8, "adapted")
    assert known.outlook is not None
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


def test_emulation_is_never_silent() -> None:
    assert "EMULATED" in headline(emulated())
    assert "256 KB in place of 16 MB" in headline(emulated())
    assert show(io.StringIO(), View(), [sample(0)], job=emulated()).startswith("EMULATED ")
    assert "EMULATED" not in headline(job())


@pytest.mark.parametrize(
    ("links", "phrase"),
    [
        ((), ""),
        ((LinkHealth(0, Health.HEALTHY), LinkHealth(1, Health.HEALTHY)), "links healthy"),
        (
            (LinkHealth(0, Health.HEALTHY), LinkHealth(1, Health.UNKNOWN)),
            "links: 1 of 2 unknown",
        ),
        (
            tuple(LinkHealth(i, Health.SLOW, delay=i / 100) for i in range(1, 6)),
            "slow links 5 +50 ms, 4 +40 ms, 3 +30 ms and 2 more",
        ),
    ],
)
def test_links_in_words(links: tuple[LinkHealth, ...], phrase: str) -> None:
    assert links_phrase(links) == phrase


# --- traces ----------------------------------------------------------------------------------


def write_trace(folder: Path, iterations: int, *, ranks: int = STAGES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        with (folder / f"ops-rank{rank}.jsonl").open("a") as file:
            for index in range(iterations):
                ops = [["F", m, m * 0.1, m * 0.1 + 0.05] for m in range(MICROBATCHES)]
                ops += [["BW", m, 0.5 + m * 0.1, 0.55 + m * 0.1] for m in range(MICROBATCHES)]
                line = {
                    "rank": rank,
                    "stage": rank % STAGES,
                    "replica": rank // STAGES,
                    "iteration": index,
                    "plan_version": 0,
                    "origin": 1000.0 + index,
                    "ops": ops,
                    "waits": [],
                }
                file.write(json.dumps(line) + "\n")


def test_only_iterations_of_all_ranks_count(tmp_path: Path) -> None:
    write_trace(tmp_path, 4)
    with (tmp_path / "ops-rank1.jsonl").open("a") as file:
        file.write('{"rank": 1, "stage": 1, "replica": 0, "iteration": 4, "plan_version": 0, "ori')
    index = TraceIndex.of(tmp_path)
    assert index.iterations() == [0, 1, 2, 3]
    stages = index.read([2])[2]
    assert [stage.stage for stage in stages] == [0, 1]
    assert stages[0].ops[1] == TimedOp(OpKind.F, 1, 1002.1, 1002.15)


def test_the_last_attempt_of_an_iteration_counts(tmp_path: Path) -> None:
    write_trace(tmp_path, 3)
    for path in tmp_path.glob("*.jsonl"):
        line = json.loads(path.read_text().splitlines()[1]) | {"origin": 5000.0}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    assert TraceIndex.of(tmp_path).read([1])[1][0].ops[0].start == 5000.0


def test_faults_of_all_ranks_are_merged(tmp_path: Path) -> None:
    for rank in (10, 2):
        content = {"rank": rank, "stage": rank, "replica": 0, "faults": [{"link": 2}]}
        (tmp_path / f"faults-rank{rank}.json").write_text(json.dumps(content))
    (tmp_path / "faults-rank3.json").write_text('{"rank": 3, "fau')
    merged = read_faults(tmp_path)
    assert [fault["rank"] for fault in merged] == [2, 10]
    assert merged[0]["link"] == 2


def test_how_each_rank_splits_its_backward_is_in_the_report(tmp_path: Path) -> None:
    folder = OutFolder.claim(tmp_path / "out", force=False)
    assert read_splits(folder.trace) == []
    for rank in (10, 2):
        content = {"rank": rank, "split": "module", "not_deferred": []}
        (folder.trace / f"split-rank{rank}.json").write_text(json.dumps(content))
    (folder.trace / "split-rank3.json").write_text('{"rank": 3, "spl')
    write_report(folder, run_record(emulated()))
    found = json.loads(folder.report.read_text())["split"]
    assert [(each["rank"], each["split"]) for each in found] == [(2, "module"), (10, "module")]


# --- timeline --------------------------------------------------------------------------------


def run_record(of: PipeMorphJob, iterations: int = 8) -> RunRecord:
    run = RunRecord(of, 1.0)
    attempt = run.begin_attempt(2.0)
    ending = Ending(End.COMPLETED)
    attempt.end(ending, 3.0)
    run.finish(ending, [sample(i) for i in range(iterations)], [record()])
    return run


def test_timeline_and_report_of_a_run(tmp_path: Path) -> None:
    folder = OutFolder.claim(tmp_path / "out", force=False)
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
    folder = OutFolder.claim(tmp_path / "out", force=False)
    write_trace(folder.trace, 2, ranks=2 * STAGES)
    run = run_record(job(parallelism={"stages": STAGES, "replicas": 2}), 2)
    write_timeline(folder, run, lambda _: None)
    events = json.loads(folder.timeline.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "j, replica 0", 1: "j, replica 1"}


def test_a_long_run_keeps_what_is_worth_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_iteration = STAGES * MICROBATCHES * 2
    monkeypatch.setattr(timeline_module, "MOST_EVENTS", 30 * per_iteration)
    folder = OutFolder.claim(tmp_path / "out", force=False)
    write_trace(folder.trace, 500)
    run = run_record(job(), 500)
    run.adaptations = [record(detectable_at=200, applied_at_iteration=202)]
    write_timeline(folder, run, lambda _: None)
    kept = json.loads(folder.timeline.read_text())["otherData"]
    assert kept["iterations_recorded"] == 500
    assert len(kept["iterations"]) == 30
    assert {0, 1, 2, 199, 200, 201, 202, 203, 499} <= set(kept["iterations"])


def test_no_trace_is_said_and_not_drawn(tmp_path: Path) -> None:
    folder = OutFolder.claim(tmp_path / "out", force=False)
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
    made = timelines(TraceIndex.of(tmp_path), drawn, run)
    assert made[0].title.startswith("iteration 3, replica 1, undisturbed")
    assert [len(each.stages) for each in made] == [STAGES] * 3
    assert [op.microbatch for op in made[0].stages[0]][:2] == [0, 0], "of the other column"


def test_a_panel_names_the_plan_that_ran(tmp_path: Path) -> None:
    """Not the one of the change: that may have been taken back by then."""
    write_trace(tmp_path, 8)
    for path in tmp_path.glob("ops-rank*.jsonl"):
        lines = map(json.loads, path.read_text().splitlines())
        ran = [line | {"plan_version": (0, 1, 2)[line["iteration"] // 3]} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in ran))
    panels = choose_panels(list(range(8)), [record()], [])
    drawn = [replace(panel, delays={}) for panel in panels]
    made = timelines(TraceIndex.of(tmp_path), drawn, run_record(job(), 8))
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
    found = messages([sender, receiver], {0: 5.0})
    assert [(m.microbatch, m.sent, m.arrived) for m in found] == [(0, 1, 7), (1, 2, 7.0)]


def test_a_slow_stage_is_shown_with_the_layers_it_should_have() -> None:
    slow = Straggler(stage=1, column=3, seconds=0.015, usual=0.01)
    found = StragglersView(known=True, count=2, slowest=(slow,), paces=(0.01,) * 4)
    assert stragglers_phrase(StragglersView(known=True), 16) == ""
    assert stragglers_phrase(found) == "slow stage 1 x1.5 and 1 more"
    assert stragglers_phrase(found, 16) == "slow stage 1 x1.5 (-17% with 3 layers) and 1 more"
