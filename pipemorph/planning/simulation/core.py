"""The event core (``csrc/planner``): executes schedules.

Everything that executes a schedule is this: the simulator, the list schedules of
the policies, schedules with several stages per rank. An op starts when its rank is free and its
message has arrived: F waits for the F upstream, B for the B downstream (on the last stage, for its
own F). Messages are sent at the end of an op and travel as described by
:class:`~pipemorph.planning.problem.Link`.
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
from pipemorph.planning.validator import ScheduleError

_F, _, _W, _BW = CODE.values()
MAX_STAGES_PER_RANK = 64
"""An op's code is a byte: its kind, plus 4 times the position of its stage on the rank."""

Rows = Sequence[Sequence[float]]
"""Per rank or stage, one time per op or microbatch."""


class Ran(NamedTuple):
    """One executed iteration; times in the problem's unit.

    ``codes[rank]``: the ops in run order, as :data:`CODE` of their kinds (plus 4 times the position
    of the stage among the rank's own). ``start``, ``end`` and ``free``: per rank and op;
    ``free`` is when the rank could go on, later than ``end`` if a send blocked it. ``above[stage]
    [m]``: arrival of the forward of microbatch *m* from the stage above; ``below``: of the
    gradient from the stage below; infinity if it was not sent.
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


def decode(codes: Sequence[bytes | bytearray], microbatches: int) -> Schedule:
    """The schedule of one stage per rank. Its stages share the op objects."""
    ops = [[Op(kind, m) for m in range(microbatches)] for kind in KINDS]
    stages = []
    for kinds in codes:
        if _BW in kinds:
            turns = zip(kinds, microbatches_of(kinds), strict=True)
            stages.append(tuple([ops[kind][m] for kind, m in turns]))
        else:
            left = [iter(each) for each in ops]
            stages.append(tuple([next(left[kind]) for kind in kinds]))
    return Schedule(microbatches, tuple(stages))


def microbatches_of(kinds: bytes | bytearray) -> list[int]:
    """The microbatch of each op of a stage. A BW is the turn of a B and of a W."""
    f = b = w = 0
    found = []
    for kind in kinds:
        if kind == _F:
            found.append(f)
            f += 1
        elif kind == _W:
            found.append(w)
            w += 1
        else:
            found.append(b)
            b += 1
            w += kind == _BW
    return found


def one_stage_each(stages: int) -> list[list[int]]:
    """The stages of each rank: stage *i* on rank *i*."""
    return [[i] for i in range(stages)]


def in_order(
    costs: Costs,
    codes: Sequence[bytes],
    stages_of: Sequence[Sequence[int]] | None = None,
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
) -> Ran:
    """Executes each rank's ops in their order; a rank that waits forever stops early.

    ``stages_of[rank]``: the stages of a rank, by default stage *i* on rank *i*. ``delay_at``
    and ``transfer_at``: delays and transfers that change within the iteration, in place of those of
    ``costs``; transfers need ``delay_at`` too.
    """
    stages_of = stages_of or one_stage_each(costs.stage_count)
    return Ran(*_planner.in_order(costs.packed(), codes, stages_of, delay_at, transfer_at))


def makespan(costs: Costs, codes: Sequence[bytes]) -> float:
    """End of the last op of a static order; infinity if stages wait for each other."""
    return _planner.makespan(costs.packed(), codes, one_stage_each(costs.stage_count))


def online(
    costs: Costs,
    rules: Rules,
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
    stages_of: Sequence[Sequence[int]] | None = None,
) -> Ran:
    """Runs one iteration in which each rank picks its next op by ``rules``.

    A rank picks when it becomes free and when a message arrives. ``stages_of``: as of
    :func:`in_order`. Raises :class:`InputError` on a deadlock.
    """
    stages_of = stages_of or one_stage_each(costs.stage_count)
    ran = Ran(
        *_planner.online(
            costs.packed(),
            rules.caps,
            rules.warmup,
            rules.exact_warmup,
            rules.fused,
            rules.slots or (),
            stages_of,
            delay_at,
            transfer_at,
        )
    )
    for codes, mine in zip(ran.codes, stages_of, strict=True):
        _check_online(codes, mine, costs, rules)
    return ran


def _check_online(codes: bytes, mine: Sequence[int], costs: Costs, rules: Rules) -> None:
    """Raise :class:`InputError` unless a rank has run all ops of its stages ``mine``."""
    for place, stage in enumerate(mine):
        counts = [codes.count(4 * place + code) for code in range(4)]
        if counts[2] + counts[3] < costs.microbatches:
            raise InputError(
                f"stage {stage} waits forever after {counts[0]} F, {counts[1] + counts[3]} B"
                f" and {counts[2] + counts[3]} W: warm-up {list(rules.warmup)}, caps"
                f" {list(rules.caps)}"
            )


def online_order(costs: Costs, rules: Rules) -> tuple[Sequence[bytes], float]:
    """The order that :func:`online` runs, with one stage per rank, and the end of the iteration."""
    stages_of = one_stage_each(costs.stage_count)
    order, makespan = _planner.online_order(
        costs.packed(),
        rules.caps,
        rules.warmup,
        rules.exact_warmup,
        rules.fused,
        rules.slots or (),
        stages_of,
    )
    for codes, mine in zip(order, stages_of, strict=True):
        _check_online(codes, mine, costs, rules)
    return order, makespan


def guided(
    costs: Costs,
    guide: Guide,
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
    stages_of: Sequence[Sequence[int]] | None = None,
) -> Ran:
    """Runs one iteration in which each rank picks the ready op that is first in the plan's order,
    within the limits of :mod:`pipemorph.planning.simulation.guided`.

    ``stages_of``: as of :func:`in_order`. Raises :class:`InputError` on a deadlock, which only an
    invalid order has.
    """
    stages_of = stages_of or one_stage_each(costs.stage_count)
    ran = Ran(
        *_planner.guided(
            costs.packed(),
            guide.codes,
            guide.waits,
            guide.caps,
            guide.slots or (),
            stages_of,
            delay_at,
            transfer_at,
        )
    )
    for i, (codes, order) in enumerate(zip(ran.codes, guide.codes, strict=True)):
        if len(codes) < len(order):
            raise InputError(f"rank {i} waits forever after {len(codes)} of {len(order)} ops")
    return ran


def guided_makespan(costs: Costs, guide: Guide) -> float:
    """The end of the iteration that :func:`guided` runs, with one stage per rank."""
    made = (guide.codes, guide.waits, guide.caps, guide.slots or ())
    found = _planner.guided_makespan(costs.packed(), *made, one_stage_each(costs.stage_count))
    if isfinite(found):
        return found
    return guided(costs, guide).makespan(costs.after)


def jittered(
    costs: Costs,
    guide: Guide,
    most: float,
    draws: int,
    stages_of: Sequence[Sequence[int]] | None = None,
) -> tuple[float, float]:
    """Mean makespans of a valid order and of guided dispatch by it, over ``draws`` iterations in
    which each message between ranks comes up to ``most`` late, at random by the moment of its send.
    ``stages_of``: as of :func:`in_order`."""
    stages_of = stages_of or one_stage_each(costs.stage_count)
    made = (guide.codes, guide.waits, guide.caps, guide.slots or ())
    own, guided_ = _planner.jittered(costs.packed(), *made, stages_of, most, draws)
    return own, guided_


def static(
    schedule: Schedule,
    costs: Costs,
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
) -> Ran:
    """:func:`in_order` for a whole schedule.

    Raises :class:`ScheduleError` that names an op in a deadlock.
    """
    ran = in_order(costs, schedule.codes, None, delay_at, transfer_at)
    for i, ops in enumerate(schedule.stages):
        position = len(ran.start[i])
        if position < len(ops):
            raise ScheduleError(
                i, position, f"{ops[position]} waits forever for a message of its neighbour"
            )
    return ran
