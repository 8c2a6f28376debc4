"""One pod, by the variables that the operator gives it: which ranks of the job it has, and when."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipemorph.api.running import Running
from pipemorph.api.sections.parallelism import Parallelism
from pipemorph.api.sections.recovery import FailurePolicy
from pipemorph.api.spec import PipeMorphJob
from pipemorph.errors import InputError
from pipemorph.local.generations import Life
from pipemorph.local.processes.rank_log import PrefixedLog
from pipemorph.wire import GenerationState
from pipemorph_trainer.context import TrainerContext


@dataclass(frozen=True)
class Pod:
    """The pod number ``index`` of a job. ``ranks``: by their numbers in it, those that it runs."""

    job: PipeMorphJob
    index: int
    ranks: tuple[int, ...]
    attempt: int = 0
    namespace: str = "default"
    secret: bytes = b""
    kept_dir: Path | None = None
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    """When ranks are taken for hanging."""
    address: str | None = None
    """Of any pod of the job, with its number in the place of ``{}``; None: all have that of the
    first one."""

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
        return Pod(
            context.job,
            index,
            tuple(range(index * size, (index + 1) * size)),
            context.attempt,
            context.namespace,
            context.secret,
            context.kept_dir,
            _policy(environ),
            environ.get("PIPEMORPH_POD_ADDRESS"),
        )

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def cut(self) -> Parallelism:
        return self.job.spec.parallelism

    @property
    def pods(self) -> int:
        """Number of pods of the job."""
        return self.cut.world_size // self.size

    @property
    def resizes(self) -> bool:
        """Whether generations may have different replicas."""
        return self.job.spec.parallelism.min_replicas is not None

    @property
    def moves(self) -> bool:
        """Whether generations may have different layouts."""
        return self.job.spec.adaptation.relayout

    def runs_in(self, told: GenerationState | Life) -> bool:
        """Whether this pod has ranks in a generation."""
        return Running(self.cut, told.left_out).has(self.index)

    def first_pod(self, life: Life) -> int:
        """The pod of rank 0 in a generation."""
        if life.left_out:
            return Running(self.cut, life.left_out).pods[0]
        return life.layout.pod(0, self.size)

    def within(self, life: Life) -> Pod:
        """This pod with its ranks of a generation, and the job of the replicas that run in it."""
        if life.left_out:
            running = Running(self.cut, life.left_out)
            job = self.job.model_copy(update={"spec": running.spec(self.job.spec)})
            ranks = tuple(map(running.rank, self.ranks))
            return replace(self, job=job, ranks=ranks)
        return replace(self, ranks=tuple(life.layout.ranks_in(self.index, self.size)))

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables of one rank."""
        own = {
            "RANK": str(self.ranks[local_rank]),
            "LOCAL_RANK": str(local_rank),
            # Copies belong to places: what a rank left is where it was.
            "PIPEMORPH_PLACE": str(self.index * self.size + local_rank),
        }
        port = environ.get("PIPEMORPH_METRICS_PORT")
        if port and int(port):
            # The ranks of a pod share its address.
            own["PIPEMORPH_METRICS_PORT"] = str(int(port) + local_rank)
        return {**environ, **own}

    def log(self, rank: int) -> PrefixedLog:
        """The lines of the only rank of a pod need no prefix."""
        return PrefixedLog(f"[rank {rank}] " if self.size > 1 else "", sys.stdout.buffer)


def _policy(environ: Mapping[str, str]) -> FailurePolicy:
    """The job's file has no failure policy, so that an edit of it ends no rank."""
    names = {"hangSeconds": "PIPEMORPH_HANG_SECONDS", "startSeconds": "PIPEMORPH_START_SECONDS"}
    given = {key: environ[name] for key, name in names.items() if environ.get(name)}
    for key, text in given.items():
        if not text.isdecimal() or int(text) == 0:
            raise InputError(f"{names[key]} is {text!r}; expected seconds, at least 1")
    return FailurePolicy.model_validate({key: int(text) for key, text in given.items()})
