"""``/healthz``: 503 with the reason where the work does not move, and not where it is slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from pipemorph_operator import __main__ as operator
from pipemorph_operator import health_server
from pipemorph_operator.cluster.client import METADATA_ONLY, WATCHED_AT_A_TIME, ApiRefused, Cluster
from pipemorph_operator.health_server import (
    BEAT_SECONDS,
    FAULT_SECONDS,
    STUCK_SECONDS,
    Heartbeat,
    LoopMonitor,
)
from pipemorph_operator.ingest.__main__ import follow, tick
from pipemorph_operator.reconcile.workqueue import RECONCILE_SECONDS, WorkQueue
from pipemorph_operator.watchdog import Watchdog

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
        http = await health_server.start("127.0.0.1", 0, lambda: True, checks)
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


# --- watches --------------------------------------------------------------------------------------


def thing(name: str, version: int) -> dict[str, Any]:
    """Metadata of an object."""
    return {"namespace": "team", "name": name, "resourceVersion": str(version)}


def test_a_change_that_a_watch_does_not_bring_until_the_next_look_is_missed() -> None:
    watchdog = Watchdog()
    job, child = ("PipeMorphJob", thing("gpt", 7)), ("Job", thing("gpt-x-0", 8))
    child[1]["labels"] = {"pipemorph.io/job-name": "gpt"}
    assert (watchdog.look([job, child]), watchdog.trouble()) == (set(), ""), (
        "watches may be on their way"
    )
    watchdog.delivered(*job)
    watchdog.delivered("Job", thing("gpt-x-0", 6))
    assert watchdog.look([job, child]) == {("team", "gpt")}
    assert watchdog.trouble() == (
        "the watches have not delivered changes of 1 objects for 120 s, such as Job team/gpt-x-0"
    )
    watchdog.delivered("Job", thing("gpt-x-0", 9))
    assert (watchdog.look([job]), watchdog.trouble()) == (set(), "")


def test_what_changes_all_the_time_and_what_goes_is_no_fault_of_a_watch() -> None:
    watchdog = Watchdog()
    for version in range(10, 100, 10):
        watchdog.delivered("PipeMorphJob", thing("gpt", version + 1))
        assert watchdog.look([("PipeMorphJob", thing("gpt", version + 5))]) == set()
    watchdog.look([("PipeMorphJob", thing("gone", 5))])
    watchdog.delivered("PipeMorphJob", thing("gone", 6), deleted=True)
    assert (watchdog.look([]), watchdog.trouble()) == (set(), "")


class Listed(Cluster):
    """An API server's lists, and what was asked for."""

    def __init__(self, kinds: dict[str, list[dict[str, Any]]]) -> None:
        self.kinds = kinds
        self.asked: list[tuple[str, dict[str, str], str]] = []
        self.down = False

    async def _json(
        self, method: str, url: str, query: Any = None, *_: Any, accept: str = "application/json"
    ) -> dict[str, Any]:
        self.asked.append((url, query, accept))
        if self.down:
            raise ApiRefused(503, "", "later")
        start, limit = int(query.get("continue", 0)), int(query["limit"])
        items = self.kinds[url.rsplit("/", 1)[1]]
        more = {"continue": str(start + limit)} if start + limit < len(items) else {}
        return {
            "metadata": {"resourceVersion": "99", **more},
            "items": items[start : start + limit],
        }


def test_all_jobs_get_a_turn_now_and_then_without_being_read_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator, "LOOK_SECONDS", 0.0)
    jobs = [{"metadata": thing(f"j{i}", i)} for i in range(1001)]
    children = [{"metadata": thing("j7-x-0", 3) | {"labels": {"pipemorph.io/job-name": "j7"}}}]
    cluster = Listed({"pipemorphjobs": jobs, "jobs": children})
    clock = Clock()
    watchdog, sign = Watchdog(), Heartbeat("looks", 1.0, clock)
    for job in jobs:
        watchdog.delivered("PipeMorphJob", job["metadata"])
    queue: WorkQueue[tuple[str, str]] = WorkQueue()
    clock.now += 2.0

    async def test() -> None:
        looking = asyncio.create_task(operator.resync(queue, cluster, [], watchdog, sign))
        first = await queue.get()
        found = {first, *[await queue.get() for _ in range(1000)]}
        looking.cancel()
        assert first == ("team", "j7"), "the watch owes a change of its Job"
        assert len(found) == 1001
        assert watchdog.trouble().endswith("such as Job team/j7-x-0")
        assert sign() == ""

    run(test)
    pages = [query for url, query, _ in cluster.asked[:4] if "pipemorphjobs" in url]
    assert [page.get("continue") for page in pages] == [None, "500", "1000"]
    assert {accept for _, _, accept in cluster.asked} == {METADATA_ONLY}
    assert all("labelSelector" in query for url, query, _ in cluster.asked if "batch" in url)


def test_an_api_server_that_is_away_is_no_fault_of_the_operator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operator, "LOOK_SECONDS", 0.0)
    clock = Clock()
    cluster, watchdog, sign = Listed({}), Watchdog(), Heartbeat("looks", 1.0, clock)
    cluster.down = True
    clock.now += 2.0

    async def test() -> None:
        looking = asyncio.create_task(operator.resync(WorkQueue(), cluster, [], watchdog, sign))
        while len(cluster.asked) < 3:
            await asyncio.sleep(0)
        looking.cancel()

    run(test)
    assert (sign(), watchdog.trouble()) == ("", "")
    assert "resync could not list the jobs: 503" in caplog.text


def test_a_watch_lists_large_objects_a_few_at_a_time() -> None:
    jobs = [{"metadata": thing(f"j{i}", i)} for i in range(120)]
    cluster = Listed({"pipemorphjobs": jobs})
    signs: list[int] = []

    async def test() -> None:
        kinds = []
        errors: list[Exception] = []
        async for kind, _ in cluster.watch(
            "/pipemorphjobs", errors.append, lambda: signs.append(1)
        ):
            kinds.append(kind)
            if kind == "SYNCED":
                break
        assert kinds == ["LISTED"] * 120 + ["SYNCED"]

    run(test)
    assert [query["limit"] for _, query, _ in cluster.asked] == [str(WATCHED_AT_A_TIME)] * 3
    assert signs == [1]


def test_the_ingest_gives_signs_of_its_watch_and_its_rounds() -> None:
    clock = Clock()
    alive, ticked = Heartbeat("the watch", 1.0, clock), Heartbeat("looks at jobs", 1.0, clock)
    taken: list[str] = []

    class Watching:
        async def watch(self, url: str, lost: Any, sign: Any) -> AsyncIterator[tuple[str, Any]]:
            clock.now += 2.0
            assert alive() != ""
            lost(ConnectionResetError())
            assert alive() == ""
            clock.now += 2.0
            sign()
            yield "SYNCED", {}

    class Store:
        keys = ()

        def changed(self, kind: str, body: Any, namespace: str | None) -> None:
            taken.append(kind)

    async def test() -> None:
        nothing: Any = Store()
        watching: Any = Watching()
        await follow(watching, nothing, None, alive)
        clock.now += 2.0
        server: Any = None
        ticking = asyncio.create_task(tick(server, nothing, ticked))
        await asyncio.sleep(0)
        assert ticked() == ""
        ticking.cancel()

    run(test)
    assert taken == ["SYNCED"]
