"""``/healthz``: 503 with the reason where the work does not move, and not where it is slow."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from set_clock import Clock

from pipemorph_operator import __main__ as operator
from pipemorph_operator import health_server
from pipemorph_operator.health_server import (
    BEAT_SECONDS,
    FAULT_SECONDS,
    STUCK_SECONDS,
    EventLoopMonitor,
    Heartbeat,
)
from pipemorph_operator.ingest.__main__ import visit_jobs
from pipemorph_operator.kube.client import METADATA_ONLY, KubeApiError, KubeClient
from pipemorph_operator.reconcile.job_watch import WatchedJobs
from pipemorph_operator.reconcile.workqueue import RECONCILE_SECONDS, WorkQueue

PATIENCE = 15.0


async def test_healthz_says_what_is_wrong(caplog: pytest.LogCaptureFixture) -> None:
    wrong = ["", ""]
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
        await http.stop()
    assert answers == [(200, "ok\n"), (503, "the watch is dead\n"), (503, "a\nb\n"), (200, "ok\n")]
    assert "unhealthy: a; b" in caplog.text


def test_a_sign_that_does_not_come_is_missed() -> None:
    clock = Clock()
    sign = Heartbeat("the watch of jobs", 300.0, clock)
    clock.now += 300.0
    assert sign() == ""
    clock.now += 1.0
    assert sign() == "the watch of jobs: none for 301 s, expected every 300 s"
    sign.record_beat()
    assert sign() == ""


@pytest.mark.parametrize(
    ("late", "words"),
    [(STUCK_SECONDS / 2, ""), (STUCK_SECONDS + 4, "the event loop was blocked for 34 s")],
)
def test_an_event_loop_that_is_held_up_is_reported_for_a_while(
    late: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    loop_monitor = EventLoopMonitor(clock)
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


async def test_a_turn_that_does_not_end_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(WorkQueue, "_read_clock", lambda self: clock.now)
    queue: WorkQueue[tuple[str, str]] = WorkQueue()
    for name in ("a", "b"):
        queue.add(("team", name))
        await queue.get()
        clock.now += RECONCILE_SECONDS / 2
    assert queue.describe_overdue() == ""
    clock.now += 5.0
    assert queue.describe_overdue() == "the reconcile of ('team', 'a') has run for 905 s"
    queue.done(("team", "a"))
    assert queue.describe_overdue() == ""


# --- watches --------------------------------------------------------------------------------------


def thing(name: str, version: int) -> dict[str, Any]:
    """Metadata of an object."""
    return {"namespace": "team", "name": name, "resourceVersion": str(version)}


def deliver(watched: WatchedJobs, name: str, version: int, kind: str = "MODIFIED") -> None:
    watched.process_event(("team", name), kind, {"metadata": thing(name, version)})


def test_a_change_that_the_watch_does_not_bring_until_the_next_look_is_missed() -> None:
    watched = WatchedJobs()
    listed = [thing("gpt", 7), thing("bert", 8)]
    assert (watched.compare_with_list(listed), watched.describe_problem()) == (set(), ""), (
        "they may be on their way"
    )
    deliver(watched, "gpt", 7)
    deliver(watched, "bert", 6)
    assert watched.compare_with_list(listed) == {("team", "bert")}
    assert watched.describe_problem() == (
        "the watch has not delivered changes of 1 jobs for 120 s, such as team/bert"
    )
    deliver(watched, "bert", 9)
    assert (watched.compare_with_list(listed), watched.describe_problem()) == (set(), "")


def test_what_changes_all_the_time_and_what_goes_is_no_fault_of_the_watch() -> None:
    watched = WatchedJobs()
    for version in range(10, 100, 10):
        deliver(watched, "gpt", version + 1)
        assert watched.compare_with_list([thing("gpt", version + 5)]) == set()
    watched.compare_with_list([thing("gone", 5)])
    deliver(watched, "gone", 6, "DELETED")
    assert (watched.compare_with_list([]), watched.describe_problem()) == (set(), "")


def test_a_job_that_went_unnoticed_is_dropped() -> None:
    """kopf lists again after a 410, and does not report deleted objects."""
    watched = WatchedJobs()
    for name in ("ghost", "alive", "again"):
        deliver(watched, name, 5)
    listed = [thing("alive", 5)]
    assert watched.compare_with_list([*listed, thing("again", 5), thing("ghost", 5)]) == set()
    # A job that was listed too early to be among those: it has come since.
    deliver(watched, "new", 8, "ADDED")
    deliver(watched, "again", 9, "ADDED")
    assert watched.compare_with_list(listed) == {("team", "ghost")}
    assert sorted(watched.list_jobs()) == [("team", name) for name in ("again", "alive", "new")]


def test_jobs_of_a_namespace_that_is_refused_are_neither_gone_nor_missed() -> None:
    watched = WatchedJobs()
    deliver(watched, "gpt", 5)
    here, there = thing("gpt", 5), thing("x", 5) | {"namespace": "other"}
    for _ in range(2):
        assert (watched.compare_with_list([here]), watched.describe_problem()) == (set(), "")
    for _ in range(3):
        assert (watched.compare_with_list([], {"team"}), watched.describe_problem()) == (set(), "")
    assert watched.list_jobs() == [("team", "gpt")]
    watched.compare_with_list([here, there])
    assert watched.compare_with_list([there]) == {("team", "gpt"), ("other", "x")}


class Listed(KubeClient):
    """An API server's lists, and the requests it got."""

    def __init__(self, kinds: dict[str, list[dict[str, Any]]]) -> None:
        self.kinds = kinds
        self.requests: list[tuple[str, dict[str, str], str]] = []
        self.down = False

    async def _request_json(
        self, method: str, url: str, query: Any = None, *_: Any, accept: str = "application/json"
    ) -> dict[str, Any]:
        self.requests.append((url, dict(query), accept))
        if "/namespaces/gone/" in url:
            raise KubeApiError(403, "Forbidden", "no rights")
        if self.down:
            raise KubeApiError(503, "", "later")
        start, limit = int(query.get("continue", 0)), int(query["limit"])
        items = self.kinds[url.rsplit("/", 1)[1]]
        more = {"continue": str(start + limit)} if start + limit < len(items) else {}
        return {
            "metadata": {"resourceVersion": "99", **more},
            "items": items[start : start + limit],
        }


