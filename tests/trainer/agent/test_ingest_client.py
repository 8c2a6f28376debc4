"""The agent's uplink against a real ingest and controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from observing import report
from plant_support import BASE, Plant, spec

from pipemorph.control import JobController, initial_plan
from pipemorph.detection.job_observer import JobObserver
from pipemorph.ingest import BearerAuthenticator, IngestServer, InMemoryJobStore
from pipemorph.protocol import (
    MAX_SNAPSHOT_BYTES,
    Directive,
    DirectiveEnvelope,
    IterationSample,
    LinkHealthReport,
    PlanMessage,
    StageProfile,
)
from pipemorph.replay.replayed_ranks import JobTelemetry, ReplayedRanks
from pipemorph.spec.job_spec import JobSpec
from pipemorph_trainer.agent.ingest_client import IngestClient, UnusableAnswerError


async def test_an_agent_whose_clock_is_behind_goes_on_above_what_was_taken(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Ranks that were evicted and started again under the same attempt may be on a node whose clock
    is behind: their reports must reach the controller, too."""
    taken = time.time_ns() // 1_000_000 + 3_600_000
    job = {
        "parallelism": {"stages": 2},
        "schedule": {"microbatches": 2},
        "trainer": {"module": "x", "iterations": 9},
    }
    controller = JobController(JobSpec.model_validate(job))
    controller.process_report(report(taken, job="job"), 1000.0)
    came: asyncio.Queue[LinkHealthReport] = asyncio.Queue()
    controller._on_report = came.put_nowait
    profiles = [
        StageProfile(
            stage=stage, forward=0.01, backward_input=0.01, backward_weight=0.01, split="deferred",
            peak_memory=1,
        )
        for stage in range(2)
    ]  # fmt: skip
    finished = IterationSample(index=0, seconds=0.5, loss=1.0, plan_version=0, bubble_fraction=0.2)
    observer = JobObserver(
        controller.spec.parallelism.mesh, job="job", namespace="default", attempt=0
    )
    batch = JobTelemetry(iteration=1, stages=profiles, iterations=[finished])
    ReplayedRanks(controller.spec.parallelism.mesh, observer).process_telemetry(batch, time.time())
    token = tmp_path / "token"
    token.write_text("token")
    store = InMemoryJobStore()
    store.add_job("default", "job", controller)
    async with IngestServer(store, BearerAuthenticator("token")) as server:
        uplink = IngestClient(
            base_url=server.url, namespace="default", job="job", attempt=0,
            token_file=token, observer=observer, on_directive=lambda _: None,
        )  # fmt: skip
        reporting = asyncio.create_task(uplink.run())
        try:
            found = await asyncio.wait_for(came.get(), 15)
        finally:
            reporting.cancel()
        assert found.sequence > taken
        reported = {state.stage for state in found.stages}, [i.index for i in found.iterations]
        assert reported == ({0, 1}, [0]), "what was refused is sent again"
    assert f"is not above {taken}" in caplog.text


class Trainer:
    """Ranks that send their agent wire times and op times, and take its plans."""

    def __init__(self, plant: Plant, observer: JobObserver) -> None:
        self.plant = plant
        self.ranks = ReplayedRanks(plant.spec.parallelism.mesh, observer)
        self.directives: list[Directive] = []

    async def run(self, uplink: IngestClient) -> None:
        plant = self.plant
        while True:
            newest = self.directives[-1].plan_version if self.directives else 0
            links = [
                plant.sample(link, direction, BASE + delay)
                for link, delay in enumerate(plant.delays)
                for direction in ("forward", "backward")
            ]
            profiles = [plant.profile(stage, op) for stage, op in enumerate(plant.ops)]
            telemetry = JobTelemetry(
                iteration=1, applied_plan_version=newest, links=links, stages=profiles
            )
            self.ranks.process_telemetry(telemetry, time.time())
            uplink.schedule_observation()
            await asyncio.sleep(0.02)

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, f"waited 60 s for {what}"
            await asyncio.sleep(0.02)


def uplink_of(url: str, token: Path, observer: JobObserver, trainer: Trainer) -> IngestClient:
    return IngestClient(
        base_url=url, namespace="default", job="j", attempt=0, token_file=token,
        observer=observer, on_directive=trainer.directives.append,
    )  # fmt: skip


