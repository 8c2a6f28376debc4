"""Finds the replica of the ingest that serves the job.

Requests go to the Service's address, which leads to any replica. One that does not serve the job
answers 421, with the address of the one that does, its owner. From then on requests go there, until
one of them fails.

What is followed is in :mod:`pipemorph.wire.owner`. Without TLS no owner is: the agent tries the
Service again, which leads to the owner now and then.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from pipemorph.wire.owner import owner_in

log = logging.getLogger("pipemorph.agent")

_UNABLE = frozenset({HTTPStatus.UNAUTHORIZED, HTTPStatus.NOT_FOUND})
"""With these an owner answers that has lost the API server, or the job."""
CONNECT_SECONDS = 5.0
"""Limit of connecting, also where an answer may take longer. That of a node which is lost is never
answered."""


class Replicas:
    """``base_url``: the Service's. One for all of the agent's requests, in one event loop."""

    def __init__(self, base_url: str) -> None:
        self._service = base_url.rstrip("/")
        parts = urlsplit(base_url)
        self._name = parts.hostname if parts.scheme == "https" else None
        self._owner: str | None = None
        """``host:port`` of the replica that serves the job, if it is not left to the Service."""

    @contextlib.asynccontextmanager
    async def request(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str],
        seconds: float,
        **more: Any,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer to a request, of the owner if a replica names one; the owner is asked once.
        ``seconds``: limit for an answer. Raises what aiohttp raises."""
        for last in (False, True):
            owner = self._owner
            where: dict[str, Any] = {"url": f"{self._service}{path}"}
            if owner is not None:
                # By its address, but it must prove that it has the Service's name.
                where = {"url": f"https://{owner}{path}", "server_hostname": self._name}
            limit = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS)
            try:
                async with session.request(
                    method, headers=headers, timeout=limit, allow_redirects=False, **where, **more
                ) as answer:
                    if answer.status != HTTPStatus.MISDIRECTED_REQUEST:
                        if answer.status in _UNABLE or answer.status >= 500:
                            self._left(owner)
                        yield answer
                        return
                    named = owner_in(await answer.read()) if self._name else None
                    if last or named is None or named == owner:
                        self._left(owner)
                        yield answer
                        return
            except (aiohttp.ClientError, TimeoutError, OSError):
                self._left(owner)
                raise
            if self._owner == owner:
                log.info("the replica of the ingest at %s serves this job", named)
                self._owner = named

    def _left(self, owner: str | None) -> None:
        """This owner does not serve the job any more: back to the Service, unless another request
        has found another owner."""
        if owner is not None and self._owner == owner:
            log.info("the replica of the ingest at %s does not serve this job any more", owner)
            self._owner = None
