"""A job that is observed in parts, beside the same job observed as a whole: the same states, and
news as soon."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from gate import examples

from pipemorph.api.mesh import MeshShape
from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController
from pipemorph.control.observe.detector import Thresholds
from pipemorph.control.observe.link_book import LinkBook
from pipemorph.control.observe.merge import merged_state
from pipemorph.control.observe.observer import HEARTBEAT_SECONDS, JobTelemetry, Observer
from pipemorph.planning.ir import Route
from pipemorph.wire import (
    Health,
    LinkHealthReport,
    LinkSample,
    LinkState,
    RailSample,
    ReductionSample,
    StageProfile,
    TransportSample,
    WireTime,
)
from pipemorph.wire.parts import PartAnswer, PartReport

WINDOW, ITERATION = 0.05, 10
"""Seconds, and windows."""
BASE, OP, REDUCTION = 0.004, 0.01, 0.02
SETTLED = 80
REPORT = 20
"""Windows of a report's time."""
Key = tuple[int, int, str]


def spec(stages: int, **fields: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "parallelism": {"stages": stages, **fields},
            "schedule": {"microbatches": 4},
            "trainer": {"module": "x", "iterations": 100},
        }
    )


class World:
    """The ranks: what each of them tells in a window."""

    def __init__(self, mesh: MeshShape, seed: int) -> None:
        self.mesh, self.draw = mesh, random.Random(seed)
        self.delays: dict[Key, float] = {}
        self.stall = 0.0
        """Added to all windows."""
        self.computing: dict[tuple[int, int], float] = {}
        """Factors by stage and column."""
        self.reducing: dict[int, float] = {}
        """Seconds added by stage."""
        self.down: set[int] = set()
        """Ranks with a port that is down."""
        self.silent: set[int] = set()
        self.window = 0

    @property
    def iteration(self) -> int:
        return self.window // ITERATION

    def tell(self) -> dict[int, dict[str, Any]]:
        """By rank."""
        self.window += 1
        ends = self.window % ITERATION == 0
        return {
            rank: self._rank(rank, ends)
            for rank in range(self.mesh.world_size)
            if rank not in self.silent
        }

    def _rank(self, rank: int, ends: bool) -> dict[str, Any]:
        at = self.mesh.coordinate(rank)
        stage, column = at.stage, at.column
        links = []
        for link, direction in ((stage - 1, "forward"), (stage, "backward")):
            if not 0 <= link < self.mesh.stages - 1:
                continue
            wire = self.draw.gauss(BASE, 0.02 * BASE) + self.stall
            wire += self.delays.get((link, column, direction), 0.0)
            links.append(
                LinkSample(
                    link=link, replica=column, direction=direction, route=Route.DIRECT,  # type: ignore[arg-type]
                    transport="gloo", iteration=self.iteration, bytes=1, queue_p50=0.0,
                    wire=WireTime(count=2, exact=2, min=wire, p50=wire, p99=wire, mean=wire),
                )
            )  # fmt: skip
        told: dict[str, Any] = {"links": links}
        if ends:
            factor = self.computing.get((stage, column), 1.0)
            ops: dict[str, Any] = {
                name: self.draw.gauss(OP, OP / 100) * factor
                for name in ("forward", "backward_input", "backward_weight")
            }
            told["stages"] = [
                StageProfile(stage=stage, replica=column, split="deferred", peak_memory=rank, **ops)
            ]
            if self.mesh.data_group(column) == column:
                seconds = REDUCTION + self.reducing.get(stage, 0.0)
                told["reductions"] = [
                    ReductionSample(
                        stage=stage, replica=column, iteration=self.iteration, bytes=1 << 20,
                        buckets=4, seconds=seconds, exposed=seconds / 2, waited=seconds,
                    )
                ]  # fmt: skip
            told["rails"] = [
                RailSample(
                    stage=stage, replica=column, device="mlx5_0", port=1, used=True,
                    state="DOWN" if rank in self.down else "ACTIVE",
                    counters={"symbol_error": 0},
                )
            ]  # fmt: skip
            if stage < self.mesh.stages - 1:
                told["transports"] = [
                    TransportSample(
                        link=stage, replica=column, direction="forward", agreed="rdma",
                        transport="tcp" if rank in self.down else "rdma",
                        fallbacks=int(rank in self.down), failbacks=0, reconnects=0,
                    )
                ]  # fmt: skip
        return told