async def test_an_ingest_that_restarts_is_handed_the_snapshot(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Restart under ``pipemorph serve``: both hosts have a Lease of term 0."""
    caplog.set_level("INFO")
    token = tmp_path / "token"
    token.write_text("token")
    plant = Plant(spec())
    observer = JobObserver(plant.spec.parallelism.mesh, job="j", namespace="default", attempt=0)
    trainer = Trainer(plant, observer)
    hosts = [JobController(plant.spec), JobController(plant.spec)]

    def server(controller: JobController, port: int = 0) -> IngestServer:
        store = InMemoryJobStore()
        store.add_job("default", "j", controller)
        return IngestServer(store, BearerAuthenticator("token"), port=port)

    def well() -> bool:
        return all(link.health == "healthy" for link in hosts[0].get_link_states(time.time()))

    first = server(hosts[0])
    await first.start()
    port = int(first.url.rpartition(":")[2])
    uplink = uplink_of(first.url, token, observer, trainer)
    working = [asyncio.create_task(uplink.run()), asyncio.create_task(trainer.run(uplink))]
    try:
        await trainer.until("healthy links", well)
        plant.delays[1] = 0.06
        await trainer.until("a plan", lambda: bool(trainer.directives))
        await trainer.until("the report of it", lambda: hosts[0].running_plan.version == 1)
        await first.stop()
        async with server(hosts[1], port):
            await trainer.until("its plan at the next ingest", lambda: bool(hosts[1].records))
    finally:
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
    directive = trainer.directives[0]
    assert directive.plan_version == 1
    assert hosts[1].records[0].reason == directive.reason
    assert [host.term for host in hosts] == [0, 1]
    assert "sent the snapshot to the ingest, plan v1" in caplog.text


def answering(*answers: DirectiveEnvelope) -> tuple[IngestClient, list[Directive]]:
    """An uplink that has had these answers, and the directives that it has taken."""
    plant = Plant(spec())
    observer = JobObserver(plant.spec.parallelism.mesh, job="j", namespace="default", attempt=0)
    trainer = Trainer(plant, observer)
    uplink = uplink_of("http://x", Path("none"), observer, trainer)
    for each in answers:
        uplink._check_term(each)
        uplink._handle_envelope(each)
    return uplink, trainer.directives


def directive(version: int, issued_at: float = 1.0) -> Directive:
    plan = PlanMessage.from_plan(replace(initial_plan(spec()), version=version))
    return Directive(plan_version=version, issued_at=issued_at, reason="test", plan=plan)


def test_an_agent_refuses_answers_of_a_lower_term() -> None:
    uplink, taken = answering(
        DirectiveEnvelope(term=3, directive=directive(1), snapshot="one"),
        DirectiveEnvelope(term=5, directive=directive(2), snapshot="two"),
    )
    stale = DirectiveEnvelope(term=4, directive=directive(3), snapshot="three")
    for count in (1, 2):
        said = f"term 4 has answered, after one of term 5; refused {count} such answers"
        with pytest.raises(UnusableAnswerError, match=said):
            uplink._check_term(stale)
    assert uplink.lower_terms == 2
    assert [each.plan_version for each in taken] == [1, 2]
    assert uplink._snapshot == "two"


def test_another_plan_of_the_version_that_the_ranks_have_is_not_handed_out() -> None:
    uplink, taken = answering(
        DirectiveEnvelope(term=3, directive=directive(2, issued_at=1.0)),
        DirectiveEnvelope(term=5, directive=directive(2, issued_at=2.0)),
    )
    assert [each.issued_at for each in taken] == [1.0]
    assert uplink._newest is not None and uplink._newest.issued_at == 1.0


def test_a_snapshot_that_is_too_large_leaves_the_one_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    most = "x" * MAX_SNAPSHOT_BYTES
    uplink, taken = answering(
        DirectiveEnvelope(snapshot=most),
        DirectiveEnvelope(snapshot=most + "x", directive=directive(1)),
    )
    assert uplink._snapshot == most
    assert len(taken) == 1, "its directive is good"
    assert f"refused a snapshot of {MAX_SNAPSHOT_BYTES + 1} bytes" in caplog.text
