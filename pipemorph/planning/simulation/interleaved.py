"""Schedules with several stages (chunks) per rank: representation, validation, simulation.

A rank runs the ops of all its stages in one order. Stages are numbered along the model: stage *s*
feeds stage *s+1*, which may be on another rank or the same. A
:class:`~pipemorph.planning.ir.Schedule` is the special case of stage *i* on rank *i*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from pipemorph.errors import InputError
from pipemorph.planning.ir import CODE, KINDS, Dispatch, Op, OpKind, Plan, Policy, Route, Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.core import MAX_STAGES_PER_RANK, Ran
from pipemorph.planning.simulation.costs import Changes, Costs, DelayAt
from pipemorph.planning.simulation.guided import Guide
from pipemorph.planning.simulation.simulator import (
    Runner,
    Simulation,
    TimedOp,
    mean_of_changes,
    settled_period,
)
from pipemorph.planning.simulation.waits import Waits, waits_of
from pipemorph.planning.validator import (
    ScheduleError,
    check_cap,
    check_device,
    check_stage,
    validate_waits,
)


class StageOp(NamedTuple):
    """One op of one of a rank's stages."""

    stage: int
    kind: OpKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch} of stage {self.stage}"


@dataclass(frozen=True)
class InterleavedSchedule:
    """Per-rank op order. ``ranks[r]``: the ops of rank *r*, in order."""

    microbatches: int
    ranks: tuple[tuple[StageOp, ...], ...]

    @staticmethod
    def of(schedule: Schedule) -> InterleavedSchedule:
        """An interleaved schedule with one stage per rank."""
        return InterleavedSchedule(
            schedule.microbatches,
            tuple(
                tuple(StageOp(i, op.kind, op.microbatch) for op in ops)
                for i, ops in enumerate(schedule.stages)
            ),
        )

    @staticmethod
    def of_plan(plan: Plan) -> InterleavedSchedule:
        """The schedule of a plan. Raises :class:`InputError` if a rank's turns are not those of
        the ops of its stages."""
        if not plan.turns:
            return InterleavedSchedule.of(plan.schedule)
        left = [list(reversed(ops)) for ops in plan.schedule.stages]
        ranks = []
        for rank, turns in enumerate(plan.turns):
            ops = []
            for stage in turns:
                if stage >= len(left) or not left[stage]:
                    raise InputError(
                        f"plan {plan.version}: rank {rank} has more turns for stage {stage} than"
                        " the stage has ops"
                    )
                ops.append(StageOp(stage, *left[stage].pop()))
            ranks.append(tuple(ops))
        unplaced = next((s for s, ops in enumerate(left) if ops), None)
        if unplaced is not None:
            raise InputError(
                f"plan {plan.version}: no rank has a turn for {left[unplaced][-1]} of stage"
                f" {unplaced}"
            )
        return InterleavedSchedule(plan.schedule.microbatches, tuple(ranks))

    @property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """The stage of each op of every rank, as in :class:`~pipemorph.planning.ir.Plan`."""
        return tuple(tuple(op.stage for op in ops) for ops in self.ranks)

    def placement(self) -> tuple[int, ...]:
        """The rank of each stage. Raises :class:`InputError` if a stage is on no rank or on two."""
        return self._placement

    @cached_property
    def _placement(self) -> tuple[int, ...]:
        found: dict[int, int] = {}
        for rank, ops in enumerate(self.ranks):
            for op in ops:
                if found.setdefault(op.stage, rank) != rank:
                    raise InputError(
                        f"stage {op.stage} is on rank {found[op.stage]} and on rank {rank};"
                        " expected one rank"
                    )
        for stage in range(len(found)):
            if stage not in found:
                raise InputError(
                    f"there are ops of {len(found)} stages but none of stage {stage};"
                    " expected stages numbered from 0 without gaps"
                )
        return tuple(found[stage] for stage in range(len(found)))

    def per_stage(self) -> Schedule:
        """The order of each stage's ops, without those of other stages on its rank."""
        stages: list[list[Op]] = [[] for _ in self.placement()]
        for ops in self.ranks:
            for stage, kind, microbatch in ops:
                stages[stage].append(Op(kind, microbatch))
        return Schedule(self.microbatches, tuple(map(tuple, stages)))

    def to_plan(
        self,
        version: int = 0,
        routes: Sequence[Route] | None = None,
        *,
        policy: Policy = Policy.PIPEMORPH,
        in_flight_limits: Sequence[int | None] | None = None,
        device_limits: Sequence[int | None] = (),
        recompute: Sequence[bool] = (),
        dispatch: Dispatch = Dispatch.STATIC,
        waits: Waits = (),
    ) -> Plan:
        """A plan that runs this schedule. ``routes``: default: direct. ``device_limits``,
        ``recompute``: by stage; default: no activations leave the device."""
        per_stage = self.per_stage()
        stages = per_stage.stage_count
        several = self.placement() != tuple(range(len(self.ranks)))
        return Plan(
            version=version,
            policy=policy,
            schedule=per_stage,
            routes=tuple(routes) if routes is not None else (Route.DIRECT,) * (stages - 1),
            in_flight_limits=tuple(in_flight_limits or (None,) * stages),
            device_limits=tuple(device_limits or (None,) * stages),
            recompute=tuple(recompute or (False,) * stages),
            turns=self.turns if several else (),
            dispatch=dispatch,
            waits=waits,
        )

    def single(self) -> Schedule | None:
        """The equivalent :class:`Schedule`; None unless stage *i* is on rank *i*."""
        return self.per_stage() if self.placement() == tuple(range(len(self.ranks))) else None


