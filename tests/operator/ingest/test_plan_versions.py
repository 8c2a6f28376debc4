"""No version is ever two plans, and no plan is lost, whenever an ingest is killed: in one process,
at every write. tests/cluster does it with real ones."""

from __future__ import annotations

import random
from itertools import product

import pytest
from gate import examples
from versioned_ingest import KEY, RESERVED, SLOW, SLOWER, TURNS, ranks

from pipemorph.ingest.plan_versions import AGENT_BLOCK, BLOCK, LOW
from pipemorph_operator.ingest.status.write_schedule import FLOOR_SECONDS


def undisturbed_writes() -> int:
    with ranks() as job:
        host = job.host()
        job.run(4)
        for _ in job.turns():
            job.run(2)
        return host.writes


WRITES = range(9)
"""Of one ingest, of status and of plans, from the first reservation to the third directive and its
figures."""


def test_there_are_as_many_transitions_as_kills() -> None:
    assert len(WRITES) <= undisturbed_writes()


KILLS = list(product(WRITES, [False, True], [False, True]))
EACH_WRITE = [KILLS[4 * write + write % 4] for write in WRITES]


@pytest.mark.parametrize(
    ("write", "got_through", "loses_reply"),
    [pytest.param(*kill, marks=() if kill in EACH_WRITE else pytest.mark.full) for kill in KILLS],
)
def test_killed_at_any_write(write: int, got_through: bool, loses_reply: bool) -> None:
    with ranks() as job:
        job.loses_replies = loses_reply
        host = job.host(write, got_through=got_through)

        def restarted() -> None:
            nonlocal host
            if host.dead:
                kept = job.observed
                host = job.host()
                assert job.observed == kept

        job.run(4)
        for delays in TURNS:
            restarted()
            job.adapts(delays, between=restarted)
            job.run(2)
        restarted()
        job.run(12)
        assert job.plan.warmup == job.hosts[0].store._tracked[KEY].controller.wanted.warmup
        control = job.api.control()
        assert control is not None and control.plan_version >= job.observed
        saved = job.host().store._tracked[KEY].controller.wanted
        assert saved.version == job.observed, "what is in force is saved at last"


@pytest.mark.parametrize("seed", range(examples(2)))
def test_killed_again_and_again(seed: int) -> None:
    chance = random.Random(seed)
    with ranks() as job:
        seen = [0]
        for _ in range(6):
            host = job.host(chance.randrange(6), got_through=chance.random() < 0.5)
            job.loses_replies = chance.random() < 0.5
            job.delays = list(chance.choice(TURNS))
            for _ in range(chance.randrange(4, 16)):
                job.step()
                if host.dead:
                    break
            seen.append(job.observed)
        assert seen == sorted(seen)
        assert len(job.plans) >= 2


def test_a_block_is_reserved_before_the_first_directive_and_with_one_write() -> None:
    with ranks() as job:
        host = job.host()
        job.run(2)
        control = job.api.control()
        assert control is not None
        assert (control.plan_version, control.reserved) == (0, RESERVED)
        assert host.store.reserved(*KEY) == BLOCK
        for _ in job.turns():
            pass
        control = job.api.control()
        assert control is not None and control.reserved == RESERVED, "not with every directive"


def test_the_next_block_is_reserved_while_half_of_the_last_is_left() -> None:
    with ranks() as job:
        host = job.host()
        job.run(2)
        controller = host.store._tracked[KEY].controller
        controller.skip_to(BLOCK - LOW + 1)
        due = job.now + FLOOR_SECONDS
        while job.now < due:
            job.run(1)
        control = job.api.control()
        assert control is not None and control.reserved == 2 * RESERVED
        assert host.store.reserved(*KEY) == control.reserved - AGENT_BLOCK
        job.run(2)
        assert controller.plan_version == RESERVED, "the agent may have used the versions below"


def test_a_new_ingest_begins_above_the_block_of_the_last() -> None:
    with ranks() as job:
        job.host()
        job.run(4)
        job.adapts(SLOW)
        assert job.observed == 1
        job.host()
        job.adapts(SLOWER)
        assert job.observed == RESERVED + 1


