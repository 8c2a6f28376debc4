"""The ranks of one pod: starts them, and waits until all have ended."""

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

from pipemorph.api.layout import Layout
from pipemorph.errors import InputError, printable_line
from pipemorph.exits import EXIT_NO_MORE, EXIT_SAVED, EXIT_SIGTERM, EXITS_LOST
from pipemorph.local.generations import Generations, Life
from pipemorph.local.moves import LeaveRequests
from pipemorph.local.processes.forks import Forks
from pipemorph.local.processes.hang import HangWatch
from pipemorph.local.processes.interrupts import Interrupts
from pipemorph.local.processes.kept import KeptFolder
from pipemorph.local.processes.ranks import RankSet, Reaper
from pipemorph.local.processes.supervise import (
    LONGEST_LINE_SHOWN,
    End,
    Ending,
    Events,
    Supervision,
    loss_of,
)
from pipemorph.wire import GenerationState
from pipemorph_trainer.launcher.meeting import Meeting, ingest_client
from pipemorph_trainer.launcher.page.gate import PageGate
from pipemorph_trainer.launcher.pod import Pod

EXIT_FAILED = 1
MEET_SECONDS = 60.0
"""How long to wait for the next generation, beside the grace period that ranks elsewhere may use
up: longer than another ingest needs to take over."""
JOIN_SECONDS = 300.0
"""How long a pod that begins asks for an ingest: it may be a new one in the place of another, whose
ranks must not begin as generation 0. Others wait as long for a pod that takes a place."""
FOLLOW_SECONDS = 5.0
"""By how much a pod outlives the one whose rank has failed: its end would be taken for the cause,
and end that pod before its log is whole."""
LOOK_SECONDS = 0.05


def generation_secret(secret: bytes, generation: int) -> bytes:
    """The engine's secret of a generation, the same in all pods, and of no use for the others."""
    return hmac.new(secret, b"generation %d" % generation, hashlib.sha256).hexdigest().encode()


