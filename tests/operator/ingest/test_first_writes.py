"""When jobs that begin to report are written first: a thousand of them come back together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pipemorph.wire import LinkHealthReport
from pipemorph_operator.ingest.status.write_budget import (
    BEGINS_PER_SECOND,
    HELD_SECONDS,
    RUSH_JOBS,
    RUSH_SECONDS,
    Rush,
)
from pipemorph_operator.ingest.store import ClusterStore

SPEC: dict[str, Any] = {
    "parallelism": {"stages": 2},
    "schedule": {
        "microbatches": 4,
        "stageTimes": [{"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}] * 2,
    },
    "trainer": {"module": "m", "iterations": 1000},
}
TICKS = 4
"""Looks at all jobs in a second."""
BEGUN: dict[str, Any] = {"attempt": 0, "jobUid": "job"}
WELL = [{"link": 0, "health": "healthy", "wire_time": 0.001, "confidence": 1.0}]


class Written:
    """An API server that takes every status, and keeps the newest of each job."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.status: dict[str, Any] = {}

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        name = obj["metadata"]["name"]
        self.order.append(name)
        self.status[name] = BEGUN | obj["status"]
        return obj

    async def create(self, obj: dict[str, Any], owner: str) -> Any:
        return obj  # Events.

    async def get(self, url: str) -> None:
        """No plan is saved."""


class Ingest:
    """One that has read these jobs, by name with their status. Each has reported ``sequence``
    reports before."""

    def __init__(self, jobs: dict[str, Any], now: float, sequence: int = 0) -> None:
        self.api: Any = Written()
        self.now, self.jobs, self.sequence = now, [*jobs], sequence
        self.store = ClusterStore(self.api, clock=lambda: self.now, monotonic=lambda: self.now)
        for name, status in jobs.items():
            metadata = {"name": name, "namespace": "default", "uid": name, "generation": 1}
            body = {"metadata": metadata, "spec": SPEC, "status": status}
            self.store.changed(("default", name), body)

    async def known(self) -> Ingest:
        """Once it has read the saved plans."""
        for name in self.jobs:
            await self.store.arrival("default", name)
        return self

    def hear(self, name: str, **more: Any) -> None:
        """A report of an iteration."""
        self.sequence += 1
        done = {"index": self.sequence, "seconds": 1.0, "loss": None, "plan_version": 0}
        told = {
            "protocol": 4, "job": name, "namespace": "default", "attempt": 0,
            "sequence": self.sequence, "sent_at": 1.0, "state": "training",
            "iteration": self.sequence, "observed_plan_version": 0, "applied_plan_version": 0,
            "iterations": [done | {"bubble_fraction": 0.0}],
        } | more  # fmt: skip
        controller: Any = self.store.lookup("default", name)
        controller.report(LinkHealthReport.model_validate(told), self.now)

    async def look(self) -> None:
        for name in self.jobs:
            await self.store.look(("default", name))


async def written_of(names: list[str]) -> dict[str, Any]:
    """The status of jobs that train and are well."""
    ingest = Ingest(dict.fromkeys(names, BEGUN), 1000.0)
    while len(ingest.api.status) < len(names):
        assert ingest.now < 1300.0, "not all jobs are written"
        ingest.now += 5.0
        for name in names:
            ingest.hear(name, links=WELL)
        await ingest.look()
    found: dict[str, Any] = ingest.api.status
    return found


def test_after_a_restart_what_has_changed_is_written_before_what_has_not() -> None:
    """All need plan versions then, but for most of them status has nothing new."""
    names = [f"j{number}" for number in range(9)]

    async def run() -> None:
        ingest = await Ingest(await written_of(names), 2000.0, sequence=10_000).known()
        failed, slow = {"state": "failed"}, {"health": "unknown", "link": 0}
        more = {"j7": failed, "j8": {"links": [slow]}}
        for name in names:
            ingest.hear(name, **{"links": WELL} | more.get(name, {}))
        await ingest.look()
        assert ingest.api.order == ["j0", "j1", "j7", "j8"], "of those that are as before, two"
        ingest.now += 1.0
        await ingest.look()
        assert ingest.api.order[4:] == ["j2", "j3"]

    asyncio.run(run())


def test_first_writes_leave_the_api_server_to_others() -> None:
    names = [f"j{number}" for number in range(2 * RUSH_JOBS)]

    async def run() -> list[int]:
        ingest, found = await Ingest(await written_of(names), 2000.0, sequence=10_000).known(), []
        for tick in range(TICKS * 25):
            ingest.now = 2000.0 + tick / TICKS
            if tick % TICKS == 0:
                for name in names:
                    ingest.hear(name, links=WELL)
            await ingest.look()
            found.append(len(ingest.api.order))
        assert all(ingest.store.reserved("default", name) for name in names)
        return found

    found = asyncio.run(run())
    held, ends = found[int(TICKS * RUSH_SECONDS) - 1], found.index(len(names))
    assert held <= 2, "as long as it is a rush"
    assert ends / TICKS - RUSH_SECONDS == pytest.approx(len(names) / BEGINS_PER_SECOND, rel=0.2)


def test_first_writes_wait_while_a_thousand_jobs_come_back() -> None:
    rush, now, written = Rush(), 0.0, []
    began: list[float] = []
    while len(written) < 1000:
        assert now < 120, f"{len(written)} of 1000 were written"
        if len(began) < 1000:
            began += [now] * 40
            for _ in range(40):
                rush.begins(now)
        written += [now for at in began[len(written) :] if not rush.holds(at, now)]
        now += 1.0
    assert written[0] == HELD_SECONDS, "nobody waits for longer"
    assert written[-1] <= 24 + RUSH_SECONDS, "nor once all are back"


def test_a_few_jobs_that_begin_are_no_rush() -> None:
    rush = Rush()
    for second in range(100):
        for _ in range(RUSH_JOBS // int(RUSH_SECONDS)):
            rush.begins(float(second))
        assert not rush.holds(float(second), second + 1.0) or second < 3
