"""HTTP client of ranks, launchers, agents, trackers and commands.

A request has a time limit, and its answer a size limit. The token is sent only to the named server,
whose certificate the job's authority has signed: redirects are not followed, and proxies are not
used.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from tenacity import (
    RetryCallState,
    retry_if_exception_type,
    stop_after_delay,
    stop_never,
    wait_exponential,
)

from pipemorph.errors import InputError, PipeMorphError, one_line

CONNECT_SECONDS = 5.0
"""Time limit of connecting, also if answers may be slower: a lost node refuses no connection."""
MOST_BYTES = 1 << 20
"""Largest answer, unless the caller has another limit."""
FIRST_PAUSE = 0.1
"""Seconds between the first two tries."""
LONGEST_RETRY_AFTER_SECONDS = 5.0
"""Limit of the pause that a standby of the ingest requests."""


class NoResponseError(PipeMorphError):
    """No usable answer, as one line; a retry may get one. ``pause``: seconds that a standby
    requests before it; ``untrusted``: a retry does not help, as the certificate is not trusted."""

    def __init__(self, why: str, *, pause: float | None = None, untrusted: bool = False) -> None:
        super().__init__(one_line(why))
        self.pause, self.untrusted = pause, untrusted


class TokenUnreadableError(NoResponseError):
    """The token of a request cannot be read now."""


@dataclass(frozen=True)
class HttpResponse:
    """Answer of a server. ``retry_after``: seconds before a retry, if a standby answered."""

    status: int
    body: bytes
    retry_after: float | None = None

    @property
    def reason(self) -> str:
        """Message of a refusal, as one line."""
        try:
            return one_line(str(json.loads(self.body)["error"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            return one_line(self.body.decode(errors="replace")) or "without a reason"

    def to_error(self, server: str = "the ingest") -> NoResponseError:
        """Error of an answer that may change with a retry."""
        return NoResponseError(
            f"{server} answered {self.status}: {self.reason}", pause=self.retry_after
        )


def validate_url(text: str, variable: str, schemes: tuple[str, ...] = ("http", "https")) -> str:
    """``text`` without a slash at its end. Raises :class:`InputError` that names the environment
    variable if it is no URL of a server."""
    try:
        parts = urlsplit(text.rstrip("/"))
        usable = parts.scheme in schemes and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        kind = "http(s)" if len(schemes) > 1 else schemes[0]
        raise InputError(f"{variable} is {one_line(text)!r}; expected {kind}://HOST:PORT")
    return text.rstrip("/")


@dataclass
class HttpClient:
    """Client of one server. ``authority``: PEM file of the authority of its certificate; None:
    the system's. ``async with`` it for the requests of an event loop, over one connection."""

    base: str
    token_file: Path | None = None
    """File that is read for every request, as projected tokens are renewed in place."""
    authority: str | None = None
    resolver: Callable[[], AbstractResolver] | None = None
    """Maker of the resolver of names for ``async with``; None: that of aiohttp, with threads."""
    _session: aiohttp.ClientSession | None = field(default=None, repr=False)

    async def __aenter__(self) -> Self:
        self._session = self._open_session(self.resolver() if self.resolver else None)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()
        self._session = None

    def request_blocking(self, path: str = "", **options: Any) -> HttpResponse:
        """:meth:`request` for a thread without an event loop."""

        async def send_request() -> HttpResponse:
            # Resolve names in this thread: at its end the process would wait for another thread.
            async with self._open_session(BlockingResolver()) as session:
                return await self._send_request(session, path, **options)

        try:
            return asyncio.run(send_request())
        except RuntimeError:
            if threading.main_thread().is_alive():
                raise
            raise NoResponseError("this process ends") from None

    async def request(self, path: str = "", **options: Any) -> HttpResponse:
        """Send a request over the connection of this context, see :meth:`_send_request`."""
        assert self._session is not None
        return await self._send_request(self._session, path, **options)

    async def _send_request(
        self,
        session: aiohttp.ClientSession,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        seconds: float,
        most_bytes: int = MOST_BYTES,
    ) -> HttpResponse:
        """The answer, of any status, to one request: POST with a ``body`` of JSON, else GET.

        Raises :class:`NoResponseError` if there is none within ``seconds``, or a larger one.
        """
        try:
            headers = self._build_headers(body is not None)
            async with session.request(
                "GET" if body is None else "POST", self.base + path, params=query, data=body,
                headers=headers, allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS),
            ) as answer:  # fmt: skip
                content = bytearray()
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > most_bytes:
                        raise NoResponseError(f"the answer has more than {most_bytes} bytes")
                return HttpResponse(answer.status, bytes(content), _parse_retry_after(answer))
        except aiohttp.ClientConnectorCertificateError as error:
            why = getattr(error.certificate_error, "verify_message", "") or str(error)
            raise NoResponseError(
                f"its certificate is not trusted ({why})", untrusted=True
            ) from None
        except TimeoutError:
            raise NoResponseError(f"no answer within {seconds:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise NoResponseError(str(error) or type(error).__name__) from None

    def _build_headers(self, with_body: bool) -> dict[str, str]:
        # Compressed answers are not requested: a small one may be large when it is unpacked.
        headers = {"Accept-Encoding": "identity"}
        if with_body:
            headers["Content-Type"] = "application/json"
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not text"
                raise TokenUnreadableError(f"{self.token_file}: cannot be read: {why}") from None
            if not (token and token.isascii() and token.isprintable()):
                raise TokenUnreadableError(f"{self.token_file}: holds no token")
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _open_session(self, resolver: AbstractResolver | None = None) -> aiohttp.ClientSession:
        trust: ssl.SSLContext | bool = True
        if self.base.startswith("https:"):
            try:
                trust = ssl.create_default_context(cafile=self.authority)
            except OSError as error:
                why = f"{self.authority}: cannot be read: {error.strerror or error}"
                raise NoResponseError(why, untrusted=True) from None
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trust, resolver=resolver),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )


