"""Plans and snapshots at the ingest: served, persisted, and handed in by agents."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from ingest_client import LONG, PATIENCE, Scripted, body, controller, serve, waiting
from waiting import until_async

from pipemorph.control import snapshot
from pipemorph.ingest import InMemoryJobStore, Reply
from pipemorph.protocol import (
    MAX_SNAPSHOT_MESSAGE_BYTES,
    AdaptationRecord,
    Directive,
    PlanMessage,
    SnapshotMessage,
    compute_revision,
)


class Saved(InMemoryJobStore):
    """A store in which persisting waits for ``allow`` and may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.allow = asyncio.Event()
        self.fails = False

    async def persist_status(self, namespace: str, job: str) -> None:
        found = self.find_job(namespace, job)
        version = found.plan_version
        self.events.append(f"persisting {version}")
        await self.allow.wait()
        if self.fails:
            raise OSError("no space left")
        self.events.append(f"persisted {version}")


async def test_a_directive_is_served_at_once_and_persisted_after() -> None:
    job, store = Scripted(), Saved()
    async with serve(job, store=store) as (client, server):
        poll = asyncio.create_task(client.poll(f"attempt=0&wait={LONG}"))
        await until_async(lambda: waiting(server, job) == 1, "one poll waits")
        job.on_report = lambda report: job.want(1)
        assert (await client.post(body(1)))[1]["directive"]["plan_version"] == 1
        assert (await poll)[1]["directive"]["plan_version"] == 1
        assert store.events == ["persisting 1"]
        job.on_report = lambda report: job.want(2)
        assert (await client.post(body(2)))[1]["directive"]["plan_version"] == 2
        assert (await client.poll("attempt=0&after=1&wait=0"))[1]["directive"]["plan_version"] == 2
        store.allow.set()
        await until_async(lambda: "persisted 2" in store.events, "both are persisted")


async def test_a_host_with_a_directive_has_the_snapshot_that_explains_it() -> None:
    job = Scripted()
    async with serve(job) as (client, _):
        _, first = await client.post(body(1))
        held = compute_revision(first["snapshot"])
        assert unpacked(first["snapshot"]) == {"plan_version": 0}
        job.on_report = lambda report: job.want(1)
        _, answer = await client.post(body(2, snapshot=held))
        assert answer["directive"]["plan_version"] == 1
        assert unpacked(answer["snapshot"]) == {"plan_version": 1}
        assert (await client.poll("attempt=0"))[1]["snapshot"] == answer["snapshot"]
        job.on_report = lambda report: None
        # The answer was lost.
        _, again = await client.post(body(3, snapshot=held))
        assert again["snapshot"] == answer["snapshot"]
        held = compute_revision(answer["snapshot"])
        _, last = await client.post(body(4, snapshot=held, observed_plan_version=1))
        assert last["snapshot"] is None, "it has that one"


async def test_a_snapshot_that_is_too_large_is_not_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(snapshot, "MAX_SNAPSHOT_BYTES", 8)
    job = Scripted()
    job.want(1)
    async with serve(job) as (client, _):
        _, answer = await client.post(body(1))
        assert (answer["directive"]["plan_version"], answer["snapshot"]) == (1, None)
    assert "bytes of at most 8: another ingest could not continue from it" in caplog.text


async def test_a_host_that_leads_no_more_sends_the_agent_away() -> None:
    made = controller()
    async with serve(made) as (client, _):
        status, answer = await client.post(body(1, term=4))
        assert (status, answer["term"]) == (200, 5)
        status, answer = await client.post(body(2, term=5))
        assert (status, answer["term"]) == (200, 5)
        status, answer = await client.post(body(3, term=6))
        assert (status, answer["field"]) == (503, "term")
        assert answer["error"] == "an ingest of term 6 controls this job; this one has term 5"


async def test_served_directives_are_persisted_before_the_host_ends() -> None:
    job, store = Scripted(), Saved()
    async with serve(job, store=store) as (client, server):
        job.on_report = lambda report: job.want(1)
        await client.post(body(1))
        await until_async(lambda: store.events == ["persisting 1"], "the plan is being persisted")
        stopping = asyncio.create_task(server.stop())
        done, _ = await asyncio.wait({stopping}, timeout=0.5)
        assert not done
        store.allow.set()
        await asyncio.wait_for(stopping, PATIENCE)
        assert store.events == ["persisting 1", "persisted 1"]


