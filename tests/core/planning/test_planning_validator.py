"""The validator: what it names, and that its deadlock criterion is the truth."""

from __future__ import annotations

import random

import pytest
from planning_reference import runs_to_the_end
from planning_strategies import random_schedule
from schedule_text import schedule_of

from pipemorph.errors import InputError
from pipemorph.planning import Schedule, ScheduleError, validate, validate_online, validator


def check(stages: list[str], microbatches: int, limits: list[int | None] | None = None) -> None:
    validate(schedule_of(microbatches, stages), limits)


def test_accepts_split_fused_and_both_on_one_stage() -> None:
    check(["F0 F1 B0 W0 B1 W1", "F0 BW0 F1 BW1"], 2, [2, 1])
    check(["F0 F1 BW0 B1 W1"], 2)


@pytest.mark.parametrize("limit", [2**31, 10**16])
def test_a_limit_that_no_stage_can_reach_is_none_however_large(limit: int) -> None:
    """The compiled check counts with 32 bits."""
    schedule = schedule_of(2, ["F0 F1 B0 W0 B1 W1", "F0 BW0 F1 BW1"])
    validate(schedule, [limit, 1], [limit, limit])
    with pytest.raises(ScheduleError, match="stage 1"):
        validate(schedule_of(2, ["F0 F1 BW0 BW1", "F0 F1 BW0 BW1"]), [limit, 1])


@pytest.mark.parametrize(
    ("stages", "position", "words"),
    [
        (["F0 B0 W0 F1 B1"], None, "the ops end after 1 of 2 W; expected W1"),
        (["F0 B0 W0"], None, "the ops end after 1 of 2 F; expected F1"),
        (["F0 F0 B0 W0 F1 B1 W1"], 1, "found F0; expected F1"),
        (["F1 F0 B0 W0 B1 W1"], 0, "found F1; expected F0"),
        (["F0 F1 F2 B0 B1 W0 W1"], 2, "found F2; expected no more of this kind"),
        (["B0 F0 W0 F1 B1 W1"], 0, "found B0; expected F0 before it"),
        (["F0 W0 B0 F1 B1 W1"], 1, "found W0; expected B0 before it"),
        (["F0 F1 B1 B0 W0 W1"], 2, "found B1; expected B0"),
        (["F0 F1 B0 B1 W1 W0"], 4, "found W1; expected W0"),
        (["F0 F1 B0 BW1 W0"], 3, "found BW1; expected W0 first"),
        (["F0 F1 BW0 W0 B1 W1"], 3, "found W0; expected W1"),
        (["F0 B0 W0 F1 B1 W1", "F0 F1 B0 W0 B1 W1"], 1, "B0 waits forever for microbatch 0 of"),
    ],
)
def test_names_the_offending_op(stages: list[str], position: int | None, words: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(stages, 2)
    assert caught.value.position == position
    assert str(caught.value).startswith("stage 0") and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_the_op_that_exceeds_a_cap() -> None:
    with pytest.raises(ScheduleError, match="stage 0, position 2: found F2 with 2 microbatches"):
        check(["F0 F1 F2 B0 W0 B1 W1 B2 W2"], 3, [2])
    check(["F0 F1 F2 B0 W0 B1 W1 B2 W2"], 3, [3])
    check(["F0 F1 F2 B0 W0 B1 W1 B2 W2"], 3, [None])


def test_in_flight_ends_at_w_not_at_b() -> None:
    with pytest.raises(ScheduleError, match="found F1"):
        check(["F0 B0 F1 W0 B1 W1"], 2, [1])


@pytest.mark.parametrize(
    ("schedule", "limits", "words"),
    [
        (Schedule(0, ((),)), None, "at least 1 microbatch"),
        (Schedule(1, ()), None, "at least one stage"),
        (schedule_of(1, ["F0 B0 W0"]), [1, 1], "2 in-flight limits for 1 stages"),
    ],
)
def test_refuses_invalid_schedules(
    schedule: Schedule, limits: list[int | None] | None, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        validate(schedule, limits)


def test_the_compiled_check_agrees_with_the_check_that_names_the_op(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checks agree on limits, microbatches out of order, and ops missing or too many."""

    def accepted(schedule: Schedule, *limits: list[int | None]) -> bool:
        try:
            validate(schedule, *limits)
        except ScheduleError:
            return False
        return True

    rng, seen = random.Random(5), {True: 0, False: 0}
    for _ in range(2000):
        stages, n = rng.randint(1, 3), rng.randint(1, 4)
        schedule = random_schedule(rng, stages, n)
        if rng.random() < 0.3:
            rows = [list(ops) for ops in schedule.stages]
            row = rng.choice(rows)
            i, k = rng.randrange(len(row)), rng.randrange(len(row))
            match rng.randrange(4):
                case 0:
                    row[i], row[k] = row[k], row[i]
                case 1:
                    row[i] = row[i]._replace(microbatch=rng.randint(0, n))
                case 2:
                    row.insert(i, row[k])
                case 3:
                    del row[i]
            schedule = Schedule(n, tuple(map(tuple, rows)))
        limits: list[list[int | None]] = [
            [rng.choice((None, rng.randint(0, n + 1))) for _ in range(stages)] for _ in range(2)
        ]
        with monkeypatch.context() as without:
            without.setattr(validator, "_is_valid", lambda *_: False)
            valid = accepted(schedule, *limits)
        assert accepted(schedule, *limits) == valid, (schedule.encode(), limits)
        with monkeypatch.context() as alone:
            # A valid one needs no walk.
            alone.setattr(validator, "_check_stage", None)
            if valid and all(limit is None or limit > 0 for row in limits for limit in row):
                validate(schedule, *limits)
        seen[valid] += 1
    assert min(seen.values()) > 200, seen


def test_deadlock_criterion_equals_exhaustive_execution() -> None:
    rng = random.Random(3)
    deadlocks = 0
    for _ in range(4000):
        schedule = random_schedule(rng, rng.randint(1, 4), rng.randint(1, 4))
        try:
            validate(schedule)
            passed = True
        except ScheduleError:
            passed = False
        assert passed == runs_to_the_end(schedule), schedule.encode()
        deadlocks += not passed
    assert 400 < deadlocks < 3600, f"{deadlocks} of 4000: one side is hardly tested"


@pytest.mark.parametrize(
    ("warmup", "limits", "words"),
    [
        ([2, 3], [None, None], "stage 1: warm-up is 3; expected at most 2"),
        ([3, 1], [2, None], "stage 0: warm-up is 3; expected at most 2"),
        ([2, 2], [2, 1], "stage 1: warm-up is 2; expected at most 1"),
        ([2, 2], [1, 2], "stage 0: warm-up is 2; expected at most 1"),
        ([0], [None], "expected at least 1"),
    ],
)
def test_online_condition(warmup: list[int], limits: list[int | None], words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        validate_online(warmup, limits)


def test_online_condition_at_its_edge() -> None:
    validate_online([4, 2, 1], [4, 2, 1])
    validate_online([4, 2, 1], [None, None, None])


def test_waits_are_positions_in_every_rank_or_in_none() -> None:
    schedule = schedule_of(1, ["F0 B0 W0", "F0 BW0"])
    for good in ([], [[], []], [[2], [0, 1]]):
        validator.validate_waits(schedule, good)
    with pytest.raises(InputError, match="waits has 1 entries; expected one per rank, 2"):
        validator.validate_waits(schedule, [[0]])
    with pytest.raises(ScheduleError, match="waits has position 2; the rank has 2 ops"):
        validator.validate_waits(schedule, [[], [2]])
