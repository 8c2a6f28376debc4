"""Steps of all ranks of an observed job, joined: wire times of messages, op times, the iteration.

A rank that PipeMorph does not run sends no notes with its messages, so a message's way is known
only where both of its ends are: here. It began when the sender passed it on, and ended when the
receiver had it. That is exact if the receiver waited before the message was sent. Otherwise it may
be too long, by the time for which the message may have waited for its receiver.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median
from typing import Any, Literal, NamedTuple

from pipemorph.detection.direction_series import DirectionKey
from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    COMPUTE,
    DATA,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    GC,
    LOSS,
    OPTIMIZER,
    REDUCE_SCATTER,
    WEIGHT,
    Operation,
)
from pipemorph.planning import Route
from pipemorph.planning.ir import OpKind
from pipemorph.protocol import IterationSample, LinkSample, OpsTrace, StageProfile, WireTime
from pipemorph.protocol.observed_steps import ObservedPlace, ObservedStep
from pipemorph.protocol.op_traces import RankTimes
from pipemorph.protocol.states import Direction
from pipemorph.spec.mesh import MeshShape

WINDOW_SECONDS = 0.05
"""Length of a window of messages, like those of ranks that judge their links themselves."""
BLOCKED_SECONDS = 0.0003
"""Least wait for a message that was not there yet; a wait for one that was takes less."""
POSTED_SECONDS = 0.001
"""Time after the sending within which a receive counts as posted before it."""
SIZED_PARTS, FEWEST_SIZED, SIZE_RATIO = 16, 4, 1.5
"""Newest messages whose sizes and times are compared, the fewest of them, and the least ratio of
two sizes that are."""
MessageKind = Literal["F", "B"]
"""Messages of forwards go to the next stage, those of backwards to the one before."""
DIRECTIONS: dict[MessageKind, Direction] = {"F": "forward", "B": "backward"}
SENDS: dict[str, MessageKind] = {FORWARD_SEND: "F", BACKWARD_SEND: "B"}
RECEIVES: dict[str, MessageKind] = {FORWARD_RECV: "F", BACKWARD_RECV: "B"}
MESSAGE_OF_OP: dict[OpKind, MessageKind] = {OpKind.F: "F", OpKind.B: "B", OpKind.BW: "B"}
"""Message that an op needs, if its stage receives any."""

TimedRow = tuple[OpKind, int, float, float]


class AlignedStep(NamedTuple):
    """Step of a rank, by the host's clock. ``seconds``: from the end of the step before, without
    evaluations. ``traces``: ops of its stages, ascending. ``waits``: for a processor, each with
    the time from and until which its seconds were."""

    step: int
    ended_at: float
    seconds: float
    operations: list[Operation]
    traces: list[OpsTrace]
    transport: Literal["gloo", "nccl"] = "gloo"
    waits: tuple[tuple[float, float, float], ...] = ()

    def count_waited(self, begin: float, end: float) -> float:
        """Seconds for which threads of the rank may have waited for a processor in a time."""
        return sum(waited for since, until, waited in self.waits if since < end and begin < until)

    @property
    def collected(self) -> float:
        """Seconds in Python's garbage collector."""
        return sum(op.duration for op in self.operations if op.optype == GC)


class ObservedWindow(NamedTuple):
    """Window of a direction of a link. ``at``: arrival of its last message."""

    at: float
    receiver: int
    sender: int
    sample: LinkSample


class _Arrival(NamedTuple):
    """Message that has arrived: its wire time, and by how much that may be too long. ``bytes``: -1
    if unknown. ``parts``: for its tensors, bytes up to their end, and seconds until they were
    there, as far as exact."""

    at: float
    wire: float
    slack: float
    bytes: int
    parts: list[tuple[int, float]]


