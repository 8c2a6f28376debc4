"""Reports of a rank, answers of its agent, and the loss of either or of their connection."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pipemorph.detection.job_observer import JobObserver
from pipemorph.detection.link_monitor import ANSWER_SECONDS
from pipemorph.detection.rank_monitor import RankMonitor
from pipemorph.planning import Route
from pipemorph.protocol import (
    DirectiveEnvelope,
    Health,
    LinkHealthReport,
    LinkSample,
    LinkState,
    StageProfile,
    WireTime,
)
from pipemorph.protocol.rank_messages import RankAnswer, RankReport
from pipemorph.spec.mesh import MeshShape

BASE, LATE, WINDOW = 0.006, 0.040, 0.05
PIPELINES = {
    "a stage per rank": MeshShape(6),
    "replicas": MeshShape(6, replicas=2),
    "V": MeshShape(6, stages_per_rank=2, placement="v"),
    "turns": MeshShape(6, stages_per_rank=2, placement="round"),
}


class World:
    """Ranks, their agent, and connections that may be lost. ``delays``: by link and column."""

    def __init__(self, mesh: MeshShape) -> None:
        self.mesh, self.now, self.window = mesh, 1000.0, 0
        self.delays: dict[tuple[int, int], float] = {}
        self.load: dict[str, Any] = {}
        self.cut: set[int] = set()
        """Ranks whose messages are lost."""
        self.reports: list[LinkHealthReport] = []
        self.states: dict[Any, LinkState] = {}
        """States that the host has, by direction."""
        self.monitors = [RankMonitor(mesh, rank) for rank in range(mesh.world_size)]
        self.start_agent()

    def start_agent(self) -> None:
        self.observer = JobObserver(self.mesh, job="j", namespace="n", attempt=0)
        for rank in range(self.mesh.world_size):
            self.connect(rank)
        self.report()

    def connect(self, rank: int) -> None:
        self.monitors[rank].record_connection()
        self.observer.record_connection(rank)
        self.answer()

    def answer(self) -> None:
        connected = set(range(self.mesh.world_size)) - self.cut
        for ranks, answer in self.observer.take_answers(connected):
            arrived = RankAnswer.model_validate_json(answer.to_json())
            for rank in ranks:
                self.monitors[rank].process_answer(arrived, self.now)

    def report(self, **answer: Any) -> None:
        report = self.observer.build_report(len(self.reports) + 1, self.now, 0)
        self.observer.record_delivery(report, DirectiveEnvelope(memory="m", **answer))
        self.reports.append(report)
        for row in report.directions:
            self.states[row.key] = row

    def run(self, windows: int, *, answers: bool = True, silent: bool = False) -> None:
        for _ in range(windows):
            self.now, self.window = self.now + WINDOW, self.window + 1
            for rank, monitor in enumerate(self.monitors):
                monitor.observe_windows([] if silent else self._windows(rank), self.now)
                if monitor.is_report_due(self.now):
                    self.send(rank, monitor.take_changes(self.now))
            self.observer.update_states(self.now, refresh=True)
            self.report()
            if answers:
                self.answer()

    def send(self, rank: int, news: dict[str, Any]) -> None:
        report = RankReport(
            rank=rank, state="training", iteration=0, applied_plan_version=0, **news
        )
        if rank in self.cut:
            return
        arrived = RankReport.model_validate_json(report.to_json())
        assert arrived.find_mismatch(self.mesh) is None
        self.observer.process_report(arrived, self.now)

    def _windows(self, rank: int) -> list[LinkSample]:
        at, found = self.mesh.find_coordinate(rank), []
        for stage in at.held_stages:
            for link, direction in ((stage - 1, "forward"), (stage, "backward")):
                if not 0 <= link < self.mesh.stages - 1 or {link, link + 1} <= set(at.held_stages):
                    continue
                wire = BASE + 1e-5 * (self.window % 7) + self.delays.get((link, at.column), 0.0)
                times = WireTime(count=3, exact=3, min=wire, p50=wire, p99=wire, mean=wire)
                found.append(
                    LinkSample(
                        link=link, replica=at.column, direction=direction, route=Route.DIRECT,  # type: ignore[arg-type]
                        transport="gloo", iteration=self.window, bytes=1, queue_p50=0.0,
                        wire=times, **self.load,
                    )
                )  # fmt: skip
        return found

    def slow(self) -> set[tuple[int, int]]:
        return {key[:2] for key, row in self.states.items() if row.health is Health.SLOW}


@pytest.fixture(params=list(PIPELINES))
def world(request: pytest.FixtureRequest) -> World:
    made = World(PIPELINES[request.param])
    made.run(40)
    assert not made.slow()
    return made


def test_a_slow_link_is_found_in_three_windows_and_forgotten_when_it_is_well(world: World) -> None:
    where = 1, world.mesh.columns - 1
    world.delays[where] = LATE
    world.run(5)
    assert world.slow() == {where}
    world.delays.clear()
    world.run(20)
    assert not world.slow()


def test_while_nothing_changes_ranks_send_no_more_than_heartbeats(world: World) -> None:
    sent: list[RankReport] = []
    hear = world.observer.process_report
    world.observer.process_report = lambda report, now: (sent.append(report), hear(report, now))[1]  # type: ignore[method-assign]
    world.run(400)
    assert len(sent) <= 4 * world.mesh.world_size, "20 s, a heartbeat each 10 s"
    assert not any(each.links or each.suspects for each in sent)


@pytest.mark.parametrize("load", [{"sender_waited": 0.030}, {"sender_inflated": True}])
def test_a_starved_sender_is_no_slow_link_unless_it_lasts(load: dict[str, Any]) -> None:
    world = World(MeshShape(6))
    world.run(40)
    world.delays[1, 0], world.load = LATE, load
    world.run(15)
    assert not world.slow()
    world.run(15)
    assert world.slow() == {(1, 0)}


def test_links_that_are_late_at_once_raise_no_alarm_even_if_the_answer_is_late() -> None:
    """The answer comes after three windows: without waiting for it, all would be slow."""
    world = World(MeshShape(8))
    world.run(40)
    world.delays = {(link, 0): LATE for link in range(7)}
    world.run(5, answers=False)
    assert not world.slow()
    world.answer()
    world.run(1)
    world.delays.clear()
    world.run(20)
    assert not world.slow()


def test_an_alarm_waits_for_an_answer_that_never_comes_for_a_while_only() -> None:
    world = World(MeshShape(8))
    world.run(40)
    world.delays[1, 0] = LATE
    world.run(5, answers=False)
    assert not world.slow()
    world.run(round(ANSWER_SECONDS / WINDOW), answers=False)
    assert world.slow() == {(1, 0)}


@pytest.mark.parametrize("lost", ["connection", "agent"])
def test_lost_states_are_sent_again(world: World, lost: str) -> None:
    where = 1, world.mesh.columns - 1
    world.cut = set(range(world.mesh.world_size))
    world.delays[where] = LATE
    world.run(20)
    assert not world.slow()
    world.cut.clear()
    if lost == "agent":
        world.start_agent()
    else:
        for rank in range(world.mesh.world_size):
            world.connect(rank)
    world.run(2)
    assert world.slow() == {where}


def test_new_ranks_begin_with_the_slow_links_and_old_ones_with_their_own() -> None:
    """A slow link cannot show what is normal."""
    world = World(MeshShape(6))
    world.run(40)
    world.delays[1, 0] = LATE
    world.run(20)
    known = [row.without_windows() for row in world.states.values()]
    assert {row.key[:2] for row in known if row.health is Health.SLOW} == {(1, 0)}
    world.monitors = [RankMonitor(world.mesh, rank) for rank in range(6)]
    world.states.clear()
    world.start_agent()
    world.report(slow=known)
    world.answer()
    world.run(10)
    assert world.slow() == {(1, 0)}
    world.delays.clear()
    world.run(40)
    assert not world.slow()
    world.start_agent()
    world.report(slow=known)
    world.answer()
    world.run(3)
    assert not world.slow(), "it has recovered since, as its ranks know"


def test_what_a_silent_rank_reported_is_unknown_until_it_reports_again() -> None:
    world = World(MeshShape(6))
    world.run(40)
    world.delays[1, 0] = LATE
    world.run(20)
    world.cut = {2}
    world.now += 31.0
    world.run(1)
    health = {row.key: row.health for row in world.states.values()}
    assert health[1, 0, "forward"] is Health.UNKNOWN
    world.cut.clear()
    world.run(3)
    assert world.states[1, 0, "forward"].health is Health.SLOW


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (0.013, [0, 4, 8, 31, 34]),  # The first, enough, a change, in all.
        (0.008, [0, 4, 8, 31]),  # The newest two: nothing that passes makes ops shorter.
    ],
)
def test_medians_of_op_times_are_sent_when_they_differ(then: float, expected: list[int]) -> None:
    monitor = RankMonitor(MeshShape(2), 0)
    monitor.record_connection()
    sent, now = [], 0.0
    for number in range(60):
        now += 1.0
        took = 0.01 if number < 30 else then
        profile = StageProfile(
            stage=0, split="deferred", peak_memory=1,
            forward=took, backward_input=took, backward_weight=took,
        )  # fmt: skip
        monitor.observe_windows([], now, profiles=[profile])
        if monitor.is_report_due(now) and (stages := monitor.take_changes(now)["stages"]):
            sent += [(number, row.forward, row.profiles) for row in stages]
    assert [each[0] for each in sent] == expected
    assert sent[-1][1] == then


ROW = {"link": 0, "health": "slow", "delay": 0.1, "wire_time": 0.1}


@pytest.mark.parametrize(
    "fields",
    [
        {"links": [ROW | {"delay": float("nan")}]},
        {"links": [ROW | {"wire_time": float("inf")}]},
        {"links": [ROW | {"delay": -1.0}]},
        {"links": [ROW | {"recent": [0.1] * 257}]},
        {"links": [ROW | {"bases": {str(i): 0.1 for i in range(5)}}]},
        {"links": [ROW | {"surprise": 1}]},
        {"links": [ROW] * 1025},
        {"suspects": [0] * 513},
        {"stages": [{"stage": 0, "forward": 1e300, "backward_input": 0, "backward_weight": 0}]},
        {"message": "x" * 1025},
        {"state": "dead"},
    ],
)
def test_values_of_no_sense_are_refused(fields: dict[str, Any]) -> None:
    right = {"rank": 1, "state": "training", "iteration": 0, "applied_plan_version": 0}
    RankReport.model_validate(right | {"links": [ROW]})
    with pytest.raises(ValidationError):
        RankReport.model_validate(right | fields)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"links": [ROW | {"link": 3}]}, "link 3; the job has 3"),
        ({"links": [ROW | {"replica": 1}]}, "column 1; the job has 1"),
        ({"links": [ROW | {"direction": "backward"}]}, "a direction that rank 0 receives"),
        ({"suspects": [3]}, "link 3; the job has 3"),
        (
            {"stages": [{"stage": 4, "forward": 1, "backward_input": 1, "backward_weight": 1}]},
            "stage 4; the job has 4",
        ),
    ],
)
def test_a_report_on_what_the_job_or_the_rank_lacks_is_logged(
    fields: dict[str, Any], why: str
) -> None:
    right = {"rank": 1, "state": "training", "iteration": 0, "applied_plan_version": 0}
    found = RankReport.model_validate(right | fields).find_mismatch(MeshShape(4))
    assert found is not None and why in found
