"""The stage of this rank: its runner, its device, and its profile."""

from __future__ import annotations

import importlib
import logging
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from pipemorph.api.mesh import Coordinate
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch
from pipemorph.planning.ir import OpKind, in_flight_peak
from pipemorph.planning.offload import host_limit, host_peak
from pipemorph.removed import SPLITS, removal
from pipemorph.wire import DeviceClock, StageProfile
from pipemorph_trainer.agent.messages import Offloaded
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.executor.device_times import TimedCopy, TimedOp
from pipemorph_trainer.executor.dispatch import Inputs
from pipemorph_trainer.executor.inputs import Given, of_stage, signature
from pipemorph_trainer.executor.offload import ActivationStore
from pipemorph_trainer.executor.split import Mode, StageRunner
from pipemorph_trainer.executor.split.compiled.private import cuda_graphs
from pipemorph_trainer.executor.split.flight import LossFn
from pipemorph_trainer.executor.split.measured import Measurements
from pipemorph_trainer.executor.stages.emulated import EmulatedRunner, EmulatedStage
from pipemorph_trainer.executor.stages.interface import GivenStage, Runner
from pipemorph_trainer.executor.torch_private import holders_unknown
from pipemorph_trainer.topology.accelerator import Accelerator


@dataclass(frozen=True)
class Footprint:
    """Properties of a stage beside its op times; None: unknown.

    ``offload_copy``: seconds to copy ``activation_bytes`` one way, if offload is possible.
    ``input_bytes``: bytes of what is kept of a microbatch that is recomputed, if it can be.
    ``fused_ratio``: time of BW divided by that of B and W apart: of an emulated stage as stated, of
    a module from the first iterations until a plan runs BW.
    """

    activation_bytes: int | None = None
    offload_copy: float | None = None
    fused_ratio: float | None = None
    input_bytes: int | None = None


def footprint(measured: Measurements, ratio: float | None, *, recomputes: bool) -> Footprint:
    """What a module's stage has measured in its first iterations. ``ratio``: the fused ratio of the
    plans, if it is known."""
    return Footprint(
        activation_bytes=measured.activation_bytes or None,
        offload_copy=measured.copy_seconds,
        input_bytes=measured.input_bytes if recomputes else None,
        fused_ratio=measured.fused_ratio if ratio is None else ratio,
    )


def stage_profile(
    stage: int,
    ops: Sequence[TimedOp],
    split: Literal["deferred", "fused", "emulated"],
    *,
    column: int,
    peak_memory: int,
    footprint: Footprint = Footprint(),
    copies: Sequence[TimedCopy] = (),
    clock: DeviceClock | None = None,
) -> StageProfile:
    """Means over one iteration's ops, since an iteration takes their sum. Fused backwards count
    as ``backward_input`` where there are no others.

    The time of ``copies`` is subtracted from the ops that they are part of, so that F and B do not
    depend on which microbatches a plan offloads or recomputes. That of copies is reported as
    ``offload_copy``: the median of the longer direction if there were copies, else the time of the
    first one.

    ``fused_backward`` is the mean BW if there was one, else B + W times the ratio, if known.
    """
    moves = [copy for copy in copies if not copy.again]
    copying = {(copy.kind, copy.microbatch): copy.end - copy.start for copy in copies}

    times: dict[OpKind, list[float]] = {kind: [] for kind in OpKind}
    for kind, microbatch, start, end in ops:
        took = end - start
        if copying:
            took -= copying.get((kind, microbatch), 0.0)
        times[kind].append(took if took > 0.0 else 0.0)

    def mean(kind: OpKind) -> float:
        return statistics.fmean(times[kind]) if times[kind] else 0.0

    backward = mean(OpKind.B) or mean(OpKind.BW)
    weight = 0.0 if split == "fused" else mean(OpKind.W)
    return StageProfile(
        stage=stage,
        replica=column,
        forward=mean(OpKind.F),
        backward_input=backward,
        backward_weight=weight,
        split=split,
        peak_memory=peak_memory,
        activation_bytes=footprint.activation_bytes,
        input_bytes=footprint.input_bytes,
        offload_copy=_longer(moves) if moves else footprint.offload_copy,
        fused_backward=_fused(mean(OpKind.BW), backward, weight, footprint.fused_ratio),
        clock=clock,
    )


def _longer(copies: Sequence[TimedCopy]) -> float:
    """Median copy time of the slower direction: on a device, copies to the host may take none."""
    took: dict[bool, list[float]] = {}
    for copy in copies:
        took.setdefault(copy.out, []).append(copy.end - copy.start)
    return max(statistics.median(times) for times in took.values())


def _fused(measured: float, backward: float, weight: float, ratio: float | None) -> float | None:
    if ratio is None:
        return None
    return measured or ratio * (backward + weight)


def offloaded(copies: Sequence[TimedCopy], host_bytes: int) -> Offloaded | None:
    """Sums of one iteration's copies; None if there were none. ``host_bytes``: that the rank
    holds."""
    copies = [copy for copy in copies if not copy.again]
    if not copies:
        return None
    return Offloaded(
        microbatches=sum(copy.out for copy in copies),
        bytes=sum(copy.nbytes for copy in copies if copy.out),
        seconds=sum(copy.end - copy.start for copy in copies),
        host_bytes=host_bytes,
    )


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: device memory on CUDA, else the resident set.

    On CUDA it is the peak since the script last reset torch's mark, else since the process began.
    It is not reset here, since the script may read the same mark.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


EVERY_SECONDS = 1.0
"""Least time between two readings, each of which may take a millisecond."""
THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that make a device slower than it could be. The others say
that it is idle, or that its user has set its clocks."""

log = logging.getLogger(__name__)


class DeviceClockReader:
    """Reads the clock of one device. ``nvml``: the module ``pynvml``, initialized; ``handle``: its
    handle of the device."""

    def __init__(
        self, nvml: Any, handle: Any, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml, self._handle, self._monotonic = nvml, handle, monotonic
        self._read_at: float | None = None
        self._newest: DeviceClock | None = None

    def read(self) -> DeviceClock | None:
        """The newest clock, read anew at most every :data:`EVERY_SECONDS`; None once the driver
        has refused."""
        now = self._monotonic()
        if self._read_at is None or now - self._read_at >= EVERY_SECONDS:
            self._read_at, self._newest = now, self._clock()
        return self._newest

    def _clock(self) -> DeviceClock | None:
        nvml, handle = self._nvml, self._handle
        try:
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            return DeviceClock(
                mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                most_mhz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                held_by=tuple(dict.fromkeys(why for bit, why in THROTTLES.items() if bits & bit)),
            )
        except nvml.NVMLError as error:
            log.debug("NVML says nothing of this device's clock: %s", error)
            return None


def device_clock_reader(device: torch.device) -> DeviceClockReader | None:
    """The reader for ``device``; None for the CPU, without NVML, and where it does not know the
    device."""
    if device.type != "cuda":
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        # By its UUID: NVML numbers all devices of the host, torch those that it may use.
        uuid = torch.cuda.get_device_properties(device).uuid
        return DeviceClockReader(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except nvml.NVMLError as error:
        log.debug("NVML does not know %s: %s", device, error)
        return None


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