@dataclass(frozen=True)
class InterleavedSimulation:
    """One iteration: ``simulation`` has the ops by stage, ``schedule`` the order of the ranks."""

    schedule: InterleavedSchedule
    simulation: Simulation

    @cached_property
    def placement(self) -> tuple[int, ...]:
        return self.schedule.placement()

    def by_rank(self) -> list[list[tuple[int, TimedOp]]]:
        """``(stage, op)`` in the order of each rank."""
        left = [iter(ops) for ops in self.simulation.stages]
        return [[(op.stage, next(left[op.stage])) for op in ops] for ops in self.schedule.ranks]

    @property
    def makespan(self) -> float:
        return self.simulation.makespan

    @property
    def period(self) -> float:
        """As :attr:`Simulation.period`, of the ranks."""
        after = self.simulation.after or (0.0,) * len(self.placement)
        return max(ops[-1][1].end + after[ops[-1][0]] - ops[0][1].start for ops in self.by_rank())

    def objective(self, problem: Problem) -> float:
        """Makespan or period, as the problem asks for."""
        return self.period if problem.objective == "period" else self.makespan

    @property
    def bubble_fraction(self) -> float:
        """Idle time of the ranks over ``ranks × makespan``."""
        whole = len(self.schedule.ranks) * self.makespan
        busy = sum(op.end - op.start for ops in self.simulation.stages for op in ops)
        return max(0.0, 1.0 - busy / whole) if whole > 0 else 0.0


def validate_interleaved(
    schedule: InterleavedSchedule,
    in_flight_limits: Sequence[int | None] | None = None,
    device_limits: Sequence[int | None] | None = None,
) -> None:
    """Raise :class:`InputError` that names the op that violates a rule.

    Applies the rules of :mod:`pipemorph.planning.validator` to each stage. Detects deadlocks by
    running the ops with buffered sends, since counting forwards is not sufficient for several
    stages per rank. ``in_flight_limits[s]``, ``device_limits[s]``: of stage *s*.
    """
    if schedule.microbatches < 1:
        raise InputError(f"a schedule needs at least 1 microbatch, not {schedule.microbatches}")
    for rank, ops in enumerate(schedule.ranks):
        if not ops:
            raise InputError(f"rank {rank} has no ops; expected at least those of one stage")
        if (count := len({op.stage for op in ops})) > MAX_STAGES_PER_RANK:
            raise InputError(
                f"rank {rank} has {count} stages; at most {MAX_STAGES_PER_RANK} are supported"
            )
    per_stage = schedule.per_stage()
    for stage, ops_of_stage in enumerate(per_stage.stages):
        check_stage(stage, ops_of_stage, schedule.microbatches)
        limit = in_flight_limits[stage] if in_flight_limits is not None else None
        if limit is not None:
            check_cap(stage, ops_of_stage, limit)
        device = device_limits[stage] if device_limits is not None else None
        if device is not None:
            check_device(stage, ops_of_stage, device)
    no_time = [0.0] * per_stage.stage_count
    free = Costs(
        schedule.microbatches,
        forward=no_time,
        backward_input=no_time,
        backward_weight=no_time,
        delay=no_time[1:],
        transfer=no_time[1:],
        queues=[0] * len(no_time[1:]),
        outstanding=[0] * len(no_time[1:]),
        half_duplex=[False] * len(no_time[1:]),
        whole_backward=no_time,
        leaving=no_time,
        returning=no_time,
        device_limits=[None] * per_stage.stage_count,
        after=no_time,
        before=no_time,
    )
    stages_of, codes = encoded(schedule)
    _check_complete(schedule, core.in_order(free, codes, stages_of))


