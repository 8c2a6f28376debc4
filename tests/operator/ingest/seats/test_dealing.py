"""Which seat serves a job: all who know the same seats agree, and few jobs move."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipemorph_operator.ingest.seats.dealing import seat_of

SEATS = st.sets(st.integers(0, 15).map(lambda number: f"ingest-{number}"), min_size=1)
UIDS = st.sets(st.uuids().map(str), min_size=1, max_size=50)


@given(SEATS, UIDS, st.randoms())
def test_who_knows_the_same_seats_finds_the_same_one(
    seats: set[str], uids: set[str], chance: random.Random
) -> None:
    other = sorted(seats)
    chance.shuffle(other)
    for uid in uids:
        assert seat_of(uid, seats) == seat_of(uid, other)
        assert seat_of(uid, seats) in seats


@given(SEATS, UIDS, st.data())
def test_only_the_jobs_of_a_seat_move_when_it_goes_or_comes(
    seats: set[str], uids: set[str], data: st.DataObject
) -> None:
    lost = data.draw(st.sampled_from(sorted(seats)))
    left = seats - {lost}
    for uid in uids:
        before, after = seat_of(uid, seats), seat_of(uid, left)
        assert before in (after, lost)
        assert (after is None) == (not left)


def test_jobs_are_dealt_evenly_and_always_in_the_same_way() -> None:
    seats = [f"ingest-{i}" for i in range(4)]
    chance = random.Random(0)
    dealt = Counter(seat_of(f"{chance.getrandbits(128):032x}", seats) for _ in range(4000))
    assert all(900 < dealt[seat] < 1100 for seat in seats), dealt
    # Replicas of two releases run side by side while one replaces the other.
    found = [seat_of(uid, seats) for uid in "abcdef"]
    assert found == [f"ingest-{i}" for i in [2, 0, 2, 2, 1, 1]]
