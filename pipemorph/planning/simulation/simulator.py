"""Simulates a schedule: exact event times, and messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from pipemorph.errors import InputError
from pipemorph.planning.ir import Dispatch, OpKind, Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.core import Changes, Costs, DelayAt, Ran, Waits, guide_of
from pipemorph.planning.validator import check_memory, validate, validate_waits

Runner = Callable[[Costs, DelayAt | None, DelayAt | None], Ran]
"""Executes a schedule under the costs, delays and transfers it is given."""
SETTLED = 4
"""Iterations after which consecutive ones take about the same time."""


class TimedOp(NamedTuple):
    """One op with its times, in the problem's unit."""

    kind: OpKind
    microbatch: int
    start: float
    end: float
    chunk: int = 0


@dataclass(frozen=True)
class Simulation:
    """One simulated iteration. ``schedule``: the order in which the ops ran. ``after``: what
    follows the last op of each rank."""

    schedule: Schedule
    ran: Ran = field(repr=False)
    after: Sequence[float] = field(repr=False)

    @cached_property
    def ranks(self) -> tuple[tuple[TimedOp, ...], ...]:
        """The ops of each rank in run order."""
        return tuple(
            tuple(
                [
                    TimedOp(op.kind, op.microbatch, start, end, op.chunk)
                    for op, start, end in zip(ops, starts, ends, strict=True)
                ]
            )
            for ops, starts, ends in zip(
                self.schedule.ranks, self.ran.start, self.ran.end, strict=True
            )
        )

    @cached_property
    def stages(self) -> tuple[tuple[TimedOp, ...], ...]:
        """The ops of each stage in run order."""
        if self.schedule.one_stage_each:
            return self.ranks
        found: list[list[TimedOp]] = [[] for _ in self.schedule.placement]
        for mine, ops in zip(self.schedule.stages_of, self.ranks, strict=True):
            for op in ops:
                found[mine[op.chunk]].append(op)
        return tuple(map(tuple, found))

    @property
    def makespan(self) -> float:
        """Time from the start of the iteration to the end of the last op, and of what follows on
        its rank."""
        return max(self._ends())

    @property
    def exposed_reduction(self) -> float:
        """By how much the reduction of gradients makes the iteration longer: what the ops of no
        rank hide."""
        return self.makespan - max(ends[-1] for ends in self.ran.end)

    @property
    def period(self) -> float:
        """Longest time from the start of a rank's first op to the end of its last one, and of
        what follows it: the time per iteration if nothing makes ranks wait for each other between
        iterations."""
        starts = (row[0] for row in self.ran.start)
        return max(end - start for end, start in zip(self._ends(), starts, strict=True))

    def _ends(self) -> list[float]:
        return [row[-1] + tail for row, tail in zip(self.ran.end, self.after, strict=True)]

    def objective(self, problem: Problem) -> float:
        """Makespan or period, as the problem asks for."""
        return self.period if problem.objective == "period" else self.makespan

    @property
    def bubble_fraction(self) -> float:
        """Idle time of the ranks over ``ranks × makespan``; 0 if no op takes any time."""
        whole = len(self.ranks) * self.makespan
        busy = sum(op.end - op.start for ops in self.stages for op in ops)
        return max(0.0, 1.0 - busy / whole) if whole > 0 else 0.0


def simulate(
    schedule: Schedule,
    problem: Problem,
    dispatch_mode: Dispatch = Dispatch.STATIC,
    *,
    waits: Waits | None = None,
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
    before: Sequence[float] | None = None,
) -> Simulation:
    """Execute ``schedule`` under the times, caps and links of ``problem``.

    STATIC keeps each rank's order. GUIDED keeps the order as far as messages arrive in
    time; ``waits``: see :func:`~pipemorph.planning.simulation.core.guide_of`.
    ``delay_at(link, sent)``, if given, is in place of the links' delays, and then ``transfer_at``,
    if given, in place of their transfers; ``sent``: time since the start of the iteration.
    ``before``: when each rank may begin; None: at 0. Raises :class:`ScheduleError` if the schedule
    is invalid or exceeds a cap of the problem.
    """
    check_fits(schedule, problem)
    validate(schedule, problem.in_flight_limits(), problem.device_limits())
    guided = dispatch_mode is Dispatch.GUIDED
    check_memory(schedule, problem.sizes, problem.rank_memory, as_peaks=guided)
    validate_waits(schedule, waits or ())
    costs = Costs.of(problem, schedule.placement)
    if before is not None:
        costs = costs._replace(before=list(before))
    run = _runner(schedule, problem, dispatch_mode, waits)
    ran = run(costs, delay_at, transfer_at)
    if dispatch_mode is not Dispatch.STATIC:
        schedule = core.decode(ran.codes, problem.microbatches, schedule.placement)
    return Simulation(schedule, ran, costs.after)


def predict(
    schedule: Schedule,
    problem: Problem,
    dispatch_mode: Dispatch = Dispatch.STATIC,
    waits: Waits | None = None,
) -> float:
    """Makespan of ``schedule``, in the problem's unit.

    The fast path of the adaptation controller: no checks, so the schedule must be valid.
    """
    costs = Costs.of(problem, schedule.placement)
    if dispatch_mode is Dispatch.STATIC:
        return core.makespan(costs, schedule.codes)
    return core.guided_makespan(costs, guide_of(schedule, problem, waits))


