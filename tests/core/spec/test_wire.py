"""Messages between agent and ingest survive the way, and bound what a peer can claim."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observing import report
from pydantic import ValidationError
from schedule_text import schedule_of

from pipemorph.planning import Dispatch, Policy, Problem, Route, StageTimes, plan
from pipemorph.planning.ir import Plan
from pipemorph.protocol import (
    MOST_SLOW,
    Directive,
    DirectiveEnvelope,
    IterationSample,
    LinkHealthReport,
    PlanMessage,
    StageProfile,
)
from pipemorph.protocol.generation_messages import PodFailure


@given(
    st.integers(1, 6),
    st.integers(1, 12),
    st.sampled_from([Policy.GPIPE, Policy.ONE_F_ONE_B, Policy.ZERO_BUBBLE, Policy.PIPEMORPH]),
    st.sampled_from(list(Dispatch)),
)
def test_a_plan_survives_the_wire(
    stages: int, microbatches: int, policy: Policy, dispatch: Dispatch
) -> None:
    times = StageTimes(forward=1, backward_input=1, backward_weight=1)
    problem = Problem(
        microbatches=microbatches,
        stages=(times,) * stages,
        links=[{}] * (stages - 1),  # type: ignore[arg-type]
    )
    routes = [Route.DELEGATED if i % 2 else Route.DIRECT for i in range(stages - 1)]
    before = plan(problem, policy).to_plan(7, routes, dispatch)
    envelope = DirectiveEnvelope(
        directive=Directive(
            plan_version=7, issued_at=1.5, reason="r", plan=PlanMessage.from_plan(before)
        )
    )
    after = DirectiveEnvelope.model_validate_json(envelope.model_dump_json())
    assert after == envelope
    received = after.directive.plan.to_plan()
    assert received == before
    assert isinstance(received, Plan)


def test_device_limits_survive_the_wire_and_are_absent_without_offload() -> None:
    schedule = schedule_of(2, ["F0 F1 B0 W0 B1 W1", "F0 B0 W0 F1 B1 W1"])
    plan = Plan(
        version=3,
        policy=Policy.PIPEMORPH,
        schedule=schedule,
        routes=(Route.DIRECT,),
        in_flight_limits=(2, 1),
        device_limits=(1, None),
    )
    message = PlanMessage.from_plan(plan)
    assert message.device_limits == [1, None]
    assert PlanMessage.model_validate_json(message.model_dump_json()).to_plan() == plan
    assert message.recompute == []
    drops = replace(plan, recompute=(True, False))
    assert PlanMessage.from_plan(drops).to_plan() == drops
    assert (drops.offloading_stages, drops.recomputing_stages) == ((), (0,))
    assert not drops.runs_same_as(plan)
    without = replace(plan, device_limits=(None, None))
    assert PlanMessage.from_plan(without).device_limits == []
    assert PlanMessage.from_plan(without).to_plan() == without
    assert not without.offloads


@pytest.mark.parametrize(
    "changes",
    [
        {"surprise": 1},
        {"protocol": 1},
        {"directions": [{"link": 0, "health": "slow"}] * (MOST_SLOW + 1)},
        {"rails": {"surprise": 1}},
        {"iteration": 10**400},
        {"iteration": -1},
        {"observed_plan_version": 2**31},
        {"sent_at": float("nan")},
        {"sent_at": float("inf")},
        {"job": ""},
        {"job": "x" * 254},
        {"message": "x" * 1025},
    ],
)
def test_impossible_values_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        report(**changes)


def test_a_loss_that_is_not_a_number_does_not_cost_the_report() -> None:
    sample = IterationSample(
        index=0, seconds=1, loss=float("nan"), plan_version=0, bubble_fraction=0
    )
    sent = report(iterations=[sample]).model_dump_json()
    assert json.loads(sent)["iterations"][0]["loss"] == "NaN"
    assert LinkHealthReport.model_validate_json(sent).iterations[0].diverged
    null = sent.replace('"NaN"', "null")
    assert LinkHealthReport.model_validate_json(null).iterations[0].loss is None, "as agents said"


def test_a_profile_without_replica_is_of_the_first() -> None:
    profile = StageProfile(
        stage=1, forward=1, backward_input=1, backward_weight=0, split="fused", peak_memory=1
    )
    assert profile.replica == 0


EVIL = "a\r\ncompleted: 12 of 12\x1b[2J\x9b\u202e\u2028b"


def leaves(value: Any) -> list[str]:
    """Returns all texts in a message."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value
    return (
        [text for each in inner for text in leaves(each)] if isinstance(value, (dict, list)) else []
    )


def test_no_text_of_a_peer_adds_a_line_to_a_terminal() -> None:
    """Covers texts in reports, and in those of launchers."""
    port = {"stage": 0, "replica": 0, "device": EVIL, "port": 1, "state": EVIL, "what": EVIL}
    end = {"link": 0, "replica": 0, "direction": "forward", "agreed": "rdma", "fallbacks": 1}
    sent = report(
        message=EVIL,
        events=[{"iteration": 1, "text": EVIL}],
        rails={"health": "faulty", "faulty": [port]},
        transports={"links": [EVIL], "fallen": [end | {"transport": EVIL, "trouble": EVIL}]},
    )
    loss = {"reason": EVIL, "at": 1.0, "error": EVIL, "waits": [EVIL]}
    read = (sent, PodFailure.model_validate(loss))
    shown = [text for each in read for text in leaves(each.model_dump(mode="json"))]
    found = [text for text in shown if "completed" in text]
    assert len(found) == 11 and all(text.isprintable() for text in found), found
    assert report(message="two  spaces: \u00e9").message == "two  spaces: \u00e9"