def simulate_interleaved(
    schedule: InterleavedSchedule,
    problem: Problem,
    dispatch: Dispatch = Dispatch.STATIC,
    *,
    waits: Waits | None = None,
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
    before: Sequence[float] | None = None,
) -> InterleavedSimulation:
    """Execute a schedule under the times, limits and delays of ``problem``.

    ``problem.stages`` and ``links`` follow the model; a link within a rank takes no time.
    ``dispatch``, ``waits``: as of :func:`~pipemorph.planning.simulation.simulator.simulate`.
    ``delay_at`` and ``transfer_at``: as of
    :func:`~pipemorph.planning.simulation.simulator.simulate_changing`. ``before``: when each rank
    may begin; None: at 0.
    Raises :class:`InputError` if the schedule is invalid or does not fit the problem.
    """
    placement = schedule.placement()
    if len(placement) != problem.stage_count:
        raise InputError(f"the plan has {len(placement)} stages, the problem {problem.stage_count}")
    if schedule.microbatches != problem.microbatches:
        raise InputError(
            f"the plan has {schedule.microbatches} microbatches, the problem {problem.microbatches}"
        )
    validate_interleaved(schedule, problem.in_flight_limits(), problem.device_limits())
    validate_waits(schedule.per_stage(), waits or ())
    costs = placed_costs(problem, placement)
    if before is not None:
        costs = costs._replace(before=[*before, *[0.0] * (len(placement) - len(before))])
    run = _runner(schedule, problem, dispatch, waits)
    ran = run(costs, delay_at, transfer_at)
    if dispatch is Dispatch.STATIC:
        _check_complete(schedule, ran)
    else:
        schedule = decoded(ran.codes, encoded(schedule)[0], schedule.microbatches)
    simulation = _by_stage(schedule, ran)
    after = [0.0] * problem.stage_count
    for ops, tail in zip(schedule.ranks, _after(schedule, problem), strict=True):
        after[ops[-1].stage] = tail
    if any(after):
        simulation = replace(simulation, after=tuple(after))
    return InterleavedSimulation(schedule, simulation)


def predict_interleaved(
    schedule: InterleavedSchedule,
    problem: Problem,
    dispatch: Dispatch = Dispatch.STATIC,
    waits: Waits | None = None,
    changes: Sequence[Changes] = (),
) -> float:
    """Time of an iteration as the problem's objective counts it: its makespan, or what each takes
    if many follow each other and nothing makes ranks wait for each other in between
    (:func:`~pipemorph.planning.simulation.simulator.predict_period`). With ``changes``, the mean
    of iterations with these delays and transfers
    (:func:`~pipemorph.planning.simulation.simulator.predict_changing`). Without checks, so the
    schedule must be valid.
    """
    costs, after = placed_costs(problem, schedule.placement()), _after(schedule, problem)
    run = _runner(schedule, problem, dispatch, waits)
    if changes:
        return mean_of_changes(run, costs, changes, after, problem.objective == "makespan")
    if problem.objective == "period":
        return settled_period(lambda each: run(each, None, None), costs, after)
    return run(costs, None, None).makespan(after)


def interleaved_waits(schedule: InterleavedSchedule, problem: Problem) -> Waits:
    """As :func:`~pipemorph.planning.simulation.waits.planned_waits`, where ranks wait: by stage."""
    stages_of, codes = encoded(schedule)
    costs = placed_costs(problem, schedule.placement())
    found: list[list[int]] = [[] for _ in range(problem.stage_count)]
    places = _in_stages(schedule)
    peaks = schedule.per_stage().in_flight_peak()
    for rank, positions in enumerate(waits_of(costs, codes, stages_of, peaks)):
        for position in positions:
            stage, its = places[rank][position]
            found[stage].append(its)
    return tuple(map(tuple, found))


def _in_stages(schedule: InterleavedSchedule) -> list[list[tuple[int, int]]]:
    """Per rank and op: its stage, and its position among the ops of that stage."""
    seen = [0] * len(schedule.placement())
    found = []
    for ops in schedule.ranks:
        row = []
        for op in ops:
            row.append((op.stage, seen[op.stage]))
            seen[op.stage] += 1
        found.append(row)
    return found


def _runner(
    schedule: InterleavedSchedule, problem: Problem, dispatch: Dispatch, waits: Waits | None
) -> Runner:
    """Executes a valid schedule. Of delays and transfers, those between ranks count."""
    stages_of, codes = encoded(schedule)
    placement = schedule.placement()

    def at(times: DelayAt | None) -> DelayAt | None:
        return _between_ranks(times, placement)

    if dispatch is Dispatch.STATIC:
        return lambda costs, delay_at, transfer_at: core.in_order(
            costs, codes, stages_of, at(delay_at), at(transfer_at)
        )
    guide = interleaved_guide(schedule, problem, waits)
    return lambda costs, delay_at, transfer_at: core.guided(
        costs, guide, at(delay_at), at(transfer_at), stages_of
    )


