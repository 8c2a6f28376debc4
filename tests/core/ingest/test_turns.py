"""Limits of clients' requests: buckets, and turns of sources at costly ones."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from pipemorph.ingest.connections import HandshakeLimiter
from pipemorph.ingest.token_bucket import TokenBucket

PATIENCE = 15.0


def test_a_bucket_allows_a_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(rate=10.0, burst=3, now=0.0)
    assert [bucket.take_token(0.0) for _ in range(4)] == [True, True, True, False]
    assert not bucket.is_full(0.05)
    assert bucket.seconds_until_token(0.05) == 0.05
    assert (bucket.take_token(0.05), bucket.take_token(0.1), bucket.take_token(0.1)) == (
        False,
        True,
        False,
    )
    assert bucket.is_full(100.0)
    assert [bucket.take_token(100.0) for _ in range(4)] == [True, True, True, False], (
        "no more is saved"
    )
    assert bucket.seconds_until_token(99.0) > 0, "a clock that went back gives nothing"


def test_a_bucket_is_full_until_something_is_taken_and_again_when_it_is_refilled() -> None:
    """Sources whose bucket is full are forgotten, so one that never is would stay for ever."""
    bucket = TokenBucket(rate=10.0, burst=2, now=0.0)
    assert bucket.is_full(0.0)
    assert bucket.take_token(0.0)
    assert [bucket.is_full(now) for now in (0.0, 0.09, 0.11, 9.0)] == [False, False, True, True]


async def test_a_source_that_begins_many_waits_behind_its_own() -> None:
    begun: list[str] = []
    ended = asyncio.Event()

    def begin(who: str) -> bool:
        begun.append(who)
        if len(begun) == 7:
            ended.set()
        return True

    turns = HandshakeLimiter(rate=200.0, burst=1)
    for who in ["crowd"] * 5 + ["one", "other"]:
        turns.enqueue_start(who, partial(begin, who))
    await asyncio.wait_for(ended.wait(), PATIENCE)
    assert begun == ["crowd", "crowd", "one", "other", "crowd", "crowd", "crowd"]


async def test_turns_come_at_their_rate_and_departed_clients_take_none() -> None:
    remaining, ended = 10, asyncio.Event()

    def begin() -> bool:
        nonlocal remaining
        remaining -= 1
        if not remaining:
            ended.set()
        return True

    turns, began = HandshakeLimiter(rate=100.0, burst=2), time.monotonic()
    for at in range(10):
        for _ in range(1000):
            turns.enqueue_start("gone", lambda: False)
        turns.enqueue_start(f"s{at}", begin)
    await asyncio.wait_for(ended.wait(), PATIENCE)
    assert time.monotonic() - began >= 0.079, "eight turns after the first two"


async def test_nothing_begins_after_the_end() -> None:
    begun: list[int] = []
    turns = HandshakeLimiter(rate=100.0, burst=1)
    for number in range(3):
        turns.enqueue_start("a", lambda number=number: begun.append(number) is None)
    turns.close()
    await asyncio.sleep(0.05)
    assert begun == [0]