async def test_a_directive_that_was_served_is_persisted_as_soon_as_it_can_be(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, store = Scripted(), Saved()
    store.fails = True
    store.allow.set()
    monkeypatch.setattr("pipemorph.ingest.handler.PERSIST_RETRY_SECONDS", 0.5)
    async with serve(job, store=store) as (client, server):
        await client.post(body(1))
        job.want(1)
        for i in range(5):
            answer = await client.post(body(2 + i))
            assert answer[1]["directive"]["plan_version"] == 1
        assert "v1 was served but status was not written; retrying: no space left" in caplog.text
        assert store.events == ["persisting 1"], "not with every report"
        store.fails = False

        async def persisted() -> None:
            while "persisted 1" not in store.events:
                await server.handler.tick_job("default", "gpt")
                await asyncio.sleep(0.02)

        await asyncio.wait_for(persisted(), PATIENCE)
        await server.handler.tick_job("default", "gpt")
        assert store.events == ["persisting 1", "persisting 1", "persisted 1"]


async def test_a_restored_job_serves_its_directive_at_once() -> None:
    job = Scripted()
    job.want(7)
    async with serve(job) as (client, _):
        assert (await client.poll("attempt=0&after=6"))[1]["directive"]["plan_version"] == 7


async def test_a_snapshot_is_taken_only_if_it_is_wanted(caplog: pytest.LogCaptureFixture) -> None:
    """The bytes are not even read otherwise, nor those of a second one after a bad one."""
    made = controller()
    plan = PlanMessage.from_plan(made.wanted_plan).model_copy(update={"version": 3})
    record = AdaptationRecord(
        plan_version=3, kind="adapt", detected_at=1.0, detected_at_iteration=0, detectable_at=0,
        reason="because", links=[], warmup_before=[], warmup_after=[], routes=[],
        predicted_seconds_before=None, predicted_seconds_after=1.0,
    )  # fmt: skip
    newest = Directive(plan_version=3, issued_at=1.0, reason="because", plan=plan, record=record)
    saved = made.take_snapshot() | {
        "plan_version": 3,
        "directive": newest.model_dump(mode="json"),
        "records": [record.model_dump(mode="json")],
    }
    message = SnapshotMessage(
        job="gpt", namespace="default", attempt=0, snapshot=snapshot.pack_snapshot(saved)
    )
    good = message.to_json()
    bad = (
        message.model_copy(update={"job": "other"}).to_json(),
        message.model_copy(update={"attempt": 1}).to_json(),
    )
    async with serve(made) as (client, server):
        assert (await client.put("snapshot", good, token="wrong"))[0] == 401
        assert (await client.put("snapshot", good, job="other"))[0] == 404
        status, answer = await client.put("snapshot", good)
        assert (status, "no snapshot is wanted" in answer["error"]) == (409, True)
        status, answer = await client.post(body(observed_plan_version=3, snapshot="held"))
        assert (status, answer["wants_snapshot"], answer["snapshot"]) == (200, True, None)
        status, answer = await client.put("snapshot", b" " * (MAX_SNAPSHOT_MESSAGE_BYTES + 1))
        assert (status, f"larger than {MAX_SNAPSHOT_MESSAGE_BYTES} bytes" in answer["error"]) == (
            413,
            True,
        )
        for each in bad:
            assert (await client.put("snapshot", each))[0] == 403
        # Snapshots are taken singly: they may be large.
        enough = asyncio.Event()

        async def slowly() -> bytes | Reply:
            await enough.wait()
            return Reply.from_error(408, "too slow")

        reading = asyncio.create_task(server.handler.handle_snapshot("default", "gpt", slowly))
        await asyncio.sleep(0)
        assert (await client.put("snapshot", good))[0] == 409
        enough.set()
        assert (await reading).status == 408
        assert (await client.put("snapshot", good))[0] == 200
        assert made.wanted_plan.version == 3
        status, answer = await client.poll("attempt=0&after=2&wait=0")
        assert Directive.model_validate(answer["directive"]) == newest
        status, answer = await client.post(body(2, observed_plan_version=3, snapshot="held"))
        assert not answer["wants_snapshot"] and answer["snapshot"]
        # Snapshot of a third host, and bad.
        status, answer = await client.post(body(3, observed_plan_version=5))
        assert answer["wants_snapshot"]
        status, answer = await client.put("snapshot", good)
        assert (status, answer["field"]) == (422, "snapshot")
        assert "its plan is v3; the newest plan that the ranks reported is v5" in answer["error"]
        assert (await client.put("snapshot", b"{"))[0] == 409
    assert (
        "refused the snapshot of the job's agent: its plan is v3; the newest plan that the ranks"
        " reported is v5" in caplog.text
    )


def unpacked(packed: str) -> Any:
    return json.loads(snapshot.unpack_snapshot(packed))
