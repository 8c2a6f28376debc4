"""A controller that does not know the plan of the ranks is handed it by their agent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from observing import report
from plant_support import Plant, spec

from pipemorph.control import JobController
from pipemorph.control.handed_in import read
from pipemorph.control.observed.reports import WrongAttempt
from pipemorph.errors import InputError
from pipemorph.wire import HandIn

JOB = spec(schedule={"inFlightLimit": 6})
Message = dict[str, Any]


def adapted(plant: Plant | None = None) -> tuple[Plant, Message]:
    """A job with a slow link, and its plan as the agent hands it in."""
    plant = plant or Plant(JOB)
    plant.run(4)
    plant.delays[1] = 0.06
    plant.run(8)
    directive = plant.controller.directive()
    assert directive is not None and plant.plan.version == directive.plan_version == 1
    message = HandIn(job="j", namespace="default", attempt=0, directive=directive)
    return plant, json.loads(message.body())


@pytest.fixture(scope="module")
def handed() -> Message:
    return adapted()[1]


def forgetful(plant: Plant) -> JobController:
    """A host that has taken over from one that saved nothing, after the first report to it."""
    made = JobController(JOB)
    plant.sequence += 1
    newer = report(plant.sequence, observed_plan_version=1, applied_plan_version=1)
    answer = made.report(newer, plant.now)
    assert answer.wants_plan and made.wants_plan
    return made


def bytes_of(message: Message) -> bytes:
    return json.dumps(message).encode()


def test_a_controller_goes_on_from_the_plan_it_is_handed() -> None:
    plant, message = adapted()
    before, plant.controller = plant.controller, forgetful(plant)
    plant.controller.hand_in(read(bytes_of(message), JOB), plant.now)
    assert plant.controller.wanted == before.wanted == plant.plan
    assert not plant.controller.wants_plan
    assert [(r.plan_version, r.reason) for r in plant.controller.records] == [
        (1, before.records[0].reason)
    ]
    plant.run(12)
    assert plant.plan.version == 1, "a needless change"
    plant.delays[1] = 0.0
    plant.run(20)
    assert (plant.plan.version, plant.plan.delegated) == (2, ())


def test_it_knows_what_the_plan_was_for() -> None:
    """The link recovers before the controller has seen it slow."""
    plant, message = adapted()
    plant.decides, plant.delays[1] = False, 0.0
    plant.run(20)
    plant.controller, plant.decides = forgetful(plant), True
    plant.controller.hand_in(read(bytes_of(message), JOB), plant.now)
    plant.run(4)
    assert (plant.plan.version, plant.plan.delegated) == (2, ())
    assert plant.controller.records[-1].reason.startswith("a link recovered")


def test_it_waits_for_the_plan_but_not_for_ever() -> None:
    plant, _ = adapted()
    plant.controller = forgetful(plant)
    began = plant.now
    while plant.now < began + 4.5:
        plant.step()
    assert plant.controller.wants_plan
    assert plant.controller.plan_version == 1
    plant.run(12)
    assert plant.plan.version == 2
    assert "does not know the plan in effect" in plant.controller.records[0].reason


def test_after_a_bad_plan_it_decides_without_knowing_it(handed: Message) -> None:
    plant, _ = adapted()
    plant.controller = forgetful(plant)
    plant.controller.refuse_plan()
    with pytest.raises(InputError, match="no other is wanted"):
        plant.controller.hand_in(read(bytes_of(handed), JOB), plant.now)
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
    def apply(message: Message) -> None:
        directive = message["directive"]
        directive["plan_version"] = directive["plan"]["version"] = number
        directive["record"]["plan_version"] = number

    return apply


PLAN = ("directive", "plan")
RECORD = ("directive", "record")


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (change("extra", to=1), "extra: Extra inputs"),
        (change(*PLAN, "version", to=2), "directive.plan.version is 2; expected 1"),
        (change(*RECORD, to=None), "directive.record is not that of plan v1"),
        (change(*RECORD, "plan_version", to=2), "directive.record is not that of plan v1"),
        (change(*RECORD, "detected_at", to=1e300), "directive.record.detected_at"),
        (change(*RECORD, "promised", to=float("inf")), "directive.record.promised"),
        (change(*RECORD, "warmup_after", to=[1] * 513), "has 513 items; expected at most 512"),
        (change(*RECORD, "links", 0, "link", to=3), "names a link of another job"),
        (change(*PLAN, "stages", to=["FIW"]), "directive.plan.stages has 1 items; expected 4"),
        (change(*PLAN, "routes", to=["direct"]), "directive.plan.routes has 1 items; expected 3"),
        (change(*PLAN, "microbatches", to=10**9), "has 1000000000 microbatches; expected 12"),
        (change(*PLAN, "policy", to="1f1b"), "policy is 1f1b; expected pipemorph"),
        (change(*PLAN, "stages", 2, to="FIW" * 11), "directive.plan: "),
        (change(*PLAN, "stages", 2, to="W" + "FI" * 12 + "W" * 11), "directive.plan: "),
        (change(*PLAN, "stages", 2, to="X" * 36), "stage 2, op 0 is 'X'"),
        (change(*PLAN, "in_flight_limits", to=[None] * 4), "stage 0 may hold all microbatches"),
        (change(*PLAN, "in_flight_limits", to=[7] * 4), "may hold 7 microbatches; the spec allows"),
        (change("records", to=[{"plan_version": 1}]), "records.0.kind: Field required"),
    ],
)  # fmt: skip
def test_a_bad_plan_is_refused_in_one_line(
    handed: Message, forge: Callable[[Message], None], words: str
) -> None:
    message = json.loads(json.dumps(handed))
    forge(message)
    with pytest.raises(InputError) as refused:
        read(bytes_of(message), JOB)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_plans_of_single_replicas_are_checked_too(handed: Message) -> None:
    message = json.loads(json.dumps(handed))
    plan = message["directive"]["plan"]
    plan["own"] = [{"replicas": [0], "plan": plan | {"own": [], "stages": ["FIW" * 11] * 4}}]
    with pytest.raises(InputError, match=r"directive\.plan"):
        read(bytes_of(message), JOB)
    plan["own"] = [{"replicas": [1], "plan": dict(plan) | {"own": []}}]
    with pytest.raises(InputError, match=r"replicas \[1\] are not some of 1"):
        read(bytes_of(message), JOB)


def test_a_delegated_link_is_refused_where_the_spec_has_none(handed: Message) -> None:
    message = json.loads(json.dumps(handed))
    message["directive"]["plan"]["routes"] = ["delegated"] * 3
    direct = spec(schedule={"inFlightLimit": 6}, transport={"route": "direct"})
    with pytest.raises(InputError, match=r"spec.transport.route is direct"):
        read(bytes_of(message), direct)


@pytest.mark.parametrize("other", [2, 9])
def test_the_plan_of_another_version_than_the_ranks_have_is_refused(
    handed: Message, other: int
) -> None:
    plant = Plant(JOB)
    controller = forgetful(plant)
    message = json.loads(json.dumps(handed))
    version(other)(message)
    with pytest.raises(InputError, match=f"plan v{other} is not v1, the newest that the ranks"):
        controller.hand_in(read(bytes_of(message), JOB), plant.now)
    assert controller.wanted.version == 0


def test_the_plan_of_another_attempt_is_refused(handed: Message) -> None:
    plant = Plant(JOB)
    controller = forgetful(plant)
    message = handed | {"attempt": 1}
    with pytest.raises(WrongAttempt, match="attempt 1 is not 0"):
        controller.hand_in(read(bytes_of(message), JOB), plant.now)
    assert controller.wants_plan, "the right one may still come"


def test_nobody_is_asked_for_a_plan_that_is_known() -> None:
    plant, message = adapted()
    with pytest.raises(InputError, match="plan v1 is in force here"):
        plant.controller.hand_in(read(bytes_of(message), JOB), plant.now)
    plant.run(1)
    assert not plant.controller.wants_plan
