"""Requests of the launchers of pods to the ingest, over its protocol without sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from pipemorph.control.job_generations import JobGenerations
from pipemorph.control.restart import pod_tracker
from pipemorph.ingest import (
    BearerAuthenticator,
    IngestServer,
    InMemoryJobStore,
    PollLimits,
    Reply,
    RestartHandler,
)
from pipemorph.ingest import restart_handler as desk_module
from pipemorph.protocol import MAX_POD_REPORT_BYTES, PodReport
from pipemorph.spec.layout import RankLayout
from pipemorph.spec.sections.parallelism import MAX_RANKS, Parallelism
from pipemorph.spec.status_recoveries import Recoveries

PATIENCE = 15.0
NEW = RankLayout(layers=(4, 2))
LONG = "30"
NEW = RankLayout(layers=(4, 2))
GONE = {"attempt": 0, "generation": 0, "pod": 0, "event": "gone"}
LOSS = {"reason": "rank 0 was killed by SIGKILL", "at": 1.0, "rank": 0}


class OneJob:
    """Has one job, ``default/gpt``."""

    def __init__(self, pods: int = 2) -> None:
        self.job = JobGenerations(pods, most=3)
        # A failure is then followed by a generation.
        self.job.progress.record_departed_ranks(5)
        self.writes = 0
        self.writing: Callable[[], Awaitable[None]] | None = None

    def find_generations(self, namespace: str, job: str) -> JobGenerations | None:
        return self.job if (namespace, job) == ("default", "gpt") else None

    async def persist_generations(self, namespace: str, job: str) -> None:
        if self.writing is not None:
            await self.writing()
        self.writes += 1


def body(**changes: Any) -> bytes:
    return json.dumps(GONE | changes).encode()


async def tell(desk: RestartHandler, wait: str = "0", **changes: Any) -> Reply:
    return await desk.handle_pod_report("default", "gpt", body(**changes), wait)


async def poll(desk: RestartHandler, wait: str = LONG, generation: int = 0) -> Reply:
    return await desk.handle_poll(
        "default", "gpt", attempt="0", generation=str(generation), wait=wait
    )


def state(reply: Reply) -> dict[str, Any]:
    assert reply.status == 200, reply
    found: dict[str, Any] = json.loads(reply.body)
    return found


async def settled() -> None:
    """Let tasks that can go on do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_launchers_hear_at_once_that_a_generation_is_over_and_that_the_next_begins() -> None:
    desk = RestartHandler(OneJob())
    listening = asyncio.create_task(poll(desk))
    await settled()
    assert not listening.done()
    await tell(desk, event="failed", loss=LOSS)
    found = state(await listening)
    assert (found["generation"], found["over"], found["reason"]) == (0, True, LOSS["reason"])
    waiting = asyncio.create_task(tell(desk, LONG, loss=LOSS))
    await settled()
    assert not waiting.done(), "pod 1 still has ranks"
    second = state(await tell(desk, LONG, pod=1))
    first = state(await waiting)
    assert (first["generation"], first["over"]) == (second["generation"], second["over"])
    assert (first["generation"], first["over"]) == (1, False)


async def test_a_generation_is_sent_only_once_it_is_persisted() -> None:
    host, written = OneJob(pods=1), asyncio.Event()

    async def write() -> None:
        await written.wait()

    host.writing = write
    desk = RestartHandler(host)
    telling = asyncio.create_task(tell(desk, LONG, loss=LOSS))
    await settled()
    # Report of another launcher, or a second one of this.
    assert state(await poll(desk, "0"))["generation"] == 0
    assert not telling.done()
    written.set()
    assert state(await telling)["generation"] == 1
    assert host.writes == 1


async def test_ranks_do_not_stand_still_for_an_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "PERSIST_SECONDS", 0.05)
    host = OneJob(pods=1)
    host.writing = asyncio.Event().wait  # type: ignore[assignment]
    assert state(await tell(RestartHandler(host), loss=LOSS))["generation"] == 1


async def test_the_number_of_waiting_launchers_is_bounded_and_others_retry_later() -> None:
    limits = PollLimits(per_job=2, crowded_retry_seconds=77.0, next_generation_retry_seconds=1.0)
    desk = RestartHandler(OneJob(pods=400), limits=limits)
    waiting = [asyncio.create_task(poll(desk)) for _ in range(2)]
    await settled()
    assert state(await poll(desk))["again"] == 77.0
    assert state(await tell(desk, event="failed", loss=LOSS))["over"]
    assert [state(await each)["again"] for each in waiting] == [0.0, 0.0]
    gone = [asyncio.create_task(tell(desk, LONG, pod=pod)) for pod in range(2)]
    await settled()
    found = state(await tell(desk, LONG, pod=2))
    assert (found["generation"], found["again"]) == (0, 4.0), "400 pods, 100 a second"
    desk.close()
    await asyncio.gather(*gone)


