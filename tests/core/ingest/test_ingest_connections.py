"""Connections that the ingest accepts and closes: a silent crowd displaces only itself."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from certificates import self_signed
from waiting import until_async

from pipemorph.control import JobController
from pipemorph.ingest import (
    BearerAuthenticator,
    ConnectionLimits,
    IngestServer,
    InMemoryJobStore,
    connections,
)
from pipemorph.ingest.app import ClientTimeouts
from pipemorph.spec.job_spec import JobSpec

TOKEN = "correct horse"
PATIENCE = 15.0
"""Seconds for what takes milliseconds: a machine may stall."""
CROWD = 2000
NO_JOB, POLL = "unknown/directive", "gpt/directive?attempt=0&wait=30"
NOT_FOUND = b"HTTP/1.1 404 Not Found"
SPEC = {
    "parallelism": {"stages": 1},
    "schedule": {"microbatches": 1},
    "trainer": {"module": "x", "iterations": 1},
}

SERVER = """
import asyncio, ssl, sys
from pipemorph.control import JobController
from pipemorph.ingest import BearerAuthenticator, IngestServer, InMemoryJobStore

async def main(certificate, key, token):
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    async with IngestServer(InMemoryJobStore(), BearerAuthenticator(token), tls=tls) as server:
        print(server.url, flush=True)
        await asyncio.to_thread(sys.stdin.read)

asyncio.run(main(*sys.argv[1:]))
"""
"""Set-up of the ingest's own process on a cluster."""


def knock(port: int) -> socket.socket:
    """A silent connection."""
    sock = socket.socket()
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        sock.connect(("127.0.0.1", port))
    return sock


def is_open(sock: socket.socket) -> bool:
    try:
        while sock.recv(1 << 16):
            pass
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False


async def ask(
    port: int,
    *,
    tls: ssl.SSLContext | None = None,
    query: str = "",
    source: str = "127.0.0.1",
    token: str = TOKEN,
) -> bytes:
    """Ask for a directive: the status line, once the ingest has closed the connection."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=tls, local_addr=(source, 0)
    )
    try:
        writer.write(
            f"GET /v1/jobs/default/{query} HTTP/1.1\r\nHost: ingest\r\n"
            f"Authorization: Bearer {token}\r\n\r\n".encode()
        )
        whole = await reader.read()
    finally:
        writer.close()
    return whole.partition(b"\r\n")[0]


@contextlib.asynccontextmanager
async def serving(
    tls: ssl.SSLContext | None = None, refusal: float = 0.0, **limits: int
) -> AsyncIterator[tuple[IngestServer, int, list[str]]]:
    """A server on loopback that has job gpt, its port, and why connections were not served."""
    unserved: list[str] = []
    store = InMemoryJobStore()
    store.add_job("default", "gpt", JobController(JobSpec.model_validate(SPEC)))
    server = IngestServer(
        store,
        BearerAuthenticator(TOKEN),
        tls=tls,
        timeouts=ClientTimeouts(head=PATIENCE, refusal=refusal),
        connections=ConnectionLimits(**limits),
        on_unserved=unserved.append,
    )
    async with server:
        yield server, int(server.url.rsplit(":", 1)[1]), unserved


def waiting(server: IngestServer) -> int:
    """Polls that wait."""
    return sum(len(session.waiters) for session in server.handler._sessions.values())


def mebibytes(process: int) -> float:
    """Memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.times
