"""``pipemorph run``: one PipeMorphJob on this machine, from manifest to report."""

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

from pipemorph.api.sections.trainer import Checkpoint
from pipemorph.api.spec import PipeMorphJob
from pipemorph.checkpoints import to_resume
from pipemorph.control.decide.layouts.moves import Moves, records
from pipemorph.control.generations import Generations as Numbered
from pipemorph.errors import InputError, one_line
from pipemorph.explain.story import plural
from pipemorph.local.clock import now
from pipemorph.local.generations import Generations, Life
from pipemorph.local.logs import collected_logs
from pipemorph.local.moves import LeaveRequests
from pipemorph.local.processes.environment import (
    AttemptEnvironment,
    common_environment,
    grace_seconds,
    rank_environment,
    template_env,
)
from pipemorph.local.processes.forks import Forks
from pipemorph.local.processes.hang import HangWatch
from pipemorph.local.processes.interrupts import Interrupts
from pipemorph.local.processes.kept import SHARED_MEMORY, KeptFolder
from pipemorph.local.processes.locked import PrivateFolder
from pipemorph.local.processes.rank_log import FileLog
from pipemorph.local.processes.ranks import RankSet, Reaper
from pipemorph.local.processes.supervise import End, Ending, Events, Supervision, loss_of
from pipemorph.local.progress import Progress, headline
from pipemorph.local.results.history import Journal
from pipemorph.local.results.outputs import OutFolder
from pipemorph.local.results.report import Recovery, RunRecord, write_report
from pipemorph.local.results.timeline import write_timeline
from pipemorph.local.results.traces import iterations_done
from pipemorph.local.service import ControlService
from pipemorph.local.watch import FolderTraces, Observer, Told, WatchServer, listen
from pipemorph.manifest import check_module, load_job
from pipemorph.watch.document import Recovered
from pipemorph.wire import PodReport, ResumedFrom

EXIT = {End.COMPLETED: 0, End.FAILED: 1, End.DEADLINE: 1, End.INTERRUPTED: 130}
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
    grace = grace_seconds(job)
    if job.spec.suspend:
        print(f"{job.metadata.name} is suspended (spec.suspend: true); not started", file=stream)
        return SUSPENDED_STATUS
    with ExitStack() as outer:
        listener = None if watch is None else outer.enter_context(listen(watch))
        folder = outer.enter_context(OutFolder.claim(out, force=force))
        journal, events = Journal(), Events()
        run = RunRecord(job, now())
        interrupts = Interrupts(events)
        progress = Progress(stream, job, journal, on_closed=interrupts.output_closed)
        try:
            with ExitStack() as stack:
                stack.enter_context(interrupts)
                stack.callback(progress.close)
                refresh = stack.enter_context(collected_logs(progress))
                service = stack.enter_context(ControlService(job, journal))
                reaper = Reaper()
                stack.callback(reaper.close)
                env = common_environment(job, os.environ)
                trainer = job.spec.trainer
                forks = stack.enter_context(
                    Forks(trainer.preload, trainer.argv(sys.executable), env, progress.note)
                )
                policy, cut = job.spec.failure_policy, job.spec.parallelism
                # Ranks that fail are there again at once: no replica goes on without others.
                generations = Numbered(
                    1, policy.max_restarts, cut=cut.model_copy(update={"min_replicas": None}),
                    relayout=job.spec.adaptation.relayout,
                )  # fmt: skip
                host = _Host(
                    job, run, folder, journal, progress, service, reaper, events, interrupts,
                    refresh, grace, generations,
                    Moves(job.spec, generations, progress.note, time.monotonic),
                    HangWatch(job.spec.failure_policy, job.spec.trainer.iterations),
                )  # fmt: skip
                host.announce()
                page = None
                if listener is not None:
                    traces = FolderTraces(folder.trace)
                    observer = Observer(job, journal, traces, host.tell)
                    page = stack.enter_context(WatchServer(observer.document, listener))
                    progress.note(f"watch: {page.url}")
                site = stack.enter_context(host)
                ending = Generations(site, reaper, forks, events).to_the_end()
                conclude(run, ending, journal, service, progress.note)
                run.relayouts = records(host.moves, run.iterations)
                run.layers = host.moves.layout.layers
                host.over = True
                if page is not None:
                    page.finish()
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001  # The ranks have ended; the report is written.
            ending = end_of_host(run, journal, error, folder)

        complete = written(write_report, folder, run)
        progress.note(_final_message(ending, run, folder, manifest, complete))
        complete = complete and written(write_timeline, folder, run, progress.note)
        return EXIT[ending.end] if complete else EXIT[ending.end] or UNWRITTEN_STATUS


