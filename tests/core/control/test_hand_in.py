"""Snapshots that an agent holds, handed to a controller that has no state of the job."""

from __future__ import annotations

import base64
import json
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from observing import report
from plant_support import Plant, spec

from pipemorph.control import JobController
from pipemorph.control.adopted_plan import parse_message
from pipemorph.control.history.job_history import SavedTime
from pipemorph.control.job_state.reports import WrongAttempt
from pipemorph.control.snapshot import MAX_UNPACKED_BYTES, SnapshotTooLarge, pack_snapshot
from pipemorph.errors import InputError
from pipemorph.protocol import MAX_SNAPSHOT_BYTES, PlanMessage

JOB = spec(schedule={"inFlightLimit": 6})
Message = dict[str, Any]


def adapted(plant: Plant | None = None) -> tuple[Plant, Message]:
    """A job with a slow link, and its controller's snapshot."""
    plant = plant or Plant(JOB)
    plant.run(4)
    plant.delays[1] = 0.06
    plant.run(8)
    directive = plant.controller.get_directive()
    assert directive is not None and plant.plan.version == directive.plan_version == 1
    return plant, json.loads(json.dumps(plant.controller.take_snapshot()))


@pytest.fixture(scope="module")
def handed() -> Message:
    return adapted()[1]


def new_host(plant: Plant, **fields: Any) -> JobController:
    """New host that has taken over without state of the job, after the first report to it."""
    made = JobController(JOB)
    plant.sequence += 1
    details = {"observed_plan_version": 1, "applied_plan_version": 1, "snapshot": "held"} | fields
    answer = made.process_report(report(plant.sequence, **details), plant.now)
    assert answer.wants_snapshot and made.accepts_snapshot
    return made


def bytes_of(saved: Message, **fields: Any) -> bytes:
    message = {"job": "j", "namespace": "default", "attempt": 0, "snapshot": pack_snapshot(saved)}
    return json.dumps(message | fields).encode()


def hand_in(controller: JobController, snapshot: Message, now: float, attempt: int = 0) -> None:
    controller.adopt_plan(attempt, parse_message(bytes_of(snapshot), JOB).snapshot, now)


def test_a_controller_goes_on_from_the_snapshot() -> None:
    plant, snapshot = adapted()
    before, plant.controller = plant.controller, new_host(plant)
    hand_in(plant.controller, snapshot, plant.now)
    assert plant.controller.wanted_plan == before.wanted_plan == plant.plan
    assert not plant.controller.accepts_snapshot
    assert plant.controller.records == before.records
    plant.run(12)
    assert plant.plan.version == 1, "a needless change"
    assert plant.controller.saved_time.seconds > before.saved_time.seconds > 0
    plant.delays[1] = 0.0
    plant.run(20)
    assert (plant.plan.version, plant.plan.delegated_links) == (2, ())


def test_everything_that_is_saved_is_taken_over(handed: Message) -> None:
    plant = Plant(JOB)
    saved = handed | {"doubts": {"1": 2}, "flaps": 3, "changes_before": 7, "profiled_at": 5}
    saved |= {"stages": [dict.fromkeys(("forward", "backward_input", "backward_weight"), 0.01)] * 4}
    saved |= {"worth_before": [12.0, 2.0], "barrier": False}
    controller = new_host(plant)
    hand_in(controller, saved, plant.now)
    now = json.loads(json.dumps(controller.take_snapshot()))
    # Numbers of the agent's reports, and of another clock; a stage has more fields.
    others = {"sequence", "slow_since", "slow_directions", "records", "stages", "footprints"}
    assert {k: v for k, v in now.items() if k not in others} == {
        k: v for k, v in saved.items() if k not in others
    }
    assert [stage["forward"] for stage in now["stages"]] == [0.01] * 4
    assert [each["plan_version"] for each in now["records"]] == [1]
    assert controller.change_count == 8


def test_it_restores_the_cause_of_the_delegation() -> None:
    """The link recovers before the controller has seen it slow."""
    plant, snapshot = adapted()
    plant.decides, plant.delays[1] = False, 0.0
    plant.run(20)
    plant.controller, plant.decides = new_host(plant), True
    hand_in(plant.controller, snapshot, plant.now)
    plant.run(4)
    assert (plant.plan.version, plant.plan.delegated_links) == (2, ())
    assert plant.controller.records[-1].reason.startswith("a link recovered")


