"""Compute ops of one rank: from the labels of torch's schedules, or from autograd's numbers.

Labels contain the wait for the receive, and GPipe's the send, so an op begins where the last
receive in its label ends, and ends where the first send begins. Schedules without labels are cut by
sends and receives. There, a run of evaluations of autograd nodes is a backward; a run of operators
is a forward if a later backward evaluates nodes that it made. The last operator with a node's
number made it: operators that make no node have the number of the next one.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from pipemorph.diagnose.formats.torch_profiler.rank_trace import (
    EventKind,
    RankTrace,
    Span,
    TraceEvent,
)

OpKind = Literal["F", "B", "I", "W"]
_ACTION = re.compile(r"PP:(\d+)(F|B|I|W|SEND_F|SEND_B|RECV_F|RECV_B)(\d+)$")
_NAMED = re.compile(r"(Forward|Backward) (\d+)$")
MESSAGES = (EventKind.SEND, EventKind.RECEIVE)
ROUNDING_SECONDS = 1e-7
PYTHON_SECONDS = 0.001
"""Most seconds between an op's message and its first or last operator that are the op's: Python of
the schedule. More are a wait."""


@dataclass
class ComputeOp:
    """A forward (F), a whole backward (B), or its parts for inputs (I) and weights (W). ``begin``,
    ``end``: seconds of the rank's trace. ``waited``: second since which the op's receive held it
    up. ``stage``: of the whole pipeline, −1 if unknown. ``microbatch``: number within ``call``, the
    call of the schedule; without labels a number that the forward shares with its backwards alone.
    ``step``, ``number``: the step and the microbatch in it, −1 until they are counted."""

    kind: OpKind
    begin: float
    end: float
    waited: float
    stage: int = -1
    microbatch: int = -1
    call: int = 0
    step: int = -1
    number: int = -1
    evaluated: bool = False
    """Whether no backward follows: an op of an evaluation."""

    @property
    def is_forward(self) -> bool:
        return self.kind == "F"


class MessageLabel(NamedTuple):
    """Range in which an op's messages are issued. ``op``: None if the trace has no such op."""

    begin: float
    end: float
    op: ComputeOp | None


class Segmentation(NamedTuple):
    """Compute ops of a rank in order, with those of evaluations. ``labels``: None if its schedule
    has no labels. ``unclaimed``: number of backwards of forwards that precede the trace."""

    ops: list[ComputeOp]
    labels: list[MessageLabel] | None
    unclaimed: int = 0


def find_compute_ops(trace: RankTrace) -> Segmentation:
    """Compute ops of a rank, by labels if its schedule has them."""
    for pattern in (_ACTION, _NAMED):
        labels = [label for label in trace.labels if pattern.match(label.name)]
        if labels:
            return _read_labels(trace, labels)
    return _segment_by_autograd(trace)


def list_top_events(events: Iterable[TraceEvent]) -> Iterator[TraceEvent]:
    """Events that no other event of their thread contains, in order."""
    ends: dict[int | str, float] = {}
    for event in events:
        if event.begin >= ends.get(event.thread, -1.0):
            ends[event.thread] = event.end
            yield event


# Labels.


def _read_labels(trace: RankTrace, labels: Sequence[Span]) -> Segmentation:
    received = sorted(span.end for span in trace.transfers.get("recv", ()))
    sent = [event.begin for event in trace.events if event.kind is EventKind.SEND]
    backwards = [event.begin for event in trace.events if event.kind is EventKind.BACKWARD]
    ops: list[ComputeOp] = []
    exchanges: list[MessageLabel] = []
    for call, labels_of_call in enumerate(_split_calls(labels)):
        found: dict[tuple[str, int, int], ComputeOp] = {}
        for label in labels_of_call:
            kind, stage, microbatch = _parse_label(label.name)
            if kind not in ("F", "B", "I", "W"):
                continue
            begin, end = label.begin, label.end
            last = bisect_right(received, end) - 1
            if last >= 0 and received[last] > begin:
                begin = received[last]
            first = bisect_left(sent, begin)
            if first < len(sent):
                end = min(end, sent[first])
            # Stage 0 has no input to differentiate: its I is empty, and its W the whole backward.
            first = bisect_left(backwards, label.begin)
            if kind != "F" and (first == len(backwards) or backwards[first] > end):
                continue
            found[kind, stage, microbatch] = ComputeOp(
                cast(OpKind, kind),
                begin,
                end,
                label.begin,
                stage,
                microbatch,
                call,
            )
        evaluated = all(kind == "F" for kind, _, _ in found)
        for (kind, stage, microbatch), op in found.items():
            op.evaluated = evaluated
            if kind == "W" and ("I", stage, microbatch) not in found:
                op.kind = "B"
            ops.append(op)
        exchanges += _list_exchanges(labels_of_call, found)
    ops.sort(key=lambda op: op.begin)
    exchanges.sort(key=lambda label: label.begin)
    return Segmentation(ops, exchanges)


def _list_exchanges(
    labels: Sequence[Span], ops: dict[tuple[str, int, int], ComputeOp]
) -> Iterator[MessageLabel]:
    """Ranges of messages: labels of their own, or of GPipe's ops."""
    for label in labels:
        kind, stage, microbatch = _parse_label(label.name)
        if kind[-2:] == "_F" or kind == "F":
            op = ops.get(("F", stage, microbatch))
        else:
            # Of stage 0's backward, only W has work.
            parts = (ops.get((part, stage, microbatch)) for part in "IBW")
            op = next((part for part in parts if part is not None), None)
        if "_" in kind or stage < 0:
            yield MessageLabel(label.begin, label.end, op)


