"""Informer that equals the API server, through all faults of its watch."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_api import FakeApi, fake_api
from prometheus_client import REGISTRY
from waiting import until_async

from pipemorph_operator.health_server import Heartbeat
from pipemorph_operator.kube import client, informer
from pipemorph_operator.kube.client import KubeClient
from pipemorph_operator.kube.informer import Informer, InformerGroup

Key = tuple[str, str]
PATIENCE = 20.0


class Mirror:
    """Copy of what an informer has reported; each change must come once and in order."""

    def __init__(self) -> None:
        self.objects: dict[Key, Mapping[str, Any]] = {}
        self.reported: list[str] = []
        self.fails_at = ""

    def changed(self, key: Key, body: Mapping[str, Any] | None) -> None:
        self.reported.append(key[1] if body is not None else f"-{key[1]}")
        if key[1] == self.fails_at:
            raise RuntimeError("a bug")
        if body is None:
            del self.objects[key]
            return
        before = self.objects.get(key, body)
        assert before["metadata"]["uid"] == body["metadata"]["uid"], "it was not reported as gone"
        assert before is body or before != body, "nothing has changed"
        self.objects[key] = body

    def take(self) -> list[str]:
        """Return what was reported since the last call."""
        reported, self.reported = self.reported, []
        return reported


@asynccontextmanager
async def following(
    api: FakeApi, cluster: KubeClient, mirror: Mirror, **more: Any
) -> AsyncIterator[Informer]:
    made = Informer(cluster, "Job", mirror.changed, **more)
    task = asyncio.create_task(made.run())
    try:
        await made.synced.wait()
        await api.idle()
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled(), task.exception()


@asynccontextmanager
async def scenario() -> AsyncIterator[tuple[FakeApi, KubeClient, Mirror]]:
    async with asyncio.timeout(PATIENCE), fake_api() as (api, cluster):
        yield api, cluster, Mirror()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(informer, "FIRST_RETRY_SECONDS", 0.001)


async def same(api: FakeApi, mirror: Mirror) -> None:
    """Wait until the informer knows what the API server has."""
    try:
        await until_async(lambda: mirror.objects == api.objects, "the same objects")
    except BaseException:
        assert mirror.objects == api.objects
        raise


def lists(api: FakeApi) -> int:
    """Number of lists of everything."""
    return sum("watch" not in query and "continue" not in query for query in api.requests)


async def test_objects_are_reported_page_by_page_and_then_every_change() -> None:
    async with scenario() as (api, cluster, mirror):
        for i in range(2 * informer.PAGE_OBJECTS + 1):
            api.put(f"j{i:03}")
        async with following(api, cluster, mirror, label="pipemorph.io/job-name"):
            assert mirror.take() == [f"j{i:03}" for i in range(2 * informer.PAGE_OBJECTS + 1)]
            assert [query.get("limit") for query in api.requests] == [
                str(informer.PAGE_OBJECTS)
            ] * 3 + [None]
            assert {query["labelSelector"] for query in api.requests} == {"pipemorph.io/job-name"}
            api.put("j001", status={"active": 1})
            api.put("new")
            api.delete("j002")
            await same(api, mirror)
            assert mirror.take() == ["j001", "new", "-j002"]
            assert lists(api) == 1


async def test_a_watch_that_ends_or_breaks_goes_on_where_it_was() -> None:
    async with scenario() as (api, cluster, mirror):
        api.put("a")
        async with following(api, cluster, mirror):
            api.put("b")
            api.bookmark()
            api.end_watches()
            api.refusals = [0, 503, 429, 500]
            await same(api, mirror)
            await until_async(lambda: len(api.requests) == 3, "another watch")
            api.delete("a")
            api.end_watches()
            await same(api, mirror)
            await until_async(lambda: not api.refusals, "it asks again and again")
            await api.idle()
            api.put("c")
            await same(api, mirror)
            versions = [query["resourceVersion"] for query in api.requests if "watch" in query]
            assert versions == ["101", "103", *["104"] * 4], "the bookmark's, the deletion's"
            assert (lists(api), mirror.take()) == (1, ["a", "b", "-a", "c"])


async def test_what_went_while_the_watch_was_down_is_gone() -> None:
    """The API server has dropped the history: only the difference shows it."""
    async with scenario() as (api, cluster, mirror):
        for name in ("stays", "changes", "goes", "replaced"):
            api.put(name)
        async with following(api, cluster, mirror):
            mirror.take()
            api.bookmark()
            await api.idle()
            api.mute = True
            api.put("changes", status={"active": 1})
            api.delete("goes")
            api.delete("replaced")
            api.put("replaced")
            api.mute = False
            api.forget()
            await same(api, mirror)
            reported = mirror.take()
            assert sorted(reported) == ["-goes", "-replaced", "changes", "replaced"]
            assert reported.index("-replaced") < reported.index("replaced")
            await api.idle()
            assert ["watch" in query for query in api.requests] == [False, True, True, False, True]


async def test_a_list_that_broke_is_not_held_for_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(informer, "PAGE_OBJECTS", 1)
    async with scenario() as (api, cluster, mirror):
        api.put("a")
        api.put("b")
        api.refusals = [0, 503]
        known = Informer(cluster, "Job", mirror.changed)
        task = asyncio.create_task(known.run())
        await until_async(lambda: mirror.reported == ["a"], "the first page")
        assert not known.synced.is_set()
        api.delete("a")
        await known.synced.wait()
        await same(api, mirror)
        task.cancel()


async def test_a_list_that_takes_longer_than_the_server_remembers_is_read_in_larger_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(informer, "PAGE_OBJECTS", 1)
    async with scenario() as (api, cluster, mirror):
        for name in "abcd":
            api.put(name)
        inner = api._list

        async def forgetful(query: dict[str, str]) -> Any:
            answer = await inner(query)
            api._snapshots.clear()
            return answer

        monkeypatch.setattr(api, "_list", forgetful)
        async with following(api, cluster, mirror):
            await same(api, mirror)
            limits = [query["limit"] for query in api.requests if "limit" in query]
            assert limits == ["1", "1", "2", "2", "4"]


async def test_a_watch_that_is_silent_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch is silent if its version is ahead of the API server's, after etcd was restored."""
    monkeypatch.setattr(client, "SILENCE_SECONDS", 0.05)
    async with scenario() as (api, cluster, mirror):
        api.put("a")
        async with following(api, cluster, mirror):
            api.version = 50
            api.end_watches()
            await until_async(lambda: len(api.requests) >= 3, "the watch of a version to come")
            api.delete("a")
            await same(api, mirror)