def test_it_waits_for_the_snapshot_but_not_for_ever() -> None:
    plant, _ = adapted()
    plant.controller = new_host(plant)
    began = plant.now
    while plant.now < began + 4.5:
        plant.step()
    assert plant.controller.accepts_snapshot
    assert plant.controller.plan_version == 1
    plant.run(12)
    assert plant.plan.version == 2
    assert "does not know the plan in effect" in plant.controller.records[0].reason


def test_a_host_waits_for_the_snapshot_of_ranks_with_the_plan_of_the_start_too() -> None:
    """The snapshot has the gains of earlier attempts, and op times."""
    plant = Plant(JOB)
    plant.run(6)
    snapshot = json.loads(json.dumps(plant.controller.take_snapshot()))
    controller = new_host(plant, observed_plan_version=0, applied_plan_version=0)
    hand_in(controller, snapshot | {"changes_before": 3, "plan_version": 9}, plant.now)
    assert (controller.change_count, controller.plan_version) == (3, 9)
    assert "the ranks run the initial plan" in controller.decisions[-1].reason


def test_the_number_of_changes_never_falls(handed: Message) -> None:
    """The ingest was killed when status had a change whose directive no agent got; and the ranks
    run another host's plan of the version that this one has given."""
    plant = Plant(JOB)
    controller = new_host(plant)
    controller.count_earlier_changes(3, SavedTime(9.0, 1.0))
    hand_in(controller, handed, plant.now)
    assert (controller.change_count, len(controller.records)) == (3, 1)
    controller = JobController.from_snapshot(JOB, handed)
    details = {"observed_plan_version": 1, "applied_plan_version": 1, "plan_issued_at": 7.0}
    controller.process_report(report(handed["sequence"] + 1, **details), plant.now)
    assert (controller.change_count, controller.records) == (1, [])
    assert JobController.from_snapshot(JOB, controller.take_snapshot()).change_count == 1


def test_after_a_bad_snapshot_it_decides_without_knowing_it(handed: Message) -> None:
    plant, _ = adapted()
    plant.controller = new_host(plant)
    plant.controller.refuse_snapshot()
    with pytest.raises(InputError, match="no snapshot is wanted"):
        hand_in(plant.controller, handed, plant.now)
    plant.run(2)
    assert plant.controller.plan_version == 2


def change(*path: str | int, to: Any) -> Callable[[Message], None]:
    def apply(message: Message) -> None:
        at: Any = message
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = to

    return apply


def version(number: int) -> Callable[[Message], None]:
    def apply(snapshot: Message) -> None:
        directive = snapshot["directive"]
        directive["plan_version"] = directive["plan"]["version"] = number
        directive["record"]["plan_version"] = number
        snapshot["plan_version"] = number

    return apply


PLAN = ("directive", "plan")
RECORD = ("directive", "record")


