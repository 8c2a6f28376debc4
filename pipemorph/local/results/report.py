"""Record of a run: attempts, recoveries and results; writes it as ``report.json``.

``pipemorph run`` and ``pipemorph serve`` fill the record while the ranks train. The last line of a
run, and the status that a cluster would have, are made of it, too.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from statistics import median
from typing import Any

from pipemorph import __version__
from pipemorph.control.decide.forecast import Outlook
from pipemorph.control.history.goodput import GoodputMeter
from pipemorph.control.history.job_history import sum_saved_time
from pipemorph.diagnose.formats.rank_traces import read_faults, read_splits
from pipemorph.errors import InputError
from pipemorph.local.processes.supervision import AttemptOutcome, AttemptResult
from pipemorph.local.results.journal import RunView
from pipemorph.local.results.result_folder import ResultFolder, write_json
from pipemorph.protocol import AdaptationRecord, IterationSample, ResumedFrom
from pipemorph.spec import job_status
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import (
    MAX_ATTEMPTS_KEPT,
    Condition,
    JobState,
    JobStatus,
    TrainingStatus,
)
from pipemorph.spec.sections.schedule import ONE_ORDER_IN_LOCKSTEP
from pipemorph.spec.status_recoveries import MAX_RECOVERIES_KEPT, Recoveries, RecoveryRecord
from pipemorph.views.explanation.explained_job import SlowPeriod
from pipemorph.views.explanation.job_explanation import LEAST_SPREAD, summarize_spreads
from pipemorph.views.live_page.page_document import RecoveryEntry
from pipemorph.views.status.conditions import MESSAGE_LENGTH, format_time, update_condition

STATES: dict[AttemptOutcome, JobState] = {
    AttemptOutcome.COMPLETED: "Complete",
    AttemptOutcome.INTERRUPTED: "Suspended",
}
"""State of a run by its end; Failed otherwise."""
REASONS = {
    AttemptOutcome.COMPLETED: "AllRanksFinished",
    AttemptOutcome.FAILED: "RankFailed",
    AttemptOutcome.DEADLINE: "DeadlineExceeded",
    AttemptOutcome.INTERRUPTED: "Interrupted",
    AttemptOutcome.MOVED: "LayoutChanged",
}
"""Reasons of conditions, for programs."""
REDACTED_VALUE = "(not in the report)"
"""Value of each variable of the job's pods in a report."""
SHOWN_SECONDS = 0.1
"""Least time, saved or lost by adaptations, that the last line of a run shows."""


@dataclass
class RunAttempt:
    """Attempt of a run. Times are wall clock, seconds since the Unix epoch."""

    number: int
    started_at: float
    ended_at: float | None = None
    result: AttemptResult | None = None

    def record_result(self, ending: AttemptResult, now: float) -> AttemptResult:
        """Record how the attempt ended; returns ``ending``."""
        self.result, self.ended_at = ending, now
        return ending

    def to_status(self) -> job_status.AttemptStatus:
        assert self.result is not None and self.ended_at is not None
        return job_status.AttemptStatus(
            attempt=self.number, started_at=_format_moment(self.started_at),
            ended_at=_format_moment(self.ended_at), reason=REASONS[self.result.outcome],
            message=self.result.reason[:MESSAGE_LENGTH],
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "end": self.result.outcome.value if self.result else None,
            "reason": self.result.reason if self.result else None,
            "details": list(self.result.details) if self.result else [],
        }