@dataclass
class _Host:
    """A run, from its first attempt to its end: the :class:`~pipemorph.local.generations.Site` that
    has all ranks of its job. A context manager, which removes what is kept."""

    job: PipeMorphJob
    run: RunRecord
    folder: OutFolder
    journal: Journal
    progress: Progress
    service: ControlService
    reaper: Reaper
    events: Events
    interrupts: Interrupts
    show: Callable[[], None]
    grace: float
    generations: Numbered
    """What follows on each generation of the ranks: those of one pod."""
    moves: Moves
    hangs: HangWatch
    started: float = field(default_factory=time.monotonic)
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the run, which its checkpoints name."""
    kept: KeptFolder | None = None
    """What ranks leave for the next generation; None: they leave nothing."""
    starting: bool = True
    """Whether the ranks have not finished an iteration since they started."""
    life: Life = field(default_factory=Life)
    """Of the ranks that run."""
    left_at: float = 0.0
    """When ranks last left for another layout: wall clock, seconds."""
    recovering: Recovery | None = None
    """The last recovery, until the ranks have finished an iteration."""
    over: bool = False
    """Whether :attr:`run` has its ending."""
    requests: LeaveRequests = field(init=False)

    def __enter__(self) -> _Host:
        if self.recovers:
            try:
                self.kept = KeptFolder.make()
            except OSError as error:
                self.progress.note(
                    f"{SHARED_MEMORY} cannot be used ({error.strerror}): ranks that start again go "
                    "on from the newest checkpoint, not from what the others have in memory"
                )
            else:
                self.reaper.send("delete", str(self.kept.root))
        self.requests = LeaveRequests(self.kept, self, lambda _: None)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.kept is not None and self.kept.remove():
            self.reaper.send("keep", str(self.kept.root))

    def tell(self) -> Told:
        """How the ranks are. For another thread."""
        recoveries = [Recovered.model_validate(each.record()) for each in self.run.recoveries]
        if self.over:
            return Told(self.run.status(), self.run.outlook, recoveries)
        state, recovering = self.service.state(), self.recovering
        if recovering is not None:
            status = state.status("Restarting", recovering.ending.reason)
        else:
            status = state.status("Starting" if self.starting else "Running")
        return Told(status, state.outlook, recoveries)

    def announce(self) -> None:
        self.run.begin_attempt(now())
        self.progress.note(headline(self.job))
        _, unavailable = template_env(self.job)
        if unavailable:
            self.progress.note(
                f"variables not set, as their values need a cluster: {', '.join(unavailable)}"
            )

    def first(self) -> Life:
        return Life()

    @property
    def recovers(self) -> bool:
        """Whether a failure may be followed by another start."""
        return self.generations.following.most > 0

    # --- what the ranks answer, see pipemorph.local.moves.Answers -------------------------------

    def stays(self, generation: int, why: str) -> None:
        self._take(generation, "stays", why=why)

    def resumed(self, generation: int, word: ResumedFrom) -> None:
        self._take(generation, "resumed", resumed=word)

    def _take(self, generation: int, event: str, **fields: Any) -> None:
        told = {"attempt": self.life.attempt, "generation": generation, "pod": 0, "event": event}
        told |= {"layout": self.life.layout, "layout_before": self.generations.layout_before}
        self.generations.take(PodReport.model_validate(told | fields), now())
        self._follow()

    def _follow(self) -> None:
        """Take another layout."""
        before = self.moves.layout
        if not self.moves.follow(self.journal.iterations()):
            return
        layers, placed = self.moves.layout.layers, self.moves.layout.places != before.places
        self.service.change_layout(self.moves.late_links() if placed else None, layers)
        self.progress.layers = layers

    def agree(self, life: Life, ending: Ending) -> Life | Ending:
        """Decide what follows, record how the ranks ended, and tell of it."""
        if ending.end is End.MOVED and self.interrupts.received is not None:
            reason = f"{self.interrupts.received.name}, while the ranks left for another layout"
            ending = replace(ending, end=End.INTERRUPTED, reason=reason, retry=False)
        if ending.end not in (End.MOVED, End.FAILED):
            self.run.attempts[-1].end(ending, now())
            return ending
        # The new layout may count since the last look.
        self.requests.look(life.generation, None)
        moved = ending.end is End.MOVED
        generations = self.generations
        self._take(
            life.generation,
            "gone",
            loss=None if moved else loss_of(ending),
            left_for=generations.layouts.asked if moved else None,
            finished=self.hangs.finished,
            reached=self.hangs.reached,
            began=self.hangs.began_with,
        )
        state = generations.state
        following = Life(life.attempt, state.generation, layout=state.layout)
        if moved:
            self.progress.note(f"generation {following.generation} begins with {following.layout}")
            self.left_at = ending.at
            self.journal.forget_view()
            return following
        ends = bool(state.verdict) and not generations.may_restart(ending.retry)
        if ends and state.why:
            ending = replace(ending, details=(*ending.details, state.why))
        if not ends and self.interrupts.received is not None:
            ending, ends = replace(ending, end=End.INTERRUPTED), True
        if ends:
            self.run.attempts[-1].end(ending, now())
            return ending
        if state.verdict:
            following = Life(life.attempt + 1)
        self._go_on(ending, following, state.why if state.verdict else generations.why)
        return following

    def _go_on(self, ending: Ending, following: Life, why: str) -> None:
        """Prepare the next start of the ranks, and tell of it."""
        self.progress.note(ending.describe())
        checkpoint = self.job.spec.checkpoint
        where = "the newest checkpoint" if checkpoint and checkpoint.resume else "the beginning"
        attempt, generation = following.attempt, following.generation
        again = attempt > self.life.attempt
        if again:
            self.run.attempts[-1].end(ending, now())
            self.progress.note(f"{why}, from {where}")
            self._clear_kept()
        # No rank is more than an iteration ahead of another: all have begun what follows these.
        done = max(self.journal.done(), self.hangs.finished - 1)
        if not again:
            after = f"generation {generation} after {plural(done, 'iteration')}"
            self.progress.note(f"the ranks start again as {after}{': ' if why else ''}{why}")
        rung = "attempt" if again else "generation"
        self.recovering = Recovery(ending, attempt, generation, rung, done)
        self.run.recoveries.append(self.recovering)
        self.journal.forget_view()
        if again:
            self.generations.following.restarts += 1
            self.generations.begin_attempt(attempt)
            self._follow()
            self.service.begin_attempt(attempt)
            self.run.begin_attempt(now())

    def _clear_kept(self) -> None:
        """Remove what ranks have kept. Where that fails, ranks keep nothing from now on."""
        if self.kept is None:
            return
        try:
            self.kept.clear()
        except OSError as error:
            self.progress.note(f"{self.kept.root}: {error.strerror}; ranks keep no state any more")
            self.kept = None

    def _refresh(self) -> None:
        """Show what is new, and that the ranks have recovered. The job does not end for an error
        in that."""
        self.progress.attempt("the job's progress cannot be followed", self._look)
        self.progress.attempt("no other layout can be looked for", self._consider_layouts)
        self.show()

    def _look(self) -> None:
        for line in self.hangs.notes():
            self.progress.note(line)
        leaves = self.generations.state
        self.requests.look(self.life.generation, leaves.leave_for if leaves.leave else None)
        if self.moves.asked is not None:
            self.generations.look(now())
            self._follow()
        resumed = None
        if (self.starting or self.recovering is not None) and self.kept is not None:
            resumed = self.kept.resumed(self.life.generation)
        least = resumed.iteration if resumed is not None else self.hangs.began_with
        first = self.journal.first(least)
        if first is not None and self.starting and self.moves.asked is None:
            self.starting = False
            self.moves.arrived(first[0], first[1] - self.left_at)
        if self.recovering is not None and first is not None:
            recovery, self.recovering = self.recovering, None
            recovery.went_on_with, at = first
            recovery.seconds = max(0.0, at - recovery.ending.at)
            recovery.resumed = resumed
            self.progress.note(recovery.line())

    def _consider_layouts(self) -> None:
        """Ask the ranks to leave for another layout, if that pays."""
        start_seconds = self.hangs.longest_start
        if self.kept is None or start_seconds is None or not self.moves.is_due():
            return
        network = self.service.network()
        if network is None:
            return
        move = self.moves.consider(network, start_seconds, self.journal.iterations())
        if move is None:
            return
        layout, promised = move.proposal.layout.told, round(move.proposal.promised, 4)
        if self.generations.ask(layout, now(), promised=promised, undoes=move.undoes):
            self.moves.ask(move)

    @contextmanager
    def shared(self, life: Life) -> Iterator[AttemptEnvironment]:
        """A new secret, the port of rank 0's store, and what else the ranks' environments share."""
        try:
            private = PrivateFolder(self.job, self.service.token)
        except OSError as error:
            raise OSError(
                f"the ranks' secret cannot be written to {tempfile.gettempdir()}: {error.strerror}"
            ) from None
        self.reaper.send("delete", str(private.root))
        try:
            with _reserved_port() as port:
                yield AttemptEnvironment(
                    run=self.name, attempt=life.attempt, generation=life.generation,
                    master_port=int(port.getsockname()[1]), ingest_url=self.service.url,
                    job_file=private.job, secret_file=private.secret, token_file=private.token,
                    trace_dir=self.folder.trace.resolve(), progress_dir=private.root,
                    kept_dir=self.kept.root if self.kept else None, layout=self.moves.layout,
                )  # fmt: skip
        finally:
            if private.remove():
                self.reaper.send("keep", str(private.root))

    def start(self, ranks: RankSet, life: Life, shared: AttemptEnvironment) -> None:
        self.starting, self.life = True, life
        self.folder.trace.mkdir(parents=True, exist_ok=True)  # Somebody may have removed it.
        self.requests.begin(word=life.generation > 0)
        command = self.job.spec.trainer.argv(sys.executable)
        parallelism = self.job.spec.parallelism
        self.hangs.begin(HangWatch.files(shared.progress_dir, range(parallelism.world_size)))
        for rank in range(parallelism.world_size):
            position = parallelism.mesh.coordinate(rank)
            env = rank_environment(self.job, shared, rank, os.environ)
            ranks.start(position, command, env, FileLog(self.folder.log(rank)))

    def watch(self, ranks: RankSet, life: Life) -> Ending:
        ending = Supervision(
            ranks, self.events, refresh=self._refresh, note=self.progress.note, grace=self.grace,
            straggle=self.job.spec.transport.deadline_seconds, deadline=self._deadline(),
            recovers=self.recovers, saves=self.job.spec.checkpoint is not None,
            moves=lambda: self.generations.state.leave, hung=self.hangs.look,
            early=self.hangs.early, clock=now,
        ).run()  # fmt: skip
        self.hangs.end()
        self.run.began = self.hangs.first
        return (self._all_done() or ending) if ending.end is End.COMPLETED else ending

    def _all_done(self) -> Ending | None:
        """A failure if all ranks finished before the last iteration; else None."""
        wanted = self.job.spec.trainer.iterations
        reported = [sample.index + 1 for sample in self.journal.iterations()[-1:]]
        # Use both sources: the agent's last report may be lost, and rank 0 writes its count only
        # if the script closes its pipeline.
        done = max([iterations_done(self.folder.trace), *reported])
        if done >= wanted:
            return None
        return Ending(
            End.FAILED,
            f"every rank finished after {done} of {wanted} iterations (spec.trainer.iterations); "
            "run that many steps in the script, or lower the number",
        )

    def is_over(self) -> bool:
        """Whether the run ends before its ranks have started."""
        deadline = self._deadline()
        late = deadline is not None and time.monotonic() >= deadline
        return late or self.interrupts.received is not None

    def _deadline(self) -> float | None:
        seconds = self.job.spec.active_deadline_seconds
        return None if seconds is None else self.started + seconds


def conclude(
    run: RunRecord,
    ending: Ending,
    journal: Journal,
    service: ControlService,
    note: Callable[[str], None],
) -> None:
    """Take the results of a run that has ended, while its control loop is still there."""
    changes = journal.changes()
    try:
        changes = service.adaptations()
        run.training, run.conditions, run.outlook = service.state()
    except TimeoutError:
        note("the report lacks its status: the control loop did not answer at the end")
    run.finish(
        ending, journal.iterations(), changes, journal.view,
        slow=journal.lanes().slow_times(), useful=journal.useful,
    )  # fmt: skip


def end_of_host(
    run: RunRecord, journal: Journal, error: Exception, folder: OutFolder | None
) -> Ending:
    """The ending of a run whose host failed, with what is known of it. The traceback goes to
    ``host.log`` among the logs of the ranks."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    reason = one_line(f"the host of the run failed: {type(error).__name__}: {error}", 500) + at
    if folder is not None:
        with contextlib.suppress(OSError):
            folder.host_log.write_text("".join(traceback.format_exception(error)))
            reason += f"; its traceback is in {folder.host_log}"
    ending = Ending(End.FAILED, reason, at=now())
    run.finish(ending, journal.iterations(), journal.changes(), journal.view,
               slow=journal.lanes().slow_times(), useful=journal.useful)  # fmt: skip
    if run.attempts and run.attempts[-1].ending is None:
        run.attempts[-1].end(ending, ending.at)
    return ending


