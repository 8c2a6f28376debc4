"""Preparation of a rank: its decisions before the first exchange with the other ranks."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from pipemorph.control.first_plan import build_initial_problem, initial_plan
from pipemorph.errors import InputError
from pipemorph.planning import Plan
from pipemorph.protocol import PlanMessage, PlannedTimes
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.agent.rank_plan import RankPlan, split_plan
from pipemorph_trainer.backward import Mode
from pipemorph_trainer.backward.microbatch_state import LossFn
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.executor.emulated_stage import EmulatedStage
from pipemorph_trainer.executor.local_stage import (
    Stage,
    StageMemory,
    find_cuda_graph_refusal,
    find_stage_device,
    parse_split_mode,
)
from pipemorph_trainer.executor.op_runner import ExternalStage
from pipemorph_trainer.schedule.microbatch_source import explain_no_rebalance
from pipemorph_trainer.schedule.plan_store import check_device_limits, check_shares
from pipemorph_trainer.settings import Settings, choose_engine_options
from pipemorph_trainer.startup import StartupInfo, hash_plan
from pipemorph_trainer.sync.fingerprints import describe_tensors
from pipemorph_trainer.sync.scaler import GradScaler
from pipemorph_trainer.sync.tied_weights import describe_tied as tied_forms
from pipemorph_trainer.sync.tied_weights import parse_ties as parse_tied
from pipemorph_trainer.topology.accelerator import Accelerator
from pipemorph_trainer.topology.model_shard import ModelShard
from pipemorph_trainer.topology.placement import get_loaded_class
from pipemorph_trainer.transport.engine_setup import EngineOptions


@dataclass(frozen=True)
class RankPreparation:
    """Components of a pipeline that need no other rank.

    ``split``: mode in which a module runs B and W apart. ``memory``: by stage, options for its
    activations. ``engine``: options of the transfer engine; None if it is not needed.
    ``microbatches``: N, those of a replica if all have as many.
    """

    settings: Settings
    plan: RankPlan
    split: Mode
    memory: Mapping[int, StageMemory]
    engine: EngineOptions | None
    microbatches: int


StageOrBuilder = Stage | Sequence[Stage] | Callable[[ModelShard], Stage]
"""First argument of a pipeline: a stage, several in order, or a function that builds each."""
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
State = Mapping[str, Any]
MakeState = Callable[[torch.optim.Optimizer], State]


class BuiltStages(NamedTuple):
    """Stages of a rank, with optimizer and state. ``failure``: error of a user's function, which
    all ranks must get. ``parts``: shards of the model that were built; None: given."""

    stages: list[Any]
    optimizer: torch.optim.Optimizer | None
    state: State
    failure: Exception | None
    parts: list[ModelShard] | None = None


def build_stages(
    given_stages: StageOrBuilder,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None,
    state: State | MakeState | None,
    *,
    context: TrainerContext,
    given: Mapping[str, Any],
    mesh: DeviceMesh | None,
) -> BuiltStages:
    """Build the stages of this rank, in order, their optimizer and further saved state, where the
    arguments are functions."""
    parts: list[ModelShard] | None = None
    try:
        stages = _list_given_stages(given_stages)
        if stages is None:
            place = Settings.from_arguments(context, given, mesh).mesh.find_coordinate(context.rank)
            split = context.read_layer_split(place.stages)
            parts = [ModelShard(number, place.stages, split) for number in place.held_stages]
            stages = [given_stages(part) for part in parts]  # type: ignore[operator]
        if callable(optimizer) and isinstance(stages[0], nn.Module):
            optimizer = optimizer(stages[0] if len(stages) == 1 else nn.ModuleList(stages))
        made = None if callable(optimizer) else optimizer
        if callable(state):
            if made is None:
                raise InputError("state is a function of the optimizer; give Pipeline one")
            state = state(made)
    except Exception as error:  # noqa: BLE001  all ranks get any error
        return BuiltStages([], None, {}, error)
    return BuiltStages(stages, made, state or {}, None, parts)


def _list_given_stages(given: StageOrBuilder) -> list[Any] | None:
    """Return the stages that were given; None if a function was."""
    if isinstance(given, (nn.ModuleList, list, tuple)):
        if not given:
            raise InputError("the list of stages is empty; give every stage of this rank")
        return list(given)
    if isinstance(given, Stage) or not callable(given):
        return [given]
    return None


def prepare_rank(
    stages: Sequence[Stage],
    context: TrainerContext,
    given: Mapping[str, Any],
    plan: Plan | None,
    split: str,
    *,
    mesh: DeviceMesh | None = None,
    failure: Exception | None = None,
    loss_fn: LossFn | None = None,
    tied: Sequence[Any] | None,
    scaler: GradScaler | None = None,
    device: torch.device,
    accelerator: Accelerator | None,
    directed: bool,
) -> tuple[RankPreparation | None, StartupInfo]:
    """Prepare this rank, and make its start for the other ranks. A rank that cannot take part has
    no preparation, and a start with the reason.

    ``given``: the arguments that a job replaces, by name (see :meth:`Settings.from_arguments`).
    ``mesh``: the user's, if any. ``plan``: the first plan; None: made from the settings. ``split``,
    ``tied``: the user's arguments. ``directed``: directives may change the plan. ``failure``: why
    the stages could not be built.
    """
    if failure is not None:
        text = f"{type(failure).__name__}: {failure}"
        refusal = str(failure) if isinstance(failure, InputError) else f"it cannot be built: {text}"
        return None, StartupInfo(refusal=refusal)
    try:
        mode = parse_split_mode(split)
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise InputError(
                f"scaler is a {type(scaler).__name__}; expected a pipemorph_trainer.GradScaler, "
                "which is torch's with one verdict over all stages"
            )
        for stage in stages:
            if not isinstance(stage, (EmulatedStage, ExternalStage)):
                check_stage_module(stage)
            if accelerator is not None and (why := find_cuda_graph_refusal(stage)):
                raise InputError(why)
        settings = Settings.from_arguments(context, given, mesh)
        if context.job is None and context.rank == 0 and context.world_size > 1:
            # Before a stage of a script for another number of ranks fails.
            single = " × 1 replica" if settings.mesh.columns == 1 else ""
            print(f"{context.world_size} ranks: {settings.mesh}{single}", file=sys.stderr)
        coordinate = settings.mesh.find_coordinate(context.rank)
        layers = context.read_layer_split(coordinate.mesh.stages)
        _check_stage_count(stages, coordinate)
        for number, stage in zip(coordinate.held_stages, stages, strict=True):
            if (own := find_stage_device(stage)) != device:
                raise InputError(
                    f"stage {number} is on {own}, and stage {coordinate.held_stages[0]} of the same"
                    f" rank on {device}; put all stages of a rank on one device"
                )
            if isinstance(stage, ExternalStage):
                _check_external_stage(stage, settings, coordinate.with_stage(number))
        modules = select_modules(stages, coordinate)
        _check_shared_parameters(modules)
        if coordinate.is_last:
            check_loss(loss_fn, modules)
        ties = parse_tied(tied, coordinate.stages)
        forms = {
            place: form
            for number in coordinate.held_stages
            for place, form in tied_forms(
                ties, modules.get(number), coordinate.with_stage(number)
            ).items()
        }
        times = None
        if plan is None and context.job is not None:
            times = _list_first_times(context.job.spec)
        if plan is None:
            plan = (
                initial_plan(context.job.spec)
                if context.job is not None
                else settings.make_initial_plan()
            )
        (mine,) = split_plan(
            plan,
            settings.mesh,
            [coordinate.index_along("pp")],
            replica=coordinate.replica,
            orders=settings.reorder == "sums",
            times=times,
        )
        microbatches = plan.schedule.microbatches
        if settings.microbatches not in (None, microbatches):
            raise InputError(
                f"microbatches is {settings.microbatches}, and the plan that was given has "
                f"{microbatches}; make the two equal"
            )
        host_memory = settings.host_memory
        if host_memory is not None:
            # Divided evenly, as the controller counts it.
            host_memory //= len(stages)
        memory = {
            number: StageMemory.for_stage(
                stage,
                device,
                accelerator,
                host_memory,
                recomputes=settings.recompute == "auto",
            )
            for number, stage in zip(coordinate.held_stages, stages, strict=True)
        }
        check_device_limits(
            mine,
            {number: each.offload_refusal for number, each in memory.items()},
            {number: each.recompute_refusal for number, each in memory.items()},
        )
        engine = choose_engine_options(context, settings, plan, directed=directed)
        held = tuple(
            held
            for number, module in modules.items()
            for held in describe_tensors(module, coordinate.with_stage(number))
        )
        if settings.rebalance and (why := explain_no_rebalance(coordinate, stages, held)):
            raise InputError(f"rebalance is on, but {why}")
        check_shares(mine, rebalances=settings.rebalance)
        if settings.checkpoint is not None and context.attempt == context.generation == 0:
            # A bad folder later costs only checkpoints. The import takes longer than torch's.
            from pipemorph_trainer.checkpoint.disk import check_directory

            check_directory(Path(settings.checkpoint.directory))
    except InputError as error:
        return None, StartupInfo(refusal=str(error))
    first = hash_plan(PlanMessage.from_plan(plan).model_dump_json(exclude_defaults=True))
    return (
        RankPreparation(settings, mine, mode, memory, engine, microbatches),
        StartupInfo(
            mesh=settings.mesh,
            split=layers,
            microbatches=microbatches,
            reorder=settings.reorder,
            plan=first,
            tensors=held,
            ties=ties,
            tied_forms=forms,
            rebalance=settings.rebalance,
        ),
    )


def _list_first_times(spec: JobSpec) -> PlannedTimes:
    """Times that plan 0 of a job is made for."""
    problem = build_initial_problem(spec)
    return PlannedTimes.from_stages(problem.stages, [link.delay for link in problem.links])


def select_modules(stages: Sequence[Stage], coordinate: Coordinate) -> dict[int, nn.Module]:
    """Return the modules among the stages of a rank, by stage."""
    held = zip(coordinate.held_stages, stages, strict=True)
    return {number: stage for number, stage in held if isinstance(stage, nn.Module)}


def _check_stage_count(stages: Sequence[Stage], coordinate: Coordinate) -> None:
    if len(stages) != len(coordinate.held_stages):
        noun = "stage" if len(stages) == 1 else "stages"
        wanted = " and ".join(map(str, coordinate.held_stages))
        raise InputError(
            f"rank {coordinate.rank} was given {len(stages)} {noun}; it has"
            f" {'stage' if len(coordinate.held_stages) == 1 else 'stages'} {wanted} of"
            f" {coordinate.mesh}: give these, in order, or a function that builds each"
        )
    if len({isinstance(stage, nn.Module) for stage in stages}) > 1:
        raise InputError("some stages of a rank are modules and others not; give all as modules")


def check_stage_module(stage: object) -> None:
    """Raise :class:`InputError` if ``stage`` is no module, or a wrapper that distributes work
    itself. The pipeline already averages gradients over replicas and schedules microbatches: such a
    wrapper would do it twice, or wait for ranks that do not take part.
    """
    if not isinstance(stage, nn.Module):
        kind = type(stage).__name__
        if hasattr(stage, "submod"):
            raise InputError(
                f"the stage is a {kind} of torch.distributed.pipelining; give Pipeline the module "
                "in it (stage.submod), which it schedules itself"
            )
        raise InputError(f"the stage is a {kind}; expected an nn.Module or an EmulatedStage")
    for name, module in stage.named_modules():
        where = f"module {name!r} of the stage" if name else "the stage"
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise InputError(
                f"{where} is wrapped in {type(module).__name__}; give Pipeline the module in it "
                "(.module): step() averages gradients over the replicas itself"
            )
        if isinstance(
            module, get_loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")
        ):
            raise InputError(
                f"{where} is wrapped in FullyShardedDataParallel; shard the module before it with "
                "fully_shard (FSDP2)"
            )
    for name, parameter in stage.named_parameters():
        if is_lazy(parameter):
            raise InputError(
                f"parameter {name!r} of the stage has no shape yet; run the lazy module once "
                "before it is given to Pipeline"
            )


def _check_shared_parameters(modules: Mapping[int, nn.Module]) -> None:
    """Raise :class:`InputError` if two stages share a parameter."""
    owners: dict[int, tuple[str, int]] = {}
    for stage, module in modules.items():
        for name, parameter in module.named_parameters():
            first, other = owners.setdefault(id(parameter), (name, stage))
            if other != stage:
                raise InputError(
                    f"stages {other} and {stage} share the parameter {first!r}; give each its own,"
                    f" and Pipeline tied=[({first!r}, {other}), ({name!r}, {stage})]"
                )


def check_loss(loss_fn: LossFn | None, modules: Mapping[int, nn.Module]) -> None:
    """Raise :class:`InputError` if the loss has trained parameters that no stage has."""
    own = {id(parameter) for module in modules.values() for parameter in module.parameters()}
    found: dict[str, Any] = {"": loss_fn}
    if isinstance(loss_fn, partial):
        found = {str(index): value for index, value in enumerate([loss_fn.func, *loss_fn.args])}
        found |= loss_fn.keywords
    elif inspect.isfunction(loss_fn):
        found = dict(inspect.getclosurevars(loss_fn).nonlocals)
    for name, value in found.items():
        parameters = [(name, value)]
        if isinstance(value, nn.Module):
            parameters = list(value.named_parameters())
            if inspect.isfunction(loss_fn) and any(id(each) in own for _, each in parameters):
                # The whole model, of which the loss uses this stage's part.
                continue
        for which, parameter in parameters:
            trained = isinstance(parameter, nn.Parameter) and parameter.requires_grad
            if trained and id(parameter) not in own:
                raise InputError(
                    f"loss_fn trains the parameter {which!r}, which no stage has: it would be in no"
                    " mean over replicas, no clip_grad_norm_ and no checkpoint. Register it in the"
                    " last stage's module, or freeze it"
                )


def _check_external_stage(stage: ExternalStage, settings: Settings, coordinate: Coordinate) -> None:
    """Raise :class:`InputError` if another trainer's stage is not the one of this place."""
    if (stage.index, stage.stages) != (coordinate.stage, coordinate.stages):
        raise InputError(
            f"{coordinate} of {coordinate.stages} stages was given stage {stage.index} of "
            f"{stage.stages}; give each rank the stage of its place"
        )
    if settings.checkpoint is not None:
        raise InputError(
            "the manifest has spec.checkpoint, but this trainer saves its checkpoints itself; leave"
            " it out"
        )
