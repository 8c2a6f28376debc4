"""Which replicas serve, and whose a job is: on clocks that tests set, with one API server."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest
from gate import examples
from operator_leases import Leases
from waiting import until_async

from pipemorph_operator.cluster.lease import NotLeader
from pipemorph_operator.ingest.seats.seats import Seats

SECONDS, ACT = 6, 4.0
"""Of a seat, and for how long its holder may write after it has renewed it."""
UIDS = [f"job-{i}" for i in range(40)]
PATIENCE = 15.0
Object = dict[str, Any]


class Replica:
    """A replica whose rounds and clock are the test's. ``mine``: jobs that it has not dropped."""

    def __init__(self, api: Leases, name: str, *, count: int = 3, clock: float = 0.0) -> None:
        self.now = clock
        self.client = api.another()
        self.seats = Seats(
            self.client, "system", "ingest", name, count=count, address=f"{name}:1",
            seconds=SECONDS, clock=lambda: self.now, on_change=self.redeal,
        )  # fmt: skip
        self.mine: set[str] = set()
        self.lost = False

    def redeal(self) -> None:
        self.mine = {uid for uid in UIDS if self.seats.serves(uid)}

    def round(self, *, after: float = 1.0) -> None:
        """Another round, and what :meth:`Seats.run` makes of it."""
        asyncio.run(self.rounds(after))

    async def rounds(self, after: float) -> None:
        if self.lost:
            return
        self.now += after
        had = self.seats.mine
        await self.seats._round()
        if had is not None and self.seats.mine is None:
            self.lost, self.seats.acts, self.mine = True, False, set()
        elif not self.seats.acts and self.seats.is_seen:
            self.seats.acts = True
            self.redeal()


def rounds(*replicas: Replica, seconds: float = 3.0) -> None:
    for _ in range(round(seconds)):
        for each in replicas:
            each.round()


def no_two_have_one_job(*replicas: Replica) -> set[str]:
    taken: set[str] = set()
    for each in replicas:
        assert not taken & each.mine, f"{each.seats.state()}: a job has two owners"
        taken |= each.mine
    return taken


def test_all_replicas_serve_and_every_job_has_one_owner() -> None:
    api = Leases()
    # Clocks that have nothing in common.
    all_three = [Replica(api, name, clock=1e6 * i) for i, name in enumerate("abc")]
    for _ in range(4):
        for each in all_three:
            each.round()
            no_two_have_one_job(*all_three)
    assert api.holders() == {"ingest-0": "a", "ingest-1": "b", "ingest-2": "c"}
    assert no_two_have_one_job(*all_three) == set(UIDS)
    assert all(each.mine for each in all_three)
    for each in all_three:
        for uid in UIDS:
            (owner,) = (other for other in all_three if uid in other.mine)
            found = each.seats.owner(uid)
            assert found is not None
            assert found.address == f"{owner.seats._identity}:1"
    assert all_three[0].seats.state() == "a has ingest-0; 3 replicas serve"
    assert [each.seats.first for each in all_three] == [True, False, False]


def test_one_more_than_there_are_seats_stands_by_until_one_is_left() -> None:
    api = Leases()
    first, second, third = (Replica(api, name, count=2) for name in "abc")
    rounds(first, second, third)
    assert third.seats.state() == "c stands by; 2 replicas serve"
    before = set(second.mine)
    asyncio.run(first.seats._leave())
    first.mine, first.lost = set(), True
    third.round()
    assert api.holders() == {"ingest-0": "c", "ingest-1": "b"}
    rounds(second, third, seconds=2)
    assert second.mine == before, "no job has moved twice"
    assert no_two_have_one_job(second, third) == set(UIDS)


def test_a_new_one_serves_when_others_have_dropped_what_it_gets() -> None:
    api = Leases()
    first = Replica(api, "a")
    rounds(first)
    assert first.mine == set(UIDS)
    second = Replica(api, "b")
    rounds(second, seconds=5)
    assert not second.seats.acts, "the first has not seen it"
    assert second.seats.state() == "b has ingest-1; a must see that first"
    dropped: list[bool] = []

    async def renews() -> None:
        dropped.append(first.mine != set(UIDS))

    # It has dropped them before it says that it has seen the other one.
    first.client.before_write = renews
    first.round()
    assert dropped == [True]
    second.round()
    assert second.seats.acts
    assert no_two_have_one_job(first, second) == set(UIDS)


