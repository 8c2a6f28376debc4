"""Restart policy: what follows a generation that is over, with which replicas and layout, and its
record in status. Pure.

The :class:`RecoveryPolicy` decides if another generation follows, from the reports of all
launchers: the exits of the ranks, and the iterations that they had finished.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

from pipemorph.control.history.progress import GenerationProgress
from pipemorph.control.restart.exit_analysis import ExitAnalysis
from pipemorph.control.restart.layout_transition import LayoutTransition, confirm_layout
from pipemorph.control.restart.pod_tracker import PodTracker
from pipemorph.protocol import PodFailure, PodReport
from pipemorph.protocol.generation_messages import LONGEST_LINE
from pipemorph.spec.layout import RankLayout
from pipemorph.spec.running_subset import RunningSubset
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.status_recoveries import (
    MAX_RECOVERIES_KEPT,
    MAX_REPLACED_KEPT,
    Recoveries,
    RecoveryRecord,
)


class RecoveryStep(StrEnum):
    """Step of recovery after a failure."""

    GENERATION = "generation"
    """New ranks continue with the state in memory, or the newest checkpoint, and with the plan in
    force; also if another pod has taken the place of a lost one."""
    ATTEMPT = "attempt"
    """New pods begin with the plan of the spec and without state in memory, since either may have
    caused the failure."""
    NONE = "none"


@dataclass
class RecoveryPolicy:
    """Counts failures and chooses the step of recovery. ``max_restarts``:
    ``spec.failurePolicy.maxRestarts``; with 0 a failure ends the job.

    A failure after more iterations than ever before is not counted: the number of iterations bounds
    the number of such failures.
    """

    max_restarts: int
    counted_failures: int = 0
    most_finished: int = 0
    """Most iterations that were finished at any failure."""
    failures_without_progress: int = 0
    """Number of failures since."""
    last_error: str | None = None
    """Error of the last failure."""

    def choose_step(
        self, failure: PodFailure, done: int, *, replaced: bool = False, counted: bool = True
    ) -> tuple[RecoveryStep, str]:
        """Choose what follows a failure, and the reason. ``done``: iterations that a rank has
        finished, by the ranks' own counts, since reports arrive late or never. ``replaced``: a lost
        pod was replaced. ``counted``: False if the program has no part in the failure."""
        if not failure.retry or self.max_restarts == 0:
            return RecoveryStep.NONE, ""
        progress = done > self.most_finished
        same = not progress and failure.error is not None and failure.error == self.last_error
        self.most_finished, self.last_error = max(self.most_finished, done), failure.error
        if same:
            return (
                RecoveryStep.NONE,
                f"not started again: iteration {done} failed twice, with the same error",
            )
        if progress:
            self.failures_without_progress = 0
        if progress or not counted:
            return RecoveryStep.GENERATION, ""
        self.failures_without_progress += 1
        self.counted_failures += 1
        if self.counted_failures > self.max_restarts:
            return RecoveryStep.NONE, (
                f"not started again: {self.counted_failures} times no iteration was finished "
                f"before a failure, and spec.failurePolicy.maxRestarts is {self.max_restarts}"
            )
        count = f"restart {self.counted_failures} of at most {self.max_restarts}"
        # A failure at the start may repeat in each of these pods, but not in new ones.
        if self.failures_without_progress > 1 or (done == 0 and not replaced):
            return RecoveryStep.ATTEMPT, count
        return RecoveryStep.GENERATION, count


class ReadyPods(NamedTuple):
    """Pods that can begin. ``missing``: pods that had ranks and are no longer awaited; ``running``:
    replicas that run, and their pods; None: all run."""

    missing: frozenset[int]
    running: RunningSubset | None


@dataclass(frozen=True)
class StartGeneration:
    """Next generation: recoveries for status, and its record, the last one there."""

    saved: Recoveries
    record: RecoveryRecord
    start_reason: str = ""
    """Reason of a start after a failure."""


@dataclass(frozen=True)
class EndAttempt:
    """End of the attempt: there is no next generation. ``verdict``, ``why``, ``cause``: as in
    :class:`pipemorph.protocol.GenerationState`."""

    saved: Recoveries
    verdict: str
    why: str
    cause: int | None


class RestartPolicy:
    """Restart policy of one job, with the job's ``presence``, ``layouts`` and ``progress``.

    ``cut``: parallelism of a job in which pods may have no ranks in a generation; None: all have.
    ``most``: ``failurePolicy.maxRestarts``; ``restarts``: attempts that count against it, too.
    ``patience``: seconds that replicas which may train without others wait for a replacement of a
    lost pod. Times: wall clock, seconds.
    """

    def __init__(
        self,
        presence: PodTracker,
        layouts: LayoutTransition,
        progress: GenerationProgress,
        cut: Parallelism | None,
        *,
        max_restarts: int,
        earlier_restarts: int,
        patience: float,
    ) -> None:
        self._pod_tracker, self._layout_transition, self._progress = presence, layouts, progress
        self._parallelism, self.most, self.restarts, self.patience = (
            cut,
            max_restarts,
            earlier_restarts,
            patience,
        )

    # --- pods that can begin ------------------------------------------------------------------

    def find_ready_pods(
        self, ending: ExitAnalysis, excluded_replicas: Collection[int], now: float
    ) -> ReadyPods | None:
        """Find the pods that can begin; None while another one is awaited. ``excluded_replicas``:
        replicas that have not run."""
        presence = self._pod_tracker
        if self._parallelism is None:
            all_gone = len(presence.idle_pods) == presence.pod_count
            return ReadyPods(frozenset(), None) if all_gone else None
        missing = presence.list_missing()
        unknown = missing - presence.lost_pods.keys()
        if unknown and now < presence.get_silence_deadline(ending.ended_at):
            return None
        running = presence.select_running(presence.list_present(now))
        if missing and now < self._get_wait_deadline(missing, running, ending, excluded_replicas):
            return None
        if len(running.active_replicas) < (self._parallelism.min_replicas or 1):
            return None
        if running.excluded_replicas and now < presence.get_settling_time():
            return None
        return ReadyPods(missing, running)

    def next_deadline(
        self, ending: ExitAnalysis, excluded_replicas: Collection[int], now: float
    ) -> float | None:
        """Time at which pods may be able to begin without another report; None: never."""
        presence = self._pod_tracker
        missing = presence.list_missing()
        silent = presence.get_silence_deadline(ending.ended_at)
        if missing - presence.lost_pods.keys() and ending.decided_at < silent:
            return silent
        running = presence.select_running(presence.list_present(now))
        at = self._get_wait_deadline(missing, running, ending, excluded_replicas)
        if running.excluded_replicas:
            at = max(at, presence.get_settling_time())
        return at if ending.decided_at < at < inf else None

    def _get_wait_deadline(
        self,
        missing: frozenset[int],
        running: RunningSubset,
        ending: ExitAnalysis,
        excluded_replicas: Collection[int],
    ) -> float:
        """Time from which none of these pods is awaited. ``running``: the subset without them."""
        whole = set(running.excluded_replicas) <= set(excluded_replicas)
        replacement_seconds = 0.0 if whole else self.patience
        return self._pod_tracker.get_wait_deadline(missing, ending.ended_at, replacement_seconds)

    # --- what begins --------------------------------------------------------------------------

    def decide_next(
        self, saved: Recoveries, ending: ExitAnalysis, ready: ReadyPods
    ) -> StartGeneration | EndAttempt:
        """Decide what follows a generation that is over. ``saved``: its recoveries in status."""
        changes = self._parallelism is not None or self._layout_transition.ranks_departed
        if changes and not ending.losses and not ready.missing:
            # No rank has failed: all departed on request.
            return self._start_without_failure(saved, ending, ready)
        return self._recover_from_failure(saved, ending, ready)

    def _start_without_failure(
        self, saved: Recoveries, ending: ExitAnalysis, ready: ReadyPods
    ) -> StartGeneration:
        """Start a generation with other replicas or another layout, without a failure."""
        running, layout = ready.running, self._layout_transition.requested_layout
        excluded_replicas = running.excluded_replicas if running is not None else ()
        back = ", ".join(
            str(each) for each in saved.excluded_replicas if each not in excluded_replicas
        )
        cause = f"all pods of replica {back} are present again" if back else "the ranks left"
        if layout:
            cause = self._layout_transition.describe_change(saved.layout)[:LONGEST_LINE]
        record = RecoveryRecord(
            attempt=saved.attempt,
            generation=saved.generation + 1,
            lost_at=_format_timestamp(ending.ended_at),
            cause=cause,
            # All ranks have left at the same iteration.
            iterations_done=self._layout_transition.iterations_reached
            or self._progress.iterations_done,
            **(self._layout_transition.list_differences(saved.layout, layout) if layout else {}),
            promised=self._layout_transition.promised_gain,
            **self._describe_pods(running),
        )
        return self._build_start(self._layout_transition.put_on_trial(saved), record, running)

    def _recover_from_failure(
        self, before: Recoveries, ending: ExitAnalysis, ready: ReadyPods
    ) -> StartGeneration | EndAttempt:
        """Start a generation after a failure, or end the attempt."""
        presence, missing = self._pod_tracker, ready.missing
        ending.blame_missing_pods(missing, presence.lost_pods)
        cause_pod, cause = ending.find_cause()
        if self._layout_transition.may_have_counted(before):
            before = confirm_layout(before)
        back = before.layout_before
        if back is not None:
            # The layout may be the cause.
            cause = cause.model_copy(update={"retry": True})
            before = self._layout_transition.refuse_current(before)
        ladder = RecoveryPolicy(
            self.most,
            self.restarts + before.counted,
            before.finished,
            before.idle,
            # Another ingest may have received the iterations finished meanwhile: the same error is
            # no proof that it came at the same iteration.
            before.error if self._progress.finished_known else None,
        )
        rung, why = ladder.choose_step(
            cause,
            self._progress.iterations_finished,
            replaced=bool(presence.replaced_pods or missing),
            counted=cause_pod not in presence.uncounted_pods,
        )
        update: dict[str, Any] = {
            "finished": ladder.most_finished, "idle": ladder.failures_without_progress,
            "error": ladder.last_error,
        }  # fmt: skip
        if rung is not RecoveryStep.GENERATION:
            # Without remaining restarts, the end of the attempt is the end of the job.
            twice = cause.retry and self.restarts + before.counted < self.most
            verdict = "none" if rung is RecoveryStep.NONE and twice else "attempt"
            # The operator counts an attempt when it begins it.
            return EndAttempt(before.model_copy(update=update), verdict, why, cause_pod)
        presence.uncounted_pods -= presence.replaced_pods | missing
        update |= {"counted": ladder.counted_failures - self.restarts, "count": before.count + 1}
        after, changes = before, {}
        if back is not None:
            after = before.with_layout(back, None)
            changes = self._layout_transition.list_differences(before.layout, back)
        record = RecoveryRecord(
            attempt=before.attempt,
            generation=before.generation + 1,
            lost_at=_format_timestamp(ending.lost_at),
            cause=ending.describe_cause(cause),
            pod=cause_pod,
            rank=cause.rank,
            iterations_done=self._progress.iterations_done,
            **changes,
            **self._describe_pods(ready.running),
        )
        begins = self._build_start(after.model_copy(update=update), record, ready.running)
        return replace(begins, start_reason=why)

    def adopt_generation(
        self, saved: Recoveries, generation: int, report: PodReport | None
    ) -> Recoveries | None:
        """Recoveries for status of a generation that another ingest began, and could not write,
        from a launcher's ``report``; None if a needed report is missing, or its layout does not fit
        the job."""
        update: dict[str, Any] = {"generation": generation}
        if report is None and (self._layout_transition.may_change or self._parallelism is not None):
            return None
        if report is not None and self._layout_transition.may_change:
            before = report.layout_before
            if not all(
                map(self._layout_transition.fits_job, (report.layout, before or RankLayout()))
            ):
                return None
            now = self._layout_transition.without_initial_numbers(report.layout)
            saved = saved.with_layout(
                now,
                None if before is None else self._layout_transition.without_initial_numbers(before),
            )
        if report is not None and self._parallelism is not None:
            update["excluded_replicas"] = [
                each for each in report.excluded_replicas if each < self._parallelism.replicas
            ]
        return saved.model_copy(update=update)

    def _describe_pods(self, running: RunningSubset | None) -> dict[str, Any]:
        """Fields of a record about the pods that run."""
        found: dict[str, Any] = {
            "replaced": sorted(self._pod_tracker.replaced_pods)[:MAX_REPLACED_KEPT]
        }
        if running is not None:
            found["replicas"] = len(running.active_replicas)
        return found

    @staticmethod
    def _build_start(
        saved: Recoveries, record: RecoveryRecord, running: RunningSubset | None
    ) -> StartGeneration:
        update: dict[str, Any] = {
            "generation": record.generation,
            "last": [*saved.last, record][-MAX_RECOVERIES_KEPT:],
        }
        if running is not None:
            update["excluded_replicas"] = list(running.excluded_replicas)
        return StartGeneration(saved.model_copy(update=update), record)


def _format_timestamp(seconds: float) -> str:
    when = datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
