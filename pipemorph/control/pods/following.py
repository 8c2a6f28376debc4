"""What begins after a generation that is over: with which replicas and layout, and as which record
in status. Pure.

The :class:`Ladder` decides whether there is a next one, by what all launchers have told: how the
ranks ended, and how many iterations they had finished.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

from pipemorph.api.layout import RankLayout
from pipemorph.api.running import Running
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.status_recoveries import (
    MAX_RECOVERIES_KEPT,
    MAX_REPLACED_KEPT,
    Recoveries,
    RecoveryRecord,
)
from pipemorph.control.pods.ending import Ending
from pipemorph.control.pods.layouts import Layouts, settled
from pipemorph.control.pods.presence import Presence
from pipemorph.control.record.progress import Progress
from pipemorph.wire import Loss, PodReport
from pipemorph.wire.generations import LONGEST_LINE


class Rung(StrEnum):
    """What follows a failure."""

    GENERATION = "generation"
    """The job goes on with the state that ranks have kept, or the newest checkpoint, and with the
    plan in force; also where another pod has taken the place of a lost one."""
    ATTEMPT = "attempt"
    """It begins with the plan of the spec and with nothing kept: what failed may have come of
    either."""
    NONE = "none"


@dataclass
class Ladder:
    """Counts failures. ``most``: ``spec.failurePolicy.maxRestarts``; with 0 a failure ends the job.

    A failure after one more iteration than ever before is not counted: their number is bounded by
    that of the iterations.
    """

    most: int
    counted: int = 0
    best: int = 0
    """Most iterations that were finished at any failure."""
    idle: int = 0
    """Failures since then."""
    error: str | None = None
    """Of the last failure."""

    def after(
        self, failure: Loss, done: int, *, replaced: bool = False, counted: bool = True
    ) -> tuple[Rung, str]:
        """What follows a failure when a rank has finished ``done`` iterations, and why. That is by
        the ranks' own counts: what they report comes later, or never. ``replaced``: a lost pod is
        back as another one. ``counted``: False if the program has no part in it."""
        if not failure.retry or self.most == 0:
            return Rung.NONE, ""
        progress = done > self.best
        same = not progress and failure.error is not None and failure.error == self.error
        self.best, self.error = max(self.best, done), failure.error
        if same:
            return (
                Rung.NONE,
                f"not started again: iteration {done} failed twice, with the same error",
            )
        if progress:
            self.idle = 0
        if progress or not counted:
            return Rung.GENERATION, ""
        self.idle += 1
        self.counted += 1
        if self.counted > self.most:
            return Rung.NONE, (
                f"not started again: {self.counted} times no iteration was finished before a "
                f"failure, and spec.failurePolicy.maxRestarts is {self.most}"
            )
        count = f"restart {self.counted} of at most {self.most}"
        # What failed at the start may fail so in each of these pods, but not in another one.
        if self.idle > 1 or (done == 0 and not replaced):
            return Rung.ATTEMPT, count
        return Rung.GENERATION, count


class Ready(NamedTuple):
    """The pods that can begin. ``missing``: those that had ranks and are not waited for any more;
    ``running``: the replicas that run, and their pods; None: all run."""

    missing: frozenset[int]
    running: Running | None


@dataclass(frozen=True)
class Begins:
    """The next generation: what is in status from then on, and its record, the last one there."""

    saved: Recoveries
    record: RecoveryRecord
    why: str = ""
    """Of a start after a failure."""


@dataclass(frozen=True)
class Ends:
    """There is no next generation. ``verdict``, ``why``, ``cause``: as of
    :class:`pipemorph.wire.GenerationState`."""

    saved: Recoveries
    verdict: str
    why: str
    cause: int | None


class Following:
    """Of one job; ``presence``, ``layouts`` and ``progress`` are its own.

    ``cut``: of a job of which not all pods have ranks in every generation; None: they have.
    ``most``: ``failurePolicy.maxRestarts``; ``restarts``: attempts that count against it, too.
    ``patience``: seconds that replicas that may go on without others wait for the pod that replaces
    a lost one. Times: wall clock, seconds.
    """

    def __init__(
        self,
        presence: Presence,
        layouts: Layouts,
        progress: Progress,
        cut: Parallelism | None,
        *,
        most: int,
        restarts: int,
        patience: float,
    ) -> None:
        self._presence, self._layouts, self._progress = presence, layouts, progress
        self._cut, self.most, self.restarts, self.patience = cut, most, restarts, patience

    # --- who can begin ------------------------------------------------------------------------

    def ready(self, ending: Ending, left_out: Collection[int], now: float) -> Ready | None:
        """None while somebody is waited for. ``left_out``: replicas that have not run."""
        presence = self._presence
        if self._cut is None:
            all_gone = len(presence.gone) == presence.pods
            return Ready(frozenset(), None) if all_gone else None
        missing = presence.missing()
        unknown = missing - presence.lost.keys()
        if unknown and now < presence.silent_until(ending.at):
            return None
        running = presence.running_in(presence.present(now))
        if missing and now < self._given_up_at(missing, running, ending, left_out):
            return None
        if len(running.replicas) < (self._cut.min_replicas or 1):
            return None
        if running.left_out and now < presence.settled_at():
            return None
        return Ready(missing, running)

    def due(self, ending: Ending, left_out: Collection[int], now: float) -> float | None:
        """When time alone may decide that they can begin; None: it does not."""
        presence = self._presence
        missing = presence.missing()
        silent = presence.silent_until(ending.at)
        if missing - presence.lost.keys() and ending.decided_at < silent:
            return silent
        running = presence.running_in(presence.present(now))
        at = self._given_up_at(missing, running, ending, left_out)
        if running.left_out:
            at = max(at, presence.settled_at())
        return at if ending.decided_at < at < inf else None

    def _given_up_at(
        self, missing: frozenset[int], running: Running, ending: Ending, left_out: Collection[int]
    ) -> float:
        """When none of these pods is waited for any more. ``running``: what runs without them."""
        whole = set(running.left_out) <= set(left_out)
        patience = 0.0 if whole else self.patience
        return self._presence.given_up_at(missing, ending.at, patience)

    # --- what begins --------------------------------------------------------------------------

    def after(self, saved: Recoveries, ending: Ending, ready: Ready) -> Begins | Ends:
        """``saved``: what is in status of the generation that is over."""
        changes = self._cut is not None or self._layouts.left
        if changes and not ending.losses and not ready.missing:
            # Of ranks that leave none has failed, whoever had asked them to.
            return self._change(saved, ending, ready)
        return self._recovery(saved, ending, ready)

    def _change(self, saved: Recoveries, ending: Ending, ready: Ready) -> Begins:
        """A generation of other replicas, or with another layout, which no failure was the cause
        of."""
        running, asked = ready.running, self._layouts.asked
        left_out = running.left_out if running is not None else ()
        back = ", ".join(str(each) for each in saved.left_out if each not in left_out)
        cause = f"all pods of replica {back} are there again" if back else "the ranks left"
        if asked:
            cause = self._layouts.cause(saved.layout)[:LONGEST_LINE]
        record = RecoveryRecord(
            attempt=saved.attempt,
            generation=saved.generation + 1,
            lost_at=_timestamp(ending.at),
            cause=cause,
            # All have left at the same iteration.
            iterations_done=self._layouts.reached or self._progress.done,
            **(self._layouts.difference(saved.layout, asked) if asked else {}),
            promised=self._layouts.promised,
            **self._words_of(running),
        )
        return self._begin(self._layouts.taken_up(saved), record, running)

    def _recovery(self, before: Recoveries, ending: Ending, ready: Ready) -> Begins | Ends:
        """A generation after a failure, or none."""
        presence, missing = self._presence, ready.missing
        ending.blame(missing, presence.lost)
        cause_pod, cause = ending.cause()
        if self._layouts.have_counted(before):
            before = settled(before)
        back = before.layout_before
        if back is not None:
            # What failed may be the layout.
            cause = cause.model_copy(update={"retry": True})
            before = self._layouts.refuse(before)
        ladder = Ladder(
            self.most,
            self.restarts + before.counted,
            before.finished,
            before.idle,
            # What was finished meanwhile may have been told to another ingest alone: then the same
            # error again is no proof that it came at the same iteration.
            before.error if self._progress.heard else None,
        )
        rung, why = ladder.after(
            cause,
            self._progress.finished,
            replaced=bool(presence.replaced or missing),
            counted=cause_pod not in presence.uncounted,
        )
        told: dict[str, Any] = {
            "finished": ladder.best, "idle": ladder.idle, "error": ladder.error
        }  # fmt: skip
        if rung is not Rung.GENERATION:
            # Where restarts are used up, the end of the attempt is the job's.
            twice = cause.retry and self.restarts + before.counted < self.most
            verdict = "none" if rung is Rung.NONE and twice else "attempt"
            # An attempt is counted by who begins it.
            return Ends(before.model_copy(update=told), verdict, why, cause_pod)
        presence.uncounted -= presence.replaced | missing
        told |= {"counted": ladder.counted - self.restarts, "count": before.count + 1}
        after, changes = before, {}
        if back is not None:
            after = before.with_layout(back, None)
            changes = self._layouts.difference(before.layout, back)
        record = RecoveryRecord(
            attempt=before.attempt,
            generation=before.generation + 1,
            lost_at=_timestamp(ending.lost_at),
            cause=ending.words(cause),
            pod=cause_pod,
            rank=cause.rank,
            iterations_done=self._progress.done,
            **changes,
            **self._words_of(ready.running),
        )
        begins = self._begin(after.model_copy(update=told), record, ready.running)
        return replace(begins, why=why)

    def elsewhere(
        self, saved: Recoveries, generation: int, told: PodReport | None
    ) -> Recoveries | None:
        """What is in status of a generation that another ingest has begun, and could not write, by
        what a launcher has ``told`` of it, if anything; None where what runs may change and it did
        not say so, or that cannot be."""
        update: dict[str, Any] = {"generation": generation}
        if told is None and (self._layouts.move or self._cut is not None):
            return None
        if told is not None and self._layouts.move:
            before = told.layout_before
            if not all(map(self._layouts.fits, (told.layout, before or RankLayout()))):
                return None
            now = self._layouts.told(told.layout)
            saved = saved.with_layout(now, None if before is None else self._layouts.told(before))
        if told is not None and self._cut is not None:
            update["left_out"] = [each for each in told.left_out if each < self._cut.replicas]
        return saved.model_copy(update=update)

    def _words_of(self, running: Running | None) -> dict[str, Any]:
        """What a record tells of the pods that run."""
        found: dict[str, Any] = {"replaced": sorted(self._presence.replaced)[:MAX_REPLACED_KEPT]}
        if running is not None:
            found["replicas"] = len(running.replicas)
        return found

    @staticmethod
    def _begin(saved: Recoveries, record: RecoveryRecord, running: Running | None) -> Begins:
        update: dict[str, Any] = {
            "generation": record.generation,
            "last": [*saved.last, record][-MAX_RECOVERIES_KEPT:],
        }
        if running is not None:
            update["left_out"] = list(running.left_out)
        return Begins(saved.model_copy(update=update), record)


def _timestamp(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
