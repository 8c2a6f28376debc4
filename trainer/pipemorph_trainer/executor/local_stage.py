"""Stage of this rank: its runner, its device, and its profile."""

from __future__ import annotations

import importlib
import logging
import math
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

from pipemorph.errors import InputError
from pipemorph.planning import Dispatch
from pipemorph.planning.ir import OpKind, count_in_flight_peak
from pipemorph.planning.offload import compute_host_limit, count_host_peak
from pipemorph.protocol import DeviceClockRate, StageProfile
from pipemorph.removed import SPLITS, describe_removal
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.agent.messages import OffloadStats
from pipemorph_trainer.agent.rank_plan import RankPlan
from pipemorph_trainer.autograd_internals import find_holder_count_problem
from pipemorph_trainer.backward import Mode
from pipemorph_trainer.backward.compiled.compiler_internals import find_cuda_graphs
from pipemorph_trainer.backward.microbatch_state import LossFn
from pipemorph_trainer.backward.stage_measurements import StageMeasurements
from pipemorph_trainer.executor.device_times import MeasuredCopy, MeasuredOp
from pipemorph_trainer.executor.emulated_stage import EmulatedRunner, EmulatedStage
from pipemorph_trainer.executor.inputs import StepArguments, select_stage_inputs, shape_signature
from pipemorph_trainer.executor.microbatch_costs import read_costs
from pipemorph_trainer.executor.module_runner import ModuleRunner
from pipemorph_trainer.executor.op_runner import ExternalStage, OpRunner
from pipemorph_trainer.executor.stage_executor import MicrobatchInputs, StageRecord
from pipemorph_trainer.memory import ActivationStore
from pipemorph_trainer.topology.accelerator import Accelerator


@dataclass(frozen=True)
class StageFootprint:
    """Properties of a stage other than op times; None: unknown.

    ``offload_copy``: seconds to copy ``activation_bytes`` one way, if offload is possible.
    ``input_bytes``: bytes that stay on the device for a recomputed microbatch, if recompute is
    possible. ``fused_ratio``: time of BW divided by that of B and W apart; stated for an emulated
    stage, for a module measured in the first iterations until a plan runs BW.
    """

    activation_bytes: int | None = None
    offload_copy: float | None = None
    fused_ratio: float | None = None
    input_bytes: int | None = None


def build_footprint(
    measured: StageMeasurements, ratio: float | None, *, recomputes: bool
) -> StageFootprint:
    """Return the footprint that a module measured in its first iterations. ``ratio``: the fused
    ratio under the plans, if known."""
    return StageFootprint(
        activation_bytes=measured.activation_bytes or None,
        offload_copy=measured.copy_seconds,
        input_bytes=measured.input_bytes if recomputes else None,
        fused_ratio=measured.fused_ratio if ratio is None else ratio,
    )


def build_stage_profile(
    stage: int,
    ops: Sequence[MeasuredOp],
    split: Literal["deferred", "fused", "emulated"],
    *,
    column: int,
    peak_memory: int,
    footprint: StageFootprint = StageFootprint(),
    copies: Sequence[MeasuredCopy] = (),
    clock: DeviceClockRate | None = None,
    costs: Sequence[float] = (),
    work_error: float = 0.0,
) -> StageProfile:
    """Return the mean op times of an iteration (an iteration takes their sum), in seconds. Fused
    backwards count as ``backward_input`` if there are no others.

    The time of ``copies`` is subtracted from the ops that contain them, so that F and B do not
    depend on which microbatches a plan offloads or recomputes. ``offload_copy`` is the median copy
    of the slower direction, or without copies the measured one of ``footprint``.

    ``fused_backward`` is the mean BW if there was one, else B + W times the ratio, if known.

    With ``costs`` of the microbatches the times are those at their mean cost, also of kinds of ops
    that only some microbatches had. ``work_error``: see :class:`StageProfile`.
    """
    moves = [copy for copy in copies if not copy.recomputed]
    copying = {(copy.kind, copy.microbatch): copy.end - copy.start for copy in copies}

    times: dict[OpKind, list[float]] = {kind: [] for kind in OpKind}
    work = dict.fromkeys(OpKind, 0.0)
    for kind, microbatch, start, end in ops:
        took = end - start
        if copying:
            took -= copying.get((kind, microbatch), 0.0)
        times[kind].append(took if took > 0.0 else 0.0)
        if costs:
            work[kind] += costs[microbatch]
    cost = statistics.fmean(costs) if costs else None

    def mean(kind: OpKind) -> float:
        if cost is not None and work[kind]:
            return math.fsum(times[kind]) / work[kind] * cost
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
        offload_copy=_slower_direction_seconds(moves) if moves else footprint.offload_copy,
        fused_backward=_fused_backward_seconds(
            mean(OpKind.BW), backward, weight, footprint.fused_ratio
        ),
        clock=clock,
        cost=cost,
        work_error=work_error,
    )