class Observed:
    """A job observed in parts of so many ranks; 0: as a whole. Answers take one window."""

    def __init__(self, spec: JobSpec, ranks: int) -> None:
        self.spec, self.mesh, self.ranks = spec, spec.parallelism.mesh, ranks
        self.controller = JobController(spec)
        self.now, self.sequence = 1000.0, 0
        self.job = self._observer(memory="a")
        parts = self.mesh.world_size // ranks if ranks else 1
        self.parts = {number: self._observer(part=number) for number in range(1, parts)}
        self.waiting: dict[int, list[Callable[[], None]]] = {}
        for number in self.parts:
            self.job.meet(number)
        self.heard: list[PartReport] = []
        self.bytes = 0
        self.reports: list[tuple[float, LinkHealthReport]] = []

    def _observer(self, **fields: Any) -> Observer:
        return Observer(
            self.mesh, job="j", namespace="n", attempt=0, part_ranks=self.ranks, **fields
        )

    def step(self, told: dict[int, dict[str, Any]], iteration: int) -> None:
        self.now += WINDOW
        for late in [self.waiting.pop(number) for number in list(self.waiting)]:
            for deliver in late:
                deliver()
        for number, part in self.parts.items():
            own = range(number * self.ranks, (number + 1) * self.ranks)
            self._observe(part, own, told, iteration)
            if part.due(self.now):
                self._hear(number, part)
        whole = range(self.ranks or self.mesh.world_size)
        self._observe(self.job, whole, told, iteration)
        for number, answer in self.job.answers(self.parts.keys()):
            body = answer.body()
            self._later(number, lambda n=number, b=body: self._take(n, b))  # type: ignore[misc]
        if self.job.due(self.now):
            self.sequence += 1
            report = self.job.report(self.sequence, self.now, 0)
            arrived = LinkHealthReport.model_validate_json(report.body())
            self.job.delivered(report, self.controller.report(arrived, self.now), self.now)
            self.reports.append((self.now, arrived))

    def _observe(
        self, observer: Observer, ranks: range, told: dict[int, dict[str, Any]], iteration: int
    ) -> None:
        rows: dict[str, Any] = {}
        for rank in ranks:
            for name, found in told.get(rank, {}).items():
                rows.setdefault(name, []).extend(found)
        ports = len(ranks) if iteration > 0 else None
        observer.observe(JobTelemetry(iteration=iteration, ports=ports, **rows), self.now)

    def _hear(self, number: int, part: Observer) -> None:
        self.sequence += 1
        report = part.report(self.sequence, self.now, 0)
        body = report.body()
        arrived = PartReport.model_validate_json(body)
        assert self.job.misfit(arrived) is None
        self.job.hear(arrived, self.now)
        part.told(report)
        self.heard.append(arrived)
        self.bytes += len(body)

    def _later(self, number: int, answer: Callable[[], None]) -> None:
        self.waiting.setdefault(number, []).append(answer)

    def _take(self, number: int, body: bytes) -> None:
        self.parts[number].take(PartAnswer.model_validate_json(body), self.now)

    def restart(self, number: int | None = None) -> None:
        """Start the agent of a part anew, or the job's."""
        if number is not None:
            self.parts[number] = self._observer(part=number)
            self.waiting.pop(number, None)
            self.job.meet(number)
            return
        self.job = self._observer(memory=f"{self.now}")
        self.waiting.clear()
        for part in self.parts:
            self.job.meet(part)

    def health(self) -> list[Health]:
        return [link.health for link in self.controller.links(self.now)]

    def slow(self) -> set[Key]:
        rows = self.controller._observed.links.slow_directions()
        return {(row.link, row.replica, row.direction) for row in rows}


