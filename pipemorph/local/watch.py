"""Serves the live page of a job: on loopback, by a token in the URL, read only.

Nothing is done for it while nobody looks, see :mod:`pipemorph.watch.documents`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from aiohttp import web

from pipemorph.api.spec import PipeMorphJob
from pipemorph.control.decide.forecast import Outlook
from pipemorph.errors import one_line
from pipemorph.local.clock import now
from pipemorph.local.results.history import Journal
from pipemorph.local.results.traces import TraceIndex
from pipemorph.watch import door
from pipemorph.watch.build import MOST_STEPS, Traced, Watched, watch_view, worst_column
from pipemorph.watch.document import Recovered, WatchView
from pipemorph.watch.documents import LOOKING, Documents, Source, number

log = logging.getLogger("pipemorph.watch")

TRACE_BYTES = 64 << 20
"""How much of the ranks' traces is looked through when somebody begins to watch."""
LAST_WORD = 2.0
"""How long a run waits at its end for who looks to have been told."""


class Told(NamedTuple):
    """How the ranks are: ``state`` as of the document, ``reason`` of a failure."""

    state: str
    reason: str
    recoveries: Sequence[Recovered]


class Traces(Protocol):
    """Ops of iterations."""

    def available(self, column: int) -> list[int]:
        """The iterations of a column whose ops are there, ascending."""
        ...

    def read(self, column: int, iteration: int) -> Sequence[Traced]:
        """The ops of an iteration, at least those of a column; empty if they are gone."""
        ...


class FolderTraces:
    """Ops from the files that the ranks of a run write."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._index = folder, TraceIndex(newest=TRACE_BYTES)

    def available(self, column: int) -> list[int]:
        self._index.update(self._folder)
        return self._index.iterations()

    def read(self, column: int, iteration: int) -> Sequence[Traced]:
        try:
            found = self._index.read([iteration])[iteration]
        except (OSError, ValueError, KeyError, TypeError):
            return []  # A rank has just shortened its file.
        return found if all(trace.iteration == iteration for trace in found) else []


@dataclass
class Observer:
    """What there is to see of a job. ``outlook``: see :meth:`JobController.outlook`, it raises
    TimeoutError if the control loop does not answer; ``tell``: how the ranks are; ``gpus``: of all
    ranks together, 0 if it is not known that they have any; ``no_ops``: why there are no ops of any
    iteration, empty if that is not known; ``result``: where the job's result is to be found."""

    job: PipeMorphJob
    journal: Journal
    outlook: Callable[[], Outlook | None]
    traces: Traces
    tell: Callable[[], Told]
    gpus: int = 0
    no_ops: str = ""
    result: str = "report.json of its folder"
    column: int | None = None
    """The column of the newest document."""

    def look(self) -> Watched:
        """What is known now, without the ops."""
        told, view = self.tell(), self.journal.view
        decisions = (each for each in reversed(view.decisions) if each.kind != "outcome")
        newest = next(decisions, None)
        return Watched(
            job=self.job,
            now=now(),
            state=told.state,
            reason=told.reason,
            samples=self.journal.iterations(MOST_STEPS),
            changes=self.journal.changes(),
            lanes=self.journal.lanes(),
            worth=view.worth,
            plan_version=view.applied_plan_version,
            wanted_version=view.wanted_plan_version,
            peak_memory=view.peak_memory,
            recoveries=told.recoveries,
            kept=newest.reason if newest is not None and newest.kind == "keep" else "",
            outlook=self.outlook(),
            gpus=self.gpus,
            no_ops=self.no_ops,
            result=self.result,
        )

    def document(
        self, column: int | None, iteration: int | None, *, number: int, live: bool
    ) -> WatchView:
        """The document of an iteration, by default the newest, in a column, by default that with
        the slowest link."""
        known = self.look()
        if column is None or not 0 <= column < self.job.spec.parallelism.mesh.columns:
            column = worst_column(known)
        self.column = column
        available = self.traces.available(column)
        if iteration not in available:
            iteration = available[-1] if available else None
        traces = [] if iteration is None else self.traces.read(column, iteration)
        return watch_view(
            replace(known, available=available), traces, column=column, number=number, live=live
        )


class WatchServer:
    """A context manager that serves the page from ``listener``, see :func:`door.listen`; without
    one, connections are handed to :meth:`take`. ``token``: by default a new one."""

    def __init__(
        self,
        observer: Source,
        listener: socket.socket | None = None,
        token: str | None = None,
    ) -> None:
        self.documents = Documents(observer)
        self._door = door.Door(self._tell, listener, token)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="watch", daemon=True)
        # One at a time: documents are made for all who look.
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="watch-documents")
        self.asked_at = float("-inf")
        """When somebody has asked last, monotonic."""
        self._failed: set[type[Exception]] = set()
        """Errors that have been logged: once, as the page asks every second."""
        self._last_word = threading.Event()
        self._ended = asyncio.Event()
        self._waiting_for_end = 0
        """How many ask for nothing but the last word."""

    @property
    def url(self) -> str:
        return self._door.url

    def __enter__(self) -> WatchServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._door.open(), self._loop).result()
        return self

    def __exit__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)  # Who waits is not waited for.
        asyncio.run_coroutine_threadsafe(self._door.close(), self._loop).result()
        self._maker.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def take(self, connection: socket.socket, head: bytes) -> None:
        """Serve a connection that somebody else has accepted. ``head``: what was read from it."""
        asyncio.run_coroutine_threadsafe(self._door.take(connection, head), self._loop)

    def finish(self) -> None:
        """The run is over: who looks, or waits for that, is told so, and that nothing follows."""
        looked = time.monotonic() - self.asked_at < LOOKING
        self.documents.finish()
        self._loop.call_soon_threadsafe(self._ended.set)
        if looked or self._waiting_for_end:
            self._last_word.wait(LAST_WORD)

    async def _tell(self, request: web.BaseRequest, page: bool) -> web.Response:
        self.asked_at = time.monotonic()
        query = request.query
        if query.get("until") == "end":
            self._waiting_for_end += 1
            try:
                await self._ended.wait()
            finally:
                self._waiting_for_end -= 1
        asked = number(query.get("column")), number(query.get("iteration"))
        try:
            made = await self._loop.run_in_executor(self._maker, self.documents.get, asked, page)
        except Exception as error:  # noqa: BLE001  # Whatever it is, the job goes on.
            if type(error) not in self._failed:
                self._failed.add(type(error))
                late = isinstance(error, TimeoutError)
                why = "the control loop does not answer" if late else f"{error!r}"
                log.warning("the page of the job cannot be made now: %s", one_line(why, 300))
            return door.failed()
        if made is None:
            return door.busy()
        if not made.live:
            self._loop.call_later(0.1, self._last_word.set)  # When this answer is on its way.
        return door.told(made.body(page=page, after=number(query.get("after"))), page=page)
