"""Reports of an agent to its host: from telemetry of ranks to reports, and again after a restart of
either."""

from __future__ import annotations

from typing import Any

import pytest
from observing import Agent, report

from pipemorph.control import Health, JobController
from pipemorph.detection.job_observer import ATTENTIVE_ITERATIONS, JobObserver
from pipemorph.planning.ir import Route
from pipemorph.protocol import (
    MAX_REPORT_BYTES,
    MOST_SLOW,
    DirectiveEnvelope,
    IterationSample,
    LinkHealthReport,
    LinkSample,
    RailSample,
    StageProfile,
    WireTime,
)
from pipemorph.protocol.rank_messages import RankReport
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.mesh import MeshShape

BASE, LATE = 0.0012345678901234, 0.03
WINDOW = 0.05
SETTLED = 75
"""Windows after which nothing is new in a job whose links do not change."""


def spec(stages: int = 4, replicas: int = 1, **fields: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "parallelism": {"stages": stages, "replicas": replicas},
            "schedule": {"microbatches": 4},
            "trainer": {"module": "x", "iterations": 100},
        }
        | fields
    )


class Job:
    """A job whose ranks send a window of every direction each 50 ms, and its agent, which reports
    when that is due."""

    def __init__(self, spec: JobSpec) -> None:
        self.spec = spec
        self.controller = JobController(spec)
        self.agent = Agent(spec, paced=True)
        self.delays: dict[tuple[int, int], float] = {}
        """Delays by link and column."""
        self.now = 1000.0
        self.iteration, self.plan = 1000, 0
        self.reports: list[LinkHealthReport] = []
        self.sizes: list[int] = []

    def windows(self) -> list[LinkSample]:
        cut = self.spec.parallelism
        return [
            LinkSample(
                link=link, replica=column, direction=direction, route=Route.DIRECT,  # type: ignore[arg-type]
                transport="gloo", iteration=self.iteration, bytes=1, queue_p50=0.0,
                wire=WireTime(count=2, exact=2, min=wire, p50=wire, p99=wire, mean=wire),
            )
            for link in range(cut.stages - 1)
            for column in range(cut.mesh.columns)
            for wire in [BASE + self.delays.get((link, column), 0.0)]
            for direction in ("forward", "backward")
        ]  # fmt: skip

    def run(self, windows: int, **telemetry: Any) -> list[LinkHealthReport]:
        """Returns the reports of this many windows. ``telemetry``: added to each."""
        before = len(self.reports)
        for _ in range(windows):
            self.now += WINDOW
            self.tell(links=self.windows(), **telemetry)
        return self.reports[before:]

    def tell(self, **telemetry: Any) -> None:
        if self.agent.observe(self.now, iteration=self.iteration, **telemetry):
            self.send()

    def send(self) -> None:
        self.agent.sequence += 1
        sent = self.agent.observer.build_report(self.agent.sequence, self.now, 0)
        body = sent.to_json()
        self.sizes.append(len(body))
        arrived = LinkHealthReport.model_validate_json(body)
        self.agent.observer.record_delivery(sent, self.controller.process_report(arrived, self.now))
        self.reports.append(arrived)

    def health(self) -> list[Health]:
        return [link.health for link in self.controller.get_link_states(self.now)]


def test_while_nothing_changes_there_is_one_short_report_a_second() -> None:
    job = Job(spec(16, 4))
    job.run(SETTLED)
    assert job.health() == [Health.HEALTHY] * 15
    quiet = job.run(200)
    assert len(quiet) == 10
    assert all(not (each.links or each.directions) for each in quiet)
    assert max(job.sizes[-10:]) < 500


def test_a_host_of_many_jobs_receives_fewer_reports_but_for_what_is_urgent() -> None:
    job = Job(spec())
    job.run(SETTLED)
    agent, receive = job.agent.observer, job.controller.process_report

    def report(sent: LinkHealthReport, now: float) -> DirectiveEnvelope:
        return receive(sent, now).model_copy(update={"seldom": 2.5})

    job.controller.process_report = report  # type: ignore[method-assign]
    job.run(50)
    assert agent.report_seconds == 2.5
    assert len(job.run(500)) == 10
    job.delays[1, 0] = LATE
    (alarm,) = job.run(3)
    assert {(row.link, row.health) for row in alarm.directions} == {(1, "slow")}


def test_a_link_that_turns_slow_or_well_is_reported_with_the_window_that_shows_it() -> None:
    job = Job(spec())
    job.run(SETTLED)
    job.delays[1, 0] = LATE
    (alarm,) = job.run(3)
    assert {(row.link, row.health) for row in alarm.directions} == {(1, "slow")}
    assert alarm.directions[0].delay == pytest.approx(LATE, rel=0.01)
    assert alarm.directions[0].bases == {"direct": pytest.approx(BASE, rel=0.01)}
    assert job.health()[1] is Health.SLOW
    # The delay is known: there is nothing to add.
    assert len(job.run(40)) <= 2
    del job.delays[1, 0]
    reports = job.run(12)
    assert job.health() == [Health.HEALTHY] * 3
    assert {row.health for row in reports[-1].directions} == {"healthy"}
    assert not job.controller._job_state.links.any_slow


