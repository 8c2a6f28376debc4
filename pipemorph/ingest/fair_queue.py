"""Decides which job's decision is made next: shares processor time over namespaces and jobs.

Namespaces take turns by the processor time that they will have used, and within one so do its
jobs. So neither a namespace of many jobs nor one of large problems delays the others by more than
the decision under way, and of those who have used the same, the shortest decision comes first. Who
comes back after a pause begins at what those who went on have used meanwhile: a pause saves up
nothing. This is weighted fair queueing with equal weights.

Urgent decisions come before those that may wait, of all jobs and namespaces that have not used
:data:`CREDIT_SECONDS` more than the others.

A job may also use only so much processor time a minute. Beyond that its decisions wait, at most a
minute, even if nobody else does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")

Key = tuple[str, str]
"""Namespace and name of a job."""

MINUTE = 60.0
CREDIT_SECONDS = 2.0
"""Processor time by which an urgent decision is put before its turn."""
FORGET_SECONDS = 3 * MINUTE
"""After so long without a decision, a job has its whole budget again, and is forgotten."""


@dataclass(eq=False)
class Entry(Generic[Item]):
    """A decision that waits. ``cost``: estimated processor time, seconds; ``since``: when it came;
    ``number``: how many came before it; ``credit``: seconds by which it is put before its turn."""

    key: Key
    item: Item
    cost: float
    since: float
    number: int
    credit: float = 0.0

    @property
    def rank(self) -> float:
        return self.cost - self.credit


@dataclass(eq=False)
class _Share:
    """What one flow of decisions has used. ``spent``: processor time, on the clock of its parent;
    ``running``: decisions that were taken and not settled."""

    spent: float = 0.0
    running: int = 0
    used_at: float = 0.0


@dataclass(eq=False)
class _Job(_Share, Generic[Item]):
    """``left``: rest of the budget; ``ratio``: by how much its last decision took longer than
    estimated; ``said``: whether it was reported as over its budget."""

    entries: list[Entry[Item]] = field(default_factory=list)
    left: float = 0.0
    filled_at: float = 0.0
    ratio: float = 1.0
    said: bool = False


@dataclass(eq=False)
class _Namespace(_Share, Generic[Item]):
    """``clock``: what each job would have used if it had always had decisions that wait."""

    jobs: dict[str, _Job[Item]] = field(default_factory=dict)
    clock: float = 0.0
    waiting: int = 0


class FairQueue(Generic[Item]):
    """The decisions that wait. ``budget``: processor time of a job, seconds per minute. Times are
    monotonic seconds; for use in one thread."""

    def __init__(self, budget: float) -> None:
        self._budget = budget
        self._namespaces: dict[str, _Namespace[Item]] = {}
        self._waiting: dict[Key, tuple[_Namespace[Item], _Job[Item]]] = {}
        """The jobs with decisions that wait, among a thousand without."""
        self._indebted: set[Key] = set()
        """The jobs that may be over their budget, among a thousand that wait."""
        self._clock = 0.0
        self._numbered = 0
        self._swept_at = 0.0

    def __len__(self) -> int:
        """Decisions that wait."""
        return sum(len(job.entries) for _, job in self._waiting.values())

    def cost(self, key: Key, estimate: float) -> float:
        """The estimate, or more if the job's last decision took longer than estimated."""
        space = self._namespaces.get(key[0])
        job = space.jobs.get(key[1]) if space is not None else None
        return estimate * (job.ratio if job is not None else 1.0)

    def put(
        self, key: Key, item: Item, cost: float, now: float, *, urgent: bool = False
    ) -> Entry[Item]:
        self._sweep(now)
        space = self._namespaces.setdefault(key[0], _Namespace(used_at=now))
        if not space.running and not space.waiting:
            space.spent = max(space.spent, self._clock)
        job = space.jobs.get(key[1])
        if job is None:
            job = space.jobs[key[1]] = _Job(left=self._budget, filled_at=now)
        if not job.running and not job.entries:
            job.spent = max(job.spent, space.clock)
        entry = Entry(key, item, cost, now, self._numbered, CREDIT_SECONDS if urgent else 0.0)
        self._numbered += 1
        job.entries.append(entry)
        space.waiting += 1
        self._waiting[key] = space, job
        if self._left(job, now) >= self._budget:
            job.said = False
        space.used_at = job.used_at = now
        return entry

    def take(
        self, now: float, longest: float = float("inf"), *, urgent: bool = False
    ) -> Entry[Item] | None:
        """The next decision of at most ``longest`` seconds whose job is within its budget; None if
        there is none. ``urgent``: none that may wait. Charges its estimated cost until
        :meth:`settle`."""
        firsts: dict[str, tuple[float, int, Entry[Item]]] = {}
        over = {key for key, _ in self._over_budget(now)}
        for (name, job_name), (_, job) in self._waiting.items():
            if over and (name, job_name) in over:
                continue
            for each in job.entries:
                if each.cost <= longest and (each.credit > 0 or not urgent):
                    mine = (job.spent + each.rank, each.number, each)
                    firsts[name] = min(firsts.get(name, mine), mine)
        if not firsts:
            return None
        _, _, entry = min(
            (self._namespaces[name].spent + first.rank, number, first)
            for name, (_, number, first) in firsts.items()
        )
        space, job = self._remove(entry)
        for share in (space, job):
            share.spent += entry.cost
            share.running += 1
            share.used_at = now
        return entry

    def settle(self, entry: Entry[Item], estimate: float, used: float, now: float) -> None:
        """Charge what a decision really took, seconds of a processor. ``estimate``: without what is
        known of the job."""
        space, job = self._of(entry)
        # A new namespace, or job, starts where the present ones are if all had the same share.
        self._clock += used / len({entry.key[0], *(name for name, _ in self._waiting)})
        space.clock += used / len({entry.key, *(k for k in self._waiting if k[0] == entry.key[0])})
        for share in (space, job):
            share.spent += used - entry.cost
            share.running -= 1
            share.used_at = now
        # At most a minute's worth of debt, so that no job waits longer than that.
        job.left = max(-self._budget, self._left(job, now) - used)
        if job.left <= 0:
            self._indebted.add(entry.key)
        job.ratio = max(1.0, used / estimate) if estimate > 0 else 1.0

    def drop(self, entry: Entry[Item]) -> None:
        """Forget a decision that waits."""
        self._remove(entry)

    def newly_over_budget(self, now: float) -> Iterator[Key]:
        """Jobs whose decisions wait for their budget, each once until its budget is full again."""
        for key, job in self._over_budget(now):
            if not job.said:
                job.said = True
                yield key

    def due(self, now: float) -> float | None:
        """Seconds until the next job has a budget again; None if none waits for it."""
        over = [-job.left for _, job in self._over_budget(now)]
        return min(over) * MINUTE / self._budget if over else None

    def _over_budget(self, now: float) -> list[tuple[Key, _Job[Item]]]:
        """The jobs whose decisions wait for their budget."""
        if not self._indebted:
            return []
        found = []
        for key in [*self._indebted]:
            if key not in self._waiting:
                continue
            _, job = self._waiting[key]
            if self._left(job, now) <= 0:
                found.append((key, job))
            else:
                self._indebted.discard(key)
        return found

    def _remove(self, entry: Entry[Item]) -> tuple[_Namespace[Item], _Job[Item]]:
        space, job = self._of(entry)
        job.entries.remove(entry)
        space.waiting -= 1
        if not job.entries:
            del self._waiting[entry.key]
        return space, job

    def _of(self, entry: Entry[Item]) -> tuple[_Namespace[Item], _Job[Item]]:
        space = self._namespaces[entry.key[0]]
        return space, space.jobs[entry.key[1]]

    def _left(self, job: _Job[Item], now: float) -> float:
        """The rest of a job's budget, refilled until now."""
        gained = max(0.0, now - job.filled_at) * self._budget / MINUTE
        job.left, job.filled_at = min(self._budget, job.left + gained), now
        return job.left

    def _sweep(self, now: float) -> None:
        """Forget whoever has had no decision for long."""
        if now - self._swept_at < MINUTE:
            return
        self._swept_at = now

        def idle(share: _Share) -> bool:
            return not share.running and now - share.used_at > FORGET_SECONDS

        for name, space in list(self._namespaces.items()):
            for job_name, job in list(space.jobs.items()):
                if not job.entries and idle(job):
                    del space.jobs[job_name]
                    self._indebted.discard((name, job_name))
            if not space.jobs and idle(space):
                del self._namespaces[name]