class MessageSizes:
    """Sizes and times of the newest messages of a direction, or of their tensors."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, float]] = deque(maxlen=SIZED_PARTS)

    def add_parts(self, parts: Iterable[tuple[int, float]]) -> None:
        self._parts.extend(parts)

    def estimate_transfer(self, size: float) -> float | None:
        """Seconds of a message of ``size`` bytes beyond that of an empty one: the median slope of
        pairs of a small and a large one. None if there are too few, or sizes hardly differ."""
        parts = sorted(self._parts)
        half = len(parts) // 2
        if 2 * half < FEWEST_SIZED:
            return None
        pairs = zip(parts[:half], parts[-half:], strict=True)
        slopes = [
            (large[1] - small[1]) / (large[0] - small[0])
            for small, large in pairs
            if large[0] >= SIZE_RATIO * small[0]
        ]
        if 2 * len(slopes) < FEWEST_SIZED:
            return None
        return max(0.0, size * median(slopes))


def has_all_stages(place: ObservedPlace, step: ObservedStep) -> bool:
    """True if a step has ops of each stage of its rank, and of no other one."""
    stages = set(place.chunks)
    computed = {stage for optype, stage, *_ in step.rows if optype in COMPUTE}
    return computed == stages and stages | {-1} >= {stage for _, stage, *_ in step.rows}


def align_step(
    mesh: MeshShape, place: ObservedPlace, step: ObservedStep, shift: float
) -> AlignedStep:
    """Align a step that has all stages of its rank. ``shift``: seconds to add to its times to get
    those of the host."""
    rank, began = mesh.find_rank(place.chunks[0], place.replica), step.began_at + shift
    operations = []
    for optype, stage, microbatch, start, duration, posted, waited, size in step.rows:
        chunk = place.chunks.index(stage) if stage >= 0 else -1
        operations.append(
            Operation(
                step.step, place.replica, mesh.pp_indices[place.chunks[0]], rank, optype,
                began + start / 1e6, duration / 1e6, -1, chunk, stage, microbatch,
                None if posted is None else began + posted / 1e6,
                None if waited is None else began + waited / 1e6,
                schedule=place.framework, bytes=size,
            )
        )  # fmt: skip
    ends = [began + at / 1e6 for at, _ in step.waits]
    waits = tuple(
        (since, until, waited / 1e6)
        for since, until, (_, waited) in zip([began, *ends], ends, step.waits, strict=False)
    )
    ended, seconds = step.ended_at + shift, step.ended_at - step.began_at - step.omitted
    aligned = AlignedStep(
        step.step, ended, max(0.0, seconds), operations, [], place.transport, waits
    )
    aligned.traces.extend(_trace_stages(place, rank, aligned))
    return aligned


def _trace_stages(place: ObservedPlace, rank: int, step: AlignedStep) -> Iterable[OpsTrace]:
    """Ops of each stage in a step. The first one has the rank's other times."""
    computed: dict[int, list[TimedRow]] = {stage: [] for stage in place.chunks}
    receives: dict[int, list[Operation]] = defaultdict(list)
    apart = {(op.global_chunk, op.microbatch) for op in step.operations if op.optype == WEIGHT}
    for op in step.operations:
        key = stage, microbatch = op.global_chunk, op.microbatch
        if op.optype in RECEIVES:
            receives[stage].append(op)
        elif op.optype == LOSS and computed[stage] and computed[stage][-1][0] is OpKind.F:
            kind, number, begin, _ = computed[stage][-1]
            computed[stage][-1] = kind, number, begin, op.end
        elif op.optype in COMPUTE:
            whole = OpKind.B if key in apart else OpKind.BW
            kind = {FORWARD: OpKind.F, BACKWARD: whole, WEIGHT: OpKind.W}[op.optype]
            computed[stage].append((kind, microbatch, op.start, op.end))
    waits = {stage: _find_waits(computed[stage], receives[stage]) for stage in place.chunks}
    first = min(place.chunks, key=lambda stage: computed[stage][0][2])
    origin = min([computed[first][0][2], *(wait[2] for wait in waits[first][:1])])
    for stage in place.chunks:
        trace = OpsTrace.from_ops(
            (rank, stage, place.replica), step.step, 0, origin, computed[stage],
            waits=waits[stage],
            rank_times=_measure_times(step, origin) if stage == place.chunks[0] else None,
        )  # fmt: skip
        assert trace is not None
        yield trace


def _find_waits(ops: Iterable[TimedRow], receives: Iterable[Operation]) -> list[TimedRow]:
    """Waits for the messages of ops, in the order of the ops."""
    waited = {
        (RECEIVES[op.optype], op.microbatch): (op.start if op.waited is None else op.waited, op.end)
        for op in receives
    }
    found = []
    for kind, number, start, _ in ops:
        message = MESSAGE_OF_OP.get(kind)
        if message is not None and (span := waited.get((message, number))) is not None:
            found.append((kind, number, span[0], min(start, span[1])))
    return found


def _measure_times(step: AlignedStep, origin: float) -> RankTimes:
    """Times outside the ops. Code of the script before the first op counts as data."""

    def total(optype: str) -> float:
        return sum(op.duration for op in step.operations if op.optype == optype)

    pauses = [op for op in step.operations if op.optype == GC]
    before = sum(op.duration for op in pauses if op.start < origin)
    reduced = total(REDUCE_SCATTER)
    return RankTimes(
        window=step.seconds,
        optimizer=total(OPTIMIZER),
        data=max(0.0, total(DATA), origin - step.ended_at + step.seconds - before),
        gc=before,
        reduction=reduced or None,
        pauses=[
            (round(1e6 * (op.start - origin)), round(1e6 * op.duration))
            for op in pauses[:1024]
            if op.start >= origin
        ],
    )