@dataclass
class RunRecovery:
    """Restart of the ranks after a failure. Times are wall clock, seconds since the epoch."""

    result: AttemptResult
    """How the previous ranks ended."""
    attempt: int
    generation: int
    """Number of the new generation within its attempt; 0 is the first."""
    recovery_step: str
    iterations_done: int
    """Iterations that were finished before the failure."""
    resumed_iteration: int | None = None
    """The first iteration that was finished afterwards; None without one."""
    seconds: float | None = None
    """Time from the failure to the end of that iteration."""
    resumed_from: ResumedFrom | None = None
    """State with which the ranks began; None if they did not report it."""

    @property
    def repeated(self) -> int | None:
        """Iterations that had been finished and were run again."""
        return (
            None
            if self.resumed_iteration is None
            else max(0, self.iterations_done - self.resumed_iteration)
        )

    def format_line(self) -> str:
        """``went on with iteration 17 after 2.31 s; no iteration was repeated``"""
        what = "no iteration was"
        if count := self.repeated:
            what = "1 iteration was" if count == 1 else f"{count} iterations were"
        went = f"went on with iteration {self.resumed_iteration} after {self.seconds:.2f} s"
        went += f", {self.resumed_from}" if self.resumed_from else ""
        return f"{went}; {what} repeated"

    def to_status(self) -> RecoveryRecord:
        lost = self.result.position
        return RecoveryRecord(
            attempt=self.attempt, generation=self.generation,
            lost_at=_format_moment(self.result.at), cause=self.result.reason[:MESSAGE_LENGTH],
            rank=lost.rank if lost else None, iterations_done=self.iterations_done,
            went_on_with=self.resumed_iteration, repeated=self.repeated, seconds=self.seconds,
            state=self.resumed_from.rung if self.resumed_from else None,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        lost = self.result.position
        return {
            "rank": lost.rank if lost else None,
            "coordinate": str(lost) if lost else None,
            "cause": self.result.reason,
            "rung": self.recovery_step,
            "attempt": self.attempt,
            "generation": self.generation,
            "lost_at": self.result.at,
            "iterations_done": self.iterations_done,
            "went_on_with": self.resumed_iteration,
            "repeated": self.repeated,
            "seconds": self.seconds,
            "state": self.resumed_from.rung if self.resumed_from else None,
            "state_reason": (self.resumed_from.why or None) if self.resumed_from else None,
        }


@dataclass
class RunRecord:
    """Record of a run: its attempts, and its results after the end."""

    job: PipeMorphJob
    started_at: float
    attempts: list[RunAttempt] = field(default_factory=list)
    result: AttemptResult = field(
        default_factory=lambda: AttemptResult(AttemptOutcome.FAILED, "not started")
    )
    iterations: list[IterationSample] = field(default_factory=list)
    adaptations: list[AdaptationRecord] = field(default_factory=list)
    last_view: RunView = field(default_factory=RunView)
    """State of the run when it ended."""
    slow_links: list[SlowPeriod] = field(default_factory=list)
    """Times in which links were slow, also if the plan was not changed."""
    recoveries: list[RunRecovery] = field(default_factory=list)
    first_iteration: int | None = None
    """Iteration with which the first ranks of the run began; None: that of the first sample."""
    goodput_meter: GoodputMeter = field(default_factory=GoodputMeter)
    adapting: dict[str, Any] | None = None
    """Prediction of what adapting would give an observed job; None without one."""
    relayouts: list[dict[str, Any]] = field(default_factory=list)
    """Changes of the ranks' places and layers, for the report."""
    training: TrainingStatus | None = None
    conditions: list[Condition] = field(default_factory=list)
    """Conditions of the training at the end; empty if the control loop did not answer."""
    outlook: Outlook | None = None
    """Input for the prediction of the plan in effect at the end; None if there is none."""

    @property
    def goodput(self) -> float | None:
        """Goodput of the run from its start to its end, see
        :mod:`pipemorph.control.history.goodput`."""
        ended_at = self.attempts[-1].ended_at if self.attempts else None
        return (
            None
            if ended_at is None
            else self.goodput_meter.compute_goodput(ended_at - self.started_at)
        )

    def list_recovery_entries(self) -> list[RecoveryEntry]:
        """Recoveries so far, for the page."""
        return [RecoveryEntry.model_validate(each.to_json()) for each in self.recoveries]

    def begin_attempt(self, now: float) -> RunAttempt:
        self.attempts.append(RunAttempt(len(self.attempts), now))
        return self.attempts[-1]

    def record_results(
        self,
        ending: AttemptResult,
        iterations: list[IterationSample],
        adaptations: list[AdaptationRecord],
        last: RunView | None = None,
        *,
        slow: Sequence[SlowPeriod] = (),
        useful: GoodputMeter | None = None,
    ) -> None:
        """Record the results of the run."""
        self.goodput_meter = useful or GoodputMeter()
        self.result, self.iterations, self.adaptations = ending, iterations, adaptations
        self.last_view, self.slow_links = last or RunView(), list(slow)

    @property
    def completed(self) -> bool:
        return self.result.outcome is AttemptOutcome.COMPLETED

    @property
    def emulated(self) -> bool:
        return self.job.spec.emulation is not None

    def format_summary(self) -> str:
        """``completed: 40 of 40 iterations (resumed at 12), median 1.234 s, 2 adaptations``"""
        if self.job.spec.is_observed:
            return self._summarize_observation()
        wanted = self.job.spec.trainer.iterations
        began, last = self.first_iteration or 0, 0
        if self.iterations:
            last = self.iterations[-1].index + 1
            began = (
                self.iterations[0].index if self.first_iteration is None else self.first_iteration
            )
        done = wanted if self.completed else last
        known = sum(each.index >= began for each in self.iterations)
        notes = [f"resumed at {began}"] if began else []
        if done > began + known:
            notes += [f"{done - began - known} not reported" if known else "none reported"]
        resumed = f" ({', '.join(notes)})" if notes else ""
        parts = [f"{done} of {wanted} iterations{resumed}"]
        if self.iterations:
            parts.append(f"median {median(i.seconds for i in self.iterations):.3f} s")
        saving = ""
        found = sum_saved_time(self.adaptations)
        if abs(found.seconds) >= SHOWN_SECONDS:
            verb = "saved" if found.seconds > 0 else "cost"
            saving = f" that {verb} {abs(found.seconds):.1f} s (± {found.error_seconds:.1f} s)"
        changes = len(self.adaptations)
        parts.append(f"{changes} {'adaptation' if changes == 1 else 'adaptations'}{saving}")
        if self.recoveries:
            count, goodput = len(self.recoveries), self.goodput
            parts.append(f"{count} {'recovery' if count == 1 else 'recoveries'}")
            parts += [] if goodput is None else [f"goodput {goodput:.0%}"]
        emulated = " (EMULATED)" if self.emulated else ""
        return f"{self.result.outcome.value}{emulated}: {', '.join(parts)}"

    def _summarize_observation(self) -> str:
        """``completed: observed 38 steps, 1 to 39 (1 was not reported), median 0.310 s``"""
        text = f"{self.result.outcome.value}: observed {len(self.iterations)} steps"
        if self.iterations:
            first, last = self.iterations[0].index, self.iterations[-1].index
            missing = last - first + 1 - len(self.iterations)
            text += f", {first} to {last}" + (f" ({missing} not reported)" if missing else "")
            text += f", median {median(i.seconds for i in self.iterations):.3f} s"
        return text

    def build_report(self, faults: list[Any], splits: list[Any]) -> dict[str, Any]:
        """The report as JSON data."""
        return _redact_variables(self.job) | {
            "status": self.to_status().model_dump(mode="json", by_alias=True, exclude_none=True),
            "completed": self.completed,
            "end": self.result.outcome.value,
            "reason": self.result.reason or None,
            "emulated": self.emulated,
            "started_at": self.started_at,
            "ended_at": self.attempts[-1].ended_at if self.attempts else None,
            "iterations": [i.model_dump(mode="json") for i in self.iterations],
            "adaptations": [a.model_dump(mode="json") for a in self.adaptations],
            "links": {"slow": [each.model_dump() for each in self.slow_links]},
            "events": [event.to_report() for event in self.last_view.events],
            "reductions": [each.to_record() for each in self.last_view.reductions],
            "split": splits,
            "faults": faults,
            "recoveries": [recovery.to_json() for recovery in self.recoveries],
            "relayouts": self.relayouts,
            "predicted": self._compare_prediction(),
            "keep_reason": self.last_view.keep_reason,
            "adapting": self.adapting,
            "work": self._measure_work(),
            "dispatch": self._describe_dispatch(),
            "saved": sum_saved_time(self.adaptations).to_report(
                self.job.spec.parallelism.mesh.world_size
            ),
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "versions": _read_versions(),
        }

    def to_status(self) -> JobStatus:
        """Status of the job as on a cluster."""
        ended = [each for each in self.attempts if each.result is not None]
        ended_at = ended[-1].ended_at if ended else None
        state = STATES.get(self.result.outcome, "Failed")
        conditions = update_condition(
            self.conditions, state, "True", REASONS[self.result.outcome], self.result.reason,
            generation=None, now=datetime.fromtimestamp(ended_at or self.started_at, UTC),
        )  # fmt: skip
        restarts = [each for each in self.recoveries if each.generation > 0]
        newest = [each.to_status() for each in restarts[-MAX_RECOVERIES_KEPT:]]
        return JobStatus(
            state=state,
            start_time=_format_moment(self.started_at),
            completion_time=None if ended_at is None else _format_moment(ended_at),
            restarts=max(0, len(self.attempts) - 1),
            attempts=[each.to_status() for each in ended[:-1][-MAX_ATTEMPTS_KEPT:]],
            conditions=conditions,
            training=self.training,
            goodput=self.goodput,
            recoveries=Recoveries(count=len(restarts), last=newest) if restarts else None,
        )

    def _compare_prediction(self) -> dict[str, Any] | None:
        """Predicted time of an iteration under the last plan, and the median of the newest measured
        ones, in seconds."""
        if self.outlook is None:
            return None
        version = self.outlook.running_plan.version
        ran = [i.seconds for i in self.iterations if i.plan_version == version][-COMPARED:]
        seconds, reason = None, None
        try:
            seconds = self.outlook.seconds
        except InputError as error:
            reason = str(error)
        measured = median(ran) if ran else None
        found = {"plan_version": version, "seconds": seconds, "measured": measured}
        return found | ({"reason": reason} if reason else {})

    def _describe_dispatch(self) -> dict[str, str | None] | None:
        """Dispatch of the plan at the end, and why only static dispatch was possible; None if the
        plan is unknown."""
        if self.outlook is None:
            return None
        spec, reason = self.job.spec, None
        if spec.parallelism.mesh.lockstep_dimensions and spec.schedule.dispatch == "auto":
            reason = ONE_ORDER_IN_LOCKSTEP
        return {"kind": self.outlook.running_plan.dispatch.value, "reason": reason}

    def _measure_work(self) -> dict[str, float | None] | None:
        """Spread of the microbatches' work, what costs do not explain of it, and the predicted gain
        of an order by their costs; None if the spread is unknown."""
        spread, unexplained = summarize_spreads(self.iterations)
        if spread is None:
            return None
        gain = None
        if self.outlook is not None and spread >= LEAST_SPREAD:
            with suppress(InputError):
                gain = self.outlook.predict_reordering_gain(spread)
        return {"spread": spread, "unexplained": unexplained, "reordering_gain": gain}


COMPARED = 20
"""Number of newest iterations that a prediction is compared with."""


def write_report(folder: ResultFolder, run: RunRecord) -> None:
    """Write ``report.json`` atomically, in place of ``status.json``. The folder is made again if it
    was removed."""
    folder.root.mkdir(parents=True, exist_ok=True)
    content = run.build_report(read_faults(folder.trace), read_splits(folder.trace))
    write_json(folder.report, content, indent=1)
    folder.status.unlink(missing_ok=True)


def _redact_variables(job: PipeMorphJob) -> dict[str, Any]:
    """The job as JSON data without values of its pods' variables, which may be secrets."""
    found = job.model_dump(mode="json", by_alias=True, exclude_none=True)
    pod = (found["spec"].get("template") or {}).get("spec") or {}
    for kind in ("containers", "initContainers", "ephemeralContainers"):
        for container in pod.get(kind) or []:
            for variable in container.get("env") or []:
                if "value" in variable:
                    variable["value"] = REDACTED_VALUE
    return found


def _format_moment(seconds: float) -> str:
    return format_time(datetime.fromtimestamp(seconds, UTC))


def _read_versions() -> dict[str, str | None]:
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