def _slower_direction_seconds(copies: Sequence[MeasuredCopy]) -> float:
    """Return the median copy time of the slower direction: a device may copy to the host in 0 s."""
    took: dict[bool, list[float]] = {}
    for copy in copies:
        took.setdefault(copy.to_host, []).append(copy.end - copy.start)
    return max(statistics.median(times) for times in took.values())


def _fused_backward_seconds(
    measured: float, backward: float, weight: float, ratio: float | None
) -> float | None:
    if ratio is None:
        return None
    return measured or ratio * (backward + weight)


def sum_offload_copies(copies: Sequence[MeasuredCopy], host_bytes: int) -> OffloadStats | None:
    """Sum the copies of an iteration; None if there were none. ``host_bytes``: host memory of the
    rank."""
    copies = [copy for copy in copies if not copy.recomputed]
    if not copies:
        return None
    return OffloadStats(
        microbatches=sum(copy.to_host for copy in copies),
        bytes=sum(copy.nbytes for copy in copies if copy.to_host),
        seconds=sum(copy.end - copy.start for copy in copies),
        host_bytes=host_bytes,
    )


def read_peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes: of the device on CUDA, else the resident set.

    On CUDA the peak counts from the script's last reset of torch's counter. It is not reset here,
    since the script may read it, too.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


