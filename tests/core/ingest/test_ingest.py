"""The ingest over real sockets: what it takes, what it turns down, what it never does."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp
import pytest
from gate import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ingest_client import LONG, PATIENCE, TOKEN, Scripted, body, controller, serve, waiting
from waiting import until_async

from pipemorph.ingest import (
    AccessDeniedError,
    Identity,
    IngestHandler,
    InMemoryJobStore,
    RateLimits,
)
from pipemorph.ingest.app import ClientTimeouts
from pipemorph.protocol import MAX_REPORT_BYTES, PROTOCOL, DirectiveEnvelope

SLOW = {
    "link": 0,
    "health": "slow",
    "replica": 0,
    "direction": "forward",
    "delay": 0.1,
    "wire_time": 0.1,
}
WELL = {"link": 1, "health": "healthy", "wire_time": 0.01, "replica": 0}
OLD = {name: value for name, value in body(links=[{"link": 0}]).items() if name != "protocol"}
"""Report of protocol 1, which did not name it."""


async def test_a_report_is_answered_with_an_envelope() -> None:
    async with serve(controller()) as (client, _):
        status, answer = await client.post(body())
        assert status == 200
        assert DirectiveEnvelope.model_validate(answer).directive is None


@pytest.mark.parametrize(
    ("data", "status", "field", "words"),
    [
        (b"", 400, None, "not JSON"),
        (b"{", 400, None, "not JSON"),
        (b"\xff\xfe", 400, None, "not JSON"),
        (b"[" * 10_000, 400, None, "not JSON"),
        (b"null", 422, "report", "report"),
        (b"{}", 422, "protocol", "not of protocol 7"),
        (body(extra=1), 422, "extra", "Extra inputs"),
        (body(sequence=0), 422, "sequence", "greater than or equal to 1"),
        (body(sequence=2**60), 422, "sequence", "less than"),
        (body(observed_plan_version=2**31), 422, "observed_plan_version", "less than"),
        (body(sent_at="NaN"), 422, "sent_at", ""),
        (body(state="sleeping"), 422, "state", ""),
        (
            body(directions=[SLOW | {"bases": {"direct": -1}}]),
            422,
            "directions[0].bases.direct",
            "",
        ),
        (body(directions=[SLOW | {"link": 3}]), 422, "directions[0].link", "the job has 3 links"),
        (body(links=[WELL | {"replica": 1}]), 422, "links[0].replica", "the job has 1 columns"),
        (body(protocol=1), 422, "protocol", "not of protocol 7, which this ingest uses: run the"),
        (OLD, 422, "protocol", "run the trainer and the ingest of one release"),
        (body(attempt=1), 403, "attempt", "attempt 1 is not the attempt in progress, 0"),
        (body(job="other"), 403, "job", "default/other"),
        (body(namespace="other"), 403, "job", "other/gpt"),
        (b" " * (MAX_REPORT_BYTES + 1), 413, None, "larger than 65536 bytes"),
    ],
)
async def test_a_bad_report_is_one_line_that_names_the_field(
    data: Any, status: int, field: str | None, words: str
) -> None:
    async with serve(controller()) as (client, _):
        got, answer = await client.post(data)
        assert (got, answer.get("field")) == (status, field), answer
        assert words in answer["error"]
        assert "\n" not in answer["error"]
        # The refused report changed nothing and the next one is processed.
        assert (await client.post(body()))[0] == 200


async def test_a_replayed_report_is_refused_and_changes_nothing() -> None:
    job = controller()
    async with serve(job) as (client, _):
        assert (await client.post(body(5, iteration=3)))[0] == 200
        for stale in (5, 4, 1):
            status, answer = await client.post(body(stale, iteration=9))
            assert status == 409
            assert (answer["field"], answer["last"]) == ("sequence", 5)
        assert job.get_job_view(0.0).iteration == 3
        assert (await client.post(body(6, iteration=4)))[0] == 200


async def test_only_the_token_of_the_run_is_let_in(caplog: pytest.LogCaptureFixture) -> None:
    job = Scripted()
    caplog.set_level(logging.WARNING, logger="pipemorph.ingest")
    async with serve(job) as (client, _):
        for token in ("wrong", TOKEN + "x", TOKEN[:-1], " "):
            assert (await client.post(body(), token=token))[0] == 401
            assert (await client.poll("attempt=0", token=token))[0] == 401
        async with client.session.post(f"{client.url}/v1/jobs/default/gpt/reports") as answer:
            assert answer.status == 401
        assert (await client.post(body(), token=TOKEN, job="nope"))[0] == 404
        assert (await client.poll("rank=3", token="wrong"))[0] == 401
        forged = "rank=7%27)%0Arefused%1B" + 99 * "x"
        assert (await client.poll(forged, token="wrong"))[0] == 401
        assert job.sequences == []
    refusals = [r.getMessage() for r in caplog.records if "refused" in r.getMessage()]
    assert len(refusals) == 11
    assert "default/gpt" in refusals[0] and "rank" not in refusals[0]
    assert "from 127.0.0.1 (claims to be rank '3'): " in refusals[9]
    assert '(claims to be rank "7\')\\nrefused\\x1bxxxxxxxx"): ' in refusals[10]
    assert "wrong" not in refusals[0], "a token is never logged"


async def test_an_authenticator_can_tell_known_from_allowed() -> None:
    class Pods:
        async def authenticate_caller(
            self, token: str, namespace: str, job: str, source: str = ""
        ) -> Identity:
            raise AccessDeniedError(403, f"pod p does not belong to job {namespace}/{job}")

    async with serve(Scripted(), authenticator=Pods()) as (client, _):
        status, answer = await client.post(body())
        assert status == 403
        assert answer["error"] == "pod p does not belong to job default/gpt"


async def test_a_new_directive_releases_every_poll_at_once() -> None:
    job = Scripted()
    async with serve(job) as (client, server):
        polls = [asyncio.create_task(client.poll(f"attempt=0&wait={LONG}")) for _ in range(5)]
        later = asyncio.create_task(client.poll("attempt=0&after=1&wait=0.3"))
        # The short one may be over before the others have come.
        await until_async(lambda: waiting(server, job) + later.done() == 6, "all polls came")
        assert not any(poll.done() for poll in polls)
        job.on_report = lambda report: job.want(1)
        status, answer = await client.post(body())
        assert (status, answer["directive"]["plan_version"]) == (200, 1)
        for status, answer in await asyncio.wait_for(asyncio.gather(*polls), PATIENCE):
            assert (status, answer["directive"]["plan_version"]) == (200, 1)
        status, answer = await later
        assert (status, answer["protocol"], answer["directive"]) == (200, PROTOCOL, None)
        # A directive that is there is returned at once; one that the agent has is not sent.
        assert (await client.poll(f"attempt=0&wait={LONG}"))[1]["directive"]["plan_version"] == 1
        assert (await client.post(body(2, observed_plan_version=1)))[1]["directive"] is None


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "attempt"),
        ("attempt=x", "attempt"),
        ("attempt=-1", "attempt"),
        ("attempt=0&after=1.5", "after"),
        ("attempt=0&after=%D9%A3", "after"),
        ("attempt=0&after=" + "9" * 40, "after"),
        ("attempt=0&wait=nan", "wait"),
        ("attempt=0&wait=-1", "wait"),
        ("attempt=0&wait=31", "wait"),
        ("attempt=0&wait=soon", "wait"),
    ],
)
async def test_a_bad_poll_names_the_parameter(query: str, field: str) -> None:
    async with serve(Scripted()) as (client, _):
        status, answer = await client.poll(query)
        assert (status, answer["field"]) == (400, field)


async def test_polls_of_another_attempt_are_turned_away() -> None:
    job = Scripted()
    async with serve(job) as (client, server):
        assert (await client.poll("attempt=1&wait=5"))[0] == 403
        poll = asyncio.create_task(client.poll(f"attempt=0&wait={LONG}"))
        await until_async(lambda: waiting(server, job) == 1, "one poll waits")
        job.attempt = 1
        server.handler._sessions[job].release_waiters()
        assert (await asyncio.wait_for(poll, PATIENCE))[0] == 403


async def test_a_report_storm_and_too_many_polls_are_turned_down() -> None:
    job = Scripted()
    async with serve(
        job, limits=RateLimits(reports_per_second=0.001, burst=10, waiting_polls=2)
    ) as (
        client,
        server,
    ):
        statuses = [(await client.post(body(i + 1)))[0] for i in range(30)]
        assert statuses[:10] == [200] * 10
        assert 429 in statuses
        polls = [asyncio.create_task(client.poll(f"attempt=0&wait={LONG}")) for _ in range(2)]
        await until_async(lambda: waiting(server, job) == 2, "two polls wait")
        assert (await client.poll(f"attempt=0&wait={LONG}"))[0] == 429
        server.handler.close()
        await asyncio.gather(*polls)


async def test_of_many_jobs_each_reports_less_often() -> None:
    store = InMemoryJobStore()
    for number in range(21):
        store.add_job("default", f"j{number}", Scripted())
    handler = IngestHandler(store, limits=RateLimits(total_reports_per_second=8.0))
    intervals = []
    for number in range(21):
        sent = json.dumps(body(job=f"j{number}")).encode()
        answer = json.loads((await handler.handle_report("default", f"j{number}", sent)).body)
        intervals.append(answer["seldom"])
    assert intervals == [1.0] * 8 + [1.5] * 4 + [2.0] * 4 + [2.5] * 4 + [3.0]
    few = IngestHandler(store, limits=RateLimits(total_reports_per_second=0.1))
    sent = json.dumps(body()).encode()
    assert json.loads((await few.handle_report("default", "gpt", sent)).body)["error"]
    sent = json.dumps(body(job="j0")).encode()
    assert json.loads((await few.handle_report("default", "j0", sent)).body)["seldom"] == 5.0


async def test_stopping_answers_waiting_polls() -> None:
    job = Scripted()
    async with serve(job) as (client, server):
        poll = asyncio.create_task(client.poll(f"attempt=0&wait={LONG}"))
        await until_async(lambda: waiting(server, job) == 1, "one poll waits")
        await asyncio.wait_for(server.stop(), PATIENCE)
        assert (await poll)[0] == 200


async def test_a_client_that_dawdles_is_cut_off() -> None:
    async def read(reader: asyncio.StreamReader) -> bytes:
        try:
            return await asyncio.wait_for(reader.read(), PATIENCE)
        except ConnectionError:
            return b""

    # Time enough for those who do not dawdle, and who share this process's processor.
    async with serve(Scripted(), timeouts=ClientTimeouts(head=2.0, body=1.0, shutdown=0.5)) as (
        client,
        server,
    ):
        port = int(server.url.rsplit(":", 1)[1])
        silent = await asyncio.open_connection("127.0.0.1", port)
        half_head = await asyncio.open_connection("127.0.0.1", port)
        half_head[1].write(b"POST /v1/jobs/default/gpt/reports HTTP/1.1\r\nHost: x\r\n")
        half_body = await asyncio.open_connection("127.0.0.1", port)
        half_body[1].write(
            b"POST /v1/jobs/default/gpt/reports HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
            b"Authorization: Bearer correct horse\r\n\r\n{"
        )
        # Others are served meanwhile.
        assert (await client.post(body()))[0] == 200
        assert await read(silent[0]) == b""
        assert await read(half_head[0]) == b""
        assert b" 408 " in (await read(half_body[0])).splitlines()[0]
        for _, writer in (silent, half_head, half_body):
            writer.close()


@pytest.mark.parametrize(
    ("headers", "rest"),
    [
        (b"Content-Length: 100\r\n", b"{"),
        (b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\nzz\r\n"),
        (b"Transfer-Encoding: chunked\r\n", b"ffffffffffffffffff\r\n"),
        (b"Content-Length: 9\r\nContent-Encoding: gzip\r\n", b"not gzip!"),
        (b"Content-Length: nine\r\n", b""),
        (b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", b"{}"),
        (b"Expect: the unexpected\r\nContent-Length: 2\r\n", b"{}"),
    ],
)
async def test_bodies_broken_off_or_badly_framed_are_no_fault_of_ours(
    headers: bytes, rest: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(Scripted()) as (client, server):
        port = int(server.url.rsplit(":", 1)[1])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            b"POST /v1/jobs/default/gpt/reports HTTP/1.1\r\nHost: x\r\n"
            b"Authorization: Bearer correct horse\r\n" + headers + b"\r\n" + rest
        )
        await writer.drain()
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), PATIENCE)
        assert b" 500 " not in answer
        writer.close()
        assert (await client.post(body()))[0] == 200
    assert "Traceback" not in caplog.text


async def test_a_huge_body_is_refused_without_being_read() -> None:
    async with serve(Scripted()) as (client, _):

        async def endless() -> Any:
            for _ in range(1000):
                yield b" " * 8192

        try:
            async with client.session.post(
                f"{client.url}/v1/jobs/default/gpt/reports",
                data=endless(),
                headers={"Authorization": f"Bearer {TOKEN}"},
            ) as answer:
                assert answer.status == 413
        except aiohttp.ClientError:
            pass  # Cut off while still sending: as good.
        assert (await client.post(body()))[0] == 200


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["forward", "direct", "training", 1e300, 2**53, -1]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
PROFILE = {"stage": 0, "forward": 0.1, "backward_input": 0.1, "backward_weight": 0.1}
TROUBLE = {"stage": 0, "replica": 0, "device": "d", "port": 1, "state": "DOWN", "what": "is DOWN"}
ITERATION = {"index": 0, "seconds": 1.0, "loss": None, "plan_version": 0, "bubble_fraction": 0.1}
LARGE = st.sampled_from([0, 1, 2**53 - 1, 1e7, 0.0, 1e-300, 5e-324])


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_no_body_is_an_error_of_ours(data: st.DataObject) -> None:
    """Whatever is sent, signed in or not: an answer below 500 and no exception."""
    whole = body(
        directions=[dict(SLOW) for _ in range(2)],
        links=[dict(WELL) for _ in range(2)],
        rails={"health": "faulty", "faulty": [dict(TROUBLE)]},
        transports={"links": ["tcp"] * 3},
        stragglers={"known": True, "paces": [0.1] * 4},
        stages=[PROFILE | {"stage": i} for i in range(4)],
        iterations=[dict(ITERATION)],
    )
    job = controller()
    store = InMemoryJobStore()
    store.add_job("default", "gpt", job)
    handler = IngestHandler(store)
    for sequence in range(1, data.draw(st.integers(2, 12))):
        report = json.loads(json.dumps(whole | {"sequence": sequence}))
        for _ in range(data.draw(st.integers(0, 3))):
            at: Any = report
            while isinstance(at, dict | list) and at:
                keys = list(at) if isinstance(at, dict) else list(range(len(at)))
                key = data.draw(st.sampled_from(keys))
                if not isinstance(at[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
                    at[key] = data.draw(LARGE | JUNK)
                    break
                at = at[key]
        raw = json.dumps(report).encode("utf-8", "replace")
        if data.draw(st.integers(0, 9)) == 0:
            raw = raw[: data.draw(st.integers(0, len(raw)))] + data.draw(st.binary(max_size=8))
        reply = asyncio.run(handler.handle_report("default", "gpt", raw))
        assert reply.status in (200, 400, 403, 409, 413, 422, 429)
        answer = json.loads(reply.body)
        if reply.status != 200:
            assert "\n" not in answer["error"]
    json.dumps(job.take_snapshot())
    job.get_job_view(0.0)


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_are_an_error_of_ours(raw: bytes) -> None:
    store = InMemoryJobStore()
    store.add_job("default", "gpt", controller())
    reply = asyncio.run(IngestHandler(store).handle_report("default", "gpt", raw))
    assert reply.status in (400, 422)