def test_a_silent_crowd_costs_little_and_delays_no_other(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(certificate), str(key), TOKEN],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert server.stdin is not None and server.stdout is not None and server.stderr is not None

    async def run(port: int) -> None:
        tls = ssl.create_default_context(cafile=str(certificate))
        assert await ask(port, tls=tls, query=NO_JOB) == NOT_FOUND
        before = mebibytes(server.pid)
        crowd: list[socket.socket] = []
        try:
            for _ in range(5):
                for _ in range(CROWD // 50):
                    crowd += [knock(port) for _ in range(10)]
                    await asyncio.sleep(0)
                began = time.monotonic()
                assert await ask(port, tls=tls, query=NO_JOB) == NOT_FOUND
                assert time.monotonic() - began < 2.0, "the crowd holds an agent up"
            grown = mebibytes(server.pid) - before
            assert grown < 40, f"{len(crowd)} silent connections take {grown:.1f} MiB"
            await until_async(
                lambda: not any(map(is_open, reversed(crowd))), "all are closed", 10.0
            )
        finally:
            for sock in crowd:
                sock.close()

    try:
        asyncio.run(run(int(server.stdout.readline().rsplit(":", 1)[1])))
        _, said = server.communicate(timeout=PATIENCE)
    finally:
        server.kill()
        server.wait(PATIENCE)
    assert server.returncode == 0, said
    assert "connections not served: 1 exceeded the connection limits" in said
    assert said.count("\n") < 5, "a line for each of them"


async def test_a_handshake_costs_nothing_until_the_client_begins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = self_signed(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    begun: list[str] = []
    establish = connections.Acceptor._establish_transport

    async def counted(self: connections.Acceptor, connection: Any, sock: socket.socket) -> None:
        begun.append(connection.source)
        await establish(self, connection, sock)

    monkeypatch.setattr(connections.Acceptor, "_establish_transport", counted)
    trust = ssl.create_default_context(cafile=str(certificate))
    async with serving(tls) as (_, port, unserved):
        silent, gone, plain = (knock(port) for _ in range(3))
        await until_async(lambda: all(map(is_open, (silent, gone, plain))), "all are connected")
        gone.close()
        await until_async(lambda: unserved == ["handshake"], "the one that has gone is closed")
        plain.send(b"GET / HTTP/1.1\r\n\r\n")
        await until_async(lambda: not is_open(plain), "the one without TLS is closed")
        assert unserved == ["handshake"] * 2
        assert await ask(port, tls=trust, query=NO_JOB, source="127.0.0.2") == NOT_FOUND
        assert begun == ["127.0.0.2"]
        assert is_open(silent)
    await until_async(lambda: not is_open(silent), "it ends with the server")
    silent.close()
    plain.close()


async def test_a_source_that_comes_again_and_again_is_let_in_at_a_limited_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection costs a handshake here. Without TLS the oldest silent one makes room."""
    certificate, key = self_signed(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    monkeypatch.setattr(connections, "RECONNECTS_PER_SECOND", 1e-6)
    trust = ssl.create_default_context(cafile=str(certificate))
    async with serving(tls, per_source=3) as (_, port, unserved):
        for _ in range(3):
            assert await ask(port, tls=trust, query=NO_JOB) == NOT_FOUND
        with pytest.raises(OSError):
            await ask(port, tls=trust, query=NO_JOB)
        assert unserved == ["crowded"]
        assert await ask(port, tls=trust, query=NO_JOB, source="127.0.0.2") == NOT_FOUND
    async with serving(per_source=3) as (_, port, unserved):
        for _ in range(5):
            assert await ask(port, query=NO_JOB) == NOT_FOUND
        assert unserved == []


async def test_a_refused_client_gets_its_answer_a_moment_later() -> None:
    async with serving(refusal=0.5) as (_, port, _):
        began = time.monotonic()
        assert await ask(port, query=NO_JOB) == NOT_FOUND
        known = time.monotonic() - began
        answers = [ask(port, query=POLL, token="forged") for _ in range(20)]
        assert set(await asyncio.gather(*answers)) == {b"HTTP/1.1 401 Unauthorized"}
        assert 0.5 <= time.monotonic() - began - known < PATIENCE
        assert known < 0.5


async def test_the_oldest_silent_connection_makes_room() -> None:
    async with serving(unauthenticated=3) as (_, port, unserved):
        crowd = []
        for _ in range(5):
            crowd.append(knock(port))
            await until_async(
                lambda: sum(map(is_open, crowd)) == min(3, len(crowd)), "three are open at most"
            )
        assert [is_open(sock) for sock in crowd] == [False, False, True, True, True]
        assert unserved == ["crowded"] * 2
        assert await ask(port, query=NO_JOB) == NOT_FOUND
        for sock in crowd:
            sock.close()


@pytest.mark.parametrize("limits", [{"total": 2}, {"per_source": 2}])
async def test_a_served_client_is_never_displaced(limits: dict[str, int]) -> None:
    async with serving(**limits) as (server, port, unserved):
        polls = [asyncio.create_task(ask(port, query=POLL)) for _ in range(2)]
        crowd: list[socket.socket] = []
        try:
            await until_async(lambda: waiting(server) == 2, "two polls wait")
            crowd = [knock(port) for _ in range(3)]
            await until_async(lambda: not any(map(is_open, crowd)), "all others are closed")
            assert unserved == ["crowded"] * 3
            if "per_source" in limits:
                assert await ask(port, query=NO_JOB, source="127.0.0.2") == NOT_FOUND
            assert not any(poll.done() for poll in polls)
        finally:
            for sock in crowd:
                sock.close()
            for poll in polls:
                poll.cancel()


ANSWERED = {
    "no such method": "PUT /v1/jobs/a/b/reports HTTP/1.1",
    "no such path": "GET /v1/nothing HTTP/1.1",
    "no token": "POST /v1/jobs/default/gpt/reports HTTP/1.1",
    "a forged token": "GET /v1/jobs/default/gpt/directive HTTP/1.1\r\nAuthorization: Bearer x",
    "another scheme": "GET /v1/jobs/default/gpt/directive HTTP/1.1\r\nAuthorization: Basic x",
    "OPTIONS": "OPTIONS * HTTP/1.1",
    "HEAD": "HEAD /v1/jobs/default/gpt/directive HTTP/1.1",
    "CONNECT": "CONNECT a:1 HTTP/1.1",
    "Expect": "POST /v1/jobs/default/gpt/reports HTTP/1.1\r\nExpect: 100-continue",
    "an upgrade": "GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket",
}
"""Requests of a client that has no token, each with an answer."""


@pytest.mark.parametrize("head", ANSWERED.values(), ids=[*ANSWERED])
async def test_no_answer_without_a_token_keeps_a_connection(head: str) -> None:
    async with serving() as (server, port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = f"{head}\r\nHost: ingest\r\nContent-Length: 0\r\n\r\n"
        writer.write(2 * request.encode())
        answers = await asyncio.wait_for(reader.read(), PATIENCE)
        assert len(re.findall(rb"^HTTP/1.1 4\d\d ", answers, re.MULTILINE)) == 1
        writer.close()
        open_ = server._acceptor._open
        await until_async(lambda: not open_, "the connection is closed")


@pytest.mark.parametrize(
    "head",
    [
        "GET / HTTP/1.1\r\nAuthorization: Bearer SECRET\x00",
        "GET / HTTP/1.1\r\nAuthorization: Bearer SECRET\x7f\x01'\"",
        "GET / HTTP/1.1\r\nAuthorization Bearer SECRET",
        "GET / HTTP/1.1\r\nAuthoriz ation: Bearer SECRET",
        "GET / HTTP/1.1\r\nAuthorization: Bearer\r\n SECRET\x00",
        "GET /SECRET\x01 HTTP/1.1",
        "GET / HTTP/1.1\r\nSECRET",
        "GET / SECRET/1.1",
        f"GET / HTTP/1.1\r\nAuthorization: Bearer {'SECRET' * 5000}",
        "POST / HTTP/1.1\r\nTransfer-Encoding: SECRET\r\nContent-Length: 'SECRET'",
    ],
)
async def test_content_of_a_malformed_request_is_in_no_log(
    head: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as (_, port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{head}\r\nHost: ingest\r\n\r\n".encode("latin-1"))
        assert b" 400 Bad Request" in await asyncio.wait_for(reader.read(), PATIENCE)
        writer.close()
    assert "SECRET" not in caplog.text and "Traceback" not in caplog.text
    (line,) = [each.getMessage() for each in caplog.records if "bad HTTP" in each.getMessage()]
    assert len(line) > len("bad HTTP: ")


@pytest.mark.parametrize("head", [None, *ANSWERED.values()], ids=["silent", *ANSWERED])
async def test_a_crowd_without_tokens_displaces_itself_alone(head: str | None) -> None:
    """Whatever it sends. Refusals take as long as the test, so all of the crowd is open."""
    limits = {"total": 40, "per_source": 30, "unauthenticated": 20}
    async with serving(refusal=PATIENCE, **limits) as (server, port, _):
        poll = asyncio.create_task(ask(port, query=POLL))
        crowd: list[socket.socket] = []
        try:
            await until_async(lambda: waiting(server) == 1, "the poll waits")
            for _ in range(100):
                crowd.append(knock(port))
                if head is not None:
                    await asyncio.get_running_loop().sock_sendall(
                        crowd[-1], f"{head}\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode()
                    )
            answer = asyncio.wait_for(ask(port, query=NO_JOB), PATIENCE / 2)
            assert await answer == NOT_FOUND
            open_ = server._acceptor._open
            await until_async(
                lambda: len(open_) <= 21, "twenty of them and the poll are open", PATIENCE / 3
            )
            assert not poll.done()
        finally:
            for sock in crowd:
                sock.close()
            poll.cancel()


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (1 << 20, ConnectionLimits()),
        (3 * 4096, ConnectionLimits()),
        (3 * 4096 - 1, ConnectionLimits(4095, 2048, 512)),
        (1024, ConnectionLimits(341, 341, 85)),
        (100, ConnectionLimits(33, 33, 8)),
        (3, ConnectionLimits(4, 4, 1)),
    ],
)
def test_limits_fit_into_the_files_that_may_be_open(files: int, expected: ConnectionLimits) -> None:
    assert ConnectionLimits().fit_to_files(files) == expected
    small = ConnectionLimits(4, 4, 1)
    assert small.fit_to_files(files) == small


def test_a_process_raises_its_limit_of_files_as_far_as_it_may() -> None:
    code = (
        "import resource as r; from pipemorph.ingest import raise_open_files_limit as limit;"
        "r.setrlimit(r.RLIMIT_NOFILE, (200, 900));"
        "print(limit(), limit(100), limit(500), limit(5000), r.getrlimit(r.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "200 200 500 900 (900, 900)\n"


async def test_an_address_in_use_is_reported_and_nothing_stays_behind() -> None:
    async with serving() as (_, port, _unserved):
        other = IngestServer(InMemoryJobStore(), BearerAuthenticator(TOKEN), port=port)
        with pytest.raises(OSError, match="in use"):
            await other.start()
    # The port is free again, and so are silent connections.
    again = IngestServer(InMemoryJobStore(), BearerAuthenticator(TOKEN), port=port)
    async with again:
        silent = knock(port)
        await until_async(lambda: is_open(silent), "it is connected")
    await until_async(lambda: not is_open(silent), "it ends with the server")
    silent.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
async def test_a_failed_accept_ends_nothing(
    number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "EXHAUSTED_SECONDS", 0.0)
    accept, failures = socket.socket.accept, [OSError(number, "as planned")] * 3

    def failing(sock: socket.socket) -> object:
        if failures:
            raise failures.pop()
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", failing)
    async with serving() as (_, port, _unserved):
        answer = await asyncio.wait_for(ask(port, query=NO_JOB), PATIENCE)
        assert answer == NOT_FOUND
    assert not failures
    assert ("cannot accept connections" in caplog.text) is (number == errno.EMFILE)


def test_a_limit_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="unauthenticated is 0; expected at least 1 connection"):
        ConnectionLimits(unauthenticated=0)


def test_sources_that_have_not_come_lately_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory must not grow with every address. A source that has used its share is remembered."""
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(connections, "time", clock)
    monkeypatch.setattr(connections, "SOURCES", 3)
    limits = ConnectionLimits(per_source=100)
    acceptor = connections.Acceptor(asyncio.Protocol, limits=limits, head_seconds=1.0)
    now = 0.0
    assert all(acceptor._take_source_token("busy") for _ in range(100))
    assert acceptor._take_source_token("a") and acceptor._take_source_token("b")
    now = 1.0
    assert acceptor._take_source_token("c")
    assert set(acceptor._coming) == {"busy", "c"}
