"""Turns: each job once, never twice at a time, failures later, nobody held up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

from pipemorph_operator.reconcile.workqueue import WorkQueue


def run(scenario: Callable[[WorkQueue[str]], Awaitable[None]], *, gap: float = 0.0) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scenario(WorkQueue(gap=gap))

    asyncio.run(main())


async def nothing_ready(queue: WorkQueue[str]) -> bool:
    try:
        async with asyncio.timeout(0.02):
            await queue.get()
    except TimeoutError:
        return True
    return False


def test_asked_for_often_is_worked_on_once() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        for _ in range(100):
            queue.add("a")
        assert await queue.get() == "a"
        queue.done("a")
        assert await nothing_ready(queue)

    run(scenario)


def test_asked_for_during_its_turn_gets_another_turn_after_it() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        queue.add("a")
        await queue.get()
        queue.add("a")
        assert await nothing_ready(queue), "two turns at a time"
        queue.done("a")
        assert await queue.get() == "a"

    run(scenario)


def test_a_failure_comes_back_and_holds_up_nobody() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        queue.add("bad")
        queue.add("good")
        assert await queue.get() == "bad"
        queue.done("bad", failed=True)
        assert await queue.get() == "good"
        queue.done("good")
        assert await queue.get() == "bad"

    run(scenario)


def test_the_earlier_of_two_times_counts() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        queue.add_after("a", 60.0)
        queue.add_after("a", 0.01)
        queue.add_after("a", 60.0)
        assert await queue.get() == "a"
        queue.done("a")
        assert await nothing_ready(queue)

    run(scenario)


def test_turns_of_one_job_keep_a_gap_and_none_is_lost() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        clock = asyncio.get_running_loop().time
        times = []
        queue.add("a")
        for _ in range(4):
            assert await queue.get() == "a"
            times.append(clock())
            queue.add("a")
            queue.done("a")
        steps = [b - a for a, b in pairwise(times)]
        assert all(step >= 0.045 for step in steps), steps

    run(scenario, gap=0.05)
