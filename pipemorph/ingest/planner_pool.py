"""Makes the decisions of all jobs of a host in worker processes, so that reports are answered
meanwhile.

Namespaces take turns, and the decisions of one are made in the order in which they were requested.
One worker more than a namespace may use is there for the others.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.layouts import moves, relayout
from pipemorph.control.decide.replan import NoPlan, Proposal, Replan, propose
from pipemorph.control.first_plan import (
    check_schedule,
    planning_rules,
    schedule_for_others,
)
from pipemorph.control.planner_worker import Argument, Result, begin, call
from pipemorph.errors import InputError
from pipemorph.planning import Schedule

log = logging.getLogger("pipemorph.ingest")

Key = tuple[str, str]
"""Namespace and name of a job."""
Planner = Callable[[Key, Replan], Awaitable[Proposal]]
"""Makes a proposal for a job. Raises :class:`PlannerLost` if the caller should retry."""
Search = Callable[[Key, moves.Question], Awaitable["relayout.Proposal | None"]]
"""Searches for another layout of a job. Raises :class:`PlannerLost` if the caller should retry, and
:class:`~pipemorph.errors.InputError` if it failed."""

LIMIT_SECONDS = 60.0
"""Time limit of a decision: after this the network has probably changed. The spec limits its
size."""

SPAWN = multiprocessing.get_context("spawn")


class PlannerLost(Exception):
    """A worker process died twice, or a first plan exceeded its time limit."""


async def plan_here(key: Key, request: Replan) -> Proposal:
    """A :data:`Planner` that plans in this process, for a host of one job."""
    try:
        return call(propose, request)
    except InputError as error:
        return no_plan(str(error))


async def search_here(key: Key, request: moves.Question) -> relayout.Proposal | None:
    """A :data:`Search` in this process."""
    return call(moves.search, request)


def no_plan(why: str) -> Proposal:
    """A proposal to keep the plan in effect."""
    return Proposal(None, None, (NoPlan(why),))


class PlannerProcess:
    """A worker process that is started when needed. Close it when done."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None
        self.pid: int | None = None

    async def run(
        self, function: Callable[[Argument], Result], argument: Argument, limit: float
    ) -> Result:
        """The function's result. If the process dies, another one is started, once.

        Raises TimeoutError after ``limit`` seconds, :class:`PlannerLost`, and InputError.
        """
        async with asyncio.timeout(limit):
            for _ in range(2):
                try:
                    if self._executor is None:
                        # One worker each: an executor of several cannot end one of them.
                        self._executor = ProcessPoolExecutor(1, SPAWN, begin)
                        self.pid = await self._submit(os.getpid)
                    return await self._submit(call, function, argument)
                except InputError:
                    raise
                except BrokenProcessPool:
                    log.warning("planner process %s died", self.pid)
                    self.pid = None  # Another process may have the number by now.
                    await self.close()
                except BaseException:
                    await self.close()  # It would go on with what nobody waits for.
                    raise
        raise PlannerLost("the planner process died twice")

    async def close(self) -> None:
        """Kill the process. A call in progress fails."""
        executor, pid = self._executor, self.pid
        self._executor = self.pid = None
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if executor is not None:
            await asyncio.to_thread(executor.shutdown, cancel_futures=True)

    async def _submit(self, function: Callable[..., Result], *arguments: Any) -> Result:
        assert self._executor is not None
        return await asyncio.wrap_future(self._executor.submit(function, *arguments))


@dataclass(eq=False)
class _Request:
    """A decision that waits for a worker."""

    namespace: str
    function: Callable[[Any], Any]
    argument: Any
    result: asyncio.Future[Any]
    requested_at: float


