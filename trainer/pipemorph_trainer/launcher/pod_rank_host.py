"""Host of the ranks of a pod: starts them, and waits until all have ended."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipemorph.errors import InputError, printable_line
from pipemorph.exits import EXIT_NO_RESTART, EXIT_SAVED, EXIT_SIGTERM, POD_LOST_EXITS
from pipemorph.local.drain_requests import DrainRequests
from pipemorph.local.generation_runner import GenerationRunner, RankGeneration
from pipemorph.local.processes.fork_client import ForkServerManager
from pipemorph.local.processes.hang_detector import HangDetector
from pipemorph.local.processes.interrupts import InterruptHandler
from pipemorph.local.processes.memory_folder import MemoryCheckpointFolder
from pipemorph.local.processes.ranks import RankSet, Reaper
from pipemorph.local.processes.supervision import (
    LONGEST_LINE_SHOWN,
    AttemptOutcome,
    AttemptResult,
    Events,
    Supervision,
    make_loss,
)
from pipemorph.protocol import GenerationState
from pipemorph.spec.layout import Layout
from pipemorph_trainer.launcher.page.gateway import PageGateway
from pipemorph_trainer.launcher.pod import Pod
from pipemorph_trainer.launcher.restart_client import RestartClient, make_generation_client

EXIT_FAILED = 1
NEXT_GENERATION_SECONDS = 60.0
"""Time to wait for the next generation, in addition to the grace period of ranks in other pods:
longer than a standby ingest needs to take over."""
JOIN_SECONDS = 300.0
"""Time for a new pod to reach an ingest: it may replace another pod, and its ranks must then not
start as generation 0. The other pods wait as long for a replacement."""
OUTLIVE_SECONDS = 5.0
"""Time by which a pod outlives the pod whose rank has failed. An earlier end would be mistaken for
the cause, and would end that pod before its log is complete."""
CHECK_INTERVAL_SECONDS = 0.05


def derive_generation_secret(secret: bytes, generation: int) -> bytes:
    """Secret of the engine for a generation: equal in all pods, useless in other generations."""
    return hmac.new(secret, b"generation %d" % generation, hashlib.sha256).hexdigest().encode()


@dataclass
class PodRankHost:
    """:class:`~pipemorph.local.generation_runner.RankHost` of a pod. Without a ``meeting``, the pod
    ends with its first failed rank."""

    pod: Pod
    program: list[str]
    grace_seconds: float
    events: Events
    interrupts: InterruptHandler
    restart_client: RestartClient | None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    fork_servers: ForkServerManager | None = None
    page: PageGateway | None = None
    """Gateway of the live page, used while rank 0 runs in this pod; None: no page."""
    hang_detector: HangDetector = field(init=False)
    drain_requests: DrainRequests | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.restart_client is not None and self.pod.memory_dir is not None:
            self.drain_requests = DrainRequests(
                MemoryCheckpointFolder(self.pod.memory_dir), self.restart_client, print_note
            )
        self.hang_detector = HangDetector(self.pod.policy, self.pod.job.spec.trainer.iterations)

    def choose_first_generation(self) -> RankGeneration | AttemptResult:
        if self.restart_client is None:
            return RankGeneration()
        patience = NEXT_GENERATION_SECONDS + self.grace_seconds
        met = self.restart_client.join_attempt(JOIN_SECONDS, self.is_over, meets=patience)
        if self.is_over():
            return AttemptResult(AttemptOutcome.INTERRUPTED)
        if isinstance(met, str):
            needs = (
                "the ingest holds the number of the running generation: check that it runs, and"
                f" that this pod reaches {self.restart_client.url}"
            )
            # No ranks were lost: Kubernetes makes another pod.
            return AttemptResult(AttemptOutcome.FAILED, met, (needs,), status=EXIT_SIGTERM)
        if not met.verdict and not self.pod.runs_in(met):
            # Other pods train meanwhile, and stop only when this pod can start its ranks.
            if self.fork_servers is not None:
                self.fork_servers.wait_for_server(self.is_over)
            late = self.restart_client.wait_for_next_generation(
                met.generation, None, patience, self.is_over
            )
            if self.is_over():
                return AttemptResult(AttemptOutcome.INTERRUPTED)
            if isinstance(late, str):
                # No ranks were lost: Kubernetes makes another pod.
                return AttemptResult(AttemptOutcome.FAILED, late, status=EXIT_SIGTERM)
            self.restart_client.missed_generation, met = False, late
        if met.verdict == "completed":
            return AttemptResult(AttemptOutcome.COMPLETED)
        if met.verdict:
            if met.cause != self.pod.index:
                self._outlive_failed_pod()
            return AttemptResult(
                AttemptOutcome.FAILED, f"the attempt ends: {met.why or met.reason}"
            )
        life = make_generation(met)
        if met.generation:
            ranks = ", ".join(map(str, self.pod.select_generation(life).ranks))
            print_note(
                f"this pod replaces another one, in generation {met.generation}: rank {ranks}"
            )
        return life

    @contextmanager
    def share_resources(self, life: RankGeneration) -> Iterator[dict[str, str]]:
        """Variables of a generation, with the files of its secret and of its ranks' progress."""
        env = {**self.environ, "PIPEMORPH_GENERATION": str(life.generation)}
        if self.restart_client is None and not self.hang_detector.has_limit:
            yield env  # A pod may have no writable folder.
            return
        try:
            made = tempfile.TemporaryDirectory(prefix="life-", dir=self.pod.memory_dir)
        except OSError as error:
            raise InputError(
                f"no folder can be made for the progress of the ranks of this pod ({error}); set"
                " PIPEMORPH_KEPT_DIR to a writable one, such as a volume of the pod"
            ) from error
        with made as folder:
            env["PIPEMORPH_PROGRESS_DIR"] = folder
            if life.generation > 0 and self.pod.secret:
                file = Path(folder) / "engine"
                file.touch(mode=0o600)
                file.write_bytes(derive_generation_secret(self.pod.secret, life.generation))
                env["PIPEMORPH_SECRET_FILE"] = str(file)
            yield env | self._make_changed_environment(Path(folder), life)

    def _make_changed_environment(self, folder: Path, life: RankGeneration) -> dict[str, str]:
        """Variables of all ranks of a generation with fewer replicas or another layout."""
        env: dict[str, str] = {}
        if life.layout.layers:
            env["PIPEMORPH_LAYERS"] = json.dumps(life.layout.layers)
        if self.pod.layout_can_change:
            env["PIPEMORPH_PLACES"] = (
                Layout.from_parallelism(self.pod.parallelism)
                .apply_rank_layout(life.layout)
                .places_json
            )
        if life.excluded_replicas:
            job, file = self.pod.select_generation(life).job, folder / "job.json"
            file.write_text(job.model_dump_json(by_alias=True, exclude_defaults=True))
            env["PIPEMORPH_JOB_FILE"] = str(file)
            env["WORLD_SIZE"] = str(job.spec.parallelism.world_size)
        if self.pod.address is not None and (first := self.pod.find_first_pod(life)):
            env["MASTER_ADDR"] = self.pod.address.replace("{}", str(first))
        return env

    def start_ranks(self, ranks: RankSet, life: RankGeneration, shared: dict[str, str]) -> None:
        pod = self.pod.select_generation(life)
        mesh = pod.job.spec.parallelism.mesh
        folder = shared.get("PIPEMORPH_PROGRESS_DIR")
        self.hang_detector.start_generation(
            HangDetector.list_progress_files(Path(folder), pod.ranks) if folder else ()
        )
        for local_rank, rank in enumerate(pod.ranks):
            env = pod.make_rank_environment(local_rank, shared)
            ranks.start_rank(mesh.find_coordinate(rank), self.program, env, pod.open_rank_log(rank))
        if self.page is not None and 0 in pod.ranks:
            self.page.start_listening()
        if self.restart_client is not None:
            self.restart_client.watch_generation(life.generation)
        if self.drain_requests is not None:
            self.drain_requests.start_generation(
                awaits_report=0 in pod.ranks and life.generation > 0
            )

    def watch_ranks(self, ranks: RankSet, life: RankGeneration) -> AttemptResult:
        ending = self._supervise_ranks(ranks, life)
        self.hang_detector.finish_generation()
        for index, rank in enumerate(ranks.ranks):
            how_far = (
                self.hang_detector.describe_early_exit(index)
                if ending.outcome is AttemptOutcome.COMPLETED
                else None
            )
            if how_far:
                reason = f"{rank.position} {rank.describe_exit()} {how_far}"
                return AttemptResult(
                    AttemptOutcome.FAILED, reason, retry=True, position=rank.position
                )
        return ending

    def _supervise_ranks(self, ranks: RankSet, life: RankGeneration) -> AttemptResult:
        meeting = self.restart_client
        return Supervision(
            ranks, self.events, note=print_note, grace_seconds=self.grace_seconds,
            refresh=lambda: None if meeting is None
            else self._exchange_drain_messages(meeting, life.generation),
            straggler_seconds=self.pod.job.spec.transport.deadline_seconds,
            restarts_ranks=meeting is not None,
            saves_checkpoint=self.pod.job.spec.checkpoint is not None,
            # Ranks leave only by an agreement of all, at the request of any pod.
            is_draining=lambda: meeting is not None
            and (self.pod.replicas_can_change or self.pod.layout_can_change),
            find_hang=self.hang_detector.find_hang,
            describe_early_exit=self.hang_detector.describe_early_exit,
            find_shutdown_reason=lambda: None if meeting is None
            else meeting.find_shutdown_reason(life.generation),
            on_failure=lambda ending: self._report_failure(life, ending),
        ).run()  # fmt: skip

    def is_over(self) -> bool:
        return self.interrupts.received is not None

    def agree_next_generation(
        self, life: RankGeneration, ending: AttemptResult
    ) -> RankGeneration | AttemptResult:
        if ending.status == EXIT_NO_RESTART:
            ending = replace(ending, status=EXIT_FAILED)  # A rank's own code has another meaning.
        if self.restart_client is None:
            return ending
        if ending.outcome is AttemptOutcome.INTERRUPTED and ending.saved and not self.is_over():
            # Another pod had to end, and the ranks of all pods have saved: this pod remains.
            reason = f"the ranks saved and ended with those of another pod ({ending.reason})"
            ending = replace(
                ending, outcome=AttemptOutcome.FAILED, reason=reason, retry=True, lost_peer=True
            )
        if ending.outcome is AttemptOutcome.MOVED:
            why = "the layout can change" if self.pod.layout_can_change else "a replica can join"
            print_note(f"the ranks ended together, so that {why}")
        elif ending.outcome not in (AttemptOutcome.COMPLETED, AttemptOutcome.FAILED):
            return ending
        if ending.outcome is AttemptOutcome.COMPLETED:
            if self.pod.pod_count > 1:
                self.restart_client.report_completed(life.generation, self.is_over)
            return ending
        if self.page is not None:
            self.page.show_restart_cause(ending.reason)
        if ending.outcome is not AttemptOutcome.MOVED:
            print_note(ending.format_lines())
        # After a hang, every pod reports what its ranks did.
        reported = ending.outcome is AttemptOutcome.MOVED or (
            ending.ended_by_peers and not ending.hang
        )
        loss = None if reported else make_loss(ending)
        patience = NEXT_GENERATION_SECONDS + self.grace_seconds
        met = self.restart_client.wait_for_next_generation(
            life.generation,
            loss,
            patience,
            self.is_over,
            finished=self.hang_detector.iterations_finished,
            reached=self.hang_detector.iterations_reached if self.pod.layout_can_change else 0,
            began=self.hang_detector.iterations_at_start if self.pod.layout_can_change else 0,
            drained=ending.outcome is AttemptOutcome.MOVED and self.pod.layout_can_change,
        )
        if self.is_over():
            return replace(ending, outcome=AttemptOutcome.INTERRUPTED)
        self._remove_stale_copies()
        if not isinstance(met, str) and met.verdict == "completed":
            return AttemptResult(AttemptOutcome.COMPLETED)
        if ending.outcome is AttemptOutcome.MOVED:
            ending = replace(ending, outcome=AttemptOutcome.FAILED)
        ending = _replace_lost_exit_code(ending)
        if isinstance(met, str):
            why = f"not restarted within the pod: {met}"
            return replace(ending, details=(*ending.details, why))
        if not met.verdict:
            without = ", ".join(map(str, met.excluded_replicas))
            what = f", without replica {without}" if without else ""
            following = make_generation(met)
            if following.layout != life.layout:
                what += f", with {following.layout}"
            print_note(f"the ranks start again as generation {met.generation}{what}")
            return replace(following, attempt=life.attempt)
        if met.why:
            ending = replace(ending, details=(*ending.details, met.why))
        if met.cause != self.pod.index:
            self._outlive_failed_pod()
            return replace(ending, status=EXIT_FAILED)
        return ending if met.verdict == "attempt" else replace(ending, status=EXIT_NO_RESTART)

    def _report_failure(self, life: RankGeneration, ending: AttemptResult) -> None:
        if self.restart_client is not None and not ending.ended_by_peers:
            self.restart_client.report_failed(life.generation, make_loss(ending))

    def _remove_stale_copies(self) -> None:
        """Remove the copies of the state if a generation ran without this pod: the copies of other
        pods are of the same iterations, but of other batches."""
        assert self.restart_client is not None
        if (
            self.pod.replicas_can_change
            and self.restart_client.missed_generation
            and self.pod.memory_dir is not None
        ):
            MemoryCheckpointFolder(self.pod.memory_dir).clear()
        self.restart_client.missed_generation = False

    def _exchange_drain_messages(self, meeting: RestartClient, generation: int) -> None:
        if self.drain_requests is not None:
            self.drain_requests.exchange_messages(generation, meeting.find_drain_layout(generation))

    def _outlive_failed_pod(self) -> None:
        end = time.monotonic() + OUTLIVE_SECONDS
        while time.monotonic() < end and not self.is_over():
            time.sleep(CHECK_INTERVAL_SECONDS)


