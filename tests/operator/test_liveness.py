"""``/healthz``: 503 with the reason where the work does not move, and not where it is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from pipemorph_operator import __main__ as operator
from pipemorph_operator import health_server
from pipemorph_operator.health_server import (
    BEAT_SECONDS,
    FAULT_SECONDS,
    STUCK_SECONDS,
    Heartbeat,
    LoopMonitor,
)
from pipemorph_operator.ingest.__main__ import tick
from pipemorph_operator.reconcile.workqueue import RECONCILE_SECONDS, WorkQueue

PATIENCE = 15.0


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), PATIENCE)

    asyncio.run(bounded())


def test_healthz_says_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    wrong = ["", ""]

    async def test() -> None:
        checks = [lambda: wrong[0], lambda: wrong[1]]
        http = await health_server.start("127.0.0.1", 0, str, checks)
        try:
            url = f"http://127.0.0.1:{http.port}/healthz"
            async with aiohttp.ClientSession() as session:
                answers = []
                for wrong[:] in ["", ""], ["the watch is dead", ""], ["a", "b"], ["", ""]:
                    async with session.get(url) as answer:
                        answers.append((answer.status, await answer.text()))
        finally:
            await http.cleanup()
        assert answers == [
            (200, "ok\n"),
            (503, "the watch is dead\n"),
            (503, "a\nb\n"),
            (200, "ok\n"),
        ]
        assert "unhealthy: a; b" in caplog.text

    run(test)


def test_a_sign_that_does_not_come_is_missed() -> None:
    clock = Clock()
    sign = Heartbeat("the watch of jobs", 300.0, clock)
    clock.now += 300.0
    assert sign() == ""
    clock.now += 1.0
    assert sign() == "the watch of jobs: none for 301 s, expected every 300 s"
    sign.beat()
    assert sign() == ""


@pytest.mark.parametrize(
    ("late", "words"),
    [(STUCK_SECONDS / 2, ""), (STUCK_SECONDS + 4, "the event loop was blocked for 34 s")],
)
def test_an_event_loop_that_is_held_up_is_told_for_a_while(
    late: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    loop_monitor = LoopMonitor(clock)
    beats: list[float] = []

    async def sleep(seconds: float) -> None:
        clock.now += seconds + (late if not beats else 0.0)
        beats.append(seconds)
        if len(beats) == 3:
            raise asyncio.CancelledError

    monkeypatch.setattr(health_server.asyncio, "sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(loop_monitor.run())
    assert beats == [BEAT_SECONDS] * 3
    assert loop_monitor() == words
    clock.now += FAULT_SECONDS + 1
    assert loop_monitor() == ""


def test_a_turn_that_does_not_end_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(WorkQueue, "_now", lambda self: clock.now)

    async def test() -> None:
        queue: WorkQueue[tuple[str, str]] = WorkQueue()
        for name in ("a", "b"):
            queue.add(("team", name))
            await queue.get()
            clock.now += RECONCILE_SECONDS / 2
        assert queue.overdue() == ""
        clock.now += 5.0
        assert queue.overdue() == "the reconcile of ('team', 'a') has run for 905 s"
        queue.done(("team", "a"))
        assert queue.overdue() == ""

    run(test)


def test_all_jobs_are_reconciled_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "RESYNC_SECONDS", 0.0)
    jobs = [("team", f"j{i}") for i in range(100)]

    async def test() -> None:
        queue: WorkQueue[tuple[str, str]] = WorkQueue()
        syncing = asyncio.create_task(operator.resync(queue, lambda: jobs))
        assert [await queue.get() for _ in jobs] == jobs
        syncing.cancel()

    run(test)


def test_the_ingest_gives_signs_of_its_rounds() -> None:
    clock = Clock()
    ticked = Heartbeat("looks at jobs", 1.0, clock)

    class Store:
        keys = ()

    async def test() -> None:
        clock.now += 2.0
        swept: list[float] = []
        server: Any = SimpleNamespace(sweep=lambda: swept.append(clock.now))
        nothing: Any = Store()
        ticking = asyncio.create_task(tick(server, nothing, ticked))
        await asyncio.sleep(0)
        assert ticked() == "" and swept == [clock.now]
        ticking.cancel()

    run(test)
