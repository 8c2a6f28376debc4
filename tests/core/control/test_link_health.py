"""Health of the links of one job together: a machine that stalls is not a link that is slow."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pytest
from gate import examples

from pipemorph.control.job_state.reports import LinkTable
from pipemorph.detection.job_links import FEWEST_LINKS
from pipemorph.detection.job_observer import JobObserver
from pipemorph.planning import Route
from pipemorph.protocol import (
    DirectiveEnvelope,
    Health,
    LinkSample,
    LinkState,
    StageProfile,
    WireTime,
)
from pipemorph.replay.replayed_ranks import JobTelemetry, ReplayedRanks
from pipemorph.spec.mesh import MeshShape

BASE, LONGEST_OP = 0.006, 0.01
LINKS = 7


class Job:
    """A job's links, reported every 50 ms; ``late(link)`` seconds are added to a window."""

    def __init__(self, links: int = LINKS, seed: int = 0) -> None:
        self.links = links
        mesh = MeshShape(links + 1)
        self.table = LinkTable(mesh, stale_after=30.0)
        self.observer = JobObserver(mesh, job="j", namespace="n", attempt=0)
        self.ranks = ReplayedRanks(mesh, self.observer)
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.windows = 0
        self.slow_seen: set[int] = set()
        self.compute()
        self.run(60)
        assert self.slow() == set()

    def run(self, windows: int, late: Callable[[int], float] = lambda link: 0.0) -> None:
        for _ in range(windows):
            self.now += 0.05
            self.windows += 1
            self.report([self.sample(i, d, late(i)) for i in range(self.links) for d in (0, 1)])

    def report(self, samples: list[LinkSample], stages: Sequence[StageProfile] = ()) -> None:
        """Let the ranks judge windows, and the table receive their agent's report."""
        telemetry = JobTelemetry(links=samples, stages=stages, iteration=self.windows)
        self.ranks.process_telemetry(telemetry, self.now, refresh=True)
        report = self.observer.build_report(1, self.now, 0)
        self.observer.record_delivery(report, DirectiveEnvelope(memory="m"))
        self.table.process_states(report.directions, report.links, self.now)
        self.slow_seen |= self.slow()

    def compute(self, inflated: Collection[int] = ()) -> None:
        """Ops of 10 ms on all stages; twice as long on some."""
        self.report([], [
            StageProfile(
                stage=stage, split="deferred", peak_memory=0,
                forward=took, backward_input=took / 2, backward_weight=took / 2,
            )
            for stage in range(self.links + 1)
            for took in [0.02 if stage in inflated else 0.01]
        ])  # fmt: skip

    def states(self) -> tuple[LinkState, ...]:
        return self.table.get_states(self.now)

    def sample(self, link: int, direction: int, late: float) -> LinkSample:
        value = max(1e-4, self.rng.gauss(BASE, 0.0005)) + late
        direction_name: Any = ("forward", "backward")[direction]
        return LinkSample(
            link=link, direction=direction_name, route=Route.DIRECT, transport="gloo",
            iteration=self.windows, bytes=1, queue_p50=0.0,
            wire=WireTime(count=2, exact=2, min=value, p50=value, p99=value, mean=value),
        )  # fmt: skip

    def slow(self) -> set[int]:
        states = self.states()
        return {s.link for s in states if s.health is Health.SLOW}

    def until_slow(self, links: set[int], late: Callable[[int], float], most: int) -> int:
        """Windows until these links, and no others, are slow."""
        for window in range(1, most + 1):
            self.run(1, late)
            if self.slow() == links:
                return window
        raise AssertionError(f"{self.slow()} are slow after {most} windows, not {links}")