def _split_calls(labels: Sequence[Span]) -> Iterator[list[Span]]:
    """Split labels into calls of the schedule: within one, no label comes twice."""
    names: set[str] = set()
    now: list[Span] = []
    for label in labels:
        if label.name in names:
            yield now
            now, names = [], set()
        now.append(label)
        names.add(label.name)
    if now:
        yield now


def _parse_label(name: str) -> tuple[str, int, int]:
    """Parse a label: an op or an exchange, its stage (−1 if none), and its microbatch."""
    if match := _ACTION.match(name):
        return match[2], int(match[1]), int(match[3])
    match = _NAMED.match(name)
    assert match is not None
    return ("F" if match[1] == "Forward" else "B"), -1, int(match[2])


# Autograd's numbers.


@dataclass
class _Run:
    """Operators or evaluations without a message between them. ``numbers``: of nodes that a forward
    made and that backwards evaluate, or the forward that a backward belongs to."""

    op: ComputeOp
    numbers: set[int]


def _segment_by_autograd(trace: RankTrace) -> Segmentation:
    makers = _find_makers(trace)
    runs: list[_Run] = []
    forwards: dict[int, _Run] = {}
    current: _Run | None = None
    unclaimed = 0
    orphaned = False
    for event in list_top_events(trace.events):
        if event.kind in MESSAGES or event.kind is EventKind.OPTIMIZER:
            current = None
            orphaned = False
        elif event.kind is EventKind.BACKWARD:
            forward = None
            if event.sequence >= 0:
                index = makers.by_number.get(event.sequence)
                forward = forwards.get(index) if index is not None else None
                # Changes of views in place make nodes whose numbers no operator shows.
                inside = current is not None and current.op.kind != "F"
                unclaimed += forward is None and not orphaned and not inside
                orphaned = forward is None and not inside
            if orphaned:
                continue
            if forward is None:
                # Sums of gradients have no number; they belong to the op before them.
                if current is not None and current.op.kind != "F":
                    current.op.end = event.end
                continue
            mine = current is not None and current.op.kind != "F"
            if (
                not mine
                or current is None
                or current.op.microbatch != forward.op.microbatch
                or event.sequence in current.numbers
            ):
                current = _Run(
                    ComputeOp("B", event.begin, event.end, -1.0, -1, forward.op.microbatch), set()
                )
                runs.append(current)
            current.numbers.add(event.sequence)
            current.op.end = event.end
        else:
            orphaned = False
            index = makers.by_event.get((event.thread, event.begin))
            if index is None:
                continue
            if current is None or current.op.kind != "F":
                current = _Run(ComputeOp("F", event.begin, event.end, -1.0, -1, len(runs)), set())
                runs.append(current)
            current.op.end = event.end
            forwards[index] = current
    ops = _name_backwards([run.op for run in runs])
    _extend_to_messages(trace, ops)
    return Segmentation(ops, None, unclaimed)


class _Makers(NamedTuple):
    """Top events that made nodes which backwards evaluate. ``by_number``: index of the maker of a
    node; ``by_event``: its index by thread and begin."""

    by_number: dict[int, int]
    by_event: dict[tuple[int | str, float], int]


def _find_makers(trace: RankTrace) -> _Makers:
    """Find for each evaluated node the top event that made it."""
    claimed = {
        event.sequence
        for event in trace.events
        if event.kind is EventKind.BACKWARD and event.sequence >= 0
    }
    last: dict[int, tuple[int | str, float]] = {}
    tops: dict[int | str, TraceEvent] = {}
    for event in trace.events:
        top = tops.get(event.thread)
        if top is None or event.begin >= top.end:
            top = tops[event.thread] = event
        if event.sequence in claimed and top.kind is EventKind.OPERATOR:
            last[event.sequence] = (event.thread, top.begin)
    by_event: dict[tuple[int | str, float], int] = {}
    by_number = {
        number: by_event.setdefault(place, len(by_event)) for number, place in last.items()
    }
    return _Makers(by_number, by_event)


def _name_backwards(ops: list[ComputeOp]) -> list[ComputeOp]:
    """Name the first of two backwards of a forward I, and the second W."""
    first: dict[int, ComputeOp] = {}
    for op in ops:
        if op.kind == "F":
            continue
        if (before := first.setdefault(op.microbatch, op)) is not op:
            before.kind, op.kind = "I", "W"
    return ops


def _extend_to_messages(trace: RankTrace, ops: Sequence[ComputeOp]) -> None:
    """Let ops begin and end at the message before and after, if there is only Python between."""
    begins = [event.begin for event in trace.events if event.kind in MESSAGES]
    ends = [event.end for event in trace.events if event.kind in MESSAGES]
    ends = sorted(ends + [span.end for span in trace.transfers.get("recv", ())])
    before = -1.0
    for op, after in zip(ops, [*ops[1:], None], strict=True):
        first = bisect_left(begins, op.end)
        end = min(
            begins[first] if first < len(begins) else op.end,
            after.begin if after is not None else op.end,
        )
        last = bisect_right(ends, op.begin + ROUNDING_SECONDS) - 1
        begin = max(ends[last] if last >= 0 else -1.0, before)
        if op.begin - begin <= PYTHON_SECONDS:
            op.begin = begin
        if 0.0 <= end - op.end <= PYTHON_SECONDS:
            op.end = end
        before = op.end
