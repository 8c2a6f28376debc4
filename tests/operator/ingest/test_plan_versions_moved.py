"""No version is ever two plans, and no plan is lost, where a job moves between ingests."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
from gate import examples
from versioned_ingest import KEY, RESERVED, SLOW, SLOWER, TURNS, Api, Host, Ranks, ranks

from pipemorph_operator.ingest.seats.share import Share


class Replica(Host):
    """One of several ingests, to which the job is dealt or not."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        self.has_it = False
        super().__init__(api, clock)
        cluster: Any = self
        self.share = Share(cluster, self.store, lambda _: self.has_it)
        self.store.on_dropped = lambda job, _: self.handler.dropped(job)
        self.share.changed(KEY, copy.deepcopy(api.job))
        assert self.share.elsewhere(*KEY) == api.job["metadata"]["uid"]

    async def deal(self, has_it: bool) -> None:
        self.has_it = has_it
        self.share.redeal()
        # At once: it says that it has dropped it.
        assert (self.store.lookup(*KEY) is None) or has_it
        await self.share.arrival(*KEY)
        assert (self.store.lookup(*KEY) is not None) == has_it


def moved(job: Ranks, to: Replica, *others: Replica) -> None:
    for each in others:
        job.loop.run_until_complete(each.deal(False))
    job.loop.run_until_complete(to.deal(True))
    job.hosts = [to]


def test_a_job_that_moves_keeps_its_plan() -> None:
    with ranks() as job:
        first, second = (Replica(job.api, lambda: job.now) for _ in range(2))
        moved(job, first, second)
        job.run(4)
        first.away = True  # The plan is in no status.
        job.adapts(SLOW)
        plan = job.plan
        moved(job, second, first)
        job.run(8)
        assert (job.observed, job.plan) == (1, plan), "a needless change"
        controller = second.store._tracked[KEY].controller
        assert controller.wanted == plan
        health = [link.health for link in controller.links(job.now)]
        assert health == ["healthy", "slow", "healthy"], "evidence was lost"
        # And back to one that had an older state of it.
        first.away = False
        job.adapts(SLOWER)
        moved(job, first, second)
        observed, plan = job.observed, job.plan
        job.run(8)
        assert (job.observed, job.plan) == (observed, plan), "a needless change"
        assert first.store._tracked[KEY].controller.wanted == plan


@pytest.mark.parametrize("seed", range(examples(1)))
def test_a_job_that_moves_at_any_moment_has_no_version_twice(seed: int) -> None:
    """Also where a write of the one that had it arrives after the other one has read the job."""
    chance = random.Random(seed)
    with ranks() as job:
        both = [Replica(job.api, lambda: job.now) for _ in range(2)]
        moved(job, both[0], both[1])
        job.run(4)
        for delays in TURNS * 2:
            job.delays = list(delays)
            old, new = both
            if chance.random() < 0.7:
                old.late = asyncio.Event()
            job.run(chance.randrange(1, 4))
            moved(job, new, old)
            job.run(chance.randrange(0, 3))
            if old.late is not None:
                old.late.set()
                old.late = None
            job.run(2)
            both.reverse()
        job.delays = [0.0, 0.0, 0.0]
        job.run(30)
        tracked = both[0].store._tracked[KEY]
        assert tracked.controller.wanted == job.plan
        assert both[1].store.lookup(*KEY) is None
        control = job.api.control()
        assert control is not None
        assert control.plan_version == job.observed > 1
        assert job.api.reserved() < 20 * RESERVED


def test_a_poll_of_a_job_that_moves_is_answered() -> None:
    with ranks() as job:
        first = Replica(job.api, lambda: job.now)
        moved(job, first)
        poll = first.handler.poll(*KEY, attempt="0", after="0", wait="25")
        asked = job.loop.create_task(poll)
        job.loop.run_until_complete(asyncio.sleep(0.01))
        assert not asked.done()
        job.loop.run_until_complete(first.deal(False))
        reply = job.loop.run_until_complete(asyncio.wait_for(asked, 5.0))
        assert reply.status == 404


def test_a_job_that_was_lost_while_it_was_read_is_not_taken() -> None:
    with ranks() as job:
        first = Replica(job.api, lambda: job.now)

        async def test() -> None:
            first.has_it = True
            first.share.redeal()
            await first.deal(False)
            assert first.share.elsewhere(*KEY)
            # One that is deleted while it is read stays deleted.
            first.has_it = True
            first.share.redeal()
            first.share.changed(KEY, None)
            await asyncio.sleep(0.01)
            assert first.store.lookup(*KEY) is None
            assert first.share.elsewhere(*KEY) is None

        job.loop.run_until_complete(test())
