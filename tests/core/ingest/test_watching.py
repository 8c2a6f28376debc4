"""The page of a job at the ingest: who is told what, from when on, and what it costs others."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from ingest_client import PATIENCE, TOKEN
from waiting import until_async
from watch_site import (
    LINKS,
    OTHERS,
    SLOW,
    URL,
    Site,
    serve,
)

from pipemorph.control import JobController
from pipemorph.ingest.watch import desk as watching
from pipemorph.ingest.watch import worker as watch_worker
from pipemorph.watch import documents
from pipemorph.watch.access import HEADER
from pipemorph.watch.document import WatchView

pytestmark = pytest.mark.usefixtures("at_once")


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
        await until_async(held.is_set, "the request is held")
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
