"""The page of a job at the ingest: who is told what, from when on, and what it costs others."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from ingest_client import PATIENCE, TOKEN, body, controller, until
from pages_here import PagesHere
from watched_jobs import NOW, record, watched

from pipemorph.api.spec import JobSpec, Metadata, PipeMorphJob
from pipemorph.control import JobController
from pipemorph.control.planner_worker import HEADER_BYTES, frame
from pipemorph.ingest import (
    BearerAuthenticator,
    Followed,
    IngestServer,
    MemoryStore,
    Refused,
    Watch,
    WatchDesk,
    WatchProcess,
    WatchProcessLost,
)
from pipemorph.ingest.app import Timeouts
from pipemorph.ingest.watch import desk as watching
from pipemorph.ingest.watch import process as watch_process
from pipemorph.ingest.watch import worker as watch_worker
from pipemorph.ingest.watch.messages import Check, Forget, Look, Marks, Sight, Verdict
from pipemorph.watch import documents
from pipemorph.watch.access import HEADER, path
from pipemorph.watch.document import WatchView
from pipemorph.wire import MAX_OPS_BYTES, DirectiveEnvelope, OpsReport, OpsTrace
from pipemorph.wire.ops import most_ops_bytes

OTHERS, ELSEWHERE = "another-token", "a-token-for-another-replica"
URL = path("default", "gpt")


class Store(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.recovering, self.uid = "", "uid-1"
        self.left_out: tuple[int, ...] = ()

    def followed(self, namespace: str, job: str) -> Followed | None:
        found = self.lookup(namespace, job)
        if not isinstance(found, JobController):
            return None
        manifest = PipeMorphJob(
            api_version="pipemorph.io/v1alpha1", kind="PipeMorphJob",
            metadata=Metadata(name=job, namespace=namespace), spec=found.spec,
        )  # fmt: skip
        return Followed(manifest, found, self.uid, self.recovering, left_out=self.left_out)


class Viewers(BearerAuthenticator):
    """One token is good, one is somebody's who may not see the job."""

    async def authenticate(self, token: str, namespace: str, job: str, source: str = "") -> Any:
        if token == ELSEWHERE:
            raise Refused(421, "another replica serves this job")
        if token == OTHERS:
            raise Refused(403, "may not get that job")
        return await super().authenticate(token, namespace, job, source)


class Site:
    def __init__(
        self,
        session: aiohttp.ClientSession,
        server: IngestServer,
        store: Store,
        pages: WatchProcess,
    ) -> None:
        self.session, self.url, self.store, self.server = session, server.url, store, server
        self.process = pages
        self.sequence = 0

    async def get(self, what: str = "view", **headers: str) -> tuple[int, bytes, Any]:
        async with self.session.get(
            self.url + URL + what, headers=headers or {HEADER: "viewer"}
        ) as answer:
            return answer.status, await answer.read(), answer.headers

    async def view(self, what: str = "view") -> WatchView:
        status, found, _ = await self.get(what)
        assert status == 200, found
        return WatchView.model_validate_json(found)

    async def report(
        self, *iterations: int, seconds: float = 0.5, **more: Any
    ) -> DirectiveEnvelope:
        self.sequence += 1
        samples = [
            {"index": i, "seconds": seconds, "loss": 1.0, "plan_version": 0,
             "bubble_fraction": 0.2} for i in iterations
        ]  # fmt: skip
        content = body(self.sequence, iterations=samples, **more)
        async with self.session.post(
            f"{self.url}/v1/jobs/default/gpt/reports", json=content,
            headers={"Authorization": f"Bearer {TOKEN}"},
        ) as answer:  # fmt: skip
            assert answer.status == 200, await answer.text()
            return DirectiveEnvelope.model_validate_json(await answer.read())

    @property
    def pages(self) -> PagesHere:
        assert isinstance(self.process, PagesHere)
        return self.process

    @property
    def kept(self) -> watch_worker._Kept:
        """Of the one job that is watched."""
        (found,) = self.pages.viewing._jobs.values()
        return found.kept

    async def ops(self, report: OpsReport | bytes, token: str = TOKEN) -> int:
        content = report if isinstance(report, bytes) else report.body()
        headers = {"Authorization": f"Bearer {token}", "Content-Encoding": "deflate"}
        async with self.session.post(
            f"{self.url}/v1/jobs/default/gpt/ops", data=zlib.compress(content), headers=headers
        ) as answer:
            return answer.status


