"""Steps of an observation as messages for ``pipemorph serve --observe``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    DATA,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    GC,
    LOSS,
    OPTIMIZER,
    REDUCE_SCATTER,
    WEIGHT,
)
from pipemorph.planning.ir import OpKind
from pipemorph.protocol.observed_steps import (
    MessageKind,
    ObservedPlace,
    ObservedStage,
    ObservedStep,
    ReceivedMessage,
    SentMessage,
)
from pipemorph.protocol.op_traces import OpsTrace, RankTimes
from pipemorph_trainer.record import RecordedOp

SENDS: dict[str, MessageKind] = {FORWARD_SEND: "F", BACKWARD_SEND: "B"}
RECEIVES: dict[str, MessageKind] = {FORWARD_RECV: "F", BACKWARD_RECV: "B"}
MESSAGE_OF_OP: dict[OpKind, MessageKind] = {OpKind.F: "F", OpKind.B: "B", OpKind.BW: "B"}
"""Message that an op needs, if its stage receives any."""

TimedRow = tuple[OpKind, int, float, float]


class FinishedStep(NamedTuple):
    """Step of a rank. ``began``, ``ended``: wall clock; ``omitted``: seconds in evaluations."""

    step: int
    ops: Sequence[RecordedOp]
    began: float
    ended: float
    omitted: float = 0.0


def make_step(place: ObservedPlace, recorded: FinishedStep) -> ObservedStep | None:
    """Make the message of a step; None if it has no op of some stage."""
    computed: dict[int, list[TimedRow]] = defaultdict(list)
    sends: dict[int, list[tuple[MessageKind, int, float]]] = defaultdict(list)
    receives: dict[int, list[tuple[MessageKind, int, float, float, float]]] = defaultdict(list)
    apart = {(op.global_chunk, op.microbatch) for op in recorded.ops if op.optype == WEIGHT}
    counts: Counter[str] = Counter()
    for op in recorded.ops:
        optype, start, end = op.optype, op.start, op.start + op.duration
        stage = op.global_chunk if op.global_chunk >= 0 else place.chunks[0]
        microbatch = op.microbatch
        if microbatch < 0:
            # Messages without a number come in the order of their microbatches.
            microbatch, counts[optype] = counts[optype], counts[optype] + 1
        if optype in SENDS:
            sends[stage].append((SENDS[optype], microbatch, start))
        elif optype in RECEIVES:
            posted = start if op.posted is None else op.posted
            waited = start if op.waited is None else op.waited
            receives[stage].append((RECEIVES[optype], microbatch, posted, waited, end))
        elif optype == LOSS and computed[stage] and computed[stage][-1][0] is OpKind.F:
            kind, number, begin, _ = computed[stage][-1]
            computed[stage][-1] = kind, number, begin, end
        elif optype == FORWARD:
            computed[stage].append((OpKind.F, microbatch, start, end))
        elif optype == BACKWARD:
            kind = OpKind.B if (stage, microbatch) in apart else OpKind.BW
            computed[stage].append((kind, microbatch, start, end))
        elif optype == WEIGHT:
            computed[stage].append((OpKind.W, microbatch, start, end))
    if not all(computed[stage] for stage in place.chunks):
        return None
    waits = {stage: _find_waits(computed[stage], receives[stage]) for stage in place.chunks}
    first = min(place.chunks, key=lambda stage: computed[stage][0][2])
    origin = min([computed[first][0][2], *(wait[2] for wait in waits[first][:1])])
    times = _measure_times(recorded, origin)
    stages = []
    for stage in place.chunks:
        where = place.rank, stage, place.replica
        trace = OpsTrace.from_ops(
            where, recorded.step, 0, origin, computed[stage], waits=waits[stage],
            rank_times=times if stage == place.chunks[0] else None,
        )  # fmt: skip
        if trace is None:
            return None
        stages.append(
            ObservedStage(
                ops=trace,
                sends=[_shift_send(each, origin) for each in sends[stage]],
                receives=[_shift_receive(each, origin) for each in receives[stage]],
            )
        )
    return ObservedStep(
        step=recorded.step,
        microbatches=len({row[1] for row in computed[place.chunks[0]]}),
        ended_at=recorded.ended,
        seconds=max(0.0, recorded.ended - recorded.began - recorded.omitted),
        collected=sum(op.duration for op in recorded.ops if op.optype == GC),
        stages=stages,
    )


def _find_waits(
    ops: Iterable[TimedRow], receives: Iterable[tuple[MessageKind, int, float, float, float]]
) -> list[TimedRow]:
    """Waits for the messages of ops, in the order of the ops."""
    waited = {(kind, number): (since, until) for kind, number, _, since, until in receives}
    found = []
    for kind, number, start, _ in ops:
        message = MESSAGE_OF_OP.get(kind)
        if message is not None and (span := waited.get((message, number))) is not None:
            found.append((kind, number, span[0], min(start, span[1])))
    return found


def _measure_times(recorded: FinishedStep, origin: float) -> RankTimes:
    """Times outside the ops. Code of the script before the first op counts as data."""

    def total(optype: str) -> float:
        return sum(op.duration for op in recorded.ops if op.optype == optype)

    pauses = [op for op in recorded.ops if op.optype == GC]
    before = sum(op.duration for op in pauses if op.start < origin)
    data = max(total(DATA), origin - recorded.began - recorded.omitted - before)
    reduced = total(REDUCE_SCATTER)
    return RankTimes(
        window=max(0.0, recorded.ended - recorded.began - recorded.omitted),
        optimizer=total(OPTIMIZER),
        data=max(0.0, data),
        gc=before,
        reduction=reduced or None,
        pauses=[
            (_to_microseconds(op.start - origin), _to_microseconds(op.duration))
            for op in pauses[:1024]
            if op.start >= origin
        ],
    )


def _shift_send(message: tuple[MessageKind, int, float], origin: float) -> SentMessage:
    kind, number, at = message
    return kind, number, _to_microseconds(at - origin)


def _shift_receive(
    message: tuple[MessageKind, int, float, float, float], origin: float
) -> ReceivedMessage:
    kind, number, *times = message
    posted, waited, end = (_to_microseconds(at - origin) for at in times)
    return kind, number, posted, waited, end


def _to_microseconds(seconds: float) -> int:
    return round(1e6 * seconds)
