"""Rule by which microbatches go to host memory, held by everything that plans or runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_text import ops_of, schedule_of

from pipemorph.errors import InputError
from pipemorph.planning.ir import Op, OpKind, Schedule
from pipemorph.planning.offload import (
    DeviceResidency,
    compute_device_room,
    compute_host_limit,
    compute_in_flight_reach,
    count_away_microbatches,
    count_device_peak,
    count_host_peak,
    find_copying_ops,
)
from pipemorph.planning.validator import ScheduleError, validate, validate_online


def copied(text: str, limit: int | None) -> str:
    """The ops that copy, as text."""
    ops = ops_of(text)
    return " ".join(
        str(op) for op, copies in zip(ops, find_copying_ops(ops, limit), strict=True) if copies
    )


@pytest.mark.parametrize(
    ("ops", "limit", "expected"),
    [
        # The second is the newest of two: it goes and comes back for its B, F1 included.
        ("F0 F1 F2 B0 W0 B1 W1 B2 W2", 2, "F1 F2 B1 B2"),
        ("F0 F1 F2 B0 W0 B1 W1 B2 W2", 3, "F2 B2"),
        ("F0 F1 F2 B0 W0 B1 W1 B2 W2", 4, ""),
        ("F0 F1 F2 B0 W0 B1 W1 B2 W2", None, ""),
        # With room for one, every microbatch goes, and comes back to an empty device.
        ("F0 F1 B0 W0 B1 W1", 1, "F0 F1 B0 B1"),
        # A microbatch whose B has run and whose W has not is on the device.
        ("F0 F1 B0 F2 W0 B1 W1 B2 W2", 3, "F2 B2"),
        ("F0 F1 B0 W0 F2 B1 W1 B2 W2", 3, ""),
        ("F0 F1 F2 BW0 BW1 BW2", 2, "F1 F2 BW1 BW2"),
    ],
)
def test_the_newest_goes_and_its_backward_brings_it_back(
    ops: str, limit: int | None, expected: str
) -> None:
    assert copied(ops, limit) == expected


@st.composite
def stage_runs(draw: st.DrawFn) -> tuple[list[Op], int, int]:
    """Ops of one stage as it may run them, whatever is ready first, with N and D."""
    n, limit = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    fused = draw(st.booleans())
    held = DeviceResidency(limit)
    f = b = w = 0
    ops = []
    while w < n:
        ready = [Op(OpKind.F, f)] if f < n else []
        if b < f:
            ready.append(Op(OpKind.BW if fused else OpKind.B, b))
        if w < b:
            ready.append(Op(OpKind.W, w))
        may = [op for op in ready if held.can_run(op.kind, op.microbatch)]
        assert may, "the device limit forbids all that remains"
        op = draw(st.sampled_from(may))
        held.record_op(op.kind, op.microbatch)
        f += op.kind is OpKind.F
        b += op.kind in (OpKind.B, OpKind.BW)
        w += op.kind in (OpKind.W, OpKind.BW)
        ops.append(op)
    return ops, n, limit


@given(stage_runs())
def test_any_order_stays_within_the_device_and_the_host(
    ran: tuple[list[Op], int, int],
) -> None:
    ops, n, limit = ran
    where: dict[int, str] = {}
    copies = find_copying_ops(ops, limit)
    for (kind, m, _), copied in zip(ops, copies, strict=True):
        # Derived again from the text of the rule, by what each microbatch is said to have done.
        if kind is OpKind.F:
            where[m] = "device"
        elif copied:
            assert where[m] == "host"
            where[m] = "device"
        on_device = sum(place == "device" for place in where.values())
        assert on_device <= limit
        if kind is not OpKind.W and kind is not OpKind.F:
            assert where[m] == "device", "ran a backward without its activations"
        if kind is OpKind.F:
            assert copied == (on_device >= limit)
            if copied:
                where[m] = "host"
        elif kind is not OpKind.B:
            del where[m]
    assert not where
    assert count_device_peak(ops, limit) <= limit
    in_flight = Schedule(n, (tuple(ops),)).count_in_flight_peaks()[0]
    assert count_host_peak(ops, limit) <= compute_host_limit(in_flight, limit, n)
    validate(Schedule(n, (tuple(ops),)), [in_flight], [limit])


@pytest.mark.parametrize(
    ("ops", "limit", "message"),
    [
        (
            "F0 B0 F1 W0 B1 W1",
            1,
            "stage 0, position 2: found F1 with 1 microbatches on the device; expected a W before"
            " it, device_limit is 1",
        ),
        (
            "F0 F1 F2 B0 B1 B2 W0 W1 W2",
            2,
            "stage 0, position 5: found B2, whose activations are in host memory, with 2"
            " microbatches on the device; expected a W before it, device_limit is 2",
        ),
        (
            "F0 F1 F2 B0 B1 F3 W0 W1 B2 W2 B3 W3",
            2,
            "stage 0, position 5: found F3 with 2 microbatches on the device; expected a W before"
            " it, device_limit is 2",
        ),
    ],
)
def test_the_validator_names_the_op_that_does_not_fit(ops: str, limit: int, message: str) -> None:
    schedule = schedule_of(ops.count("F"), [ops])
    validate(schedule, None, [None])
    with pytest.raises(ScheduleError) as error:
        validate(schedule, None, [limit])
    assert str(error.value) == message
    assert count_device_peak(schedule.stages[0], limit) == limit + 1


def test_the_validator_accepts_schedules_that_fit() -> None:
    validate(schedule_of(4, ["F0 F1 F2 B0 B1 W0 W1 F3 B2 W2 B3 W3"]), None, [2])


def test_a_device_limit_below_one_is_refused() -> None:
    schedule = schedule_of(1, ["F0 B0 W0"])
    with pytest.raises(ScheduleError, match="stage 0: device_limit is 0; expected at least 1"):
        validate(schedule, None, [0])
    with pytest.raises(ScheduleError, match="stage 1: device_limit is 0; expected at least 1"):
        validate_online([1, 1], [None, None], device_limits=[None, 0])


def test_limits_for_other_stages_are_refused() -> None:
    schedule = schedule_of(1, ["F0 B0 W0"])
    with pytest.raises(InputError, match="2 device limits for 1 stages"):
        validate(schedule, None, [1, 1])


@pytest.mark.parametrize(
    ("in_flight", "device", "n", "expected"),
    [(8, 3, 12, 6), (8, 3, 4, 2), (None, 3, 12, 10), (2, 3, 12, 0), (8, None, 12, 0), (3, 1, 9, 3)],
)
def test_how_much_can_be_in_host_memory(
    in_flight: int | None, device: int | None, n: int, expected: int
) -> None:
    assert compute_host_limit(in_flight, device, n) == expected


@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 60), st.integers(1, 60))
def test_recomputation_fits_into_the_memory_of_the_limit(
    limit: int, more: int, activations: int, in_flight: int
) -> None:
    """Limits in bytes: D microbatches with their activations, the others with their inputs."""
    most = limit + more
    in_flight = min(limit + in_flight, most)
    device = compute_device_room(in_flight, limit, most)
    assert 1 <= device <= limit
    assert compute_device_room(most, limit, most) == 1
    # The largest inputs of which `most` fit with the activations of one.
    inputs = (limit - 1) * activations / most
    space = limit * activations * (1 + 1e-9)

    def needed(device: int) -> float:
        return device * activations + (in_flight - device + 1) * inputs

    assert needed(device) <= space < needed(device + 1) + 1e-6 * activations
    reach = compute_in_flight_reach(device, limit, most)
    assert reach >= in_flight
    assert compute_device_room(reach, limit, most) >= device


def test_microbatches_off_the_device_are_counted_by_kind() -> None:
    many, few = "F0 F1 F2 B0 W0 B1 W1 B2 W2", "F0 B0 W0 F1 B1 W1 F2 B2 W2"
    schedule = schedule_of(3, [many, many, few])
    assert count_away_microbatches(schedule, (2, 2, None), (False, True, True)) == (
        [2, 0, 0],
        [0, 2, 0],
    )
