"""Pod of a job, as described by the variables that the operator sets: its ranks, per generation."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipemorph.errors import InputError
from pipemorph.local.generation_runner import RankGeneration
from pipemorph.local.processes.rank_log import PrefixedRankLog
from pipemorph.protocol import GenerationState
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.running_subset import RunningSubset
from pipemorph.spec.sections.parallelism import Parallelism
from pipemorph.spec.sections.recovery import FailurePolicy
from pipemorph_trainer.context import TrainerContext


@dataclass(frozen=True)
class Pod:
    """Pod number ``index`` of a job. ``ranks``: global numbers of its ranks, by local number."""

    job: PipeMorphJob
    index: int
    ranks: tuple[int, ...]
    attempt: int = 0
    namespace: str = "default"
    secret: bytes = b""
    memory_dir: Path | None = None
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    """Limits after which a rank counts as hung."""
    address: str | None = None
    """Address of the pods, with ``{}`` for the number of a pod; None: all use that of the first
    one."""

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Pod:
        """Read the pod. Raises :class:`InputError`, which names a missing or invalid variable."""
        found = {}
        for name in ("PIPEMORPH_POD_INDEX", "LOCAL_WORLD_SIZE"):
            text = environ.get(name)
            if text is None or not text.isdecimal():
                raise InputError(f"{name} is {text!r}; expected a number, set by the operator")
            found[name] = int(text)
        index, size = found["PIPEMORPH_POD_INDEX"], found["LOCAL_WORLD_SIZE"]
        # These are the checks of a rank, before any rank has started.
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
            context.memory_dir,
            _read_failure_policy(environ),
            environ.get("PIPEMORPH_POD_ADDRESS"),
        )

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def parallelism(self) -> Parallelism:
        return self.job.spec.parallelism

    @property
    def pod_count(self) -> int:
        """Number of pods of the job."""
        return self.parallelism.world_size // self.size

    @property
    def replicas_can_change(self) -> bool:
        """True if generations may have different replicas."""
        return self.job.spec.parallelism.min_replicas is not None

    @property
    def layout_can_change(self) -> bool:
        """True if generations may have different layouts."""
        return self.job.spec.adaptation.relayout

    def runs_in(self, generation: GenerationState | RankGeneration) -> bool:
        """True if this pod has ranks in ``generation``."""
        return RunningSubset(self.parallelism, generation.excluded_replicas).runs_in_pod(self.index)

    def find_first_pod(self, life: RankGeneration) -> int:
        """Number of the pod that has rank 0 in a generation."""
        if life.excluded_replicas:
            return RunningSubset(self.parallelism, life.excluded_replicas).active_pods[0]
        return life.layout.find_pod(0, self.size)

    def select_generation(self, life: RankGeneration) -> Pod:
        """Restrict this pod to its ranks of a generation, and the job to the running replicas."""
        if life.excluded_replicas:
            running = RunningSubset(self.parallelism, life.excluded_replicas)
            job = self.job.model_copy(update={"spec": running.build_reduced_spec(self.job.spec)})
            ranks = tuple(map(running.renumber_rank, self.ranks))
            return replace(self, job=job, ranks=ranks)
        return replace(self, ranks=tuple(life.layout.find_ranks_in_pod(self.index, self.size)))

    def make_rank_environment(self, local_rank: int, environ: Mapping[str, str]) -> dict[str, str]:
        """Environment of a rank, based on ``environ``."""
        own = {
            "RANK": str(self.ranks[local_rank]),
            "LOCAL_RANK": str(local_rank),
            # Copies of the state belong to places, not to ranks.
            "PIPEMORPH_PLACE": str(self.index * self.size + local_rank),
        }
        port = environ.get("PIPEMORPH_METRICS_PORT")
        if port and int(port):
            # The ranks of a pod share its address.
            own["PIPEMORPH_METRICS_PORT"] = str(int(port) + local_rank)
        return {**environ, **own}

    def open_rank_log(self, rank: int) -> PrefixedRankLog:
        """Log of a rank; a prefix names the rank if the pod has several."""
        return PrefixedRankLog(f"[rank {rank}] " if self.size > 1 else "", sys.stdout.buffer)


def _read_failure_policy(environ: Mapping[str, str]) -> FailurePolicy:
    """Failure policy from variables: the job's file has none, so that an edit ends no rank."""
    names = {"hangSeconds": "PIPEMORPH_HANG_SECONDS", "startSeconds": "PIPEMORPH_START_SECONDS"}
    given = {key: environ[name] for key, name in names.items() if environ.get(name)}
    for key, text in given.items():
        if not text.isdecimal() or int(text) == 0:
            raise InputError(f"{names[key]} is {text!r}; expected seconds, at least 1")
    return FailurePolicy.model_validate({key: int(text) for key, text in given.items()})
