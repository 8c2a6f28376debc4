"""``pipemorph serve --observe``: follows a job whose ranks are observed, and decides nothing.

The ranks post their steps (:mod:`pipemorph.local.followed_job`). Shape and schedule of the job come
from them, so there is no manifest. They train on if this host ends, unless it has started them.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from queue import Empty
from typing import Any, TextIO

from pipemorph.detection.observed_steps import AlignedStep
from pipemorph.errors import InputError, one_line
from pipemorph.local.clock import now
from pipemorph.local.followed_job import AttributeIdle, FollowedJob
from pipemorph.local.live_page import (
    LivePageServer,
    LivePageSource,
    RunState,
    open_page_listener,
)
from pipemorph.local.log_collector import collect_logs
from pipemorph.local.processes.interrupts import InterruptHandler
from pipemorph.local.processes.supervision import (
    REFRESH_SECONDS,
    AttemptOutcome,
    AttemptResult,
    Events,
    SignalReceived,
)
from pipemorph.local.progress import ProgressDisplay, format_job_headline
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.results.report import RunAttempt, RunRecord, write_report
from pipemorph.local.results.result_folder import ResultFolder
from pipemorph.local.run import (
    EXIT_STATUS,
    UNWRITTEN_STATUS,
    conclude_run,
    record_host_failure,
    write_result,
)
from pipemorph.local.serve import (
    COMMAND,
    ServeOptions,
    build_served_environment,
    check_command,
    format_rank_environment,
    load_or_create_secret,
    make_tls_context,
    parse_listen,
    prepare_command,
    start_metrics,
    write_env_file,
)
from pipemorph.local.service import ControlService
from pipemorph.protocol import OpsTrace
from pipemorph.spec.mesh import MeshShape
from pipemorph.views.live_page.page_builder import StageTrace

log = logging.getLogger("pipemorph.observe")

PredictAdapting = Callable[[MeshShape, Sequence[Mapping[int, AlignedStep]], str], dict[str, Any]]
"""Predicts what adapting would give: the field ``adapting`` of a report. Takes steps of all ranks,
and the framework with its schedule. Raises :class:`InputError`."""
JOIN_SECONDS = 60.0
"""Time after which missing ranks are named."""
MOST_OPS = 200_000
"""Most ops of the newest steps that the live page can show: about 60 MB."""
SILENT_SECONDS = 10.0
"""Time without reports after which that is said: ranks report once a second, whatever a step
takes."""


def serve_observed(
    options: ServeOptions,
    attribute_idle: AttributeIdle,
    predict_adapting: PredictAdapting,
    *,
    stream: TextIO | None = None,
) -> int:
    """Follow an observed job until each of its ranks has reported its end, or the command of
    ``options`` has.

    Returns the exit status: 0 completed, 130 interrupted; that of the command, unless it is 0.
    Raises :class:`InputError` before anything is served if an option is invalid. Call it from the
    main thread.
    """
    check_command(options)
    host, port = parse_listen(options.listen)
    journal, events = RunJournal(), Events()
    interrupts = InterruptHandler(events)
    progress = ProgressDisplay(
        stream or sys.stdout, None, journal, on_closed=interrupts.handle_closed_output,
        command=COMMAND, live=not options.command,
    )  # fmt: skip
    run: RunRecord | None = None
    ending = AttemptResult(AttemptOutcome.INTERRUPTED, "no rank reported a step")
    status = 0
    with ExitStack() as outer:
        folder = None
        try:
            with ExitStack() as stack:
                stack.enter_context(interrupts)
                command = None
                if options.command:
                    command, options = prepare_command(options, host, stack)
                assert options.token_file is not None
                tls = make_tls_context(options, host)
                token = load_or_create_secret(options.token_file, "--token-file")
                stack.callback(progress.close)
                refresh = stack.enter_context(collect_logs(progress))
                service = ControlService(
                    None, journal, token=token, host=host, port=port, tls=tls,
                    attribute_idle=attribute_idle,
                )  # fmt: skip
                assert service.observed is not None
                try:
                    stack.enter_context(service)
                except OSError as error:
                    raise InputError(
                        f"--listen {one_line(options.listen)} cannot be used: "
                        f"{error.strerror or error}"
                    ) from None
                start_metrics(options, service, stack, progress.print_note)
                listener = None
                if options.watch is not None:
                    listener = stack.enter_context(open_page_listener(options.watch))
                if options.out:
                    folder = outer.enter_context(
                        ResultFolder.claim_folder(options.out, force=options.force)
                    )
                variables = build_served_environment(service.url, options, observe=True)
                if options.env_file is not None:
                    write_env_file(options.env_file, variables)
                if command is None:
                    progress.print_note(format_rank_environment(variables))
                else:
                    stack.callback(command.end)
                    command.start(variables)
                watch = _RankWatch(service, progress.print_note)
                ops, page = _NewestOps(), None
                service.observed.on_step = ops.add_step
                while True:
                    stopped = None
                    with suppress(Empty):
                        stopped = events.get(timeout=REFRESH_SECONDS)
                    watch.print_changes()
                    refresh()
                    job = service.observed.job
                    if run is None and job is not None:
                        run, progress.job = RunRecord(job, now()), job
                        run.attempts.append(RunAttempt(0, now()))
                        progress.print_note(format_job_headline(job))
                        if listener is not None:
                            source = LivePageSource(
                                job, journal, ops, partial(_read_run_state, run, service)
                            )
                            page = stack.enter_context(
                                LivePageServer(source.make_document, listener)
                            )
                            progress.print_note(f"watch: {page.url}")
                    if command is not None:
                        if isinstance(stopped, SignalReceived):
                            command.send_signal(stopped.number)
                        if command.status is None:
                            continue
                        # Its ranks have reported their end before theirs.
                        status, outcome = command.exit_code, AttemptOutcome.COMPLETED
                        if status or not service.observed.finished:
                            outcome = AttemptOutcome.FAILED
                        ending = AttemptResult(outcome, command.describe_exit())
                        break
                    if isinstance(stopped, SignalReceived):
                        reason = f"stopped by {stopped.number.name}; the ranks train on"
                        ending = AttemptResult(AttemptOutcome.INTERRUPTED, reason)
                        break
                    if service.observed.finished:
                        ending = AttemptResult(AttemptOutcome.COMPLETED)
                        break
                if run is not None:
                    run.attempts[-1].record_result(ending, now())
                    conclude_run(run, ending, journal, service, progress.print_note)
                    run.adapting = _predict_adapting(service.observed, predict_adapting)
                    if page is not None:
                        page.announce_end()
        except InputError:
            raise
        except Exception as error:  # The ranks train on; the report is written.
            if run is None:
                raise
            ending = record_host_failure(run, journal, error, folder)
        if run is None:
            why = f"; {ending.reason}" if options.command else ""
            progress.print_note(f"{ending.outcome.value}: no step was observed{why}")
            return status or EXIT_STATUS[ending.outcome]
        complete = folder is None or write_result(write_report, folder, run, command=COMMAND)
    lines = [run.format_summary()]
    if folder is not None and complete:
        lines.append(f"report: {folder.report}")
    if ending.outcome is not AttemptOutcome.COMPLETED:
        lines.append(ending.format_lines())
    progress.print_note("\n".join(lines))
    status = status or EXIT_STATUS[ending.outcome]
    return status if complete else status or UNWRITTEN_STATUS


def _predict_adapting(job: FollowedJob, predict: PredictAdapting) -> dict[str, Any] | None:
    """Prediction for the report; None if the steps are none of a pipeline."""
    if job.mesh is None or 0 not in job.ranks:
        return None
    try:
        return predict(job.mesh, job.newest, job.ranks[0].place.framework)
    except InputError as error:
        log.warning("what adapting would give cannot be predicted: %s", error)
        return None


def _read_run_state(run: RunRecord, service: ControlService) -> RunState:
    """State of the ranks, for the live page. Called from another thread."""
    if run.training is not None:
        return RunState(run.to_status(), run.outlook)
    state = service.read_state()
    return RunState(state.to_status("Running"), state.outlook)


class _NewestOps:
    """Ops of the newest steps, for the live page. Steps are added by the ingest's thread."""

    def __init__(self) -> None:
        self._steps: dict[int, list[StageTrace]] = {}
        self._count = 0
        self._lock = threading.Lock()

    def add_step(self, traces: Sequence[OpsTrace]) -> None:
        """Add a step of all ranks."""
        found = [
            StageTrace(each.rank, each.stage, each.column, each.iteration, 0, each.ops)
            for each in traces
        ]
        with self._lock:
            # Ranks that have started again repeat the numbers of steps.
            self._drop_step(traces[0].iteration)
            self._steps[traces[0].iteration] = found
            self._count += sum(len(each.ops) for each in found)
            while self._count > MOST_OPS and len(self._steps) > 1:
                self._drop_step(next(iter(self._steps)))

    def _drop_step(self, number: int) -> None:
        self._count -= sum(len(each.ops) for each in self._steps.pop(number, []))

    def list_iterations(self, column: int) -> list[int]:
        with self._lock:
            return sorted(self._steps)

    def read_iteration(self, column: int, iteration: int) -> Sequence[StageTrace]:
        with self._lock:
            return self._steps.get(iteration, [])


class _RankWatch:
    """Names ranks that are missing or silent, and says when they have started again."""

    def __init__(self, service: ControlService, note: Callable[[str], None]) -> None:
        assert service.observed is not None
        self._job: FollowedJob = service.observed
        self._note = note
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
