"""Settings of a pipeline: from the job if there is one, else from the arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from torch.distributed.device_mesh import DeviceMesh

from pipemorph.errors import InputError
from pipemorph.planning import (
    Dispatch,
    Link,
    Plan,
    Policy,
    Problem,
    Route,
    StageTimes,
)
from pipemorph.planning import (
    plan as plan_schedule,
)
from pipemorph.planning.ir import StagePlacement
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.mesh import MeshShape
from pipemorph.spec.sections.faults import Fault
from pipemorph.spec.sections.schedule import Reorder
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer.agent.messages import ControlClient
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.executor.collector_pauses import CollectorChoice
from pipemorph_trainer.executor.microbatch_costs import CostFunction
from pipemorph_trainer.topology.gpu_affinity import choose_own_rails
from pipemorph_trainer.topology.mesh import read_mesh_shape
from pipemorph_trainer.transport.engine_setup import EngineOptions, load_engine_module

RouteChoice = Literal["auto", "direct", "delegated"]
EngineChoice = Literal["auto", "tcp", "shm", "rdma"]
DuplexChoice = Literal["full", "half"]
RecomputeChoice = Literal["never", "auto"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of :class:`pipemorph_trainer.Pipeline` that few scripts need.

    None stands for the job's value, or for the default if there is no job. A value that contradicts
    the job is an error.
    """

    dispatch: Dispatch | str | None = None
    """Choice of the next op: ``static``, the default, in the plan's order; ``guided``, in the
    plan's order of ops whose message has arrived."""
    route: RouteChoice | None = None
    """Route of messages. ``auto``, the default, is direct until a directive delegates a link."""
    engine: EngineChoice | None = None
    """Transport of delegated links: ``auto``, the default, ``tcp``, ``shm`` or ``rdma``."""
    queues: int | None = None
    """Engine queues per direction of a link; default: 8."""
    direct_duplex: DuplexChoice | None = None
    """``half`` gives both directions of a direct link one queue, as a pair of ranks has in
    torch.distributed; for comparisons, on gloo. Default: ``full``."""
    direct_sends: int | None = None
    """Outstanding sends per direction of a direct link before another send blocks compute; at least
    1; default: 2, and 8 on CUDA."""
    faults: Sequence[Fault] | None = None
    """Fault trace, applied in the transport (see
    :class:`pipemorph.spec.sections.faults.Fault`)."""
    host_memory: int | None = None
    """Bytes of host memory on this rank that a plan may use for activations; None without a job: a
    plan with offload is refused."""
    snapshot_iterations: int | None = None
    """Iterations from one copy of the state in memory to the next, if the host has a folder for
    copies; 0: no copies; default: 1, and 0 on a GPU."""
    neighbour: bool | None = None
    """True if pods hold copies of each other's state; default: False."""
    gc: CollectorChoice | None = None
    """Python's garbage collector. ``auto``, the default: if its pauses take more than 0.5 % of the
    time, it runs between iterations, on all ranks at once, unless the script disables it, sets its
    thresholds or freezes objects. ``off``: its pauses are only measured."""
    rebalance: bool | None = None
    """True if plans may give replicas unequal numbers of microbatches. Then give ``step`` a source
    of microbatches. Default: False."""
    control: ControlClient | None = None
    """Source of plans and sink of telemetry; default: the job's agent, if any."""
    reorder: Reorder | None = None
    """Order of the microbatches of a step with costs: ``bits``, the default: in order, so that
    results are those of a plain loop, to the bit. ``sums``: in the order with the shortest
    iteration, so that the sums of gradients are in that order."""
    cost_fn: CostFunction | None = None
    """Function that computes the cost of a microbatch from its arguments on stage 0, such as its
    number of tokens, where ``step`` gets no ``costs``; or the lengths of its samples, from which
    the trainer fits the costs."""

    def to_settings(self) -> dict[str, Any]:
        """Return the values that :class:`Settings` has, by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["control"], values["cost_fn"]
        if self.dispatch is not None:
            values["dispatch"] = Dispatch(self.dispatch)
        return values


def refuse_unknown(caller: str, arguments: Mapping[str, object]) -> None:
    """Refuse keyword ``arguments`` that ``caller`` does not have.

    Raises :class:`InputError` for those that moved to :class:`Options`, with their new place, and
    :class:`TypeError` for others, as a call does.
    """
    for name, value in arguments.items():
        if name in {field.name for field in fields(Options)}:
            raise InputError(
                f"{caller}({name}=...) has moved; use {caller}(options=Options({name}={value!r})),"
                " with Options from pipemorph_trainer"
            )
        raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")


@dataclass(frozen=True)
class Settings:
    """Arguments of :class:`pipemorph_trainer.Pipeline` and its :class:`Options` that a job file
    replaces."""

    mesh: MeshShape
    microbatches: int | None = None
    policy: Policy = Policy.PIPEMORPH
    dispatch: Dispatch = Dispatch.STATIC
    faults: Sequence[Fault] = ()
    deadline_seconds: float = 300.0
    route: RouteChoice = "auto"
    engine: EngineChoice = "auto"
    queues: int = 8
    direct_duplex: DuplexChoice = "full"
    checkpoint: Checkpoint | None = None
    host_memory: int | None = None
    recompute: RecomputeChoice = "never"
    direct_sends: int | None = None
    snapshot_iterations: int | None = None
    neighbour: bool = False
    gc: CollectorChoice = "auto"
    reorder: Reorder = "bits"
    rebalance: bool = False

    def __post_init__(self) -> None:
        if self.snapshot_iterations is not None and self.snapshot_iterations < 0:
            raise InputError(
                f"snapshot_iterations is {self.snapshot_iterations}; expected 0 or more"
            )
        if self.neighbour and self.snapshot_iterations == 0:
            raise InputError(
                "neighbour is True, and snapshot_iterations is 0: no state is copied;"
                " expected at least 1"
            )
        if self.recompute not in get_args(RecomputeChoice):
            raise InputError(f"recompute is {self.recompute!r}; expected never or auto")
        if self.gc not in get_args(CollectorChoice):
            raise InputError(f"gc is {self.gc!r}; expected auto or off")
        if self.reorder not in get_args(Reorder):
            raise InputError(f"reorder is {self.reorder!r}; expected bits or sums")
        if self.direct_sends is not None and self.direct_sends < 1:
            raise InputError(
                f"direct_sends is {self.direct_sends}; expected at least 1, or None for the default"
            )

    @staticmethod
    def from_spec(spec: JobSpec) -> Settings:
        """Read the settings of a job."""
        adaptation = spec.adaptation
        return Settings(
            mesh=spec.parallelism.mesh,
            microbatches=spec.schedule.microbatches,
            policy=spec.schedule.policy_kind,
            dispatch=spec.schedule.dispatch_kind,
            faults=spec.faults,
            deadline_seconds=spec.transport.deadline_seconds,
            route=spec.transport.route,
            engine=spec.transport.engine,
            checkpoint=spec.checkpoint,
            host_memory=adaptation.host_memory if adaptation.allow_offload else None,
            recompute=spec.schedule.recompute,
            snapshot_iterations=spec.recovery.snapshot_iterations,
            neighbour=spec.recovery.neighbour,
            reorder=adaptation.reorder,
            # A job whose other replicas are lost may go on with one.
            rebalance=adaptation.rebalance and spec.parallelism.replicas > 1,
        )

    @property
    def stages(self) -> int:
        return self.mesh.stages

    @property
    def stages_per_rank(self) -> int:
        return self.mesh.stages_per_rank

    @property
    def placement(self) -> StagePlacement:
        return self.mesh.placement

    @staticmethod
    def from_arguments(
        context: TrainerContext, given: Mapping[str, Any], mesh: DeviceMesh | None = None
    ) -> Settings:
        """Return the job's settings if there is one, else those ``given``; None: the default.

        ``mesh``: the user's, if any. Raises :class:`InputError` if an argument contradicts the job
        or the mesh.
        """
        args = {name: value for name, value in given.items() if value is not None}
        job_mesh = None if context.job is None else context.job.spec.parallelism.mesh
        each = args.get("stages_per_rank", 1 if job_mesh is None else job_mesh.stages_per_rank)
        placement = args.get("placement", "interleaved" if job_mesh is None else job_mesh.placement)
        if placement not in get_args(StagePlacement):
            expected = " or ".join(get_args(StagePlacement))
            raise InputError(f"placement is {placement!r}; expected {expected}")
        shape = None if mesh is None else read_mesh_shape(mesh, context.world_size, each, placement)
        if context.job is None:
            stages = args.pop("stages", None)
            args.pop("stages_per_rank", None), args.pop("placement", None)
            if shape is not None and stages not in (None, shape.stages):
                raise InputError(
                    f"Pipeline was given stages={stages}, and its mesh has {shape}; leave stages "
                    "out"
                )
            return Settings(mesh=shape or context.mesh_shape(stages, each, placement), **args)
        wanted_mesh = context.job.spec.parallelism.mesh
        if shape is not None and shape.describe_order() != wanted_mesh.describe_order():
            raise InputError(
                f"Pipeline was given a mesh of {shape.describe_order()}, and the manifest says "
                f"spec.parallelism: {wanted_mesh.describe_order()}; make the mesh with make_mesh()"
            )
        own = {name: args.pop(name) for name in SCRIPT_SETTINGS if name in args}
        settings = replace(Settings.from_spec(context.job.spec), **own)
        for name, value in args.items():
            wanted = getattr(settings, name)
            same = list(value) == list(wanted) if name == "faults" else value == wanted
            if not same:
                raise InputError(
                    f"Pipeline was given {name}={value}, and the manifest says "
                    f"spec.{MANIFEST_FIELDS[name]}: {wanted}; leave the argument out, or make "
                    "the two equal"
                )
        return settings

    def make_initial_plan(self) -> Plan:
        """Make plan 0 without a job: for equal op times and no delays."""
        if self.microbatches is None:
            raise InputError("microbatches is missing; without a job file give it to Pipeline()")
        several = self.stages_per_rank > 1
        problem = Problem(
            microbatches=self.microbatches,
            stages=(StageTimes(forward=1, backward_input=1, backward_weight=1),) * self.stages,
            links=(Link(),) * (self.stages - 1),
            policy=self.policy,
            ranks=self.mesh.sizes["pp"] if several else None,
            placement=self.placement,
        )
        first = Route.DELEGATED if self.route == "delegated" else Route.DIRECT
        routes = (first,) * (self.stages - 1)
        return plan_schedule(problem).to_plan(0, routes, self.dispatch)


MANIFEST_FIELDS = {
    "stages": "parallelism.stages",
    "stages_per_rank": "parallelism.stagesPerRank",
    "placement": "parallelism.stagePlacement",
    "microbatches": "schedule.microbatches",
    "policy": "schedule.policy",
    "dispatch": "schedule.dispatch",
    "faults": "faults",
    "deadline_seconds": "transport.deadlineSeconds",
    "route": "transport.route",
    "engine": "transport.engine",
    "checkpoint": "checkpoint",
    "host_memory": "adaptation.hostMemory",
    "recompute": "schedule.recompute",
    "snapshot_iterations": "recovery.snapshotIterations",
    "neighbour": "recovery.neighbour",
    "reorder": "adaptation.reorder",
    "rebalance": "adaptation.rebalance",
}
"""Field in ``spec`` of each setting."""
SCRIPT_SETTINGS = ("direct_sends", "queues", "direct_duplex", "gc")
"""Settings that only a script has."""


def choose_engine_options(
    context: TrainerContext, settings: Settings, first: Plan, *, directed: bool
) -> EngineOptions | None:
    """Return the options of the engine; None if it is not needed.

    The engine is needed if the ``first`` plan delegates a link or a later plan may. ``directed``:
    later plans come as directives, which respect the job's route. Raises :class:`InputError` if the
    first plan needs the engine and it is not built.
    """
    if settings.mesh.sizes["pp"] == 1:
        return None
    delegates = Route.DELEGATED in first.routes
    if not delegates and settings.route == "direct" and directed:
        return None
    if load_engine_module() is None:
        if delegates:
            raise InputError(
                "the plan delegates links but the transfer engine is not built; use route direct, "
                "or install pipemorph again: its wheel, or pip install -e . in its source folder"
            )
        return None
    name = context.job.metadata.name if context.job else "job"
    job = f"{context.namespace}/{name}/{context.attempt}"
    if context.job is None:
        return EngineOptions(job, settings.engine, settings.queues)
    wanted = context.job.spec.transport
    rdma = wanted.rdma
    if not rdma.devices:
        own = choose_own_rails(context.local_rank, context.local_world_size)
        rdma = rdma.model_copy(update={"devices": own})
    return EngineOptions(
        job, settings.engine, settings.queues, wanted.require, wanted.integrity, rdma
    )