class PlannerPool:
    """A :data:`Planner` with ``processes`` workers for each namespace, and one more for the others.

    ``on_decided`` receives the seconds that a decision waited for a worker, and those that it took.
    Use it in one event loop, and close it when done.
    """

    def __init__(
        self,
        processes: int,
        *,
        limit_seconds: float = LIMIT_SECONDS,
        on_decided: Callable[[float, float], None] = lambda waited, took: None,
    ) -> None:
        self._most_each = processes
        self._limit = limit_seconds
        self._on_decided = on_decided
        self._queues: dict[str, deque[_Request]] = {}
        """Decisions that wait, by namespace: the one whose turn is next comes first."""
        self._running: Counter[str] = Counter()
        """Decisions that are being made, by namespace."""
        self._workers = [PlannerProcess() for _ in range(processes + 1)]
        self._idle = [*self._workers]
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Decisions that wait for a process."""
        return sum(not each.result.done() for each in chain(*self._queues.values()))

    @property
    def pids(self) -> list[int]:
        """The current worker processes."""
        return [each.pid for each in self._workers if each.pid is not None]

    async def __call__(self, key: Key, request: Replan) -> Proposal:
        """If the caller is cancelled, the decision is dropped unless a process works on it."""
        try:
            return await self._request(key, propose, request)
        except InputError as error:
            return no_plan(str(error))

    async def search(self, key: Key, request: moves.Question) -> relayout.Proposal | None:
        """A :data:`Search`."""
        return await self._request(key, moves.search, request)

    async def warm_up(self) -> None:
        """Start the processes now, so that the first decisions are not delayed."""
        starts = (each.run(bool, None, self._limit) for each in self._workers)
        await asyncio.gather(*starts)

    async def close(self) -> None:
        """Kill the processes. Decisions that wait or are being made are cancelled."""
        self._idle.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for request in chain(*self._queues.values()):
            request.result.cancel()
        await asyncio.gather(*(each.close() for each in self._workers))

    async def _request(
        self, key: Key, function: Callable[[Argument], Result], argument: Argument
    ) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        request = _Request(key[0], function, argument, future, time.monotonic())
        self._queues.setdefault(key[0], deque()).append(request)
        self._start_next()
        return await future

    def _start_next(self) -> None:
        """Start as many decisions as workers are idle."""
        while self._idle and (request := self._take_next()) is not None:
            task = asyncio.create_task(self._make(request, self._idle.pop()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _take_next(self) -> _Request | None:
        """The decision whose turn it is; None if none may start."""
        for namespace in [*self._queues]:
            if self._running[namespace] >= self._most_each:
                continue
            queue = self._queues.pop(namespace)
            while queue:
                request = queue.popleft()
                if not request.result.done():  # Its caller waits for it.
                    if queue:
                        self._queues[namespace] = queue  # Behind the other namespaces.
                    self._running[namespace] += 1
                    return request
        return None

    async def _make(self, request: _Request, worker: PlannerProcess) -> None:
        began = time.monotonic()
        result = request.result
        try:
            found = await worker.run(request.function, request.argument, self._limit)
            if not result.done():
                result.set_result(found)
        except TimeoutError:
            if not result.done():
                result.set_exception(InputError(f"it took longer than {self._limit:g} s"))
        except (InputError, PlannerLost, OSError) as error:
            if not result.done():
                result.set_exception(error)
        finally:
            result.cancel()  # Unless one of the above has ended it.
            self._idle.append(worker)
            self._running[request.namespace] -= 1
            self._on_decided(began - request.requested_at, time.monotonic() - began)
        self._running += Counter()  # Without namespaces that have none.
        self._start_next()


class FirstPlanner:
    """Makes the first plans of jobs in a process of its own, one after the other: they must not
    delay decisions for running jobs. Close it when done."""

    def __init__(self, *, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._turn = asyncio.Lock()
        self._process = PlannerProcess()

    async def __call__(self, spec: JobSpec, *, wanted: bool = True) -> Schedule | None:
        """A job's initial schedule; None if not ``wanted``, to check only that one exists. Raises
        :class:`~pipemorph.errors.InputError` if the spec allows none, and :class:`PlannerLost` if
        the caller should retry."""
        make: Callable[[JobSpec], Schedule | None] = (
            schedule_for_others if wanted else check_schedule
        )
        try:
            async with self._turn:
                return await self._process.run(make, planning_rules(spec), self._limit)
        except TimeoutError:
            raise PlannerLost(f"no plan was found within {self._limit:g} s") from None

    async def close(self) -> None:
        """Kill the process. Requests in progress fail."""
        await self._process.close()