CLOCK_READ_SECONDS = 1.0
"""Minimum seconds between two readings; each may take a millisecond."""
THROTTLE_REASONS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that slow a device. The others mean that it is idle, or that
its user has set its clocks."""

log = logging.getLogger(__name__)


class DeviceClockReader:
    """Reader of one device's clock. ``nvml``: the module ``pynvml``, initialized; ``handle``: its
    handle of the device."""

    def __init__(
        self, nvml: Any, handle: Any, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml, self._handle, self._monotonic = nvml, handle, monotonic
        self._read_at: float | None = None
        self._newest: DeviceClockRate | None = None

    def read(self) -> DeviceClockRate | None:
        """The clock, at most :data:`CLOCK_READ_SECONDS` old; None once the driver refused."""
        now = self._monotonic()
        if self._read_at is None or now - self._read_at >= CLOCK_READ_SECONDS:
            self._read_at, self._newest = now, self._read_clock()
        return self._newest

    def _read_clock(self) -> DeviceClockRate | None:
        nvml, handle = self._nvml, self._handle
        try:
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            return DeviceClockRate(
                mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                most_mhz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                held_by=tuple(
                    dict.fromkeys(why for bit, why in THROTTLE_REASONS.items() if bits & bit)
                ),
            )
        except nvml.NVMLError as error:
            log.debug("NVML cannot read this device's clock: %s", error)
            return None


def open_device_clock(device: torch.device) -> DeviceClockReader | None:
    """Return a reader for ``device``; None for the CPU, without NVML, or if NVML lacks the
    device."""
    if device.type != "cuda":
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        # By UUID: NVML numbers all devices of the host, torch those that it may use.
        uuid = torch.cuda.get_device_properties(device).uuid
        return DeviceClockReader(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except nvml.NVMLError as error:
        log.debug("NVML does not list %s: %s", device, error)
        return None


Stage = nn.Module | EmulatedStage | ExternalStage


class LocalStage:
    """Stage of this rank, at its place in the pipeline.

    ``microbatches``: N. ``split``: of a module's backward. ``accelerator``: that of ``device``;
    None for the CPU. ``memory``: options for its activations.
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
        self._clock = open_device_clock(device)
        self._footprint = _initial_footprint(stage)
        self._apart = 0.0
        """Seconds of the newest B and W of a microbatch, if they ran apart."""
        self._ratio: float | None = None
        """Time of a BW divided by :attr:`_apart`, if a plan has run both."""
        self._measured: StageMeasurements | None = None
        self._recomputes = not memory.recompute_refusal
        self._needs_target = False
        self.module: nn.Module | None = None
        """Module of the stage; None if it is emulated or given."""
        self.emulated = isinstance(stage, EmulatedStage)
        self.runner: OpRunner
        self.state_owner: nn.Module | EmulatedRunner | None = None
        """Object with the stage's state, for checkpoints; None if another trainer has it."""
        if isinstance(stage, ExternalStage):
            self.runner = stage.runner
            return
        if isinstance(stage, EmulatedStage):
            self.runner = self.state_owner = EmulatedRunner(
                stage, coordinate.stage, coordinate.stages, coordinate.column, microbatches
            )
            return
        self.module = self.state_owner = stage
        self._needs_target = coordinate.is_last and loss_fn is not None
        self.runner = ModuleRunner(
            stage,
            is_first=coordinate.is_first,
            is_last=coordinate.is_last,
            loss_fn=loss_fn if coordinate.is_last else None,
            microbatches=microbatches,
            mode=split,
            store=memory.store,
        )
        self._measured = self.runner.measured

    def select_inputs(
        self, given: StepArguments, *, needs_target: bool = True
    ) -> tuple[MicrobatchInputs, Any]:
        """Return the microbatches of the arguments that this stage uses, and a signature. It
        changes if the shapes of outputs may change, or which of them need a gradient.
        ``needs_target``: a ``loss_fn`` must get one."""
        if self.emulated:
            work = given.kwargs.get("work")
            if work is None:
                return MicrobatchInputs(), ("emulated",)
            factors = read_costs(work, self.microbatches, "work")
            return MicrobatchInputs(kwargs=[{"work": each} for each in factors]), ("emulated",)
        if not isinstance(self.runner, ModuleRunner):
            args, kwargs = given.arg_mbs or (), given.kwarg_mbs or ()
            return MicrobatchInputs(args, kwargs, given.target_mbs or ()), shape_signature(
                (args[:1], kwargs[:1])
            )
        inputs, shapes = select_stage_inputs(
            self._coordinate,
            given.count or self.microbatches,
            given,
            needs_target=self._needs_target and needs_target,
        )
        return inputs, (shapes, self.runner.trained)

    @property
    def is_measuring(self) -> bool:
        """True if the backwards of this iteration run for their times, whatever the plan."""
        return isinstance(self.runner, ModuleRunner) and self.runner.is_measuring

    @property
    def offload_refusal(self) -> str:
        """Reason why activations cannot be moved, found by a test; empty if it found none."""
        return "" if self._measured is None else self._measured.offload_refusal

    def reduce_gradients(self) -> None:
        """Reduce the gradients of a sharded module after its last op. Collective over the ranks
        that share its parameters."""
        if isinstance(self.runner, ModuleRunner):
            self.runner.end_iteration()

    def update_emulated_state(self) -> None:
        """End an iteration of an emulated stage, as an optimizer does for a module."""
        if isinstance(self.runner, EmulatedRunner):
            self.runner.update_state()

    def reserve_host_memory(self, plan: RankPlan) -> None:
        """Allocate the host memory that ``plan`` needs for activations. Called between iterations,
        so that no memory is page-locked between ops."""
        stage = self._coordinate.stage
        mine, order = plan.by_stage[stage], plan.orders[stage]
        if self._store is None or mine.device_limit is None or mine.recompute:
            return
        if plan.dispatch is Dispatch.GUIDED:
            peak = count_in_flight_peak(order)
            most = compute_host_limit(peak, mine.device_limit, plan.microbatches)
        else:
            most = count_host_peak(order, mine.device_limit)
        self._store.pool.grow_to(most)

    def profile_iteration(self, outcome: StageRecord) -> StageProfile:
        """Return the op times of one iteration, and the peak memory so far."""
        if self._measured is not None:
            self._footprint = build_footprint(
                self._measured, self._ratio, recomputes=self._recomputes
            )
        work = outcome.measure_work()
        found = build_stage_profile(
            self._coordinate.stage,
            outcome.ops,
            self.runner.split,
            column=self._coordinate.column,
            peak_memory=read_peak_memory(self.device),
            footprint=self._footprint,
            copies=outcome.copies,
            clock=self._clock.read() if self._clock is not None else None,
            costs=outcome.work.costs,
            work_error=0.0 if work is None else work.compute_error(self.microbatches),
        )
        if found.backward_weight:
            self._apart = found.backward_input + found.backward_weight
        whole, ran = found.fused_backward, any(op.kind is OpKind.BW for op in outcome.ops)
        if ran and whole is not None and self._apart and not self.emulated:
            # Measured on more microbatches than in the first iterations.
            self._ratio = whole / self._apart
        return found

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory reserved for activations."""
        return self._store.pool.nbytes if self._store is not None else 0

    def close(self) -> None:
        """Free the host memory for activations."""
        if self._store is not None:
            self._store.close()


def find_stage_device(stage: Stage) -> torch.device:
    """Return the device of a stage: for a module that of its first parameter or buffer, else the
    CPU."""
    if isinstance(stage, ExternalStage):
        return stage.device
    if isinstance(stage, EmulatedStage):
        return torch.device("cpu")
    first = next((t for t in (*stage.parameters(), *stage.buffers())), None)
    return first.device if first is not None else torch.device("cpu")


def parse_split_mode(split: str) -> Mode:
    """Parse the argument ``split``. Raises :class:`InputError` if it is invalid."""
    for mode in get_args(Mode):
        if split == mode:
            return mode  # type: ignore[no-any-return]
    gone = describe_removal(SPLITS, split)
    raise InputError(
        f"split is {split!r}, which {gone}" if gone
        else f"split is {split!r}; expected {', '.join(get_args(Mode))}"
    )  # fmt: skip


@dataclass(frozen=True)
class StageMemory:
    """Options for a stage's activations between F and B: to move them, or to compute them again.

    ``store``: host memory for them; None for an emulated stage, whose copies only take time, or if
    they must stay on the device. ``offload_refusal``: the reason for that; empty: they may move.
    ``recompute_refusal``: why they must not be computed again; empty: they may.
    """

    store: ActivationStore | None
    offload_refusal: str
    recompute_refusal: str

    @staticmethod
    def for_stage(
        stage: Stage,
        device: torch.device,
        accelerator: Accelerator | None,
        host_memory: int | None,
        *,
        recomputes: bool,
    ) -> StageMemory:
        """Choose a stage's options. ``host_memory``: its bytes. ``recomputes``: the job allows
        it."""
        store, why = _open_store(stage, device, accelerator, host_memory)
        return StageMemory(store, why, _find_recompute_refusal(stage, recomputes))


def find_cuda_graph_refusal(stage: Stage) -> str:
    """Return why a stage's CUDA graphs prevent it from running on a GPU; empty if none are seen."""
    modules = stage.named_modules() if isinstance(stage, nn.Module) else ()
    for name, module in modules:
        if how := find_cuda_graphs(module):
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
    """Return a store of at most ``host_memory`` bytes, and the reason if there is no offload."""
    if isinstance(stage, ExternalStage):
        return None, "its activations belong to torch's stage"
    if host_memory is None:
        return None, (
            "it has no host memory for activations; give adaptation.allowOffload and"
            " hostMemory (host_memory of Pipeline)"
        )
    if isinstance(stage, EmulatedStage):
        return None, ""
    if why := find_holder_count_problem():
        return None, f"this version of torch is not supported: {why}"
    return ActivationStore(device, host_memory, accelerator), ""


def _find_recompute_refusal(stage: Stage, allowed: bool) -> str:
    if isinstance(stage, ExternalStage):
        return "its activations belong to torch's stage"
    if not allowed:
        return "the job forbids it; set schedule.recompute: auto (recompute of Pipeline)"
    return ""


def _initial_footprint(stage: Stage) -> StageFootprint:
    """Return the stated values of an emulated stage; a module has not measured any yet."""
    if not isinstance(stage, EmulatedStage):
        return StageFootprint()
    apart = stage.backward_input + stage.backward_weight
    return StageFootprint(
        activation_bytes=stage.activation_bytes,
        offload_copy=stage.offload_copy,
        input_bytes=stage.input_bytes,
        fused_ratio=stage.whole_backward / apart if apart > 0 else None,
    )