async def test_the_reports_of_a_job_are_limited() -> None:
    desk = RestartHandler(OneJob(), limits=PollLimits(reports_per_pod=3, refill_per_pod=0))
    replies = [await tell(desk, event="failed", loss=LOSS) for _ in range(12)]
    assert [reply.status for reply in replies[:7]] == [200] * 7
    assert replies[-1].status == 429


@pytest.mark.parametrize(
    ("changes", "wait", "status", "says"),
    [
        ({"attempt": 1}, "0", 403, "attempt 1 is not the attempt in progress, 0"),
        ({"pod": 2}, "0", 422, "pod: is 2; the job has 2 pods"),
        ({"event": "ended"}, "0", 422, "event"),
        ({"loss": {"reason": "x" * 501, "at": 1}}, "0", 422, "loss.reason"),
        ({}, "nan", 400, "wait is 'nan'"),
        ({}, "31", 400, "expected 0 to 30 seconds"),
    ],
)
async def test_errors_are_named(changes: dict[str, Any], wait: str, status: int, says: str) -> None:
    host = OneJob()
    reply = await tell(RestartHandler(host), wait, **changes)
    assert reply.status == status and says in json.loads(reply.body)["error"]
    assert not host.job.generation_state.over


async def test_requests_for_other_jobs_and_attempts_are_refused() -> None:
    desk = RestartHandler(OneJob())
    assert (await desk.handle_pod_report("default", "bert", body(), "0")).status == 404
    query = {"generation": "0", "wait": "0"}
    assert (await desk.handle_poll("default", "bert", attempt="0", **query)).status == 404
    assert (await desk.handle_poll("default", "gpt", attempt="1", **query)).status == 403
    assert (await desk.handle_poll("default", "gpt", attempt="-1", **query)).status == 400
    assert (await desk.handle_pod_report("default", "gpt", b"{", "0")).status == 400


async def test_polls_of_a_job_that_is_another_hosts_now_are_answered() -> None:
    host = OneJob()
    desk = RestartHandler(host)
    polling = asyncio.create_task(poll(desk))
    while not desk._waiting:
        await asyncio.sleep(0)
    assert not await desk.request_layout("default", "gpt", NEW, of=(0, 1)), "others run"
    desk.drop_job(host.job)
    assert (await polling).status == 404, "so that it asks elsewhere"


async def test_a_generation_that_another_host_has_overtaken_is_not_sent() -> None:
    """The job is read anew, without the generation: launchers report it once more."""
    host = OneJob(pods=1)
    desk, before = RestartHandler(host), host.job

    async def overtaken() -> None:
        host.job = OneJob(pods=1).job
        desk.drop_job(before)
        raise RuntimeError("another ingest has written a plan or a recovery of this job")

    host.writing = overtaken
    assert (await tell(desk, loss=LOSS)).status == 404
    host.writing = None
    assert state(await tell(desk, loss=LOSS))["generation"] == 1
    assert host.job.saved.count == 1, "a failure is not forgotten"


async def test_a_generation_that_another_host_has_begun_goes_on() -> None:
    """The host could not write it: launchers run it, and one has not received it."""
    host = OneJob()
    desk = RestartHandler(host)
    late = asyncio.create_task(tell(desk, LONG, event="gone", pod=1))
    while not desk._waiting:
        await asyncio.sleep(0)
    assert host.job.generation_state.over
    state = json.loads((await poll(desk, "0", generation=1)).body)
    assert (state["generation"], state["over"]) == (1, False), "its ranks run on"
    assert json.loads((await late).body)["generation"] == 1, "and the others join it"


async def test_over_http_callers_are_authenticated_and_polls_end_with_the_host() -> None:
    host = OneJob()
    desk = RestartHandler(host)
    answered: list[tuple[str, int]] = []
    server = IngestServer(
        InMemoryJobStore(),
        BearerAuthenticator("token of the job"),
        restart_handler=desk,
        on_answer=lambda kind, status, _: answered.append((kind, status)),
    )
    await server.start()
    url = f"{server.url}/v1/jobs/default/gpt/generation"
    query = {"attempt": "0", "generation": "0", "wait": LONG}
    known = {"Authorization": "Bearer token of the job"}
    async with aiohttp.ClientSession() as session:

        async def status(method: str, **given: Any) -> int:
            async with session.request(method, url, **given) as answer:
                await answer.read()
                return answer.status

        assert await status("POST", data=body(event="failed", loss=LOSS)) == 401
        assert await status("GET", params=query) == 401
        assert not host.job.generation_state.over
        large = b" " * (MAX_POD_REPORT_BYTES + 1)
        assert await status("POST", data=large, headers=known) == 413
        polling = asyncio.create_task(status("GET", params=query, headers=known))
        while not desk._waiting:
            await asyncio.sleep(0)
        await server.stop()
        assert await polling == 200
    assert set(answered) == {("generation", 401), ("generation", 413), ("generation", 200)}


