"""Measurements of one rank: wire times per link and direction, op times per kind."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from pipemorph.planning.ir import OpKind, Path
from pipemorph.wire import LinkSample, StageProfile, WireTime
from pipemorph_trainer.control import Offloaded
from pipemorph_trainer.paths.message import Direction
from pipemorph_trainer.split.report import SplitReport

Transport = Literal["gloo", "nccl", "tcp", "shm", "rdma"]
ENOUGH_EXACT = 3
"""So many exact samples stand for their window. Fewer do if they are half of it: a slow link
brings one message per window. Otherwise all are given, as upper bounds."""
MAX_WINDOW = 4096


class _Message(NamedTuple):
    wire: float
    queue: float
    nbytes: int
    exact: bool


class LinkRecorder:
    """Collects the messages received in one direction of one link until they are published."""

    def __init__(self, link: int, replica: int, direction: Direction) -> None:
        self._link, self._replica = link, replica
        self._direction: Literal["forward", "backward"] = (
            "forward" if direction is Direction.FORWARD else "backward"
        )
        self._messages: list[_Message] = []
        self._path: Path = Path.DIRECT
        self._transport: Transport = "gloo"
        self._iteration = 0
        self.rtt_min: float | None = None

    def begin(self, path: Path, transport: Transport, iteration: int) -> LinkSample | None:
        """Samples of one window share a path: returns what was left over when it changes."""
        left = None
        if path is not self._path or transport != self._transport:
            left = self.drain()
            self._path, self._transport = path, transport
        self._iteration = iteration
        return left

    def add(self, wire: float, queue: float, nbytes: int, exact: bool) -> None:
        """One message. ``wire`` may come out negative by the clocks' error: 0 then."""
        if len(self._messages) < MAX_WINDOW:
            self._messages.append(_Message(max(0.0, wire), max(0.0, queue), nbytes, exact))

    def __bool__(self) -> bool:
        return bool(self._messages)

    def drain(self) -> LinkSample | None:
        """The window so far, and start a new one. None if nothing came."""
        messages, self._messages = self._messages, []
        if not messages:
            return None
        exact = [m.wire for m in messages if m.exact]
        if len(exact) < ENOUGH_EXACT and 2 * len(exact) < len(messages):
            exact = []
        wires = sorted(exact or (m.wire for m in messages))
        return LinkSample(
            link=self._link,
            replica=self._replica,
            direction=self._direction,
            path=self._path,
            transport=self._transport,
            iteration=self._iteration,
            bytes=sum(m.nbytes for m in messages),
            wire=WireTime(
                count=len(messages),
                exact=len(exact),
                min=wires[0],
                p50=wires[len(wires) // 2],
                p99=wires[min(len(wires) - 1, int(0.99 * len(wires)))],
                mean=statistics.fmean(wires),
            ),
            queue_p50=statistics.median(m.queue for m in messages),
            rtt_min=self.rtt_min,
        )


class TimedOp(NamedTuple):
    """One op that ran; wall-clock seconds."""

    kind: OpKind
    microbatch: int
    start: float
    end: float


class TimedCopy(NamedTuple):
    """Activations on their way to host memory, as part of an F, or back, as part of a B or BW;
    wall-clock seconds. On CUDA those of the compute stream: nothing for a way out beside it."""

    kind: OpKind
    microbatch: int
    start: float
    end: float
    nbytes: int

    @property
    def out(self) -> bool:
        return self.kind is OpKind.F


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