class Twins:
    """One world, observed as a whole and in parts."""

    def __init__(self, stages: int, ranks: int, seed: int = 1, **sizes: Any) -> None:
        job = spec(stages, **sizes)
        self.world = World(job.parallelism.mesh, seed)
        self.whole, self.parts = Observed(job, 0), Observed(job, ranks)

    def run(self, windows: int) -> None:
        for _ in range(windows):
            told = self.world.tell()
            for each in (self.whole, self.parts):
                each.step(told, self.world.iteration)

    def until_slow(self, keys: set[Key], most: int = 100) -> None:
        """Run until both hosts know of these directions, with parts a window later or none."""
        known: list[int | None] = [None, None]
        for window in range(most):
            self.run(1)
            for i, each in enumerate((self.whole, self.parts)):
                if known[i] is None and keys <= each.slow():
                    known[i] = window
            if known[0] is not None and known[1] is not None:
                assert known[1] - known[0] <= 1, "later than without parts"
                return
        pytest.fail(f"{keys} are slow after {known} windows, of {most}")

    def agree(self) -> None:
        """That both hosts have the same states."""
        one, other = self.whole, self.parts
        assert other.health() == one.health()
        assert other.slow() == one.slow()
        for mine, theirs in zip(
            one.controller.links(one.now), other.controller.links(other.now), strict=True
        ):
            assert theirs.delay == pytest.approx(mine.delay, rel=0.15, abs=5e-4)
            assert theirs.wire_time == pytest.approx(mine.wire_time, rel=0.15, abs=5e-4)
        views = [each.controller.view(each.now) for each in (one, other)]
        assert views[1].rails == views[0].rails
        assert views[1].transports == views[0].transports
        slow = [{(r.stage, r.replica) for r in v.reductions if r.slow} for v in views]
        assert slow[1] == slow[0]
        named = [{(s.stage, s.column) for s in v.stragglers.slowest} for v in views]
        assert named[1] == named[0]
        times = [each.controller._observed.stages.times() for each in (one, other)]
        assert times[0] is not None and times[1] is not None
        for mine, theirs in zip(*times, strict=True):
            assert theirs.forward == pytest.approx(mine.forward, rel=0.03)