def test_of_two_that_take_different_seats_at_a_time_one_waits_for_the_other() -> None:
    """Each has read the seats before the other took one."""
    api = Leases()
    first, second = Replica(api, "a"), Replica(api, "b")
    second.seats._own.reverse()

    async def meanwhile() -> None:
        await second.rounds(1.0)

    first.client.before_write = meanwhile
    first.round()
    assert api.holders() == {"ingest-0": "a", "ingest-2": "b"}
    assert (first.seats.acts, second.seats.acts) == (False, False)
    for each in (second, first, second, first):
        each.round(after=0.3)
        no_two_have_one_job(first, second)
    assert no_two_have_one_job(first, second) == set(UIDS)


def test_the_jobs_of_a_lost_one_are_served_by_others_and_no_other_job_moves() -> None:
    api = Leases()
    all_three = first, second, third = [Replica(api, name) for name in "abc"]
    rounds(*all_three)
    before = set(second.mine), set(third.mine)
    rounds(second, third, seconds=SECONDS - 1)
    assert (second.mine, third.mine) == before, "taken for dead too early"
    rounds(second, third, seconds=2)
    assert api.holders() == {"ingest-1": "b", "ingest-2": "c"}
    assert before[0] < second.mine
    assert before[1] < third.mine
    first.now += SECONDS - 1 + 2
    with pytest.raises(NotLeader, match="could not renew its seat"):
        first.seats.permit()
    # It was suspended: what it does next is to find that out.
    assert first.seats.acts
    first.round()
    assert first.lost
    assert no_two_have_one_job(*all_three) == set(UIDS)


def test_one_that_could_not_renew_its_seat_and_was_not_missed_goes_on_as_it_was() -> None:
    """The API server was away for all: nobody has heard anything, and nobody is taken for dead."""
    api = Leases()
    both = first, second = Replica(api, "a"), Replica(api, "b")
    rounds(*both)
    before = set(first.mine), set(second.mine)
    for each in both:
        each.client.away = True
    rounds(*both, seconds=60)
    with pytest.raises(NotLeader):
        first.seats.permit()
    assert (first.mine, second.mine) == before, "jobs go on to be served"
    for each in both:
        each.client.away = False
    second.round()
    rounds(*both, seconds=2)
    assert (first.mine, second.mine) == before
    assert not first.lost
    assert 0 < first.seats.permit() <= ACT


def test_one_that_is_cut_off_alone_may_not_write_when_another_has_its_jobs() -> None:
    api = Leases()
    both = first, second = Replica(api, "a"), Replica(api, "b")
    rounds(*both)
    before = set(second.mine)
    first.client.away = True
    while second.mine == before:
        try:
            first.seats.permit()
        except NotLeader:
            break
        rounds(*both, seconds=1)
    assert second.mine == before, "it could still write"
    rounds(*both, seconds=SECONDS)
    assert second.mine == set(UIDS)
    first.client.away = False
    first.round()
    assert first.lost
    assert no_two_have_one_job(*both) == set(UIDS)


def test_one_that_starts_again_under_its_name_has_its_seat_at_once() -> None:
    api = Leases()
    first, second = Replica(api, "a"), Replica(api, "b")
    rounds(first, second)
    before = set(second.mine)
    again = Replica(api, "b", clock=77.0)
    again.round()
    first.round()
    again.round(after=0.3)
    assert again.mine == before
    assert api.spec("ingest-1")["leaseTransitions"] == 1


def test_seats_beyond_the_number_that_is_set_now_count_as_long_as_they_are_held() -> None:
    """As while the number of replicas is reduced, pod by pod."""
    api = Leases()
    old = [Replica(api, name) for name in "abc"]
    rounds(*old)
    new = Replica(api, "d", count=2)
    rounds(*old, new)
    assert new.seats.state() == "d stands by; 3 replicas serve"
    asyncio.run(old[0].seats._leave())
    old[0].mine, old[0].lost = set(), True
    rounds(*old, new)
    assert api.holders() == {"ingest-0": "d", "ingest-1": "b", "ingest-2": "c"}
    assert no_two_have_one_job(*old, new) == set(UIDS)
    # Its holder is lost, and one that would not take that seat vacates it.
    rounds(new, seconds=SECONDS + 2)
    assert api.holders() == {"ingest-0": "d"}
    assert new.mine == set(UIDS)


