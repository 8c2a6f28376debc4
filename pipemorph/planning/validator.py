"""Validates schedules, op by op. The rules:

1. Each stage runs each microbatch's F once, and its B and W once or its BW once.
2. F before B before W, and each kind in microbatch order. Every ``.grad`` then sums
   W_0 … W_{N-1} in one order, so results are bitwise equal across schedules.
3. No deadlock: with buffered sends, no rank that runs its ops in order waits forever.
4. Stages obey their in-flight caps.
5. Stages that offload activations obey their device limits.
6. A rank holds no more in flight than its memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.errors import InputError
from pipemorph.planning import _planner
from pipemorph.planning.ir import Op, OpKind, Schedule
from pipemorph.planning.offload import DeviceResidency


class ScheduleError(InputError):
    """Invalid schedule. ``place``, a stage or a rank, and ``position`` locate the op."""

    def __init__(self, place: str, position: int | None, message: str) -> None:
        where = place if position is None else f"{place}, position {position}"
        super().__init__(f"{where}: {message}")
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
    stages = schedule.stage_count
    if schedule.microbatches < 1:
        raise InputError(f"a schedule needs at least 1 microbatch, not {schedule.microbatches}")
    if not stages:
        raise InputError("a schedule needs at least one stage")
    caps = (None,) * stages if in_flight_limits is None else in_flight_limits
    devices = device_limits or (None,) * stages
    for name, limits in (("in-flight", caps), ("device", devices)):
        if len(limits) != stages:
            raise InputError(f"{len(limits)} {name} limits for {stages} stages")
    if _is_valid(schedule, caps, devices):
        return
    for i, ops in enumerate(schedule.stages):
        _check_stage(i, ops, schedule.microbatches)
        if (cap := caps[i]) is not None:
            _check_cap(i, ops, cap)
        if (device := devices[i]) is not None:
            _check_device(i, ops, device)
    _check_deadlock(schedule)


def check_rank_memory(
    schedule: Schedule, sizes: Sequence[int], memory: int | None, *, as_peaks: bool = False
) -> None:
    """Raise :class:`ScheduleError` at the first op with which a rank holds more in flight than
    ``memory``. ``sizes[s]``: memory of one microbatch on stage *s*. ``as_peaks``: the peaks of a
    rank's stages count as simultaneous, as guided dispatch may make them."""
    if memory is None:
        return
    peaks = schedule.count_in_flight_peaks()
    for rank, (ops, mine) in enumerate(zip(schedule.ranks, schedule.stages_by_rank, strict=True)):
        held = sum(peaks[s] * sizes[s] for s in mine)
        if held <= memory:
            continue
        if as_peaks:
            raise ScheduleError(
                f"rank {rank}", None,
                f"its stages may hold {held} at once out of turn; rank_memory is {memory}: use"
                " dispatch static",
            )  # fmt: skip
        held = 0
        for position, (kind, microbatch, chunk) in enumerate(ops):
            size = sizes[mine[chunk]]
            if kind is OpKind.F and held + size > memory:
                raise ScheduleError(
                    f"rank {rank}", position,
                    f"found F{microbatch} of stage {mine[chunk]} with {held} held in flight;"
                    f" expected a W before it, rank_memory is {memory}",
                )  # fmt: skip
            held += size if kind is OpKind.F else 0 if kind is OpKind.B else -size


def _is_valid(
    schedule: Schedule, caps: Sequence[int | None], devices: Sequence[int | None]
) -> bool:
    """True if a schedule is valid. The checks that locate an invalid op take 100 times as long."""
    if any(limit is not None and limit < 1 for limit in (*caps, *devices)):
        return False
    # A limit above the ops of a stage is none, however large.
    most = max(map(len, schedule.ranks))
    return _planner.is_valid(
        schedule.microbatches,
        schedule.stages_by_rank,
        schedule.op_codes,
        [[op.microbatch for op in ops] for ops in schedule.ranks],
        [min(cap or 0, most) for cap in caps],
        [min(limit or 0, most) for limit in devices],
    )


def _check_stage(stage: int, ops: Sequence[Op], microbatches: int) -> None:
    """Check rules 1 and 2 on one stage."""
    forwards = backwards = weights = 0
    for position, op in enumerate(ops):
        kind, m = op.kind, op.microbatch
        if kind is OpKind.F:
            _check_order(stage, position, op, forwards, microbatches)
            forwards += 1
        elif kind is OpKind.B or kind is OpKind.BW:
            _check_order(stage, position, op, backwards, microbatches)
            if m >= forwards:
                raise _make_stage_error(stage, position, f"found {op}; expected F{m} before it")
            backwards += 1
            if kind is OpKind.BW:
                if weights != m:
                    raise _make_stage_error(
                        stage, position, f"found {op}; expected W{weights} first: {_ORDER}"
                    )
                weights += 1
        else:
            _check_order(stage, position, op, weights, microbatches)
            if m >= backwards:
                raise _make_stage_error(stage, position, f"found {op}; expected B{m} before it")
            weights += 1
    for done, kinds in ((forwards, "F"), (backwards, "B"), (weights, "W")):
        if done != microbatches:
            raise _make_stage_error(
                stage,
                None,
                f"the ops end after {done} of {microbatches} {kinds}; expected {kinds}{done}",
            )


def _make_stage_error(stage: int, position: int | None, message: str) -> ScheduleError:
    return ScheduleError(f"stage {stage}", position, message)


