"""``pipemorph serve``: the control loop of one job whose ranks another launcher starts.

The ranks request their job (``GET /v1/job``) and report, as under ``pipemorph run``. They train on
if this host ends.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from pipemorph.errors import one_line
from pipemorph.ingest import Reply
from pipemorph.local.clock import now
from pipemorph.local.processes.supervision import AGENT_SECONDS, AttemptOutcome, AttemptResult
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.results.page_source import FolderTraceSource
from pipemorph.local.results.report import RunAttempt, RunRecord
from pipemorph.local.served.launched_command import LaunchedCommand
from pipemorph.local.served.served_run import (
    COMMAND,
    ServedRun,
    ServeOptions,
)
from pipemorph.local.service import ControlService
from pipemorph.manifest import load_job
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.views.explanation.explanation_text import join_few

JOIN_SECONDS = 60.0
"""Time after which missing ranks are named."""
LAST_REPORT_SECONDS = 10.0
"""Time without reports after which a job that reported its last iteration is over: its agent has
ended early."""
MOST_NAMED = 16
OVER_STATES = ("finished", "failed")
"""States of a job that is over."""


def serve_job(manifest: str, options: ServeOptions, *, stream: TextIO | None = None) -> int:
    """Host the control loop of the job of ``manifest``, see :meth:`ServedRun.serve`. Raises
    :class:`InputError` if the manifest is invalid."""
    return _ManifestRun(load_job(manifest), options, stream).serve()


class _ManifestRun(ServedRun):
    """Run of a manifest's job."""

    run: RunRecord
    _last_report_at: float | None = None
    """Latest time for the last report, once the command has ended: monotonic seconds."""

    def __init__(
        self, job: PipeMorphJob, options: ServeOptions, stream: TextIO | None = None
    ) -> None:
        super().__init__(options, stream, job)
        self.run, self.roll = RunRecord(job, now()), JoinTracker(job, self.journal)

    def make_service(self, **server: Any) -> ControlService:
        self.roll.service = ControlService(
            self.run.job, self.journal, join=self.roll.handle_join, **server
        )
        return self.roll.service

    def follow_ranks(self) -> AttemptResult:
        stopped: signal.Signals | None = None
        if self.folder is None:
            self.start_views(
                FolderTraceSource(None), "ranks write their ops to the folder of --out"
            )
        else:
            self.start_views(FolderTraceSource(self.folder.trace))
        while True:
            number = self.wait_for_signal()
            for text in self.roll.take_announcements():
                self.progress.print_note(text)
            stopped = stopped or number
            # Before the view is read, which is reset before the attempt changes.
            record = self._follow_attempts()
            ending = (
                self._find_end(record, stopped)
                if self.command is None
                else self._find_end_of_command(self.command, stopped)
            )
            if ending is None and (self.command is None or self.command.status is None):
                ending = self._exceeds_deadline()
            if ending is not None:
                return record.record_result(ending, now())

    def _follow_attempts(self) -> RunAttempt:
        """The attempt of the ranks; a new one if they have started again."""
        run, attempt = self.run, self.roll.attempt
        record = run.attempts[-1] if run.attempts else None
        if record is not None and record.number == attempt:
            return record
        if record is not None and record.result is None:
            ending = AttemptResult(AttemptOutcome.FAILED, "its ranks started again")
            record.record_result(ending, now())
        run.attempts.append(RunAttempt(attempt, now()))
        return run.attempts[-1]

    def _exceeds_deadline(self) -> AttemptResult | None:
        limit = self.run.job.spec.active_deadline_seconds
        if limit is None or now() - self.run.started_at <= limit:
            return None
        reason = f"not over within {limit:g} s (spec.activeDeadlineSeconds)"
        return AttemptResult(AttemptOutcome.DEADLINE, reason)

    def _find_end_of_command(
        self, command: LaunchedCommand, stopped: signal.Signals | None
    ) -> AttemptResult | None:
        """End of the job, once the command that starts its ranks has ended."""
        if command.status is None:
            return None
        # Rank 0's agent sends the last report after its rank has exited.
        self._last_report_at = self._last_report_at or time.monotonic() + AGENT_SECONDS
        reported = self.service.reported_at is not None
        over = self.journal.view.state in OVER_STATES
        if reported and not over and time.monotonic() < self._last_report_at:
            return None
        done, wanted = self.journal.count_done(), self.run.job.spec.trainer.iterations
        if command.status == 0 and done >= wanted:
            return AttemptResult(AttemptOutcome.COMPLETED)
        reason = f"{done} of {wanted} iterations; {command.describe_exit()}"
        if stopped is not None:
            reason = f"stopped by {stopped.name}; {reason}"
            return AttemptResult(AttemptOutcome.INTERRUPTED, reason)
        if not reported and command.status == 0:
            reason += "; no rank has reported: the script has to use TrainerContext.from_env()"
        return AttemptResult(AttemptOutcome.FAILED, reason)

    def _find_end(self, record: RunAttempt, stopped: signal.Signals | None) -> AttemptResult | None:
        """End of the job by the reports of its ranks; None while they train, or may start
        again."""
        spec, view, done = self.run.job.spec, self.journal.view, self.journal.count_done()
        wanted = spec.trainer.iterations
        quiet = self.service.seconds_since_report() > LAST_REPORT_SECONDS
        if done >= wanted and (view.state == "finished" or (quiet and view.state != "failed")):
            return AttemptResult(AttemptOutcome.COMPLETED)
        if stopped is not None:
            reason = f"stopped by {stopped.name}; the ranks train on with their plan"
            return AttemptResult(AttemptOutcome.INTERRUPTED, reason)
        if record.result is None and (
            view.state == "failed" or (quiet and view.state in OVER_STATES)
        ):
            reason = f"the ranks ended after {done} of {wanted} iterations"
            whole = f"{reason}: {one_line(view.message)}" if view.message else reason
            ending = record.record_result(AttemptResult(AttemptOutcome.FAILED, whole), now())
            restart, most = len(self.run.attempts), spec.failure_policy.max_restarts
            if restart > most:
                return ending
            self.progress.print_note(
                f"{reason}; waiting for the ranks to start again: {restart} of at most {most}"
            )
        return None


