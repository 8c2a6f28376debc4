"""Takeover by another ingest: no version is ever two plans, and no plan is lost."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Callable

import pytest
from fake_api import FakeCluster
from gate import examples
from versioned_ingest import KEY, SLOW, SLOWER, TURNS, Api, Host, Ranks, ranks

from pipemorph_operator.ingest.job_store import ClusterJobStore, StandbyJobCache


class Standby(Host):
    """Ingest that follows the job, and leads when the test lets it."""

    def __init__(self, api: Api, clock: Callable[[], float]) -> None:
        super().__init__(api, clock)
        self.cache = StandbyJobCache(self.store)
        self.store.on_dropped = lambda job, _: self.handler.drop_job(job)
        self.reads()

    def reads(self) -> None:
        """Update its informer to the newest state of the job."""
        self.cache.process_change(KEY, copy.deepcopy(self.api.job))

    async def lead(self) -> None:
        await self.cache.pass_jobs_on()
        await self.store.wait_for_job(*KEY)
        assert self.store.find_job(*KEY) is not None


def standby(job: Ranks) -> Standby:
    return Standby(job.api, lambda: job.now)


def leads(job: Ranks, next_one: Standby) -> None:
    job.loop.run_until_complete(next_one.lead())
    job.hosts = [next_one]


def test_a_standby_tracks_no_job_and_writes_nothing() -> None:
    with ranks() as job:
        first, second = standby(job), standby(job)
        leads(job, first)
        job.run(4)
        job.adapts(SLOW)
        second.reads()
        assert second.store.find_job(*KEY) is None and second.writes == 0
        assert first.writes > 0
        # A job that is deleted or has ended meanwhile is not taken over.
        second.cache.process_change(KEY, None)
        job.loop.run_until_complete(second.cache.pass_jobs_on())
        assert second.store.find_job(*KEY) is None


def test_the_next_leader_keeps_the_plan() -> None:
    with ranks() as job:
        first, second, third = (standby(job) for _ in range(3))
        leads(job, first)
        job.run(4)
        first.away = True  # The plan is in no status.
        job.adapts(SLOW)
        plan = job.plan
        leads(job, second)
        job.run(8)
        assert (job.observed, job.plan) == (1, plan), "a needless change"
        controller = second.store._tracked[KEY].controller
        assert controller.wanted_plan == plan
        health = [link.health for link in controller.get_link_states(job.now)]
        assert health == ["healthy", "slow", "healthy"], "evidence was lost"
        # The third one leads from an older state than the second has written.
        job.adapts(SLOWER)
        leads(job, third)
        observed, plan = job.observed, job.plan
        job.run(8)
        assert (job.observed, job.plan) == (observed, plan), "a needless change"
        assert third.store._tracked[KEY].controller.wanted_plan == plan


@pytest.mark.parametrize("seed", range(examples(1)))
def test_a_takeover_at_any_moment_uses_no_version_twice(seed: int) -> None:
    """Writes of the former leader may arrive after the next one has read the job."""
    chance = random.Random(seed)
    with ranks() as job:
        old = standby(job)
        leads(job, old)
        job.run(4)
        for delays in TURNS * 2:
            job.delays = list(delays)
            if chance.random() < 0.7:
                old.late = asyncio.Event()
            new = standby(job)
            job.run(chance.randrange(1, 4))
            if chance.random() < 0.5:
                new.reads()  # Otherwise it has an older state.
            leads(job, new)
            job.run(chance.randrange(0, 3))
            if old.late is not None:
                old.late.set()
                old.late = None
            job.run(2)
            old = new
        job.delays = [0.0, 0.0, 0.0]
        job.run(30)
        assert old.store._tracked[KEY].controller.wanted_plan == job.plan
        control = job.api.control()
        assert control.plan_version == job.observed > 1


def test_a_poll_of_a_job_that_is_dropped_is_answered() -> None:
    with ranks() as job:
        first = standby(job)
        leads(job, first)
        poll = first.handler.handle_directive_poll(*KEY, attempt="0", after="0", wait="25")
        polled = job.loop.create_task(poll)
        job.loop.run_until_complete(asyncio.sleep(0.01))
        assert not polled.done()
        first.cache.process_change(KEY, None)
        reply = job.loop.run_until_complete(asyncio.wait_for(polled, 5.0))
        assert reply.status == 404


async def test_a_change_during_the_takeover_is_newer_than_what_was_held(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Store:
        """Records its input; does not need one of the jobs."""

        def __init__(self) -> None:
            self.got: dict[tuple[str, str], object] = {}
            self.complete = False

        def needs_job(self, key: tuple[str, str], body: dict[str, object]) -> bool:
            return key[1] != "idle"

        def process_change(self, key: tuple[str, str], body: dict[str, object] | None) -> None:
            assert not self.complete or key[1] == "late"
            if key[1] == "bad":
                raise ZeroDivisionError
            self.got[key] = body and body["spec"]

        def mark_all_listed(self) -> None:
            self.complete = True

    store = Store()
    cache = StandbyJobCache(store)  # type: ignore[arg-type]

    def changed(name: str, spec: str) -> None:
        body = {"metadata": {"managedFields": []}, "spec": spec}
        cache.process_change(("team", name), body)

    for name in ("a", "bad", "b", "idle"):
        changed(name, "old")
    leading = asyncio.create_task(cache.pass_jobs_on())
    await asyncio.sleep(0)  # One has been passed on.
    changed("a", "new")
    await leading
    assert store.got == {("team", "a"): "new", ("team", "b"): "old"} and store.complete
    changed("late", "new")
    assert store.got["team", "late"] == "new"
    assert "team/bad could not be taken over" in caplog.text


def test_a_job_of_a_namespace_that_is_not_listed_yet_may_still_come() -> None:
    """Pods are requested to come again, not turned away, while the API server refuses the rest."""
    store = ClusterJobStore(FakeCluster())
    store.is_listed = lambda namespace: namespace != "refused"
    assert store.may_appear("team", "gpt")
    store.mark_all_listed()
    assert store.may_appear("refused", "gpt") and not store.may_appear("team", "gpt")
