"""What goes into a report of a job of which not everything fits."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController
from pipemorph.ingest import BearerAuthenticator, IngestServer, MemoryStore
from pipemorph.planning.ir import Route
from pipemorph.wire import (
    MAX_REPORT_BYTES,
    IterationSample,
    LinkHealthReport,
    LinkSample,
    ReductionSample,
    StageProfile,
    TransportSample,
    WireTime,
)
from pipemorph_trainer.agent.merge import TelemetryMerger
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.uplink import Uplink

Key = tuple[int, int, str]
"""link, replica, direction"""


def bound(series: int) -> int:
    """Reports within which each series is told again: some 60 in each are those that were not
    told of for longest."""
    return 1 + -(-series // 60)


class Reported(NamedTuple):
    report: LinkHealthReport
    size: int
    seconds: float
    """Processor time of the agent's work for it."""


class Job:
    """All ranks of a job; each tick, one window of every series, and one report.

    Numbers have all their digits, as measured ones do, so that samples have their size.
    """

    def __init__(self, stages: int, replicas: int) -> None:
        self.stages, self.replicas = stages, replicas
        self.ticks = self._sequence = 0
        self.delays: dict[Key, float] = {}
        self._merger = TelemetryMerger("job", "default", 0, stages * replicas)

    @property
    def series(self) -> set[Key]:
        return {
            (link, replica, direction)
            for link in range(self.stages - 1)
            for replica in range(self.replicas)
            for direction in ("forward", "backward")
        }

    def _window(self, link: int, replica: int, direction: str) -> LinkSample:
        wire = 0.0012345678901234 + self.delays.get((link, replica, direction), 0.0)
        return LinkSample(
            link=link, replica=replica, direction=direction, route=Route.DELEGATED,  # type: ignore[arg-type]
            transport="rdma", iteration=self.ticks, bytes=123456789, queue_p50=1.2345678901234e-5,
            wire=WireTime(count=16, exact=16, min=wire, p50=wire, p99=wire, mean=wire),
            rtt_min=1.2345678901234e-5,
        )  # fmt: skip

    def _rank(self, stage: int, replica: int) -> RankTelemetry:
        first = stage == replica == 0
        time_of = 0.0101234567890123 + 1e-9 * self.ticks
        links = [(stage - 1, "forward"), (stage, "backward")]
        ends = [(stage - 1, "backward"), (stage, "forward")]
        return RankTelemetry(
            rank=replica * self.stages + stage, stage=stage, replica=replica, state="training",
            iteration=self.ticks, applied_plan_version=0, prepared_plan_version=0,
            links=[
                self._window(link, replica, direction)
                for link, direction in links
                if 0 <= link < self.stages - 1
            ],
            # All news all the time: the worst there can be.
            profile=StageProfile(
                stage=stage, replica=replica, forward=time_of, backward_input=time_of,
                backward_weight=time_of, split="graph", peak_memory=12345678901,
                activation_bytes=123456789, offload_copy=time_of, fused_backward=2 * time_of,
            ),
            finished_iteration=IterationSample(
                index=self.ticks, seconds=0.5123456789012345, loss=1.0123456789012345,
                plan_version=0, bubble_fraction=0.2123456789012345,
            ) if first else None,
            transports=[
                TransportSample(
                    link=link, replica=replica, direction=direction, agreed="rdma",  # type: ignore[arg-type]
                    transport="rdma", fallbacks=0, failbacks=0, reconnects=0,
                )
                for link, direction in ends
                if 0 <= link < self.stages - 1
            ] if self.ticks == 0 else [],
        )  # fmt: skip

    def tick(self) -> Reported:
        self.measure()
        return self.report()

    def measure(self) -> None:
        for replica in range(self.replicas):
            for stage in range(self.stages):
                self._merger.add(self._rank(stage, replica))
        self.ticks += 1

    def hear_reduction(self, stage: int, replica: int) -> None:
        """What a rank says of its newest gradient reduction."""
        reduced = ReductionSample(
            stage=stage, replica=replica, iteration=self.ticks, bytes=1 << 30, buckets=40,
            seconds=0.123456789, exposed=0.0123456789, waited=0.123456789,
        )  # fmt: skip
        said = RankTelemetry(
            rank=replica * self.stages + stage, stage=stage, replica=replica, state="training",
            iteration=self.ticks, applied_plan_version=0, prepared_plan_version=0,
            reduction=reduced,
        )  # fmt: skip
        self._merger.add(said)

    def report(self) -> Reported:
        self._sequence += 1
        began = time.process_time()
        selection = self._merger.select(self._sequence, 1.7e9, 0)
        body = selection.report.body()
        self._merger.delivered(selection)
        return Reported(selection.report, len(body), time.process_time() - began)


def keys(report: LinkHealthReport) -> set[Key]:
    return {(link.link, link.replica, link.direction) for link in report.links}