def ops_of(iteration: int) -> OpsReport:
    """As an agent sends them, of a pipeline of four stages."""
    _, traces = watched(4, 8)
    stages = [
        OpsTrace.of((each.rank, each.stage, 0), iteration, 0, NOW, each.ops) for each in traces
    ]
    values = {"job": "gpt", "namespace": "default", "attempt": 0, "column": 0}
    return OpsReport.model_validate({**values, "iteration": iteration, "stages": stages})


def serve(test: Callable[[Site], Awaitable[None]], *, own_process: bool = False) -> None:
    async def run() -> None:
        store, pages = Store(), WatchProcess() if own_process else PagesHere()
        store.add("default", "gpt", controller())
        server = IngestServer(
            store,
            BearerAuthenticator(TOKEN),
            timeouts=Timeouts(shutdown=PATIENCE, refusal=0.01),
            watch=Watch(WatchDesk(store, pages), Viewers("viewer")),
        )
        try:
            async with server, aiohttp.ClientSession() as session:
                await asyncio.wait_for(test(Site(session, server, store, pages)), 4 * PATIENCE)
        finally:
            await pages.close()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is answered with a new document, and all ops are read."""
    monkeypatch.setattr(documents, "EVERY", 0.0)
    monkeypatch.setattr(watching, "OPS_BURST", 1000.0)
    monkeypatch.setattr(watching, "REQUEST_BURST", 1e6)
    # On a busy machine it would take minutes to start.
    monkeypatch.setattr(watch_process, "NICE", 0)


def test_a_viewer_is_told_the_page_and_its_documents() -> None:
    async def look(site: Site) -> None:
        await site.report(0, 1, iteration=2)
        status, page, headers = await site.get("")
        assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"gpt" in page and "default-src 'none'" in headers["Content-Security-Policy"]
        found = await site.view()
        assert (found.job, found.namespace, found.state, found.live) == (
            "gpt", "default", "training", True,
        )  # fmt: skip
        assert found.steps.index == [0, 1] and found.measured is None
        assert len(found.links) == 3
        monkey = await site.get(f"view?after={found.number}")
        assert monkey[1] != b"null", "each request makes another document here"
        # A bearer token does as well.
        assert (await site.get(Authorization="Bearer viewer"))[0] == 200

    serve(look)


@pytest.mark.parametrize(("gpus", "unit"), [("2", "GPU"), (None, "rank")])
def test_hours_are_of_the_gpus_that_the_pods_ask_for(gpus: str | None, unit: str) -> None:
    async def look(site: Site) -> None:
        found = site.store.lookup("default", "gpt")
        assert isinstance(found, JobController)
        limits = {} if gpus is None else {"limits": {"nvidia.com/gpu": gpus}}
        trainer = {"name": "trainer", "resources": limits}
        spec = found.spec.model_copy(update={"template": {"spec": {"containers": [trainer]}}})
        site.store.add("default", "gpt", JobController(spec))
        await site.report(0, iteration=1)
        assert (await site.view()).saved.of == unit

    serve(look)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"X": "x"}, 401), ({HEADER: ""}, 401), ({HEADER: "x"}, 401), ({HEADER: OTHERS}, 403),
        ({"Authorization": f"Bearer {TOKEN}"}, 401), ({"Authorization": "Basic viewer"}, 401),
    ],
)  # fmt: skip
@pytest.mark.parametrize("what", ["", "view", "view?column=0"])
def test_others_are_told_nothing(headers: dict[str, str], status: int, what: str) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        found, said, _ = await site.get(what, **headers)
        assert found == status
        assert set(json.loads(said)) == {"error"} and b"training" not in said
        assert not site.server._watch.desk._watching, "nothing was made for them"  # type: ignore[union-attr]

    serve(look)


def test_a_viewer_may_not_report_nor_a_rank_watch() -> None:
    async def look(site: Site) -> None:
        for method, what, headers in (
            ("POST", URL + "view", {HEADER: "viewer"}),
            ("POST", "/v1/jobs/default/gpt/reports", {HEADER: "viewer"}),
            ("GET", "/v1/jobs/default/gpt/directive?attempt=0", {HEADER: "viewer"}),
            ("POST", "/v1/jobs/default/gpt/reports", {"Authorization": "Bearer viewer"}),
        ):
            async with site.session.request(method, site.url + what, headers=headers) as answer:
                assert answer.status in (401, 405), (method, what)

    serve(look)


def test_nothing_is_kept_before_somebody_watches_and_after_nobody_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look(site: Site) -> None:
        desk = site.server._watch.desk  # type: ignore[union-attr]
        await site.report(*range(60), iteration=60)
        assert not desk._watching
        first = await site.view()
        # What the controller remembers; then all that follows.
        assert first.steps.index == [*range(28, 60)]
        await site.report(*range(60, 100), iteration=100)
        assert (await site.view()).steps.index == [*range(28, 100)]
        # Ranks that started again repeat some.
        await site.report(95, seconds=0.9, iteration=96)
        found = await site.view()
        assert found.steps.index[-1] == 95 and found.steps.seconds[-1] == 0.9
        monkeypatch.setattr(watching, "KEPT_SECONDS", 0.0)
        site.server.sweep()
        assert not desk._watching

    serve(look)


def test_an_ingest_that_stops_makes_no_more_documents() -> None:
    async def look(site: Site) -> None:
        desk = site.server._watch.desk  # type: ignore[union-attr]
        await site.view()
        desk.close()
        assert not desk._watching and (await site.get())[0] == 503

    serve(look)


def test_a_viewer_who_is_sent_on_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """A browser asks every second, and again until the right replica is met."""
    caplog.set_level(logging.INFO, "pipemorph.ingest")

    async def look(site: Site) -> None:
        for token, status, told in ((ELSEWHERE, 421, 0), (OTHERS, 403, 1)):
            assert (await site.get(**{HEADER: token}))[0] == status
            assert sum("refused" in each.message for each in caplog.records) == told

    serve(look)


def test_a_slow_link_and_a_recovery_are_told() -> None:
    async def look(site: Site) -> None:
        await site.view()
        await site.report(0, 1, 2, 3, iteration=4)
        await site.report(iteration=5, directions=SLOW, links=LINKS)
        found = await site.view()
        assert found.links[1].kind == "slow", found.links
        assert any("link 1" in line.lower() and "slow" in line for line in found.story)
        site.store.recovering = "rank 2 was killed"
        found = await site.view()
        assert (found.state, found.reason) == ("recovering", "rank 2 was killed")

    serve(look)


SLOW = [{"link": 1, "column": 0, "direction": "forward", "delay": 0.06, "wire_time": 0.061,
         "since_iteration": 3, "confidence": 1.0}]  # fmt: skip
LINKS = [{"link": i, "health": "healthy", "wire_time": 0.001} for i in range(3)]


def test_who_watches_a_job_to_its_end_is_told_so() -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        assert (await site.view()).live
        site.store.remove("default", "gpt")
        last = await site.view()
        assert (last.live, last.state, last.steps.index) == (False, "interrupted", [0])
        assert last.reason == watching.GONE

    serve(look)


def test_a_job_that_is_not_here_is_said_to_who_may_know() -> None:
    async def look(site: Site) -> None:
        site.store.remove("default", "gpt")
        status, said, _ = await site.get()
        assert status == 404 and b"no job default/gpt here" in said

    serve(look)


def test_reports_and_directives_do_not_wait_for_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that makes them is held up; ten viewers wait, reports are answered."""
    held, go_on = threading.Event(), threading.Event()
    made = watch_worker.watch_view

    def hold(*args: Any, **more: Any) -> WatchView:
        held.set()
        assert go_on.wait(PATIENCE)
        return made(*args, **more)

    async def look(site: Site) -> None:
        monkeypatch.setattr(watch_worker, "watch_view", hold)
        viewers = [asyncio.create_task(site.get()) for _ in range(10)]
        await until(held.is_set)
        for i in range(5):
            await site.report(i, iteration=i + 1)
        assert not any(each.done() for each in viewers)
        go_on.set()
        assert {status for status, _, _ in await asyncio.gather(*viewers)} == {200}

    serve(look)


