"""Plan versions: none is ever two plans, and no plan is lost, whenever an ingest is killed: in one
process, at every write. tests/cluster does it with real ones."""

from __future__ import annotations

import asyncio
import random
from itertools import product

import pytest
from gate import examples
from versioned_ingest import KEY, SLOW, SLOWER, TURNS, Host, Ranks, ranks

from pipemorph.control import initial_plan
from pipemorph.control.decide.decision_state import PlanVersions
from pipemorph.control.job_state.reports import SupersededIngest
from pipemorph.control.snapshot import pack_snapshot
from pipemorph.protocol import DirectiveEnvelope


def undisturbed_writes() -> int:
    with ranks() as job:
        host = job.host()
        job.run(4)
        for _ in job.turns():
            job.run(2)
        return host.writes


WRITES = range(5)
"""Writes of an ingest, from the first status to the third directive and its figures."""


def test_there_are_as_many_transitions_as_kills() -> None:
    assert len(WRITES) <= undisturbed_writes()


@pytest.mark.parametrize(
    ("write", "got_through", "loses_reply"), [*product(WRITES, [False, True], [False, True])]
)
def test_killed_at_any_write(write: int, got_through: bool, loses_reply: bool) -> None:
    """A directive is served before its write: the ranks may run it, or have never seen it."""
    with ranks() as job:
        job.loses_replies = loses_reply
        host = job.host(write, got_through=got_through)

        def restarted() -> None:
            nonlocal host
            if host.dead:
                before = job.observed
                host = job.host()
                assert job.observed == before

        job.run(4)
        for delays in TURNS:
            restarted()
            job.adapts(delays, between=restarted)
            job.run(2)
        restarted()
        job.run(12)
        controller = job.hosts[0].controller
        assert job.plan.warmup == controller.wanted_plan.warmup
        versions = [record.plan_version for record in controller.records]
        assert versions == sorted(set(versions)) and versions[-1] == job.observed
        assert all(record.saved > 0 for record in controller.records)
        control = job.api.control()
        assert control is not None and control.plan_version >= job.observed


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
        host = job.host()
        job.run(4)
        job.adapts([0.1, 0.1, 0.1])
        assert job.plan == host.controller.wanted_plan


def test_an_ingest_that_restarts_goes_on_from_the_snapshot_of_the_agent() -> None:
    """Plan, records, savings and version; also of a plan that is in no status."""
    with ranks() as job:
        host = job.host()
        job.run(4)
        first, host.away = job.plan, True
        job.adapts(SLOW)
        job.run(12)
        before = host.controller
        job.run(2)
        controller = job.host().controller
        job.run(8)
        assert job.observed == controller.wanted_plan.version == 1, "a needless change"
        assert [r.reason for r in controller.records] == [r.reason for r in before.records]
        assert controller.saved_time.seconds > before.saved_time.seconds > 0
        assert controller.last_profiled_iteration == before.last_profiled_iteration
        assert "the ranks run plan v1" in controller.decisions[0].reason
        training = job.api.job["status"]["training"]
        assert training["wantedPlanVersion"] == training["appliedPlanVersion"] == 1
        assert training["lastAdaptation"]["reason"] == before.records[-1].reason
        # The ingest knows the reason of the plan.
        job.adapts([0.0, 0.0, 0.0])
        assert job.observed == 2
        assert (job.plan.warmup, job.plan.routes) == (first.warmup, first.routes)


