"""The event core (``csrc/planner``): executes schedules.

Everything that executes a schedule is this: the simulator, the list schedules of the policies, with
one or several stages per rank. An op starts when its rank is free and its message has arrived: F
waits for the F upstream, B for the B downstream (on the last stage, for its own F). Messages are
sent at the end of an op and travel as described by :class:`~pipemorph.planning.problem.Link`; those
within a rank take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

from pipemorph.errors import InputError
from pipemorph.planning import _planner
from pipemorph.planning.ir import CODE, KINDS, Op, Schedule
from pipemorph.planning.simulation.costs import Costs, DelayAt
from pipemorph.planning.simulation.guided import Guide
from pipemorph.planning.simulation.online import Rules

_F, _, _W, _BW = CODE.values()

Rows = Sequence[Sequence[float]]
"""Per rank or stage, one time per op or microbatch."""


class Ran(NamedTuple):
    """One executed iteration; times in the problem's unit.

    ``codes[rank]``: the ops in run order, as :data:`CODE` of their kinds plus 4 times the chunk.
    ``start``, ``end`` and ``free``: per rank and op; ``free`` is when the rank could go on, later
    than ``end`` if a send blocked it. ``above[stage][m]``: arrival of the forward of microbatch *m*
    from the stage above; ``below``: of the gradient from the stage below; infinity if it was not
    sent.
    """

    codes: Sequence[bytes]
    start: Rows
    end: Rows
    free: Rows
    above: Rows
    below: Rows

    def makespan(self, after: Sequence[float]) -> float:
        """The end of the iteration. ``after``: what follows the last op of each rank."""
        return max(ends[-1] + tail for ends, tail in zip(self.end, after, strict=True))


def decode(
    codes: Sequence[bytes | bytearray], microbatches: int, placement: Sequence[int] = ()
) -> Schedule:
    """The schedule of codes. Its ranks share the op objects."""
    chunks = 1 + max((code for kinds in codes for code in set(kinds)), default=0) // 4
    ops = [
        [Op(kind, m, chunk) for m in range(microbatches)]
        for chunk in range(chunks)
        for kind in KINDS
    ]
    ranks = []
    for kinds in codes:
        if chunks > 1 or _BW in kinds:
            turns = zip(kinds, microbatches_of(kinds), strict=True)
            ranks.append(tuple([ops[code][m] for code, m in turns]))
        else:
            left = [iter(each) for each in ops]
            ranks.append(tuple([next(left[kind]) for kind in kinds]))
    return Schedule(microbatches, tuple(ranks), tuple(placement))


def microbatches_of(codes: bytes | bytearray) -> list[int]:
    """The microbatch of each op of a rank. A BW is the turn of a B and of a W of its chunk."""
    found = []
    done = [[0, 0, 0] for _ in range(1 + max(codes, default=0) // 4)]
    """Per chunk: F, B and W."""
    for code in codes:
        turns, kind = done[code >> 2], code & 3
        if kind == _BW:
            found.append(turns[1])
            turns[1] += 1
            turns[2] += 1
        else:
            found.append(turns[kind])
            turns[kind] += 1
    return found


def in_order(
    costs: Costs,
    codes: Sequence[bytes],
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
) -> Ran:
    """Executes each rank's ops in their order; a rank that waits forever stops early.

    ``delay_at`` and ``transfer_at``: delays and transfers that change within the iteration, in
    place of those of ``costs``; transfers need ``delay_at`` too.
    """
    return Ran(*_planner.in_order(costs.packed(), codes, delay_at, transfer_at))


def makespan(costs: Costs, codes: Sequence[bytes]) -> float:
    """End of a static order; infinity if ranks wait for each other."""
    return _planner.makespan(costs.packed(), codes)


def online(costs: Costs, rules: Rules) -> tuple[Sequence[bytes], float]:
    """The order of one iteration in which each rank picks its next op by ``rules``, and its end.

    A rank picks when it becomes free and when a message arrives. Raises :class:`InputError` on a
    deadlock.
    """
    order, end = _planner.online(
        costs.packed(), rules.caps, rules.warmup, rules.exact_warmup, rules.fused
    )
    for codes, mine in zip(order, costs.stages_of, strict=True):
        for chunk, stage in enumerate(mine):
            f, b, w, whole = (codes.count(4 * chunk + code) for code in range(4))
            if w + whole < costs.microbatches:
                raise InputError(
                    f"stage {stage} waits forever after {f} F, {b + whole} B and {w + whole} W:"
                    f" warm-up {list(rules.warmup)}, caps {list(rules.caps)}"
                )
    return order, end


def guided(
    costs: Costs,
    guide: Guide,
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
) -> Ran:
    """Runs one iteration in which each rank picks the ready op that is first in the plan's order,
    within the limits of :mod:`pipemorph.planning.simulation.guided`. Raises :class:`InputError` on
    a deadlock, which only an invalid order has."""
    ran = Ran(
        *_planner.guided(
            costs.packed(), guide.codes, guide.waits, guide.caps, delay_at, transfer_at
        )
    )
    for i, (codes, order) in enumerate(zip(ran.codes, guide.codes, strict=True)):
        if len(codes) < len(order):
            raise InputError(f"rank {i} waits forever after {len(codes)} of {len(order)} ops")
    return ran


def guided_makespan(costs: Costs, guide: Guide) -> float:
    """The end of the iteration that :func:`guided` runs."""
    found = _planner.guided_makespan(costs.packed(), guide.codes, guide.waits, guide.caps)
    return found if isfinite(found) else guided(costs, guide).makespan(costs.after)


def jittered(costs: Costs, guide: Guide, most: float, draws: int) -> tuple[float, float]:
    """Mean makespans of a valid order and of guided dispatch by it, over ``draws`` iterations in
    which each message between ranks comes up to ``most`` late, at random by the moment of its
    send."""
    made = (guide.codes, guide.waits, guide.caps)
    own, guided_ = _planner.jittered(costs.packed(), *made, most, draws)
    return own, guided_