def test_viewers_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "MOST_WATCHED", 0)

    async def too_many_jobs(site: Site) -> None:
        assert (await site.get())[0] == 429

    serve(too_many_jobs)
    monkeypatch.undo()
    monkeypatch.setattr(watching, "REQUEST_BURST", 3.0)
    monkeypatch.setattr(watching, "REQUESTS_PER_SECOND", 0.001)

    async def too_often(site: Site) -> None:
        found = [(await site.get())[0] for _ in range(5)]
        assert found == [200] * 3 + [429] * 2

    serve(too_often)


def test_all_jobs_together_have_a_budget_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(documents.time, "monotonic", lambda: now)
    whole = documents.Budget(share=0.1, burst=1.0)
    one, other = documents.Budget(within=whole), documents.Budget(within=whole)
    one._take(2.0)
    assert one.left > 0 and other.is_spent(now) and one.is_spent(now)
    now += 10.1
    assert not other.is_spent(now)


# --- ops of iterations ------------------------------------------------------------------------


def test_ops_are_asked_for_while_somebody_watches_and_not_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look(site: Site) -> None:
        assert (await site.report(0, iteration=1)).ops is None
        assert await site.ops(ops_of(0)) == 409, "nobody watches"
        found = await site.view()
        assert found.measured is None and "have been asked for" in found.no_alternative
        wanted = (await site.report(1, iteration=2)).ops
        assert wanted is not None and (wanted.column, wanted.seconds) == (0, watching.LEASE_SECONDS)
        monkeypatch.setattr(watch_worker, "UNHEARD_SECONDS", 0.0)
        assert "this trainer sends no ops" in (await site.view()).no_alternative
        assert await site.ops(ops_of(1)) == 200
        found = await site.view()
        assert found.available == [1] and found.measured is not None
        assert found.measured.iteration == 1 and found.measured.seconds == 0.5
        assert [row.kinds.count("F") for row in found.measured.rows] == [8] * 4
        monkeypatch.setattr(watching, "WATCHED_SECONDS", 0.0)
        assert (await site.report(2, iteration=3)).ops is None
        assert await site.ops(ops_of(2)) == 409

    serve(look)