def test_if_agent_and_ingest_are_lost_the_initial_plan_runs_and_totals_go_on() -> None:
    with ranks() as job:
        job.host()
        job.run(4)
        job.adapts(SLOW)
        job.run(16)
        before = job.api.job["status"]["training"]
        assert before["adaptations"] == 1 and before["savedSeconds"] > 0
        job.delays = [0.0, 0.0, 0.0]
        host = job.host()
        job.restart_agent()
        job.plan, job.prepared = initial_plan(job.spec), None
        job.run(24)
        assert job.plan.version == 0, "a needless change"
        training = job.api.job["status"]["training"]
        assert training["adaptations"] == 1
        assert training["savedSeconds"] == before["savedSeconds"]
        assert training["lastAdaptation"] == before["lastAdaptation"]
        job.adapts(SLOW)
        assert job.observed == 2, "status has the version of the plan that is lost"
        job.run(16)
        training = job.api.job["status"]["training"]
        assert (training["adaptations"], training["savedSeconds"] > before["savedSeconds"]) == (
            2,
            True,
        )
        assert host.controller.change_count == 2


def test_an_agent_that_starts_again_with_its_ingest_is_given_a_plan_above_its_ranks() -> None:
    """The ranks run a plan that neither process knows. They would run it when the link is well."""
    with ranks() as job:
        host = job.host()
        job.run(4)
        first, host.away = job.plan, True
        job.adapts(SLOW)
        job.delays = [0.0, 0.0, 0.0]
        job.host()
        job.restart_agent()
        job.adapts()
        assert job.observed == 2
        assert (job.plan.warmup, job.plan.routes) == (first.warmup, first.routes)


