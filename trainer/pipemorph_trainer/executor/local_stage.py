"""The stage of this rank: its runner, its device, and its profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from pipemorph.api.mesh import Coordinate
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, OpKind
from pipemorph.planning.ir import in_flight_peak
from pipemorph.planning.offload import host_limit, host_peak
from pipemorph.removed import SPLITS, removal
from pipemorph.wire import StageProfile
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.executor.device_times import TimedCopy, TimedOp
from pipemorph_trainer.executor.dispatch import Inputs
from pipemorph_trainer.executor.inputs import Given, of_stage, signature
from pipemorph_trainer.executor.offload import ActivationStore
from pipemorph_trainer.executor.split import Mode, StageRunner
from pipemorph_trainer.executor.split.compiled.private import cuda_graphs
from pipemorph_trainer.executor.split.flight import LossFn
from pipemorph_trainer.executor.split.measured import Measurements
from pipemorph_trainer.executor.stage_profile import (
    Footprint,
    footprint,
    peak_memory,
    stage_profile,
)
from pipemorph_trainer.executor.stages.emulated import EmulatedRunner, EmulatedStage
from pipemorph_trainer.executor.stages.interface import GivenStage, Runner
from pipemorph_trainer.executor.torch_private import holders_unknown
from pipemorph_trainer.topology.accelerator import Accelerator
from pipemorph_trainer.topology.device_clock import device_clock_reader

Stage = nn.Module | EmulatedStage | GivenStage


class OwnStage:
    """The stage of this rank, at its place in the pipeline.

    ``microbatches``: N. ``split``: of a module's backward. ``accelerator``: of ``device``; None for
    the CPU. ``memory``: what may become of its activations.
    """

    def __init__(
        self,
        stage: Stage,
        coordinate: Coordinate,
        *,
        loss_fn: LossFn | None,
        microbatches: int,
        split: Mode,
        device: torch.device,
        accelerator: Accelerator | None,
        memory: StageMemory,
    ) -> None:
        self._coordinate = coordinate
        self.microbatches = microbatches
        self.device, self.accelerator = device, accelerator
        self._store = memory.store
        self._clock = device_clock_reader(device)
        self._footprint = _footprint_of(stage)
        self._apart = 0.0
        """Time of the newest B and W of a microbatch, if they ran apart."""
        self._ratio: float | None = None
        """Time of a BW divided by that, if a plan has run both."""
        self._measured: Measurements | None = None
        self._recomputes = not memory.no_recompute
        self._needs_target = False
        self.module: nn.Module | None = None
        """None if the stage is emulated or given."""
        self.emulated = isinstance(stage, EmulatedStage)
        self.runner: Runner
        self.keeper: nn.Module | EmulatedRunner | None = None
        """The object with the stage's state, for checkpoints; None if it is another trainer's."""
        if isinstance(stage, GivenStage):
            self.runner = stage.runner
            return
        if isinstance(stage, EmulatedStage):
            self.runner = self.keeper = EmulatedRunner(
                stage, coordinate.stage, coordinate.stages, coordinate.column, microbatches
            )
            return
        self.module = self.keeper = stage
        self._needs_target = coordinate.last and loss_fn is not None
        self.runner = StageRunner(
            stage,
            is_first=coordinate.first,
            is_last=coordinate.last,
            loss_fn=loss_fn if coordinate.last else None,
            microbatches=microbatches,
            mode=split,
            store=memory.store,
        )
        self._measured = self.runner.measured

    def inputs(self, given: Given, *, needs_target: bool = True) -> tuple[Inputs, Any]:
        """Microbatches of the arguments that this stage uses, and a signature that changes if the
        shapes of its outputs may change, or which of them need a gradient. ``needs_target``: a
        ``loss_fn`` has to get one."""
        if self.emulated:
            return Inputs(), ("emulated",)
        if not isinstance(self.runner, StageRunner):
            args, kwargs = given.arg_mbs or (), given.kwarg_mbs or ()
            return Inputs(args, kwargs, given.target_mbs or ()), signature((args[:1], kwargs[:1]))
        inputs, shapes = of_stage(
            self._coordinate,
            self.microbatches,
            given,
            needs_target=self._needs_target and needs_target,
        )
        return inputs, (shapes, self.runner.trained)

    @property
    def measures(self) -> bool:
        """Whether the backwards of this iteration run for their times, whatever the plan says."""
        return isinstance(self.runner, StageRunner) and self.runner.measures

    @property
    def no_offload(self) -> str:
        """Why a test has found that activations cannot be moved; empty if it has not."""
        return "" if self._measured is None else self._measured.no_offload

    def reduce(self) -> None:
        """Reduce the gradients of a sharded module after its last op. Collective over the ranks
        that share its parameters."""
        if isinstance(self.runner, StageRunner):
            self.runner.end_iteration()

    def update(self) -> None:
        """End an iteration of an emulated stage, as an optimizer does for a module."""
        if isinstance(self.runner, EmulatedRunner):
            self.runner.update()

    def prepare(self, plan: RankPlan) -> None:
        """Allocate the host memory that ``plan`` needs for activations. Called between iterations,
        so that no memory is page-locked between ops."""
        stage = self._coordinate.stage
        mine, order = plan.by_stage[stage], plan.orders[stage]
        if self._store is None or mine.device_limit is None or mine.recompute:
            return
        if plan.dispatch is Dispatch.GUIDED:
            peak = in_flight_peak(order)
            most = host_limit(peak, mine.device_limit, self.microbatches)
        else:
            most = host_peak(order, mine.device_limit)
        self._store.pool.grow(most)

    def profile(self, ops: Sequence[TimedOp], copies: Sequence[TimedCopy]) -> StageProfile:
        """Op times of one iteration, and the peak memory so far."""
        if self._measured is not None:
            self._footprint = footprint(self._measured, self._ratio, recomputes=self._recomputes)
        found = stage_profile(
            self._coordinate.stage,
            ops,
            self.runner.split,
            column=self._coordinate.column,
            peak_memory=peak_memory(self.device),
            footprint=self._footprint,
            copies=copies,
            clock=self._clock.read() if self._clock is not None else None,
        )
        if found.backward_weight:
            self._apart = found.backward_input + found.backward_weight
        whole, ran = found.fused_backward, any(op.kind is OpKind.BW for op in ops)
        if ran and whole is not None and self._apart and not self.emulated:
            # Of more microbatches than those of the first iterations.
            self._ratio = whole / self._apart
        return found

    @property
    def host_bytes(self) -> int:
        """Host memory that is held for activations, bytes."""
        return self._store.pool.nbytes if self._store is not None else 0

    def close(self) -> None:
        """Free the host memory for activations."""
        if self._store is not None:
            self._store.close()


def device_of(stage: Stage) -> torch.device:
    """Device of a stage, for a module that of its first parameter or buffer; the CPU if it has
    none."""
    if isinstance(stage, GivenStage):
        return stage.device
    if isinstance(stage, EmulatedStage):
        return torch.device("cpu")
    first = next((t for t in (*stage.parameters(), *stage.buffers())), None)
    return first.device if first is not None else torch.device("cpu")


def mode_of(split: str) -> Mode:
    """Parse the argument ``split``. Raises :class:`InputError` if it is invalid."""
    for mode in get_args(Mode):
        if split == mode:
            return mode  # type: ignore[no-any-return]
    gone = removal(SPLITS, split)
    raise InputError(
        f"split is {split!r}, which {gone}" if gone
        else f"split is {split!r}; expected {', '.join(get_args(Mode))}"
    )  # fmt: skip


@dataclass(frozen=True)
class StageMemory:
    """What may become of a stage's activations between its F and its B.

    ``store``: host memory for them; None for an emulated stage, whose copies only take time, and if
    they must stay on the device, for the reason ``no_offload`` (empty: they need not).
    ``no_recompute``: why they must not be dropped and computed again; empty if they may.
    """

    store: ActivationStore | None
    no_offload: str
    no_recompute: str

    @staticmethod
    def of(
        stage: Stage,
        device: torch.device,
        accelerator: Accelerator | None,
        host_memory: int | None,
        *,
        recomputes: bool,
    ) -> StageMemory:
        """``host_memory``: of this stage, bytes. ``recomputes``: the job allows it."""
        store, why = _open_store(stage, device, accelerator, host_memory)
        return StageMemory(store, why, _recompute_refusal(stage, recomputes))


def graphs_refused(stage: Stage) -> str:
    """Why a stage cannot run on a GPU as it is: its CUDA graphs; empty if none can be seen."""
    modules = stage.named_modules() if isinstance(stage, nn.Module) else ()
    for name, module in modules:
        if how := cuda_graphs(module):
            return (
                f"{f'module {name}' if name else 'the stage'} runs in CUDA graphs ({how}); they"
                " write one microbatch's results over those of the one before, which a pipeline"
                " still sends and needs. Compile it with mode='max-autotune-no-cudagraphs' or"
                " options={'triton.cudagraphs': False}, and do not graph it"
            )
    return ""


def _open_store(
    stage: Stage,
    device: torch.device,
    accelerator: Accelerator | None,
    host_memory: int | None,
) -> tuple[ActivationStore | None, str]:
    """The store of at most ``host_memory`` bytes, and why there is no offload."""
    if isinstance(stage, GivenStage):
        return None, "its activations belong to torch's stage"
    if host_memory is None:
        return None, (
            "it has no host memory for activations; give adaptation.allowOffload and"
            " hostMemory (host_memory of Pipeline)"
        )
    if isinstance(stage, EmulatedStage):
        return None, ""
    if why := holders_unknown():
        return None, f"this version of torch is not supported: {why}"
    return ActivationStore(device, host_memory, accelerator), ""


def _recompute_refusal(stage: Stage, allowed: bool) -> str:
    if isinstance(stage, GivenStage):
        return "its activations belong to torch's stage"
    if not allowed:
        return "the job must not; give schedule.recompute auto (recompute of Pipeline)"
    return ""


def _footprint_of(stage: Stage) -> Footprint:
    """The given values of an emulated stage; for a module nothing is known yet."""
    if not isinstance(stage, EmulatedStage):
        return Footprint()
    apart = stage.backward_input + stage.backward_weight
    return Footprint(
        activation_bytes=stage.activation_bytes,
        offload_copy=stage.offload_copy,
        input_bytes=stage.input_bytes,
        fused_ratio=stage.whole_backward / apart if apart > 0 else None,
    )