def test_a_delay_that_changes_is_reported_at_once_and_noise_is_not() -> None:
    job = Job(spec())
    job.run(SETTLED)
    job.delays[1, 0] = LATE
    job.run(60)
    job.delays[1, 0] = 1.02 * LATE
    assert len(job.run(100)) <= 6, "a fiftieth is no reason to report"
    job.delays[1, 0] = 1.5 * LATE
    reports = job.run(5)
    assert reports and job.controller.get_link_states(job.now)[1].delay > 1.25 * LATE


def test_iterations_are_reported_at_once_only_while_a_decision_may_wait_for_them() -> None:
    job = Job(spec())
    reports: list[tuple[int, list[int]]] = []

    def train(count: int) -> int:
        before = len(job.reports)
        for _ in range(count):
            job.now += 0.2
            job.iteration += 1
            done = IterationSample(
                index=job.iteration - 1, seconds=0.2, loss=1.0, plan_version=0, bubble_fraction=0.1
            )
            job.tell(links=job.windows(), iterations=[done], applied_plan_version=job.plan)
        reports.extend((r.iteration, [i.index for i in r.iterations]) for r in job.reports[before:])
        return len(job.reports) - before

    assert train(ATTENTIVE_ITERATIONS) >= ATTENTIVE_ITERATIONS, "a job that starts"
    train(10)
    assert train(100) == pytest.approx(20, abs=1), "and one that goes on"
    job.plan = 1
    assert train(ATTENTIVE_ITERATIONS) >= ATTENTIVE_ITERATIONS, "after a change of the plan"
    train(10)
    assert train(100) == pytest.approx(20, abs=1)
    job.delays[1, 0] = LATE
    train(5)
    assert train(20) == 20, "while a link is slow"
    indices = [index for _, found in reports for index in found]
    assert indices == list(range(1000, 1000 + len(indices))), "each once, and in order"


def test_reports_are_bounded_and_slow_directions_come_before_links() -> None:
    """A third of the links of a large job turn slow at once."""
    job = Job(spec(32, 32))
    job.run(20)
    assert job.health() == [Health.HEALTHY] * 31
    job.delays = {(link, column): LATE for link in range(11) for column in range(32)}
    slow = 2 * len(job.delays)
    assert slow > MOST_SLOW
    reports = job.run(16)
    assert max(job.sizes) <= MAX_REPORT_BYTES
    assert all(len(each.directions) <= MOST_SLOW for each in reports)
    first = [len(each.directions) for each in reports if each.directions]
    assert sum(first) >= slow
    for each in reports:
        waiting = each.directions and each is not reports[-1]
        assert not (waiting and each.links) or each.directions[-1].health == "slow"
    assert job.health() == [Health.SLOW] * 11 + [Health.HEALTHY] * 20


def test_a_host_that_has_lost_its_memory_receives_everything_again() -> None:
    job = Job(spec())
    port = RailSample(stage=0, device="mlx5_0", port=1, state="ACTIVE", counters={"x": 1})
    profile = {"forward": 0.01, "backward_input": 0.01, "backward_weight": 0.01}
    stages = [StageProfile(stage=i, split="deferred", peak_memory=1, **profile) for i in range(4)]  # type: ignore[arg-type]
    job.run(SETTLED, rails=[port], ports=1, stages=stages)
    job.delays[1, 0] = LATE
    job.run(SETTLED, rails=[port], ports=1, stages=stages)
    before = job.controller.get_job_view(job.now)
    job.controller = JobController.from_snapshot(job.spec, job.controller.take_snapshot())
    assert job.health() == [Health.UNKNOWN] * 3
    job.run(21, ports=1)
    after = job.controller.get_job_view(job.now)
    assert (after.links, after.rails, after.transports) == (
        before.links,
        before.rails,
        before.transports,
    )
    assert job.controller._job_state.stages.all_measured
    assert (after.rails.ports, after.links[1].health) == (1, Health.SLOW)


def test_a_host_that_has_lost_its_memory_gets_the_last_iterations_again() -> None:
    job = Job(spec())

    def train(*indices: int) -> list[int]:
        before = len(job.reports)
        for index in indices:
            job.now += 1.0
            job.iteration = index + 1
            done = IterationSample(
                index=index, seconds=1.0, loss=1.0, plan_version=0, bubble_fraction=0.1
            )
            job.tell(links=job.windows(), iterations=[done])
        return [each.index for report in job.reports[before:] for each in report.iterations]

    assert train(*range(8)) == list(range(8)), "each once"
    job.controller = JobController.from_snapshot(job.spec, job.controller.take_snapshot())
    assert train(8) == [8], "the answer to this report shows that the host has restarted"
    assert train(9) == [*range(8), 9], "in order, and not the one that it has got"
    assert train(10) == [10]


