"""Who plans for a host: processes of their own, so that nobody else waits for a plan.

A decision takes up to a thousand times what a report takes, and in Python a thread that
computes holds up the event loop as the loop itself would.
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
from pipemorph.control.first_plan import check_schedule, planning_rules, schedule_for_others
from pipemorph.errors import InputError
from pipemorph.ingest.planner_worker import HEADER_BYTES, Asked, Found, answer, frame
from pipemorph.planning import Schedule

log = logging.getLogger("pipemorph.ingest")

Planner = Callable[[Replan], Awaitable[Proposal]]
"""Makes a proposal. Raises :class:`PlannerLost` if it should be asked again."""

PROCESSES = 2
"""One large job must not hold up all others."""
LIMIT_SECONDS = 60.0
"""A plan that takes longer than this is one for a network that has changed since."""


class PlannerLost(Exception):
    """There is no answer: the process that was at it ended, or took too long."""


async def plan_here(asked: Replan) -> Proposal:
    """A :data:`Planner` for a host of one job, which has nobody to hold up."""
    return _proposal(answer(propose, asked))


def _proposal(found: Proposal | Exception) -> Proposal:
    return found if isinstance(found, Proposal) else Proposal(None, None, (NoPlan(str(found)),))


class ProcessPlanner:
    """A :data:`Planner` over up to ``processes`` worker processes, started when first needed
    or by :meth:`warm_up`.

    Requests wait their turn, first come, first served. Close it when done; a worker whose
    host dies without closing ends by itself.
    """

    def __init__(self, processes: int = PROCESSES, *, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._limit = limit_seconds
        self._processes = processes
        self._turns = asyncio.Semaphore(processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self._busy: set[asyncio.subprocess.Process] = set()

    @property
    def running(self) -> list[asyncio.subprocess.Process]:
        """The processes there are now."""
        return [*self._busy, *self._idle]

    async def __call__(self, asked: Replan) -> Proposal:
        try:
            return _proposal(await self._answer(propose, asked))
        except TimeoutError:
            return _proposal(TimeoutError(f"it took longer than {self._limit:g} s"))

    async def first_plan(self, spec: JobSpec, *, wanted: bool = True) -> Schedule | None:
        """The schedule that a job begins with; None if it is not ``wanted`` but only whether there
        is one. Raises :class:`~pipemorph.errors.InputError` if the spec allows none, and
        :class:`PlannerLost` if it should be asked again."""
        rules = planning_rules(spec)
        make: Callable[[JobSpec], Schedule | None] = schedule_for_others
        try:
            found = await self._answer(make if wanted else check_schedule, rules)
        except TimeoutError:
            raise PlannerLost(f"no plan was found within {self._limit:g} s") from None
        if isinstance(found, InputError):
            raise found
        return found

    async def _answer(self, function: Callable[[Asked], Found], asked: Asked) -> Found | InputError:
        """Raises TimeoutError, :class:`PlannerLost`."""
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
                raise PlannerLost(f"the planner ended ({process.returncode})") from None
            except BaseException:
                # Half a question is in the pipe: of no more use.
                await self._end(process)
                raise
            self._busy.discard(process)
            self._idle.append(process)
            return found

    async def warm_up(self) -> None:
        """Start the processes before they are needed: that takes a second, and the first decision
        is one that somebody waits for."""
        missing = self._processes - len(self.running)
        self._idle += await asyncio.gather(*(self._start() for _ in range(missing)))

    async def close(self) -> None:
        """End the processes. What waits for them is lost."""
        for process in self.running:
            await self._end(process)
        self._idle.clear()

    @staticmethod
    async def _start() -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pipemorph.ingest.planner_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        self._busy.discard(process)
        if process.returncode is None:
            # Not process.kill(): it takes the status of one that has ended from whoever waits.
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