class BlockingResolver(AbstractResolver):
    """Resolver that blocks the event loop of a thread that does nothing else."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=kind, proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, protocol, _, address in found
        ]  # fmt: skip

    async def close(self) -> None:
        """Do nothing: the resolver holds no resources."""


def _parse_retry_after(answer: aiohttp.ClientResponse) -> float | None:
    """Seconds of a standby; None for any other answer."""
    text = answer.headers.get("Retry-After", "")
    if answer.status != HTTPStatus.SERVICE_UNAVAILABLE or not re.fullmatch("[0-9]{1,9}", text):
        return None
    return min(float(text), LONGEST_RETRY_AFTER_SECONDS)


def make_retry_options(
    *,
    seconds: float | None = None,
    longest_pause: float = 1.0,
    stopped: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], Any] = time.sleep,
    on: type[PipeMorphError] | tuple[type[PipeMorphError], ...] = NoResponseError,
    before: Callable[[BaseException, float], None] = lambda error, pause: None,
) -> dict[str, Any]:
    """Arguments of tenacity's ``Retrying``: a retry after each error ``on``, for ``seconds`` at
    most, until ``stopped()``. Pauses grow to ``longest_pause``, or are as long as a standby
    requests. The last error is raised; ``before`` gets each earlier one and the pause after it."""
    growing = wait_exponential(multiplier=FIRST_PAUSE, max=longest_pause)

    def choose_pause(state: RetryCallState) -> float:
        requested = getattr(_get_last_error(state), "pause", None)
        seconds = growing(state) if requested is None else requested
        return float(seconds * random.uniform(0.75, 1.25))  # Spreads the ranks' retries.

    over = stop_never if seconds is None else stop_after_delay(seconds)
    return {
        "retry": retry_if_exception_type(on),
        "stop": lambda state: stopped() or over(state),
        "wait": choose_pause,
        "sleep": sleep,
        "before_sleep": lambda state: before(_get_last_error(state), state.upcoming_sleep),
        "reraise": True,
    }


def _get_last_error(state: RetryCallState) -> BaseException:
    error = state.outcome.exception() if state.outcome is not None else None
    assert error is not None
    return error