def test_earlier_iterations_are_there_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        await site.report(*range(9), iteration=9)
        await site.view()
        assert await site.ops(ops_of(2)) == 200
        kept = site.kept
        one = kept.ops_bytes
        monkeypatch.setattr(watch_worker, "MOST_KEPT_BYTES", 3 * one + one // 2)
        for i in range(3, 9):
            assert await site.ops(ops_of(i)) == 200
        assert (await site.view()).available == [6, 7, 8]
        found = await site.view("view?iteration=7")
        assert found.measured is not None and found.measured.iteration == 7
        entries = watch_worker.ENTRY_BYTES * len(kept.ops)
        assert kept.ops_bytes == sum(map(len, kept.ops.values())) + entries <= 3.5 * one
        monkeypatch.setattr(watch_worker, "MOST_KEPT_OPS", 2)
        assert await site.ops(ops_of(9)) == 200
        assert (await site.view()).available == [8, 9]
        assert kept.ops_bytes == sum(map(len, kept.ops.values())) + 2 * watch_worker.ENTRY_BYTES

    serve(look)


def test_ops_of_all_jobs_have_a_bound_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        desk = site.server._watch.desk  # type: ignore[union-attr]
        await site.report(*range(9), iteration=9)
        await site.view()
        assert await site.ops(ops_of(1)) == 200
        one = site.kept.ops_bytes
        site.store.add("default", "other", controller())
        assert (await desk.tell("default", "other", {}, page=False)).status == 200
        mine, other = (each.kept for each in site.pages.viewing._jobs.values())
        for i in range(4):
            other.take_ops(ops_of(i), b"x" * (one - watch_worker.ENTRY_BYTES))
        monkeypatch.setattr(watch_worker, "MOST_KEPT_IN_ALL", 4 * one + one // 2)
        assert await site.ops(ops_of(2)) == 200
        # Those who have most lose their oldest.
        assert [i for _, i in mine.ops] == [1, 2] and [i for _, i in other.ops] == [2, 3]

    serve(look)


def test_ops_go_soon_after_the_last_viewer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        assert await site.ops(ops_of(0)) == 200
        desk = site.server._watch.desk  # type: ignore[union-attr]
        desk.sweep()
        assert site.kept.ops
        monkeypatch.setattr(watching, "OPS_SECONDS", 0.0)
        desk.sweep()
        assert not site.kept.ops and not site.kept.ops_bytes
        assert site.kept.samples, "who looks again in some minutes has not missed much"

    serve(look)


def test_iterations_that_run_again_are_told_anew_with_all_after_them() -> None:
    async def look(site: Site) -> None:
        await site.report(*range(6), iteration=6)
        await site.view()
        for i in range(2, 9):  # Of the last three no report has told yet.
            assert await site.ops(ops_of(i)) == 200
        await site.report(6, iteration=7)
        assert (await site.view()).available == [*range(2, 9)]
        await site.report(4, iteration=5)
        assert (await site.view()).available == [2, 3]
        # Ops may come before the report that tells of it.
        assert await site.ops(ops_of(2)) == 200
        assert (await site.view()).available == [2]

    serve(look)


def test_ops_of_what_ran_before_are_dropped() -> None:
    """Of another attempt, another mesh, or other replicas."""

    async def look(site: Site) -> None:
        async def kept() -> bool:
            assert await site.ops(ops_of(1).model_copy(update={"attempt": attempt})) == 200
            await site.report(2, iteration=3, attempt=attempt)
            return bool(site.kept.ops)

        attempt = 0
        await site.report(0, iteration=1)
        await site.view()
        assert await kept()
        running = site.store.lookup("default", "gpt")
        assert isinstance(running, JobController)
        site.store.left_out = (1,)
        await site.report(2, iteration=3)
        assert not site.kept.ops and await kept()
        attempt = 1
        running.begin_attempt(1)
        await site.report(0, iteration=1, attempt=1)
        assert not site.kept.ops and await kept()
        spec = running.spec.model_dump(by_alias=True)
        spec["parallelism"]["replicas"] = 2
        site.store.remove("default", "gpt")
        site.store.add("default", "gpt", running.resized(JobSpec.model_validate(spec)))
        found = await site.view()
        assert found.available == [] and len(found.columns) == 2
        # Ranks are numbered anew.
        assert await site.ops(ops_of(1).model_copy(update={"attempt": 1})) == 422

    serve(look)


def test_another_job_of_the_same_name_is_shown_anew() -> None:
    async def look(site: Site) -> None:
        await site.report(*range(5), iteration=5)
        before = await site.view()
        assert await site.ops(ops_of(3)) == 200
        site.store.remove("default", "gpt")
        site.store.add("default", "gpt", controller())
        site.store.uid = "uid-2"
        site.sequence = 0
        assert (await site.report(0, iteration=1)).ops is None, "nobody has looked at this one"
        assert await site.ops(ops_of(0)) == 409
        found = await site.view(f"view?after={before.number}")
        assert (found.steps.index, found.available, found.done) == ([0], [], 1)
        assert found.number > before.number, "a page knows that it is another document"
        assert await site.ops(ops_of(0)) == 200

    serve(look)


def test_a_job_sends_ops_no_more_often_and_no_more_than_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "OPS_BURST", 2.0)
    monkeypatch.setattr(watching, "OPS_PER_SECOND", 0.001)
    whole = ops_of(1).body()
    most = most_ops_bytes(4, 8)
    assert len(whole) < most < 40_000

    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        assert await site.ops(whole + b" " * most) == 413
        assert await site.ops(whole + b" " * (most - len(whole))) == 200
        read: list[int] = []

        async def body(most: int) -> bytes:
            read.append(most)
            return whole

        desk = site.server._watch.desk  # type: ignore[union-attr]
        assert (await desk.take("default", "gpt", body, packed=False)).status == 429
        assert read == [], "it is refused unread"

    serve(look)


def test_ops_of_few_jobs_are_read_at_once_and_within_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_worker, "OPS_CPU_BURST", 0.0)

    async def too_much(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        assert await site.ops(ops_of(0)) == 429

    serve(too_much)
    monkeypatch.undo()
    monkeypatch.setattr(watching, "MOST_READING", 0)

    async def too_many(site: Site) -> None:
        await site.view()
        assert await site.ops(ops_of(0)) == 429

    serve(too_many)


def test_ops_of_an_iteration_that_the_ranks_cannot_be_in_are_refused() -> None:
    async def look(site: Site) -> None:
        await site.report(*range(5), iteration=5)
        await site.view()
        # Half a second each: 30 s are 60 of them.
        assert await site.ops(ops_of(5 + watch_worker.APART + 60)) == 200
        assert await site.ops(ops_of(6 + watch_worker.APART + 60)) == 422
        assert await site.ops(ops_of(2**40)) == 422
        full = ops_of(5)
        first = full.stages[0]
        many = {name: getattr(first, name)[:1] * 25 for name in
                ("kinds", "microbatches", "gaps", "durations")}  # fmt: skip
        stages = [first.model_copy(update=many), *full.stages[1:]]
        assert await site.ops(full.model_copy(update={"stages": stages})) == 422

    serve(look)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"job": "other"}, 403), ({"attempt": 7}, 403), ({"column": 1}, 422),
        ({"iteration": 9}, 422), ({"stages": ops_of(1).stages[:3]}, 422),
        ({"stages": ops_of(1).stages[::-1]}, 422), ({"stages": ops_of(1).stages[:3] * 2}, 422),
    ],
)  # fmt: skip
def test_ops_that_do_not_fit_the_job_are_refused(changes: dict[str, Any], status: int) -> None:
    async def look(site: Site) -> None:
        await site.view()
        assert await site.ops(ops_of(1).model_copy(update=changes)) == status
        assert (await site.view()).measured is None

    serve(look)


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"", 422), (b"{}", 422), (b"\xff" * 99, 422), (b"[" * 5000, 422),
     (b" " * (MAX_OPS_BYTES + 1), 413)],
)  # fmt: skip
def test_what_are_no_ops_are_refused(content: bytes, status: int) -> None:
    """However well they are compressed."""

    async def look(site: Site) -> None:
        await site.view()
        assert await site.ops(content) == status
        assert await site.ops(ops_of(1), token="viewer") == 401
        lame = ops_of(1)
        short = lame.stages[0].model_copy(update={"durations": [1]})
        assert await site.ops(lame.model_copy(update={"stages": [short, *lame.stages[1:]]})) == 422
        assert (await site.view()).measured is None

    serve(look)


