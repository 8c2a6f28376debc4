"""Agent's end of the live page: a Unix socket of the pod, at which the page's process reads what
the agent reports. While no such process is connected, nothing is sent or collected.

The socket is in a folder that only the pod's user can enter, which the launcher makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from pipemorph.wire import HandIn, IterationSample, LinkHealthReport, OpsTrace
from pipemorph.wire.page import OpsWanted, PageFeed, PageHello
from pipemorph_trainer.agent import frames

log = logging.getLogger("pipemorph.agent")

SOCKET_VARIABLE = "PIPEMORPH_PAGE_SOCKET"
"""Path of the socket, set by the launcher."""
MOST_ITERATIONS = 512
"""Newest iterations that a page begins with."""
CLOSE_SECONDS = 1.0
MOST_UNSENT_BYTES = 8 << 20
"""A page that does not read is disconnected; it connects again."""


class PageServer:
    """Serves one page at a time, the newest. ``on_connected`` is called when one has connected, and
    makes the agent send the plan in force and the whole state."""

    def __init__(
        self,
        path: Path,
        job_file: str,
        attempt: int,
        *,
        on_wanted: Callable[[OpsWanted], None],
        on_connected: Callable[[], None],
    ) -> None:
        self._path, self._job_file, self._attempt = path, job_file, attempt
        self._on_wanted, self._on_connected = on_wanted, on_connected
        self._iterations: deque[IterationSample] = deque(maxlen=MOST_ITERATIONS)
        self._page: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    @staticmethod
    def from_env(
        environ: Mapping[str, str],
        attempt: int,
        *,
        on_wanted: Callable[[OpsWanted], None],
        on_connected: Callable[[], None],
    ) -> PageServer | None:
        """None where no launcher serves a page."""
        path, job_file = environ.get(SOCKET_VARIABLE), environ.get("PIPEMORPH_JOB_FILE")
        if not path or not job_file:
            return None
        return PageServer(
            Path(path), job_file, attempt, on_wanted=on_wanted, on_connected=on_connected
        )

    async def start(self) -> None:
        """Listen, in the place of an agent before this one."""
        try:
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._accept, self._path)
        except OSError as error:
            log.warning("no live page: %s: %s", self._path, error.strerror)

    async def close(self) -> None:
        """Send the rest, and end."""
        if self._server is not None:
            self._server.close()
        if self._page is not None:
            self._page.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=CLOSE_SECONDS)

    def report(self, report: LinkHealthReport) -> None:
        """Send a report."""
        if self._page is not None:
            self._send(PageFeed(report=report))
        self._iterations.extend(report.iterations)

    def plan(self, message: HandIn) -> None:
        """Send the plan in force."""
        self._send(PageFeed(plan=message))

    def ops(self, stages: list[OpsTrace]) -> None:
        """Send the ops of all stages of a column in one iteration."""
        self._send(PageFeed(ops=stages))

    def _send(self, message: PageFeed) -> None:
        page = self._page
        if page is None:
            return
        if page.transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            log.warning("the live page does not read what it is sent; it is disconnected")
            page.transport.abort()
            self._page = None
            return
        page.write(frames.encode(message))

    def _accept(self, reader: asyncio.StreamReader, page: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, page))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, page: asyncio.StreamWriter) -> None:
        if self._page is not None:
            self._page.transport.abort()
        self._page = page
        try:
            hello = PageHello(
                attempt=self._attempt, job_file=self._job_file, iterations=list(self._iterations)
            )
            self._send(PageFeed(hello=hello))
            self._on_connected()
            while True:
                body = await frames.read(reader, frames.MAX_HELLO_BYTES)
                self._on_wanted(frames.decode(OpsWanted, body))
        except (OSError, asyncio.IncompleteReadError, frames.FrameError):
            pass  # It has ended, or is no page.
        finally:
            if self._page is page:
                self._page = None
            page.close()
            with contextlib.suppress(OSError):
                await page.wait_closed()
