"""No version is ever two plans where an agent decides while it reaches no ingest."""

from __future__ import annotations

import random

import pytest
from gate import examples
from versioned_ingest import KEY, RESERVED, SLOW, SLOWER, TURNS, ranks

from pipemorph.ingest import Versions
from pipemorph.ingest.plan_versions import BLOCK, LOW


def test_an_agent_that_reaches_no_ingest_decides_and_hands_in() -> None:
    with ranks() as job:
        job.host()
        job.run(4)
        assert job.observes.observer.versions == (BLOCK + 1, RESERVED)
        job.adapts(SLOW)
        assert (job.observed, job.own) == (1, set())
        job.meets(alone=True)
        job.adapts(SLOWER)
        assert job.own == {job.observed} == {BLOCK + 1}
        # The one before may come back, or another one.
        for host in (job.hosts[0], job.host()):
            job.hosts = [host]
            job.meets(alone=False)
            before = job.observed
            job.run(6)
            controller = host.store._tracked[KEY].controller
            assert job.observed == controller.wanted.version == before, "a needless change"
            last = job.api.job["status"]["training"]["lastAdaptation"]
            assert last["planVersion"] == before
            assert last["reason"] == controller.records[-1].reason
            assert [r.plan_version for r in controller.records][:2] == [1, BLOCK + 1]
            job.meets(alone=True)
            job.adapts([0.0, 0.0, 0.0] if job.delays == SLOWER else SLOWER)
            assert job.observed in job.own
        assert len(job.own) == 3


def test_with_the_api_server_away_the_agent_has_versions_too() -> None:
    """It was given them before, and they stay its own when the host's run out."""
    with ranks() as job:
        host = job.host()
        job.run(4)
        host.away = True
        host.store._tracked[KEY].controller.skip_to(BLOCK)
        job.meets(alone=True)
        job.adapts(SLOW)
        assert job.own == {BLOCK + 1}
        job.meets(alone=False)
        job.run(4)
        host.away = False
        job.adapts(SLOWER)
        assert job.observed > RESERVED


def test_an_ingest_gives_no_version_of_the_agent_s() -> None:
    """It goes on from the agent's plan, and the agent gets none of its answers to that."""
    with ranks() as job:
        job.host()
        job.run(4)
        job.meets(alone=True)
        job.adapts(SLOW)
        job.meets(alone=False)
        job.deaf = True
        job.delays = SLOWER
        job.run(8)
        assert job.hosts[0].store._tracked[KEY].controller.wanted.version == RESERVED + 1
        assert job.observed == BLOCK + 1
        job.meets(alone=True)
        job.adapts(TURNS[2])
        assert job.observed == BLOCK + 2


def test_another_agent_gets_other_versions() -> None:
    with ranks() as job:
        job.host()
        job.run(4)
        job.meets(alone=True)
        job.adapts(SLOW)
        assert job.own == {BLOCK + 1}
        job.restart_agent()
        job.delays = SLOWER
        job.run(8)
        assert job.own == {BLOCK + 1}, "none before an ingest has answered"
        job.meets(alone=False)
        job.run(8)
        assert job.observes.observer.versions is not None
        assert job.observes.observer.versions[0] > RESERVED
        # Nor does it get those of one that has given none.
        before = job.observes.observer.versions
        job.restart_agent()
        job.run(4)
        assert job.observes.observer.versions[0] > before[1]


def test_no_versions_for_an_agent_whose_job_does_not_adapt() -> None:
    with ranks() as job:
        job.api.job["spec"]["adaptation"] = {"enabled": False}
        job.host()
        job.run(4)
        assert job.observes.observer.versions is None


@pytest.mark.parametrize("seed", range(examples(1)))
def test_whoever_decides_no_version_is_two_plans(seed: int) -> None:
    """Ingests are killed at any write, the API server goes away, the agent is cut off from all
    ingests, or starts again, at random."""
    chance = random.Random(seed)
    with ranks() as job:
        job.hand_in_gets = {200, 422}
        host = job.host()
        job.run(4)
        job.meets(alone=True)
        job.adapts(SLOW)
        assert job.own, "the agent has not decided"
        newest = [0]
        for _ in range(5):
            job.meets(alone=chance.random() < 0.5)
            if host.dead or chance.random() < 0.3:
                host = job.host(chance.randrange(2, 8), got_through=chance.random() < 0.5)
            host.away = chance.random() < 0.15
            if chance.random() < 0.1:
                job.restart_agent()
            job.drops = chance.choice([0.0, 0.0, 0.0, 1.0])
            job.delays = list(chance.choice(TURNS))
            job.run(chance.randrange(3, 9))
            newest.append(job.plan.version)
        assert newest == sorted(newest)
        job.drops = 0.0
        job.meets(alone=False)
        job.host()
        job.run(30)
        job.adapts([0.1, 0.1, 0.1])
        control = job.api.control()
        assert control is not None and control.plan_version >= job.observed


def test_reserved_versions_are_counted_from_what_was_written() -> None:
    versions = Versions(70)
    assert versions.run_out(70)
    versions.written(70)
    assert versions.granted == 0, "another one's"
    for _ in range(2):
        # The write failed, as far as is known; it may have got through.
        versions.reserve(70)
        assert (versions.reserved, versions.granted) == (70 + RESERVED, 0)
    versions.written(70 + RESERVED)
    assert versions.granted == 70 + BLOCK
    versions.reserve(70 + LOW)
    assert versions.reserved == 70 + RESERVED
    versions.reserve(71 + LOW)
    assert (versions.reserved, versions.granted) == (70 + 2 * RESERVED, 70 + BLOCK)


def test_the_versions_of_an_agent_are_no_host_s_and_no_other_agent_s() -> None:
    versions = Versions(0)
    assert not versions.for_agent(), "none is reserved"
    versions.another_agent()
    versions.reserve(0)
    versions.written(RESERVED)
    first = versions.for_agent()
    assert (first[0], first[-1], versions.granted) == (BLOCK + 1, RESERVED, BLOCK)
    versions.written(RESERVED)
    assert versions.for_agent() == first, "as long as it is the same agent"
    handed_in = [version for version in range(300) if versions.may_have(version)]
    assert handed_in == [0, *first], "its plans may be handed in, and no others"
    versions.another_agent()
    assert not versions.for_agent()
    assert versions.run_out(1)
    versions.written(RESERVED)
    assert not versions.for_agent(), "with any write but that of a reservation"
    versions.reserve(1)
    versions.written(versions.reserved)
    assert versions.for_agent()[0] > RESERVED
