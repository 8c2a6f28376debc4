"""Feed of the live page: a Unix socket of the pod, from which the page's process reads what the
agent reports. Without a connected process, nothing is sent or collected.

The launcher makes the folder of the socket, which only the pod's user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from pipemorph.protocol import IterationSample, LinkHealthReport, OpsTrace, SnapshotMessage
from pipemorph.protocol.page_messages import OpsWanted, PageFeed, PageHello
from pipemorph_trainer.agent import frames

log = logging.getLogger("pipemorph.agent")

SOCKET_VARIABLE = "PIPEMORPH_PAGE_SOCKET"
"""Path of the socket, set by the launcher."""
MOST_ITERATIONS = 512
"""Newest iterations that are sent to a new page."""
CLOSE_SECONDS = 1.0
MOST_UNSENT_BYTES = 8 << 20
"""Limit of unread data, at which the page is disconnected. It connects again."""


class PageFeedServer:
    """Server of one page at a time, the newest. ``on_connected`` is called for each new page, and
    makes the agent send the current plan and the whole state."""

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
    ) -> PageFeedServer | None:
        """Make the server from ``environ``; None if no launcher serves a page."""
        path, job_file = environ.get(SOCKET_VARIABLE), environ.get("PIPEMORPH_JOB_FILE")
        if not path or not job_file:
            return None
        return PageFeedServer(
            Path(path), job_file, attempt, on_wanted=on_wanted, on_connected=on_connected
        )

    async def start(self) -> None:
        """Listen, and replace the socket of a previous agent."""
        try:
            self._path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._accept_page, self._path)
        except OSError as error:
            log.warning("no live page: %s: %s", self._path, error.strerror)

    async def close(self) -> None:
        """Send the unsent data, and close."""
        if self._server is not None:
            self._server.close()
        if self._page is not None:
            self._page.close()
        if self._serving:
            await asyncio.wait(self._serving, timeout=CLOSE_SECONDS)

    def send_report(self, report: LinkHealthReport) -> None:
        """Send a report."""
        if self._page is not None:
            self._send_message(PageFeed(report=report))
        self._iterations.extend(report.iterations)

    def send_plan(self, message: SnapshotMessage) -> None:
        """Send the current plan."""
        self._send_message(PageFeed(plan=message))

    def send_ops(self, stages: list[OpsTrace]) -> None:
        """Send the ops of all stages of a column in one iteration."""
        self._send_message(PageFeed(ops=stages))

    def _send_message(self, message: PageFeed) -> None:
        page = self._page
        if page is None:
            return
        if page.transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            log.warning("the live page does not read its feed; it is disconnected")
            page.transport.abort()
            self._page = None
            return
        page.write(frames.encode_frame(message))

    def _accept_page(self, reader: asyncio.StreamReader, page: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve_page(reader, page))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve_page(self, reader: asyncio.StreamReader, page: asyncio.StreamWriter) -> None:
        if self._page is not None:
            self._page.transport.abort()
        self._page = page
        try:
            hello = PageHello(
                attempt=self._attempt, job_file=self._job_file, iterations=list(self._iterations)
            )
            self._send_message(PageFeed(hello=hello))
            self._on_connected()
            while True:
                body = await frames.read_frame(reader, frames.MAX_HELLO_BYTES)
                self._on_wanted(frames.decode_message(OpsWanted, body))
        except (OSError, asyncio.IncompleteReadError, frames.FrameError):
            pass  # The page has ended, or the client is no page.
        finally:
            if self._page is page:
                self._page = None
            page.close()
            with contextlib.suppress(OSError):
                await page.wait_closed()