@pytest.mark.parametrize("replicas", [2, 16])
def test_a_large_job_reports_every_stage_and_every_link(replicas: int) -> None:
    job = Job(64, replicas)
    # The slow ones must not have the reports to themselves, however many they are.
    slow = {key for key in job.series if key[0] % 2}
    job.delays = dict.fromkeys(slow, 0.05)
    least = bound(len(job.series))
    told: dict[Key, int] = {}
    stages: set[tuple[int, int]] = set()
    ends: set[Key] = set()
    finished: list[int] = []
    sizes, taken = [], []
    for index in range(1, least + 11):
        report, size, seconds = job.tick()
        sizes.append(size)
        taken.append(seconds)
        told |= dict.fromkeys(keys(report), index)
        late = sorted(key for key in job.series if index - told.get(key, 0) >= least)
        assert not late, f"{len(late)} series not in {least} reports, such as {late[0]}"
        stages |= {(profile.stage, profile.replica) for profile in report.stages}
        ends |= {(end.link, end.replica, end.direction) for end in report.transports}
        finished += [iteration.index for iteration in report.iterations]
    assert max(sizes) <= MAX_REPORT_BYTES
    assert len(stages) == 64 * replicas, "stages without a profile"
    assert finished == list(range(least + 10)), "each iteration in the first report there is"
    assert len(ends) >= min(len(job.series), 25 * len(sizes)), "transports of links are not told"
    print(f"{len(job.series)} series: {1e3 * median(taken):.1f} ms per report, bound {least}")
    # There are 20 a second.
    assert median(taken) < 0.025


def test_one_rank_of_a_group_reports_its_reduction() -> None:
    """Those of 64 groups fit; the others of a group say the same."""
    job = Job(64, 16)
    told: dict[tuple[int, int], int] = {}
    for _ in range(6):
        for stage in range(64):
            for replica in range(16):
                job.hear_reduction(stage, replica)
        found = job.tick().report.reductions
        told |= {(each.stage, each.replica): each.iteration for each in found}
    assert set(told) == {(stage, 0) for stage in range(64)}
    assert min(told.values()) > 0, "the newest, not the first"


def test_a_link_that_turns_slow_or_recovers_is_in_the_next_report() -> None:
    job = Job(64, 4)
    # More slow links than a report has room for, all slower than the one that counts.
    job.delays = {key: 0.2 for key in job.series if key[0] > 20}
    for _ in range(bound(len(job.series))):
        job.tick()
    key = (7, 1, "backward")
    for delay in (0.03, 0.0):
        job.delays[key] = delay
        assert key in keys(job.tick().report), f"not told of a delay of {delay} s"


def test_a_slow_link_stays_in_the_reports() -> None:
    """A detector wants several windows of it."""
    job = Job(64, 4)
    for _ in range(bound(len(job.series))):
        job.tick()
    key = (7, 1, "backward")
    job.delays[key] = 0.03
    assert all(key in keys(job.tick().report) for _ in range(8))


def test_a_link_that_recovers_stays_until_that_is_sure() -> None:
    job = Job(64, 4)
    key = (7, 1, "backward")
    job.delays[key] = 0.03
    for _ in range(bound(len(job.series))):
        job.tick()
    del job.delays[key]
    assert all(key in keys(job.tick().report) for _ in range(9))


def test_windows_of_a_link_never_come_after_newer_ones() -> None:
    """Also where no report got through for a while, and then there are more than fit into one."""
    job = Job(64, 2)
    newest: dict[Key, int] = {}
    for _ in range(4):
        job.measure()
    for _ in range(6):
        for link in job.report().report.links:
            key = (link.link, link.replica, link.direction)
            assert link.iteration > newest.get(key, -1), f"{key} went back"
            newest[key] = link.iteration
    assert newest == dict.fromkeys(job.series, 3)


def test_an_agent_whose_clock_is_behind_goes_on_above_what_was_taken(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Ranks that were evicted and started again under the same attempt may be on a node whose
    clock is behind: their reports must reach the controller all the same."""
    taken = time.time_ns() // 1_000_000 + 3_600_000
    spec = {
        "parallelism": {"stages": 2},
        "schedule": {"microbatches": 2},
        "trainer": {"module": "x", "iterations": 9},
    }
    controller = JobController(JobSpec.model_validate(spec))
    before = TelemetryMerger("job", "default", 0, 2).select(taken, 1.0, 0).report
    controller.report(before, 1000.0)
    came: asyncio.Queue[LinkHealthReport] = asyncio.Queue()
    controller._on_report = came.put_nowait
    job = Job(2, 1)
    job.measure()
    token = tmp_path / "token"
    token.write_text("token")

    async def run() -> None:
        store = MemoryStore()
        store.add("default", "job", controller)
        async with IngestServer(store, BearerAuthenticator("token")) as server:
            uplink = Uplink(
                base_url=server.url, namespace="default", job="job", attempt=0,
                token_file=token, merger=job._merger, on_directive=lambda _: None,
            )  # fmt: skip
            reporting = asyncio.create_task(uplink.run())
            try:
                report = await asyncio.wait_for(came.get(), 15)
            finally:
                reporting.cancel()
            assert report.sequence > taken
            assert keys(report) == job.series, "what was refused is told again"

    asyncio.run(run())
    assert f"is not above {taken}" in caplog.text
