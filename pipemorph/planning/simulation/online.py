"""Simulates online dispatch: each stage runs its next ready op.

On each stage the first ready op of B, F, W runs. The paper's list scheduler ("full schedule") is
the same loop, run before the iteration, with its order as result; here with exact event times
instead of time steps. :class:`Rules` restricts what a stage may run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from pipemorph.errors import InputError
from pipemorph.planning.ir import OpKind
from pipemorph.planning.offload import Residency
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.costs import INF, Costs
from pipemorph.planning.simulation.links import Wires
from pipemorph.planning.validator import validate_online

Run = list[tuple[OpKind, int, float, float]]


@dataclass(frozen=True)
class Rules:
    """Restrictions on what each stage may run. One entry per stage (``slots``: per link).

    - ``warmup[i]``: only F until this many have run.
    - ``caps[i]``: F only while fewer microbatches than this are in flight (F start to W end).
    - ``exact_warmup``: no F beyond ``warmup`` before the first backward.
    - ``fused[i]``: one BW in place of B and W.
    - ``slots[i]``: F on stage *i* only while fewer of its messages than this are unused by stage
      *i+1*.
    - ``device_limits[i]``: F, B and BW only if the microbatch's activations fit on the device
      (:class:`~pipemorph.planning.offload.Residency`).
    """

    warmup: tuple[int, ...]
    caps: tuple[int, ...]
    exact_warmup: bool = False
    fused: tuple[bool, ...] | None = None
    slots: tuple[int, ...] | None = None
    device_limits: tuple[int | None, ...] | None = None

    @staticmethod
    def of(
        problem: Problem,
        warmup: Sequence[int],
        *,
        exact_warmup: bool = False,
        fused: Sequence[bool] | None = None,
        slots: Sequence[int | None] | None = None,
    ) -> Rules:
        """Rules for a problem, with its caps and device limits.

        Raises :class:`~pipemorph.planning.validator.ScheduleError` if online dispatch could
        deadlock.
        """
        limits = problem.in_flight_limits()
        devices = problem.device_limits()
        validate_online(warmup, limits, slots, devices)
        n = problem.microbatches
        return Rules(
            tuple(warmup),
            tuple(n if limit is None else min(n, limit) for limit in limits),
            exact_warmup=exact_warmup,
            fused=tuple(fused) if fused is not None else None,
            slots=tuple(n if held is None else held for held in slots)
            if slots is not None and any(held is not None for held in slots)
            else None,
            device_limits=devices if any(limit is not None for limit in devices) else None,
        )


@dataclass(frozen=True)
class Dispatched:
    """The executed ops: per stage ``(kind, microbatch, start, end)`` in run order."""

    runs: list[Run]
    makespan: float


_FINISH, _DECIDE = 0, 1
"""At equal times ends are processed first: another stage may wait for their message."""


def dispatch(costs: Costs, rules: Rules, wires: Wires | None = None) -> Dispatched:
    """Run one iteration. Raises :class:`InputError` on a deadlock.

    Events are ``(time, phase, stage)``. A stage chooses an op when it becomes free and when a
    message arrives: of the ready ops, B before F before W.
    """
    n, stages = costs.microbatches, costs.stage_count
    last = stages - 1
    fused = rules.fused or (False,) * stages
    warmup = [min(n, x) for x in rules.warmup]
    caps, slots, exact = rules.caps, rules.slots, rules.exact_warmup
    wires = Wires(costs) if wires is None else wires
    above, below = wires.above, wires.below
    forwards, backwards, weights = [0] * stages, [0] * stages, [0] * stages
    runs: list[Run] = [[] for _ in range(stages)]
    running = [False] * stages
    residency = None
    if rules.device_limits is not None:
        residency = [Residency(limit) for limit in rules.device_limits]
    events = [(0.0, _DECIDE, i) for i in range(stages)]
    while events:
        now, phase, i = heappop(events)
        if phase == _FINISH:
            kind, m, _, _ = runs[i][-1]
            if kind is OpKind.F and i == last:
                below[i][m] = now
            elif kind is OpKind.F:
                heappush(events, (wires.send_forward(i, m, now), _DECIDE, i + 1))
            elif kind is not OpKind.W and i:
                # Only an F waits for a free send before it starts; a gradient's send blocks here.
                if (clear := wires.backward_clear(i, m)) > now:
                    heappush(events, (clear, _FINISH, i))
                    continue
                heappush(events, (wires.send_backward(i, m, now), _DECIDE, i - 1))
            running[i] = False
            heappush(events, (now, _DECIDE, i))
            continue
        if running[i]:
            continue
        f, b, w = forwards[i], backwards[i], weights[i]
        backward_at = below[i][b] if b < f and f >= warmup[i] else INF
        backward = OpKind.BW if fused[i] else OpKind.B
        if residency is not None and backward_at <= now and not residency[i].fits(backward, b):
            backward_at = INF
        forward_at = INF
        room = residency is None or residency[i].fits(OpKind.F, f)
        if f < n and room and f - w < caps[i] and not (exact and b == 0 and f >= warmup[i]):
            forward_at = above[i][f]
            if i < last and forward_at < INF:
                if slots is not None and f - forwards[i + 1] >= slots[i]:
                    forward_at = INF
                elif (clear := wires.forward_clear(i, f)) > max(now, forward_at):
                    forward_at = clear
                    heappush(events, (clear, _DECIDE, i))

        if backward_at <= now:
            kind, m = backward, b
            backwards[i] += 1
        elif forward_at <= now:
            kind, m = OpKind.F, f
            forwards[i] += 1
            if slots is not None and i:
                heappush(events, (now, _DECIDE, i - 1))
        elif w < b:
            kind, m = OpKind.W, w
        else:
            continue
        if kind is OpKind.W or kind is OpKind.BW:
            weights[i] += 1
        took = costs.op_time(i, kind)
        if residency is not None and residency[i].run(kind, m):
            took += costs.offload_copy[i]
        runs[i].append((kind, m, now, now + took))
        running[i] = True
        heappush(events, (now + took, _FINISH, i))
    for i in range(stages):
        if weights[i] < n:
            raise InputError(
                f"stage {i} waits forever after {forwards[i]} F, {backwards[i]} B and"
                f" {weights[i]} W: warm-up {list(warmup)}, caps {list(caps)}"
            )
    return Dispatched(runs, max(run[-1][3] for run in runs))
