"""Dependencies of the ops of a step, and its simulation under any durations.

As in the published study: compute ops of a worker run in their recorded order; F of a stage follows
F of the one before and its transfer, B that of the one after; sends and receives pair up, each
stream in order; collectives of a worker follow each other, and its last compute op before them.
Transfers and collectives begin when all their members have.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipemorph.diagnose.operation import (
    ALL_GATHER,
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    CHECKPOINT,
    CLIP,
    DATA,
    EMBEDDING_REDUCE,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    GC,
    LOSS,
    NORM_REDUCE,
    OPTIMIZER,
    REDUCE_SCATTER,
    WEIGHT,
)
from pipemorph.diagnose.operation_table import CODE_OF_OPTYPE, Worker

IN_ORDER = frozenset(
    CODE_OF_OPTYPE[name]
    for name in (FORWARD, BACKWARD, WEIGHT, LOSS, DATA, GC, CHECKPOINT, OPTIMIZER)
)
"""Ops of the compute stream, codes."""
COLLECTIVES = frozenset(
    CODE_OF_OPTYPE[name]
    for name in (ALL_GATHER, REDUCE_SCATTER, EMBEDDING_REDUCE, NORM_REDUCE, CLIP)
)
_F, _B = CODE_OF_OPTYPE[FORWARD], CODE_OF_OPTYPE[BACKWARD]
_KINDS = (_F, _B, CODE_OF_OPTYPE[WEIGHT])
_OPTIMIZER, _ALL_GATHER = CODE_OF_OPTYPE[OPTIMIZER], CODE_OF_OPTYPE[ALL_GATHER]
_BY_REPLICA = CODE_OF_OPTYPE[EMBEDDING_REDUCE]
_BY_STAGE = (CODE_OF_OPTYPE[REDUCE_SCATTER], _ALL_GATHER)
_BY_WORKER = CODE_OF_OPTYPE[NORM_REDUCE]
_DIRECTIONS = (
    (_F, CODE_OF_OPTYPE[FORWARD_SEND], CODE_OF_OPTYPE[FORWARD_RECV], 1),
    (_B, CODE_OF_OPTYPE[BACKWARD_SEND], CODE_OF_OPTYPE[BACKWARD_RECV], -1),
)
"""Op that sends, its send, its receive, and the step from its chunk to the receiver's."""
OVERLAP = 1e-2
"""Seconds by which an op may end after the start of one that followed it: noise of clocks."""


class StepOp(NamedTuple):
    """Op of a step, as its analysis needs it.

    ``optype``: its code. ``chunk``: global chunk, from 0; -1: none. ``microbatch``: unique within
    its chunk and step. ``posted``: it is a receive that does not wait for others of its stream;
    ``begin`` is then when it was posted, otherwise ``start``. ``complete``: ``end`` is when its
    data were there; otherwise they may have been there before. ``waited``: when its worker began
    to wait for it, None if that is unknown.
    """

    worker: int
    optype: int
    chunk: int
    microbatch: int
    posted: bool
    start: float
    end: float
    begin: float
    complete: bool
    waited: float | None = None


class PairedTransfer(NamedTuple):
    """Transfer between two workers: numbers of the ops, -1 where the trace has none. ``producer``
    computes what is sent, ``consumer`` uses it."""

    producer: int
    send: int
    receive: int
    consumer: int


class StepGraph(NamedTuple):
    """Ops in an order in which each follows those that it depends on.

    Node *i* ends ``durations[ops[i]]`` after the later of nodes ``first[i] - 1`` and ``second[i] -
    1``; 0 stands for the start of the step. Nodes with op -1 take no time.
    """

    ops: tuple[int, ...]
    first: tuple[int, ...]
    second: tuple[int, ...]
    messages: tuple[PairedTransfer, ...]
    groups: tuple[tuple[int, ...], ...]
    """Members of each transfer and collective."""
    unmatched: int
    """Sends and receives without a place, which the simulation omits."""

    def simulate(self, durations: Sequence[float]) -> float:
        """Time of the step, seconds. ``durations``: by op, then a last entry, 0."""
        return max(self.compute_ends(durations))

    def compute_ends(self, durations: Sequence[float]) -> list[float]:
        """End of each node, after the start of the step at index 0."""
        ends = [0.0]
        append = ends.append
        for op, a, b in zip(self.ops, self.first, self.second, strict=True):
            x, y = ends[a], ends[b]
            append((x if x > y else y) + durations[op])
        return ends


class CircularOrderError(Exception):
    """The ops of a step wait for each other: order or microbatches in the trace are wrong."""