async def test_all_jobs_get_a_turn_now_and_then_without_being_read_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(operator, "COMPARE_SECONDS", 0.0)
    jobs = [{"metadata": thing(f"j{i}", i)} for i in range(1001)]
    cluster = Listed({"pipemorphjobs": jobs})
    clock = Clock()
    watched, sign = WatchedJobs(), Heartbeat("looks", 1.0, clock)
    for i in range(1001):
        deliver(watched, f"j{i}", i - (i == 7))
    queue: WorkQueue[tuple[str, str]] = WorkQueue()
    clock.now += 2.0
    looking = asyncio.create_task(operator.resync_jobs(queue, cluster, [None], watched, sign))
    first = await queue.get()
    found = {first, *[await queue.get() for _ in range(1000)]}
    looking.cancel()
    assert first == ("team", "j7"), "the watch owes a change of it"
    assert len(found) == 1001
    assert watched.describe_problem().endswith("such as team/j7")
    assert sign() == ""
    pages = [query for _, query, _ in cluster.requests[:3]]
    assert [page.get("continue") for page in pages] == [None, "500", "1000"]
    assert {accept for _, _, accept in cluster.requests} == {METADATA_ONLY}


async def test_an_api_server_that_is_away_is_no_fault_of_the_operator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operator, "COMPARE_SECONDS", 0.0)
    clock = Clock()
    cluster, watched, sign = Listed({}), WatchedJobs(), Heartbeat("looks", 1.0, clock)
    cluster.down = True
    clock.now += 2.0
    looking = asyncio.create_task(operator.resync_jobs(WorkQueue(), cluster, [None], watched, sign))
    while len(cluster.requests) < 3:
        await asyncio.sleep(0)
    looking.cancel()
    assert (sign(), watched.describe_problem()) == ("", "")
    assert "resync could not list the jobs: 503" in caplog.text


async def test_a_namespace_that_is_refused_keeps_no_other_one_from_being_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(operator, "COMPARE_SECONDS", 0.0)
    cluster = Listed({"pipemorphjobs": [{"metadata": thing("gpt", 3)}]})
    queue: WorkQueue[tuple[str, str]] = WorkQueue()
    namespaces, sign = ["gone", "team"], Heartbeat("looks", 1.0)
    looking = asyncio.create_task(
        operator.resync_jobs(queue, cluster, namespaces, WatchedJobs(), sign)
    )
    assert await queue.get() == ("team", "gpt")
    looking.cancel()
    assert "resync could not list the jobs of namespace gone: 403" in caplog.text


async def test_the_ingest_gives_signs_of_its_rounds() -> None:
    clock = Clock()
    ticked = Heartbeat("looks at jobs", 1.0, clock)

    class Store:
        keys = ()

    clock.now += 2.0
    swept: list[float] = []
    server: Any = SimpleNamespace(drop_stale_decisions=lambda: swept.append(clock.now))
    nothing: Any = Store()
    ticking = asyncio.create_task(visit_jobs(server, nothing, ticked))
    await asyncio.sleep(0)
    assert ticked() == "" and swept == [clock.now]
    ticking.cancel()
