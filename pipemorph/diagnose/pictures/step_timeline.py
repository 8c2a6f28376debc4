"""Timelines of one step: as it ran, and as the simulation runs it under other times.

Sends are in none: what they cost is in the receive at the other end.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median, median_low
from typing import NamedTuple

from pipemorph.diagnose.adapting import format_seconds
from pipemorph.diagnose.analysis.remedies import Remedy
from pipemorph.diagnose.analysis.slowdown import compute_ideal_times
from pipemorph.diagnose.analysis.step_graph import COLLECTIVES, IN_ORDER, StepOp
from pipemorph.diagnose.analysis.steps import RecordedStep
from pipemorph.diagnose.diagnosis import Diagnosis
from pipemorph.diagnose.diagnosis_text import format_change
from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_SEND,
    FORWARD,
    FORWARD_SEND,
    OPTYPES,
    WEIGHT,
)
from pipemorph.diagnose.operation_table import CODE_OF_OPTYPE, Worker
from pipemorph.planning.ir import OpKind, Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.simulator import simulate, trace_messages

MOST_TIMELINES = 6
"""Timelines of a diagnosis: two, and those of the advice that saves most."""
MOST_OPS = 20_000
"""Ops of a timeline: above it only the slowest replicas are drawn, at least one, and of a worker
its first ops."""

_SENDS = frozenset(CODE_OF_OPTYPE[name] for name in (FORWARD_SEND, BACKWARD_SEND))
_BACKWARD, _WEIGHT = CODE_OF_OPTYPE[BACKWARD], CODE_OF_OPTYPE[WEIGHT]
_OPTYPES = {OpKind.F: FORWARD, OpKind.B: BACKWARD, OpKind.BW: BACKWARD, OpKind.W: WEIGHT}
SlowMessage = tuple[Worker, Worker, float, float]
"""Sender and receiver of a message, and when it was sent and arrived: seconds from the start of
the step."""


class TimelineOp(NamedTuple):
    """Op of a timeline. Seconds from the start of the step; ``chunk`` and ``microbatch``: -1 if it
    has none. A receive or a collective begins when it no longer waits for other workers."""

    optype: str
    chunk: int
    microbatch: int
    start: float
    end: float
    in_order: bool
    """Whether it occupies the compute stream of its worker."""
    fused: bool = False
    """Whether it is a backward that computes the gradients of the weights as well."""


@dataclass(frozen=True)
class TimelineRow:
    """Ops of a worker, by start. ``rank``: global rank, -1 if unknown. ``busy``: seconds in which
    its compute stream is not idle."""

    worker: Worker
    rank: int
    ops: Sequence[TimelineOp]
    busy: float


@dataclass(frozen=True)
class StepTimeline:
    """Timeline of a step. ``name``: of its file. ``title``, and ``summary`` of its time: plain
    text. ``seconds``: of the step. ``messages``: those in slow directions of links."""

    name: str
    title: str
    summary: str
    seconds: float
    rows: Sequence[TimelineRow]
    messages: Sequence[SlowMessage] = ()

    def compute_idle(self, row: TimelineRow) -> float:
        """Idle share of a worker in the step."""
        return max(0.0, 1.0 - row.busy / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True)
class TimelineSet:
    """Timelines of a step: as it ran, with ideal times for all ops, and as advised.

    ``slowest``: all replicas, slowest first. ``drawn``: replicas that the timelines have.
    ``most_ops``: of a worker that has more the timelines have its first ones; None if none has.
    """

    step: RecordedStep
    timelines: Sequence[StepTimeline]
    slowest: Sequence[int]
    drawn: frozenset[int]
    most_ops: int | None


def build_timelines(diagnosis: Diagnosis) -> TimelineSet:
    """Timelines of the step of median time, of those with the most costly cause."""
    since = diagnosis.causes[0].since if diagnosis.causes else None
    steps = [step for step in diagnosis.steps.steps if since is None or step.step >= since]
    middle = median_low(step.span for step in steps)
    step = next(step for step in steps if step.span == middle)
    return _TimelineBuilder(diagnosis, step).build()


def _order_replicas(diagnosis: Diagnosis) -> list[int]:
    """Replicas, the slowest first; those of the first cause before all others."""
    by_dp, workers = diagnosis.slowdown.by_dp_rank, diagnosis.steps.workers
    named: dict[int, None] = {}
    for cause in diagnosis.causes[:1]:
        named = dict.fromkeys(workers[worker].dp_rank for worker in cause.workers)
    return [*named, *sorted(by_dp.keys() - named.keys(), key=lambda r: (-by_dp[r], r))]


class _TimelineBuilder:
    """Builds the timelines of one step, with the ops that there is room for.

    All of them are of the same step, so that what differs between two pictures is the change alone.
    """

    def __init__(self, diagnosis: Diagnosis, step: RecordedStep) -> None:
        self.diagnosis = diagnosis
        self.steps = diagnosis.steps
        self.step = step
        self.slowest = _order_replicas(diagnosis)
        counts = Counter(self.steps.workers[op.worker].dp_rank for op in step.ops)
        drawn: set[int] = set()
        room = MOST_OPS
        for replica in self.slowest:
            room -= counts[replica]
            if drawn and room < 0:
                break
            drawn.add(replica)
        self.drawn = frozenset(drawn)
        cut = sum(counts[replica] for replica in drawn) > MOST_OPS
        self.most_ops = max(1, MOST_OPS // self.steps.stages) if cut else None
        self.slow = {each for cause in diagnosis.causes for each in cause.directions}

    def build(self) -> TimelineSet:
        ideal = compute_ideal_times(self.steps.steps)
        found = [
            self._build_recorded(),
            self._build_simulated(
                [*(ideal[op.optype] for op in self.step.ops), 0.0],
                "without-stragglers",
                "without stragglers: each op takes the usual time of its type, and starts at once",
            ),
        ]
        planned = False
        for number, remedy in enumerate(self.diagnosis.advice, 1):
            if len(found) == MOST_TIMELINES:
                break
            name, title = f"advice-{number}", f"advice {number}: {format_change(remedy)}"
            if remedy.removal is not None:
                times = list(self.step.times)
                remedy.removal(self.step, times)
                found.append(self._build_simulated(times, name, title))
            elif remedy.schedule is not None and remedy.problem is not None and not planned:
                planned = True
                found.append(self._build_planned(remedy, remedy.schedule, remedy.problem, number))
        return TimelineSet(self.step, found, self.slowest, self.drawn, self.most_ops)

    def _build_recorded(self) -> StepTimeline:
        """Timeline of the step as it ran."""
        zero = self.step.begin

        def place(op: StepOp, seconds: float) -> tuple[float, float]:
            # Nested ops count once in ``seconds``, but the outer one lasts to its end.
            start = op.start if op.optype in IN_ORDER else max(op.start, op.end - seconds)
            return start - zero, op.end - zero

        placed = dict(enumerate(map(place, self.step.ops, self.step.times)))
        span = self.step.span
        title = f"step {self.step.step} as it ran"
        return self._make_timeline("as-it-ran", title, format_seconds(span), span, placed)

    def _build_simulated(self, times: Sequence[float], name: str, title: str) -> StepTimeline:
        """Timeline of the step in its recorded order. ``times``: seconds by op, then a last entry,
        0."""
        graph = self.step.graph
        ends = graph.compute_ends(times)[1:]
        placed = {
            i: (end - times[i], end) for i, end in zip(graph.ops, ends, strict=True) if i >= 0
        }
        span = max(ends, default=0.0)
        saved = 1 - span / self.step.span if self.step.span else 0.0
        summary = f"{format_seconds(span)}, {saved:.1%} less than as it ran"
        return self._make_timeline(name, title, summary, span, placed)

    def _make_timeline(
        self, name: str, title: str, summary: str, span: float,
        placed: Mapping[int, tuple[float, float]],
    ) -> StepTimeline:  # fmt: skip
        """Timeline of the step's ops. ``placed``: start and end by number of the op."""
        rows = self._make_rows([(self.step.ops[i], *times) for i, times in placed.items()])
        return StepTimeline(
            name, title, summary, span, rows, self._select_slow(self._list_messages(placed), rows)
        )

    def _list_messages(self, placed: Mapping[int, tuple[float, float]]) -> list[SlowMessage]:
        """Messages of the step's ops. One that was there before its receiver waited has arrived
        after the time that others take, or when it was used."""
        ops, workers = self.step.ops, self.steps.workers
        found = []
        expected: dict[tuple[Worker, Worker], list[float]] = defaultdict(list)
        for message in self.step.graph.messages if self.slow else ():
            if message.receive not in placed:
                continue
            producer, receive = ops[message.producer], ops[message.receive]
            way = workers[producer.worker], workers[receive.worker]
            start, end = placed[message.receive]
            ready = receive.complete and receive.begin <= producer.end
            if ready:
                expected[way].append(end - start)
            found.append((way, placed[message.producer][1], end, end - start if ready else None))
        late = {way: median(times) for way, times in expected.items()}
        return [
            (*way, sent, max(sent, min(end, sent + (late.get(way, inf) if own is None else own))))
            for way, sent, end, own in found
        ]

    def _select_slow(
        self, messages: Iterable[SlowMessage], rows: Sequence[TimelineRow]
    ) -> list[SlowMessage]:
        """Messages in slow directions, of the replicas and of the time that ``rows`` have."""
        end = max((row.ops[-1].end for row in rows), default=0.0)
        return [
            each
            for each in messages
            if (*each[0], each[1].stage) in self.slow
            and each[0].dp_rank in self.drawn
            and each[3] <= end
        ]

    def _make_rows(self, timed: Iterable[tuple[StepOp, float, float]]) -> list[TimelineRow]:
        """Rows of the replicas that are drawn. ``timed``: ops with start and end, any order."""
        steps = self.steps
        by_worker: dict[int, list[TimelineOp]] = defaultdict(list)
        mine = [
            each
            for each in timed
            if each[0].optype not in _SENDS and steps.workers[each[0].worker].dp_rank in self.drawn
        ]
        weights = {
            (op.worker, op.chunk, op.microbatch) for op, _, _ in mine if op.optype == _WEIGHT
        }
        for op, start, end in mine:
            at = -1 if op.optype in COLLECTIVES else op.microbatch
            fused = op.optype == _BACKWARD and (op.worker, op.chunk, op.microbatch) not in weights
            by_worker[op.worker].append(
                TimelineOp(
                    OPTYPES[op.optype], op.chunk, at, start, end, op.optype in IN_ORDER, fused
                )
            )
        order = sorted(by_worker, key=lambda number: steps.workers[number])
        return [self._make_row(number, by_worker[number]) for number in order]

    def _make_row(self, number: int, ops: list[TimelineOp]) -> TimelineRow:
        # An op comes before those that are nested in it.
        ops.sort(key=lambda op: (op.start, -op.end))
        busy = at = 0.0
        for op in ops:
            if op.in_order and op.end > at:
                busy += op.end - max(op.start, at)
                at = op.end
        worker, rank = self.steps.workers[number], self.steps.ranks[number]
        return TimelineRow(worker, rank, ops[: self.most_ops], busy)

    def _build_planned(
        self, remedy: Remedy, schedule: Schedule, problem: Problem, number: int
    ) -> StepTimeline:
        """Timeline of the slowest replica by ``schedule``, with its mean times."""
        by_dp = self.diagnosis.slowdown.by_dp_rank
        replica = min(by_dp, key=lambda r: (-by_dp[r], r))
        simulation = simulate(schedule, problem)
        places = {worker: place for place, worker in enumerate(self.steps.workers)}
        rows = []
        for rank, ops in enumerate(simulation.ranks):
            chunks = simulation.schedule.stages_by_rank[rank]
            made = [
                TimelineOp(
                    _OPTYPES[op.kind], chunks[op.chunk], op.microbatch, op.start, op.end, True,
                    op.kind is OpKind.BW,
                )
                for op in ops
            ]  # fmt: skip
            rows.append(self._make_row(places[Worker(replica, rank)], made))
        summary = (
            f"a step takes {format_seconds(remedy.predicted_seconds)}, {remedy.gain:.1%} less;"
            f" drawn: F, B and W of replica {replica} alone, with their mean times"
        )
        title = f"advice {number}: {format_change(remedy)}"
        ranks = [Worker(replica, rank) for rank in simulation.schedule.placement]
        messages = []
        for each in trace_messages(simulation).messages:
            sender, receiver = ranks[each.link : each.link + 2][:: 1 if each.forward else -1]
            messages.append((sender, receiver, each.sent, each.arrived))
        slow = self._select_slow(messages, rows)
        return StepTimeline(f"advice-{number}", title, summary, simulation.makespan, rows, slow)