def test_the_column_that_is_looked_at_is_asked_for() -> None:
    async def look(site: Site) -> None:
        await site.view("view?column=0")
        asked = (await site.report(0, iteration=1)).ops
        assert asked is not None and asked.column == 0
        await site.view("view?column=7")
        asked = (await site.report(1, iteration=2)).ops
        assert asked is not None and asked.column == 0, "there is no such column"

    serve(look)


# --- the process that makes pages -------------------------------------------------------------


def test_a_process_of_its_own_makes_the_documents_and_takes_ops() -> None:
    async def look(site: Site) -> None:
        await site.report(0, 1, iteration=2)
        assert site.process.pid is None, "while nobody watches there is none"
        status, page, headers = await site.get("")
        assert status == 200 and b"gpt" in page and headers["Content-Encoding"] == "gzip"
        assert await site.ops(ops_of(1)) == 200
        await site.report(2, iteration=3, directions=SLOW, links=LINKS)
        plain = {HEADER: "viewer", "Accept-Encoding": "identity"}
        while True:  # Documents are made once a second.
            status, found, headers = await site.get("view", **plain)
            assert status == 200 and "Content-Encoding" not in headers
            view = WatchView.model_validate_json(found)
            if view.steps.index == [0, 1, 2]:
                break
        assert view.links[1].kind == "slow" and view.measured is not None
        assert await site.ops(b"[" * 5000) == 422

    serve(look, own_process=True)