def test_a_plan_has_the_times_that_ranks_order_microbatches_by() -> None:
    """Ranks that run them in order get none."""
    plant, saved = adapted(
        Plant(spec(schedule={"inFlightLimit": 6}, adaptation={"reorder": "sums"}))
    )
    directive = plant.controller.get_directive()
    assert directive is not None and directive.plan.times is not None
    times = directive.plan.times
    assert [stage.forward for stage in times.stages] == pytest.approx([0.01] * 4, rel=0.1)
    assert times.delays[1] == pytest.approx(0.06, rel=0.2)
    assert max(times.delays[0], times.delays[2]) < 0.01
    assert parse_message(bytes_of(saved), plant.spec).snapshot.directive == directive
    plain = adapted()[0].controller.get_directive()
    assert plain is not None and plain.plan.times is None


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (change("extra", to=1), "snapshot.extra: Extra inputs"),
        (change("format", to=1), "snapshot.format"),
        (change("plan_version", to=2**31), "snapshot.plan_version"),
        (change("plan_version", to=0), "a record is of plan v1; expected 1 to 0"),
        (change("delays", to=[1e300] * 3), "snapshot.delays.0"),
        (change("delays", to=[0.0] * 4), "snapshot.delays has 4 items; expected 3"),
        (change("footprints", to=[[-1, None, None]] * 4), "snapshot.footprints.0.0"),
        (change("layers", to=[1] * 4), "snapshot.layers are 4; the job has None"),
        (change("flaps", to=10**9), "snapshot.flaps"),
        (change("doubts", to={"9": 1}), "snapshot.doubts names a link of another job"),
        (change("worth_before", to=[float("nan"), 0]), "snapshot.worth_before.0"),
        (change("slow_directions", 0, "link", to=3), "names a link of another job"),
        (change("records", to=[{"plan_version": 1}]), "snapshot.records.0.kind: Field required"),
        (change(*PLAN, "version", to=2), "directive.plan.version is 2; expected 1"),
        (change(*RECORD, to=None), "directive.record is not that of plan v1"),
        (change(*RECORD, "plan_version", to=2), "directive.record is not that of plan v1"),
        (change(*RECORD, "detected_at", to=1e300), "directive.record.detected_at"),
        (change(*RECORD, "promised", to=float("inf")), "directive.record.promised"),
        (change(*RECORD, "warmup_after", to=[1] * 513), "has 513 items; expected at most 512"),
        (change(*RECORD, "links", 0, "link", to=3), "names a link of another job"),
        (change(*PLAN, "ranks", to=["FIW"]), "directive.plan.ranks has 1 items; expected 4"),
        (change(*PLAN, "placement", to=[0, 1]), "plan.placement has 2 items; expected 4"),
        (change(*PLAN, "placement", to=[0, 0, 1, 1]), "on ranks 0-0-1-1; expected all of 4 ranks"),
        (change(*PLAN, "placement", to=[0, 2, 1, 3]), "on ranks 0-2-1-3; the job has them on"),
        (change(*PLAN, "routes", to=["direct"]), "directive.plan.routes has 1 items; expected 3"),
        (
            change(*PLAN, "times", to={"stages": [], "delays": [0.0] * 3}),
            "directive.plan.times.stages has 0 items; expected 4",
        ),
        (change(*PLAN, "microbatches", to=10**9), "has 1000000000 microbatches; expected 12"),
        (change(*PLAN, "policy", to="1f1b"), "policy is 1f1b; expected pipemorph"),
        (change(*PLAN, "ranks", 2, to="FIW" * 11), "directive.plan: "),
        (change(*PLAN, "ranks", 2, to="W" + "FI" * 12 + "W" * 11), "directive.plan: "),
        (change(*PLAN, "ranks", 2, to="FI1W" * 12), "rank 2, op 2 is of chunk 1; the rank has 1"),
        (change(*PLAN, "ranks", 2, to="X" * 36), "rank 2, op 0 is 'X'"),
        *(
            (change(*PLAN, field, to=[wrong] * 4), f"directive.plan.{field}.0")
            for field in ("in_flight_limits", "device_limits", "warmup")
            for wrong in (-1, 0, 2**31, 2**63, 2**70, 1.5)
        ),
        (change(*PLAN, "microbatches", to=2**63), "directive.plan.microbatches"),
        (change(*PLAN, "in_flight_limits", to=[None] * 4), "stage 0 may hold all microbatches"),
        (change(*PLAN, "in_flight_limits", to=[7] * 4), "may hold 7 microbatches; the spec allows"),
    ],
)  # fmt: skip
def test_a_bad_snapshot_is_refused_in_one_line(
    handed: Message, forge: Callable[[Message], None], words: str
) -> None:
    snapshot = json.loads(json.dumps(handed))
    forge(snapshot)
    with pytest.raises(InputError) as refused:
        parse_message(bytes_of(snapshot), JOB)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_plan_for_healthy_links_is_checked_like_the_one_in_force(handed: Message) -> None:
    baseline = handed["directive"]["plan"] | {"version": 0}
    assert (
        parse_message(bytes_of(handed | {"baseline": baseline}), JOB).snapshot.baseline is not None
    )
    for bad, words in (
        ({"version": 3}, "snapshot.baseline.version is 3; expected 0"),
        ({"in_flight_limits": [None] * 4}, "snapshot.baseline: stage 0 may hold all"),
    ):
        with pytest.raises(InputError, match=words):
            parse_message(bytes_of(handed | {"baseline": baseline | bad}), JOB)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"snapshot": ""}, "snapshot: "),
        ({"snapshot": "!!"}, "snapshot: "),
        ({"snapshot": "AAAA"}, "snapshot: "),
        ({"snapshot": base64.b64encode(zlib.compress(b"{}")[:-1]).decode()}, "cut off"),
        ({"snapshot": base64.b64encode(zlib.compress(b" " * (MAX_UNPACKED_BYTES + 1))).decode()},
         f"more than {MAX_UNPACKED_BYTES} bytes"),
        ({"snapshot": base64.b64encode(zlib.compress(b"[]")).decode()}, "snapshot.the body"),
        ({"snapshot": "A" * (MAX_SNAPSHOT_BYTES + 1)}, "snapshot: String should have at most"),
        ({"job": ""}, "job: "),
        ({"extra": 1}, "extra: Extra inputs"),
    ],
)  # fmt: skip
def test_an_invalid_snapshot_is_refused(
    handed: Message, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError) as refused:
        parse_message(bytes_of(handed, **fields), JOB)
    assert words in str(refused.value)


