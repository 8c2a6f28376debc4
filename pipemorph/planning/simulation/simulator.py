"""Simulates a schedule with exact event times.

An op starts when its stage is free and its message has arrived: F waits for the F upstream, B for
the B downstream (on the last stage, for its own F). Messages are sent at the end of an op and
travel as described by :class:`~pipemorph.planning.problem.Link`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipemorph.errors import InputError
from pipemorph.planning.ir import Dispatch, Op, OpKind, Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.costs import INF, Costs
from pipemorph.planning.simulation.half_duplex import starts_in_time
from pipemorph.planning.simulation.links import DelayAt, Wires, send
from pipemorph.planning.simulation.online import Rules, dispatch
from pipemorph.planning.validator import ScheduleError, validate


class TimedOp(NamedTuple):
    """One op with its times, in the problem's unit."""

    kind: OpKind
    microbatch: int
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """One simulated iteration. ``stages[i]``: the ops of stage *i* in run order."""

    microbatches: int
    stages: tuple[tuple[TimedOp, ...], ...]

    @property
    def makespan(self) -> float:
        """Time from the start of the iteration to the end of the last op."""
        return max(ops[-1].end for ops in self.stages)

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
    warmup: Sequence[int] | None = None,
) -> Simulation:
    """Execute ``schedule`` under the times, caps and links of ``problem``.

    STATIC keeps each stage's order. ONLINE keeps only the warm-up counts (``warmup``, or those of
    the schedule) and whether a stage's backward is fused, and runs ready ops within the caps, the
    device limits and the slots of the links. Raises :class:`ScheduleError` if the schedule is
    invalid or exceeds a cap of the problem.
    """
    check_fits(schedule, problem)
    costs = Costs.of(problem)
    if dispatch_mode is Dispatch.STATIC:
        validate(schedule, problem.in_flight_limits(), problem.device_limits())
        return timed(schedule, run_static(schedule, costs), costs)
    validate(schedule)
    rules = Rules.of(
        problem,
        warmup if warmup is not None else schedule.warmup(),
        fused=fused_stages(schedule),
        slots=[link.slots for link in problem.links],
    )
    return from_runs(dispatch(costs, rules).runs, costs.microbatches)


def predict(schedule: Schedule, problem: Problem) -> float:
    """Makespan of ``schedule`` run in static order, in the problem's unit.

    The fast path of the adaptation controller: no checks, so the schedule must be valid.
    """
    costs = Costs.of(problem)
    return makespan_of(schedule, run_static(schedule, costs), costs)


def makespan_of(schedule: Schedule, starts: Sequence[Sequence[float]], costs: Costs) -> float:
    """End of the last op, given the start of each."""
    return max(
        begin[-1] + costs.last_duration(i, ops)
        for i, (ops, begin) in enumerate(zip(schedule.stages, starts, strict=True))
    )


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


def fused_stages(schedule: Schedule) -> list[bool]:
    """Which stages run BW. Raises :class:`ScheduleError` if a stage has both forms."""
    fused = []
    for i, ops in enumerate(schedule.stages):
        kinds = {op.kind for op in ops}
        if OpKind.BW in kinds and OpKind.B in kinds:
            raise ScheduleError(
                i, None, "has fused and split backwards; online dispatch needs one form per stage"
            )
        fused.append(OpKind.BW in kinds)
    return fused


def run_static(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """Start time of every op, in the schedule's order.

    Raises :class:`ScheduleError` that names an op in a deadlock.
    """
    starts = starts_in_time(schedule, costs) if any(costs.half_duplex) else _starts(schedule, costs)
    for i, ops in enumerate(schedule.stages):
        position = len(starts[i])
        if position < len(ops):
            raise ScheduleError(
                i, position, f"{ops[position]} waits forever for a message of its neighbour"
            )
    return starts


def _starts(schedule: Schedule, costs: Costs) -> list[list[float]]:
    """:func:`run_static` for links with independent directions.

    A stage advances as long as the arrival of its next message is known, then its neighbours are
    visited. Arrivals depend on the sender alone, so the order of visits does not matter.
    """
    n, stages = costs.microbatches, costs.stage_count
    # arrivals[stage][microbatch]: of the forward from above, of the gradient from below.
    # INF: not sent yet.
    from_above = [[INF] * n for _ in range(stages)]
    from_below = [[INF] * n for _ in range(stages)]
    from_above[0] = [0.0] * n
    starts: list[list[float]] = [[] for _ in range(stages)]
    durations = costs.durations(schedule)
    free = [0.0] * stages
    last = stages - 1
    todo = list(range(stages - 1, -1, -1))
    queued = [True] * stages
    while todo:
        i = todo.pop()
        queued[i] = False
        ops, done = schedule.stages[i], starts[i]
        above, below = from_above[i], from_below[i]
        took, now = durations[i], free[i]
        sent_down = sent_up = False
        for position in range(len(done), len(ops)):
            kind, m = ops[position]
            if kind is OpKind.W:
                done.append(now)
                now += took[position]
                continue
            forward = kind is OpKind.F
            arrival = above[m] if forward else below[m]
            if arrival == INF:
                break
            now = max(now, arrival)
            done.append(now)
            now += took[position]
            if forward:
                if i == last:
                    below[m] = now
                else:
                    now, _ = send(costs, i, from_above[i + 1], m, now)
                    sent_down = True
            elif i:
                now, _ = send(costs, i - 1, from_below[i - 1], m, now)
                sent_up = True
        free[i] = now
        if sent_up and not queued[i - 1]:
            queued[i - 1] = True
            todo.append(i - 1)
        if sent_down and not queued[i + 1]:
            queued[i + 1] = True
            todo.append(i + 1)
    return starts


def timed(schedule: Schedule, starts: Sequence[Sequence[float]], costs: Costs) -> Simulation:
    """A simulation from a schedule and the start of each of its ops."""
    stages = [
        tuple(
            TimedOp(op.kind, op.microbatch, at, at + lasts)
            for op, at, lasts in zip(ops, begin, took, strict=True)
        )
        for ops, begin, took in zip(schedule.stages, starts, costs.durations(schedule), strict=True)
    ]
    return Simulation(costs.microbatches, tuple(stages))


def from_runs(
    runs: Sequence[Sequence[tuple[OpKind, int, float, float]]], microbatches: int
) -> Simulation:
    """A simulation from a result of :func:`~pipemorph.planning.simulation.online.dispatch`."""
    return Simulation(microbatches, tuple(tuple(map(TimedOp._make, run)) for run in runs))


def simulate_changing(
    schedule: Schedule, problem: Problem, delay_at: DelayAt, mode: Dispatch = Dispatch.STATIC
) -> Simulation:
    """:func:`simulate` with ``delay_at(link, sent)`` instead of the links' delays; queues and
    limits are the problem's. ``sent``: time since the start of the iteration."""
    check_fits(schedule, problem)
    costs = Costs.of(problem)
    wires = Wires(costs, delay_at)
    if mode is Dispatch.STATIC:
        validate(schedule, problem.in_flight_limits(), problem.device_limits())
        return timed(schedule, starts_in_time(schedule, costs, wires), costs)
    validate(schedule)
    rules = Rules.of(
        problem,
        schedule.warmup(),
        fused=fused_stages(schedule),
        slots=[link.slots for link in problem.links],
    )
    return from_runs(dispatch(costs, rules, wires).runs, costs.microbatches)
