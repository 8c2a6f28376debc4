"""Generations of a job's ranks, whose pods outlive them: which one runs, and what follows it.

Pure: launchers' reports and times in, the newest generation out. A generation is over as soon as
one launcher reports it, and the next one begins when the ranks of all pods are gone; those of a
lost pod, when the launcher of another pod has joined in its place. :mod:`.restart.restart_policy`
decides what begins, from the exits of the ranks (:mod:`.restart.exit_analysis`) and their progress
(:mod:`.history.progress`). :mod:`.restart.pod_tracker` tracks the pods.

With ``parallelism.minReplicas`` the next generation does not wait long for lost pods: it begins
with the complete replicas. When another replica is complete again, the ranks are requested to leave
between two iterations (:mod:`.restart.drain_request`), and a generation with that replica begins.

The host's decision requests another layout (:meth:`JobGenerations.request_layout`): the ranks leave
between two iterations, and the next generation has the new layout, on trial
(:mod:`.restart.layout_transition`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import inf
from typing import Any

from pipemorph.control.history.progress import GenerationProgress
from pipemorph.control.job_state.reports import ReportMismatch, WrongAttempt
from pipemorph.control.restart.drain_request import LEAVE_SECONDS, DrainRequest
from pipemorph.control.restart.exit_analysis import ExitAnalysis
from pipemorph.control.restart.layout_transition import (
    LayoutTransition,
    confirm_layout,
    with_measured_gain,
)
from pipemorph.control.restart.pod_tracker import PodTracker
from pipemorph.control.restart.restart_policy import EndAttempt, RestartPolicy, StartGeneration
from pipemorph.exits import LAYERS_FIXED_PREFIX, TRIAL_ITERATIONS
from pipemorph.protocol import GenerationState, LinkHealthReport, PodReport
from pipemorph.spec.layout import RankLayout
from pipemorph.spec.running_subset import RunningSubset
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.status_recoveries import PodReplacement, Recoveries

CHECK_SECONDS = 1.0
"""Least seconds between two checks for polls of waiting pods, which may be many a second."""


class JobGenerations:
    """Generations of one job, which has ``pods`` pods.

    ``saved``: recoveries in status; None if no generation has followed a failure. ``done``:
    iterations that are known to be finished. ``cut``: parallelism of the job, which says where the
    ranks of a replica run and how many replicas may train without the others; None: all pods must
    run. ``most``, ``restarts``, ``patience``: as for :class:`RestartPolicy`. ``relayout``:
    ``adaptation.relayout``.
    """

    def __init__(
        self,
        pods: int,
        most: int,
        attempt: int = 0,
        saved: Recoveries | None = None,
        *,
        restarts: int = 0,
        done: int = 0,
        cut: Parallelism | None = None,
        patience: float = 0.0,
        relayout: bool = False,
    ) -> None:
        self.pod_count = pods
        self._parallelism = cut if cut is not None and cut.min_replicas is not None else None
        """None: the same pods run in every generation."""
        self.saved = saved or Recoveries()
        """State that must be in status, for another ingest, before launchers receive it."""
        self.pod_tracker = PodTracker(pods)
        # Pods with another layout still change it if `relayout` was switched off since.
        moved = bool(self.saved.layout) or self.saved.layout_before is not None
        self.layout_transition = LayoutTransition(
            cut,
            move=relayout or moved,
            refused=self.saved.layouts_refused,
            fixed=self.saved.layers_fixed or "",
        )
        self.relayout = relayout
        """True if the layout may change in the next attempt: pods read it only at their start."""
        self.restart_reason = ""
        """Reason of the last start after a failure."""
        is_new = saved is None or saved.attempt != attempt
        self.progress = GenerationProgress(self.saved, done, known=is_new)
        self.restart_policy = RestartPolicy(
            self.pod_tracker,
            self.layout_transition,
            self.progress,
            self._parallelism,
            max_restarts=most,
            earlier_restarts=restarts,
            patience=patience,
        )
        self._drain_request = DrainRequest(self.layout_transition)
        self._verdict: GenerationState | None = None
        self._checked_at = -inf
        self._reset_generation()
        self.attempt = attempt
        if self.saved.attempt != attempt:
            self.begin_attempt(attempt)
        elif self.saved.last and self.saved.last[-1].seconds is None:
            self.progress.follow_start(self.saved.last[-1])

    def _reset_generation(self, waiting: Collection[int] = ()) -> None:
        """Reset the state of a generation. ``waiting``: pods that wait for the next generation if
        they have no ranks in this one."""
        running = None
        if self._parallelism is not None:
            running = RunningSubset(self._parallelism, self.excluded_replicas)
        self.pod_tracker.begin_generation(running, waiting)
        self._exit_analysis = ExitAnalysis()
        self._completed_pods: set[int] = set()
        self._drain_request.begin_generation()
        self.layout_transition.begin_generation()
        self.progress.begin_generation()

    def begin_attempt(self, attempt: int) -> None:
        """Begin an attempt, in which all pods are new."""
        self.pod_tracker.begin_attempt()
        self.layout_transition.begin_attempt(move=self.relayout)
        self.progress.begin_attempt()
        self._checked_at = -inf
        self.attempt, self._verdict = attempt, None
        update: dict[str, Any] = {"attempt": attempt, "generation": 0, "completed": False}
        saved = self.saved.with_layout(RankLayout(), None)
        self.saved = saved.model_copy(update=update | {"excluded_replicas": []})
        self._reset_generation()

    @property
    def excluded_replicas(self) -> tuple[int, ...]:
        """Replicas that do not run in this generation."""
        return tuple(self.saved.excluded_replicas)

    @property
    def layout(self) -> RankLayout:
        """Layout of this generation."""
        return self.saved.layout

    @property
    def layout_before(self) -> RankLayout | None:
        """Layout that a failure returns to while :attr:`layout` is on trial; None: it counts."""
        return self.saved.layout_before

    @property
    def status_recoveries(self) -> Recoveries | None:
        """Recoveries for status; None if no rank has ever failed."""
        any_saved = self.saved.count or self.saved.last or self.saved.layers_fixed
        return self.saved if any_saved else None

    @property
    def running_share(self) -> float:
        """Fraction of the replicas that run in this generation."""
        return (
            1.0
            if self._parallelism is None
            else 1.0 - len(self.excluded_replicas) / self._parallelism.replicas
        )

    @property
    def stay_reason(self) -> str:
        """Reason why the ranks have not left for a replica or layout; empty if they could."""
        return self._drain_request.stay_reason

    @property
    def generation_state(self) -> GenerationState:
        """State for launchers: the generation, its end, and requests to its ranks."""
        if self._verdict is not None:
            return self._verdict
        awaited = filter(self.pod_tracker.has_ranks, self.pod_tracker.awaited_since)
        return GenerationState(
            attempt=self.attempt,
            generation=self.saved.generation,
            over=bool(self._exit_analysis),
            reason=self._exit_analysis.why,
            hang=self._exit_analysis.ranks_hang,
            awaits=min(awaited, default=None) if self._exit_analysis else None,
            excluded_replicas=self.excluded_replicas,
            leave=self._drain_request.is_requested and not self._exit_analysis,
            leave_for=RankLayout()
            if self._exit_analysis
            else self.layout_transition.requested_layout,
            layout=self.layout,
            layout_before=self.layout_before,
            verdict="completed" if self.saved.completed else "",
        )

    def request_layout(
        self,
        layout: RankLayout,
        now: float,
        *,
        promised: float | None = None,
        undoes: bool = False,
    ) -> bool:
        """Request that the ranks leave at the end of an iteration, and the next generation begin
        with ``layout``. :meth:`pipemorph.ingest.RestartHandler.request_layout` sends it to
        launchers. ``now``: wall clock, seconds; ``promised``: expected saving, as a fraction of an
        iteration, for the record; ``undoes``: the layout in force missed that, and is not tried
        again. The request is withdrawn if no rank has left after :data:`LEAVE_SECONDS`.

        Returns False, and changes nothing, while ranks restart or are requested to leave, a pod is
        lost, a layout is on trial, or :meth:`LayoutTransition.allows_change` does not allow it."""
        ends = (
            self._verdict is not None
            or self._exit_analysis
            or self._completed_pods
            or self.saved.completed
        )
        busy = (
            self._drain_request.is_requested
            or self.layout_before is not None
            or self.pod_tracker.awaited_since
        )
        if ends or busy or not self.layout_transition.allows_change(layout, self.layout):
            return False
        self._drain_request.request_for_layout(layout, now, promised, undoes=undoes)
        return True

    def may_restart(self, retry: bool) -> bool:
        """True if another attempt may follow one that has ended here."""
        used = self.restart_policy.restarts + self.saved.counted
        return (
            retry
            and self._verdict is not None
            and self._verdict.verdict == "attempt"
            and (used < self.restart_policy.most)
        )

    def record_begun_generation(self, generation: int, report: PodReport | None = None) -> bool:
        """Record that a launcher runs ``generation``. Returns True if that is new: another ingest
        began it, and could not write status. ``report``: of the launcher, with the layout and
        replicas that run; None: unknown, which counts only if these cannot change."""
        if generation <= self.saved.generation or self._verdict is not None:
            return False
        saved = self.restart_policy.adopt_generation(self.saved, generation, report)
        if saved is None:
            return False
        self.saved = saved
        self._reset_generation()
        return True

    def record_poll(self, pod: int, uid: str, now: float) -> None:
        """Record that the launcher of a pod polls. ``uid``: UID of the pod, which distinguishes a
        lost pod from its replacement; empty: unknown to the host."""
        if pod >= self.pod_count or not self.pod_tracker.record_poll(pod, uid, now):
            return
        if self.pod_tracker.has_ranks(pod):
            self._drain_request.record_activity(now)

    def process_pod_report(self, report: PodReport, now: float, uid: str = "") -> None:
        """Process a launcher's report. ``now``: wall clock, seconds; ``uid``: UID of its pod, see
        :meth:`record_poll`. Raises :class:`WrongAttempt` and :class:`ReportMismatch`."""
        if report.attempt != self.attempt:
            raise WrongAttempt(
                f"attempt {report.attempt} is not the attempt in progress, {self.attempt}"
            )
        if report.pod >= self.pod_count:
            raise ReportMismatch("pod", f"is {report.pod}; the job has {self.pod_count} pods")
        self.pod_tracker.begin_settling(now)
        if report.event == "joined":
            self._process_joined_launcher(report, now, uid)
            return
        self.record_poll(report.pod, uid, now)
        self.pod_tracker.check_launcher(report.pod, report.launcher, uid, now)
        if report.event == "stays" and report.why.startswith(LAYERS_FIXED_PREFIX):
            # It counts from ranks that are gone, too: others would refuse likewise.
            self.layout_transition.fixed_reason = report.why
            self.saved = self.saved.model_copy(update={"layers_fixed": report.why})
        if report.generation < self.saved.generation or self._verdict is not None:
            return
        self.record_begun_generation(report.generation, report)
        if report.layout_before is None and report.layout == self.layout:
            # Another ingest confirmed the layout to this launcher, and could not write status.
            self._confirm_layout()
        if report.event == "gone":
            is_new = self.pod_tracker.record_request(report.pod, now)
            if not self.pod_tracker.has_ranks(report.pod):
                if is_new or now - self._checked_at >= CHECK_SECONDS:
                    self.check_deadlines(now)
                return
            self.layout_transition.record_departed_ranks(report)
        if report.event == "stays":
            if self._drain_request.is_requested and not self._exit_analysis:
                self._drain_request.withdraw_request(report.why, now)
            return
        if report.event == "resumed":
            self.progress.record_resumed(report.resumed)
            if report.resumed is not None and report.resumed.rung == "kept":
                # Rank 0 reports this once it has trained with a new layout.
                self._confirm_layout()
            self._record_recovery(now)
            return
        if report.loss is not None:
            self._exit_analysis.losses[report.pod] = report.loss
        if report.finished:
            self.progress.record_departed_ranks(report.finished)
        if report.event != "failed":
            self.pod_tracker.record_ended_ranks(report.pod, uid)
        if report.event == "completed":
            self._completed_pods.add(report.pod)
            self._record_completion()
        elif not self._exit_analysis:
            loss = report.loss
            why = loss.reason if loss is not None else self._drain_request.end_reason
            self._exit_analysis.record_end(why, now, hang=loss is not None and loss.hang)
        if self._exit_analysis:
            self._decide_next(now)

    def _record_completion(self) -> bool:
        """Record that the ranks that run have finished. Returns True if that must be in status, for
        pods without ranks that may still join."""
        is_new = (
            bool(self.saved.excluded_replicas)
            and not self._exit_analysis
            and not self.saved.completed
        )
        if is_new:
            self.saved = self.saved.model_copy(update={"completed": True})
        return is_new

    def check_deadlines(self, now: float) -> None:
        """Decide what depends on time alone. Call it at :meth:`next_deadline`, wall clock."""
        if self._verdict is not None or self.saved.completed:
            return
        if not self._exit_analysis and now >= self._drain_request.get_departure_deadline():
            self._drain_request.withdraw_request(
                f"no rank has left within {LEAVE_SECONDS:g} s", now
            )
        if self._parallelism is None:
            return
        self._checked_at = now
        if self._exit_analysis:
            self._decide_next(now)
            return
        over_at, why = self.pod_tracker.find_unnoticed_end()
        if now >= over_at:
            self._exit_analysis.record_end(why, now)
            self._decide_next(now)
            return
        if self._drain_request.is_requested:
            if now >= self._drain_request.get_silence_deadline():
                # They may run or have finished: a new generation might train twice.
                silent = f"ranks that are to leave have not reported for {LEAVE_SECONDS:g} s"
                self._exit_analysis.record_end(silent, now)
                self._end_attempt("attempt", silent, None)
            return
        if not self.excluded_replicas or now < self._drain_request.get_retry_time():
            return
        there = self.pod_tracker.pods_with_ranks - self.pod_tracker.awaited_since.keys()
        running = self.pod_tracker.select_running(there | self.pod_tracker.list_present(now))
        if len(running.excluded_replicas) < len(self.excluded_replicas):
            self._drain_request.request_for_replicas(now)

    def next_deadline(self, now: float) -> float | None:
        """Time at which :meth:`check_deadlines` may decide something; None: nothing waits."""
        if self._verdict is not None or self.saved.completed:
            return None
        leaving = self._drain_request
        if not self._exit_analysis and (by := leaving.get_departure_deadline()) < inf:
            return by
        if self._parallelism is None:
            return None
        if self._exit_analysis:
            return self.restart_policy.next_deadline(
                self._exit_analysis, self.excluded_replicas, now
            )
        over_at = max(now, self.pod_tracker.find_unnoticed_end()[0])
        if leaving.is_requested:
            return min(leaving.get_silence_deadline(), over_at)
        at = leaving.get_retry_time()
        found = min(at if at > now else inf, over_at)
        return None if found == inf else found

    def _process_joined_launcher(self, report: PodReport, now: float, uid: str) -> None:
        """Process a launcher that has begun: at the first start, or in the place of a lost one."""
        pod = report.pod
        if self._verdict is not None or self.pod_tracker.is_known_launcher(
            pod, report.launcher, uid
        ):
            return
        ran = self.progress.has_run or self.saved.generation > 0
        lost = self.pod_tracker.record_joined_launcher(pod, report.launcher, uid, now, ran=ran)
        if not self.pod_tracker.has_ranks(pod):
            return
        if not ran:
            self.progress.record_first_start(now)
        if lost is not None:
            self._exit_analysis.record_lost_pod(pod, lost)
            if not self._exit_analysis:
                self._exit_analysis.record_end(lost.why, now)
        if self._exit_analysis:
            self.pod_tracker.record_ended_ranks(pod, "")
            self._decide_next(now)

    def expect_replacements(self, lost: Sequence[PodReplacement], now: float) -> None:
        """Record the host's list of pods that are lost, or about to be, and are replaced; repeated
        calls do no harm. Until peers detect the loss, the ranks may have time to save."""
        if self.pod_tracker.expect_replacements(lost, self.attempt, now):
            # Decide again in any case: the times of losses are whole seconds.
            self._exit_analysis.decided_at = -inf

    def _decide_next(self, now: float) -> None:
        """Decide what follows the generation, once that is known."""
        ending = self._exit_analysis
        ending.decided_at = now
        if self.restart_policy.most == 0 or self._completed_pods or self.saved.completed:
            # No pod is awaited: those whose ranks have finished cannot start them again.
            why = f"pod {min(self._completed_pods)} has finished" if self._completed_pods else ""
            self._end_attempt("attempt", why, ending.find_cause()[0])
            return
        ready = self.restart_policy.find_ready_pods(ending, self.excluded_replicas, now)
        if ready is None:
            return
        match self.restart_policy.decide_next(self.saved, ending, ready):
            case StartGeneration() as begins:
                self._start_generation(begins, now)
            case EndAttempt() as ends:
                self.saved = ends.saved
                self._end_attempt(ends.verdict, ends.why, ends.cause)

    def _start_generation(self, begins: StartGeneration, now: float) -> None:
        """Begin the next generation."""
        lost_at = self._exit_analysis.lost_at
        # A later loss of a present pod counts anew.
        self.pod_tracker.uncounted_pods &= self.pod_tracker.awaited_since.keys()
        self.saved, self.restart_reason = begins.saved, begins.start_reason
        # Pods with ranks end these first.
        self._reset_generation(self.pod_tracker.idle_pods)
        self.progress.record_restart(begins.record, lost_at, now)

    def _end_attempt(self, verdict: str, why: str, cause: int | None) -> None:
        """End the attempt with a verdict, which launchers receive."""
        self._verdict = self.generation_state.model_copy(
            update={"over": True, "verdict": verdict, "why": why, "cause": cause}
        )

    def process_rank_report(self, report: LinkHealthReport, now: float) -> bool:
        """Process a report of rank 0's agent. Returns True if status must be written: the ranks
        have recovered, or have finished without some replicas."""
        self.progress.finished_known = True
        self._drain_request.record_activity(now)
        if report.state == "finished" and self._record_completion():
            self._record_recovery(now)
            return True
        self.progress.record_iterations(report.iterations, now)
        # Only ranks with a confirmed layout can have come so far.
        at = self.layout_transition.find_trial_begin(self.saved)
        reached = at is not None and self.progress.iterations_finished > max(
            at + TRIAL_ITERATIONS, self.progress.finished_before
        )
        settled = reached and self._confirm_layout()
        return self._record_recovery(now) or settled

    def record_measured_gain(self, generation: int, measured: float) -> None:
        """Record the measured saving of a generation's layout, as a fraction of an iteration."""
        self.saved = with_measured_gain(self.saved, generation, measured)

    def _confirm_layout(self) -> bool:
        """Record that the layout of this generation counts. Returns True if that is new."""
        before, self.saved = self.saved, confirm_layout(self.saved)
        return self.saved is not before

    def _record_recovery(self, now: float) -> bool:
        """Complete the newest recovery record. Returns True if it was completed now."""
        done = self.progress.take_recovery(now)
        if done is None:
            return False
        last = [*self.saved.last[:-1], done]
        self.saved = self.saved.model_copy(update={"last": last})
        return True