def written(
    write: Callable[..., None], folder: OutFolder, *rest: Any, who: str = "pipemorph run"
) -> bool:
    """Write a result; False, with a message of command ``who`` on stderr, if that fails."""
    try:
        write(folder, *rest)
    except Exception as error:  # noqa: BLE001  # What else there is of the run stays.
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        told = f"{who}: {folder.root}: {one_line(str(why))}; results are missing"
        with contextlib.suppress(OSError):
            print(told, file=sys.stderr)
        return False
    return True


def _resumes(checkpoint: Checkpoint) -> bool:
    """Whether a new run would resume from a checkpoint."""
    try:
        found = to_resume(Path(checkpoint.directory))
    except OSError:
        return False
    return checkpoint.resume and any(not each.damage for each in found)


def _final_message(
    ending: Ending, run: RunRecord, folder: OutFolder, manifest: str, complete: bool
) -> str:
    """The final message: how the run ended, where its results are, how to resume."""
    lines = [] if ending.end is End.COMPLETED else [ending.describe()]
    lines.append(run.summary())
    if complete:
        lines.append(f"report: {folder.report}")
    checkpoint = run.job.spec.checkpoint
    again = ending.end is not End.COMPLETED and ending.status != UNUSABLE_STATUS
    if again and checkpoint is not None and _resumes(checkpoint):
        lines.append(
            f"to resume from the newest checkpoint in {checkpoint.directory}: "
            f"pipemorph run {manifest} --out ANOTHER_FOLDER"
        )
    return "\n".join(lines)


def check_module_for_ranks(job: PipeMorphJob) -> None:
    """:func:`check_module` with the ranks' module path: the current folder and the template's
    PYTHONPATH. Raises :class:`~pipemorph.errors.InputError`."""
    extra = template_env(job)[0].get("PYTHONPATH", "").split(os.pathsep)
    before = list(sys.path)
    sys.path[:0] = [str(Path.cwd()), *filter(None, extra)]
    try:
        check_module(job)
    finally:
        sys.path[:] = before


def _reserved_port() -> socket.socket:
    """A socket that reserves a port for rank 0's store, which starts seconds later.

    The kernel gives the port to no other process meanwhile, at any address: the pipeline's store
    listens at 127.0.0.1, and that of a script that calls ``init_process_group`` at all addresses.
    Both can still bind it: all sockets set SO_REUSEADDR, and only the store's listens.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder
