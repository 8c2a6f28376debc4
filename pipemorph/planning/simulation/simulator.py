"""Simulates a schedule under a problem: exact times of ops and messages, and fast predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

from pipemorph.errors import InputError
from pipemorph.planning.ir import Dispatch, OpKind, Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation import execution
from pipemorph.planning.simulation.execution import (
    Changes,
    Costs,
    DelayAt,
    Execution,
    Waits,
    build_guide,
)
from pipemorph.planning.validator import check_rank_memory, validate, validate_waits

Runner = Callable[[Costs, DelayAt | None, DelayAt | None], Execution]
"""Executes one schedule under costs, and under delays and transfers if they vary."""
TRANSIENT_ITERATIONS = 4
"""Iterations after which their times hardly change."""


class TimedOp(NamedTuple):
    """Op with its times, in the problem's unit."""

    kind: OpKind
    microbatch: int
    start: float
    end: float
    chunk: int = 0


@dataclass(frozen=True)
class Simulation:
    """Simulated iteration. ``schedule``: the order in which the ops ran. ``rank_tails``: time after
    the last op of each rank."""

    schedule: Schedule
    execution: Execution = field(repr=False)
    rank_tails: Sequence[float] = field(repr=False)

    @cached_property
    def ranks(self) -> tuple[tuple[TimedOp, ...], ...]:
        """Ops of each rank in run order."""
        return tuple(
            tuple(
                [
                    TimedOp(op.kind, op.microbatch, start, end, op.chunk)
                    for op, start, end in zip(ops, starts, ends, strict=True)
                ]
            )
            for ops, starts, ends in zip(
                self.schedule.ranks, self.execution.start, self.execution.end, strict=True
            )
        )

    @cached_property
    def stages(self) -> tuple[tuple[TimedOp, ...], ...]:
        """Ops of each stage in run order."""
        if self.schedule.one_stage_each:
            return self.ranks
        found: list[list[TimedOp]] = [[] for _ in self.schedule.placement]
        for mine, ops in zip(self.schedule.stages_by_rank, self.ranks, strict=True):
            for op in ops:
                found[mine[op.chunk]].append(op)
        return tuple(map(tuple, found))

    @property
    def makespan(self) -> float:
        """Time from the start of the iteration to the end of the last op and its reduction."""
        return max(self._compute_rank_ends())

    @property
    def exposed_reduction(self) -> float:
        """Time by which gradient reduction lengthens the iteration: the part that no ops hide."""
        return self.makespan - max(ends[-1] for ends in self.execution.end)

    @property
    def period(self) -> float:
        """Longest time from the start of a rank's first op to the end of its last one and its
        reduction: the time per iteration if ranks do not wait for each other between iterations."""
        starts = (row[0] for row in self.execution.start)
        return max(
            end - start for end, start in zip(self._compute_rank_ends(), starts, strict=True)
        )

    def _compute_rank_ends(self) -> list[float]:
        return [
            row[-1] + tail for row, tail in zip(self.execution.end, self.rank_tails, strict=True)
        ]

    def select_objective(self, problem: Problem) -> float:
        """Makespan or period, by the problem's ``objective``."""
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

    STATIC follows each rank's order. GUIDED follows it as far as messages arrive in time;
    ``waits``: see :func:`~pipemorph.planning.simulation.execution.build_guide`. ``delay_at(link,
    sent)`` replaces the links' delays, and ``transfer_at``, which needs ``delay_at``, their
    transfers; ``sent``: time since the start of the iteration. ``before``: earliest start of each
    rank; None: 0. Raises :class:`ScheduleError` if the schedule is invalid or exceeds a cap of the
    problem.
    """
    check_same_shape(schedule, problem)
    validate(schedule, problem.list_in_flight_limits(), problem.list_device_limits())
    guided = dispatch_mode is Dispatch.GUIDED
    check_rank_memory(schedule, problem.microbatch_sizes, problem.rank_memory, as_peaks=guided)
    validate_waits(schedule, waits or ())
    costs = Costs.from_problem(problem, schedule.placement)
    if before is not None:
        costs = costs._replace(rank_starts=list(before))
    run = _make_runner(schedule, problem, dispatch_mode, waits)
    ran = run(costs, delay_at, transfer_at)
    if dispatch_mode is not Dispatch.STATIC:
        schedule = execution.decode_schedule(ran.op_codes, problem.microbatches, schedule.placement)
    return Simulation(schedule, ran, costs.rank_tails)


def predict(
    schedule: Schedule,
    problem: Problem,
    dispatch_mode: Dispatch = Dispatch.STATIC,
    waits: Waits | None = None,
) -> float:
    """Makespan of ``schedule``, in the problem's unit.

    The fast path of the adaptation controller: no checks, so the schedule must be valid.
    """
    costs = Costs.from_problem(problem, schedule.placement)
    if dispatch_mode is Dispatch.STATIC:
        return execution.compute_makespan(costs, schedule.op_codes)
    return execution.compute_guided_makespan(costs, build_guide(schedule, problem, waits))


def compute_next_starts(free: execution.Rows, after: Sequence[float]) -> tuple[float, list[float]]:
    """Earliest start of rank 0 in the next iteration, and of each rank relative to it, if ranks do
    not wait for each other between iterations.

    ``free``: ``free_at`` of the iteration before, see
    :class:`~pipemorph.planning.simulation.execution.Execution`. ``after``: time that each rank
    needs after its last op.
    """
    ends = [row[-1] + tail for row, tail in zip(free, after, strict=True)]
    # Other ranks are idle until rank 0 begins: it has stage 0.
    return ends[0], [max(0.0, end - ends[0]) for end in ends]


def predict_period(
    schedule: Schedule,
    problem: Problem,
    dispatch_mode: Dispatch = Dispatch.STATIC,
    waits: Waits | None = None,
) -> float:
    """Time per iteration of ``schedule``, in the problem's unit, after many iterations between
    which ranks do not wait for each other.

    At most :attr:`Simulation.period`: a rank need not begin as early as it could. Without checks,
    like :func:`predict`.
    """
    costs = Costs.from_problem(problem, schedule.placement)
    run = _make_runner(schedule, problem, dispatch_mode, waits)
    steps: list[float] = []
    while len(steps) < 2 * TRANSIENT_ITERATIONS:
        took, before = compute_next_starts(run(costs, None, None).free_at, costs.rank_tails)
        if before == costs.rank_starts:
            return took
        steps.append(took)
        costs = costs._replace(rank_starts=before)
    return sum(steps[TRANSIENT_ITERATIONS:]) / TRANSIENT_ITERATIONS


def predict_changing(
    schedule: Schedule,
    problem: Problem,
    changes: Sequence[Changes],
    dispatch_mode: Dispatch = Dispatch.STATIC,
    waits: Waits | None = None,
) -> float:
    """Mean time of iterations whose links vary, in the problem's unit.

    ``changes[k]``: delays and transfers of iteration *k*, as functions of ``(link, sent)``;
    ``sent``: time since the start of the iteration. Each iteration's time is its makespan; for the
    objective period, the time until the next one begins, without waits of ranks for each other.
    Without checks, like :func:`predict`.
    """
    costs = Costs.from_problem(problem, schedule.placement)
    run = _make_runner(schedule, problem, dispatch_mode, waits)
    steps: list[float] = []
    for delay_at, transfer_at in changes:
        ran = run(costs, delay_at, transfer_at)
        if problem.objective == "makespan":
            steps.append(ran.compute_makespan(costs.rank_tails))
            continue
        took, before = compute_next_starts(ran.free_at, costs.rank_tails)
        steps.append(took)
        costs = costs._replace(rank_starts=before)
    return sum(steps) / len(steps)


def _make_runner(
    schedule: Schedule, problem: Problem, mode: Dispatch, waits: Waits | None
) -> Runner:
    """Runner of a valid schedule."""
    if mode is Dispatch.STATIC:
        return lambda costs, *at: execution.execute_in_order(costs, schedule.op_codes, *at)
    guide = build_guide(schedule, problem, waits)
    return lambda costs, *at: execution.execute_guided(costs, guide, *at)


def check_same_shape(schedule: Schedule, problem: Problem) -> None:
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
    """Message over link *i*. ``forward``: from stage *i* to *i+1*, else from *i+1* to *i*.

    ``sent``: end of the op that computed it; ``arrived``: time from which the receiver may use it.
    """

    link: int
    forward: bool
    microbatch: int
    sent: float
    arrived: float


class MessageTrace(NamedTuple):
    """Messages of an iteration, and compute blocked by sends. Times in the problem's unit.

    ``blocked_until[rank]``: position of an op → time until which its send blocked the rank's
    compute (by ``Link.outstanding``).
    """

    messages: list[Message]
    blocked_until: list[dict[int, float]]


def trace_messages(simulation: Simulation) -> MessageTrace:
    """Messages between the ranks of a simulation, in the order of their sends."""
    placement, stages_of = simulation.schedule.placement, simulation.schedule.stages_by_rank
    last = len(placement) - 1
    above, below = simulation.execution.forward_arrivals, simulation.execution.gradient_arrivals
    sent: list[tuple[float, Message]] = []
    blocked_by_rank: list[dict[int, float]] = []
    for rank, ops in enumerate(simulation.ranks):
        blocked: dict[int, float] = {}
        blocked_by_rank.append(blocked)
        for position, (op, at) in enumerate(
            zip(ops, simulation.execution.free_at[rank], strict=True)
        ):
            stage = stages_of[rank][op.chunk]
            kind, m, end = op.kind, op.microbatch, op.end
            if at > end:
                blocked[position] = at
            if kind is OpKind.F and stage < last and placement[stage + 1] != rank:
                sent.append((at, Message(stage, True, m, end, above[stage + 1][m])))
            elif kind in (OpKind.B, OpKind.BW) and stage and placement[stage - 1] != rank:
                sent.append((at, Message(stage - 1, False, m, end, below[stage - 1][m])))
    messages = [message for _, message in sorted(sent, key=itemgetter(0))]
    return MessageTrace(messages, blocked_by_rank)
