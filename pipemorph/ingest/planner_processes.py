"""Runs the planner in worker processes, so that plans do not block the event loop.

A decision takes up to a thousand times as long as a report, and a Python thread that computes
blocks the event loop just as the loop's own code would.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from pipemorph.api.spec import JobSpec
from pipemorph.control.first_plan import (
    FirstSchedule,
    check_schedule,
    planning_rules,
    schedule_for_others,
)
from pipemorph.control.planner_worker import HEADER_BYTES, frame
from pipemorph.errors import InputError
from pipemorph.ingest import worker_process

NICE = 5
"""Of worker processes that make long plans: the event loop, which answers reports, goes first."""

Asked = TypeVar("Asked")
Found = TypeVar("Found")


class PlannerLost(Exception):
    """The worker process died or exceeded its time limit."""


class Answer(NamedTuple, Generic[Found]):
    """A worker's answer, pickled, and the processor time it took, seconds."""

    pickled: bytes
    seconds: float

    def read(self) -> Found | InputError:
        found: Found | InputError = pickle.loads(self.pickled)
        return found


class PlannerProcesses:
    """Worker processes, started when needed. The caller limits how many are used at a time.

    Close it when done; workers exit by themselves if their host dies. ``nice``: added to the
    niceness of this process.
    """

    def __init__(self, nice: int = NICE) -> None:
        self._nice = nice
        self._idle: list[asyncio.subprocess.Process] = []
        self._busy: set[asyncio.subprocess.Process] = set()

    @property
    def running(self) -> list[asyncio.subprocess.Process]:
        """The current worker processes."""
        return [*self._busy, *self._idle]

    async def answer(
        self, function: Callable[[Asked], Found], asked: Asked, limit: float
    ) -> Answer[Found]:
        """Let a worker answer within ``limit`` seconds. Raises TimeoutError, :class:`PlannerLost`,
        and OSError if no worker can be started."""
        process = self._idle.pop() if self._idle else await self._start()
        self._busy.add(process)
        try:
            async with asyncio.timeout(limit):
                found: Answer[Found] = await _ask(process, function, asked)
        except TimeoutError:
            await self._end(process)
            raise
        except (OSError, asyncio.IncompleteReadError):
            await self._end(process)
            raise PlannerLost(f"the planner exited ({process.returncode})") from None
        except BaseException:
            # The pipe may contain half a request, so the worker is unusable.
            await self._end(process)
            raise
        self._busy.discard(process)
        self._idle.append(process)
        return found

    async def warm_up(self, processes: int) -> None:
        """Start so many processes now, which takes half a second, so that the first decision is
        not delayed."""

        async def start() -> asyncio.subprocess.Process:
            process = await self._start()
            await _ask(process, bool, None)  # It answers once it has imported everything.
            return process

        missing = processes - len(self.running)
        self._idle += await asyncio.gather(*(start() for _ in range(missing)))

    async def close(self) -> None:
        """Kill the processes. Requests in progress fail."""
        for process in self.running:
            await self._end(process)
        self._idle.clear()

    async def _start(self) -> asyncio.subprocess.Process:
        return await worker_process.start("pipemorph.control.planner_worker", self._nice)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._busy.discard(process)
        await worker_process.end(process)


async def _ask(
    process: asyncio.subprocess.Process, function: Callable[[Any], Any], asked: object
) -> Answer[Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame((function, asked)))
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(HEADER_BYTES), "big")
    pickled, seconds = pickle.loads(await process.stdout.readexactly(length))
    return Answer(pickled, seconds)


class FirstPlanner:
    """Makes the first plans of jobs in a process of its own, one after the other: they must not
    delay decisions for running jobs. Close it when done."""

    def __init__(self, *, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._turn = asyncio.Lock()
        self._processes = PlannerProcesses()

    async def __call__(self, spec: JobSpec, *, wanted: bool = True) -> FirstSchedule | None:
        """A job's initial schedule; None if not ``wanted``, to check only that one exists. Raises
        :class:`~pipemorph.errors.InputError` if the spec allows none, and :class:`PlannerLost` if
        the caller should retry."""
        rules = planning_rules(spec)
        make: Callable[[JobSpec], FirstSchedule | None] = schedule_for_others
        try:
            async with self._turn:
                answer = await self._processes.answer(
                    make if wanted else check_schedule, rules, self._limit
                )
        except TimeoutError:
            raise PlannerLost(f"no plan was found within {self._limit:g} s") from None
        found = answer.read()
        if isinstance(found, InputError):
            raise found
        return found

    async def close(self) -> None:
        """Kill the process. Requests in progress fail."""
        await self._processes.close()
