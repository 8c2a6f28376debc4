"""Executions written another way than the simulator's, slowly and plainly."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import product

from pipemorph.planning import Op, OpKind, Problem, Schedule, simulate, validate
from pipemorph.planning.simulation import execution
from pipemorph.planning.simulation.execution import Costs
from pipemorph.planning.simulation.simulator import TimedOp
from pipemorph.planning.validator import ScheduleError

Key = tuple[int, OpKind, int]


def runs_to_the_end(schedule: Schedule) -> bool:
    """Exhaustive execution: let any stage whose next op is ready run it, until none can."""
    position = [0] * schedule.stage_count
    done: set[tuple[int, str, int]] = set()
    last = schedule.stage_count - 1
    moved = True
    while moved:
        moved = False
        for i, ops in enumerate(schedule.stages):
            if position[i] == len(ops):
                continue
            kind, m, _ = ops[position[i]]
            if kind is OpKind.F:
                ready = i == 0 or (i - 1, "F", m) in done
            elif kind is OpKind.W:
                ready = True
            else:
                ready = (i, "F", m) in done if i == last else (i + 1, "B", m) in done
            if ready:
                done.add((i, "B" if kind is OpKind.BW else kind.value, m))
                position[i] += 1
                moved = True
    return all(position[i] == len(ops) for i, ops in enumerate(schedule.stages))


def derive_copies(ops: Sequence[Op], limit: int | None) -> list[bool]:
    """True for each op that copies, from the place of every microbatch: none, device or host."""
    place: dict[int, str] = {}
    copies = []
    for kind, m, _ in ops:
        copied = False
        if kind is OpKind.F:
            place[m] = "device"
            resident = sum(where == "device" for where in place.values())
            if limit is not None and resident >= limit:
                place[m], copied = "host", True
        elif kind is not OpKind.W:
            copied = place[m] == "host"
            place[m] = "device"
        if kind is OpKind.W or kind is OpKind.BW:
            del place[m]
        copies.append(copied)
    return copies


def most_resident(ran: Sequence[TimedOp], limit: int | None) -> int:
    """Peak number of microbatches on the device in a stage's run, from its start and end times:
    from the start of F to its end if it goes, else to the end of W; and from the start of its B to
    that end if it went."""
    copies = derive_copies([Op(op.kind, op.microbatch) for op in ran], limit)
    changes: list[tuple[float, int, int]] = []
    away: set[int] = set()
    for position, (op, copied) in enumerate(zip(ran, copies, strict=True)):
        kind, m = op.kind, op.microbatch
        # Ops of no time still follow each other.
        start, end = (position, 1), (position, 2)
        if kind is OpKind.F:
            changes.append((*start, 1))
            if copied:
                away.add(m)
                changes.append((*end, -1))
        elif kind is not OpKind.W and m in away:
            assert copied
            changes.append((*start, 1))
        if kind is OpKind.W or kind is OpKind.BW:
            changes.append((*end, -1))
    now = peak = 0
    for _, _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    assert now == 0
    return peak


def optimum(problem: Problem) -> float:
    """The shortest makespan of a split schedule under pure latency, by branch and bound.

    Appends one op to some stage at a time, as early as it can start, which reaches every
    order. Only for two or three stages and microbatches.
    """
    n, count = problem.microbatches, problem.stage_count
    caps = [n if k is None else min(n, k) for k in problem.list_in_flight_limits()]
    delays = [link.delay for link in problem.links]
    costs = problem.stage_costs or ((1.0,) * n,) * count
    best = float("inf")
    seen: dict[tuple[tuple[int, int, int], ...], list[list[float]]] = {}

    def extend(
        done: tuple[tuple[int, int, int], ...],
        free: tuple[float, ...],
        ends: dict[tuple[int, str, int], float],
    ) -> None:
        """``done[i]`` are the F, B and W run on stage i; ``free[i]`` is when it ended."""
        nonlocal best
        remaining = [
            sum(row[f:]) * times.forward
            + sum(row[b:]) * times.backward_input
            + sum(row[w:]) * times.backward_weight
            for (f, b, w), times, row in zip(done, problem.stages, costs, strict=True)
        ]
        if max(map(sum, zip(free, remaining, strict=True))) >= best:
            return
        if all(w == n for _, _, w in done):
            best = max(free)
            return
        # Pending ops. A state no better than one seen with the same ops is of no use.
        state = [*free]
        for i, (f, b, _) in enumerate(done):
            received = done[i + 1][0] if i < count - 1 else b
            state += [ends[i, "F", m] for m in range(received, f)]
            state += [ends[i, "B", m] for m in range(done[i - 1][1] if i else b, b)]
        earlier = seen.setdefault(done, [])
        if any(all(a <= z for a, z in zip(old, state, strict=True)) for old in earlier):
            return
        earlier.append(state)
        for i, (f, b, w) in enumerate(done):
            times = problem.stages[i]
            choices = []
            if f < n and f - w < caps[i] and (i == 0 or (i - 1, "F", f) in ends):
                ready = ends[i - 1, "F", f] + delays[i - 1] if i else 0.0
                choices.append(("F", f, ready, times.forward, (f + 1, b, w)))
            if b < f and i == count - 1:
                ready = ends[i, "F", b]
                choices.append(("B", b, ready, times.backward_input, (f, b + 1, w)))
            elif b < f and (i + 1, "B", b) in ends:
                ready = ends[i + 1, "B", b] + delays[i]
                choices.append(("B", b, ready, times.backward_input, (f, b + 1, w)))
            if w < b:
                choices.append(("W", w, 0.0, times.backward_weight, (f, b, w + 1)))
            for kind, m, ready, took, after in choices:
                end = max(ready, free[i]) + took * costs[i][m]
                extend(
                    (*done[:i], after, *done[i + 1 :]),
                    (*free[:i], end, *free[i + 1 :]),
                    {**ends, (i, kind, m): end},
                )

    extend(((0, 0, 0),) * count, (0.0,) * count, {})
    return best


@cache
def orders(microbatches: int, fused: bool) -> list[tuple[Op, ...]]:
    """Yields all orders of the ops of a stage, with a split backward or a fused one."""
    kinds = (OpKind.F, OpKind.BW) if fused else (OpKind.F, OpKind.B, OpKind.W)
    found: list[tuple[Op, ...]] = []

    def extend(done: tuple[int, ...], ops: tuple[Op, ...]) -> None:
        if min(done) == microbatches:
            found.append(ops)
        for k, count in enumerate(done):
            if count < (done[k - 1] if k else microbatches):
                extend((*done[:k], count + 1, *done[k + 1 :]), (*ops, Op(kinds[k], count)))

    extend((0,) * len(kinds), ())
    return found


def shortest_of_all_orders(problem: Problem) -> float:
    """The least objective of all orders of all stages. Only for two stages and three
    microbatches."""
    choices = [
        orders(problem.microbatches, fused=False)
        + (orders(problem.microbatches, fused=True) if stage.fused_backward is not None else [])
        for stage in problem.stages
    ]
    limits, shortest = problem.list_in_flight_limits(), float("inf")
    for each in product(*choices):
        # Some orders exceed a limit, or wait for each other for ever.
        with suppress(ScheduleError):
            schedule = Schedule(problem.microbatches, each)
            validate(schedule, limits)
            if problem.objective == "period":
                shortest = min(shortest, simulate(schedule, problem).period)
            else:
                shortest = min(
                    shortest,
                    execution.compute_makespan(Costs.from_problem(problem), schedule.op_codes),
                )
    return shortest