def test_a_plan_that_was_served_and_not_persisted_is_not_forgotten() -> None:
    """The ranks run it and say so; without that they would keep it when the link is well. An agent
    that has started again cannot hand it in."""
    with ranks() as job:
        job.hands_in = False
        host = job.host()
        job.run(4)
        first, host.away = job.plan, True
        job.adapts(SLOW)
        host.dead = True
        job.delays = [0.0, 0.0, 0.0]
        job.run(12)
        assert job.plan.warmup != first.warmup, "nobody tells the ranks of another plan"
        job.host()
        job.adapts()
        assert job.observed == RESERVED + 1
        assert (job.plan.warmup, job.plan.routes) == (first.warmup, first.routes)


def test_the_next_ingest_goes_on_from_a_plan_that_is_in_no_status() -> None:
    with ranks() as job:
        host = job.host()
        job.run(4)
        first, host.away = job.plan, True
        job.adapts(SLOW)
        reason = host.store._tracked[KEY].controller.records[-1].reason
        host.dead = True
        job.run(2)
        controller = job.host().store._tracked[KEY].controller
        job.run(8)
        assert job.observed == controller.wanted.version == 1, "a needless change"
        assert {each.kind for each in controller.decisions} == {"keep"}
        assert "the ranks run plan v1, which is not saved here" in controller.decisions[0].reason
        training = job.api.job["status"]["training"]
        assert training["wantedPlanVersion"] == training["appliedPlanVersion"] == 1
        assert training["lastAdaptation"]["reason"] == reason
        saved = job.host().store._tracked[KEY].controller
        assert saved.wanted == job.plan, "it is saved now"
        # It knows what the plan is for.
        job.adapts([0.0, 0.0, 0.0])
        assert job.observed == 2 * RESERVED + 1
        assert (job.plan.warmup, job.plan.routes) == (first.warmup, first.routes)


def test_a_plan_of_a_version_that_was_never_reserved_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ranks() as job:
        job.host()
        job.run(4)
        job.adapts(SLOW)
        host = job.host()
        job.run(1)
        assert job.newest is not None and job.newest.record is not None
        above = RESERVED + 1
        plan = job.newest.plan.model_copy(update={"version": above})
        record = job.newest.record.model_copy(update={"plan_version": above})
        forged = {"plan_version": above, "plan": plan, "record": record}
        job.newest, job.observed = job.newest.model_copy(update=forged), above
        job.hand_in_gets = {422}
        job.run(2)
        assert f"plan v{above} was never given: no other ingest" in caplog.text
        assert host.store._tracked[KEY].controller.plan_version > above, "it decided without it"


def test_with_the_api_server_away_jobs_adapt_to_the_end_of_the_block(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipemorph.ingest.handler.PERSIST_AGAIN_SECONDS", 0.0)
    with ranks() as job:
        host = job.host()
        job.run(4)
        host.away = True
        job.adapts(SLOW)
        assert job.observed == 1
        assert "plan v1 was served but not persisted; retrying: no API server" in caplog.text
        control = job.api.control()
        assert control is not None and control.plan_version == 0
        # The end of the block.
        controller = host.store._tracked[KEY].controller
        controller.skip_to(BLOCK)
        job.delays = SLOWER
        job.run(20)
        assert job.observed == 1
        above = RESERVED + 1  # The versions between are the agent's.
        assert controller.plan_version == above
        assert f"v{above} could not be persisted, and no version is reserved" in caplog.text
        host.away = False
        job.run(2)
        assert job.observed == above
        control = job.api.control()
        assert control is not None and control.plan_version == above


@pytest.mark.parametrize("seed", range(examples(1)))
def test_two_ingests_at_a_time_give_no_version_to_two_plans(seed: int) -> None:
    """One was cut off from the API server for a while, and the ranks reach both."""
    chance = random.Random(seed)
    with ranks() as job:
        hosts = [job.host()]
        # One that is behind has not reserved what the other one served: it refuses that.
        job.hand_in_gets = {200, 422}
        job.run(4)
        hosts[0].away = True
        hosts.append(job.host())
        for _ in range(4):
            job.hosts = chance.sample(hosts, chance.choice([1, 2]))
            for host in hosts:
                host.away = chance.random() < 0.3
            job.delays = list(chance.choice(TURNS))
            job.run(chance.randrange(3, 9))
        # Whichever is left goes on.
        job.hosts = [chance.choice(hosts)]
        job.hosts[0].away = False
        job.run(12)
        job.adapts([0.1, 0.1, 0.1])
        assert job.api.reserved() < 20 * RESERVED, "they drove each other out without end"
