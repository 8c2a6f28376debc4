"""Writes ``report.json``: the results of a run, for programs."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from statistics import median
from typing import Any

from pipemorph import __version__
from pipemorph.api import status
from pipemorph.api.spec import PipeMorphJob
from pipemorph.api.status import (
    MAX_ATTEMPTS_KEPT,
    Condition,
    JobState,
    JobStatus,
    TrainingStatus,
)
from pipemorph.api.status_recoveries import MAX_RECOVERIES_KEPT, Recoveries, RecoveryRecord
from pipemorph.control.decide.forecast import Outlook
from pipemorph.control.record.goodput import Useful
from pipemorph.control.record.history import worth
from pipemorph.errors import InputError
from pipemorph.explain.cluster_job import SlowTime
from pipemorph.local.processes.supervise import End, Ending
from pipemorph.local.results.history import View
from pipemorph.local.results.outputs import OutFolder, write_json
from pipemorph.local.results.traces import read_faults, read_splits
from pipemorph.status.conditions import MESSAGE_LENGTH, format_time, updated
from pipemorph.wire import AdaptationRecord, IterationSample, ResumedFrom

STATES: dict[End, JobState] = {End.COMPLETED: "Complete", End.INTERRUPTED: "Suspended"}
"""Of a run that ended so; Failed otherwise."""
REASONS = {
    End.COMPLETED: "AllRanksFinished",
    End.FAILED: "RankFailed",
    End.DEADLINE: "DeadlineExceeded",
    End.INTERRUPTED: "Interrupted",
    End.MOVED: "LayoutChanged",
}
"""Of conditions, for programs."""
LEFT_OUT = "(not in the report)"
"""Value of each variable of the job's pods in a report."""
SHOWN_SECONDS = 0.1
"""Least time saved or lost by adaptations that the last line of a run names."""


@dataclass
class AttemptRecord:
    """One attempt. Times are wall clock, seconds since the Unix epoch."""

    number: int
    started_at: float
    ended_at: float | None = None
    ending: Ending | None = None

    def end(self, ending: Ending, now: float) -> Ending:
        """Record how the attempt ended; returns ``ending``."""
        self.ending, self.ended_at = ending, now
        return ending

    def status(self) -> status.AttemptRecord:
        assert self.ending is not None and self.ended_at is not None
        return status.AttemptRecord(
            attempt=self.number, started_at=_moment(self.started_at),
            ended_at=_moment(self.ended_at), reason=REASONS[self.ending.end],
            message=self.ending.reason[:MESSAGE_LENGTH],
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "end": self.ending.end.value if self.ending else None,
            "reason": self.ending.reason if self.ending else None,
            "details": list(self.ending.details) if self.ending else [],
        }


@dataclass
class Recovery:
    """One start of the ranks after a failure. Times are wall clock, seconds since the epoch."""

    ending: Ending
    """Of the ranks before."""
    attempt: int
    generation: int
    """What began, numbered from 0; a generation within its attempt."""
    rung: str
    done: int
    """Iterations that were finished before."""
    went_on_with: int | None = None
    """The first iteration that was finished afterwards; None: there was none."""
    seconds: float | None = None
    """From the failure to the end of that iteration."""
    resumed: ResumedFrom | None = None
    """What the ranks began with; None: they did not say."""

    @property
    def repeated(self) -> int | None:
        """Iterations that had been finished and were run again."""
        return None if self.went_on_with is None else max(0, self.done - self.went_on_with)

    def line(self) -> str:
        """``went on with iteration 17 after 2.31 s; no iteration was repeated``"""
        what = "no iteration was"
        if count := self.repeated:
            what = "1 iteration was" if count == 1 else f"{count} iterations were"
        went = f"went on with iteration {self.went_on_with} after {self.seconds:.2f} s"
        went += f", {self.resumed}" if self.resumed else ""
        return f"{went}; {what} repeated"

    def status(self) -> RecoveryRecord:
        lost = self.ending.position
        return RecoveryRecord(
            attempt=self.attempt, generation=self.generation, lost_at=_moment(self.ending.at),
            cause=self.ending.reason[:MESSAGE_LENGTH], rank=lost.rank if lost else None,
            iterations_done=self.done, went_on_with=self.went_on_with, repeated=self.repeated,
            seconds=self.seconds, state=self.resumed.rung if self.resumed else None,
        )  # fmt: skip

    def record(self) -> dict[str, Any]:
        lost = self.ending.position
        return {
            "rank": lost.rank if lost else None,
            "coordinate": str(lost) if lost else None,
            "cause": self.ending.reason,
            "rung": self.rung,
            "attempt": self.attempt,
            "generation": self.generation,
            "lost_at": self.ending.at,
            "iterations_done": self.done,
            "went_on_with": self.went_on_with,
            "repeated": self.repeated,
            "seconds": self.seconds,
            "state": self.resumed.rung if self.resumed else None,
            "state_reason": (self.resumed.why or None) if self.resumed else None,
        }


