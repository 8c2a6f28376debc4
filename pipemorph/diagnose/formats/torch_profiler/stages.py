"""Stages of compute ops whose labels name none.

With one stage per rank the stage is the rank's place. With several, an op's stage and microbatch
follow from the way of its activations: the forwards that receive nothing are stage 0's, and the
receiver of what stage s sends is stage s + 1. A message is matched with its receive by the order of
those between the same two ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pipemorph.diagnose.formats.torch_profiler.compute_ops import ComputeOp
from pipemorph.diagnose.formats.torch_profiler.messages import TracedMessage


def name_single_stages(position: int, ops: Sequence[ComputeOp]) -> None:
    """Give the ops of a rank with one stage their stage, and number their microbatches by step."""
    for op in ops:
        op.stage = position
    _number_forwards([op for op in ops if op.is_forward], ops)


def _number_forwards(forwards: Sequence[ComputeOp], ops: Sequence[ComputeOp]) -> None:
    """Number microbatches of each step in the order of its forwards."""
    counts: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for op in forwards:
        numbers[op.microbatch] = counts[op.step] = counts.get(op.step, -1) + 1
    for op in ops:
        if op.microbatch in numbers:
            op.number = numbers[op.microbatch]


def drop_setup(ops: Mapping[int, list[ComputeOp]]) -> int:
    """Remove the forwards by which ranks infer shapes, with their backwards, and return how many
    they were. Then a rank has more forwards in a step than another one, and these come first.
    ``ops``: by position in the pipeline, changed in place."""
    dropped = 0
    counts = {
        position: Counter(op.step for op in mine if op.is_forward) for position, mine in ops.items()
    }
    for position, mine in ops.items():
        surplus = {
            step: count - min(other[step] for other in counts.values() if step in other)
            for step, count in counts[position].items()
        }
        extra: set[int] = set()
        for op in mine:
            if op.is_forward and surplus[op.step] > 0:
                surplus[op.step] -= 1
                extra.add(op.microbatch)
        mine[:] = [op for op in mine if op.microbatch not in extra]
        dropped += len(extra)
    return dropped


def has_several_stages(messages_of_first: Sequence[TracedMessage]) -> bool:
    """True if the pipeline's first rank receives activations. ``messages_of_first``: its own."""
    return any(not message.is_send and message.is_forward for message in messages_of_first)


def follow_activations(
    ops: Mapping[int, Sequence[ComputeOp]], messages: Mapping[int, Sequence[TracedMessage]]
) -> bool:
    """Name stages and microbatches of ranks with several stages each. ``ops``, ``messages``: by
    position in the pipeline. False if the messages do not lead to every op."""
    ranks = len(ops)
    following: dict[int, ComputeOp] = {}
    for position in range(ranks):
        sends = _list_ops(messages[position], is_send=True)
        receives = _list_ops(messages[(position + 1) % ranks], is_send=False)
        if len(sends) != len(receives):
            return False
        for op, receiver in zip(sends, receives, strict=True):
            following[id(op)] = receiver
    received = {id(op) for op in following.values()}
    firsts = [op for op in ops[0] if op.is_forward and id(op) not in received]
    counts: dict[int, int] = {}
    named: dict[int, tuple[int, int]] = {}
    for op in firsts:
        counts[op.step] = number = counts.get(op.step, -1) + 1
        stage, step = 0, op.step
        now: ComputeOp | None = op
        while now is not None:
            if id(now) in named or now.step != step:
                return False
            named[id(now)] = stage, number
            now = following.get(id(now))
            stage += 1
    stages = {stage for stage, _ in named.values()}
    if not stages or (max(stages) + 1) % ranks or len(named) != len(firsts) * (max(stages) + 1):
        return False
    for mine in ops.values():
        forwards = {op.microbatch: named.get(id(op)) for op in mine if op.is_forward}
        if any(forwards.get(op.microbatch) is None for op in mine):
            return False
        for op in mine:
            found = forwards[op.microbatch]
            assert found is not None
            op.stage, op.number = found
    return True


def _list_ops(messages: Sequence[TracedMessage], is_send: bool) -> list[ComputeOp]:
    """Forwards of messages in their order; one that has several tensors counts once."""
    found: list[ComputeOp] = []
    for message in messages:
        if message.is_send == is_send and message.is_forward:
            if found and found[-1] is message.op:
                continue
            found.append(message.op)
    return found
