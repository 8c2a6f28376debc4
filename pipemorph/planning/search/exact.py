"""The exact policy: finds the shortest schedule with CP-SAT, or bounds the distance to it.

Every stage is a machine, every op an interval on it. Since each kind runs in microbatch order, an
in-flight cap is a simple precedence: ``F_{m+K}`` starts no earlier than ``W_m`` ends. The solver
starts from the schedule of the pipemorph policy, and improves it or proves it optimal.

Needs OR-tools: ``pip install 'pipemorph[exact]'``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from pipemorph.errors import InputError
from pipemorph.planning.ir import KINDS, Op, Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.search.search import search
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.lower_bound import SAME, hard_caps, windows
from pipemorph.planning.simulation.simulator import makespan_of
from pipemorph.planning.validator import validate

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

FORWARD, BACKWARD = 0, 1
TIME_LIMIT = 60.0
"""Default time limit of the solver, seconds."""

# Scales (integers per unit of time) to try before times are rounded.
_SCALES = (1, 2, 4, 5, 8, 10, 20, 50, 100, 1000, 10_000)
# Scale of rounded times: the longest op or delay is about this many integers.
_RESOLUTION = 100_000


@dataclass(frozen=True)
class Solved:
    """``bound``: lower bound of the makespan, in the problem's unit. ``proven``: whether
    ``schedule`` is proven optimal (up to rounding, if times are not whole at any tried scale)."""

    schedule: Schedule
    makespan: float
    bound: float
    proven: bool
    seconds: float


def solve(
    problem: Problem, time_limit: float = TIME_LIMIT, *, workers: int | None = None
) -> Solved:
    """The best schedule found within ``time_limit`` seconds of wall time, and its proven bound.

    Unlike with other policies the result depends on the machine if the time limit is reached.
    ``workers``: threads of the solver, by default one per core. Raises :class:`InputError` if
    OR-tools is not installed or ``time_limit`` is not above 0.
    """
    if not time_limit > 0:
        raise InputError(f"the time limit is {time_limit}; policy exact needs a value above 0")
    cp = _solver_module()
    began = perf_counter()
    first = search(problem)
    schedule, bound = first.schedule, first.bound
    costs = Costs.of(problem)
    makespan = makespan_of(schedule, costs)
    left = time_limit - (perf_counter() - began)
    if makespan > bound * (1 + SAME) and left > 0:
        model = _Model(cp, problem, costs, schedule, makespan)
        found, proven_bound = model.solve(left, workers or os.cpu_count() or 1)
        bound = max(bound, proven_bound)
        if found is not None:
            validate(found, problem.in_flight_limits())
            shorter = makespan_of(found, costs)
            if shorter < makespan:
                schedule, makespan = found, shorter
        if bound > makespan * (1 + SAME):
            raise AssertionError(f"the solver's bound, {bound}, is above a makespan, {makespan}")
        proven = makespan <= bound + model.rounding
    else:
        proven = makespan <= bound * (1 + SAME)
        # The same but for rounding.
        bound = makespan if proven else bound
    return Solved(schedule, makespan, min(bound, makespan), proven, perf_counter() - began)


def _solver_module() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise InputError(
            f"policy exact needs OR-tools ({error}); install it with pip install 'pipemorph[exact]'"
        ) from None
    return cp_model


class _Model:
    """One problem as a CP-SAT model, with integer times.

    Times that are not whole at any scale are rounded down, so that the solver's bound stays a lower
    bound; the simulator evaluates schedules with the true times.
    """

    def __init__(
        self, cp: Any, problem: Problem, costs: Costs, hint: Schedule, makespan: float
    ) -> None:
        self.cp = cp
        self.problem = problem
        self.costs = costs
        self.n = problem.microbatches
        self.scale, self.exact = _scale(costs)
        # Rounding may have shortened each op and message of the longest path by up to 1.
        self.rounding = (
            makespan * SAME
            if self.exact
            else 4 * (self.n + problem.stage_count) * problem.stage_count / self.scale
        )
        self.model: cp_model.CpModel = cp.CpModel()
        self.horizon = math.ceil(makespan * self.scale * (1 + SAME))
        caps = hard_caps(problem)
        self.took = [
            [self._int(t) for t in times]
            for times in zip(
                costs.forward, costs.backward_input, costs.backward_weight, strict=True
            )
        ]
        self.delay = [self._int(delay) for delay in costs.delay]
        self.transfer = [self._int(transfer) for transfer in costs.transfer]
        self.start = self._starts()
        self.end: Any = self.model.new_int_var(0, self.horizon, "makespan")
        self._stages(caps)
        self._links()
        self._hint(hint)
        self.model.minimize(self.end)

    def _int(self, time: float) -> int:
        # Round up values that are whole except for rounding errors.
        return math.floor(time * self.scale + 1e-6)

    def _starts(self) -> list[list[list[Any]]]:
        """``start[stage][kind][microbatch]``, between its head and the horizon less its tail."""
        head, tail = windows(self.problem)
        slack = 0 if self.exact else 4 * self.n * self.problem.stage_count
        return [
            [
                [
                    self.model.new_int_var(
                        max(0, self._int(head[kind][i][m]) - slack),
                        self.horizon - max(0, self._int(tail[kind][i][m]) - slack),
                        f"{'FBW'[kind]}{m}@{i}",
                    )
                    for m in range(self.n)
                ]
                for kind in range(3)
            ]
            for i in range(self.problem.stage_count)
        ]

    def _stages(self, caps: Sequence[int]) -> None:
        """One op at a time, each kind in order, F before B before W, caps, fixed warm-up."""
        add, n = self.model.add, self.n
        for i, (forward, backward, weight) in enumerate(self.start):
            tf, tb, tw = self.took[i]
            for kind in range(3):
                for m in range(n - 1):
                    add(self.start[i][kind][m] + self.took[i][kind] <= self.start[i][kind][m + 1])
            for m in range(n):
                add(forward[m] + tf <= backward[m])
                add(backward[m] + tb <= weight[m])
                if m + caps[i] < n:
                    add(weight[m] + tw <= forward[m + caps[i]])
            add(self.end >= weight[n - 1] + tw + self._int(self.costs.after[i]))
            if self.problem.warmup is not None:
                x = self.problem.warmup[i]
                add(forward[x - 1] + tf <= backward[0])
                if x < n:
                    add(backward[0] + tb <= forward[x])

    def _links(self) -> None:
        """Messages between stages; then the machines, which blocked sends occupy longer."""
        stages = self.problem.stage_count
        # How long an op keeps its stage: its time, or until its send returns.
        busy_until: dict[tuple[int, int, int], Any] = {}
        for link in range(stages - 1):
            wires: list[Any] = []
            for sender, receiver, kind in ((link, link + 1, 0), (link + 1, link, 1)):
                arrivals = self._messages(link, sender, kind, busy_until)
                for m, arrival in enumerate(arrivals):
                    self.model.add(self.start[receiver][kind][m] >= arrival)
                    held = self.transfer[link] + self.delay[link]
                    if self.costs.half_duplex[link] and held:
                        wires.append(self._interval(arrival - held, held))
            if wires:
                # Any order of sends is allowed, also first come, first served: the bound holds.
                self.model.add_cumulative(wires, [1] * len(wires), self.costs.queues[link])
        for i in range(stages):
            intervals = []
            for kind in range(3):
                for m in range(self.n):
                    start, took = self.start[i][kind][m], self.took[i][kind]
                    free = busy_until.get((i, kind, m))
                    if free is not None:
                        size = self.model.new_int_var(took, self.horizon, "")
                        intervals.append(self.model.new_interval_var(start, size, free, ""))
                    else:
                        intervals.append(self._interval(start, took))
            self.model.add_no_overlap(intervals)

    def _messages(
        self, link: int, sender: int, kind: int, busy_until: dict[tuple[int, int, int], Any]
    ) -> list[Any]:
        """Arrival of each message of one direction."""
        took, transfer = self.took[sender][kind], self.transfer[link]
        delay = transfer + self.delay[link]
        queues, outstanding = self.costs.queues[link], self.costs.outstanding[link]
        shared = self.costs.half_duplex[link]
        arrivals: list[Any] = []
        for m in range(self.n):
            sent = self.start[sender][kind][m] + took
            if outstanding and m >= outstanding:
                free = self.model.new_int_var(0, self.horizon, "")
                self.model.add(free >= sent)
                self.model.add(free >= arrivals[m - outstanding])
                busy_until[sender, kind, m] = sent = free
            if shared or (queues and m >= queues) or (transfer and m):
                arrival = self.model.new_int_var(0, self.horizon, "")
                self.model.add(arrival >= sent + delay)
                if queues and m >= queues:
                    self.model.add(arrival >= arrivals[m - queues] + delay)
                if transfer and m:
                    self.model.add(arrival >= arrivals[m - 1] + transfer)
                arrivals.append(arrival)
            else:
                arrivals.append(sent + delay)
        return arrivals

    def _interval(self, start: Any, took: int) -> Any:
        return self.model.new_fixed_size_interval_var(start, took, "")

    def _hint(self, schedule: Schedule) -> None:
        starts = core.static(schedule, self.costs).start
        for i, (ops, begin) in enumerate(zip(schedule.stages, starts, strict=True)):
            for op, at in zip(ops, begin, strict=True):
                var = self.start[i][KINDS.index(op.kind)][op.microbatch]
                self.model.add_hint(var, self._int(at))

    def solve(self, seconds: float, workers: int) -> tuple[Schedule | None, float]:
        """The schedule found, if any, and the solver's bound in the problem's unit."""
        solver: cp_model.CpSolver = self.cp.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = workers
        status = solver.solve(self.model)
        if status == self.cp.MODEL_INVALID:
            raise AssertionError(f"the model is invalid: {self.model.validate()}")
        if status == self.cp.INFEASIBLE:
            raise AssertionError("the solver reports infeasible, although a schedule exists")
        bound = solver.best_objective_bound / self.scale
        if status not in (self.cp.OPTIMAL, self.cp.FEASIBLE):
            return None, bound
        return self._schedule(solver), bound

    def _schedule(self, solver: Any) -> Schedule:
        """The ops ordered by their start.

        An op of zero duration may start at the same time as an op that it waits for, also across
        stages. So only ready ops are considered: the earliest first, at a tie one of zero duration.
        """
        stages = self.problem.stage_count
        starts = [[[solver.value(var) for var in row] for row in kinds] for kinds in self.start]
        turn = [[0, 0, 0] for _ in range(stages)]
        rows: list[list[Op]] = [[] for _ in range(stages)]
        caps = hard_caps(self.problem)
        warmup = self.problem.warmup

        def ready(i: int, kind: int) -> bool:
            forwards, backwards, weights = turn[i]
            m = turn[i][kind]
            if m == self.n:
                return False
            if kind == FORWARD:
                held = warmup is not None and m == warmup[i] and backwards == 0
                came = i == 0 or turn[i - 1][FORWARD] > m
                return came and m - weights < caps[i] and not held
            if kind == BACKWARD:
                below = i == stages - 1 or turn[i + 1][BACKWARD] > m
                return below and forwards > m and (warmup is None or forwards >= warmup[i])
            return backwards > m

        for _ in range(3 * self.n * stages):
            _, _, kind, i = min(
                (starts[i][kind][turn[i][kind]], self.took[i][kind] > 0, kind, i)
                for i in range(stages)
                for kind in range(3)
                if ready(i, kind)
            )
            rows[i].append(Op(KINDS[kind], turn[i][kind]))
            turn[i][kind] += 1
        return Schedule(self.n, tuple(map(tuple, rows)))


def _scale(costs: Costs) -> tuple[float, bool]:
    """The scale (integers per unit of time), and whether all times are whole at it."""
    times = [*costs.forward, *costs.backward_input, *costs.backward_weight, *costs.delay]
    times += [*costs.transfer, *costs.after]
    longest = max(times)
    for scale in _SCALES:
        if longest * scale <= 1e7 and all(
            abs(time * scale - round(time * scale)) < 1e-6 for time in times
        ):
            return float(scale), True
    return (_RESOLUTION / longest, False) if longest else (1.0, True)