def following(free: core.Rows, after: Sequence[float]) -> tuple[float, list[float]]:
    """When rank 0 may begin the next iteration, and when each rank may, counted from then, if
    nothing makes ranks wait for each other between iterations. ``free``: of the iteration before
    it, see :class:`~pipemorph.planning.simulation.core.Ran`. ``after``: what follows the last op of
    each rank."""
    ends = [row[-1] + tail for row, tail in zip(free, after, strict=True)]
    # No rank has anything to do before rank 0 begins: it has stage 0.
    return ends[0], [max(0.0, end - ends[0]) for end in ends]


def predict_period(
    schedule: Schedule,
    problem: Problem,
    dispatch_mode: Dispatch = Dispatch.STATIC,
    waits: Waits | None = None,
) -> float:
    """Time per iteration of ``schedule`` if many of them follow each other and nothing makes ranks
    wait for each other in between, in the problem's unit: once consecutive ones take about the
    same.

    At most :attr:`Simulation.period`: a rank need not begin as early as it could. Without checks,
    like :func:`predict`.
    """
    costs = Costs.of(problem, schedule.placement)
    run = _runner(schedule, problem, dispatch_mode, waits)
    steps: list[float] = []
    while len(steps) < 2 * SETTLED:
        took, before = following(run(costs, None, None).free, costs.after)
        if before == costs.before:
            return took
        steps.append(took)
        costs = costs._replace(before=before)
    return sum(steps[SETTLED:]) / SETTLED


def predict_changing(
    schedule: Schedule,
    problem: Problem,
    changes: Sequence[Changes],
    dispatch_mode: Dispatch = Dispatch.STATIC,
    waits: Waits | None = None,
) -> float:
    """Mean time of iterations with the delays and, if given, the transfers ``changes[k]``, each a
    function ``(link, sent)``, in the problem's unit; ``sent``: time since the start of the
    iteration. Their makespan, or, if the objective is the
    period, what they take if they follow each other. Without checks, like :func:`predict`.
    """
    costs = Costs.of(problem, schedule.placement)
    run = _runner(schedule, problem, dispatch_mode, waits)
    steps: list[float] = []
    for delay_at, transfer_at in changes:
        ran = run(costs, delay_at, transfer_at)
        if problem.objective == "makespan":
            steps.append(ran.makespan(costs.after))
            continue
        took, before = following(ran.free, costs.after)
        steps.append(took)
        costs = costs._replace(before=before)
    return sum(steps) / len(steps)


def _runner(schedule: Schedule, problem: Problem, mode: Dispatch, waits: Waits | None) -> Runner:
    """Executes a valid schedule under the costs, delays and transfers it is given."""
    if mode is Dispatch.STATIC:
        return lambda costs, *at: core.in_order(costs, schedule.codes, *at)
    guide = guide_of(schedule, problem, waits)
    return lambda costs, *at: core.guided(costs, guide, *at)


def check_fits(schedule: Schedule, problem: Problem) -> None:
    """Raise :class:`InputError` unless both have the same number of stages and microbatches."""
    if schedule.stage_count != problem.stage_count:
        raise InputError(
            f"the plan has {schedule.stage_count} stages, the problem {problem.stage_count}"
        )
    if schedule.microbatches != problem.microbatches:
        raise InputError(
            f"the plan has {schedule.microbatches} microbatches, the problem {problem.microbatches}"
        )


class Message(NamedTuple):
    """One message over link *i*. ``forward``: from stage *i* to *i+1*, else from *i+1* to *i*.

    ``sent``: end of the op that computed it; ``arrived``: when the receiver may use it.
    """

    link: int
    forward: bool
    microbatch: int
    sent: float
    arrived: float


class Delivery(NamedTuple):
    """The messages of an iteration, and compute blocked by sends. Times in the problem's unit.

    ``held[rank]``: position of an op → time until which its send blocked the rank's compute (by
    ``Link.outstanding``).
    """

    messages: list[Message]
    held: list[dict[int, float]]


def deliver(simulation: Simulation) -> Delivery:
    """The messages of a simulation between its ranks, in the order of their sends."""
    placement, stages_of = simulation.schedule.placement, simulation.schedule.stages_of
    last = len(placement) - 1
    above, below = simulation.ran.above, simulation.ran.below
    sent: list[tuple[float, Message]] = []
    held: list[dict[int, float]] = []
    for rank, ops in enumerate(simulation.ranks):
        blocked: dict[int, float] = {}
        held.append(blocked)
        for position, (op, at) in enumerate(zip(ops, simulation.ran.free[rank], strict=True)):
            stage = stages_of[rank][op.chunk]
            kind, m, end = op.kind, op.microbatch, op.end
            if at > end:
                blocked[position] = at
            if kind is OpKind.F and stage < last and placement[stage + 1] != rank:
                sent.append((at, Message(stage, True, m, end, above[stage + 1][m])))
            elif kind in (OpKind.B, OpKind.BW) and stage and placement[stage - 1] != rank:
                sent.append((at, Message(stage - 1, False, m, end, below[stage - 1][m])))
    return Delivery([message for _, message in sorted(sent, key=itemgetter(0))], held)