@dataclass
class PodSite:
    """The :class:`~pipemorph.local.generations.Site` of a pod. Without a ``meeting``, the end of a
    rank is that of the pod."""

    pod: Pod
    program: list[str]
    grace: float
    events: Events
    interrupts: Interrupts
    meeting: Meeting | None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    forks: Forks | None = None
    page: PageGate | None = None
    """Serves the live page while rank 0 runs in this pod; None: nobody does."""
    hangs: HangWatch = field(init=False)
    requests: LeaveRequests | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.meeting is not None and self.pod.kept_dir is not None:
            self.requests = LeaveRequests(KeptFolder(self.pod.kept_dir), self.meeting, note)
        self.hangs = HangWatch(self.pod.policy, self.pod.job.spec.trainer.iterations)

    def first(self) -> Life | Ending:
        if self.meeting is None:
            return Life()
        patience = MEET_SECONDS + self.grace
        met = self.meeting.join(JOIN_SECONDS, self.is_over, meets=patience)
        if self.is_over():
            return Ending(End.INTERRUPTED)
        if isinstance(met, str):
            needs = (
                "only the ingest knows which generation of the ranks runs: see that it runs, and"
                f" that this pod reaches {self.meeting.url}"
            )
            # Nobody has lost ranks by that: the host makes another pod.
            return Ending(End.FAILED, met, (needs,), status=EXIT_SIGTERM)
        if not met.verdict and not self.pod.runs_in(met):
            # Others train meanwhile, and stop only when this pod can begin.
            if self.forks is not None:
                self.forks.server(self.is_over)
            late = self.meeting.meet(met.generation, None, patience, self.is_over)
            if self.is_over():
                return Ending(End.INTERRUPTED)
            if isinstance(late, str):
                # Nobody has lost ranks by that: the host makes another pod.
                return Ending(End.FAILED, late, status=EXIT_SIGTERM)
            self.meeting.missed, met = False, late
        if met.verdict == "completed":
            return Ending(End.COMPLETED)
        if met.verdict:
            if met.cause != self.pod.index:
                self._follow()
            return Ending(End.FAILED, f"the attempt ends: {met.why or met.reason}")
        life = life_of(met)
        if met.generation:
            ranks = ", ".join(map(str, self.pod.within(life).ranks))
            note(
                f"this pod takes the place of another one, in generation {met.generation}:"
                f" rank {ranks}"
            )
        return life

    @contextmanager
    def shared(self, life: Life) -> Iterator[dict[str, str]]:
        """The variables of a generation, its secret, and where its ranks count iterations."""
        env = {**self.environ, "PIPEMORPH_GENERATION": str(life.generation)}
        if self.meeting is None and not self.hangs.watches:
            yield env  # A pod may have no folder that can be written.
            return
        try:
            made = tempfile.TemporaryDirectory(prefix="life-", dir=self.pod.kept_dir)
        except OSError as error:
            raise InputError(
                f"no folder can be made for what the ranks of this pod finish ({error}); set"
                " PIPEMORPH_KEPT_DIR to one that can be written, such as a volume of the pod"
            ) from error
        with made as folder:
            env["PIPEMORPH_PROGRESS_DIR"] = folder
            if life.generation > 0 and self.pod.secret:
                file = Path(folder) / "engine"
                file.touch(mode=0o600)
                file.write_bytes(generation_secret(self.pod.secret, life.generation))
                env["PIPEMORPH_SECRET_FILE"] = str(file)
            yield env | self._changed(Path(folder), life)

    def _changed(self, folder: Path, life: Life) -> dict[str, str]:
        """The variables of all ranks of a generation without some replicas, or with another
        layout."""
        env: dict[str, str] = {}
        if life.layout.layers:
            env["PIPEMORPH_LAYERS"] = json.dumps(life.layout.layers)
        if self.pod.moves:
            env["PIPEMORPH_PLACES"] = Layout.of(self.pod.cut).changed(life.layout).text
        if life.left_out:
            job, file = self.pod.within(life).job, folder / "job.json"
            file.write_text(job.model_dump_json(by_alias=True, exclude_defaults=True))
            env["PIPEMORPH_JOB_FILE"] = str(file)
            env["WORLD_SIZE"] = str(job.spec.parallelism.world_size)
        if self.pod.address is not None and (first := self.pod.first_pod(life)):
            env["MASTER_ADDR"] = self.pod.address.replace("{}", str(first))
        return env

    def start(self, ranks: RankSet, life: Life, shared: dict[str, str]) -> None:
        pod = self.pod.within(life)
        mesh = pod.job.spec.parallelism.mesh
        folder = shared.get("PIPEMORPH_PROGRESS_DIR")
        self.hangs.begin(HangWatch.files(Path(folder), pod.ranks) if folder else ())
        for local_rank, rank in enumerate(pod.ranks):
            env = pod.environment(local_rank, shared)
            ranks.start(mesh.coordinate(rank), self.program, env, pod.log(rank))
        if self.page is not None and 0 in pod.ranks:
            self.page.open()
        if self.meeting is not None:
            self.meeting.watch(life.generation)
        if self.requests is not None:
            self.requests.begin(word=0 in pod.ranks and life.generation > 0)

    def watch(self, ranks: RankSet, life: Life) -> Ending:
        ending = self._supervise(ranks, life)
        self.hangs.end()
        for index, rank in enumerate(ranks.ranks):
            how_far = self.hangs.early(index) if ending.end is End.COMPLETED else None
            if how_far:
                reason = f"{rank.position} {rank.outcome()} {how_far}"
                return Ending(End.FAILED, reason, retry=True, position=rank.position)
        return ending

    def _supervise(self, ranks: RankSet, life: Life) -> Ending:
        meeting = self.meeting
        return Supervision(
            ranks, self.events, note=note, grace=self.grace,
            refresh=lambda: None if meeting is None else self._look(meeting, life.generation),
            straggle=self.pod.job.spec.transport.deadline_seconds,
            recovers=meeting is not None, saves=self.pod.job.spec.checkpoint is not None,
            # Ranks leave only by an agreement of all, which another pod may have asked for.
            moves=lambda: meeting is not None and (self.pod.resizes or self.pod.moves),
            hung=self.hangs.look, early=self.hangs.early,
            told=lambda: None if meeting is None else meeting.over(life.generation),
            on_failure=lambda ending: self._tell(life, ending),
        ).run()  # fmt: skip

    def is_over(self) -> bool:
        return self.interrupts.received is not None

    def agree(self, life: Life, ending: Ending) -> Life | Ending:
        if ending.status == EXIT_NO_MORE:
            ending = replace(ending, status=EXIT_FAILED)  # A rank's own code means nothing like it.
        if self.meeting is None:
            return ending
        if ending.end is End.INTERRUPTED and ending.saved and not self.is_over():
            # Another pod was asked to end, and ranks of all have saved: this one stays.
            reason = f"the ranks saved and ended with those of another pod ({ending.reason})"
            ending = replace(ending, end=End.FAILED, reason=reason, retry=True, lost_peer=True)
        if ending.end is End.MOVED:
            why = "the layout can change" if self.pod.moves else "a replica can join"
            note(f"the ranks have left, so that {why}")
        elif ending.end not in (End.COMPLETED, End.FAILED):
            return ending
        if ending.end is End.COMPLETED:
            if self.pod.pods > 1:
                self.meeting.completed(life.generation, self.is_over)
            return ending
        if self.page is not None:
            self.page.explain(ending.reason)
        if ending.end is not End.MOVED:
            note(ending.describe())
        # Of ranks that hang, all pods say what theirs did.
        told = ending.end is End.MOVED or (ending.told and not ending.hang)
        loss = None if told else loss_of(ending)
        patience = MEET_SECONDS + self.grace
        met = self.meeting.meet(
            life.generation,
            loss,
            patience,
            self.is_over,
            finished=self.hangs.finished,
            reached=self.hangs.reached if self.pod.moves else 0,
            began=self.hangs.began_with if self.pod.moves else 0,
            left=ending.end is End.MOVED and self.pod.moves,
        )
        if self.is_over():
            return replace(ending, end=End.INTERRUPTED)
        self._forget_what_is_old()
        if not isinstance(met, str) and met.verdict == "completed":
            return Ending(End.COMPLETED)
        if ending.end is End.MOVED:
            ending = replace(ending, end=End.FAILED)
        ending = _not_as_lost(ending)
        if isinstance(met, str):
            why = f"not started again within the pod: {met}"
            return replace(ending, details=(*ending.details, why))
        if not met.verdict:
            without = ", ".join(map(str, met.left_out))
            what = f", without replica {without}" if without else ""
            following = life_of(met)
            if following.layout != life.layout:
                what += f", with {following.layout}"
            note(f"the ranks start again as generation {met.generation}{what}")
            return replace(following, attempt=life.attempt)
        if met.why:
            ending = replace(ending, details=(*ending.details, met.why))
        if met.cause != self.pod.index:
            self._follow()
            return replace(ending, status=EXIT_FAILED)
        return ending if met.verdict == "attempt" else replace(ending, status=EXIT_NO_MORE)

    def _tell(self, life: Life, ending: Ending) -> None:
        if self.meeting is not None and not ending.told:
            self.meeting.failed(life.generation, loss_of(ending))

    def _forget_what_is_old(self) -> None:
        """Remove copies of the state of an earlier generation, if one ran without this pod: those
        of the others are of the same iterations, but of other batches."""
        assert self.meeting is not None
        if self.pod.resizes and self.meeting.missed and self.pod.kept_dir is not None:
            KeptFolder(self.pod.kept_dir).clear()
        self.meeting.missed = False

    def _look(self, meeting: Meeting, generation: int) -> None:
        if self.requests is not None:
            self.requests.look(generation, meeting.leaves(generation))

    def _follow(self) -> None:
        end = time.monotonic() + FOLLOW_SECONDS
        while time.monotonic() < end and not self.is_over():
            time.sleep(LOOK_SECONDS)