@pytest.mark.parametrize(
    ("route", "spacing", "transfer"),
    [
        (Route.DELEGATED, 0.040, 0.040),
        (Route.DELEGATED, 0.060, 0.046),  # At most the whole wire time.
        (Route.DELEGATED, 0.010, 0.0),  # Nine queues were busy: a delay.
        (Route.DELEGATED, None, 0.0),
        (Route.DIRECT, 0.046, 0.0),  # A single queue: always apart from each other.
    ],
)
def test_a_narrow_link_is_one_on_which_messages_wait_for_each_other(
    route: Route, spacing: float | None, transfer: float
) -> None:
    job = Job()
    job.until_slow({2}, lambda link: 0.040 if link == 2 else 0.0, 5)
    for _ in range(30):
        job.now += 0.05
        fields = {"route": route, "spacing": spacing}
        samples = [job.sample(2, d, 0.040).model_copy(update=fields) for d in (0, 1)]
        job.report(samples)
    state = job.states()[2]
    assert state.transfer == pytest.approx(transfer, abs=0.002)
    job.run(60)
    assert job.states()[2].transfer == 0.0, "the link is well"


@pytest.mark.parametrize(
    ("delay", "spacing", "transfer"),
    [
        (0.090, 0.095, 0.095),  # Narrower.
        (0.020, 0.025, 0.025),  # Less narrow.
        (0.075, 0.003, 0.0),  # No longer narrow, but delayed.
        (0.075, None, 0.0),
    ],
)
def test_a_narrow_link_has_another_state_after_a_step(
    delay: float, spacing: float | None, transfer: float
) -> None:
    """Delegated, so that it shows in spacings only. Nothing is said before it is known."""
    job = Job()
    job.until_slow({2}, lambda link: 0.045 if link == 2 else 0.0, 5)

    def windows(count: int, late: float, apart: float | None) -> Iterator[LinkState]:
        for _ in range(count):
            job.now += 0.05
            fields = {"route": Route.DELEGATED, "spacing": apart}
            job.report([job.sample(2, d, late).model_copy(update=fields) for d in (0, 1)])
            yield job.states()[2]

    *_, before = windows(60, 0.045, 0.050)
    assert before.transfer == pytest.approx(0.050, abs=0.002)
    states = [state for state in windows(40, delay, spacing) if not state.in_doubt]
    assert states[-1].transfer == pytest.approx(transfer, abs=0.002)
    stepped = [state for state in states if abs(state.delay - delay) < 0.005]
    assert len(stepped) > 15
    assert {round(state.transfer, 2) for state in stepped} == {round(transfer, 2)}


