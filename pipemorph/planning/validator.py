"""Validates schedules, op by op. The rules:

1. Each stage runs each microbatch's F once, and its B and W once or its BW once.
2. F before B before W, and each kind in microbatch order. Every ``.grad`` then sums
   W_0 … W_{N-1} in one order, which keeps results bitwise equal across schedules.
3. No deadlock: with ``a_i(k)`` the forwards before the k-th backward on stage *i*,
   ``a_i(k) ≥ a_{i+1}(k)``. This is necessary and sufficient when sends are buffered.
4. The in-flight caps are kept.
5. The device limits are kept on stages that offload activations.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.errors import InputError
from pipemorph.planning import _planner
from pipemorph.planning.ir import Op, OpKind, Schedule
from pipemorph.planning.offload import Residency


class ScheduleError(InputError):
    """An invalid schedule. ``stage`` and ``position`` locate the offending op."""

    def __init__(
        self, stage: int, position: int | None, message: str, *, place: str = "stage"
    ) -> None:
        where = f"{place} {stage}" if position is None else f"{place} {stage}, position {position}"
        super().__init__(f"{where}: {message}")
        self.stage = stage
        self.position = position


def validate(
    schedule: Schedule,
    in_flight_limits: Sequence[int | None] | None = None,
    device_limits: Sequence[int | None] = (),
) -> None:
    """Raise :class:`ScheduleError` at the first op that violates a rule.

    ``in_flight_limits[i]``: ``K_i``, None for no cap. ``device_limits[i]``: ``D_i``, None for a
    stage without offload; empty if no stage offloads.
    """
    if schedule.microbatches < 1:
        raise InputError(f"a schedule needs at least 1 microbatch, not {schedule.microbatches}")
    if not schedule.stages:
        raise InputError("a schedule needs at least one stage")
    if in_flight_limits is not None and len(in_flight_limits) != schedule.stage_count:
        raise InputError(
            f"{len(in_flight_limits)} in-flight limits for {schedule.stage_count} stages"
        )
    if len(device_limits) not in (0, schedule.stage_count):
        raise InputError(f"{len(device_limits)} device limits for {schedule.stage_count} stages")
    if _is_valid(schedule, in_flight_limits, device_limits):
        return
    forwards_before = [
        check_stage(i, ops, schedule.microbatches) for i, ops in enumerate(schedule.stages)
    ]
    _check_deadlock(schedule, forwards_before)
    if in_flight_limits is not None:
        for i, limit in enumerate(in_flight_limits):
            if limit is not None:
                check_cap(i, schedule.stages[i], limit)
    for i, limit in enumerate(device_limits):
        if limit is not None:
            check_device(i, schedule.stages[i], limit)


def _is_valid(
    schedule: Schedule,
    in_flight_limits: Sequence[int | None] | None,
    device_limits: Sequence[int | None],
) -> bool:
    """Whether a schedule is known to be valid: the walk that finds the op which is not takes a
    hundred times as long."""
    caps = in_flight_limits or (None,) * schedule.stage_count
    devices = device_limits or (None,) * schedule.stage_count
    if any(limit is not None and limit < 1 for limit in (*caps, *devices)):
        return False
    counts = [len(ops) for ops in schedule.stages]
    # A limit above the ops of a stage is none, however large.
    return _planner.is_valid(
        schedule.microbatches,
        schedule.codes,
        [[op.microbatch for op in ops] for ops in schedule.stages],
        [min(cap or 0, count) for cap, count in zip(caps, counts, strict=True)],
        [min(limit or 0, count) for limit, count in zip(devices, counts, strict=True)],
    )


def check_stage(stage: int, ops: Sequence[Op], microbatches: int) -> list[int]:
    """Check rules 1 and 2 on one stage; return ``a(k)``, forwards before the k-th backward."""
    forwards = backwards = weights = 0
    forwards_before: list[int] = []
    for position, op in enumerate(ops):
        kind, m = op
        if kind is OpKind.F:
            _check_turn(stage, position, op, forwards, microbatches)
            forwards += 1
        elif kind is OpKind.B or kind is OpKind.BW:
            _check_turn(stage, position, op, backwards, microbatches)
            if m >= forwards:
                raise ScheduleError(stage, position, f"found {op}; expected F{m} before it")
            backwards += 1
            forwards_before.append(forwards)
            if kind is OpKind.BW:
                if weights != m:
                    raise ScheduleError(
                        stage, position, f"found {op}; expected W{weights} first: {_ORDER}"
                    )
                weights += 1
        else:
            _check_turn(stage, position, op, weights, microbatches)
            if m >= backwards:
                raise ScheduleError(stage, position, f"found {op}; expected B{m} before it")
            weights += 1
    for done, kinds in ((forwards, "F"), (backwards, "B"), (weights, "W")):
        if done != microbatches:
            raise ScheduleError(
                stage,
                None,
                f"the ops end after {done} of {microbatches} {kinds}; expected {kinds}{done}",
            )
    return forwards_before


_ORDER = "each kind runs once per microbatch, in microbatch order"


def _check_turn(stage: int, position: int, op: Op, turn: int, microbatches: int) -> None:
    if op.microbatch == turn < microbatches:
        return
    if turn >= microbatches:
        expected = f"no more of this kind; the schedule has {microbatches} microbatches"
    else:
        expected = f"{op.kind.value}{turn}: {_ORDER}"
    raise ScheduleError(stage, position, f"found {op}; expected {expected}")


def _check_deadlock(schedule: Schedule, forwards_before: Sequence[Sequence[int]]) -> None:
    for i in range(schedule.stage_count - 1):
        here, below = forwards_before[i], forwards_before[i + 1]
        for k, (mine, needed) in enumerate(zip(here, below, strict=True)):
            if mine < needed:
                position = backward_position(schedule.stages[i], k)
                raise ScheduleError(
                    i,
                    position,
                    f"found {schedule.stages[i][position]} after {mine} F; expected at least"
                    f" {needed} F before it, as many as stage {i + 1} runs before its"
                    f" {_backward(schedule.stages[i + 1], k)}, or the two wait for each other",
                )


def backward_position(ops: Sequence[Op], k: int) -> int:
    """Position of the k-th B or BW in ``ops``."""
    seen = 0
    for position, op in enumerate(ops):
        if op.kind is OpKind.B or op.kind is OpKind.BW:
            if seen == k:
                return position
            seen += 1
    raise IndexError(k)


def _backward(ops: Sequence[Op], k: int) -> Op:
    return ops[backward_position(ops, k)]


def check_cap(stage: int, ops: Sequence[Op], limit: int) -> None:
    """Raise :class:`ScheduleError` at the first F that exceeds the cap of a stage."""
    in_flight = 0
    for position, op in enumerate(ops):
        if op.kind is OpKind.F:
            in_flight += 1
            if in_flight > limit:
                raise ScheduleError(
                    stage,
                    position,
                    f"found {op} with {limit} microbatches in flight; expected a W before it,"
                    f" in_flight_limit is {limit}",
                )
        elif op.kind is OpKind.W or op.kind is OpKind.BW:
            in_flight -= 1


def check_device(stage: int, ops: Sequence[Op], limit: int) -> None:
    """Raise :class:`ScheduleError` at the first op that exceeds the device limit of a stage. The
    ops must satisfy the other rules."""
    check_device_limit(stage, limit)
    held = Residency(limit)
    for position, op in enumerate(ops):
        if not held.fits(op.kind, op.microbatch):
            what = "" if op.kind is OpKind.F else ", whose activations are in host memory,"
            raise ScheduleError(
                stage,
                position,
                f"found {op}{what} with {held.resident} microbatches on the device; expected a W"
                f" before it, device_limit is {limit}",
            )
        held.run(op.kind, op.microbatch)


def check_device_limit(stage: int, limit: int | None) -> None:
    """Raise :class:`ScheduleError` for a limit below 1, within which no F could run."""
    if limit is not None and limit < 1:
        raise ScheduleError(stage, None, f"device_limit is {limit}; expected at least 1")


def validate_waits(schedule: Schedule, waits: Sequence[Sequence[int]]) -> None:
    """Raise :class:`ScheduleError` unless ``waits[i]`` are positions of ops of stage *i*; empty
    for none on any stage."""
    if len(waits) not in (0, schedule.stage_count):
        raise InputError(
            f"waits has {len(waits)} entries; expected one per stage, {schedule.stage_count}"
        )
    for i, positions in enumerate(waits):
        size = len(schedule.stages[i])
        for position in positions:
            if not 0 <= position < size:
                raise ScheduleError(
                    i, None, f"waits has position {position}; the stage has {size} ops"
                )


def validate_online(
    warmup: Sequence[int],
    in_flight_limits: Sequence[int | None],
    slots: Sequence[int | None] | None = None,
    device_limits: Sequence[int | None] = (),
) -> None:
    """Raise :class:`ScheduleError` if running ready ops could deadlock.

    ``slots[i]``: most forward messages of link *i* that the receiver has not begun to use; None for
    no limit. Deadlock is impossible if x is non-increasing, ``x_i ≤ min(K_0 … K_i)``, and link *i*
    has at least ``max(1, Δ_i)`` slots. A device limit of at least 1 adds no condition: whenever it
    forbids an op, a W can run (:mod:`pipemorph.planning.offload`).
    """
    for i, held in enumerate(device_limits):
        check_device_limit(i, held)
    cap: int | None = None
    for i, x in enumerate(warmup):
        limit = in_flight_limits[i]
        if limit is not None:
            cap = limit if cap is None else min(cap, limit)
        if x < 1:
            raise ScheduleError(i, None, f"warm-up is {x}; expected at least 1")
        if i and x > warmup[i - 1]:
            raise ScheduleError(
                i, None, f"warm-up is {x}; expected at most {warmup[i - 1]}, that of stage {i - 1}"
            )
        if cap is not None and x > cap:
            raise ScheduleError(
                i, None, f"warm-up is {x}; expected at most {cap}, the smallest cap up to here"
            )
    for i, held in enumerate(slots or ()):
        needed = max(1, warmup[i] - warmup[i + 1])
        if held is not None and held < needed:
            raise ScheduleError(
                i, None, f"link {i} has {held} forward slots; expected at least {needed}"
            )