def interleaved_guide(
    schedule: InterleavedSchedule, problem: Problem, waits: Waits | None = None
) -> Guide:
    """As :func:`~pipemorph.planning.simulation.waits.guide_of`."""
    if waits is None:
        waits = interleaved_waits(schedule, problem)
    held, n = list(map(frozenset, waits)), schedule.microbatches
    slots = _slots(schedule, problem)
    return Guide(
        codes=tuple(encoded(schedule)[1]),
        waits=tuple(
            tuple(at for at, (stage, its) in enumerate(row) if held and its in held[stage])
            for row in _in_stages(schedule)
        ),
        caps=schedule.per_stage().in_flight_peak(),
        slots=tuple(n if each is None else each for each in slots) if any(slots) else None,
    )


def _slots(schedule: InterleavedSchedule, problem: Problem) -> list[int | None]:
    """Per link. A message within a rank needs no slot."""
    placement = schedule.placement()
    return [
        None if placement[i] == placement[i + 1] else link.slots
        for i, link in enumerate(problem.links)
    ]


def _after(schedule: InterleavedSchedule, problem: Problem) -> list[float]:
    """What follows the last op of each rank: it reduces the gradients of all its stages after the
    last op of all of them."""
    return [
        max(problem.stages[s].reduction or 0.0 for s in {op.stage for op in ops})
        for ops in schedule.ranks
    ]


def placed_costs(problem: Problem, placement: Sequence[int]) -> Costs:
    """The costs of a problem whose stage *s* is on rank ``placement[s]``: a link within a rank
    takes no time."""
    costs = Costs.of(problem)
    within = [placement[i] == placement[i + 1] for i in range(len(costs.delay))]

    def across(values: Sequence[float]) -> list[Any]:
        return [type(v)(0) if here else v for v, here in zip(values, within, strict=True)]

    return costs._replace(
        delay=across(costs.delay),
        transfer=across(costs.transfer),
        queues=across(costs.queues),
        outstanding=across(costs.outstanding),
        half_duplex=across(costs.half_duplex),
        # Which stage's op is the last on a rank is not known to the core.
        after=[0.0] * costs.stage_count,
    )


def _between_ranks(times: DelayAt | None, placement: Sequence[int]) -> DelayAt | None:
    if times is None:
        return None
    return lambda link, sent: 0.0 if placement[link] == placement[link + 1] else times(link, sent)


def encoded(schedule: InterleavedSchedule) -> tuple[list[list[int]], list[bytes]]:
    """The stages of each rank, and its ops as the core takes them."""
    stages_of = [sorted({op.stage for op in ops}) for ops in schedule.ranks]
    codes = [
        bytes([4 * mine.index(op.stage) + CODE[op.kind] for op in ops])
        for ops, mine in zip(schedule.ranks, stages_of, strict=True)
    ]
    return stages_of, codes


def decoded(
    codes: Sequence[bytes], stages_of: Sequence[Sequence[int]], microbatches: int
) -> InterleavedSchedule:
    """The schedule of codes as the core has them. A BW is the turn of a B and of a W."""
    ranks = []
    for row, mine in zip(codes, stages_of, strict=True):
        done = {(stage, kind): 0 for stage in mine for kind in (OpKind.F, OpKind.B, OpKind.W)}
        ops = []
        for code in row:
            stage, kind = mine[code // 4], KINDS[code % 4]
            counted = (OpKind.B, OpKind.W) if kind is OpKind.BW else (kind,)
            ops.append(StageOp(stage, kind, done[stage, counted[0]]))
            for each in counted:
                done[stage, each] += 1
        ranks.append(tuple(ops))
    return InterleavedSchedule(microbatches, tuple(ranks))


def _check_complete(schedule: InterleavedSchedule, ran: Ran) -> None:
    """Raise :class:`ScheduleError` that names an op in a deadlock, if there is one."""
    for rank, ops in enumerate(schedule.ranks):
        position = len(ran.start[rank])
        if position < len(ops):
            op = ops[position]
            source = op.stage - 1 if op.kind is OpKind.F else op.stage + 1
            raise ScheduleError(
                rank,
                position,
                f"{op} waits forever for microbatch {op.microbatch} of stage {source}",
                place="rank",
            )


def _by_stage(schedule: InterleavedSchedule, ran: Ran) -> Simulation:
    """The execution, by stage. ``schedule``: what ran."""
    stages: list[list[TimedOp]] = [[] for _ in schedule.placement()]
    free: list[list[float]] = [[] for _ in stages]
    for rank, ops in enumerate(schedule.ranks):
        for op, *times in zip(ops, ran.start[rank], ran.end[rank], ran.free[rank], strict=True):
            stages[op.stage].append(TimedOp(op.kind, op.microbatch, *times[:2]))
            free[op.stage].append(times[2])
    return Simulation(schedule.microbatches, tuple(map(tuple, stages)), free, ran.above, ran.below)
