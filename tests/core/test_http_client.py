"""The HTTP client: whom it proves itself to, what it takes, and when it tries again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from played_ingest import PlayedIngest, certificate
from tenacity import Retrying

from pipemorph.errors import InputError
from pipemorph.http_client import (
    HttpClient,
    HttpResponse,
    NoResponseError,
    TokenUnreadableError,
    make_retry_options,
    validate_url,
)


def answers(
    handler: Callable[[web.Request], Any], asks: Callable[[HttpClient], HttpResponse], **fields: Any
) -> HttpResponse:
    """Returns the result of ``asks``, in a thread, on a server with this handler."""

    @asynccontextmanager
    async def running() -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def work() -> HttpResponse:
        async with running() as url:
            return await asyncio.to_thread(asks, HttpClient(url, **fields))

    return asyncio.run(asyncio.wait_for(work(), 60.0))


async def test_the_token_goes_to_no_server_without_the_certificate_of_the_authority(
    tmp_path: Path,
) -> None:
    made = certificate(tmp_path, "localhost")
    (tmp_path / "stranger").mkdir()
    ingest = PlayedIngest(made)
    strangers = PlayedIngest(certificate(tmp_path / "stranger", "localhost")), PlayedIngest(None)
    (tmp_path / "token").write_text("secret\n")

    def client(port: int) -> HttpClient:
        return HttpClient(f"https://localhost:{port}", tmp_path / "token", str(made[0]))

    async with ingest.running(), strangers[0].running(), strangers[1].running():
        for each, untrusted in zip(strangers, (True, False), strict=True):
            with pytest.raises(NoResponseError) as caught:
                await asyncio.to_thread(client(each.port).request_blocking, "/x", seconds=5.0)
            assert caught.value.untrusted == untrusted and "\n" not in str(caught.value)
            assert each.tokens == []
        assert (
            await asyncio.to_thread(client(ingest.port).request_blocking, seconds=5.0)
        ).status == 200
        async with client(ingest.port) as connection:
            assert (await connection.request("/x", body=b"{}", seconds=5.0)).status == 200
        assert ingest.tokens == ["Bearer secret"] * 2


def test_redirects_and_proxies_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    (tmp_path / "token").write_text("secret")
    came = []

    async def handler(request: web.Request) -> web.Response:
        came.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"}, text="moved")

    answer = answers(
        handler,
        lambda client: client.request_blocking("/here", seconds=5.0),
        token_file=tmp_path / "token",
    )
    assert (answer.status, answer.reason, came) == (307, "moved", ["/here"])


@pytest.mark.parametrize("compressed", [False, True])
def test_an_answer_has_a_limit(compressed: bool) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Encoding": "gzip"} if compressed else {})
        await answer.prepare(request)
        for _ in range(1 << 10):
            await answer.write(bytes(1 << 16))
        return answer

    with pytest.raises(NoResponseError, match="more than 4096 bytes"):
        answers(handler, lambda client: client.request_blocking(seconds=30.0, most_bytes=4096))


def test_a_server_that_dawdles_is_given_up() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x")
            await asyncio.sleep(0.01)

    began = time.monotonic()
    with pytest.raises(NoResponseError, match=r"no answer within 0\.3 s"):
        answers(handler, lambda client: client.request_blocking(seconds=0.3))
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("text", [None, "", "two\nlines", "ütf", b"\xff\xfe"])
def test_an_invalid_token_is_named_by_its_file_alone(
    tmp_path: Path, text: str | bytes | None
) -> None:
    file = tmp_path / "token"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(TokenUnreadableError) as caught:
        HttpClient("http://127.0.0.1:1", file).request_blocking(seconds=1.0)
    said = str(caught.value)
    assert said.startswith(f"{file}: ") and "lines" not in said and "ü" not in said


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    client = HttpClient("https://127.0.0.1:1", authority=str(tmp_path / "ca"))
    with pytest.raises(NoResponseError, match="ca: cannot be read: No such file") as caught:
        client.request_blocking(seconds=1.0)
    assert caught.value.untrusted


@pytest.mark.parametrize(
    ("status", "header", "pause"),
    [
        (503, "1", 1.0),
        (503, "3600", 5.0),
        (503, "", None),
        (503, "-1", None),
        (503, "Fri, 31 Dec 1999 23:59:59 GMT", None),
        (429, "1", None),
        (500, "1", None),
    ],
)
def test_only_a_standby_sends_a_time_to_retry(
    status: int, header: str, pause: float | None
) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.json_response(
            {"error": "stands\nby"}, status=status, headers={"Retry-After": header}
        )

    answer = answers(handler, lambda client: client.request_blocking(seconds=5.0))
    assert answer.retry_after == pause == answer.to_error().pause
    assert str(answer.to_error()) == f"the ingest answered {status}: stands by"


def test_tries_end_with_their_time_or_when_they_are_stopped() -> None:
    paused: list[float] = []
    errors: list[str] = []

    def fail() -> None:
        raise NoResponseError(f"try {len(paused)}", pause=9.0 if len(paused) == 2 else None)

    policy = make_retry_options(
        sleep=paused.append, stopped=lambda: len(paused) == 8,
        before=lambda error, pause: errors.append(str(error)),
    )  # fmt: skip
    with pytest.raises(NoResponseError, match="try 8"):
        Retrying(**policy)(fail)
    assert errors == [f"try {i}" for i in range(8)]
    wanted = [0.1, 0.2, 9.0, 0.8, 1.0, 1.0, 1.0, 1.0]
    assert all(0.75 <= a / b <= 1.25 for a, b in zip(paused, wanted, strict=True)), paused
    with pytest.raises(NoResponseError, match="try 8"):
        Retrying(**make_retry_options(seconds=0.0, sleep=paused.append))(fail)
    assert len(paused) == 8


@pytest.mark.parametrize(
    "text", ["", "nowhere:7", "ftp://h", "http://", "http://h:0", "http://h:x"]
)
def test_an_invalid_server_is_refused_by_the_name_of_its_variable(text: str) -> None:
    with pytest.raises(InputError, match=r"^URL is .*; expected http\(s\)://HOST:PORT$"):
        validate_url(text, "URL")
    assert validate_url("https://h:1/a/", "URL") == "https://h:1/a"