def test_an_agent_that_starts_anew_learns_of_slow_links_from_its_host() -> None:
    """Holds also for a host that has restarted as well: slow links are in its snapshot."""
    for restarts in (False, True):
        job = Job(spec())
        job.run(SETTLED)
        job.delays[1, 0] = LATE
        job.run(SETTLED)
        if restarts:
            job.controller = JobController.from_snapshot(job.spec, job.controller.take_snapshot())
        sequence, job.agent = job.agent.sequence, Agent(job.spec, paced=True)
        job.agent.observer._is_first_report = True
        job.agent.sequence = sequence
        job.tell()
        assert job.reports[-1].fresh
        job.run(SETTLED)
        assert job.health() == [Health.HEALTHY, Health.SLOW, Health.HEALTHY]
        assert job.controller.get_link_states(job.now)[1].delay == pytest.approx(LATE, rel=0.05)
        del job.delays[1, 0]
        job.run(SETTLED)
        assert job.health() == [Health.HEALTHY] * 3


def test_without_that_an_agent_takes_a_slow_link_of_two_stages_for_normal() -> None:
    """The link has no peer to compare with: the case above is not found in another way."""
    job = Job(spec(2))
    job.run(SETTLED)
    job.delays[0, 0] = LATE
    job.run(SETTLED)
    job.agent = Agent(job.spec, paced=True)
    job.agent.sequence = 10_000
    job.run(SETTLED)
    assert job.agent.observer._links.any_slow is False


def test_other_settings_of_the_spec_reach_the_agent_with_the_next_answer() -> None:
    job = Job(spec(adaptation={"minDelayMs": 50}))
    job.run(SETTLED)
    job.delays[1, 0] = LATE
    job.run(SETTLED)
    assert job.health() == [Health.HEALTHY] * 3, "30 ms are less than 50"
    edited = spec(adaptation={"minDelayMs": 5})
    controller = JobController.from_snapshot(edited, job.controller.take_snapshot())
    controller.take_over_from(job.controller)
    job.controller = controller
    del job.delays[1, 0]
    job.run(600)
    job.delays[1, 0] = LATE
    job.run(SETTLED)
    assert job.health() == [Health.HEALTHY, Health.SLOW, Health.HEALTHY]
    revisions = {each.settings for each in job.reports[-20:]}
    assert revisions == {controller._job_state._settings.revision}


def test_a_report_that_was_lost_is_sent_again() -> None:
    job = Job(spec())
    job.run(SETTLED)
    job.delays[1, 0] = LATE
    for _ in range(4):
        job.now += WINDOW
        job.agent.observe(job.now, iteration=job.iteration, links=job.windows())
    lost = job.agent.observer.build_report(10_000, job.now, 0)
    assert lost.directions
    job.agent.sequence = 10_001
    job.run(1)
    assert job.health()[1] is Health.SLOW


def test_a_report_of_another_job_shape_changes_nothing() -> None:
    job = Job(spec())
    job.run(SETTLED)
    before = job.controller.get_job_view(job.now)
    for field, wrong in (
        ("directions", [{"link": 3, "health": "slow", "replica": 0, "direction": "forward"}]),
        ("links", [{"link": 0, "health": "healthy", "replica": 1}]),
        ("stages", [{"stage": 4, "forward": 1, "backward_input": 1, "backward_weight": 1}]),
    ):
        with pytest.raises(Exception, match=rf"{field}\[0\]\.(link|replica|stage): is"):
            job.controller.process_report(report(10_000, **{field: wrong}), job.now)
    assert job.controller.get_job_view(job.now) == before


def test_rank_0_receives_iterations_once_the_host_has_them() -> None:
    made = JobObserver(MeshShape(2), job="job", namespace="default", attempt=0)
    made.record_connection(0)
    made.record_connection(1)
    made.take_answers([0, 1])
    for index in (7, 5, 6, 6):
        sample = IterationSample(
            index=index, seconds=1.0, plan_version=0, loss=2.0, bubble_fraction=0.0
        )
        made.process_report(
            RankReport(
                rank=0, state="training", iteration=8, applied_plan_version=0,
                finished_iteration=sample,
            ), 1.0,
        )  # fmt: skip
    report = made.build_report(1, 1.0, 0)
    assert [each.index for each in report.iterations] == [5, 6, 7]
    assert made.take_answers([0, 1]) == []
    made.record_delivery(report, DirectiveEnvelope())
    assert made.take_answers([1]) == []
    ((ranks, answer),) = made.take_answers([0, 1])
    assert (ranks, answer.reported, answer.settings) == ([0], [5, 6, 7], None)
    assert made.take_answers([0, 1]) == []
