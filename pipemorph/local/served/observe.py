"""``pipemorph serve --observe``: follows a job whose ranks are observed, and decides nothing.

The ranks post their steps (:mod:`pipemorph.local.observed.followed_job`). Shape and schedule of the
job come from them, so there is no manifest. They train on if this host ends, unless it has started
them.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from pipemorph.diagnose.adapting import predict_adapting
from pipemorph.errors import InputError
from pipemorph.local.clock import now
from pipemorph.local.observed.followed_job import AttributeIdle, FollowedJob
from pipemorph.local.processes.supervision import AttemptOutcome, AttemptResult
from pipemorph.local.progress import format_job_headline
from pipemorph.local.results.report import RunAttempt, RunRecord
from pipemorph.local.served.served_run import COMMAND, ServedRun, ServeOptions
from pipemorph.local.service import ControlService
from pipemorph.protocol import OpsTrace
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.views.live_page.page_builder import StageTrace

log = logging.getLogger("pipemorph.observe")

JOIN_SECONDS = 60.0
"""Time after which missing ranks are named."""
MOST_OPS = 200_000
"""Most ops of the newest steps that the live page can show, and that are written at the end: about
60 MB of memory, 10 MB of files."""
SILENT_SECONDS = 10.0
"""Time without reports after which that is said: ranks report once a second, whatever a step
takes."""


def serve_observed(
    options: ServeOptions,
    attribute_idle: AttributeIdle,
    *,
    stream: TextIO | None = None,
) -> int:
    """Follow an observed job until each of its ranks has reported its end, or the command of
    ``options`` has, see :meth:`ServedRun.serve`."""
    return _ObservedRun(attribute_idle, options, stream).serve()


class _ObservedRun(ServedRun):
    """Run of an observed job."""

    def __init__(
        self,
        attribute_idle: AttributeIdle,
        options: ServeOptions,
        stream: TextIO | None = None,
    ) -> None:
        super().__init__(options, stream)
        self._attribute_idle = attribute_idle
        self.traces = self._ops = _NewestOps()

    @property
    def observed(self) -> FollowedJob:
        assert self.service.observed is not None
        return self.service.observed

    def make_service(self, **server: Any) -> ControlService:
        service = ControlService(None, self.journal, attribute_idle=self._attribute_idle, **server)
        assert service.observed is not None
        service.observed.on_step = self._ops.add_step
        return service

    def follow_ranks(self) -> AttemptResult:
        watch = _RankWatch(self.observed, self.progress.print_note)
        while True:
            stopped = self.wait_for_signal()
            watch.print_changes()
            if self.run is None and self.observed.job is not None:
                self._begin_run(self.observed.job)
            ending = self._find_end(stopped)
            if ending is not None:
                if self.run is not None:
                    self.run.attempts[-1].record_result(ending, now())
                if self.folder is not None:
                    self._ops.write_files(self.folder.trace)
                return ending

    def _begin_run(self, job: PipeMorphJob) -> None:
        self.run, self.progress.job = RunRecord(job, now()), job
        self.run.attempts.append(RunAttempt(0, now()))
        self.progress.print_note(format_job_headline(job))
        self.start_views(self._ops)

    def _find_end(self, stopped: signal.Signals | None) -> AttemptResult | None:
        """End of the job; None while it runs."""
        command, finished = self.command, self.observed.finished
        if command is not None:
            if command.status is None:
                return None
            # Its ranks have reported their end before theirs.
            failed = command.exit_code or not finished
            outcome = AttemptOutcome.FAILED if failed else AttemptOutcome.COMPLETED
            return AttemptResult(outcome, command.describe_exit())
        if stopped is not None:
            reason = f"stopped by {stopped.name}; the ranks train on"
            return AttemptResult(AttemptOutcome.INTERRUPTED, reason)
        return AttemptResult(AttemptOutcome.COMPLETED) if finished else None

    def predict_adapting(self) -> dict[str, Any] | None:
        steps = (step for ranks in self.observed.newest for step in ranks.values())
        try:
            return predict_adapting(op for step in steps for op in step.operations)._asdict()
        except InputError as error:
            log.warning("what adapting would give cannot be predicted: %s", error)
            return None


class _NewestOps:
    """Ops of the newest steps, for the pages and the folder. Steps are added by the ingest's
    thread."""

    def __init__(self) -> None:
        self._steps: dict[int, Sequence[OpsTrace]] = {}
        self._count = 0
        self._lock = threading.Lock()

    def add_step(self, traces: Sequence[OpsTrace]) -> None:
        """Add a step of all ranks."""
        with self._lock:
            # Ranks that have started again repeat the numbers of steps.
            self._drop_step(traces[0].iteration)
            self._steps[traces[0].iteration] = traces
            self._count += sum(len(each.kinds) for each in traces)
            while self._count > MOST_OPS and len(self._steps) > 1:
                self._drop_step(next(iter(self._steps)))

    def _drop_step(self, number: int) -> None:
        self._count -= sum(len(each.kinds) for each in self._steps.pop(number, []))

    def list_iterations(self, column: int) -> list[int]:
        with self._lock:
            return sorted(self._steps)

    def read_iteration(self, column: int, iteration: int) -> Sequence[StageTrace]:
        with self._lock:
            found = self._steps.get(iteration, ())
        return [
            StageTrace(each.rank, each.stage, each.column, each.iteration, 0, each.ops)
            for each in found
        ]

    def write_files(self, folder: Path) -> None:
        """Write the traces as ranks of ``pipemorph run`` do, a file per stage of a rank."""
        with self._lock:
            steps = [self._steps[number] for number in sorted(self._steps)]
        try:
            with ExitStack() as stack:
                files = dict[tuple[int, int], TextIO]()
                for trace in (each for step in steps for each in step):
                    place = trace.rank, trace.stage
                    if place not in files:
                        path = folder / f"ops-rank{trace.rank}-stage{trace.stage}.jsonl"
                        files[place] = stack.enter_context(path.open("w", encoding="utf-8"))
                    files[place].write(json.dumps(_make_trace_line(trace)) + "\n")
        except OSError as error:
            log.warning("the traces of ops are incomplete: %s", error)


def _make_trace_line(trace: OpsTrace) -> dict[str, Any]:
    """Line of a rank's file, see :mod:`pipemorph.diagnose.formats.rank_traces`."""
    rows, waits = [], []
    for i, (kind, microbatch, start, end, _) in enumerate(trace.ops):
        begin = round(start - trace.origin, 6)
        rows.append([kind.value, microbatch, begin, round(end - trace.origin, 6)])
        if trace.waits and trace.waits[i]:
            waits.append([kind.value, microbatch, round(begin - 1e-6 * trace.waits[i], 6), begin])
    line: dict[str, Any] = {
        "rank": trace.rank, "stage": trace.stage, "replica": trace.column,
        "iteration": trace.iteration, "plan_version": 0, "origin": trace.origin,
        "ops": rows, "waits": waits,
    }  # fmt: skip
    if trace.rank_times is not None:
        line["times"] = trace.rank_times.model_dump(exclude_defaults=True)
    return line


class _RankWatch:
    """Names ranks that are missing or silent, and says when they have started again."""

    def __init__(self, job: FollowedJob, note: Callable[[str], None]) -> None:
        self._job, self._note = job, note
        self._began = time.monotonic()
        self._attempt, self._is_silent, self._was_named = 0, False, False

    def print_changes(self) -> None:
        job = self._job
        if job.attempt != self._attempt:
            self._attempt = job.attempt
            self._note(f"the ranks have started again: {self._attempt} times so far")
        waited = time.monotonic() - self._began > JOIN_SECONDS
        if job.controller is None and waited and not self._was_named:
            self._was_named = True
            self._note(
                f"{job.describe_ranks()} after {JOIN_SECONDS:.0f} s; each needs the variables of"
                f" {COMMAND}, and pipemorph_trainer.observe()"
            )
        silent = job.reported_at is not None and now() - job.reported_at > SILENT_SECONDS
        if silent != self._is_silent:
            self._is_silent = silent
            self._note(
                f"no rank has reported for {SILENT_SECONDS:.0f} s: the job has ended, or cannot be"
                " reached; waiting" if silent else "the ranks report again"
            )  # fmt: skip
