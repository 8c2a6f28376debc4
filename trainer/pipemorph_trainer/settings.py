"""How a pipeline runs: as the job says where there is one, else as its arguments do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Link,
    Path,
    Plan,
    Policy,
    Problem,
    StageTimes,
)
from pipemorph.planning import (
    plan as plan_schedule,
)
from pipemorph.spec import Checkpoint, Fault, JobSpec
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.links import EngineOptions, engine_module

PathChoice = Literal["auto", "direct", "delegated"]
EngineChoice = Literal["auto", "tcp", "shm", "rdma"]
DuplexChoice = Literal["full", "half"]


@dataclass(frozen=True)
class Settings:
    """The arguments of :class:`pipemorph_trainer.Pipeline` that a job file replaces; they are
    explained there. The plan is made from the others."""

    stages: int
    faults: Sequence[Fault]
    deadline_seconds: float
    path: PathChoice
    engine: EngineChoice
    queues: int
    direct_duplex: DuplexChoice
    checkpoint: Checkpoint | None
    host_memory: int | None
    direct_sends: int | None = None

    def __post_init__(self) -> None:
        if self.direct_sends is not None and self.direct_sends < 1:
            raise InputError(
                f"direct_sends is {self.direct_sends}; expected at least 1, or None for the default"
            )

    @staticmethod
    def of(spec: JobSpec) -> Settings:
        adaptation = spec.adaptation
        return Settings(
            stages=spec.parallelism.stages,
            faults=spec.faults,
            deadline_seconds=spec.transport.deadline_seconds,
            path=spec.transport.path,
            engine=spec.transport.engine,
            queues=spec.transport.queues,
            direct_duplex=spec.transport.direct_duplex,
            checkpoint=spec.checkpoint,
            host_memory=adaptation.host_memory if adaptation.allow_offload else None,
        )


def plain_plan(
    stages: int, microbatches: int | None, policy: Policy, dispatch: Dispatch, path: PathChoice
) -> Plan:
    """Plan 0 without a job: equal op times, no delay."""
    if microbatches is None:
        raise InputError("microbatches is missing; without a job file give it to Pipeline()")
    problem = Problem(
        microbatches=microbatches,
        stages=(StageTimes(forward=1, backward_input=1, backward_weight=1),) * stages,
        links=(Link(),) * (stages - 1),
        policy=policy,
    )
    paths = (Path.DELEGATED if path == "delegated" else Path.DIRECT,) * (stages - 1)
    return plan_schedule(problem).to_plan(0, paths, dispatch)


def engine_options(
    context: TrainerContext, settings: Settings, first: Plan, *, directed: bool
) -> EngineOptions | None:
    """How to make the engine; None where it is not needed.

    The engine runs where a link is delegated by the ``first`` plan, or a later one may delegate
    it. ``directed``: later plans are directives, which keep to the job's path. Raises
    :class:`InputError` where the first plan needs the engine and it is not built.
    """
    if settings.stages == 1:
        return None
    delegates = Path.DELEGATED in first.paths
    if not delegates and settings.path == "direct" and directed:
        return None
    if engine_module() is None:
        if delegates:
            raise InputError(
                "the plan delegates links but the transfer engine is not built; run "
                "`pip install -e .`, or use path direct"
            )
        return None
    name = context.job.metadata.name if context.job else "job"
    job = f"{context.namespace}/{name}/{context.attempt}"
    if context.job is None:
        return EngineOptions(job, settings.engine, settings.queues)
    wanted = context.job.spec.transport
    return EngineOptions(job, settings.engine, settings.queues, wanted.require, wanted.rdma)