def test_with_the_api_server_away_jobs_adapt_all_the_same(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipemorph.ingest.handler.PERSIST_RETRY_SECONDS", 0.0)
    with ranks() as job:
        host = job.host()
        job.run(4)
        host.away = True
        for _ in job.turns():
            pass
        assert job.observed == 3
        assert "plan v1 was served but status was not written; retrying: no API server" in (
            caplog.text
        )
        assert job.api.control() is None
        host.away = False
        job.run(2)
        control = job.api.control()
        assert control is not None and control.plan_version == host.controller.plan_version >= 3


# --- two ingests ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "expected"),
    [((0, 0, 0), (0, 1, 2)), ((7, 3, 1), (7, 8, 9)), ((2, 3, 9), (2, 3, 9))],
    ids=["equal", "reset", "growing"],
)
def test_hosts_one_after_the_other(terms: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Hosts lead in a higher term than those before, and begin above their versions."""
    with ranks() as job:
        hosts: list[Host] = []
        seen = []
        for term, delays in zip(terms, TURNS, strict=True):
            hosts.append(job.host(term=term))
            job.run(4)
            job.adapts(delays)
            job.run(2)
            seen.append(hosts[-1].controller.term)
        assert seen == list(expected)
        assert [*job.plans] == [*range(1, job.observed + 1)], "a requested one is missing"
        # The ranks reach one that leads no more.
        observed, sequence = job.observed, hosts[0].controller._job_state.sequence
        last, job.hosts = job.hosts, [hosts[0]]
        job.delays = list(SLOW)
        job.run(4)
        assert hosts[0].controller._job_state.sequence <= sequence, "it has taken a report"
        assert (job.observed, job.refused > 0) == (observed, True)
        job.hosts = last
        job.adapts()
        assert job.observed == observed + 1


def test_an_answer_of_a_lower_term_changes_nothing() -> None:
    with ranks() as job:
        old = job.host(term=3)
        job.run(4)
        job.adapts(SLOW)
        stale = DirectiveEnvelope(term=3, directive=old.controller.get_directive(), snapshot="x")
        new = job.host(term=4)
        job.run(4)
        assert job.term == new.controller.term == 4
        held = job.snapshot
        assert not job.takes(stale) and job.snapshot == held


def crossing(job: Ranks) -> Host:
    """An ingest that has made a v2 which the ranks have not got, after another ingest."""
    job.host()
    job.run(4)
    job.adapts(SLOW)
    job.run(8)
    second = job.host(term=1)
    job.run(4)
    assert second.controller.wanted_plan == job.plan
    # Answers are lost from now on, so the agent has not seen its new plans.
    job.delays, job.drops = list(SLOWER), 1.0
    while second.controller.plan_version < 2:
        job.step()
    job.drops = 0.0
    return second


@pytest.mark.parametrize("confirmed", [True, False], ids=["by its agent", "by another agent"])
def test_the_plan_that_reached_the_ranks_keeps_its_version(confirmed: bool) -> None:
    with ranks() as job:
        second = crossing(job)
        job.hand_in_gets = {200, 422}
        assert job.newest is not None and job.newest.record is not None
        # The plan of the first one, made at another time.
        other = job.newest
        plan = other.plan.model_copy(update={"version": 2})
        record = other.record.model_copy(update={"plan_version": 2})  # type: ignore[union-attr]
        update = {"plan_version": 2, "plan": plan, "record": record, "issued_at": 999.0}
        assert job.takes(
            DirectiveEnvelope(term=job.term or 0, directive=other.model_copy(update=update))
        )
        job.plan, job.prepared = plan.to_plan(), None
        if not confirmed:
            job.restart_agent()
        job.adapts()
        assert job.observed == 3, "the second one has given its plan another version"
        assert second.controller.wanted_plan == job.plan
        assert [r.plan_version for r in second.controller.records][-2:] == [1, 3]


@pytest.mark.parametrize("seed", range(examples(2)))
def test_two_ingests_at_a_time_give_no_version_to_two_plans(seed: int) -> None:
    """The ranks reach both, whatever Lease they hold; also if the answers of one are lost."""
    chance = random.Random(seed)
    with ranks() as job:
        hosts = [job.host(term=chance.randrange(3))]
        job.hand_in_gets = {200, 422}
        job.run(4)
        hosts.append(job.host(term=chance.randrange(3)))
        for _ in range(6):
            job.hosts = chance.sample(hosts, chance.choice([1, 2]))
            job.drops = chance.choice([0.0, 0.5])
            for host in hosts:
                host.away = chance.random() < 0.3
            job.delays = list(chance.choice(TURNS))
            job.run(chance.randrange(3, 9))
        # The one that leads goes on.
        job.drops, leads = 0.0, job.host(term=chance.randrange(3))
        job.run(12)
        job.adapts([0.1, 0.1, 0.1])
        job.run(4)
        assert leads.controller.wanted_plan == job.plan
        assert job.observed <= len(job.plans) + 8, "versions grow without plans"


def test_a_late_write_of_another_ingest_takes_no_version_back() -> None:
    with ranks() as job:
        first = job.host()
        job.run(4)
        first.late = asyncio.Event()
        job.adapts(SLOW)
        second = job.host(term=1)
        job.run(4)
        job.adapts(SLOWER)
        job.run(4)
        control = job.api.control()
        assert control is not None and control.plan_version == 2
        first.late.set()
        for _ in range(60):
            job.loop.run_until_complete(asyncio.sleep(0))
        control = job.api.control()
        assert control is not None and control.plan_version == 2
        assert second.store.find_job(*KEY) is not None
        job.adapts(TURNS[2])
        assert job.observed == 3


def test_a_bad_snapshot_is_refused_and_the_ingest_goes_on_with_what_it_knows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ranks() as job:
        job.host()
        job.run(4)
        job.adapts(SLOW)
        host = job.host()
        job.snapshot, job.hand_in_gets = pack_snapshot({"attempt": 0}), {422}
        job.adapts(SLOWER)
        assert (
            "refused the snapshot of the job's agent: snapshot.plan_version: Field" in caplog.text
        )
        assert job.observed == 2 == host.controller.plan_version
        assert host.controller.change_count == 2, "totals go on from status"


def test_terms_of_one_host() -> None:
    """The first report shows whether there was another host; the next ones are of this host."""
    new, after = PlanVersions(4), PlanVersions(4)
    new.record_reported_term(None)
    new.record_reported_term(4)
    after.record_reported_term(4)
    after.record_reported_term(5)
    assert (new.term, after.term) == (4, 5)
    with pytest.raises(
        SupersededIngest, match="an ingest of term 5 controls this job; this one has term 4"
    ):
        new.record_reported_term(5)