def test_a_process_that_is_killed_is_started_again_and_viewers_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look(site: Site) -> None:
        await site.report(*range(4), iteration=4)
        before = await site.view()
        pid = site.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        waits = asyncio.create_task(site.get())
        await until(lambda: bool(site.process._open))
        os.kill(pid, signal.SIGKILL)
        status, said, _ = await waits
        assert status == 503 and b"ask again" in said
        assert await site.report(4, iteration=5), "reports go on"
        monkeypatch.setattr(watch_process, "START_SECONDS", 3600.0)
        assert (await site.get())[0] == 503, "not started again and again"
        assert site.process.pid is None
        monkeypatch.setattr(watch_process, "START_SECONDS", 0.0)
        found = await site.view()
        assert site.process.pid not in (None, pid)
        assert found.steps.index == [*range(5)], "what the controller remembers is told anew"
        assert found.number > before.number, "a page knows that it is another document"

    serve(look, own_process=True)


def test_a_process_that_lags_is_told_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        before, most = await site.view(), watch_process.MOST_UNREAD
        monkeypatch.setattr(watch_process, "MOST_UNREAD", -1)
        assert await site.report(1, iteration=2)
        assert (await site.get())[0] == 503 and await site.ops(ops_of(1)) == 503
        monkeypatch.setattr(watch_process, "MOST_UNREAD", most)
        while (found := await site.view()).number == before.number:
            pass  # Documents are made once a second.
        assert found.steps.index == [0]

    serve(look, own_process=True)