@dataclass
class JoinTracker:
    """Ranks of the attempt that have joined. :meth:`handle_join` runs in the ingest's thread."""

    job: PipeMorphJob
    journal: RunJournal
    service: ControlService | None = None
    attempt: int = 0
    _joined: set[int] = field(default_factory=set)
    _since: float = field(default_factory=time.monotonic)
    _announced: bool = False
    _new_refusals: dict[str, None] = field(default_factory=dict)
    """Refusals that are not printed yet, each once."""
    _all_refused: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def handle_join(self, query: Mapping[str, str], address: str) -> Reply:
        """Answer a rank that requests its job: the job, or the reason for a refusal."""
        numbers = {}
        for name in ("rank", "world_size", "attempt"):
            text = query.get(name, "")
            if not (text.isascii() and text.isdigit() and len(text) <= 9):
                return Reply.from_error(
                    400, f"{name} is {text[:40]!r}; expected an integer of 0 or more", field=name
                )
            numbers[name] = int(text)
        rank, world_size, attempt = numbers["rank"], numbers["world_size"], numbers["attempt"]
        name, ranks = self.job.metadata.name, self.job.spec.parallelism.world_size
        with self._lock:
            why = ""
            if world_size != ranks or rank >= ranks:
                why = f"is of {world_size} ranks (WORLD_SIZE); job {name} has {ranks}"
            elif attempt < self.attempt:
                why = (
                    f"is of attempt {attempt}; job {name} is in attempt {self.attempt}. Set "
                    f"PIPEMORPH_ATTEMPT to {self.attempt + 1}, or start pipemorph serve again"
                )
            if why:
                text = f"rank {rank} from {address} is refused: it {why}"
                if text not in self._all_refused and len(self._all_refused) < 1000:
                    self._all_refused.add(text)
                    self._new_refusals[text] = None
                return Reply.from_error(409, f"this rank {why}")
            if attempt > self.attempt:
                assert self.service is not None
                self.service.begin_attempt_in_loop(attempt)
                self.journal.reset_view()
                self.attempt, self._announced = attempt, False
                self._joined.clear()
            if not self._joined:
                self._since = time.monotonic()
            self._joined.add(rank)
        return Reply(200, self.job.model_dump_json(by_alias=True, exclude_none=True).encode())

    def take_announcements(self) -> list[str]:
        """New messages: refused ranks, that all ranks have joined, or the missing ranks."""
        with self._lock:
            found = list(self._new_refusals)
            self._new_refusals.clear()
            missing = self.job.spec.parallelism.world_size - len(self._joined)
            # Ranks that report have all joined, perhaps at an earlier host of this job.
            seen = self.service is not None and self.service.reported_at is not None
            if self._announced or (
                missing and (seen or time.monotonic() - self._since < JOIN_SECONDS)
            ):
                return found
            self._announced = True
            return [*found, self._describe_missing_ranks()]

    def _describe_missing_ranks(self) -> str:
        ranks = self.job.spec.parallelism.world_size
        missing = [rank for rank in range(ranks) if rank not in self._joined]
        if not missing:
            return f"all {ranks} ranks have joined"
        named = join_few(map(str, missing), MOST_NAMED)
        return (
            f"{len(self._joined)} of {ranks} ranks have joined in {JOIN_SECONDS:.0f} s; missing: "
            f"{named}. Each needs PIPEMORPH_INGEST_URL and the other variables of {COMMAND}"
        )