def test_a_delegated_link_is_refused_where_the_spec_has_none(handed: Message) -> None:
    snapshot = json.loads(json.dumps(handed))
    snapshot["directive"]["plan"]["routes"] = ["delegated"] * 3
    direct = spec(schedule={"inFlightLimit": 6}, transport={"route": "direct"})
    with pytest.raises(InputError, match=r"spec.transport.route is direct"):
        parse_message(bytes_of(snapshot), direct)


@pytest.mark.parametrize("other", [2, 9])
def test_the_plan_of_another_version_than_the_ranks_have_is_refused(
    handed: Message, other: int
) -> None:
    plant = Plant(JOB)
    controller = new_host(plant)
    snapshot = json.loads(json.dumps(handed))
    version(other)(snapshot)
    with pytest.raises(
        InputError, match=f"its plan is v{other}; the newest plan that the ranks reported is v1"
    ):
        hand_in(controller, snapshot, plant.now)
    assert controller.wanted_plan.version == 0


def test_another_plan_of_the_version_that_the_ranks_have_is_refused(handed: Message) -> None:
    plant = Plant(JOB)
    controller = new_host(plant, plan_issued_at=7.0)
    with pytest.raises(InputError, match="its plan v1 is another one than the plan v1 of the"):
        hand_in(controller, handed, plant.now)


def test_the_snapshot_of_another_attempt_is_refused(handed: Message) -> None:
    plant = Plant(JOB)
    controller = new_host(plant)
    for attempt, snapshot in ((1, handed), (0, handed | {"attempt": 1})):
        with pytest.raises(WrongAttempt, match="attempt 1 is not the attempt in progress, 0"):
            hand_in(controller, snapshot, plant.now, attempt)
    assert controller.accepts_snapshot, "the right one may still come"


def test_no_snapshot_is_requested_of_a_job_that_is_known() -> None:
    plant, snapshot = adapted()
    with pytest.raises(InputError, match="plan v1 is in force; no snapshot"):
        hand_in(plant.controller, snapshot, plant.now)
    plant.run(1)
    assert not plant.controller.accepts_snapshot
    # Nor one of an agent that has none.
    fresh = JobController(JOB)
    assert not fresh.process_report(report(1), 1000.0).wants_snapshot


def test_a_large_plan_fits_into_a_snapshot() -> None:
    """Plan of a 16th of the largest size, with stages all different: an order without a pattern."""
    times = [
        {"forward": 10 + i * 7 % 5, "backwardInput": 11 + i * 3 % 4, "backwardWeight": 6 + i % 3}
        for i in range(128)
    ]
    many = spec(128, 512, schedule={"stageTimes": times, "inFlightLimit": 160})
    controller = JobController(many)
    plan = PlanMessage.from_plan(controller.wanted_plan).model_dump(mode="json")
    packed = pack_snapshot(controller.take_snapshot() | {"baseline": plan})
    assert len(packed) < MAX_SNAPSHOT_BYTES / 16
    assert parse_message(bytes_of({}, snapshot=packed), many).snapshot.baseline is not None


def test_a_snapshot_that_does_not_fit_is_not_packed() -> None:
    noise = random.Random(1).randbytes(MAX_SNAPSHOT_BYTES // 2).hex()
    with pytest.raises(SnapshotTooLarge, match=f"bytes of at most {MAX_SNAPSHOT_BYTES}"):
        pack_snapshot({"noise": noise + noise})