def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        monkeypatch.setattr(watch_process, "ANSWER_SECONDS", 0.2)
        os.kill(site.process.pid or 0, signal.SIGSTOP)
        assert (await site.get())[0] == 503
        assert site.process.pid is None

    serve(look, own_process=True)


def test_what_the_process_cannot_answer_ends_nothing_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        pid = site.process.pid
        with pytest.raises(WatchProcessLost, match="see the log of the ingest"):
            await site.process.ask(Check("a token", "default", "gpt"))
        assert (await site.get())[0] == 200 and site.process.pid == pid

    serve(look, own_process=True)
    log = capfd.readouterr().err
    assert "a Check could not be answered" in log and "its host does" in log
    assert "a token" not in log


def test_an_ingest_that_stops_does_not_wait_for_the_process() -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        os.kill(site.process.pid or 0, signal.SIGSTOP)
        waits = asyncio.create_task(site.get())
        await until(lambda: bool(site.process._open))
        began = time.monotonic()
        await site.server.stop()
        assert time.monotonic() - began < PATIENCE / 2, "less than requests in progress may take"
        assert (await waits)[0] == 503
        with pytest.raises(WatchProcessLost, match="the ingest stops"):
            await site.process.ask(Look(1, Marks(), outlook=False))
        await site.process.close()
        assert site.process.pid is None

    serve(look, own_process=True)


