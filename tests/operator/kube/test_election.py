"""Leader election of replicas: the rules of the Lease, on clocks that tests set."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kubernetes.aio.client import Configuration
from operator_leases import Leases
from waiting import until_async

from pipemorph_operator.kube.client import KubeClient
from pipemorph_operator.kube.election import LeaderElection, NotLeaderError

PATIENCE = 15.0
SECONDS = 6
ACT = 4.0
"""Seconds that the holder of such a Lease may act after it has renewed it."""

Object = dict[str, Any]


NAME = "operator"


class Candidate:
    """A replica with a clock of its own."""

    def __init__(
        self,
        api: Leases,
        name: str,
        *,
        clock: float = 0.0,
        seconds: int = SECONDS,
        outlasts: bool = False,
    ) -> None:
        self.now = clock
        self.election = LeaderElection(
            api, "system", NAME, name,
            seconds=seconds, outlasts_renewals=outlasts, clock=lambda: self.now,
        )  # fmt: skip

    async def tries(self, *, after: float = 0.0) -> bool:
        """Return true if it leads after another try, ``after`` seconds later."""
        self.now += after
        return await self.election._try_acquire_or_renew()


async def test_one_leads_and_another_waits_until_it_has_seen_no_change_for_a_whole_duration() -> (
    None
):
    api = Leases()
    # Clocks that have nothing in common.
    first, second = Candidate(api, "a"), Candidate(api, "b", clock=1e6)
    assert await first.tries()
    assert api.spec(NAME)["leaseTransitions"] == 0
    assert not await second.tries()
    for _ in range(20):  # Renewals count from when they are seen.
        assert await first.tries(after=3.0)
        assert not await second.tries(after=3.0)
    assert not await second.tries(after=SECONDS - 0.1)
    assert await second.tries(after=0.2)
    assert (api.spec(NAME)["holderIdentity"], api.spec(NAME)["leaseTransitions"]) == ("b", 1)
    assert not await first.tries(after=SECONDS)
    assert not first.election.is_leader


@pytest.mark.parametrize("renewed", ["1999-01-01T00:00:00.000000Z", "2999-01-01T00:00:00.000000Z"])
async def test_times_in_the_lease_mean_nothing(renewed: str) -> None:
    api = Leases()
    api.take(NAME, holderIdentity="a", renewTime=renewed)
    other = Candidate(api, "b")
    assert not await other.tries()
    assert not await other.tries(after=SECONDS - 0.1)
    assert await other.tries(after=0.2)


async def test_the_holder_stops_acting_before_another_can_take_the_lease() -> None:
    api = Leases()
    first, second = Candidate(api, "a"), Candidate(api, "b")
    await first.tries()
    await second.tries()
    api.away = True
    for each in (first, second):
        assert not await each.tries(after=ACT - 0.1)
    assert 0 < first.election.remaining_write_seconds() < 0.2
    first.now += 0.2
    with pytest.raises(NotLeaderError, match="a stands by; no replica leads"):
        first.election.remaining_write_seconds()
    api.away = False
    assert not await second.tries(after=SECONDS - ACT - 0.1)
    assert await second.tries(after=0.4)
    assert first.election.describe_state() == "a stands by; no replica leads"
    assert not await first.tries()
    assert first.election.describe_state() == "a stands by; b leads"


async def test_the_time_a_renewal_takes_counts_for_others() -> None:
    """The Lease may have been written at the beginning of the request."""
    api = Leases()
    holder = Candidate(api, "a")

    async def slow() -> None:
        holder.now += 3.0

    api.before_write = slow
    assert await holder.tries()
    assert holder.election.remaining_write_seconds() == pytest.approx(ACT - 3.0)


async def test_of_two_that_take_it_at_the_same_time_one_succeeds() -> None:
    api = Leases()
    first = Candidate(api, "a")
    taken: list[bool] = []

    async def other() -> None:
        api.take(NAME, holderIdentity="b", leaseDurationSeconds=9)
        taken.append(True)

    for _ in range(2):  # The Lease does not exist; it is free.
        api.before_write = other
        assert not await first.tries()
        assert taken.pop()
        assert not await first.tries(), "the other one's was taken"
        api.spec(NAME)["holderIdentity"] = ""


async def test_an_edit_by_hand_does_not_end_the_leaders_turn() -> None:
    api = Leases()
    holder = Candidate(api, "a")
    await holder.tries()
    edited = copy.deepcopy(api.lease(NAME))
    edited["metadata"]["labels"] = {"seen": "by hand"}
    api.put(edited)
    assert not await holder.tries(after=1.0)
    assert holder.election.is_leader
    assert await holder.tries(after=1.0)
    assert api.lease(NAME)["metadata"]["labels"] == {"seen": "by hand"}


async def test_the_holders_own_duration_counts() -> None:
    """The setting is being changed, so durations differ."""
    api = Leases()
    long, short = Candidate(api, "a", seconds=60), Candidate(api, "b")
    await long.tries()
    assert not await short.tries()
    assert not await short.tries(after=59.0)
    assert await short.tries(after=2.0)


async def test_one_that_starts_again_under_its_name_goes_on_at_once() -> None:
    api = Leases()
    assert await Candidate(api, "a").tries()
    assert await Candidate(api, "a").tries()


async def test_every_process_that_leads_has_a_higher_term() -> None:
    api = Leases()
    first, second = Candidate(api, "a"), Candidate(api, "b")
    assert await first.tries() and not await second.tries()
    assert await first.tries(after=3.0), "a renewal is no new term"
    assert first.election.term == 0
    restarted = Candidate(api, "a")
    assert await restarted.tries() and restarted.election.term == 1
    assert not await second.tries()
    await restarted.election._release_lease()
    assert await second.tries() and second.election.term == 2
    assert api.spec(NAME)["leaseTransitions"] == 2


async def test_a_lease_that_somebody_deletes_is_made_again_with_a_higher_term() -> None:
    api = Leases()
    api.take(NAME, holderIdentity="", leaseTransitions=6)
    leader, standby = Candidate(api, "a"), Candidate(api, "b")
    assert await leader.tries() and not await standby.tries()
    assert leader.election.term == 7
    api.lose(NAME)
    await leader.tries(after=1.0)  # The replica finds no Lease.
    assert leader.election.is_leader and await leader.tries() and leader.election.term == 8
    assert not await standby.tries()
    api.lose(NAME)
    assert await standby.tries() and standby.election.term == 9
    assert not await leader.tries(after=1.0) and not await leader.tries()


async def test_who_stops_releases_the_lease_after_its_work_has_ended() -> None:
    api = Leases()
    first = Candidate(api, "a")
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.append(str(api.spec(NAME)["holderIdentity"]))

    stop = asyncio.Event()
    turn = asyncio.create_task(first.election.run(work, stop))
    await until_async(lambda: first.election.is_leader, "it leads")
    await asyncio.sleep(0.01)
    stop.set()
    await turn
    assert ended == ["a"], "the lease was released before the work had ended"
    assert api.spec(NAME)["holderIdentity"] == ""
    assert await Candidate(api, "b").tries()


async def recorded(turns: list[str]) -> None:
    """Work that records its begin and its end."""
    turns.append("begun")
    try:
        await asyncio.Event().wait()
    finally:
        turns.append("ended")


async def test_work_ends_with_the_lease_and_begins_again_with_it() -> None:
    api = Leases()
    first = Candidate(api, "a", seconds=1)
    turns: list[str] = []
    stop = asyncio.Event()
    turn = asyncio.create_task(first.election.run(lambda: recorded(turns), stop))
    await until_async(lambda: len(turns) >= 1, "begun")
    api.take(NAME, holderIdentity="b", leaseDurationSeconds=1)
    await until_async(lambda: len(turns) >= 2, "ended")
    assert not first.election.is_leader
    first.now += 2.0  # b does not renew it.
    await until_async(lambda: len(turns) >= 3, "begun again")
    stop.set()
    await turn
    assert turns == ["begun", "ended", "begun", "ended"]


async def test_work_that_outlasts_renewals_goes_on_without_writes_until_another_leads() -> None:
    api = Leases()
    leader = Candidate(api, "a", seconds=1, outlasts=True)
    turns: list[str] = []
    election, stop = leader.election, asyncio.Event()
    turn = asyncio.create_task(election.run(lambda: recorded(turns), stop))
    await until_async(lambda: turns == ["begun"], "begun")
    term = election.term
    api.away = True
    leader.now += 60.0
    said = "a leads and writes nothing: its Lease cannot be renewed"
    await until_async(lambda: election.describe_state() == said, "an outage")
    with pytest.raises(NotLeaderError):
        election.remaining_write_seconds()
    api.away = False
    await until_async(lambda: election.is_leader, "its Lease again")
    assert (turns, election.term) == (["begun"], term), "the outage ended its work"
    # Another one has led meanwhile, and has released the Lease.
    api.away = True
    leader.now += 60.0
    await until_async(lambda: election.describe_state() == said, "another outage")
    api.take(NAME, holderIdentity="", leaseTransitions=5)
    api.away = False
    await until_async(lambda: turns[:2] == ["begun", "ended"], "the end of its work")
    await until_async(lambda: len(turns) == 3, "another turn")
    assert election.term == 6
    stop.set()
    await turn
    assert turns == ["begun", "ended", "begun", "ended"]


async def test_a_lease_that_is_deleted_under_its_leader_does_not_end_the_work() -> None:
    api = Leases()
    leader = Candidate(api, "a", seconds=1, outlasts=True)
    turns: list[str] = []
    stop = asyncio.Event()
    turn = asyncio.create_task(leader.election.run(lambda: recorded(turns), stop))
    await until_async(lambda: turns == ["begun"], "begun")
    term = leader.election.term
    api.lose(NAME)
    await until_async(lambda: api.holders() == {NAME: "a"}, "the Lease again")
    await until_async(lambda: leader.election.term == term + 1, "a higher term")
    assert turns == ["begun"]
    stop.set()
    await turn


async def test_work_that_fails_is_raised() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    api = Leases()
    with pytest.raises(ZeroDivisionError):
        await Candidate(api, "a").election.run(work, asyncio.Event())
    assert api.spec(NAME)["holderIdentity"] == ""


async def test_who_does_not_lead_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    api = Leases()
    holder = Candidate(api, "a")
    sent: list[tuple[str, float]] = []
    async with KubeClient(Configuration()) as cluster:
        assert cluster._client is not None

        async def request(method: str, *_: Any, _request_timeout: Any, **__: Any) -> Any:
            sent.append((method, _request_timeout.total))
            raise ConnectionRefusedError

        monkeypatch.setattr(cluster._client.rest_client, "request", request)
        acting = cluster.with_write_permit(holder.election.remaining_write_seconds)
        url = "/api/v1/namespaces/a/secrets/b"
        writes: list[Callable[[], Awaitable[object]]] = [
            lambda: acting.delete(url),
            lambda: acting.post(url, {}),
            lambda: acting.apply({"kind": "Secret", "apiVersion": "v1", "metadata": {
                "namespace": "a", "name": "b"}}, "me"),
        ]  # fmt: skip
        for write in writes:
            with pytest.raises(NotLeaderError):
                await write()
        assert not sent
        with pytest.raises(ConnectionRefusedError):
            await acting.get(url)
        await holder.election._try_acquire_or_renew()
        holder.now += 1.0
        for write in writes:
            with pytest.raises(ConnectionRefusedError):
                await write()
    assert sent[0] == ("GET", 30.0)
    assert [limit for _, limit in sent[1:]] == [pytest.approx(ACT - 1.0)] * 3


@pytest.mark.parametrize(
    ("spec", "holder", "term", "lasts"),
    [
        (None, "", 0, SECONDS),
        ({}, "", 0, SECONDS),
        ({"holderIdentity": None, "leaseTransitions": None}, "", 0, SECONDS),
        ({"holderIdentity": "a"}, "a", 0, SECONDS),
        ({"holderIdentity": "a", "leaseDurationSeconds": None}, "a", 0, SECONDS),
        ({"holderIdentity": "a", "leaseTransitions": 3, "leaseDurationSeconds": 9}, "a", 3, 9),
    ],
)
def test_fields_that_a_lease_lacks_have_defaults(
    spec: Object | None, holder: str, term: int, lasts: float
) -> None:
    now = 70.0
    lease = LeaderElection(Leases(), "system", NAME, "b", seconds=SECONDS, clock=lambda: now)

    def seen() -> tuple[str, int, bool]:
        return lease.holder, lease.lease_term, lease.has_read_lease

    assert seen() == ("", 0, False) and lease.is_acquirable
    lease.record_lease({"metadata": {"annotations": None}, "spec": spec})
    assert seen() == (holder, term, True)
    now += lasts - 0.001
    assert lease.is_acquirable is not bool(holder)
    now += 0.002
    assert lease.is_acquirable
    lease.record_lease(None)
    assert seen() == ("", 0, True) and lease.is_acquirable