async def test_an_error_in_one_object_does_not_stop_the_others_and_is_tried_again() -> None:
    async with scenario() as (api, cluster, mirror):
        mirror.fails_at = "a"
        for name in "abc":
            api.put(name)
        async with following(api, cluster, mirror):
            assert mirror.take() == ["a", "b", "c"]
            mirror.fails_at = ""
            api.forget()
            await same(api, mirror)
            assert mirror.take() == ["a"]


async def test_an_api_server_that_refuses_gets_ever_fewer_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The API server refuses, forgets at once, or ends each watch at once."""
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def paused(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(informer, "FIRST_RETRY_SECONDS", 0.2)
    async with scenario() as (api, cluster, mirror):
        api.refusals, api.ends_watches = [503, 503, 503, 410, 410], True
        made = Informer(cluster, "Job", mirror.changed)
        monkeypatch.setattr(informer.asyncio, "sleep", paused)
        task = asyncio.create_task(made.run())
        while len(pauses) < 12:
            await sleep(0.001)
        task.cancel()
    wanted = [min(0.2 * 2**i, informer.LAST_RETRY_SECONDS) for i in range(12)]
    for pause, middle in zip(pauses, wanted, strict=False):
        assert 0.75 * middle <= pause <= 1.25 * middle
    assert "the watch of Jobs failed: 503" in caplog.text


@pytest.mark.parametrize(
    ("refused", "served", "unready"),
    [
        ({"b": 403}, ["a"], ""),
        ({"b": 503}, ["a"], ""),
        (
            {"a": 403, "b": 403},
            [],
            "Jobs of namespace a: 403 : refused\nJobs of namespace b: 403 :",
        ),
        ({"b": 404}, None, "Jobs of namespace b: 404 : refused; is the CRD installed?"),
        ({"": 403}, None, "Jobs: 403 : refused"),
    ],
)
async def test_a_refused_namespace_does_not_stop_service_of_the_others(
    refused: dict[str, int], served: list[str] | None, unready: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Role is gone, as when the namespace was deleted. ``served`` None: it does not lead."""
    monkeypatch.setattr(informer, "LAST_RETRY_SECONDS", 0.01)
    async with scenario() as (api, cluster, mirror):
        api.refused = dict(refused)
        api.put("j", "a")
        api.put("j", "b")
        made = [
            Informer(cluster, "Job", mirror.changed, namespace=namespace)
            for namespace in ([None] if "" in refused else ["a", "b"])
        ]
        informers, stop = InformerGroup(made), asyncio.Event()
        tasks = [asyncio.create_task(each.run()) for each in made]
        settling = asyncio.create_task(informers.wait_until_settled(stop))

        def listed_often() -> bool:
            return settling.done() if served is not None else len(api.requests) > 12

        await until_async(listed_often, "what is refused")
        assert settling.done() is (served is not None)
        listed = [namespace for namespace in ("a", "b") if informers.is_listed(namespace)]
        assert listed == (served if served is not None else listed)
        assert informers.explain_unready().startswith(unready) and bool(
            informers.explain_unready()
        ) is bool(unready)
        assert len(informers.list_problems()) == len(refused), "it is named all the same"
        labels = {"kind": "Job", "job_namespace": "b"}
        metric = REGISTRY.get_sample_value("pipemorph_watch_refused", labels)
        assert metric == 1 or served is None
        age = REGISTRY.get_sample_value("pipemorph_watch_confirmed_timestamp_seconds", labels)
        assert age or "" in refused, "an alert is for what is never listed, too"
        api.refused.clear()
        await until_async(
            lambda: not informers.list_problems(), "that it is taken up when it is back"
        )
        assert mirror.objects.keys() == {("a", "j"), ("b", "j")}
        await settling
        assert informers.is_listed("b") and not informers.explain_unready()
        for task in tasks:
            task.cancel()


