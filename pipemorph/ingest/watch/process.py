"""The process that makes pages of jobs, and checks who may see them, as its ingest sees it.

A document of a large job takes a fifth of a second of a processor, and megabytes are written and
compressed: in a thread of the ingest all reports would wait for that. The process is started when
somebody watches, and ended when nobody has for some minutes. Where it ends by itself, those who
wait are told to ask again, and the next one who asks starts another. What it is told beside
questions is dropped while it lags, but that a job need not be kept any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
import time
from collections.abc import Callable
from typing import Any

from pipemorph.ingest.watch import pipes
from pipemorph.ingest.watch.messages import Failed, Look, Sight
from pipemorph.ingest.watch.pipes import HEADER_BYTES, frame

log = logging.getLogger("pipemorph.ingest")

NICE = 10
"""Reports and plans go first."""
WORKER = "pipemorph.ingest.watch.worker"
START_SECONDS = 1.0
"""Least time from one start to the next."""
MOST_UNREAD = 8 << 20
"""Bytes that may wait for the process to read them: ops of a few large jobs."""
ANSWER_SECONDS = 60.0
"""A process that has said nothing for so long while it was asked is ended."""


class WatchProcessLost(Exception):
    """The process has ended or lags: the caller should tell its own to ask again."""


class WatchProcess:
    """For use in one event loop. Close it when done; it exits by itself if its host dies."""

    def __init__(self, module: str = WORKER) -> None:
        """``module``: what to run, see :func:`pipemorph.ingest.watch.worker.run`."""
        self._module = module
        self.on_look: Callable[[Look], Sight | None] = lambda _: None
        """Answers the questions of the process: how a job is; None if it is not watched."""
        self.life = 0
        """Number of the process that runs now: another one knows nothing of what was told."""
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._started_at = float("-inf")
        self._heard_at = self._asked_at = 0.0
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._readers: dict[asyncio.subprocess.Process, asyncio.Task[None]] = {}
        """One of each process that has not exited: the one that runs, and those that end."""
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """None while no process runs."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start it unless it runs. Raises :class:`WatchProcessLost` if that is too soon, or not
        possible."""
        if self._stopped:
            raise WatchProcessLost("the ingest stops; ask again")
        self._asked_at = time.monotonic()
        if self._process is not None:
            return
        if self._starting is None:
            if time.monotonic() - self._started_at < START_SECONDS:
                raise WatchProcessLost("the process that makes pages starts again; ask again")
            self._started_at = time.monotonic()
            self._starting = asyncio.create_task(self._start())
        # Whoever asks no more must not end it for the others.
        await asyncio.shield(self._starting)

    async def ask(self, question: object) -> Any:
        """Its answer. Raises :class:`WatchProcessLost`."""
        await self.start()
        if self._process is None:  # It has ended since.
            raise WatchProcessLost("the process that makes pages ended; ask again")
        if self._lags():
            raise WatchProcessLost("the process that makes pages is too busy; ask again")
        number = next(self._numbers)
        answer = self._open[number] = asyncio.get_running_loop().create_future()
        asked_at = time.monotonic()
        try:
            self._write((number, question))
            while True:
                with contextlib.suppress(TimeoutError):
                    found = await asyncio.wait_for(asyncio.shield(answer), ANSWER_SECONDS)
                    if isinstance(found, Failed):
                        raise WatchProcessLost("no page could be made; see the log of the ingest")
                    return found
                if time.monotonic() - max(asked_at, self._heard_at) >= ANSWER_SECONDS:
                    log.error("the process that makes pages does not answer; ending it")
                    await self.end()
        finally:
            self._open.pop(number, None)
            if answer.done() and not answer.cancelled():
                answer.exception()
            answer.cancel()

    def tell(self, message: object, *, always: bool = False) -> bool:
        """Whether it was told that: not while it does not run, nor while it lags, unless
        ``always``."""
        if self._process is None or (self._lags() and not always):
            return False
        self._write((0, message))
        return True

    def end_idle(self, seconds: float) -> None:
        """End it if nobody has asked for so long."""
        process = self._process
        if process is not None and time.monotonic() - self._asked_at >= seconds:
            self._process = None
            self._lose()
            assert process.stdin is not None
            process.stdin.close()  # It ends with its input.

    async def end(self) -> None:
        """Kill it, if it runs. Those who wait for it are told that it is lost."""
        process, self._process = self._process, None
        if process is not None:
            self._lose()
            await pipes.end(process)

    def stop(self) -> None:
        """Start no other, and tell those who wait that it is lost."""
        self._stopped = True
        self._lose()

    async def close(self) -> None:
        """Kill it, and start no other."""
        self.stop()
        if self._starting is not None:
            await asyncio.wait([self._starting])
        await self.end()
        for process, reader in list(self._readers.items()):
            await pipes.end(process)
            await asyncio.wait([reader])

    async def _start(self) -> None:
        try:
            process = await pipes.start(self._module, NICE)
        except OSError as error:
            log.error("the process that makes pages cannot be started: %s", error)
            raise WatchProcessLost("pages cannot be made now; ask again") from None
        finally:
            self._starting = None
        self._process = process
        self.life += 1
        self._readers[process] = asyncio.create_task(self._read(process))

    def _lags(self) -> bool:
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin.transport.get_write_buffer_size() > MOST_UNREAD

    def _write(self, message: tuple[int, object]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(frame(message))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        try:
            while True:
                length = int.from_bytes(await process.stdout.readexactly(HEADER_BYTES), "big")
                number, message = pickle.loads(await process.stdout.readexactly(length))
                self._heard_at = time.monotonic()
                if number < 0:
                    # To the one that asks: another may run already.
                    process.stdin.write(frame((number, self.on_look(message))))
                elif (answer := self._open.get(number)) is not None and not answer.done():
                    answer.set_result(message)
        except (asyncio.IncompleteReadError, OSError):
            pass
        except Exception:
            log.exception("what the process that makes pages says is not understood; ending it")
        unasked = self._process is process  # Else it was ended here.
        if unasked:
            self._process = None
            self._lose()
        await pipes.end(process)
        del self._readers[process]
        if unasked:
            log.error(
                "the process that makes pages ended (%s); it starts again when somebody watches",
                process.returncode,
            )

    def _lose(self) -> None:
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(
                    WatchProcessLost("the process that makes pages ended; ask again")
                )
