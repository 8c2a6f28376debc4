"""``pipemorph run``: one PipeMorphJob on this machine, from manifest to report.

The main thread starts and supervises the ranks; ingest and controller run in another one, see
:mod:`pipemorph.local.service`. After a failure the ranks restart: as the next generation from state
in memory, or as the next attempt from a checkpoint. At the end, also after an error of this host,
report and timeline are written.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from pipemorph.checkpoints import list_resumable
from pipemorph.control.decide.layouts.layout_changes import LayoutChanges, build_records
from pipemorph.control.job_generations import JobGenerations as Numbered
from pipemorph.diagnose.formats.rank_traces import read_iterations_done
from pipemorph.errors import InputError, one_line
from pipemorph.local.clock import now
from pipemorph.local.drain_requests import DrainRequests
from pipemorph.local.generation_runner import GenerationRunner, RankGeneration
from pipemorph.local.live_page import LivePageServer, open_page_listener
from pipemorph.local.log_collector import collect_logs
from pipemorph.local.processes.environment import (
    AttemptEnvironment,
    build_common_environment,
    build_rank_environment,
    read_grace_seconds,
    read_template_env,
)
from pipemorph.local.processes.fork_client import ForkServerManager
from pipemorph.local.processes.hang_detector import HangDetector
from pipemorph.local.processes.interrupts import InterruptHandler
from pipemorph.local.processes.locked_folder import PrivateFolder
from pipemorph.local.processes.memory_folder import SHARED_MEMORY, MemoryCheckpointFolder
from pipemorph.local.processes.rank_log import RankFileLog
from pipemorph.local.processes.ranks import RankSet, Reaper
from pipemorph.local.processes.supervision import (
    AttemptOutcome,
    AttemptResult,
    Events,
    Supervision,
    make_loss,
)
from pipemorph.local.progress import ProgressDisplay, format_job_headline
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.results.page_source import (
    FolderTraceSource,
    LivePageSource,
    RunState,
    TraceSource,
)
from pipemorph.local.results.report import RunRecord, RunRecovery, write_report
from pipemorph.local.results.result_folder import ResultFolder
from pipemorph.local.results.status_file import StatusFile
from pipemorph.local.results.stored_page import read_final_state, write_page
from pipemorph.local.results.timeline import write_timeline
from pipemorph.local.service import ControlService
from pipemorph.manifest import check_training_program, load_job
from pipemorph.protocol import PodReport, ResumedFrom
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph.views.explanation.explanation_text import format_count

EXIT_STATUS = {
    AttemptOutcome.COMPLETED: 0,
    AttemptOutcome.FAILED: 1,
    AttemptOutcome.DEADLINE: 1,
    AttemptOutcome.INTERRUPTED: 130,
}
UNUSABLE_STATUS = 2
"""Exit status of a rank whose input was unusable, as a checkpoint that does not fit."""
UNWRITTEN_STATUS = 1
"""Exit status of a completed job whose report could not be written, as on a full disk."""
SUSPENDED_STATUS = 1
"""Exit status of a suspended job: not 0, which means that the job completed."""


def run_job(
    manifest: str,
    out: Path,
    *,
    force: bool = False,
    watch: int | None = None,
    stream: TextIO = sys.stdout,
) -> int:
    """Run the job of ``manifest`` and write report, timeline and logs to ``out``. ``watch``: port
    of the live page, 0 for any; None for no page.

    Returns the exit status: 0 completed, 1 not completed, 130 interrupted. If the manifest, its
    module, ``out`` or ``watch`` is invalid, raises :class:`~pipemorph.errors.InputError` before
    anything is started or written. Call it from the main thread.
    """
    job = load_job(manifest)
    check_module_for_ranks(job)
    grace = read_grace_seconds(job)
    if job.spec.suspend:
        print(f"{job.metadata.name} is suspended (spec.suspend: true); not started", file=stream)
        return SUSPENDED_STATUS
    with ExitStack() as outer:
        listener = None if watch is None else outer.enter_context(open_page_listener(watch))
        folder = outer.enter_context(ResultFolder.claim_folder(out, force=force))
        journal, events = RunJournal(), Events()
        run = RunRecord(job, now())
        interrupts = InterruptHandler(events)
        progress = ProgressDisplay(stream, job, journal, on_closed=interrupts.handle_closed_output)
        try:
            with ExitStack() as stack:
                stack.enter_context(interrupts)
                stack.callback(progress.close)
                refresh = stack.enter_context(collect_logs(progress))
                service = stack.enter_context(ControlService(job, journal))
                reaper = Reaper()
                stack.callback(reaper.close)
                env = build_common_environment(job, os.environ)
                trainer = job.spec.trainer
                forks = stack.enter_context(
                    ForkServerManager(
                        trainer.preload,
                        trainer.build_argv(sys.executable),
                        env,
                        progress.print_note,
                    )
                )
                policy, cut = job.spec.failure_policy, job.spec.parallelism
                # Failed ranks restart at once: no replica trains on without others.
                generations = Numbered(
                    1, policy.max_restarts, cut=cut.model_copy(update={"min_replicas": None}),
                    relayout=job.spec.adaptation.relayout,
                )  # fmt: skip
                host = _LocalRankHost(
                    job, run, folder, journal, progress, service, reaper, events, interrupts,
                    refresh, grace, generations,
                    LayoutChanges(job.spec, generations, progress.print_note, time.monotonic),
                    HangDetector(job.spec.failure_policy, job.spec.trainer.iterations),
                )  # fmt: skip
                host.announce_job()
                page = None
                traces = FolderTraceSource(folder.trace)
                observer = LivePageSource(job, journal, traces, host.read_run_state)
                if listener is not None:
                    page = stack.enter_context(LivePageServer(observer.make_document, listener))
                    progress.print_note(f"watch: {page.url}")
                site = stack.enter_context(host)
                with StatusFile(folder, observer.collect_state):
                    ending = GenerationRunner(site, reaper, forks, events).run_to_end()
                conclude_run(run, ending, journal, service, progress.print_note)
                run.relayouts = build_records(host.layout_changes, run.iterations)
                host.concluded = True
                if page is not None:
                    page.announce_end()
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  # The ranks have ended; the report is written.
            ending = record_host_failure(run, journal, error, folder)

        complete = write_results(folder, run, journal)
        progress.print_note(_format_final_message(ending, run, folder, manifest, complete))
        complete = complete and write_result(write_timeline, folder, run, progress.print_note)
        return (
            EXIT_STATUS[ending.outcome]
            if complete
            else EXIT_STATUS[ending.outcome] or UNWRITTEN_STATUS
        )


@dataclass
class _LocalRankHost:
    """State of a run and the :class:`~pipemorph.local.generation_runner.RankHost` of all its ranks.
    A context manager, which removes the ranks' state in memory at the end."""

    job: PipeMorphJob
    record: RunRecord
    folder: ResultFolder
    journal: RunJournal
    progress: ProgressDisplay
    service: ControlService
    reaper: Reaper
    events: Events
    interrupts: InterruptHandler
    refresh_display: Callable[[], None]
    grace_seconds: float
    generations: Numbered
    """Generations of the ranks, which count as those of one pod."""
    layout_changes: LayoutChanges
    hang_detector: HangDetector
    started_at: float = field(default_factory=time.monotonic)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the run, stored in its checkpoints."""
    memory_folder: MemoryCheckpointFolder | None = None
    """Folder with the state that ranks save for the next generation; None: they save none."""
    starting: bool = True
    """True until the ranks have finished an iteration since their start."""
    generation: RankGeneration = field(default_factory=RankGeneration)
    """Generation of the running ranks."""
    drained_at: float = 0.0
    """Time of the last stop for another layout: wall clock, seconds."""
    recovery: RunRecovery | None = None
    """The last recovery, until the ranks have finished an iteration."""
    concluded: bool = False
    """True once :attr:`record` has its ending."""
    drain_requests: DrainRequests = field(init=False)

    def __enter__(self) -> _LocalRankHost:
        if self.restarts_ranks:
            try:
                self.memory_folder = MemoryCheckpointFolder.create_folder()
            except OSError as error:
                self.progress.print_note(
                    f"{SHARED_MEMORY} cannot be used ({error.strerror}): restarted ranks resume "
                    "from the newest checkpoint, not from state in memory"
                )
            else:
                self.reaper.send("delete", str(self.memory_folder.root))
        self.drain_requests = DrainRequests(self.memory_folder, self, lambda _: None)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.memory_folder is not None and self.memory_folder.remove():
            self.reaper.send("keep", str(self.memory_folder.root))

    def read_run_state(self) -> RunState:
        """State of the ranks, for the live page. Called from another thread."""
        if self.concluded:
            return read_final_state(self.record)
        state, recovering = self.service.read_state(), self.recovery
        if recovering is not None:
            status = state.to_status("Restarting", recovering.result.reason)
        else:
            status = state.to_status("Starting" if self.starting else "Running")
        return RunState(status, state.outlook, self.record.list_recovery_entries())

    def announce_job(self) -> None:
        """Begin the first attempt; print the job and its variables without a value here."""
        self.record.begin_attempt(now())
        self.progress.print_note(format_job_headline(self.job))
        _, unavailable = read_template_env(self.job)
        if unavailable:
            self.progress.print_note(
                f"variables not set, as their values need a cluster: {', '.join(unavailable)}"
            )

    def choose_first_generation(self) -> RankGeneration:
        return RankGeneration()

    @property
    def restarts_ranks(self) -> bool:
        """True if a failure may be followed by a restart."""
        return self.generations.restart_policy.most > 0

    # --- answers of the ranks, see pipemorph.local.drain_requests.DrainReporter -------------------

    def report_drain_refusal(self, generation: int, why: str) -> None:
        self._record_rank_event(generation, "stays", why=why)

    def report_resumed(self, generation: int, state: ResumedFrom) -> None:
        self._record_rank_event(generation, "resumed", resumed=state)

    def _record_rank_event(self, generation: int, event: str, **fields: Any) -> None:
        report = {
            "attempt": self.generation.attempt,
            "generation": generation,
            "pod": 0,
            "event": event,
        }
        report |= {
            "layout": self.generation.layout,
            "layout_before": self.generations.layout_before,
        }
        self.generations.process_pod_report(PodReport.model_validate(report | fields), now())
        self._apply_new_layout()

    def _apply_new_layout(self) -> None:
        """Apply a new layout, if there is one."""
        before = self.layout_changes.layout
        if not self.layout_changes.follow_generation(self.journal.list_iterations()):
            return
        layers, placed = (
            self.layout_changes.layout.layers,
            self.layout_changes.layout.places != before.places,
        )
        self.service.change_layout(
            self.layout_changes.list_late_links() if placed else None, layers
        )
        self.progress.layers = layers

    def agree_next_generation(
        self, life: RankGeneration, ending: AttemptResult
    ) -> RankGeneration | AttemptResult:
        """Decide what follows, record how the ranks ended, and print it."""
        if ending.outcome is AttemptOutcome.MOVED and self.interrupts.received is not None:
            reason = f"{self.interrupts.received.name}, while the ranks left for another layout"
            ending = replace(ending, outcome=AttemptOutcome.INTERRUPTED, reason=reason, retry=False)
        if ending.outcome not in (AttemptOutcome.MOVED, AttemptOutcome.FAILED):
            self.record.attempts[-1].record_result(ending, now())
            return ending
        # The new layout may have come into effect meanwhile.
        self.drain_requests.exchange_messages(life.generation, None)
        moved = ending.outcome is AttemptOutcome.MOVED
        generations = self.generations
        self._record_rank_event(
            life.generation,
            "gone",
            loss=None if moved else make_loss(ending),
            left_for=generations.layout_transition.requested_layout if moved else None,
            finished=self.hang_detector.iterations_finished,
            reached=self.hang_detector.iterations_reached,
            began=self.hang_detector.iterations_at_start,
        )
        state = generations.generation_state
        following = RankGeneration(life.attempt, state.generation, layout=state.layout)
        if moved:
            self.progress.print_note(
                f"generation {following.generation} begins with {following.layout}"
            )
            self.drained_at = ending.at
            self.journal.reset_view()
            return following
        ends = bool(state.verdict) and not generations.may_restart(ending.retry)
        if ends and state.why:
            ending = replace(ending, details=(*ending.details, state.why))
        if not ends and self.interrupts.received is not None:
            ending, ends = replace(ending, outcome=AttemptOutcome.INTERRUPTED), True
        if ends:
            self.record.attempts[-1].record_result(ending, now())
            return ending
        if state.verdict:
            following = RankGeneration(life.attempt + 1)
        self._prepare_restart(
            ending, following, state.why if state.verdict else generations.restart_reason
        )
        return following

    def _prepare_restart(self, ending: AttemptResult, following: RankGeneration, why: str) -> None:
        """Prepare the next start of the ranks, and print it."""
        self.progress.print_note(ending.format_lines())
        checkpoint = self.job.spec.checkpoint
        where = "the newest checkpoint" if checkpoint and checkpoint.resume else "the beginning"
        attempt, generation = following.attempt, following.generation
        again = attempt > self.generation.attempt
        if again:
            self.record.attempts[-1].record_result(ending, now())
            self.progress.print_note(f"{why}, from {where}")
            self._clear_memory_folder()
        # No rank is more than an iteration ahead of another: all have finished these.
        done = max(self.journal.count_done(), self.hang_detector.iterations_finished - 1)
        if not again:
            after = f"generation {generation} after {format_count(done, 'iteration')}"
            self.progress.print_note(f"the ranks start again as {after}{': ' if why else ''}{why}")
        rung = "attempt" if again else "generation"
        self.recovery = RunRecovery(ending, attempt, generation, rung, done)
        self.record.recoveries.append(self.recovery)
        self.journal.reset_view()
        if again:
            self.generations.restart_policy.restarts += 1
            self.generations.begin_attempt(attempt)
            self._apply_new_layout()
            self.service.begin_attempt(attempt)
            self.record.begin_attempt(now())

    def _clear_memory_folder(self) -> None:
        """Remove the ranks' state in memory. If that fails, they save none from now on."""
        if self.memory_folder is None:
            return
        try:
            self.memory_folder.clear()
        except OSError as error:
            self.progress.print_note(
                f"{self.memory_folder.root}: {error.strerror}; ranks save no more state"
            )
            self.memory_folder = None

    def _refresh_progress(self) -> None:
        """Show progress, and detect recoveries. An error in this does not end the job."""
        self.progress.run_guarded("the job's progress cannot be followed", self._track_ranks)
        self.progress.run_guarded("no other layout can be searched for", self._consider_new_layout)
        self.refresh_display()

    def _track_ranks(self) -> None:
        for line in self.hang_detector.read_notes():
            self.progress.print_note(line)
        leaves = self.generations.generation_state
        self.drain_requests.exchange_messages(
            self.generation.generation, leaves.leave_for if leaves.leave else None
        )
        if self.layout_changes.requested_change is not None:
            self.generations.check_deadlines(now())
            self._apply_new_layout()
        resumed = None
        if (self.starting or self.recovery is not None) and self.memory_folder is not None:
            resumed = self.memory_folder.read_resumed(self.generation.generation)
        at_start = self.hang_detector.iterations_at_start
        first = self.journal.find_first_iteration(resumed.iteration if resumed else at_start)
        if first is not None and self.starting and self.layout_changes.requested_change is None:
            self.starting = False
            self.layout_changes.record_first_iteration(first[0], first[1] - self.drained_at)
        if self.recovery is not None and first is not None:
            recovery, self.recovery = self.recovery, None
            recovery.resumed_iteration, at = first
            recovery.seconds = max(0.0, at - recovery.result.at)
            recovery.resumed_from = resumed
            self.progress.print_note(recovery.format_line())

    def _consider_new_layout(self) -> None:
        """Request that the ranks leave for another layout, if that pays."""
        start_seconds = self.hang_detector.longest_start
        if (
            self.memory_folder is None
            or start_seconds is None
            or not self.layout_changes.is_check_due()
        ):
            return
        network = self.service.read_network()
        if network is None:
            return
        move = self.layout_changes.search_for_change(
            network, start_seconds, self.journal.list_iterations()
        )
        if move is None:
            return
        layout, promised = move.proposal.layout.rank_layout, round(move.proposal.promised_gain, 4)
        if self.generations.request_layout(
            layout, now(), promised=promised, undoes=move.undoes_change
        ):
            self.layout_changes.record_request(move)

    @contextmanager
    def share_resources(self, life: RankGeneration) -> Iterator[AttemptEnvironment]:
        """Create a secret, the port of rank 0's store, and other shared variables of the ranks."""
        try:
            private = PrivateFolder(self.job, self.service.token)
        except OSError as error:
            raise OSError(
                f"the ranks' secret cannot be written to {tempfile.gettempdir()}: {error.strerror}"
            ) from None
        self.reaper.send("delete", str(private.root))
        try:
            with _reserve_port() as port:
                yield AttemptEnvironment(
                    run=self.run_id, attempt=life.attempt, generation=life.generation,
                    master_port=int(port.getsockname()[1]), ingest_url=self.service.url,
                    job_file=private.job, secret_file=private.secret, token_file=private.token,
                    trace_dir=self.folder.trace.resolve(), progress_dir=private.root,
                    memory_dir=self.memory_folder.root if self.memory_folder else None,
                    layout=self.layout_changes.layout,
                )  # fmt: skip
        finally:
            if private.remove():
                self.reaper.send("keep", str(private.root))

    def start_ranks(self, ranks: RankSet, life: RankGeneration, shared: AttemptEnvironment) -> None:
        self.starting, self.generation = True, life
        self.folder.trace.mkdir(parents=True, exist_ok=True)  # The folder may have been removed.
        self.drain_requests.start_generation(awaits_report=life.generation > 0)
        command = self.job.spec.trainer.build_argv(sys.executable)
        parallelism = self.job.spec.parallelism
        self.hang_detector.start_generation(
            HangDetector.list_progress_files(shared.progress_dir, range(parallelism.world_size))
        )
        for rank in range(parallelism.world_size):
            position = parallelism.mesh.find_coordinate(rank)
            env = build_rank_environment(self.job, shared, rank, os.environ)
            ranks.start_rank(position, command, env, RankFileLog(self.folder.get_rank_log(rank)))

    def watch_ranks(self, ranks: RankSet, life: RankGeneration) -> AttemptResult:
        ending = Supervision(
            ranks, self.events, refresh=self._refresh_progress, note=self.progress.print_note,
            grace_seconds=self.grace_seconds, deadline=self._get_deadline(),
            straggler_seconds=self.job.spec.transport.deadline_seconds,
            restarts_ranks=self.restarts_ranks,
            saves_checkpoint=self.job.spec.checkpoint is not None,
            is_draining=lambda: self.generations.generation_state.leave,
            find_hang=self.hang_detector.find_hang,
            describe_early_exit=self.hang_detector.describe_early_exit, clock=now,
        ).run()  # fmt: skip
        self.hang_detector.finish_generation()
        self.record.first_iteration = self.hang_detector.first_iteration
        return (
            (self._check_iterations_done() or ending)
            if ending.outcome is AttemptOutcome.COMPLETED
            else ending
        )

    def _check_iterations_done(self) -> AttemptResult | None:
        """A failure if all ranks finished before the last iteration; else None."""
        wanted = self.job.spec.trainer.iterations
        reported = [sample.index + 1 for sample in self.journal.list_iterations()[-1:]]
        # Use both sources: the agent's last report may be lost, and rank 0 writes its count only
        # if the script closes its pipeline.
        done = max([read_iterations_done(self.folder.trace), *reported])
        if done >= wanted:
            return None
        return AttemptResult(
            AttemptOutcome.FAILED,
            f"every rank finished after {done} of {wanted} iterations (spec.trainer.iterations); "
            "run that many steps in the script, or lower the number",
        )

    def is_over(self) -> bool:
        """True if the run ends before its ranks have started."""
        deadline = self._get_deadline()
        late = deadline is not None and time.monotonic() >= deadline
        return late or self.interrupts.received is not None

    def _get_deadline(self) -> float | None:
        seconds = self.job.spec.active_deadline_seconds
        return None if seconds is None else self.started_at + seconds