def make_generation(met: GenerationState) -> RankGeneration:
    """Make the generation of a state from the ingest, with attempt 0."""
    return RankGeneration(
        generation=met.generation, excluded_replicas=met.excluded_replicas, layout=met.layout
    )


def run_pod(
    pod: Pod, command: Sequence[str], grace: float, *, generations: bool = False
) -> AttemptResult:
    """Run the pod's ranks to their end. Call it from the main thread.

    ``generations``: when ranks have ended, the ingest decides whether they restart. Raises
    :class:`InputError` if its address is missing.
    """
    program = [shutil.which(command[0]) or command[0], *command[1:]]
    # A single rank needs no preloaded imports, unless it restarts.
    modules = pod.job.spec.trainer.preload if pod.size > 1 or generations else []
    meeting = None
    if generations:
        client = make_generation_client(os.environ, pod.namespace, pod.job.metadata.name)
        meeting = RestartClient(client, pod.index, pod.attempt, print_note, pod.runs_in)
    events, reaper = Events(), Reaper()
    page, ending = (
        PageGateway.from_env(os.environ, print_note),
        AttemptResult(AttemptOutcome.INTERRUPTED),
    )
    environ = {**os.environ, **(page.environ if page is not None else {})}
    try:
        with (
            InterruptHandler(events) as interrupts,
            ForkServerManager(modules, program, os.environ, print_note) as forks,
        ):
            site = PodRankHost(
                pod, program, grace, events, interrupts, meeting,
                environ=environ, fork_servers=forks, page=page,
            )  # fmt: skip
            ending = GenerationRunner(site, reaper, forks, events).run_to_end()
            return ending
    finally:
        if page is not None:
            page.close(ending.outcome.value, ending.reason)
        reaper.close()


def _replace_lost_exit_code(ending: AttemptResult) -> AttemptResult:
    """Replace an exit code by which Kubernetes would replace this pod alone."""
    if choose_exit_code(ending) in POD_LOST_EXITS:
        return replace(ending, status=EXIT_FAILED)
    return ending


def choose_exit_code(ending: AttemptResult) -> int:
    """Exit code of the pod: 0, that of the failed rank, or that of ranks that saved."""
    if ending.outcome is AttemptOutcome.COMPLETED:
        return 0
    if ending.outcome is AttemptOutcome.INTERRUPTED:
        return EXIT_SAVED if ending.saved else EXIT_SIGTERM
    status = ending.status if ending.status is not None else EXIT_FAILED
    return status if status >= 0 else 128 - status


def print_note(text: str) -> None:
    for line in text.split("\n"):
        with contextlib.suppress(OSError):  # The disk of the pod's log may be full.
            print(printable_line(line, LONGEST_LINE_SHOWN), file=sys.stderr, flush=True)