def build_graph(ops: Sequence[StepOp], workers: Sequence[Worker]) -> StepGraph:
    """Dependencies of ``ops``, which are sorted by worker, then start.

    Raises :class:`CircularOrderError`.
    """
    return _GraphBuilder(ops, workers).build()


@dataclass
class _GraphBuilder:
    ops: Sequence[StepOp]
    workers: Sequence[Worker]
    before: dict[int, list[int]] = field(default_factory=dict)
    """Nodes that a node depends on. Nodes below ``len(ops)`` are ops, the others groups."""
    groups: list[tuple[int, ...]] = field(default_factory=list)
    messages: list[PairedTransfer] = field(default_factory=list)
    nested: dict[int, int] = field(default_factory=dict)
    """Last op within another one, such as gc, by that one. What follows the outer op waits for
    both."""
    unmatched: int = 0

    def build(self) -> StepGraph:
        self.before = {i: [] for i in range(len(self.ops))}
        self.nested = {outer: i for i, outer in find_nested(self.ops)}
        by_worker: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(self.ops):
            by_worker[op.worker].append(i)
        for mine in by_worker.values():
            self._link_streams(mine)
        self._group_collectives(by_worker)
        for direction in _DIRECTIONS:
            self._link_messages(by_worker, *direction)
        return self._sort_nodes()

    def _link_streams(self, mine: Sequence[int]) -> None:
        """Link compute ops and collectives of a worker, each in order."""
        last = last_compute = last_collective = -1
        gathers: dict[int, int] = {}
        for i in mine:
            op = self.ops[i]
            if op.optype in IN_ORDER:
                self._add_edges(i, last_compute)
                if op.optype == _OPTIMIZER:
                    self._add_edges(i, last_collective)
                elif op.optype == _F and gathers:
                    # Without a chunk of its own, a gather is for all.
                    found = {c: at for c, at in gathers.items() if c in (-1, op.chunk)}
                    self._add_edges(i, *(found or gathers).values())
                last, last_compute = last_compute, i
            elif op.optype in COLLECTIVES:
                ended = last_compute
                if ended >= 0 and self.ops[ended].end > op.start + OVERLAP:
                    ended = last  # It overlaps the op that started it.
                self._add_edges(i, last_collective, ended)
                last_collective = i
                if op.optype == _ALL_GATHER:
                    gathers[op.chunk] = i

    def _add_edges(self, node: int, *sources: int) -> None:
        self.before[node].extend(source for source in sources if source >= 0)

    def _group_collectives(self, by_worker: dict[int, list[int]]) -> None:
        found: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)
        for worker, mine in by_worker.items():
            place = self.workers[worker]
            counts: dict[tuple[int, int], int] = defaultdict(int)
            for i in mine:
                op = self.ops[i]
                if op.optype not in COLLECTIVES or op.optype == _BY_WORKER:
                    continue
                of = 0
                if op.optype in _BY_STAGE:
                    of = place.stage + 1
                elif op.optype == _BY_REPLICA:
                    of = -1 - place.dp_rank
                number = counts[op.optype, op.chunk]
                counts[op.optype, op.chunk] += 1
                found[op.optype, of, op.chunk, number].append(i)
        for members in found.values():
            self._add_group(members)

    def _add_group(self, members: Sequence[int]) -> None:
        """Let members begin when each of them can."""
        self.groups.append(tuple(members))
        if len(members) < 2:
            return
        node = len(self.before)
        self.before[node] = [source for i in members for source in self.before[i]]
        for i in members:
            self.before[i] = [node]

    def _link_messages(
        self, by_worker: dict[int, list[int]], kind: int, send: int, receive: int, step: int
    ) -> None:
        """Pair sends and receives, by the compute ops that produce and consume their data."""
        computes: dict[tuple[int, int, int], int] = {}
        homes: dict[int, int] = {}
        for worker, mine in by_worker.items():
            for i in mine:
                op = self.ops[i]
                if op.optype == kind:
                    computes[self.workers[worker].dp_rank, op.chunk, op.microbatch] = i
                    homes[op.chunk] = self.workers[worker].stage
        sends: dict[int, int] = {}
        receives: dict[int, int] = {}
        for worker, mine in by_worker.items():
            stage = self.workers[worker].stage
            for optype, side, assigned in ((send, step, sends), (receive, -step, receives)):
                carried = [
                    i
                    for i in mine
                    if self.ops[i].optype == kind
                    and homes.get(self.ops[i].chunk + side, stage) != stage
                ]
                transfers = [i for i in mine if self.ops[i].optype == optype]
                assigned.update(self._assign_transfers(transfers, carried))
        last: dict[tuple[int, int], int] = {}
        for (replica, chunk, microbatch), producer in sorted(
            computes.items(), key=lambda each: (self.ops[each[1]].worker, each[1])
        ):
            consumer = computes.get((replica, chunk + step, microbatch))
            if consumer is None or self.ops[consumer].worker == self.ops[producer].worker:
                continue
            message = PairedTransfer(
                producer, sends.get(producer, -1), receives.get(consumer, -1), consumer
            )
            self.messages.append(message)
            self._link_message(message)
        for stream in (sends, receives):
            last.clear()
            for compute in sorted(stream):
                i = stream[compute]
                key = (self.ops[i].worker, self.ops[i].optype)
                if key in last and not self.ops[i].posted:
                    # The group's node is the only one before a member.
                    (group,) = self.before[i]
                    self.before[group].append(last[key])
                last[key] = i

    def _link_message(self, message: PairedTransfer) -> None:
        members = [i for i in (message.send, message.receive) if i >= 0]
        end = self.nested.get(message.producer, message.producer)
        if not members:
            self.before[message.consumer].append(end)
            return
        self.groups.append(tuple(members))
        node = len(self.before)
        self.before[node] = [end]
        for i in members:
            self.before[i] = [node]
        self.before[message.consumer].append(members[-1])

    def _assign_transfers(
        self, transfers: Sequence[int], carried: Sequence[int]
    ) -> Iterable[tuple[int, int]]:
        """Pair the compute ops whose data are ``carried`` with a worker's ``transfers`` of one
        type: by chunk and microbatch, otherwise both in order; none if their numbers differ."""
        named = {(self.ops[i].chunk, self.ops[i].microbatch): i for i in carried}
        keys = [(self.ops[i].chunk, self.ops[i].microbatch) for i in transfers]
        if all(key in named for key in keys) and len(set(keys)) == len(keys):
            return zip([named[key] for key in keys], transfers, strict=True)
        if len(carried) == len(transfers):
            return zip(carried, transfers, strict=True)
        self.unmatched += len(transfers)
        return ()

    def _sort_nodes(self) -> StepGraph:
        """Order nodes, and give each two predecessors at most."""
        after: dict[int, list[int]] = defaultdict(list)
        waiting = {}
        for node, sources in self.before.items():
            waiting[node] = len(sources)
            for source in sources:
                after[source].append(node)
        ready = [node for node, count in waiting.items() if not count]
        place: dict[int, int] = {}
        ops, first, second = [], [], []

        def append_node(op: int, a: int, b: int) -> int:
            ops.append(op)
            first.append(a)
            second.append(b)
            return len(ops)

        unplaced = {i for i in range(len(self.ops)) if self._is_transfer(i)} - {
            i for group in self.groups for i in group
        }
        while ready:
            node = ready.pop()
            if node not in unplaced:
                sources = list(dict.fromkeys(place[source] for source in self.before[node]))
                while len(sources) > 2:
                    sources = [
                        append_node(-1, *pair) if len(pair) == 2 else pair[0]
                        for pair in (sources[i : i + 2] for i in range(0, len(sources), 2))
                    ]
                sources += [0] * (2 - len(sources))
                place[node] = append_node(node if node < len(self.ops) else -1, *sources)
            for later in after[node]:
                waiting[later] -= 1
                if not waiting[later]:
                    ready.append(later)
        if any(waiting.values()):
            raise CircularOrderError
        return StepGraph(
            tuple(ops), tuple(first), tuple(second), tuple(self.messages), tuple(self.groups),
            self.unmatched,
        )  # fmt: skip

    def _is_transfer(self, i: int) -> bool:
        return self.ops[i].optype not in IN_ORDER and self.ops[i].optype not in COLLECTIVES


def find_nested(ops: Sequence[StepOp]) -> Iterator[tuple[int, int]]:
    """Numbers of ops within another one of their worker's compute stream, each with that of the
    outer one. ``ops`` are sorted by worker, then start."""
    outer = -1
    for i, op in enumerate(ops):
        if op.optype in IN_ORDER:
            inside = outer >= 0 and ops[outer].worker == op.worker and op.end <= ops[outer].end
            if inside and op.optype not in _KINDS:
                yield i, outer
            else:
                outer = i


def sign_structure(ops: Sequence[StepOp]) -> int:
    """Hash of what :func:`build_graph` depends on: equal for steps with the same structure."""
    return hash((tuple([op[:5] for op in ops]), *find_nested(ops)))
