"""Messages of one rank: sends and receives, and the compute op that each belongs to.

Over gloo, a send or a receive ends with the wait for it, which may be much later than its end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from pipemorph.diagnose.formats.torch_profiler.compute_ops import (
    MESSAGES,
    ComputeOp,
    MessageLabel,
    Segmentation,
    list_top_events,
)
from pipemorph.diagnose.formats.torch_profiler.rank_trace import (
    EventKind,
    RankTrace,
    Span,
    TraceEvent,
)

WAIT_SECONDS = 0.0002
"""A wait of less is none: the message was there before, and when is not recorded."""


@dataclass
class TracedMessage:
    """A send or a receive. ``posted``: second at which its issue began, ``issued``: at which that
    ended, ``waited``: at which the wait for it began, ``complete``: at which that ended. ``op``:
    compute op whose output is sent, or that needs what is received."""

    is_send: bool
    posted: float
    issued: float
    waited: float
    complete: float
    op: ComputeOp

    @property
    def is_forward(self) -> bool:
        return self.op.is_forward

    @property
    def is_awaited(self) -> bool:
        """True if the wait took time; otherwise the data may have been there before it."""
        return self.complete - self.waited > WAIT_SECONDS


def find_messages(
    trace: RankTrace, segmentation: Segmentation, ranks: Sequence[int], position: int
) -> tuple[list[TracedMessage], list[float]]:
    """Messages of a rank, in order of their issue, and the seconds of those that belong to no op,
    as those of the exchange of shapes before the first step. ``ranks``, ``position``: global ranks
    of the pipeline, and the rank's place among them."""
    completions = _match_transfers(trace)
    waits = _WaitFinder(trace)
    finder = _OpFinder(segmentation.ops)
    messages: list[TracedMessage] = []
    others: list[float] = []
    for event, complete in completions:
        is_send = event.kind is EventKind.SEND
        if segmentation.labels is not None:
            op = _find_labelled_op(segmentation.labels, event.begin)
        else:
            forward = _is_forward(event, ranks, position)
            find, second = (finder.before, event.begin) if is_send else (finder.after, complete)
            op = find(second, forward)
        if op is None:
            others.append(event.begin)
            continue
        waited = complete if is_send else waits.begin_before(complete, event.begin, op)
        messages.append(TracedMessage(is_send, event.begin, event.end, waited, complete, op))
    if segmentation.labels is None:
        messages, foreign = _drop_foreign(segmentation.ops, messages)
        others += [message.posted for message in foreign]
    return messages, others


def _find_labelled_op(labels: Sequence[MessageLabel], second: float) -> ComputeOp | None:
    place = bisect_right(labels, second, key=lambda label: label.begin) - 1
    return labels[place].op if place >= 0 and second <= labels[place].end else None


def _drop_foreign(
    ops: Sequence[ComputeOp], messages: Sequence[TracedMessage]
) -> tuple[list[TracedMessage], list[TracedMessage]]:
    """Drop messages of evaluations and of the exchange of shapes, which were assigned to the next
    or last op: those beyond the number of tensors that most ops have. A direction that fewer than
    half of the ops have has no messages."""
    by_op: dict[tuple[int, bool], list[TracedMessage]] = {}
    for message in messages:
        by_op.setdefault((id(message.op), message.is_send), []).append(message)
    dropped: set[int] = set()
    for is_send in (False, True):
        for is_forward in (False, True):
            mine = [
                by_op[id(op), is_send]
                for op in ops
                if op.kind != "W" and op.is_forward == is_forward and (id(op), is_send) in by_op
            ]
            all_ops = sum(op.kind != "W" and op.is_forward == is_forward for op in ops)
            counts = Counter(map(len, mine))
            most = min(counts, key=lambda count: (-counts[count], count)) if counts else 0
            if 2 * len(mine) < all_ops:
                most = 0
            for found in mine:
                # The first sends after an op, and the last receives before it, are its own.
                surplus = found[most:] if is_send else found[: len(found) - most]
                dropped.update(map(id, surplus))
    return (
        [message for message in messages if id(message) not in dropped],
        [message for message in messages if id(message) in dropped],
    )


def _is_forward(event: TraceEvent, ranks: Sequence[int], position: int) -> bool | None:
    """True if a message carries activations, by its peer; None if the peer does not show it."""
    if event.peer < 0 or len(ranks) < 3:
        return None
    # A rank in its group; of a group of all ranks, a global one.
    if event.peer >= len(ranks) and event.peer not in ranks:
        return None
    peer = event.peer if event.peer < len(ranks) else ranks.index(event.peer)
    is_next = peer == (position + 1) % len(ranks)
    return is_next == (event.kind is EventKind.SEND)


class _OpFinder:
    """Finds the op that a message without a label belongs to, of a kind if that is known."""

    def __init__(self, ops: Sequence[ComputeOp]) -> None:
        self._ops = {
            kind: [op for op in ops if op.kind != "W" and kind in (None, op.is_forward)]
            for kind in (None, True, False)
        }

    def before(self, second: float, forward: bool | None) -> ComputeOp | None:
        """Op whose output a message carries that is sent at a second."""
        ops = self._ops[forward]
        place = bisect_right(ops, second + 1e-6, key=lambda op: op.end) - 1
        return ops[place] if place >= 0 else None

    def after(self, second: float, forward: bool | None) -> ComputeOp | None:
        """Op that needs a message which is there at a second."""
        ops = self._ops[forward]
        place = bisect_left(ops, second - 1e-6, key=lambda op: op.begin)
        return ops[place] if place < len(ops) else None


class _WaitFinder:
    """Finds when waits began: after the last event that the rank began itself."""

    def __init__(self, trace: RankTrace) -> None:
        self._ends = sorted(event.end for event in list_top_events(trace.events))

    def begin_before(self, complete: float, posted: float, op: ComputeOp) -> float:
        place = bisect_left(self._ends, complete) - 1
        last = self._ends[place] if place >= 0 else posted
        # A label's begin is that of the wait, after whatever was done before it.
        since = op.waited if op.waited < complete else posted
        return min(max(last, posted, since), complete)


def _match_transfers(trace: RankTrace) -> list[tuple[TraceEvent, float]]:
    """Sends and receives with the second at which each was complete."""
    found: list[tuple[TraceEvent, float]] = []
    events = [event for event in trace.events if event.kind in MESSAGES]
    together = trace.transfers.get("coalesced", [])
    for kind, name in ((EventKind.SEND, "send"), (EventKind.RECEIVE, "recv")):
        mine = [event for event in events if event.kind is kind]
        spans = trace.transfers.get(name, [])
        place = 0
        for event, following in zip_longest(mine, mine[1:]):
            limit = following.begin if following is not None else float("inf")
            while place < len(spans) and spans[place].begin < event.begin:
                place += 1
            if place < len(spans) and spans[place].begin < limit:
                found.append((event, spans[place].end))
                place += 1
            else:
                found.append((event, _end_of_batch(together, event)))
    found.sort(key=lambda pair: pair[0].begin)
    return found


def _end_of_batch(batches: Sequence[Span], event: TraceEvent) -> float:
    """End of the batch that a message is part of, or of its own issue."""
    place = bisect_left(batches, event.begin, key=lambda span: span.begin)
    return batches[place].end if place < len(batches) else event.end
