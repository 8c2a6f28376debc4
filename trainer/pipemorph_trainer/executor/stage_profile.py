"""Measurements of one rank: wire times per link and direction, op times per kind."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from pipemorph.planning.ir import OpKind
from pipemorph.wire import StageProfile
from pipemorph_trainer.agent.messages import Offloaded
from pipemorph_trainer.executor.split.report import SplitReport
from pipemorph_trainer.executor.timed import TimedCopy, TimedOp


@dataclass(frozen=True)
class Footprint:
    """What is known of a stage beside its op times; None: not known.

    ``offload_copy``: seconds for ``activation_bytes`` one way, where that may be done.
    ``fused_ratio``: a BW's time by that of B and W apart, of an emulated stage, which is told
    both. A module's BW is only known where a plan runs it: a self-test's few runs are too noisy
    to plan with.
    """

    activation_bytes: int | None = None
    offload_copy: float | None = None
    fused_ratio: float | None = None


def footprint(report: SplitReport) -> Footprint:
    """What the self-test found of a microbatch's activations; of its times of ops, nothing."""
    offload = report.offload
    return Footprint(
        activation_bytes=report.activation_bytes,
        offload_copy=offload.seconds if offload is not None and not offload.reason else None,
    )


def stage_profile(
    stage: int,
    ops: Sequence[TimedOp],
    split: Literal["module", "graph", "fused", "emulated"],
    *,
    peak_memory: int,
    footprint: Footprint = Footprint(),
    copies: Sequence[TimedCopy] = (),
) -> StageProfile:
    """Medians over one iteration's ops. A fused backward counts as ``backward_input``.

    ``copies`` are taken off the ops they are parts of, so that F and B are the same whichever
    microbatches a plan sends to host memory; what a copy takes is told apart, as
    ``offload_copy``: the median of the longer way where there were any, else what it took at
    the start.

    ``fused_backward``, of an emulated stage alone, is the median BW where there was one, else
    B + W by the ratio that it was told.
    """
    copying = {(copy.kind, copy.microbatch): copy.end - copy.start for copy in copies}

    def median(*kinds: OpKind) -> float:
        times = [
            max(0.0, op.end - op.start - copying.get((op.kind, op.microbatch), 0.0))
            for op in ops
            if op.kind in kinds
        ]
        return statistics.median(times) if times else 0.0

    backward = median(OpKind.B, OpKind.BW)
    weight = 0.0 if split == "fused" else median(OpKind.W)
    return StageProfile(
        stage=stage,
        forward=median(OpKind.F),
        backward_input=backward,
        backward_weight=weight,
        split=split,
        peak_memory=peak_memory,
        activation_bytes=footprint.activation_bytes,
        offload_copy=_longer(copies) if copies else footprint.offload_copy,
        fused_backward=_fused(ops, backward, weight, footprint.fused_ratio),
    )


def _longer(copies: Sequence[TimedCopy]) -> float:
    """Median copy of the direction that takes longer: on a device the way out may take nothing."""
    took: dict[bool, list[float]] = {}
    for copy in copies:
        took.setdefault(copy.out, []).append(copy.end - copy.start)
    return max(statistics.median(times) for times in took.values())


def _fused(
    ops: Sequence[TimedOp], backward: float, weight: float, ratio: float | None
) -> float | None:
    if ratio is None:
        return None
    if any(op.kind is OpKind.BW for op in ops):
        return backward
    return ratio * (backward + weight)


def offloaded(copies: Sequence[TimedCopy], host_bytes: int) -> Offloaded | None:
    """One iteration's copies for the counters; None where there were none."""
    if not copies:
        return None
    return Offloaded(
        microbatches=sum(copy.out for copy in copies),
        bytes=sum(copy.nbytes for copy in copies if copy.out),
        seconds=sum(copy.end - copy.start for copy in copies),
        host_bytes=host_bytes,
    )


def peak_memory(device: torch.device) -> int:
    """Highest use so far, bytes: device memory on CUDA, resident set elsewhere.

    On CUDA since the script last reset torch's peak, else since the process began. It is not
    reset here: a script that reads the same mark would read less than it used.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
