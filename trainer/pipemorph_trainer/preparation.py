"""Decisions that a rank makes alone, before the first exchange with the other ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipemorph.api.mesh import Coordinate
from pipemorph.control.first_plan import initial_plan
from pipemorph.errors import InputError
from pipemorph.planning import Plan
from pipemorph.wire import PlanMessage
from pipemorph_trainer.agent.rank_plan import RankPlan, cut
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.executor.local_stage import (
    Stage,
    StageMemory,
    device_of,
    graphs_refused,
    mode_of,
)
from pipemorph_trainer.executor.split import Mode
from pipemorph_trainer.executor.split.flight import LossFn
from pipemorph_trainer.executor.stages.emulated import EmulatedStage
from pipemorph_trainer.executor.stages.interface import GivenStage
from pipemorph_trainer.links.engine import EngineOptions
from pipemorph_trainer.plans.book import check_offload, check_recompute
from pipemorph_trainer.settings import Settings, engine_options
from pipemorph_trainer.start import Start, digest
from pipemorph_trainer.state.scaler import GradScaler
from pipemorph_trainer.state.tied import forms as tied_forms
from pipemorph_trainer.state.tied import parse as parse_tied
from pipemorph_trainer.state.weights import check_stage, held_by
from pipemorph_trainer.topology.accelerator import Accelerator
from pipemorph_trainer.topology.part import Part


@dataclass(frozen=True)
class Preparation:
    """The parts of a pipeline that need no other rank.

    ``split``: how a module runs B and W apart. ``memory``: by stage, what may become of its
    activations. ``engine``: options of the transfer engine; None if it is not needed.
    """

    settings: Settings
    plan: RankPlan
    split: Mode
    memory: Mapping[int, StageMemory]
    engine: EngineOptions | None


StageOrBuilder = Stage | Sequence[Stage] | Callable[[Part], Stage]
"""What a pipeline is given: a stage, several in order, or a function that builds each."""
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
State = Mapping[str, Any]
MakeState = Callable[[torch.optim.Optimizer], State]


class Built(NamedTuple):
    """``failure``: the error of a function, of which all ranks have to hear. ``parts``: of which
    stages were built; None: they were given."""

    stages: list[Any]
    optimizer: torch.optim.Optimizer | None
    state: State
    failure: Exception | None
    parts: list[Part] | None = None


def build(
    given_stages: StageOrBuilder,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None,
    state: State | MakeState | None,
    *,
    context: TrainerContext,
    given: Mapping[str, Any],
    mesh: DeviceMesh | None,
) -> Built:
    """The stages of this rank, in order, their optimizer and what is saved beside them, built where
    functions were given."""
    parts: list[Part] | None = None
    try:
        stages = _several(given_stages)
        if stages is None:
            place = Settings.choose(context, given, mesh).mesh.coordinate(context.rank)
            split = context.split(place.stages)
            parts = [Part(number, place.stages, split) for number in place.held]
            stages = [given_stages(part) for part in parts]  # type: ignore[operator]
        if callable(optimizer) and isinstance(stages[0], nn.Module):
            optimizer = optimizer(stages[0] if len(stages) == 1 else nn.ModuleList(stages))
        made = None if callable(optimizer) else optimizer
        if callable(state):
            if made is None:
                raise InputError("state is a function of the optimizer; give Pipeline one")
            state = state(made)
    except Exception as error:  # noqa: BLE001  all ranks are told of any error
        return Built([], None, {}, error)
    return Built(stages, made, state or {}, None, parts)


def _several(given: StageOrBuilder) -> list[Any] | None:
    """The stages that were given; None if a function was."""
    if isinstance(given, (nn.ModuleList, list, tuple)):
        if not given:
            raise InputError("the list of stages is empty; give every stage of this rank")
        return list(given)
    if isinstance(given, Stage) or not callable(given):
        return [given]
    return None


def prepare(
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
) -> tuple[Preparation | None, Start]:
    """Prepare this rank, and make the start for the other ranks. A rank that cannot take part has
    no preparation, and a start with the reason.

    ``given``: the arguments that a job replaces, by name (see :meth:`Settings.choose`). ``mesh``:
    the user's, if any. ``plan``: the first plan; None: made from the settings. ``split``, ``tied``:
    as the user gave them. ``directed``: directives may change the plan. ``failure``: why the stages
    could not be built.
    """
    if failure is not None:
        text = f"{type(failure).__name__}: {failure}"
        told = str(failure) if isinstance(failure, InputError) else f"it cannot be built: {text}"
        return None, Start(refusal=told)
    try:
        mode = mode_of(split)
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise InputError(
                f"scaler is a {type(scaler).__name__}; expected a pipemorph_trainer.GradScaler, "
                "which is torch's with one verdict over all stages"
            )
        for stage in stages:
            if not isinstance(stage, (EmulatedStage, GivenStage)):
                check_stage(stage)
            if accelerator is not None and (why := graphs_refused(stage)):
                raise InputError(why)
        settings = Settings.choose(context, given, mesh)
        coordinate = settings.mesh.coordinate(context.rank)
        layers = context.split(coordinate.mesh.stages)
        _check_number(stages, coordinate)
        for number, stage in zip(coordinate.held, stages, strict=True):
            if (own := device_of(stage)) != device:
                raise InputError(
                    f"stage {number} is on {own}, and stage {coordinate.held[0]} of the same rank"
                    f" on {device}; put all stages of a rank on one device"
                )
            if isinstance(stage, GivenStage):
                _check_given(stage, settings, coordinate.of(number))
        modules = modules_of(stages, coordinate)
        _check_shared(modules)
        if coordinate.last:
            check_loss(loss_fn, modules)
        ties = parse_tied(tied, coordinate.stages)
        forms = {
            place: form
            for number in coordinate.held
            for place, form in tied_forms(ties, modules.get(number), coordinate.of(number)).items()
        }
        if plan is None:
            plan = initial_plan(context.job.spec) if context.job is not None else settings.plan()
        (mine,) = cut(plan, settings.mesh, [coordinate.along("pp")])
        microbatches = mine.microbatches
        if settings.microbatches not in (None, microbatches):
            raise InputError(
                f"microbatches is {settings.microbatches}, and the plan that was given has "
                f"{microbatches}; make the two equal"
            )
        host_memory = settings.host_memory
        if host_memory is not None:
            # Shared out evenly, as the controller counts it.
            host_memory //= len(stages)
        memory = {
            number: StageMemory.of(
                stage,
                device,
                accelerator,
                host_memory,
                recomputes=settings.recompute == "auto",
            )
            for number, stage in zip(coordinate.held, stages, strict=True)
        }
        check_offload(mine, {number: each.no_offload for number, each in memory.items()})
        check_recompute(mine, {number: each.no_recompute for number, each in memory.items()})
        engine = engine_options(context, settings, plan, directed=directed)
        held = tuple(
            held
            for number, module in modules.items()
            for held in held_by(module, coordinate.of(number))
        )
        if settings.checkpoint is not None and context.attempt == context.generation == 0:
            # Later it costs the checkpoints, and not the job. The import takes longer than torch's.
            from pipemorph_trainer.state.checkpoint import check_directory

            check_directory(Path(settings.checkpoint.directory))
    except InputError as error:
        return None, Start(refusal=str(error))
    first = digest(PlanMessage.of(plan).model_dump_json(exclude_defaults=True))
    return (
        Preparation(settings, mine, mode, memory, engine),
        Start(
            mesh=settings.mesh,
            split=layers,
            microbatches=microbatches,
            plan=first,
            held=held,
            ties=ties,
            tied=forms,
        ),
    )


def modules_of(stages: Sequence[Stage], coordinate: Coordinate) -> dict[int, nn.Module]:
    """The modules among the stages of a rank, by stage."""
    held = zip(coordinate.held, stages, strict=True)
    return {number: stage for number, stage in held if isinstance(stage, nn.Module)}


def _check_number(stages: Sequence[Stage], coordinate: Coordinate) -> None:
    if len(stages) != len(coordinate.held):
        told = "stage" if len(stages) == 1 else "stages"
        wanted = " and ".join(map(str, coordinate.held))
        raise InputError(
            f"rank {coordinate.rank} was given {len(stages)} {told}; it has"
            f" {'stage' if len(coordinate.held) == 1 else 'stages'} {wanted} of"
            f" {coordinate.mesh}: give these, in order, or a function that builds each"
        )
    if len({isinstance(stage, nn.Module) for stage in stages}) > 1:
        raise InputError("some stages of a rank are modules and others not; give all as modules")


def _check_shared(modules: Mapping[int, nn.Module]) -> None:
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
                # The whole model, of which the loss uses what this stage has.
                continue
        for which, parameter in parameters:
            trained = isinstance(parameter, nn.Parameter) and parameter.requires_grad
            if trained and id(parameter) not in own:
                raise InputError(
                    f"loss_fn trains the parameter {which!r}, which no stage has: it would be in no"
                    " mean over replicas, no clip_grad_norm_ and no checkpoint. Register it in the"
                    " last stage's module, or freeze it"
                )


def _check_given(stage: GivenStage, settings: Settings, coordinate: Coordinate) -> None:
    """Raise :class:`InputError` if a given stage has no place here."""
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