class FewerJob(OneJob):
    """Job of eight replicas of one pod, of which one may be absent; pod 7 was lost."""

    def __init__(self, idle: int = 1) -> None:
        super().__init__()
        cut = Parallelism(stages=1, replicas=8, min_replicas=1)
        saved = Recoveries(generation=1, excluded_replicas=list(range(8 - idle, 8)), count=1)
        self.job = JobGenerations(8, most=3, saved=saved, cut=cut)


async def waits(desk: RestartHandler, pod: int, wait: str = LONG) -> Reply:
    """Poll of a launcher without ranks for the next generation."""
    excluded = list(desk._store.find_generations("default", "gpt").excluded_replicas)  # type: ignore[union-attr]
    return await tell(desk, wait, pod=pod, generation=1, excluded_replicas=excluded)


async def test_launchers_hear_once_that_their_ranks_are_to_leave() -> None:
    desk = RestartHandler(FewerJob())
    listening = asyncio.create_task(poll(desk, generation=1))
    await settled()
    assert not listening.done()
    waiting = asyncio.create_task(waits(desk, 7))
    found = state(await listening)
    assert (found["leave"], found["over"], found["excluded_replicas"]) == (True, False, [7])
    assert not waiting.done()
    query = {"attempt": "0", "generation": "1"}
    again = asyncio.create_task(
        desk.handle_poll("default", "gpt", **query, wait=LONG, leaving=True)
    )
    await settled()
    assert not again.done(), "it knows"
    for pod in range(7):
        await tell(desk, pod=pod, generation=1, excluded_replicas=[7])
        await settled()
    assert state(await again)["over"], "they have begun to leave"
    found = state(await waiting)
    assert (found["generation"], found["over"], found["excluded_replicas"]) == (2, False, [])


async def test_launchers_hear_that_ranks_are_to_leave_for_other_layers() -> None:
    host = OneJob()
    host.job = JobGenerations(2, most=3, cut=Parallelism(stages=2, layers=6), done=5, relayout=True)
    desk = RestartHandler(host)
    listening = asyncio.create_task(poll(desk))
    await settled()
    assert not await desk.request_layout("default", "gpt", RankLayout(layers=(4, 3)), of=(0, 0)), (
        "that is no split of the model"
    )
    assert not await desk.request_layout("default", "gpt-2", NEW, of=(0, 0)), "there is no such job"
    await settled()
    assert not listening.done()
    assert await desk.request_layout("default", "gpt", NEW, of=(0, 0))
    found = state(await listening)
    assert (found["leave"], found["leave_for"]["layers"]) == (True, [4, 2])
    host.job = JobGenerations(2, most=3, cut=Parallelism(stages=2, layers=6), done=5, relayout=True)
    assert not await desk.request_layout("default", "gpt", NEW, of=(0, 1)), "others run"
    desk.drop_job(host.job)
    assert not await desk.request_layout("default", "gpt", NEW, of=(0, 0)), "another host has it"


