"""The agent's uplink against a real ingest and controller."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from observing import report

from pipemorph.api.spec import JobSpec
from pipemorph.control import JobController
from pipemorph.control.observe.observer import Observer
from pipemorph.ingest import BearerAuthenticator, IngestServer, MemoryStore
from pipemorph.wire import IterationSample, LinkHealthReport, StageProfile
from pipemorph_trainer.agent.merge import TelemetryMerger
from pipemorph_trainer.agent.messages import RankTelemetry
from pipemorph_trainer.agent.uplink import Uplink


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
    controller.report(report(taken, job="job"), 1000.0)
    came: asyncio.Queue[LinkHealthReport] = asyncio.Queue()
    controller._on_report = came.put_nowait
    merger = TelemetryMerger(2)
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
