"""Running whatever is ready: online dispatch, and the list scheduler that plans with it.

The two are one loop. Online dispatch runs on each stage the first ready op of B, F, W; a
list scheduler imagines the same run ahead of time and keeps the order it finds (paper,
"full schedule", with exact event times in place of a time step). :class:`Rules` says what
a stage may run; a planner tries several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from pipemorph.errors import InputError
from pipemorph.planning.costs import INF, Costs
from pipemorph.planning.ir import OpKind
from pipemorph.planning.links import send
from pipemorph.planning.problem import Problem
from pipemorph.planning.validator import validate_online

Run = list[tuple[OpKind, int, float, float]]


@dataclass(frozen=True)
class Rules:
    """What each stage may run. All sequences have one entry per stage (``slots`` per link).

    - ``warmup[i]``: only F until this many have run.
    - ``caps[i]``: F only while fewer microbatches than this are in flight (F start to W end).
    - ``exact_warmup``: no F beyond ``warmup`` before the first backward.
    - ``fused[i]``: one BW in place of B and W.
    - ``slots[i]``: F on stage *i* only while link *i* holds fewer messages than this that
      stage *i+1* has not begun to use.
    """

    warmup: tuple[int, ...]
    caps: tuple[int, ...]
    exact_warmup: bool = False
    fused: tuple[bool, ...] | None = None
    slots: tuple[int, ...] | None = None

    @staticmethod
    def of(
        problem: Problem,
        warmup: Sequence[int],
        *,
        exact_warmup: bool = False,
        fused: Sequence[bool] | None = None,
        slots: Sequence[int | None] | None = None,
    ) -> Rules:
        """Rules for a problem, its caps included.

        Raises :class:`~pipemorph.planning.validator.ScheduleError` outside the condition
        under which running what is ready cannot deadlock.
        """
        limits = problem.in_flight_limits()
        validate_online(warmup, limits, slots)
        n = problem.microbatches
        return Rules(
            tuple(warmup),
            tuple(n if limit is None else min(n, limit) for limit in limits),
            exact_warmup=exact_warmup,
            fused=tuple(fused) if fused is not None else None,
            slots=tuple(n if held is None else held for held in slots)
            if slots is not None
            else None,
        )


@dataclass(frozen=True)
class Dispatched:
    """What ran: per stage ``(kind, microbatch, start, end)`` in run order."""

    runs: list[Run]
    makespan: float


def dispatch(costs: Costs, rules: Rules) -> Dispatched:
    """Run one iteration. Raises :class:`InputError` if every stage waits for another.

    Events are ``(time, stage)``: a stage decides when it is free. An op's message is
    recorded when the op starts, so at any time a stage sees all that has arrived by then.
    """
    n, stages = costs.microbatches, costs.stage_count
    last = stages - 1
    fused = rules.fused or (False,) * stages
    warmup = [min(n, x) for x in rules.warmup]
    caps, slots = rules.caps, rules.slots
    exact = rules.exact_warmup
    # Arrival of each forward from above and each gradient from below, by microbatch.
    above = [[INF] * n for _ in range(stages)]
    below = [[INF] * n for _ in range(stages)]
    above[0] = [0.0] * n
    forwards, backwards, weights = [0] * stages, [0] * stages, [0] * stages
    runs: list[Run] = [[] for _ in range(stages)]
    # When each stage decides next. An idle stage may be woken earlier than it thought.
    wake = [0.0] * stages
    idle = [False] * stages
    events = [(0.0, i) for i in range(stages)]
    makespan = 0.0
    while events:
        now, i = heappop(events)
        if now != wake[i]:
            continue
        f, b, w = forwards[i], backwards[i], weights[i]
        may_forward = f < n and f - w < caps[i] and not (exact and b == 0 and f >= warmup[i])
        forward_at = above[i][f] if may_forward else INF
        if may_forward and i < last:
            bound_on_sends = costs.outstanding[i]
            if bound_on_sends and f >= bound_on_sends:
                forward_at = max(forward_at, above[i + 1][f - bound_on_sends])
            if slots is not None and f - forwards[i + 1] >= slots[i]:
                forward_at = INF
        backward_at = below[i][b] if f >= warmup[i] and b < n else INF

        if backward_at <= now:
            kind, m = (OpKind.BW if fused[i] else OpKind.B), b
        elif forward_at <= now:
            kind, m = OpKind.F, f
        elif w < b:
            kind, m = OpKind.W, w
        else:
            idle[i] = True
            wake[i] = min(forward_at, backward_at)
            if wake[i] < INF:
                heappush(events, (wake[i], i))
            continue
        idle[i] = False

        took = costs.forward[i] if kind is OpKind.F else costs.backward_weight[i]
        if kind is OpKind.B:
            took = costs.backward_input[i]
        elif kind is OpKind.BW:
            took += costs.backward_input[i]
        end = now + took
        runs[i].append((kind, m, now, end))
        makespan = max(makespan, end)
        free = end
        receiver = -1
        if kind is OpKind.F:
            forwards[i] = f + 1
            if i == last:
                below[i][m] = end
            else:
                receiver = i + 1
                free, arrival = send(costs, i, above[receiver], m, end)
            if slots is not None and i and idle[i - 1]:
                wake[i - 1] = now
                heappush(events, (now, i - 1))
        elif kind is OpKind.W:
            weights[i] = w + 1
        else:
            backwards[i] = b + 1
            if kind is OpKind.BW:
                weights[i] = w + 1
            if i:
                receiver = i - 1
                free, arrival = send(costs, receiver, below[receiver], m, end)
        if receiver >= 0 and idle[receiver] and arrival < wake[receiver]:
            wake[receiver] = arrival
            heappush(events, (arrival, receiver))
        wake[i] = free
        heappush(events, (free, i))
    for i in range(stages):
        if weights[i] < n:
            raise InputError(
                f"stage {i} waits for ever after {forwards[i]} F, {backwards[i]} B and"
                f" {weights[i]} W: warm-up {list(warmup)}, caps {list(caps)}"
            )
    return Dispatched(runs, makespan)
