"""Makes the decisions of all jobs of a host in worker processes, so that reports are answered
meanwhile.

Namespaces take turns, and the decisions of one are made in the order in which they were requested.
There is one worker more than a namespace may use.
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

from pipemorph.control.decide.layouts import layout_changes, layout_search
from pipemorph.control.decide.plan_choice import DecisionRequest, NoPlanFound, PlanProposal, decide
from pipemorph.control.first_plan import (
    check_schedule,
    make_schedule_for_others,
    select_planning_fields,
)
from pipemorph.control.planner_worker import Argument, Result, call_for_host, prepare_worker
from pipemorph.errors import InputError
from pipemorph.planning import Schedule
from pipemorph.spec.job_spec import JobSpec

log = logging.getLogger("pipemorph.ingest")

Key = tuple[str, str]
"""Namespace and name of a job."""
Planner = Callable[[Key, DecisionRequest], Awaitable[PlanProposal]]
"""Makes a proposal for a job. Raises :class:`PlannerLostError` if the caller should retry."""
Search = Callable[
    [Key, layout_changes.LayoutSearchRequest], Awaitable["layout_search.LayoutProposal | None"]
]
"""Searches for another layout of a job. Raises :class:`PlannerLostError` if the caller should
retry, and :class:`~pipemorph.errors.InputError` if it failed."""

LIMIT_SECONDS = 60.0
"""Time limit of a decision: after it the network has probably changed. The spec limits its size."""

SPAWN = multiprocessing.get_context("spawn")


class PlannerLostError(Exception):
    """A worker process died twice, or a first plan exceeded its time limit."""


async def plan_in_process(key: Key, request: DecisionRequest) -> PlanProposal:
    """Plan in this process, for a host of one job: a :data:`Planner`."""
    try:
        return call_for_host(decide, request)
    except InputError as error:
        return make_empty_proposal(str(error))


async def search_in_process(
    key: Key, request: layout_changes.LayoutSearchRequest
) -> layout_search.LayoutProposal | None:
    """Search in this process: a :data:`Search`."""
    return call_for_host(layout_changes.search_layout, request)


def make_empty_proposal(why: str) -> PlanProposal:
    """Proposal to keep the plan in effect."""
    return PlanProposal(None, None, (NoPlanFound(why),))


class PlannerProcess:
    """Worker process that is started when needed. Close it when done."""

    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None
        self.pid: int | None = None

    async def run(
        self, function: Callable[[Argument], Result], argument: Argument, limit: float
    ) -> Result:
        """Run a function; returns its result. If the process dies, it is restarted once.

        Raises TimeoutError after ``limit`` seconds, :class:`PlannerLostError`, and InputError.
        """
        async with asyncio.timeout(limit):
            for _ in range(2):
                try:
                    if self._executor is None:
                        # A single worker: an executor of several cannot end one.
                        self._executor = ProcessPoolExecutor(1, SPAWN, prepare_worker)
                        self.pid = await self._submit_call(os.getpid)
                    return await self._submit_call(call_for_host, function, argument)
                except InputError:
                    raise
                except BrokenProcessPool:
                    log.warning("planner process %s died", self.pid)
                    self.pid = None  # Another process may have the number by now.
                    await self.close()
                except BaseException:
                    await self.close()  # Its caller waits no longer.
                    raise
        raise PlannerLostError("the planner process died twice")

    async def close(self) -> None:
        """Kill the process. A call in progress fails."""
        executor, pid = self._executor, self.pid
        self._executor = self.pid = None
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if executor is not None:
            await asyncio.to_thread(executor.shutdown, cancel_futures=True)

    async def _submit_call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        assert self._executor is not None
        return await asyncio.wrap_future(self._executor.submit(function, *arguments))


@dataclass(eq=False)
class _PlannerRequest:
    """Decision that waits for a worker."""

    namespace: str
    function: Callable[[Any], Any]
    argument: Any
    result: asyncio.Future[Any]
    requested_at: float


class PlannerPool:
    """Pool of ``processes`` workers for each namespace, and one more for the others: a
    :data:`Planner`.

    ``on_decided`` receives the seconds that a decision waited for a worker, and the seconds that it
    took. Use it in one event loop, and close it when done.
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
        self._queues: dict[str, deque[_PlannerRequest]] = {}
        """Decisions that wait, by namespace; the namespace of the next turn comes first."""
        self._running: Counter[str] = Counter()
        """Decisions in progress, by namespace."""
        self._workers = [PlannerProcess() for _ in range(processes + 1)]
        self._idle = [*self._workers]
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting_count(self) -> int:
        """Decisions that wait for a process."""
        return sum(not each.result.done() for each in chain(*self._queues.values()))

    @property
    def worker_pids(self) -> list[int]:
        """The current worker processes."""
        return [each.pid for each in self._workers if each.pid is not None]

    async def __call__(self, key: Key, request: DecisionRequest) -> PlanProposal:
        """Make a decision. Cancelling the call drops it unless a process works on it."""
        try:
            return await self._enqueue_request(key, decide, request)
        except InputError as error:
            return make_empty_proposal(str(error))

    async def search_layout(
        self, key: Key, request: layout_changes.LayoutSearchRequest
    ) -> layout_search.LayoutProposal | None:
        """Search for another layout: a :data:`Search`."""
        return await self._enqueue_request(key, layout_changes.search_layout, request)

    async def start_workers(self) -> None:
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

    async def _enqueue_request(
        self, key: Key, function: Callable[[Argument], Result], argument: Argument
    ) -> Result:
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        request = _PlannerRequest(key[0], function, argument, future, time.monotonic())
        self._queues.setdefault(key[0], deque()).append(request)
        self._start_idle_workers()
        return await future

    def _start_idle_workers(self) -> None:
        """Start as many decisions as workers are idle."""
        while self._idle and (request := self._take_next_request()) is not None:
            task = asyncio.create_task(self._serve_request(request, self._idle.pop()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _take_next_request(self) -> _PlannerRequest | None:
        """Next decision, by turns of the namespaces; None if none may start."""
        for namespace in [*self._queues]:
            if self._running[namespace] >= self._most_each:
                continue
            queue = self._queues.pop(namespace)
            while queue:
                request = queue.popleft()
                if not request.result.done():  # Its caller still waits.
                    if queue:
                        self._queues[namespace] = queue  # Behind the other namespaces.
                    self._running[namespace] += 1
                    return request
        return None

    async def _serve_request(self, request: _PlannerRequest, worker: PlannerProcess) -> None:
        began = time.monotonic()
        result = request.result
        try:
            found = await worker.run(request.function, request.argument, self._limit)
            if not result.done():
                result.set_result(found)
        except TimeoutError:
            if not result.done():
                result.set_exception(InputError(f"planning took longer than {self._limit:g} s"))
        except (InputError, PlannerLostError, OSError) as error:
            if not result.done():
                result.set_exception(error)
        finally:
            result.cancel()  # No effect once it is done.
            self._idle.append(worker)
            self._running[request.namespace] -= 1
            self._on_decided(began - request.requested_at, time.monotonic() - began)
        self._running += Counter()  # Drop namespaces without one.
        self._start_idle_workers()


class FirstPlanner:
    """Makes the first plans of jobs in a separate process, one after the other, so that they do not
    delay decisions for running jobs. Close it when done."""

    def __init__(self, *, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._turn = asyncio.Lock()
        self._process = PlannerProcess()

    async def __call__(self, spec: JobSpec, *, wanted: bool = True) -> Schedule | None:
        """A job's initial schedule; None if not ``wanted``, to check only that one exists. Raises
        :class:`~pipemorph.errors.InputError` without one, :class:`PlannerLostError` if the caller
        should retry."""
        make: Callable[[JobSpec], Schedule | None] = (
            make_schedule_for_others if wanted else check_schedule
        )
        try:
            async with self._turn:
                return await self._process.run(make, select_planning_fields(spec), self._limit)
        except TimeoutError:
            raise PlannerLostError(f"no plan was found within {self._limit:g} s") from None

    async def close(self) -> None:
        """Kill the process. Requests in progress fail."""
        await self._process.close()
