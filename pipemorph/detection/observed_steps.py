"""Steps of all ranks of an observed job, joined: wire times of messages, op times, the iteration.

A rank that PipeMorph does not run sends no notes with its messages, so a message's way is known
only where both of its ends are: here. It began when the sender passed it on, and ended when the
receiver had it. That is exact if the receiver waited before the message was sent. Otherwise it may
be too long, by the time for which the message may have waited for its receiver.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from pipemorph.planning import Route
from pipemorph.planning.ir import OpKind
from pipemorph.protocol import IterationSample, LinkSample, OpsTrace, StageProfile, WireTime
from pipemorph.protocol.observed_steps import MessageKind, ObservedStep
from pipemorph.protocol.states import Direction
from pipemorph.spec.mesh import MeshShape

WINDOW_SECONDS = 0.05
"""Length of a window of messages, like those of ranks that judge their links themselves."""
BLOCKED_SECONDS = 0.0003
"""Least wait for a message that was not there yet; a wait for one that was takes less."""
POSTED_SECONDS = 0.001
"""Time after the sending within which a receive counts as posted before it."""
DIRECTIONS: dict[MessageKind, Direction] = {"F": "forward", "B": "backward"}


class AlignedStep(NamedTuple):
    """Step of a rank. ``shift``: seconds to add to its times to get those of the host.
    ``waiting``: see :class:`~pipemorph.protocol.observed_steps.StepsReport`."""

    step: ObservedStep
    shift: float
    transport: str = "gloo"
    waiting: float = 0.0


class ObservedWindow(NamedTuple):
    """Window of a direction of a link. ``at``: arrival of its last message."""

    at: float
    receiver: int
    sender: int
    sample: LinkSample


class _Arrival(NamedTuple):
    """Message that has arrived: its wire time, and by how much that may be too long."""

    at: float
    wire: float
    slack: float


def build_windows(mesh: MeshShape, ranks: Mapping[int, AlignedStep]) -> list[ObservedWindow]:
    """Windows of all directions of links in a step, in order of time. ``ranks``: by their number in
    ``mesh``."""
    sent: dict[tuple[int, int, MessageKind, int], float] = {}
    for rank, (step, shift, *_) in ranks.items():
        column = mesh.find_coordinate(rank).column
        for stage in step.stages:
            origin = stage.ops.origin + shift
            for kind, microbatch, at in stage.sends:
                sent[column, stage.ops.stage, kind, microbatch] = origin + at / 1e6
    windows = []
    for rank, (step, shift, transport, _) in ranks.items():
        column = mesh.find_coordinate(rank).column
        for stage in step.stages:
            number, origin = stage.ops.stage, stage.ops.origin + shift
            buckets: dict[tuple[MessageKind, int], list[_Arrival]] = defaultdict(list)
            for kind, microbatch, posted, waited, end in stage.receives:
                source = number - 1 if kind == "F" else number + 1
                start = sent.get((column, source, kind, microbatch))
                if start is not None:
                    times = origin + posted / 1e6, origin + waited / 1e6, origin + end / 1e6
                    arrival = _judge_arrival(start, *times)
                    buckets[kind, int(arrival.at / WINDOW_SECONDS)].append(arrival)
            for (kind, _), arrivals in buckets.items():
                source = number - 1 if kind == "F" else number + 1
                sample = LinkSample(
                    link=min(number, source), replica=column, direction=DIRECTIONS[kind],
                    route=Route.DIRECT, transport="nccl" if transport == "nccl" else "gloo",
                    iteration=step.step, bytes=0, queue_p50=0.0, **_summarize_arrivals(arrivals),
                )  # fmt: skip
                sender = mesh.find_rank(source, column)
                windows.append(ObservedWindow(arrivals[-1].at, rank, sender, sample))
    return sorted(windows, key=lambda window: window.at)


def _judge_arrival(sent: float, posted: float, waited: float, end: float) -> _Arrival:
    wire = max(0.0, end - sent)
    if end - waited < BLOCKED_SECONDS:
        return _Arrival(end, wire, wire)  # It was there already.
    # A message may wait with its sender until the receive is posted, or on the way.
    slack = posted - sent
    return _Arrival(end, wire, 0.0 if slack <= POSTED_SECONDS else min(wire, slack))


def _summarize_arrivals(arrivals: Sequence[_Arrival]) -> dict[str, Any]:
    """Wire times of a window, by its exact arrivals if there are any."""
    exact = sorted(each.wire for each in arrivals if not each.slack)
    nearest = min(arrivals, key=lambda each: each.wire)
    wires = exact or [nearest.wire]
    wire = WireTime(
        count=len(arrivals), exact=len(exact), min=wires[0], p50=wires[len(wires) // 2],
        p99=wires[-1], mean=fmean(wires),
    )  # fmt: skip
    return {"wire": wire, "slack": None if exact else nearest.slack}


def build_profiles(
    step: ObservedStep, column: int, crowding: float | None = None
) -> list[StageProfile]:
    """Mean op times of the stages of a rank. ``crowding``: of its host."""
    found = []
    for stage in step.stages:
        times: dict[str, list[int]] = defaultdict(list)
        for kind, duration in zip(stage.ops.kinds, stage.ops.durations, strict=False):
            times[kind].append(duration)
        means = {kind: max(0.0, fmean(each) / 1e6) for kind, each in times.items()}
        apart = "I" in means
        found.append(
            StageProfile(
                stage=stage.ops.stage,
                replica=column,
                forward=means.get("F", 0.0),
                backward_input=means["I"] if apart else means.get("B", 0.0),
                backward_weight=means.get("W", 0.0) if apart else 0.0,
                split="deferred" if apart else "fused",
                peak_memory=0,
                crowding=crowding,
            )
        )
    return found


def align_traces(ranks: Mapping[int, AlignedStep]) -> list[OpsTrace]:
    """Ops of all stages in a step, by the host's clock, with the ranks' numbers in the mesh."""
    return [
        stage.ops.model_copy(update={"rank": rank, "origin": stage.ops.origin + shift})
        for rank, (step, shift, *_) in ranks.items()
        for stage in step.stages
    ]


def summarize_step(ranks: Mapping[int, AlignedStep], traces: Sequence[OpsTrace]) -> IterationSample:
    """Sample of a step, by the times of all ranks. A step is as long as that of rank 0, since each
    rank's steps follow each other."""
    busy = sum(sum(trace.durations) for trace in traces) / 1e6
    ops = [trace.ops for trace in traces]
    began, ended = min(each[0].start for each in ops), max(each[-1].end for each in ops)
    first = ranks[min(ranks)].step
    span = max(0.0, min(first.seconds, ended - began))
    bubble = 1 - busy / (len(ranks) * span) if span else 0.0
    return IterationSample(
        index=first.step,
        seconds=first.seconds,
        loss=None,
        plan_version=0,
        bubble_fraction=min(1.0, max(0.0, bubble)),
        ops_seconds=span,
        gc_inside=max(each.step.collected for each in ranks.values()),
    )


def list_stage_ops(
    mesh: MeshShape, traces: Sequence[OpsTrace], column: int = 0
) -> list[list[tuple[int, OpKind, int]]]:
    """Stage, kind and microbatch of each op in the order in which the ranks of a column ran
    them."""
    rows: dict[int, list[tuple[float, int, OpKind, int]]] = defaultdict(list)
    for trace in traces:
        if trace.column == column:
            for op in trace.ops:
                place = mesh.pp_indices[trace.stage]
                rows[place].append((op.start, trace.stage, op.kind, op.microbatch))
    return [[row[1:] for row in sorted(rows[place])] for place in sorted(rows)]