@pytest.mark.parametrize(
    ("latency", "transfer"),
    [
        (0.001, 0.045),
        (0.011, 0.035),  # Some of both, but mostly narrow.
        (0.041, 0.0),  # Small messages are as late: a delay.
        (None, 0.0),  # Unknown, as with NCCL.
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_small_messages_in_time_show_a_narrow_link_from_the_first_window(
    latency: float | None, transfer: float, exact: bool
) -> None:
    job = Job()

    def late(link: int, direction: int, slow: bool) -> LinkSample:
        sample = job.sample(link, direction, 0.040 if slow else 0.0)
        took = latency if slow else 0.001
        wire = sample.wire
        if not exact and slow:  # The receiver computed, for 6 to 9 ms since it had come.
            least = wire.min + job.rng.uniform(0.006, 0.009)
            wire = wire.model_copy(update={"exact": 0, "min": least})
        return sample.model_copy(update={"latency": took, "wire": wire})

    for slow, windows in ((False, 60), (True, 5)):
        for _ in range(windows):
            job.now += 0.05
            job.report([late(i, d, slow and i == 2) for i in range(LINKS) for d in (0, 1)])
    assert job.slow() == {2}
    state = job.states()[2]
    assert state.transfer == pytest.approx(transfer, abs=0.003 if exact else 0.005)
    # The receiver's op makes it uncertain, unless what is small has the same delay.
    bound = 0.001 if exact or latency == 0.041 else 0.004
    assert state.wire_time == pytest.approx(BASE + 0.040, abs=bound)


@pytest.mark.parametrize(
    ("waits", "latency", "inflated", "doubted"),
    [
        ({}, 0.001, set(), False),
        ({3: 0.025}, 0.001, set(), True),  # The receiver forward had no processor.
        ({2: 0.025}, 0.001, set(), True),  # The sender forward.
        ({3: 0.005}, 0.001, set(), False),  # For much less than the message is late.
        ({4: 0.025}, 0.001, set(), False),  # A rank of another link.
        ({3: 0.025}, 0.041, set(), False),  # The kernel saw the note late as well.
        ({2: 0.025}, 0.041, set(), True),  # But the sender may have sent it late.
        ({}, None, {3}, True),
        ({}, None, {5}, False),
    ],
)
def test_lateness_that_a_busy_rank_explains_takes_more_evidence(
    waits: dict[int, float], latency: float | None, inflated: set[int], doubted: bool
) -> None:
    job = Job()

    def sample(link: int, late: float) -> LinkSample:
        fields = {
            "waited": waits.get(link + 1, 0.0),
            "sender_waited": waits.get(link, 0.0),
            "sender_inflated": late > 0 and link in inflated,
            "latency": latency if late else 0.001,
        }
        return job.sample(link, 0, late).model_copy(update=fields)

    for late, windows in ((0.0, 60), (0.040, 10), (0.040, 30)):
        if late:
            job.compute(inflated)
        for _ in range(windows):
            job.now += 0.05
            job.report([sample(i, late if i == 2 else 0.0) for i in range(job.links)])
        if windows == 10:
            assert job.slow() == (set() if doubted else {2})
    assert job.slow() == {2}, "it lasts, so it is the link after all"


def stalls(job: Job, count: int) -> None:
    """Stalls of 10 to 40 ms for up to a third of a second, felt by most links, seconds apart."""
    for _ in range(count):
        victims = set(job.rng.sample(range(job.links), max(2, round(0.8 * job.links))))
        job.run(
            job.rng.randint(3, 6),
            lambda link, v=victims: job.rng.uniform(0.01, 0.04) if link in v else 0.0,
        )
        job.run(job.rng.randint(30, 60))


@pytest.mark.parametrize("seed", range(examples(2)))
def test_stalls_of_the_machine_are_no_slow_links(seed: int) -> None:
    job = Job(seed=seed)
    stalls(job, 20)
    assert job.slow_seen == set()


def test_reports_that_carry_few_links_each_show_the_same_moment() -> None:
    """Ranks report every 50 ms each, but not together."""
    job = Job()
    for _ in range(20):
        for _ in range(5):
            for link in range(job.links):
                job.now += 0.05 / job.links
                late = job.rng.uniform(0.01, 0.04)
                job.report([job.sample(link, direction, late) for direction in (0, 1)])
        job.run(40)
    assert job.slow_seen == set()


@pytest.mark.parametrize("seed", range(5))
def test_one_slow_link_is_found_as_quickly_as_alone(seed: int) -> None:
    job = Job(seed=seed)
    took = job.until_slow({3}, lambda link: 0.03 * (link == 3), 10)
    assert took <= 5
    job.run(60)
    took = job.until_slow({0, 6}, lambda link: 0.03 * (link in (0, 6)), 40)
    assert took <= 15, "3 recovers meanwhile"


def test_a_link_that_goes_slow_in_a_stall_is_found_soon_after() -> None:
    job = Job()
    job.run(4, lambda link: 0.03)
    assert job.slow() == set()
    assert job.until_slow({2}, lambda link: 0.03 * (link == 2), 10) <= 8


def test_a_network_that_is_slow_everywhere_is_believed_in_the_end() -> None:
    job = Job()
    assert job.until_slow(set(range(LINKS)), lambda link: 0.03, 40) >= 20


def test_few_links_are_judged_one_by_one() -> None:
    job = Job(links=FEWEST_LINKS - 1)
    assert job.until_slow(set(range(FEWEST_LINKS - 1)), lambda link: 0.03, 10) <= 5


def test_a_link_is_named_with_the_column_where_it_is_slow() -> None:
    """Links are numbered by column, and people read coordinates."""
    mesh = MeshShape(2, replicas=2, tensor=2)
    assert LinkState(0, Health.SLOW, column=mesh.format_column_name(3)).name == (
        "link 0 of replica 1, tensor 1"
    )
    assert LinkState(0, Health.SLOW, column=MeshShape(2).format_column_name(0)).name == "link 0"


def test_a_link_is_slow_since_the_first_of_its_directions_is() -> None:
    table = LinkTable(MeshShape(2, replicas=2), stale_after=30.0)

    def tell(now: float, **columns: str) -> float | None:
        rows = [
            LinkState(
                0, Health(health), replica=int(name[1:]), delay=0.03, wire_time=0.04
            )
            for name, health in columns.items()
        ]  # fmt: skip
        table.process_states(rows, [LinkState(link=0, health=Health.HEALTHY, wire_time=0.01)], now)
        return table.get_states(now)[0].since

    assert tell(100.0) is None
    assert tell(101.0, c0="slow") == 101.0
    assert tell(102.0, c1="slow") == 101.0
    assert tell(103.0, c0="healthy") == 101.0, "the link has not been well in between"
    tell(104.0, c1="unknown")
    assert tell(105.0, c1="slow") == 101.0, "nor is that known of silence"
    assert tell(106.0, c1="healthy") is None
    assert tell(107.0, c1="slow") == 107.0
    again = LinkTable(MeshShape(2, replicas=2), stale_after=30.0)
    again.restore_directions(table.list_slow_directions(), table.get_slow_since())
    table = again
    assert tell(110.0, c1="slow") == 107.0
    assert tell(111.0, c1="healthy") is None


def test_a_wire_time_that_ops_always_hide_is_assumed_to_be_short() -> None:
    """The bound may be as long as the op; but a message takes some time."""

    class Device(Job):
        def sample(self, link: int, direction: int, late: float) -> LinkSample:
            found = super().sample(link, direction, late)
            return found.model_copy(update={"wire": found.wire.model_copy(update={"exact": 0})})

    job = Device()
    assert {state.wire_time for state in job.states()} == {0.1 * LONGEST_OP}
    job.until_slow({3}, lambda link: 0.04 * (link == 3), 40)
    slow = job.states()[3]
    assert slow.wire_time == pytest.approx(slow.delay + 0.001)


def test_a_latency_does_not_make_a_bound_of_the_wire_time_exact() -> None:
    """Ops of up to 10 ms always hide the arrivals; small messages show only when it is later."""

    class Hidden(Job):
        def sample(self, link: int, direction: int, late: float) -> LinkSample:
            found = super().sample(link, direction, late)
            least = found.wire.min + self.rng.uniform(0.003, 0.009)
            wire = found.wire.model_copy(update={"exact": 0, "min": least, "p50": least})
            return found.model_copy(update={"latency": 0.001 + late, "wire": wire})

    job = Hidden()
    job.run(60)
    wires = [state.wire_time for state in job.states()]
    assert min(wires) > 0.1 * LONGEST_OP, "what is sure counts"
    assert max(wires) < BASE
    job.until_slow({3}, lambda link: 0.04 * (link == 3), 40)
    assert job.states()[3].delay == pytest.approx(0.04, abs=0.002), "it is as late as it is"


def test_a_stall_does_not_make_a_slow_link_slower() -> None:
    """Other links do not become slow, either."""
    job = Job()
    job.until_slow({3}, lambda link: 0.03 * (link == 3), most=6)
    job.run(30, lambda link: 0.03 * (link == 3))

    def delay() -> float:
        return job.states()[3].delay

    assert delay() == pytest.approx(0.03, abs=0.002)
    job.run(4, lambda link: 0.03 + 0.03 * (link == 3))
    assert delay() == pytest.approx(0.03, abs=0.002)
    job.run(20, lambda link: 0.03 * (link == 3))
    job.run(4, lambda link: 0.06 * (link == 3))
    assert delay() == pytest.approx(0.06, abs=0.002), "this time it is the link alone"


def test_a_slow_link_whose_receiver_waits_for_a_processor_is_not_slower() -> None:
    job = Job()
    job.until_slow({3}, lambda link: 0.03 * (link == 3), most=6)
    job.run(30, lambda link: 0.03 * (link == 3))
    for _ in range(4):
        job.now += 0.05
        sample = job.sample(3, 0, 0.06).model_copy(update={"waited": 0.025})
        job.report([sample, job.sample(3, 1, 0.03)])
    assert job.states()[3].delay == pytest.approx(0.03, abs=0.002)


def failed_over(job: Job, wire: float, windows: int, link: int = 2) -> None:
    """The direct route of a link has broken; the one that replaces it takes ``wire`` seconds."""
    fields = {"route": Route.DELEGATED, "transport": "tcp", "failed_over": True}
    for _ in range(windows):
        job.now += 0.05
        job.windows += 1
        job.report([job.sample(link, d, wire - BASE).model_copy(update=fields) for d in (0, 1)])


def test_a_route_that_replaces_a_broken_one_is_compared_with_that() -> None:
    job = Job()
    began = job.windows + 1
    failed_over(job, BASE + 0.030, 6)
    state = job.states()[2]
    assert (state.health, state.failed_over) == (Health.SLOW, True)
    assert state.delay == pytest.approx(0.030, abs=0.002)
    assert state.since_iteration == began
    assert job.slow() == {2}
    failed_over(job, BASE, 12)
    state = job.states()[2]
    assert (state.health, state.failed_over) == (Health.HEALTHY, True)
    assert [each.failed_over for each in job.states()] == [i == 2 for i in range(LINKS)]


def test_a_route_that_replaces_a_broken_one_is_no_slower_than_others_that_are_used() -> None:
    """Normal times on it show on other links; those of the route that broke it need not be."""
    job = Job()
    for _ in range(20):
        job.now += 0.05
        samples = [
            job.sample(4, d, 0.030).model_copy(update={"route": Route.DELEGATED}) for d in (0, 1)
        ]
        job.report(samples)
    assert job.slow() == set(), "moved by a plan: it takes as long as it takes"
    failed_over(job, BASE + 0.030, 8)
    assert job.slow() == set()
    assert job.states()[2].failed_over
    job = Job()
    failed_over(job, BASE + 0.001, 8)
    assert job.slow() == set(), "not by as much as counts"


def test_a_narrow_link_whose_rate_varies_stays_one_and_its_windows_are_reported() -> None:
    """Messages do not wait while the rate is high: nothing shows that the link is narrow."""
    job = Job()
    job.until_slow({2}, lambda link: 0.030 if link == 2 else 0.0, 5)
    for window in range(110):
        job.now += 0.05
        job.windows += 1
        late = 0.010 if window >= 80 else (0.010, 0.030, 0.050)[window // 5 % 3]
        spacing = None if window >= 80 else BASE + late
        fields = {"route": Route.DELEGATED, "spacing": spacing}
        job.report([job.sample(2, d, late).model_copy(update=fields) for d in (0, 1)])
        state = job.states()[2]
        if window > 60:
            assert 0.5 * state.wire_time <= state.transfer <= state.wire_time
    assert len(state.recent) > 20
    assert min(state.recent) < 0.015
    assert max(state.recent) > 0.045


def test_a_delay_that_varies_makes_no_link_narrow() -> None:
    """Messages on the way together arrive close to each other, however late they are."""
    job = Job()
    job.until_slow({2}, lambda link: 0.030 if link == 2 else 0.0, 5)
    for _ in range(90):
        job.now += 0.05
        job.windows += 1
        late = (0.010, 0.030, 0.050)[job.windows // 5 % 3]
        fields = {"route": Route.DELEGATED, "spacing": 0.002 if job.windows % 5 else late}
        job.report([job.sample(2, d, late).model_copy(update=fields) for d in (0, 1)])
        assert job.states()[2].transfer == 0.0