def test_a_process_that_is_to_end_is_told_nothing_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is the next one told what this one has asked."""
    monkeypatch.setattr(watch_process, "START_SECONDS", 0.0)

    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        answers = site.process.on_look

        def end_meanwhile(asked: Look) -> Sight | None:
            site.process.on_look = answers
            site.process.end_idle(-1.0)
            return answers(asked)

        site.process.on_look = end_meanwhile
        assert (await site.get())[0] == 503
        assert (await site.view()).steps.index == [0]

    serve(look, own_process=True)
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


def test_a_process_that_lags_is_told_nevertheless_what_it_need_not_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        assert await site.ops(ops_of(1)) == 200
        told: list[Any] = []
        monkeypatch.setattr(site.process, "_write", told.append)
        monkeypatch.setattr(watch_process, "MOST_UNREAD", -1)
        desk = site.server._watch.desk  # type: ignore[union-attr]
        monkeypatch.setattr(watching, "OPS_SECONDS", -1.0)
        desk.sweep()
        monkeypatch.setattr(watching, "KEPT_SECONDS", -1.0)
        desk.sweep()
        assert told == [(0, Forget(1, ops=True)), (0, Forget(1, ops=False))]

    serve(look, own_process=True)


def test_the_process_ends_when_nobody_watches_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        desk = site.server._watch.desk  # type: ignore[union-attr]
        desk.sweep()
        running = site.process._process
        assert running is not None
        monkeypatch.setattr(watching, "KEPT_SECONDS", -1.0)
        desk.sweep()
        assert site.process.pid is None
        assert await asyncio.wait_for(running.wait(), PATIENCE) == 0, "it ends with its input"

    serve(look, own_process=True)


def test_what_seldom_changes_is_told_once_and_changes_of_plan_as_they_are() -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        desk = site.server._watch.desk  # type: ignore[union-attr]
        (each,) = desk._watching.values()
        running = site.store.lookup("default", "gpt")
        assert isinstance(running, JobController)
        change = record(1, "adapt", 3, running.running)
        running._ledger.records.append(change)
        first = each.sight(Look(each.number, Marks(), outlook=False))
        (told,) = first.changes.values()
        assert first.job is not None and told.plan_version == 1
        again = each.sight(Look(each.number, first.marks, outlook=False))
        assert again.job is None and not again.changes and again.order == first.order
        change.measured = 0.25
        (told,) = each.sight(Look(each.number, first.marks, outlook=False)).changes.values()
        assert told.measured == 0.25
        assert [each.measured for each in (await site.view()).changes] == [0.25]

    serve(look)


def test_a_compressed_report_is_refused_unread() -> None:
    async def look(site: Site) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Encoding": "deflate"}
        where = f"{site.url}/v1/jobs/default/gpt/reports"
        async with site.session.post(where, data=zlib.compress(b"{}"), headers=headers) as answer:
            assert answer.status == 415

    serve(look)


@pytest.mark.parametrize(
    ("packed", "status"),
    [(b"no zlib at all", 400), (zlib.compress(b" " * (MAX_OPS_BYTES + 1)), 413)],
)
def test_ops_are_unpacked_no_further_than_they_may_be(packed: bytes, status: int) -> None:
    async def look(site: Site) -> None:
        await site.view()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Encoding": "deflate"}
        where = f"{site.url}/v1/jobs/default/gpt/ops"
        async with site.session.post(where, data=packed, headers=headers) as answer:
            assert answer.status == status

    serve(look)


def worker(script: str) -> subprocess.Popen[bytes]:
    script = f"from pipemorph.ingest.watch import messages, worker\n{script}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script], **pipes)  # type: ignore[call-overload]


def test_a_process_that_takes_too_much_memory_ends() -> None:
    script = """
async def serving():
    bytearray(worker.MEMORY_BYTES)
worker.run(serving)
"""
    with worker(script) as process:
        _, said = process.communicate(timeout=4 * PATIENCE)
    assert process.returncode == 1 and b"MemoryError" in said


def test_what_is_printed_in_the_process_is_no_answer() -> None:
    script = """
async def check(asked):
    print("printed", flush=True)
    return messages.Verdict(200, "me")
worker.run(lambda: worker.serve(check))
"""
    with worker(script) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(frame((7, Check("token", "default", "gpt"))))
        process.stdin.flush()
        length = int.from_bytes(process.stdout.read(HEADER_BYTES), "big")
        assert pickle.loads(process.stdout.read(length)) == (7, Verdict(200, "me"))
        rest, said = process.communicate(timeout=4 * PATIENCE)
    assert (process.returncode, rest) == (0, b"") and b"printed" in said
