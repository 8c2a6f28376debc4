"""One pod, by the variables that the operator gives it: which ranks of the job it has, and when."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipemorph.api.running import Running
from pipemorph.api.sections.recovery import FailurePolicy
from pipemorph.api.spec import PipeMorphJob
from pipemorph.errors import InputError
from pipemorph.local.generations import Life
from pipemorph.local.processes.rank_log import PrefixedLog
from pipemorph.wire import GenerationState
from pipemorph_trainer.context import TrainerContext


@dataclass(frozen=True)
class Pod:
    """The ranks of this pod: ``first`` and the ``size - 1`` after it."""

    job: PipeMorphJob
    first: int
    size: int
    attempt: int = 0
    namespace: str = "default"
    secret: bytes = b""
    kept_dir: Path | None = None
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    """When ranks are taken for hanging."""
    address: str | None = None
    """Of any pod of the job, with its number in the place of ``{}``; None: all have that of the
    first one."""
    kept_first: int | None = None
    """By what number copies of its first rank are found, see :meth:`within`; None: ``first``."""

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
            index * size,
            size,
            context.attempt,
            context.namespace,
            context.secret,
            context.kept_dir,
            _policy(environ),
            environ.get("PIPEMORPH_POD_ADDRESS"),
        )

    @property
    def index(self) -> int:
        return self.first // self.size

    @property
    def pods(self) -> int:
        """Number of pods of the job."""
        return self.job.spec.parallelism.world_size // self.size

    @property
    def resizes(self) -> bool:
        """Whether generations may have different replicas."""
        return self.job.spec.parallelism.min_replicas is not None

    @property
    def layers_move(self) -> bool:
        """Whether generations may have different layers."""
        spec = self.job.spec
        return spec.adaptation.relayout and spec.parallelism.layers is not None

    def runs_in(self, told: GenerationState | Life) -> bool:
        """Whether this pod has ranks in a generation."""
        return self._running(told).has(self.index)

    def within(self, life: Life) -> Pod:
        """This pod with its ranks of a generation, and the job of the replicas that run in it."""
        if not (life.left_out or life.places):
            return self
        running = self._running(life)
        job = self.job.model_copy(update={"spec": running.spec(self.job.spec)})
        kept = running.place(self.index) * self.size
        return replace(self, job=job, first=running.rank(kept), kept_first=kept)

    def _running(self, told: GenerationState | Life) -> Running:
        return Running(self.job.spec.parallelism, told.left_out, told.places)

    def environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """The variables of one rank."""
        rank = self.first + local_rank
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
        if self.kept_first is not None:
            own["PIPEMORPH_KEPT_RANK"] = str(self.kept_first + local_rank)
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