def conclude_run(
    run: RunRecord,
    ending: AttemptResult,
    journal: RunJournal,
    service: ControlService,
    note: Callable[[str], None],
) -> None:
    """Record the results of a run that has ended, while its control loop still runs."""
    changes = journal.list_changes()
    try:
        changes = service.list_adaptations()
        run.training, run.conditions, run.outlook = service.read_state()
    except TimeoutError:
        note("the report lacks its status: the control loop did not answer at the end")
    run.record_results(
        ending, journal.list_iterations(), changes, journal.view,
        slow=journal.copy_link_history().list_slow_periods(), useful=journal.goodput_meter,
    )  # fmt: skip


def record_host_failure(
    run: RunRecord, journal: RunJournal, error: Exception, folder: ResultFolder | None
) -> AttemptResult:
    """Record the ending of a run whose host failed, with the results so far. The traceback goes to
    ``host.log`` among the logs of the ranks."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    reason = one_line(f"the host of the run failed: {type(error).__name__}: {error}", 500) + at
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.host_log.write_text("".join(traceback.format_exception(error)))
            reason += f"; its traceback is in {folder.host_log}"
    ending = AttemptResult(AttemptOutcome.FAILED, reason, at=now())
    run.record_results(ending, journal.list_iterations(), journal.list_changes(), journal.view,
               slow=journal.copy_link_history().list_slow_periods(),
               useful=journal.goodput_meter)  # fmt: skip
    if run.attempts and run.attempts[-1].result is None:
        run.attempts[-1].record_result(ending, ending.at)
    return ending


def write_results(
    folder: ResultFolder,
    run: RunRecord,
    journal: RunJournal,
    traces: TraceSource | None = None,
    command: str = "pipemorph run",
) -> bool:
    """Write the report and the page of a run. Returns False, after an error message, if that
    fails."""
    written = write_result(write_report, folder, run, command=command)
    return written and write_result(write_page, folder, run, journal, traces, command=command)


def write_result(
    write: Callable[..., None], folder: ResultFolder, *rest: Any, command: str = "pipemorph run"
) -> bool:
    """Write a result. Returns False, after an error message of ``command``, if that fails."""
    try:
        write(folder, *rest)
    except Exception as error:  # noqa: BLE001  # The other results stay.
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        message = f"{command}: {folder.root}: {one_line(str(why))}; results are missing"
        with contextlib.suppress(OSError):
            print(message, file=sys.stderr)
        return False
    return True


def _can_resume(checkpoint: Checkpoint) -> bool:
    """True if a new run would resume from a checkpoint."""
    try:
        found = list_resumable(Path(checkpoint.directory))
    except OSError:
        return False
    return checkpoint.resume and any(not each.damage for each in found)


def _format_final_message(
    ending: AttemptResult, run: RunRecord, folder: ResultFolder, manifest: str, complete: bool
) -> str:
    """The final message: how the run ended, where its results are, how to resume."""
    lines = [] if ending.outcome is AttemptOutcome.COMPLETED else [ending.format_lines()]
    lines.append(run.format_summary())
    if complete:
        lines.append(f"report: {folder.report}; page: pipemorph view {folder.root}")
    checkpoint = run.job.spec.checkpoint
    again = ending.outcome is not AttemptOutcome.COMPLETED and ending.status != UNUSABLE_STATUS
    if again and checkpoint is not None and _can_resume(checkpoint):
        lines.append(
            f"to resume from the newest checkpoint in {checkpoint.directory}: "
            f"pipemorph run {manifest} --out ANOTHER_FOLDER"
        )
    return "\n".join(lines)


def check_module_for_ranks(job: PipeMorphJob) -> None:
    """:func:`check_training_program` with the ranks' module path: the current folder and the
    template's PYTHONPATH. Raises :class:`~pipemorph.errors.InputError`."""
    extra = read_template_env(job)[0].get("PYTHONPATH", "").split(os.pathsep)
    before = list(sys.path)
    sys.path[:0] = [str(Path.cwd()), *filter(None, extra)]
    try:
        check_training_program(job)
    finally:
        sys.path[:] = before


def _reserve_port() -> socket.socket:
    """Reserve a port for rank 0's store, which starts seconds later.

    The kernel gives the port to no other process meanwhile, at any address: the pipeline's store
    listens at 127.0.0.1, and the store of a script that calls ``init_process_group`` at all
    addresses. Both can still bind it: all sockets set SO_REUSEADDR, and only the store's listens.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder
