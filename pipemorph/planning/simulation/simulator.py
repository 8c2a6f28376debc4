"""Simulates a schedule with one stage per rank: exact event times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pipemorph.errors import InputError
from pipemorph.planning.ir import KINDS, Dispatch, Op, OpKind, Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.core import Ran, Rows, microbatches_of
from pipemorph.planning.simulation.costs import Changes, Costs, DelayAt
from pipemorph.planning.simulation.waits import Waits, guide_of
from pipemorph.planning.validator import validate, validate_waits

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


@dataclass(frozen=True)
class Simulation:
    """One simulated iteration. ``stages[i]``: the ops of stage *i* in run order.

    ``free``, ``above`` and ``below``: see :class:`~pipemorph.planning.simulation.core.Ran`, by
    stage.
    """

    microbatches: int
    stages: tuple[tuple[TimedOp, ...], ...]
    free: Rows = field(repr=False, compare=False)
    above: Rows = field(repr=False, compare=False)
    below: Rows = field(repr=False, compare=False)
    after: tuple[float, ...] = field(default=(), repr=False)
    """What follows the last op of each stage; empty if nothing does."""

    @staticmethod
    def of(ran: Ran, costs: Costs) -> Simulation:
        """A simulation from an execution with one stage per rank."""
        stages = []
        for codes, start, end in zip(ran.codes, ran.start, ran.end, strict=True):
            rows = zip(codes, microbatches_of(codes), start, end, strict=True)
            stages.append(tuple([TimedOp(KINDS[code], m, *times) for code, m, *times in rows]))
        after = tuple(costs.after) if any(costs.after) else ()
        return Simulation(costs.microbatches, tuple(stages), ran.free, ran.above, ran.below, after)

    @property
    def makespan(self) -> float:
        """Time from the start of the iteration to the end of the last op, and of what follows on
        its stage."""
        return max(self._ends())

    @property
    def exposed_reduction(self) -> float:
        """By how much the reduction of gradients makes the iteration longer: what the ops of no
        stage hide."""
        return self.makespan - max(ops[-1].end for ops in self.stages)

    @property
    def period(self) -> float:
        """Longest time from the start of a stage's first op to the end of its last one, and of
        what follows it: the time per iteration if nothing makes stages wait for each other between
        iterations."""
        return max(end - ops[0].start for end, ops in zip(self._ends(), self.stages, strict=True))

    def _ends(self) -> list[float]:
        after = self.after or (0.0,) * len(self.stages)
        return [ops[-1].end + tail for ops, tail in zip(self.stages, after, strict=True)]

    def objective(self, problem: Problem) -> float:
        """Makespan or period, as the problem asks for."""
        return self.period if problem.objective == "period" else self.makespan

    @property
    def bubble_fraction(self) -> float:
        """Idle time over ``S × makespan``; 0 if no op takes any time."""
        whole = len(self.stages) * self.makespan
        busy = sum(op.end - op.start for ops in self.stages for op in ops)
        return max(0.0, 1.0 - busy / whole) if whole > 0 else 0.0

    def schedule(self) -> Schedule:
        """The order in which the ops ran."""
        return Schedule(
            self.microbatches,
            tuple(tuple(Op(op.kind, op.microbatch) for op in ops) for ops in self.stages),
        )


def simulate(
    schedule: Schedule,
    problem: Problem,
    dispatch_mode: Dispatch = Dispatch.STATIC,
    *,
    waits: Waits | None = None,
) -> Simulation:
    """Execute ``schedule`` under the times, caps and links of ``problem``.

    STATIC keeps each stage's order. GUIDED keeps the order as far as messages arrive in
    time; ``waits``: see :func:`~pipemorph.planning.simulation.waits.guide_of`. Raises
    :class:`ScheduleError` if the schedule is invalid or exceeds a cap of the problem.
    """
    return _execute(schedule, problem, dispatch_mode, waits)


def simulate_changing(
    schedule: Schedule,
    problem: Problem,
    delay_at: DelayAt,
    mode: Dispatch = Dispatch.STATIC,
    *,
    transfer_at: DelayAt | None = None,
    before: Sequence[float] | None = None,
    waits: Waits | None = None,
) -> Simulation:
    """:func:`simulate` with ``delay_at(link, sent)`` instead of the links' delays, and
    ``transfer_at(link, sent)``, if given, instead of their transfers; queues and limits are the
    problem's. ``sent``: time since the start of the iteration; ``before``: see
    :func:`following`."""
    return _execute(
        schedule,
        problem,
        mode,
        waits,
        delay_at=delay_at,
        transfer_at=transfer_at,
        before=before,
    )


def _execute(
    schedule: Schedule,
    problem: Problem,
    mode: Dispatch,
    waits: Waits | None,
    *,
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
    before: Sequence[float] | None = None,
) -> Simulation:
    check_fits(schedule, problem)
    costs = Costs.of(problem)
    if before is not None:
        costs = costs._replace(before=list(before))
    validate(schedule, problem.in_flight_limits(), problem.device_limits())
    if mode is Dispatch.STATIC:
        ran = core.static(schedule, costs, delay_at, transfer_at)
    else:
        validate_waits(schedule, waits or ())
        guide = guide_of(schedule, problem, waits)
        ran = core.guided(costs, guide, delay_at, transfer_at)
    return Simulation.of(ran, costs)


def predict(
    schedule: Schedule,
    problem: Problem,
    dispatch_mode: Dispatch = Dispatch.STATIC,
    waits: Waits | None = None,
) -> float:
    """Makespan of ``schedule``, in the problem's unit.

    The fast path of the adaptation controller: no checks, so the schedule must be valid.
    """
    costs = Costs.of(problem)
    if dispatch_mode is Dispatch.STATIC:
        return makespan_of(schedule, costs)
    return core.guided_makespan(costs, guide_of(schedule, problem, waits))


def following(free: core.Rows, after: Sequence[float] = ()) -> tuple[float, list[float]]:
    """When rank 0 may begin the next iteration, and when each rank may, counted from then, if
    nothing makes ranks wait for each other between iterations. ``free``: of the iteration before
    it, see :class:`~pipemorph.planning.simulation.core.Ran`. ``after``: what follows the last op of
    each rank; empty if nothing does."""
    ends = [row[-1] + tail for row, tail in zip(free, after or [0.0] * len(free), strict=True)]
    # No rank has anything to do before rank 0 begins: it has stage 0.
    return ends[0], [max(0.0, end - ends[0]) for end in ends]


def predict_period(
    schedule: Schedule,
    problem: Problem,
    dispatch_mode: Dispatch = Dispatch.STATIC,
    waits: Waits | None = None,
) -> float:
    """Time per iteration of ``schedule`` if many of them follow each other and nothing makes stages
    wait for each other in between, in the problem's unit.

    At most :attr:`Simulation.period`: a stage need not begin as early as it could. Without checks,
    like :func:`predict`.
    """
    costs = Costs.of(problem)
    run = _runner(schedule, problem, dispatch_mode, waits)
    return settled_period(lambda each: run(each, None, None), costs, costs.after)


def settled_period(run: Callable[[Costs], Ran], costs: Costs, after: Sequence[float] = ()) -> float:
    """Time per iteration of ``run`` once iterations that follow each other take about the same.
    ``after``: what follows the last op of each rank; empty if nothing does."""
    steps: list[float] = []
    while len(steps) < 2 * SETTLED:
        took, begins = following(run(costs).free, after)
        before = begins + [0.0] * (costs.stage_count - len(begins))
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
    costs = Costs.of(problem)
    run = _runner(schedule, problem, dispatch_mode, waits)
    return mean_of_changes(run, costs, changes, costs.after, problem.objective == "makespan")


def mean_of_changes(
    run: Runner,
    costs: Costs,
    changes: Sequence[Changes],
    after: Sequence[float],
    barrier: bool,
) -> float:
    """Mean time of iterations under each of the ``changes``. ``after``: what follows the last op of
    each rank. ``barrier``: ranks wait for each other between them."""
    steps: list[float] = []
    for delay_at, transfer_at in changes:
        ran = run(costs, delay_at, transfer_at)
        if barrier:
            steps.append(ran.makespan(after))
            continue
        took, begins = following(ran.free, after)
        steps.append(took)
        costs = costs._replace(before=begins + [0.0] * (costs.stage_count - len(begins)))
    return sum(steps) / len(steps)


def _runner(schedule: Schedule, problem: Problem, mode: Dispatch, waits: Waits | None) -> Runner:
    """Executes a valid schedule under the costs, delays and transfers it is given."""
    if mode is Dispatch.STATIC:
        return lambda costs, *at: core.in_order(costs, schedule.codes, None, *at)
    guide = guide_of(schedule, problem, waits)
    return lambda costs, *at: core.guided(costs, guide, *at)


def makespan_of(schedule: Schedule, costs: Costs) -> float:
    """The same for known costs."""
    return core.makespan(costs, schedule.codes)


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
