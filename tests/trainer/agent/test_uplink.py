"""The agent's uplink against a real ingest and controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from observing import report
from plant_support import BASE, Plant, spec

from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController
from pipemorph.control.observe.observer import Observer
from pipemorph.ingest import BearerAuthenticator, IngestServer, MemoryStore
from pipemorph.ingest.plan_versions import AGENT_BLOCK, BLOCK
from pipemorph.wire import Directive, IterationSample, LinkHealthReport, StageProfile
from pipemorph_trainer.agent.merge import TelemetryMerger
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.uplinks.to_ingest import Uplink


def test_an_agent_whose_clock_is_behind_goes_on_above_what_was_taken(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Ranks that were evicted and started again under the same attempt may be on a node whose
    clock is behind: their reports must reach the controller all the same."""
    taken = time.time_ns() // 1_000_000 + 3_600_000
    job = {
        "parallelism": {"stages": 2},
        "schedule": {"microbatches": 2},
        "trainer": {"module": "x", "iterations": 9},
    }
    controller = JobController(JobSpec.model_validate(job))
    controller.report(report(taken, job="job"), 1000.0)
    came: asyncio.Queue[LinkHealthReport] = asyncio.Queue()
    controller._on_report = came.put_nowait
    merger = TelemetryMerger(range(2))
    for stage in range(2):
        profile = StageProfile(
            stage=stage, forward=0.01, backward_input=0.01, backward_weight=0.01, split="graph",
            peak_memory=1,
        )  # fmt: skip
        finished = IterationSample(
            index=0, seconds=0.5, loss=1.0, plan_version=0, bubble_fraction=0.2
        )
        merger.add(
            RankTelemetry(
                rank=stage, stage=stage, replica=0, state="training", iteration=1,
                applied_plan_version=0, prepared_plan_version=0, profile=profile,
                finished_iteration=None if stage else finished,
            )
        )  # fmt: skip
    observer = Observer(controller.spec.parallelism.mesh, job="job", namespace="default", attempt=0)
    token = tmp_path / "token"
    token.write_text("token")

    async def run() -> None:
        store = MemoryStore()
        store.add("default", "job", controller)
        async with IngestServer(store, BearerAuthenticator("token")) as server:
            uplink = Uplink(
                base_url=server.url, namespace="default", job="job", attempt=0,
                token_file=token, merger=merger, observer=observer, on_directive=lambda _: None,
            )  # fmt: skip
            reporting = asyncio.create_task(uplink.run())
            try:
                found = await asyncio.wait_for(came.get(), 15)
            finally:
                reporting.cancel()
            assert found.sequence > taken
            told = {state.stage for state in found.stages}, [i.index for i in found.iterations]
            assert told == ({0, 1}, [0]), "what was refused is told again"

    asyncio.run(run())
    assert f"is not above {taken}" in caplog.text


class Trainer:
    """Ranks that tell their agent of wire times and op times, and take its plans."""

    def __init__(self, plant: Plant, merger: TelemetryMerger) -> None:
        self.plant, self.merger = plant, merger
        self.directives: list[Directive] = []

    async def run(self, uplink: Uplink) -> None:
        plant = self.plant
        while True:
            newest = self.directives[-1].plan_version if self.directives else 0
            for stage, op in enumerate(plant.ops):
                links = [
                    plant.sample(stage, direction, BASE + plant.delays[stage])
                    for direction in ("forward", "backward")
                    if stage < len(plant.delays)
                ]
                self.merger.add(
                    RankTelemetry(
                        rank=stage, stage=stage, replica=0, state="training", iteration=1,
                        applied_plan_version=newest, prepared_plan_version=newest,
                        profile=plant.profile(stage, op), links=links,
                    )
                )  # fmt: skip
            uplink.notify()
            await asyncio.sleep(0.02)

    async def until(self, what: str, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline, f"waited 60 s for {what}"
            await asyncio.sleep(0.02)


def test_an_agent_whose_ingest_is_gone_decides_and_tells_the_next_one(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "token").write_text("token")
    plant = Plant(spec())
    merger = TelemetryMerger(range(plant.stages))
    trainer = Trainer(plant, merger)
    observer = Observer(plant.spec.parallelism.mesh, job="j", namespace="default", attempt=0)
    hosts = [JobController(plant.spec), JobController(plant.spec)]

    def server(controller: JobController, port: int = 0) -> IngestServer:
        store = MemoryStore()
        store.add("default", "j", controller)
        return IngestServer(store, BearerAuthenticator("token"), port=port)

    def well() -> bool:
        return all(link.health == "healthy" for link in hosts[0].links(time.time()))

    def handed_in() -> bool:
        return hosts[1].wanted.version > 0

    async def run() -> None:
        first = server(hosts[0])
        await first.start()
        url = first.url
        uplink = Uplink(
            base_url=url, namespace="default", job="j", attempt=0,
            token_file=tmp_path / "token", merger=merger, observer=observer,
            on_directive=trainer.directives.append, autonomy_seconds=0.5,
        )  # fmt: skip
        working = [asyncio.create_task(uplink.run()), asyncio.create_task(trainer.run(uplink))]
        try:
            await trainer.until("versions of its own", lambda: observer.versions is not None)
            await trainer.until("healthy links", well)
            await first.stop()
            plant.delays[1] = 0.06
            await trainer.until("a plan of its own", lambda: bool(trainer.directives))
            async with server(hosts[1], int(url.rpartition(":")[2])):
                await trainer.until("its plan at the next ingest", handed_in)
                over = "an ingest answers again, and decides"
                await trainer.until("the end of the agent's decisions", lambda: over in caplog.text)
        finally:
            for task in working:
                task.cancel()
            await asyncio.gather(*working, return_exceptions=True)

    asyncio.run(run())
    (directive,) = trainer.directives
    assert BLOCK < directive.plan_version <= BLOCK + AGENT_BLOCK
    assert hosts[1].wanted == directive.plan.plan()
    assert [record.reason for record in hosts[1].records] == [directive.reason]
    assert hosts[1].plan_version == BLOCK + AGENT_BLOCK, "the others are the agent's"
    assert hosts[0].wanted.version == 0
    for said in (
        f"this agent decides, with plan versions {BLOCK + 1} to {BLOCK + AGENT_BLOCK}",
        f"handed in plan v{directive.plan_version}",
    ):
        assert said in caplog.text
