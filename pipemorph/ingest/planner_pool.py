"""Runs the planner in worker processes, so that plans do not block the event loop.

A decision takes up to a thousand times as long as a report, and a Python thread that computes
blocks the event loop just as the loop's own code would.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import sys
from collections.abc import Awaitable, Callable

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.findings import NoPlan
from pipemorph.control.decide.replan import Proposal, Replan, propose
from pipemorph.control.first_plan import (
    FirstSchedule,
    check_schedule,
    planning_rules,
    schedule_for_others,
)
from pipemorph.control.planner_worker import HEADER_BYTES, Asked, Found, answer, frame
from pipemorph.errors import InputError

log = logging.getLogger("pipemorph.ingest")

Planner = Callable[[Replan], Awaitable[Proposal]]
"""Makes a proposal. Raises :class:`PlannerLost` if the caller should retry."""

PROCESSES = 2
"""More than one, so that one large job does not delay all others."""
LIMIT_SECONDS = 60.0
"""Time limit of a plan: after this the network has probably changed."""


class PlannerLost(Exception):
    """The worker process died or exceeded its time limit."""


async def plan_here(asked: Replan) -> Proposal:
    """A :data:`Planner` that plans in this process, for a host of one job."""
    return _proposal(answer(propose, asked))


def _proposal(found: Proposal | Exception) -> Proposal:
    return found if isinstance(found, Proposal) else Proposal(None, None, (NoPlan(str(found)),))


class ProcessPlanner:
    """A :data:`Planner` with up to ``processes`` worker processes, started when first needed or by
    :meth:`warm_up`.

    Requests are served in order. Close it when done; workers exit by themselves if their host dies.
    """

    def __init__(self, processes: int = PROCESSES, *, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._limit = limit_seconds
        self._processes = processes
        self._turns = asyncio.Semaphore(processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self._busy: set[asyncio.subprocess.Process] = set()

    @property
    def running(self) -> list[asyncio.subprocess.Process]:
        """The current worker processes."""
        return [*self._busy, *self._idle]

    async def __call__(self, asked: Replan) -> Proposal:
        try:
            return _proposal(await self._answer(propose, asked))
        except TimeoutError:
            return _proposal(TimeoutError(f"it took longer than {self._limit:g} s"))

    async def first_plan(self, spec: JobSpec, *, wanted: bool = True) -> FirstSchedule | None:
        """A job's initial schedule; None if not ``wanted``, to check only that one exists. Raises
        :class:`~pipemorph.errors.InputError` if the spec allows none, and :class:`PlannerLost` if
        the caller should retry."""
        rules = planning_rules(spec)
        make: Callable[[JobSpec], FirstSchedule | None] = schedule_for_others
        try:
            found = await self._answer(make if wanted else check_schedule, rules)
        except TimeoutError:
            raise PlannerLost(f"no plan was found within {self._limit:g} s") from None
        if isinstance(found, InputError):
            raise found
        return found

    async def _answer(self, function: Callable[[Asked], Found], asked: Asked) -> Found | InputError:
        """Let a worker answer. Raises TimeoutError, :class:`PlannerLost`."""
        async with self._turns:
            process = self._idle.pop() if self._idle else await self._start()
            self._busy.add(process)
            try:
                async with asyncio.timeout(self._limit):
                    found = await _ask(process, function, asked)
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

    async def warm_up(self) -> None:
        """Start the processes now, which takes a second, so that the first decision is not
        delayed."""
        missing = self._processes - len(self.running)
        self._idle += await asyncio.gather(*(self._start() for _ in range(missing)))

    async def close(self) -> None:
        """Kill the processes. Requests in progress fail."""
        for process in self.running:
            await self._end(process)
        self._idle.clear()

    @staticmethod
    async def _start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pipemorph.control.planner_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._busy.discard(process)
        if process.returncode is None:
            # Not process.kill(): it polls, and could reap the exit status that asyncio waits for.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()


async def _ask(
    process: asyncio.subprocess.Process, function: Callable[[Asked], Found], asked: Asked
) -> Found | InputError:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(frame((function, asked)))
    await process.stdin.drain()
    length = int.from_bytes(await process.stdout.readexactly(HEADER_BYTES), "big")
    found: Found | InputError = pickle.loads(await process.stdout.readexactly(length))
    return found