async def test_a_namespace_that_goes_while_it_is_watched_stops_nothing() -> None:
    async with scenario() as (api, cluster, mirror):
        api.put("j", "b")
        made = Informer(cluster, "Job", mirror.changed, namespace="b")
        task = asyncio.create_task(made.run())
        await made.synced.wait()
        await api.idle()
        api.refused["b"] = 403
        api.end_watches()
        await until_async(lambda: "403" in made.problem, "the refusal")
        assert mirror.objects and made.synced.is_set() and not made.heartbeat()
        api.mute = True
        api.delete("j", "b")
        api.mute = False
        api.forget()
        api.refused.clear()
        await until_async(lambda: not mirror.objects and not made.problem, "that it is gone")
        task.cancel()


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_it_knows_in_the_end_what_there_is(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(informer, "PAGE_OBJECTS", 3)
    monkeypatch.setattr(informer, "LAST_RETRY_SECONDS", 0.002)
    async with scenario() as (api, cluster, mirror):

        def put() -> None:
            api.put(chance.choice("abcdefgh"), status={"active": chance.randrange(9)})

        def delete() -> None:
            if api.objects:
                api.delete(chance.choice(sorted(api.objects))[1])

        def refuse() -> None:
            api.refusals = [chance.choice((0, 410, 429, 503)) for _ in range(4)]

        steps = [put] * 6 + [delete] * 3 + [api.bookmark, api.end_watches, api.forget, refuse]
        task = asyncio.create_task(Informer(cluster, "Job", mirror.changed).run())
        for _ in range(300):
            chance.choice(steps)()
            if chance.random() < 0.5:
                await asyncio.sleep(chance.choice((0.0, 0.0, 0.002)))
        await same(api, mirror)
        assert not task.done(), task.exception()
        task.cancel()


async def test_how_old_it_is_what_is_known_can_be_seen() -> None:
    def metric(name: str) -> float:
        labels = {"kind": "Job", "job_namespace": ""}
        return REGISTRY.get_sample_value(f"pipemorph_watch_{name}", labels) or 0.0

    async with scenario() as (api, cluster, mirror):
        before = metric("lists_total")
        api.put("a")
        async with following(api, cluster, mirror) as known:
            listed = metric("confirmed_timestamp_seconds")
            assert (metric("lists_total") - before, metric("objects")) == (1, 1)
            api.bookmark()
            await until_async(
                lambda: metric("confirmed_timestamp_seconds") > listed, "the bookmark"
            )
            marked = metric("confirmed_timestamp_seconds")
            api.refusals = [503] * 1000
            api.end_watches()
            await until_async(lambda: len(api.requests) > 3, "the API server is away")
            now = 1000.0
            known.heartbeat = Heartbeat("the watch", 1.0, lambda: now)
            now += 2.0
            await until_async(lambda: not known.heartbeat(), "that this process is not at fault")
            assert metric("confirmed_timestamp_seconds") == marked