SHAPES = [
    pytest.param({"stages": 4, "ranks": 2, "replicas": 2}, id="a stage per part"),
    pytest.param({"stages": 4, "ranks": 1, "replicas": 2}, id="half a stage per part"),
    pytest.param(
        {"stages": 4, "ranks": 4, "tensor": 2, "order": ["pp", "tp"]},
        id="several stages per part",
    ),
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_slow_link_is_known_as_soon_as_without_parts(shape: dict[str, Any]) -> None:
    job = Twins(**shape)
    job.run(SETTLED)
    job.agree()
    assert job.parts.health() == [Health.HEALTHY] * 3
    late: set[Key] = {(1, 1, "forward"), (1, 1, "backward")}
    job.world.delays = dict.fromkeys(late, 0.03)
    job.until_slow(late)
    job.run(REPORT)
    job.agree()
    job.world.delays = dict.fromkeys(late, 0.06)
    job.run(3 * REPORT)
    job.agree()
    assert job.parts.controller.links(job.parts.now)[1].delay == pytest.approx(0.06, rel=0.1)
    job.world.delays.clear()
    job.run(2 * REPORT)
    job.agree()
    assert job.parts.health() == [Health.HEALTHY] * 3


@pytest.mark.parametrize("seed", range(examples(2)))
def test_drawn_faults_are_judged_as_without_parts(seed: int) -> None:
    draw = random.Random(seed)
    job = Twins(seed=seed, **draw.choice(SHAPES).values[0])  # type: ignore[arg-type]
    world, mesh = job.world, job.world.mesh
    job.run(SETTLED)
    for _ in range(4):
        fault = draw.choice(["link", "link", "straggler", "reduction", "rail", "stall", "well"])
        stage, column = draw.randrange(mesh.stages), draw.randrange(mesh.columns)
        if fault == "link":
            direction = draw.choice(["forward", "backward"])
            world.delays[min(stage, mesh.stages - 2), column, direction] = draw.uniform(0.02, 0.1)
        elif fault == "straggler":
            world.computing[stage, column] = draw.uniform(1.5, 2.0)
        elif fault == "reduction":
            world.reducing[stage] = 0.08
        elif fault == "rail":
            world.down.add(mesh.rank(stage, column))
        elif fault == "stall":
            world.stall = 0.05
            job.run(5)
            world.stall = 0.0
        else:
            for faults in (world.delays, world.computing, world.reducing):
                faults.clear()
        job.run(12 * ITERATION + 4 * REPORT)
        job.agree()


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"stages": 6, "ranks": 1, "replicas": 2}, id="half a stage per part"),
        pytest.param(
            {"stages": 6, "ranks": 4, "replicas": 4}, id="a stage per part", marks=pytest.mark.full
        ),
        pytest.param(
            {"stages": 6, "ranks": 4, "tensor": 2, "replicas": 2,
             "order": ["dp_replicate", "pp", "tp"]},
            id="several stages per part", marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_a_stall_of_all_links_makes_none_slow(shape: dict[str, Any]) -> None:
    job = Twins(**shape)
    job.run(SETTLED)
    for _ in range(2):
        job.world.stall = 0.05
        job.run(8)
        job.world.stall = 0.0
        assert (job.whole.slow(), job.parts.slow()) == (set(), set())
        job.run(SETTLED)
    job.world.stall = 0.05
    job.run(120)
    job.agree()
    assert job.parts.health() == [Health.SLOW] * 5, "but they are slow if that lasts"


def test_a_link_that_is_slow_from_the_start_is_told_from_those_of_other_parts() -> None:
    """In its own part there is nobody to compare with."""
    job = Twins(stages=4, ranks=1)
    job.world.delays = {(1, 0, "forward"): 0.05}
    job.run(3 * REPORT)
    assert job.whole.slow() == {(1, 0, "forward")}
    job.agree()


def test_a_reduction_that_is_slow_from_the_start_is_told_from_those_of_other_parts() -> None:
    job = Twins(stages=4, ranks=2, replicas=2)
    job.world.reducing = {2: 0.1}
    job.run(12 * ITERATION)
    job.agree()
    (slow,) = [each for each in job.parts.controller.view(job.parts.now).reductions if each.slow]
    assert slow.stage == 2


def test_while_nothing_changes_parts_are_silent() -> None:
    job = Twins(stages=4, ranks=2, replicas=2)
    job.run(3 * SETTLED)
    before = len(job.parts.heard)
    job.run(400)
    told = job.parts.heard[before:]
    beats = 3 * 20 / HEARTBEAT_SECONDS
    assert len(told) <= 2 * beats
    assert max(len(each.body()) for each in told) < 1000


def test_the_jobs_agent_that_starts_anew_hears_all_again() -> None:
    job = Twins(stages=4, ranks=2, replicas=2)
    job.run(SETTLED)
    late: set[Key] = {(2, 1, "forward")}
    job.world.delays = dict.fromkeys(late, 0.03)
    job.run(SETTLED)
    job.agree()
    job.parts.restart()
    del job.world.delays[2, 1, "forward"]
    job.world.delays[1, 0, "backward"] = 0.03
    job.run(int(HEARTBEAT_SECONDS / WINDOW) + SETTLED)
    job.agree()
    assert job.parts.slow() == {(1, 0, "backward")}


@pytest.mark.parametrize("both", [False, True], ids=["its own", "and the job's"])
def test_a_parts_agent_that_starts_anew_learns_what_was_slow(both: bool) -> None:
    """Of two stages: nobody to compare with, so that it cannot tell by itself."""
    job = Twins(stages=2, ranks=1)
    job.run(SETTLED)
    job.world.delays = {(0, 0, "forward"): 0.03}
    job.run(SETTLED)
    job.parts.restart(1)
    if both:
        job.parts.restart()
    job.run(SETTLED)
    assert job.parts.slow() == {(0, 0, "forward")}
    assert job.parts.controller.links(job.parts.now)[0].delay == pytest.approx(0.03, rel=0.1)
    job.world.delays.clear()
    job.run(SETTLED)
    assert job.parts.slow() == set()


def test_what_a_part_told_that_is_silent_is_unknown() -> None:
    job = Twins(stages=4, ranks=1)
    job.run(SETTLED)
    job.world.delays = {(2, 0, "forward"): 0.03}
    job.run(SETTLED)
    gone = job.parts.parts.pop(3)
    job.run(int(55 / WINDOW))
    assert job.parts.slow() == {(2, 0, "forward")}
    assert job.parts.health()[2] in (Health.UNKNOWN, Health.HEALTHY)
    assert 3 not in {number for rests in job.parts.job._parts.rests for number in rests}
    job.parts.parts[3] = gone
    job.run(SETTLED)
    assert job.parts.health()[2] is Health.SLOW


def test_other_settings_reach_all_parts() -> None:
    job = Observed(spec(4, replicas=2), 2)
    world = World(job.mesh, 1)
    for _ in range(SETTLED):
        job.step(world.tell(), world.iteration)
    edited = job.spec.model_copy(
        update={"adaptation": job.spec.adaptation.model_copy(update={"min_delay_ms": 50.0})}
    )
    job.controller = JobController.restore(edited, job.controller.snapshot())
    for _ in range(2 * REPORT):
        job.step(world.tell(), world.iteration)
    found = {part._settings.min_delay for part in (job.job, *job.parts.values())}
    assert found == {0.05}


def test_a_report_on_what_another_part_receives_is_refused() -> None:
    observer = Observed(spec(4, replicas=2), 2).job
    report = {
        "protocol": 6, "job": "j", "namespace": "n", "attempt": 0, "sequence": 1, "sent_at": 1.0,
        "state": "training", "iteration": 0, "observed_plan_version": 0,
        "applied_plan_version": 0,
    }  # fmt: skip
    for fields, why in (
        ({"part": 4}, "part 4; the job has parts 1 to 3"),
        ({"part": 0}, "part 0; the job has parts 1 to 3"),
        ({"part": 1, "late": [3]}, "link 3; the job has 3"),
        ({"part": 1, "paces": [{"stage": 1, "column": 2, "seconds": 1}]}, "column 2"),
        ({"part": 1, "directions": [{"link": 0, "health": "slow", "direction": "backward"}]},
         "part 1 on what part 0 has"),
        ({"part": 1, "paces": [{"stage": 2, "column": 0, "seconds": 1}]},
         "part 1 on what part 2 has"),
        ({"part": 1, "reductions": [{"stage": 0, "replica": 0, "where": "", "slow": False,
                                     "seconds": 1, "normal": 1, "exposed": 1, "bytes": 1}]},
         "part 1 on what part 0 has"),
    ):  # fmt: skip
        found = observer.misfit(PartReport.model_validate(report | fields))
        assert found is not None and why in found
    right = {
        "part": 1,
        "directions": [{"link": 0, "health": "slow", "replica": 1}],
    }
    assert observer.misfit(PartReport.model_validate(report | right)) is None


def test_the_state_of_a_job_is_that_of_its_slowest_part() -> None:
    assert merged_state(["training", "starting"], missing=False) == "starting"
    assert merged_state(["finished", "training"], missing=False) == "training"
    assert merged_state(["training"], missing=True) == "training"
    assert merged_state(["starting"], missing=True) == "starting"
    assert merged_state(["finished", "failed"], missing=False) == "failed"
    assert merged_state(["finished"], missing=False) == "finished"


def test_of_a_link_in_several_parts_the_worst_is_told() -> None:
    book = LinkBook(MeshShape(2, 4), thresholds=Thresholds(), stale_after=30.0)
    told = [
        LinkState(0, Health.HEALTHY, wire_time=wire, confidence=sure, since_iteration=since,
                  replica=column, direction="backward")
        for column, (wire, sure, since) in enumerate(
            [(0.01, 0.9, 3), (0.03, 0.99, None), (0.02, 0.8, 7)]
        )
    ]  # fmt: skip
    found = book.rest(0, 1000.0, told)
    assert (found.wire_time, found.replica, found.direction) == (0.03, 1, "backward")
    assert (found.confidence, found.since_iteration) == (0.8, 7)
    unknown = LinkState(0, Health.UNKNOWN)
    assert book.rest(0, 1000.0, [unknown]).health == "unknown"
    assert book.rest(0, 1000.0, [unknown, told[0]]) == told[0]


def test_what_parts_tell_of_links_that_stay_well_is_looked_at_once_a_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look walks what all parts have told of the link. That one is not well any more is seen at
    once."""
    looked: list[int] = []
    rest = LinkBook.rest

    def counted(self: LinkBook, link: int, *rest_of: Any) -> LinkState:
        looked.append(link)
        return rest(self, link, *rest_of)

    monkeypatch.setattr(LinkBook, "rest", counted)
    mesh, now = MeshShape(2, 8), 1000.0
    job = Observer(mesh, job="j", namespace="n", attempt=0, part_ranks=2)

    def hear(sequence: int, **state: Any) -> None:
        told = {"link": 0, "replica": 0, "wire_time": BASE, "confidence": 0.9} | state
        report = {
            "protocol": 6, "job": "j", "namespace": "n", "attempt": 0, "part": 4, "sent_at": now,
            "sequence": sequence, "state": "training", "iteration": 1, "links": [told],
            "observed_plan_version": 0, "applied_plan_version": 0,
        }  # fmt: skip
        job.hear(PartReport.model_validate(report), now)

    hear(1, health="healthy")
    assert looked == [0], "it is news that it is well"
    for sequence in range(2, 20):
        hear(sequence, health="healthy", wire_time=BASE * sequence)
    assert looked == [0]
    job.observe(JobTelemetry(iteration=1, ports=0), now + 1)
    assert len(looked) > 1
    (link,) = job.report(1, now + 1, 0).links
    assert link.wire_time == pytest.approx(19 * BASE), "the newest"
    looked.clear()
    hear(20, health="unknown")
    assert looked == [0]