@dataclass
class RunRecord:
    """Record of a run: its attempts, and its results after the end."""

    job: PipeMorphJob
    started_at: float
    attempts: list[AttemptRecord] = field(default_factory=list)
    ending: Ending = field(default_factory=lambda: Ending(End.FAILED, "not started"))
    iterations: list[IterationSample] = field(default_factory=list)
    adaptations: list[AdaptationRecord] = field(default_factory=list)
    last: View = field(default_factory=View)
    """The state of the run when it ended."""
    slow: list[SlowTime] = field(default_factory=list)
    """When links were slow, whether that changed the plan or not."""
    recoveries: list[Recovery] = field(default_factory=list)
    began: int | None = None
    """The iteration that its first ranks began with; None: that of the first report."""
    useful: Useful = field(default_factory=Useful)
    relayouts: list[dict[str, Any]] = field(default_factory=list)
    """Changes of the ranks' places and layers, for the report."""
    layers: tuple[int, ...] = ()
    """How many each stage held at the end; empty: evenly many."""
    training: TrainingStatus | None = None
    conditions: list[Condition] = field(default_factory=list)
    """How training went at the end; nothing if the control loop did not answer."""
    outlook: Outlook | None = None
    """What the plan in effect at the end can be predicted from; None if it cannot."""

    @property
    def goodput(self) -> float | None:
        """See :mod:`pipemorph.control.record.goodput`; a run has its place from its start to its
        end."""
        ended_at = self.attempts[-1].ended_at if self.attempts else None
        return None if ended_at is None else self.useful.goodput(ended_at - self.started_at)

    def begin_attempt(self, now: float) -> AttemptRecord:
        self.attempts.append(AttemptRecord(len(self.attempts), now))
        return self.attempts[-1]

    def finish(
        self,
        ending: Ending,
        iterations: list[IterationSample],
        adaptations: list[AdaptationRecord],
        last: View | None = None,
        *,
        slow: Sequence[SlowTime] = (),
        useful: Useful | None = None,
    ) -> None:
        self.useful = useful or Useful()
        self.ending, self.iterations, self.adaptations = ending, iterations, adaptations
        self.last, self.slow = last or View(), list(slow)

    @property
    def completed(self) -> bool:
        return self.ending.end is End.COMPLETED

    @property
    def emulated(self) -> bool:
        return self.job.spec.emulation is not None

    def summary(self) -> str:
        """``completed: 40 of 40 iterations (resumed at 12), median 1.234 s, 2 adaptations``"""
        wanted = self.job.spec.trainer.iterations
        began, last = self.began or 0, 0
        if self.iterations:
            last = self.iterations[-1].index + 1
            began = self.iterations[0].index if self.began is None else self.began
        done = wanted if self.completed else last
        known = sum(each.index >= began for each in self.iterations)
        notes = [f"resumed at {began}"] if began else []
        if done > began + known:
            notes += [f"{done - began - known} not reported" if known else "none reported"]
        resumed = f" ({', '.join(notes)})" if notes else ""
        parts = [f"{done} of {wanted} iterations{resumed}"]
        if self.iterations:
            parts.append(f"median {median(i.seconds for i in self.iterations):.3f} s")
        brought = ""
        found = worth(self.adaptations)
        if abs(found.seconds) >= SHOWN_SECONDS:
            verb = "saved" if found.seconds > 0 else "cost"
            brought = f" that {verb} {abs(found.seconds):.1f} s (± {found.error:.1f} s)"
        changes = len(self.adaptations)
        parts.append(f"{changes} {'adaptation' if changes == 1 else 'adaptations'}{brought}")
        if self.recoveries:
            count, goodput = len(self.recoveries), self.goodput
            parts.append(f"{count} {'recovery' if count == 1 else 'recoveries'}")
            parts += [] if goodput is None else [f"goodput {goodput:.0%}"]
        emulated = " (EMULATED)" if self.emulated else ""
        return f"{self.ending.end.value}{emulated}: {', '.join(parts)}"

    def content(self, faults: list[Any], splits: list[Any]) -> dict[str, Any]:
        """The report as JSON data."""
        return _without_values(self.job) | {
            "status": self.status().model_dump(mode="json", by_alias=True, exclude_none=True),
            "completed": self.completed,
            "end": self.ending.end.value,
            "reason": self.ending.reason or None,
            "emulated": self.emulated,
            "started_at": self.started_at,
            "ended_at": self.attempts[-1].ended_at if self.attempts else None,
            "iterations": [i.model_dump(mode="json") for i in self.iterations],
            "adaptations": [a.model_dump(mode="json") for a in self.adaptations],
            "links": {"slow": [each.model_dump() for each in self.slow]},
            "events": [event.record() for event in self.last.events],
            "reductions": [each.record() for each in self.last.reductions],
            "split": splits,
            "faults": faults,
            "recoveries": [recovery.record() for recovery in self.recoveries],
            "relayouts": self.relayouts,
            "predicted": self._predicted(),
            "saved": worth(self.adaptations).record(self.job.spec.parallelism.mesh.world_size),
            "attempts": [attempt.record() for attempt in self.attempts],
            "versions": _versions(),
        }

    def status(self) -> JobStatus:
        """Status of the job as on a cluster."""
        ended = [each for each in self.attempts if each.ending is not None]
        ended_at = ended[-1].ended_at if ended else None
        state = STATES.get(self.ending.end, "Failed")
        conditions = updated(
            self.conditions, state, "True", REASONS[self.ending.end], self.ending.reason,
            generation=None, now=datetime.fromtimestamp(ended_at or self.started_at, UTC),
        )  # fmt: skip
        restarts = [each for each in self.recoveries if each.generation > 0]
        newest = [each.status() for each in restarts[-MAX_RECOVERIES_KEPT:]]
        return JobStatus(
            state=state,
            start_time=_moment(self.started_at),
            completion_time=None if ended_at is None else _moment(ended_at),
            restarts=max(0, len(self.attempts) - 1),
            attempts=[each.status() for each in ended[:-1][-MAX_ATTEMPTS_KEPT:]],
            conditions=conditions,
            training=self.training,
            goodput=self.goodput,
            recoveries=Recoveries(count=len(restarts), last=newest) if restarts else None,
        )

    def _predicted(self) -> dict[str, Any] | None:
        """An iteration under the plan in effect at the end as predicted from what was measured, and
        the median of the newest ones as they were."""
        if self.outlook is None:
            return None
        version = self.outlook.running.version
        ran = [i.seconds for i in self.iterations if i.plan_version == version][-COMPARED:]
        seconds, reason = None, None
        try:
            seconds = self.outlook.seconds
        except InputError as error:
            reason = str(error)
        measured = median(ran) if ran else None
        found = {"plan_version": version, "seconds": seconds, "measured": measured}
        return found | ({"reason": reason} if reason else {})


COMPARED = 20
"""Newest iterations that a prediction is compared with."""


def write_report(folder: OutFolder, run: RunRecord) -> None:
    """Write ``report.json`` atomically, also where somebody has removed its folder."""
    folder.root.mkdir(parents=True, exist_ok=True)
    content = run.content(read_faults(folder.trace), read_splits(folder.trace))
    write_json(folder.report, content, indent=1)


def _without_values(job: PipeMorphJob) -> dict[str, Any]:
    """The job as JSON data. Values of variables of its pods, which may be secrets, are left out:
    reports are passed on."""
    found = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    pod = (found["spec"].get("template") or {}).get("spec") or {}
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in pod.get(kind) or []:
            for variable in container.get("env") or []:
                if "value" in variable:
                    variable["value"] = LEFT_OUT
    return found


def _moment(seconds: float) -> str:
    return format_time(datetime.fromtimestamp(seconds, UTC))


def _versions() -> dict[str, str | None]:
    """Versions of PipeMorph, Python and torch; reads torch's without importing it."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = None
    return {
        "pipemorph": __version__,
        "python": platform.python_version(),
        "torch": torch,
        "kernel": platform.release(),
    }