def test_a_lease_that_somebody_deletes_is_lost() -> None:
    api = Leases()
    first, second = Replica(api, "a"), Replica(api, "b")
    rounds(first, second)
    api.lose("ingest-0")
    second.round()
    assert second.mine == set(UIDS)
    first.round()
    assert first.lost


@pytest.mark.parametrize("seed", range(examples(6)))
def test_no_job_has_two_owners_whoever_comes_and_goes(seed: int) -> None:
    """Replicas start, are killed, suspended and cut off, in any order. Only one that may not write
    shares a job with another one."""
    chance = random.Random(seed)
    api = Leases()
    number, alive = 0, list[Replica]()
    for _ in range(300):
        what = chance.random()
        if what < 0.04 and len(alive) < 5:
            number += 1
            alive.append(Replica(api, f"r{number}", clock=chance.uniform(0, 1e6)))
        elif what < 0.06 and alive:
            dead = alive.pop(chance.randrange(len(alive)))
            if chance.random() < 0.5:  # Its container starts again.
                alive.append(Replica(api, dead.seats._identity, clock=chance.uniform(0, 1e6)))
        elif what < 0.08 and alive:
            leaves = alive.pop(chance.randrange(len(alive)))
            asyncio.run(leaves.seats._leave())
        for each in alive:
            if chance.random() < 0.05:
                each.client.away = not each.client.away
        passed = chance.uniform(0.1, 1.2)
        chance.shuffle(alive)
        for each in alive:
            if chance.random() < 0.8:
                each.round(after=passed)
            else:
                each.now += passed  # It was too slow for a round.
            no_two_have_one_job(*(r for r in alive if may_write(r)))
        alive = [each for each in alive if not each.lost]
    for each in alive:
        each.client.away = False
    if not alive:
        alive.append(Replica(api, "last"))
    rounds(*alive, seconds=20)
    held = [each for each in alive if not each.lost]
    assert no_two_have_one_job(*held) == set(UIDS)


def may_write(replica: Replica) -> bool:
    try:
        return replica.seats.permit() > 0
    except NotLeader:
        return False


def test_who_stops_leaves_the_seat_after_its_work_has_ended() -> None:
    api = Leases()
    first = Replica(api, "a")
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            assert not first.seats.acts
            await asyncio.sleep(0.05)
            first.seats.permit()  # It may still write.
            ended.append(api.spec("ingest-0")["holderIdentity"])

    async def test() -> None:
        stop = asyncio.Event()
        turn = asyncio.create_task(first.seats.run(work, stop))
        await until_async(lambda: first.seats.acts, "it acts")
        await asyncio.sleep(0.01)
        stop.set()
        await turn

    asyncio.run(asyncio.wait_for(test(), PATIENCE))
    assert ended == ["a"], "the seat was left before the work had ended"
    assert api.holders() == {}


def test_work_that_fails_is_raised_and_a_lost_seat_ends_it() -> None:
    api = Leases()

    async def fails() -> None:
        raise ZeroDivisionError

    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    async def test() -> None:
        with pytest.raises(ZeroDivisionError):
            await Replica(api, "a").seats.run(fails, asyncio.Event())
        assert api.holders() == {}
        first = Replica(api, "a", count=1)
        turn = asyncio.create_task(first.seats.run(waits, asyncio.Event()))
        await until_async(lambda: first.seats.acts, "it acts")
        lease = copy.deepcopy(api.lease("ingest-0"))
        lease["spec"]["holderIdentity"] = "b"
        api.put(lease)
        await turn
        assert not first.seats.acts

    ended: list[str] = []
    asyncio.run(asyncio.wait_for(test(), PATIENCE))
    assert ended == ["ended"]
    assert api.holders() == {"ingest-0": "b"}