def build_windows(
    mesh: MeshShape,
    ranks: Mapping[int, AlignedStep],
    sizes: defaultdict[DirectionKey, MessageSizes],
) -> list[ObservedWindow]:
    """Windows of all directions of links in a step, in order of time. ``ranks``: by their number in
    ``mesh``. ``sizes``: of earlier messages, to which those of the step are added."""
    sent: dict[tuple[int, int, str, int], list[Operation]] = defaultdict(list)
    for step in ranks.values():
        for op in step.operations:
            if op.optype in SENDS:
                sent[op.dp_rank, op.global_chunk, SENDS[op.optype], op.microbatch].append(op)
    windows = []
    for rank, step in ranks.items():
        received: dict[tuple[int, MessageKind, int], list[Operation]] = defaultdict(list)
        for op in step.operations:
            if (kind := RECEIVES.get(op.optype)) is not None:
                received[op.global_chunk, kind, op.microbatch].append(op)
        column = mesh.find_coordinate(rank).column
        buckets: dict[tuple[int, MessageKind, int], list[_Arrival]] = defaultdict(list)
        for (stage, kind, microbatch), receives in received.items():
            source = stage - 1 if kind == "F" else stage + 1
            if sends := sent.get((column, source, kind, microbatch)):
                arrival = _judge_arrival(sends, receives)
                buckets[stage, kind, int(arrival.at / WINDOW_SECONDS)].append(arrival)
        for (stage, kind, _), arrivals in buckets.items():
            source = stage - 1 if kind == "F" else stage + 1
            key: DirectionKey = (min(stage, source), column, DIRECTIONS[kind])
            for arrival in arrivals:
                sizes[key].add_parts(arrival.parts)
            total = sum(max(0, arrival.bytes) for arrival in arrivals)
            sample = LinkSample(
                link=key[0], replica=column, direction=key[2],
                route=Route.DIRECT, transport=step.transport, iteration=step.step, bytes=total,
                queue_p50=0.0, transfer=sizes[key].estimate_transfer(total / len(arrivals)),
                **_summarize_arrivals(arrivals),
            )  # fmt: skip
            sender = mesh.find_rank(source, column)
            span = min(arrival.at - arrival.wire for arrival in arrivals), arrivals[-1].at
            load = {
                "waited": step.count_waited(*span),
                "sender_waited": ranks[sender].count_waited(*span),
            }
            sample = sample.model_copy(update=load)
            windows.append(ObservedWindow(arrivals[-1].at, rank, sender, sample))
    return sorted(windows, key=lambda window: window.at)


def _judge_arrival(sends: Sequence[Operation], receives: Sequence[Operation]) -> _Arrival:
    """Join both ends of a message, with a send and a receive per tensor."""
    sent, end = sends[0].start, receives[-1].end
    posted = receives[0].start if receives[0].posted is None else receives[0].posted
    # A message may wait with its sender until the receive is posted, or on the way.
    slack = 0.0 if posted - sent <= POSTED_SECONDS else posted - sent
    parts, size = [], 0
    for send, receive in zip(sends, receives, strict=False):
        size = size + send.bytes if min(size, send.bytes) >= 0 else -1
        if receive.end - _began_waiting(receive) >= BLOCKED_SECONDS and size >= 0 and not slack:
            parts.append((size, receive.end - sent))
    wire = max(0.0, end - sent)
    if end - _began_waiting(receives[0]) < BLOCKED_SECONDS:
        slack = wire  # It was there already.
    return _Arrival(end, wire, min(wire, slack), size, parts)


def _began_waiting(receive: Operation) -> float:
    return receive.start if receive.waited is None else receive.waited


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


def build_profiles(step: AlignedStep, crowding: float | None = None) -> list[StageProfile]:
    """Mean op times of the stages of a rank. ``crowding``: of its host."""
    found = []
    for trace in step.traces:
        times: dict[str, list[int]] = defaultdict(list)
        for kind, duration in zip(trace.kinds, trace.durations, strict=False):
            times[kind].append(duration)
        means = {kind: max(0.0, fmean(each) / 1e6) for kind, each in times.items()}
        apart = "I" in means
        found.append(
            StageProfile(
                stage=trace.stage,
                replica=trace.column,
                forward=means.get("F", 0.0),
                backward_input=means["I"] if apart else means.get("B", 0.0),
                backward_weight=means.get("W", 0.0) if apart else 0.0,
                split="deferred" if apart else "fused",
                peak_memory=0,
                crowding=crowding,
            )
        )
    return found


def summarize_step(ranks: Mapping[int, AlignedStep], traces: Sequence[OpsTrace]) -> IterationSample:
    """Sample of a step, by the times of all ranks. A step is as long as that of rank 0, since each
    rank's steps follow each other."""
    busy = sum(sum(trace.durations) for trace in traces) / 1e6
    ops = [trace.ops for trace in traces]
    began, ended = min(each[0].start for each in ops), max(each[-1].end for each in ops)
    first = ranks[min(ranks)]
    span = max(0.0, min(first.seconds, ended - began))
    bubble = 1 - busy / (len(ranks) * span) if span else 0.0
    return IterationSample(
        index=first.step,
        seconds=first.seconds,
        loss=None,
        plan_version=0,
        bubble_fraction=min(1.0, max(0.0, bubble)),
        ops_seconds=span,
        gc_inside=max(each.collected for each in ranks.values()),
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
