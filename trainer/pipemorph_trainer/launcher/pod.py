"""The ranks of one pod: starts them, and waits until all have ended."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipemorph.api.spec import PipeMorphJob
from pipemorph.errors import InputError
from pipemorph.exits import EXIT_SAVED
from pipemorph.local.processes.forks import Forks
from pipemorph.local.processes.interrupts import Interrupts
from pipemorph.local.processes.rank_log import PrefixedLog
from pipemorph.local.processes.ranks import RankSet, Reaper
from pipemorph.local.processes.supervise import End, Ending, Events, RankExited, supervise
from pipemorph_trainer.context import TrainerContext

EXIT_FAILED = 1
EXIT_SIGTERM = 143


@dataclass(frozen=True)
class Pod:
    """The ranks of this pod: ``first`` and the ``size - 1`` after it."""

    job: PipeMorphJob
    first: int
    size: int

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Pod:
        """Raises :class:`InputError`, which names the variable that is missing or invalid."""
        found = {}
        for name in ("PIPEMORPH_POD_INDEX", "LOCAL_WORLD_SIZE"):
            text = environ.get(name)
            if text is None or not text.isdecimal():
                raise InputError(f"{name} is {text!r}; expected a number, set by the operator")
            found[name] = int(text)
        index, size = found["PIPEMORPH_POD_INDEX"], found["LOCAL_WORLD_SIZE"]
        # The same checks as in a rank, and before any of them has started.
        context = TrainerContext.from_env({**environ, "RANK": str(index * size)})
        if context.job is None:
            raise InputError("PIPEMORPH_JOB_FILE is not set; the operator sets it")
        if size < 1 or (index + 1) * size > context.world_size:
            raise InputError(
                f"pod {index} with {size} ranks is outside of a job of {context.world_size} ranks"
            )
        return Pod(context.job, index * size, size)

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables of one rank."""
        own = {"RANK": str(self.first + local_rank), "LOCAL_RANK": str(local_rank)}
        port = environ.get("PIPEMORPH_METRICS_PORT")
        if port and int(port):
            # The ranks of a pod share its address.
            own["PIPEMORPH_METRICS_PORT"] = str(int(port) + local_rank)
        return {**environ, **own}


def run(pod: Pod, command: Sequence[str], grace: float) -> Ending:
    """Run the pod's ranks to their end. Call it from the main thread."""
    events = Events()
    reaper = Reaper()
    program = [shutil.which(command[0]) or command[0], *command[1:]]
    mesh = pod.job.spec.parallelism.mesh

    def exited(rank: int, status: int) -> None:
        events.put(RankExited(rank, status))

    def note(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    # A single rank needs nobody to have imported before it.
    modules = pod.job.spec.trainer.preload if pod.size > 1 else []
    try:
        with (
            Interrupts(events) as interrupts,
            Forks(modules, program, os.environ, note) as forks,
            RankSet(reaper, exited, forks.server(lambda: interrupts.received is not None)) as ranks,
        ):
            for local_rank in range(pod.size):
                rank = pod.first + local_rank
                ranks.start(
                    mesh.coordinate(rank),
                    program,
                    pod.environment(local_rank, os.environ),
                    PrefixedLog(f"[rank {rank}] ", sys.stdout.buffer),
                )
            return supervise(
                ranks,
                events,
                refresh=lambda: None,
                note=note,
                grace=grace,
                straggle=pod.job.spec.transport.deadline_seconds,
            )
    finally:
        reaper.close()


def exit_code(ending: Ending) -> int:
    """The exit code of the pod: 0, or that of the rank that failed, or of those that saved."""
    if ending.end is End.COMPLETED:
        return 0
    if ending.end is End.INTERRUPTED:
        return EXIT_SAVED if ending.saved else EXIT_SIGTERM
    status = ending.status if ending.status is not None else EXIT_FAILED
    return status if status >= 0 else 128 - status
