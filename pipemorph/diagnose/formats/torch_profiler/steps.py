"""Steps of one rank: ``ProfilerStep#N``, else from optimizer to optimizer, else one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from pipemorph.diagnose.formats.torch_profiler.compute_ops import ComputeOp
from pipemorph.diagnose.formats.torch_profiler.rank_trace import EventKind, RankTrace


class TracedStep(NamedTuple):
    """A step. ``begin``, ``end``: seconds of the rank's trace."""

    number: int
    begin: float
    end: float


def find_steps(trace: RankTrace, ops: Sequence[ComputeOp]) -> list[TracedStep]:
    """Steps of a rank, in order."""
    if trace.steps:
        steps = []
        for span in trace.steps:
            number = span.name.partition("#")[2]
            steps.append(TracedStep(int(number) if number.isdigit() else -1, span.begin, span.end))
        return steps
    if not ops:
        return []
    # An optimizer may call others: what ends a step is the last one before the next forward.
    forwards = [op.begin for op in ops if op.is_forward]
    ends: list[float] = []
    before = -1
    for event in trace.events:
        if event.kind is EventKind.OPTIMIZER:
            place = bisect_right(forwards, event.begin)
            if place == 0:
                continue
            if place == before:
                ends[-1] = max(ends[-1], event.end)
            else:
                ends.append(event.end)
            before = place
    last = max(op.end for op in ops)
    if not ends or ends[-1] < last:
        ends.append(last)
    begins = [min(op.begin for op in ops), *ends]
    return [
        TracedStep(number, begin, end)
        for number, (begin, end) in enumerate(zip(begins, ends, strict=False))
    ]


def count_microbatches(steps: Sequence[TracedStep], ops: Sequence[ComputeOp]) -> set[int]:
    """Set ``step`` and ``number`` of the ops. Microbatches of several calls of the schedule within
    a step are counted on. Return the numbers of steps that lack forwards or backwards."""
    begins = [step.begin for step in steps]
    for op in ops:
        place = bisect_right(begins, op.begin) - 1
        inside = place >= 0 and op.begin < steps[place].end
        op.step = steps[place].number if inside else -1
    incomplete = set()
    for number in {op.step for op in ops} - {-1}:
        mine = [op for op in ops if op.step == number]
        calls = sorted({op.call for op in mine})
        most = 1 + max(op.microbatch for op in mine)
        forwards = {(op.call, op.stage, op.microbatch) for op in mine if op.is_forward}
        backwards = {(op.call, op.stage, op.microbatch) for op in mine if op.kind in "BI"}
        if forwards != backwards:
            incomplete.add(number)
        for op in mine:
            op.number = calls.index(op.call) * most + op.microbatch
    return incomplete