_ORDER = "each kind runs once per microbatch, in microbatch order"


def _check_order(stage: int, position: int, op: Op, turn: int, microbatches: int) -> None:
    if op.microbatch == turn < microbatches:
        return
    if turn >= microbatches:
        expected = f"no more of this kind; the schedule has {microbatches} microbatches"
    else:
        expected = f"{op.kind.value}{turn}: {_ORDER}"
    raise _make_stage_error(stage, position, f"found {op}; expected {expected}")


def _check_deadlock(schedule: Schedule) -> None:
    """Raise :class:`ScheduleError` that names an op that waits forever, if there is one. Each stage
    must be able to run its ops in their order."""
    done = [{OpKind.F: 0, OpKind.B: 0, OpKind.W: 0} for _ in schedule.placement]
    at = [0] * len(schedule.ranks)

    def advance_rank(rank: int) -> bool:
        if at[rank] == len(schedule.ranks[rank]):
            return False
        kind, microbatch, chunk = schedule.ranks[rank][at[rank]]
        stage = schedule.stages_by_rank[rank][chunk]
        counted = OpKind.B if kind is OpKind.BW else kind
        source = stage - 1 if kind is OpKind.F else stage + 1
        receives = counted is not OpKind.W and 0 <= source < len(done)
        if receives and done[source][counted] <= microbatch:
            return False
        done[stage][counted] += 1
        at[rank] += 1
        return True

    while any(advance_rank(rank) for rank in range(len(at))):
        pass
    for rank, (position, ops) in enumerate(zip(at, schedule.ranks, strict=True)):
        if position < len(ops):
            op = ops[position]
            stage = schedule.stages_by_rank[rank][op.chunk]
            source = stage - 1 if op.kind is OpKind.F else stage + 1
            whose = "" if schedule.one_stage_each else f" of stage {stage}"
            raise ScheduleError(
                f"stage {stage}" if schedule.one_stage_each else f"rank {rank}",
                position,
                f"{op}{whose} waits forever for microbatch {op.microbatch} of stage {source}",
            )


def _check_cap(stage: int, ops: Sequence[Op], limit: int) -> None:
    """Raise :class:`ScheduleError` at the first F that exceeds the cap of a stage."""
    in_flight = 0
    for position, op in enumerate(ops):
        if op.kind is OpKind.F:
            in_flight += 1
            if in_flight > limit:
                raise _make_stage_error(
                    stage,
                    position,
                    f"found {op} with {limit} microbatches in flight; expected a W before it,"
                    f" in_flight_limit is {limit}",
                )
        elif op.kind is OpKind.W or op.kind is OpKind.BW:
            in_flight -= 1


def _check_device(stage: int, ops: Sequence[Op], limit: int) -> None:
    """Raise :class:`ScheduleError` at the first op that exceeds the device limit of a stage. The
    ops must obey the other rules."""
    _check_device_limit(stage, limit)
    held = DeviceResidency(limit)
    for position, op in enumerate(ops):
        if not held.can_run(op.kind, op.microbatch):
            what = "" if op.kind is OpKind.F else ", whose activations are in host memory,"
            raise _make_stage_error(
                stage,
                position,
                f"found {op}{what} with {held.resident_count} microbatches on the device; expected"
                f" a W before it, device_limit is {limit}",
            )
        held.record_op(op.kind, op.microbatch)


def _check_device_limit(stage: int, limit: int | None) -> None:
    """Raise :class:`ScheduleError` for a limit below 1, within which no F could run."""
    if limit is not None and limit < 1:
        raise _make_stage_error(stage, None, f"device_limit is {limit}; expected at least 1")


def validate_waits(schedule: Schedule, waits: Sequence[Sequence[int]]) -> None:
    """Raise :class:`ScheduleError` unless ``waits[r]`` are positions of ops of rank *r*; empty
    for none on any rank."""
    ranks = len(schedule.ranks)
    if len(waits) not in (0, ranks):
        raise InputError(f"waits has {len(waits)} entries; expected one per rank, {ranks}")
    for rank, positions in enumerate(waits):
        size = len(schedule.ranks[rank])
        for position in positions:
            if not 0 <= position < size:
                raise ScheduleError(
                    f"rank {rank}", None, f"waits has position {position}; the rank has {size} ops"
                )


def validate_online(
    warmup: Sequence[int],
    in_flight_limits: Sequence[int | None],
    device_limits: Sequence[int | None] = (),
) -> None:
    """Raise :class:`ScheduleError` if running ready ops could deadlock.

    Deadlock is impossible if the warm-up x does not increase and ``x_i ≤ min(K_0 … K_i)``. A device
    limit of at least 1 adds no condition: whenever it forbids an op, a W can run
    (:mod:`pipemorph.planning.offload`).
    """
    for i, held in enumerate(device_limits):
        _check_device_limit(i, held)
    cap: int | None = None
    for i, x in enumerate(warmup):
        limit = in_flight_limits[i]
        if limit is not None:
            cap = limit if cap is None else min(cap, limit)
        if x < 1:
            raise _make_stage_error(i, None, f"warm-up is {x}; expected at least 1")
        if i and x > warmup[i - 1]:
            raise _make_stage_error(
                i, None, f"warm-up is {x}; expected at most {warmup[i - 1]}, that of stage {i - 1}"
            )
        if cap is not None and x > cap:
            raise _make_stage_error(
                i, None, f"warm-up is {x}; expected at most {cap}, the smallest cap up to here"
            )
