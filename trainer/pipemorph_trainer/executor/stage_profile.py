"""Measurements of one stage: op times per kind, memory and offload."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pipemorph.planning.ir import OpKind
from pipemorph.wire import DeviceClock, StageProfile
from pipemorph_trainer.agent.messages import Offloaded
from pipemorph_trainer.executor.device_times import TimedCopy, TimedOp
from pipemorph_trainer.executor.split.measured import Measurements


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
