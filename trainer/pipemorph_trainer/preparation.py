"""Decisions that a rank makes alone, before the first exchange with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipemorph.api.mesh import Coordinate
from pipemorph.control.first_plan import initial_plan
from pipemorph.errors import InputError
from pipemorph.planning import Plan
from pipemorph.wire import PlanMessage
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.executor.local_stage import Stage, mode_of, open_store
from pipemorph_trainer.executor.offload import ActivationStore
from pipemorph_trainer.executor.split import Mode
from pipemorph_trainer.executor.stages.emulated import EmulatedStage
from pipemorph_trainer.executor.stages.interface import GivenStage
from pipemorph_trainer.links.engine import EngineOptions
from pipemorph_trainer.plans.book import check_offload, check_stages
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

    ``split``: how a module runs B and W apart. ``store``: host memory for activations; None if they
    stay on the device, for the reason ``no_offload``. ``engine``: options of the transfer engine;
    None if it is not needed.
    """

    settings: Settings
    plan: Plan
    split: Mode
    store: ActivationStore | None
    no_offload: str
    engine: EngineOptions | None


StageOrBuilder = Stage | Callable[[Part], nn.Module]
"""What a pipeline is given: a stage, or a function that builds it."""
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


def build(
    stage: StageOrBuilder,
    optimizer: torch.optim.Optimizer | MakeOptimizer | None,
    context: TrainerContext,
    given: Mapping[str, Any],
    mesh: DeviceMesh | None,
) -> tuple[Any, torch.optim.Optimizer | None, Exception | None]:
    """The stage and its optimizer, built where functions were given. Returns the error of a
    function, too: all ranks have to hear of it."""
    try:
        if not isinstance(stage, Stage):
            place = Settings.choose(context, given, mesh).mesh.coordinate(context.rank)
            stage = stage(Part(place.stage, place.stages))
        if callable(optimizer) and isinstance(stage, nn.Module):
            optimizer = optimizer(stage)
    except Exception as error:  # noqa: BLE001  all ranks are told of any error
        return None, None, error
    return stage, None if callable(optimizer) else optimizer, None


def prepare(
    stage: Stage,
    context: TrainerContext,
    given: Mapping[str, Any],
    plan: Plan | None,
    split: str,
    *,
    mesh: DeviceMesh | None = None,
    failure: Exception | None = None,
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
    as the user gave them. ``directed``: directives may change the plan. ``failure``: why the stage
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
        if not isinstance(stage, (EmulatedStage, GivenStage)):
            check_stage(stage)
        settings = Settings.choose(context, given, mesh)
        coordinate = settings.mesh.coordinate(context.rank)
        if isinstance(stage, GivenStage):
            _check_given(stage, settings, coordinate)
        module = stage if isinstance(stage, nn.Module) else None
        ties = parse_tied(tied, coordinate.stages)
        forms = tied_forms(ties, module, coordinate.stage)
        if plan is None:
            plan = initial_plan(context.job.spec) if context.job is not None else settings.plan()
        check_stages(plan, coordinate)
        microbatches = plan.schedule.microbatches
        if settings.microbatches not in (None, microbatches):
            raise InputError(
                f"microbatches is {settings.microbatches}, and the plan that was given has "
                f"{microbatches}; make the two equal"
            )
        store, no_offload = open_store(stage, device, accelerator, settings.host_memory, mode)
        check_offload(plan, coordinate, no_offload)
        engine = engine_options(context, settings, plan, directed=directed)
        held = () if module is None else held_by(module, coordinate)
        if settings.checkpoint is not None:
            # Its import takes longer than that of torch.
            from pipemorph_trainer.state.checkpoint import check_directory

            check_directory(Path(settings.checkpoint.directory))
    except InputError as error:
        return None, Start(refusal=str(error))
    first = digest(PlanMessage.of(plan).model_dump_json(exclude_defaults=True))
    return (
        Preparation(settings, plan, mode, store, no_offload, engine),
        Start(
            mesh=settings.mesh,
            microbatches=microbatches,
            plan=first,
            held=held,
            ties=ties,
            tied=forms,
        ),
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
