"""What becomes of plans at the ingest: served, persisted, and taken from the ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from ingest_client import (
    LONG,
    PATIENCE,
    Client,
    Scripted,
    body,
    controller,
    serve,
    waiting,
)
from waiting import until_async

from pipemorph.ingest import (
    IngestServer,
    MemoryStore,
    Reply,
)
from pipemorph.wire import (
    MAX_PLAN_BYTES,
    AdaptationRecord,
    Directive,
    HandIn,
    PlanMessage,
)


class Saved(MemoryStore):
    """A store in which persisting waits for ``allow`` and may fail. Only versions up to
    ``granted`` are reserved."""

    def __init__(self, granted: int = 0) -> None:
        super().__init__()
        self.granted = granted
        self.events: list[str] = []
        self.allow = asyncio.Event()
        self.fails = False

    def reserved(self, namespace: str, job: str) -> int:
        return self.granted

    async def persist(self, namespace: str, job: str, snapshot: Mapping[str, Any]) -> None:
        self.events.append(f"persisting {snapshot['plan_version']}")
        await self.allow.wait()
        if self.fails:
            raise OSError("no space left")
        self.events.append(f"persisted {snapshot['plan_version']}")


def test_a_version_that_is_not_reserved_is_persisted_before_anybody_sees_it() -> None:
    job, store = Scripted(), Saved()

    async def test(client: Client, server: IngestServer) -> None:
        job.on_report = lambda report: job.want(1)
        poll = asyncio.create_task(client.poll(f"attempt=0&wait={LONG}"))
        await until_async(lambda: waiting(server, job) == 1, "one poll waits")
        first = asyncio.create_task(client.post(body(1)))
        await until_async(lambda: store.events == ["persisting 1"], "the plan is being persisted")
        # Whoever asks meanwhile gets nothing, and waits for nothing it did not ask for.
        assert (await client.poll("attempt=0&wait=0"))[1]["directive"] is None
        second = asyncio.create_task(client.post(body(2)))
        done, _ = await asyncio.wait({first, second, poll}, timeout=0.2)
        assert not done
        job.on_report = lambda report: None
        job.want(2)
        store.allow.set()
        answers = await asyncio.gather(first, second, poll)
        assert store.events == ["persisting 1", "persisted 1", "persisting 2", "persisted 2"]
        assert answers[0][1]["directive"]["plan_version"] == 2
        assert answers[1][1]["directive"]["plan_version"] == 2
        assert answers[2][1]["directive"]["plan_version"] in (1, 2)

    serve(test, job, store=store)


def test_a_reserved_version_is_served_at_once_and_persisted_after() -> None:
    job, store = Scripted(), Saved(granted=2)

    async def test(client: Client, server: IngestServer) -> None:
        poll = asyncio.create_task(client.poll(f"attempt=0&wait={LONG}"))
        await until_async(lambda: waiting(server, job) == 1, "one poll waits")
        job.on_report = lambda report: job.want(1)
        assert (await client.post(body(1)))[1]["directive"]["plan_version"] == 1
        assert (await poll)[1]["directive"]["plan_version"] == 1
        assert store.events == ["persisting 1"]
        job.on_report = lambda report: job.want(2)
        assert (await client.post(body(2)))[1]["directive"]["plan_version"] == 2
        # The block ends here.
        job.on_report = lambda report: job.want(3)
        last = asyncio.create_task(client.post(body(3)))
        done, _ = await asyncio.wait({last}, timeout=0.2)
        assert not done
        assert (await client.poll("attempt=0&after=1&wait=0"))[1]["directive"]["plan_version"] == 2
        store.allow.set()
        assert (await last)[1]["directive"]["plan_version"] == 3
        assert store.events == ["persisting 1", "persisted 1", "persisting 3", "persisted 3"]

    serve(test, job, store=store)


def test_what_was_served_is_persisted_before_the_host_ends() -> None:
    job, store = Scripted(), Saved(granted=9)

    async def test(client: Client, server: IngestServer) -> None:
        job.on_report = lambda report: job.want(1)
        await client.post(body(1))
        await until_async(lambda: store.events == ["persisting 1"], "the plan is being persisted")
        stopping = asyncio.create_task(server.stop())
        done, _ = await asyncio.wait({stopping}, timeout=0.5)
        assert not done
        store.allow.set()
        await asyncio.wait_for(stopping, PATIENCE)
        assert store.events == ["persisting 1", "persisted 1"]

    serve(test, job, store=store)


def test_a_directive_that_cannot_be_persisted_is_held_back_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job, store = Scripted(), Saved()
    store.fails = True
    store.allow.set()

    async def test(client: Client, server: IngestServer) -> None:
        assert (await client.post(body(1)))[1]["directive"] is None
        job.want(1)
        status, answer = await client.post(body(2))
        assert (status, answer["directive"]) == (200, None)
        assert "v1 could not be persisted, and no version is reserved" in caplog.text
        assert "no space left" in caplog.text
        store.fails = False
        await server.handler.tick("default", "gpt")
        assert (await client.poll("attempt=0"))[1]["directive"]["plan_version"] == 1

    serve(test, job, store=store)


def test_a_directive_that_was_served_is_persisted_as_soon_as_it_can_be(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, store = Scripted(), Saved(granted=9)
    store.fails = True
    store.allow.set()
    monkeypatch.setattr("pipemorph.ingest.handler.PERSIST_AGAIN_SECONDS", 0.5)

    async def test(client: Client, server: IngestServer) -> None:
        await client.post(body(1))
        job.want(1)
        for i in range(5):
            answer = await client.post(body(2 + i))
            assert answer[1]["directive"]["plan_version"] == 1
        assert "v1 was served but not persisted; retrying: no space left" in caplog.text
        assert store.events == ["persisting 1"], "not with every report"
        store.fails = False

        async def persisted() -> None:
            while "persisted 1" not in store.events:
                await server.handler.tick("default", "gpt")
                await asyncio.sleep(0.02)

        await asyncio.wait_for(persisted(), PATIENCE)
        await server.handler.tick("default", "gpt")
        assert store.events == ["persisting 1", "persisting 1", "persisted 1"]

    serve(test, job, store=store)


def test_a_restored_job_serves_its_directive_at_once() -> None:
    job = Scripted()
    job.want(7)

    async def test(client: Client, server: IngestServer) -> None:
        assert (await client.poll("attempt=0&after=6"))[1]["directive"]["plan_version"] == 7

    serve(test, job)


def test_a_plan_is_taken_only_if_it_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    """Its bytes are not even read otherwise, nor those of a second one after a bad one."""
    made = controller()
    plan = PlanMessage.of(made.wanted).model_copy(update={"version": 3})
    record = AdaptationRecord(
        plan_version=3, kind="adapt", detected_at=1.0, detected_at_iteration=0, detectable_at=0,
        reason="because", links=[], warmup_before=[], warmup_after=[], routes=[],
        predicted_seconds_before=None, predicted_seconds_after=1.0,
    )  # fmt: skip
    newest = Directive(plan_version=3, issued_at=1.0, reason="because", plan=plan, record=record)
    message = HandIn(job="gpt", namespace="default", attempt=0, directive=newest)
    good = message.body()
    bad = (
        message.model_copy(update={"job": "other"}).body(),
        message.model_copy(update={"attempt": 1}).body(),
    )

    async def test(client: Client, server: IngestServer) -> None:
        assert (await client.put("plan", good, token="wrong"))[0] == 401
        assert (await client.put("plan", good, job="other"))[0] == 404
        status, answer = await client.put("plan", good)
        assert (status, "no plan is wanted" in answer["error"]) == (409, True)
        status, answer = await client.post(body(observed_plan_version=3))
        assert (status, answer["wants_plan"]) == (200, True)
        status, answer = await client.put("plan", b" " * (MAX_PLAN_BYTES + 1))
        assert (status, "larger than 8388608 bytes" in answer["error"]) == (413, True)
        for each in bad:
            assert (await client.put("plan", each))[0] == 403
        # One at a time: they may be large.
        enough = asyncio.Event()

        async def slowly() -> bytes | Reply:
            await enough.wait()
            return Reply.error(408, "too slow")

        reading = asyncio.create_task(server.handler.hand_in("default", "gpt", slowly))
        await asyncio.sleep(0)
        assert (await client.put("plan", good))[0] == 409
        enough.set()
        assert (await reading).status == 408
        assert (await client.put("plan", good))[0] == 200
        assert made.wanted.version == 3
        status, answer = await client.poll("attempt=0&after=2&wait=0")
        assert Directive.model_validate(answer["directive"]) == newest
        status, answer = await client.post(body(2, observed_plan_version=3))
        assert not answer["wants_plan"]
        # Of yet another host, and bad.
        status, answer = await client.post(body(3, observed_plan_version=5))
        assert answer["wants_plan"]
        status, answer = await client.put("plan", good)
        assert (status, answer["field"]) == (422, "directive")
        assert "plan v3 is not v5, the newest that the ranks have reported" in answer["error"]
        assert (await client.put("plan", b"{"))[0] == 409

    serve(test, made)
    assert "refused the plan that the ranks run: plan v3 is not v5" in caplog.text