@pytest.mark.parametrize("writes", ["hang", "fail"])
async def test_other_layers_are_sent_only_once_they_are_persisted_however_long_that_takes(
    writes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers would know the number of their generation, and another ingest not with which
    layers. Other news of the running ranks are sent."""
    monkeypatch.setattr(desk_module, "PERSIST_SECONDS", 0.01)
    monkeypatch.setattr(desk_module, "RETRY_SECONDS", 0.0)
    host, written = OneJob(), asyncio.Event()
    host.job = JobGenerations(2, most=3, cut=Parallelism(stages=2, layers=6), done=5, relayout=True)
    desk = RestartHandler(host)

    async def write() -> None:
        if writes == "hang":
            await written.wait()
        elif not written.is_set():
            raise OSError("no route to the API server")

    assert await desk.request_layout("default", "gpt", NEW, of=(0, 0))
    host.writing = write
    departed = {"left_for": NEW.model_dump(), "reached": 5, "finished": 5}
    for pod in (0, 1, 0, 1):
        found = state(await tell(desk, pod=pod, **departed))
        assert (found["generation"], found["over"]) == (0, True)
    waiting = [asyncio.create_task(tell(desk, LONG, pod=pod, **departed)) for pod in (0, 1)]
    await settled()
    assert host.job.layout == NEW and not any(each.done() for each in waiting)
    written.set()
    for reply in waiting:
        found = state(await reply)
        assert (found["generation"], found["leave"]) == (1, False)
        assert found["layout"]["layers"] == [4, 2] and found["layout_before"]["layers"] == []
    resumed = {"iteration": 5, "rung": "kept"}
    known = {"generation": 1, "layout": NEW.model_dump(), "layout_before": {}}
    written.clear()
    found = state(await tell(desk, event="resumed", resumed=resumed, **known))
    assert found["layout_before"] is None, "the next generation alone has to wait"
    found = state(await tell(desk, event="failed", loss=LOSS, **known))
    assert found["over"]
    written.set()
    await settled()


async def test_decisions_by_time_are_sent_by_the_host_that_still_has_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pod that stays silent is given up; another host has written of the job meanwhile."""
    monkeypatch.setattr(pod_tracker, "SILENT_SECONDS", 0.1)
    host = FewerJob()
    desk, before = RestartHandler(host), host.job

    async def overtaken() -> None:
        desk.drop_job(before)
        raise RuntimeError("another ingest has written a plan or a recovery of this job")

    await tell(desk, pod=0, generation=1, excluded_replicas=[7], event="failed", loss=LOSS)
    for pod in range(1, 6):
        await tell(desk, pod=pod, generation=1, excluded_replicas=[7])
    host.writing = overtaken
    waiting = await tell(desk, LONG, pod=0, generation=1, excluded_replicas=[7], loss=LOSS)
    assert before.saved.generation == 2, "without pod 6"
    assert waiting.status == 404, "so that it is sent once more"


async def test_pods_without_ranks_leave_room_for_those_that_have_some() -> None:
    limits = PollLimits(per_job=1, idle_per_job=1, idle_retry_seconds=7.0)
    desk = RestartHandler(FewerJob(idle=4), limits=limits)
    first = asyncio.create_task(waits(desk, 4))
    await settled()
    assert state(await waits(desk, 5))["again"] == 7.0
    query = {"attempt": "0", "generation": "1"}
    listening = asyncio.create_task(
        desk.handle_poll("default", "gpt", **query, wait=LONG, leaving=True)
    )
    await settled()
    assert not first.done() and not listening.done()
    desk.close()
    await asyncio.gather(first, listening)


async def test_launchers_receive_that_their_ranks_stay_after_all() -> None:
    """Launchers then send the request again, once a replica can still join."""
    desk = RestartHandler(host := FewerJob())
    waiting = asyncio.create_task(waits(desk, 7))
    await settled()
    assert host.job.generation_state.leave
    query = {"attempt": "0", "generation": "1"}
    knows = asyncio.create_task(
        desk.handle_poll("default", "gpt", **query, wait=LONG, leaving=True)
    )
    await settled()
    assert not knows.done()
    await tell(
        desk, pod=0, generation=1, excluded_replicas=[7], event="stays", why="rank 2: no copy"
    )
    assert not state(await knows)["leave"]
    assert not waiting.done() and host.job.stay_reason == "rank 2: no copy"
    desk.close()
    await waiting


async def test_a_poll_names_the_running_pod() -> None:
    desk = RestartHandler(host := OneJob())
    query = {"attempt": "0", "generation": "0", "wait": "0"}
    await desk.handle_poll("default", "gpt", **query, pod="1", uid="uid 1")
    assert host.job.pod_tracker.uid_by_pod == {1: "uid 1"}
    wrong = await desk.handle_poll("default", "gpt", **query, pod="one", uid="uid 1")
    assert wrong.status == 400 and "pod is 'one'" in json.loads(wrong.body)["error"]


@pytest.mark.parametrize("pods", [8, 1000, MAX_RANKS])
async def test_pods_that_wait_ask_before_they_are_taken_for_gone(pods: int) -> None:
    host = FewerJob()
    host.job.pod_count = host.job.pod_tracker.pod_count = pods
    desk = RestartHandler(host, limits=PollLimits(idle_per_job=0))
    again = state(await waits(desk, 7))["again"]
    host.job.process_pod_report(PodReport.model_validate(GONE | {"generation": 1, "pod": 7}), 100.0)
    assert host.job.pod_tracker.is_present(7, 100.0 + again + 15.0), "5 s for the request itself"
