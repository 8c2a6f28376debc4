"""Makes the decisions of all jobs of a host: in turn, in as many processes as it has processors.

- Whose decision is next says :class:`~pipemorph.ingest.fair_queue.FairQueue`.
- A short decision that is urgent does not wait behind others: one more process makes only such. It
  has the priority of its host: on busy processors a nicer one waits for longer than it plans.
- Equal problems are planned once: what was asked before is remembered, and what is being planned is
  shared (:mod:`pipemorph.ingest.memo`).
- Searches for another split of a job's layers have their turn among the decisions of all jobs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

from pipemorph.control.decide.cost import MAY_WAIT, estimated_seconds
from pipemorph.control.decide.findings import NoPlan
from pipemorph.control.decide.layouts import moves, relayout
from pipemorph.control.decide.replan import Proposal, Replan, propose
from pipemorph.control.planner_worker import answer
from pipemorph.errors import InputError
from pipemorph.ingest.fair_queue import Entry, FairQueue, Key
from pipemorph.ingest.memo import Memo, comparable, digest
from pipemorph.ingest.planner_processes import Answer, PlannerLost, PlannerProcesses

log = logging.getLogger("pipemorph.ingest")

Planner = Callable[[Key, Replan], Awaitable[Proposal]]
"""Makes a proposal for a job. Raises :class:`PlannerLost` if the caller should retry."""

Search = Callable[[Key, moves.Question], Awaitable["relayout.Proposal | None"]]
"""Searches for another layout of a job. Raises :class:`PlannerLost` if the caller should retry, and
:class:`~pipemorph.errors.InputError` if it failed."""

LIMIT_SECONDS = 60.0
"""Time limit of a plan: after this the network has probably changed."""
SHORT_SECONDS = 0.3
"""Estimated processor time up to which a decision is short: of 8 stages with the thorough search,
of 64 stages with the quick one."""
BUDGET_SECONDS = 20.0
"""Processor time of the decisions of one job in a minute."""
MEMO_BYTES = 64 << 20
WARM = {"any": 2, "short": 1}
"""Processes that are started at once; the others when needed."""


async def plan_here(key: Key, asked: Replan) -> Proposal:
    """A :data:`Planner` that plans in this process, for a host of one job."""
    return _proposal(answer(propose, asked))


async def search_here(key: Key, asked: moves.Question) -> relayout.Proposal | None:
    """A :data:`Search` in this process."""
    return _found(answer(moves.search, asked))


def _proposal(found: Proposal | Exception) -> Proposal:
    return found if isinstance(found, Proposal) else Proposal(None, None, (NoPlan(str(found)),))


def _found(found: relayout.Proposal | Exception | None) -> relayout.Proposal | None:
    if isinstance(found, Exception):
        raise InputError(str(found))
    return found


class Decided(NamedTuple):
    """How a decision was made. ``short``: by its estimated time; ``urgent``: by its cause. ``how``:
    in a process of its own, in that of an equal one, or from memory. ``waited``, ``planned``:
    seconds."""

    short: bool
    urgent: bool
    how: Literal["planned", "shared", "known"]
    waited: float
    planned: float


@dataclass(eq=False)
class _Run:
    """A decision that waits or is being made, for all jobs that asked for it. ``function`` answers
    what is ``asked`` in a process; ``estimate``: its processor time, seconds; ``result``: the
    answer, or the exception for which there is none; ``waiting``: the jobs' entries in the
    queue."""

    mark: bytes
    function: Callable[[Any], Any]
    asked: Replan | moves.Question
    estimate: float
    result: asyncio.Future[Any]
    waiting: set[Entry[_Run]] = field(default_factory=set)
    started_at: float | None = None

    @property
    def short(self) -> bool:
        return self.estimate <= SHORT_SECONDS


class PlannerPool:
    """A :data:`Planner` with ``processes`` worker processes, and one more for short decisions that
    are urgent.

    ``on_decided`` is called for every decision, ``on_over_budget`` once for a job that has used its
    budget and waits. Close it when done.
    """

    def __init__(
        self,
        processes: int,
        *,
        limit_seconds: float = LIMIT_SECONDS,
        budget_seconds: float = BUDGET_SECONDS,
        memo_bytes: int = MEMO_BYTES,
        on_decided: Callable[[Decided], None] = lambda _: None,
        on_over_budget: Callable[[Key], None] = lambda _: None,
    ) -> None:
        self._limit = limit_seconds
        self._budget = budget_seconds
        self._free = {"any": processes, "short": 1}
        """Processes that may be used now, by the decisions that they make."""
        self.processes = {"any": PlannerProcesses(), "short": PlannerProcesses(nice=0)}
        self._queue: FairQueue[_Run] = FairQueue(budget_seconds)
        self._memo = Memo(memo_bytes)
        self._runs: dict[bytes, _Run] = {}
        self._searches = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._on_decided = on_decided
        self._on_over_budget = on_over_budget

    @property
    def waiting(self) -> int:
        """Decisions that wait for a process."""
        return len(self._queue)

    @property
    def running(self) -> list[asyncio.subprocess.Process]:
        """The current worker processes."""
        return [process for each in self.processes.values() for process in each.running]

    async def __call__(self, key: Key, asked: Replan) -> Proposal:
        """If the caller is cancelled, and nobody else waits for the decision, it is dropped unless
        a process works on it."""
        asked = comparable(asked)
        mark = digest(asked)
        known = self._memo.get(mark)
        run = self._runs.get(mark)
        urgent = asked.cause not in MAY_WAIT
        if known is not None:
            found = _proposal(Answer[Proposal](known, 0.0).read())
            short = estimated_seconds(asked) <= SHORT_SECONDS
            self._on_decided(Decided(short, urgent, "known", 0.0, 0.0))
            return found
        now, shares = self._now(), run is not None
        if run is None:
            run = self._new_run(mark, propose, asked, estimated_seconds(asked))
        proposal = _proposal(await self._wait(key, run, urgent=urgent))
        started = run.started_at if run.started_at is not None else now
        how: Literal["planned", "shared"] = "shared" if shares else "planned"
        waited, planned = max(0.0, started - now), self._now() - max(now, started)
        self._on_decided(Decided(run.short, urgent, how, waited, planned))
        return proposal

    async def search(self, key: Key, asked: moves.Question) -> relayout.Proposal | None:
        """A :data:`Search`: long, and not urgent. No two jobs ask for the same one."""
        mark = b"search %d" % next(self._searches)
        run = self._new_run(mark, moves.search, asked, relayout.SEARCH_SECONDS)
        return _found(await self._wait(key, run, urgent=False))

    def _new_run(
        self,
        mark: bytes,
        function: Callable[[Any], Any],
        asked: Replan | moves.Question,
        estimate: float,
    ) -> _Run:
        result = asyncio.get_running_loop().create_future()
        # Also if nobody waits any more when it fails.
        result.add_done_callback(lambda done: done.cancelled() or done.exception())
        run = self._runs[mark] = _Run(mark, function, asked, estimate, result)
        return run

    async def _wait(self, key: Key, run: _Run, *, urgent: bool) -> Any:
        """What a process has answered. See :meth:`__call__`."""
        entry = None
        if run.started_at is None:
            # Every job that asks has its turn: the first that comes up is for all.
            cost = self._queue.cost(key, run.estimate)
            entry = self._queue.put(key, run, cost, self._now(), urgent=urgent)
            run.waiting.add(entry)
            self._start_some()
        try:
            return await asyncio.shield(run.result)
        finally:
            if entry in run.waiting:
                self._give_up(run, entry)

    async def warm_up(self) -> None:
        """Start some processes now, so that the first decisions are not delayed."""
        await asyncio.gather(
            *(
                each.warm_up(min(WARM[lane], self._free[lane]))
                for lane, each in self.processes.items()
            )
        )

    async def close(self) -> None:
        """Kill the processes. Decisions in progress fail."""
        self._free = dict.fromkeys(self._free, 0)
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for run in self._runs.values():
            run.result.cancel()
        for each in self.processes.values():
            await each.close()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _give_up(self, run: _Run, entry: Entry[_Run]) -> None:
        """Drop a decision that nobody waits for."""
        run.waiting.discard(entry)
        self._queue.drop(entry)
        if not run.waiting:
            del self._runs[run.mark]
            run.result.cancel()

    def _start_some(self) -> None:
        """Give what waits to the processes that are free."""
        now = self._now()
        for lane, longest in (("short", SHORT_SECONDS), ("any", float("inf"))):
            while self._free[lane]:
                entry = self._queue.take(now, longest, urgent=lane == "short")
                if entry is None:
                    break
                self._free[lane] -= 1
                run = entry.item
                run.started_at = now
                for other in run.waiting - {entry}:
                    self._queue.drop(other)
                run.waiting.clear()
                task = asyncio.create_task(self._make(entry, lane))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        for key in self._queue.newly_over_budget(now):
            log.warning(
                "%s/%s: its decisions took more than %g s of a processor in a minute; the next ones"
                " wait, at most a minute each",
                *key, self._budget,
            )  # fmt: skip
            self._on_over_budget(key)
        due = self._queue.due(now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            self._timer = asyncio.get_running_loop().call_later(due, self._start_some)

    async def _make(self, entry: Entry[_Run], lane: str) -> None:
        """Let a process make a decision."""
        run = entry.item
        assert run.started_at is not None
        used: float | None = None
        try:
            made = await self.processes[lane].answer(run.function, run.asked, self._limit)
            used = made.seconds
            found = made.read()
            if isinstance(found, Proposal):
                self._memo.put(run.mark, made.pickled)
            self._settle(run, found)
        except TimeoutError:
            self._settle(run, InputError(f"it took longer than {self._limit:g} s"))
        except (PlannerLost, OSError) as error:
            self._lose(run, error)
        finally:
            now = self._now()
            if used is None:
                used = now - run.started_at
            self._queue.settle(entry, run.estimate, used, now)
            self._free[lane] += 1
            self._runs.pop(run.mark, None)
            run.result.cancel()  # If none of the above.
        self._start_some()

    @staticmethod
    def _settle(run: _Run, found: object) -> None:
        if not run.result.done():
            run.result.set_result(found)

    @staticmethod
    def _lose(run: _Run, error: Exception) -> None:
        if not run.result.done():
            run.result.set_exception(error)