def life_of(met: GenerationState) -> Life:
    """A generation, in its first attempt here."""
    return Life(generation=met.generation, left_out=met.left_out, layout=met.layout)


def run(pod: Pod, command: Sequence[str], grace: float, *, generations: bool = False) -> Ending:
    """Run the pod's ranks to their end. Call it from the main thread.

    ``generations``: when ranks have ended, ask the ingest whether to start them again. Raises
    :class:`InputError` if it is not known where that is.
    """
    program = [shutil.which(command[0]) or command[0], *command[1:]]
    # A single rank needs nobody to have imported before it, unless it starts again.
    modules = pod.job.spec.trainer.preload if pod.size > 1 or generations else []
    meeting = None
    if generations:
        client = ingest_client(os.environ, pod.namespace, pod.job.metadata.name)
        meeting = Meeting(client, pod.index, pod.attempt, note, pod.runs_in)
    events, reaper = Events(), Reaper()
    page, ending = PageGate.from_env(os.environ, note), Ending(End.INTERRUPTED)
    environ = {**os.environ, **(page.environ if page is not None else {})}
    try:
        with (
            Interrupts(events) as interrupts,
            Forks(modules, program, os.environ, note) as forks,
        ):
            site = PodSite(
                pod, program, grace, events, interrupts, meeting,
                environ=environ, forks=forks, page=page,
            )  # fmt: skip
            ending = Generations(site, reaper, forks, events).to_the_end()
            return ending
    finally:
        if page is not None:
            page.close(ending.end.value, ending.reason)
        reaper.close()


def _not_as_lost(ending: Ending) -> Ending:
    """An ending whose exit code is not one by which Kubernetes would replace this pod alone."""
    if exit_code(ending) in EXITS_LOST:
        return replace(ending, status=EXIT_FAILED)
    return ending


def exit_code(ending: Ending) -> int:
    """The exit code of the pod: 0, or that of the rank that failed, or of those that saved."""
    if ending.end is End.COMPLETED:
        return 0
    if ending.end is End.INTERRUPTED:
        return EXIT_SAVED if ending.saved else EXIT_SIGTERM
    status = ending.status if ending.status is not None else EXIT_FAILED
    return status if status >= 0 else 128 - status


def note(text: str) -> None:
    for line in text.split("\n"):
        with contextlib.suppress(OSError):  # The disk of the pod's log may be full.
            print(printable_line(line, LONGEST_LINE_SHOWN), file=sys.stderr, flush=True)
