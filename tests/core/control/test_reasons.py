"""Text of a decision: in full for the record, and in one line for a terminal."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from gate import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from plant_support import Plant, spec

from pipemorph.control.decide import reasons
from pipemorph.control.decide.forecast import PlanOption
from pipemorph.control.decide.plan_choice import (
    AtBaselinePlan,
    Finding,
    FusedBackwardGain,
    GainTooSmall,
    MemoryLimitBinds,
    NetSaving,
    NoPlanFound,
    OffloadGain,
    PlanCheckFailed,
    PlanExceedsMemory,
    PlanProposal,
)
from pipemorph.control.job_state.stages import MemoryExcess
from pipemorph.planning import Dispatch, Plan, Policy, Route, Schedule
from pipemorph.protocol import Health, LinkState

CAUSES = ("slow", "worse", "eased", "varies", "recovered", "steady", "profile", "memory", "restart")


def plan(warmup: tuple[int, ...], delegated: tuple[int, ...] = ()) -> Plan:
    routes = tuple(
        Route.DELEGATED if i in delegated else Route.DIRECT for i in range(len(warmup) - 1)
    )
    none = (None,) * len(warmup)
    return Plan(0, Policy.PIPEMORPH, Schedule(1, ((),) * len(warmup)), routes, none, warmup=warmup)


def slow(link: int = 0, delay: float = 0.0065, confidence: float = 0.96) -> LinkState:
    return LinkState(link, Health.SLOW, delay=delay, confidence=confidence)


def proposal(
    chosen: Plan | None, *found: Finding, before: float | None = 1.198, after: float = 1.069
) -> PlanProposal:
    current = None if before is None else PlanOption(plan((4, 3, 2, 1)), before)
    return PlanProposal(None if chosen is None else PlanOption(chosen, after), current, found)


GAIN = NetSaving(seconds=4.644, iterations=36, change_cost=0.2995, cost_measured=False)
DEMO = proposal(plan((16, 9, 4, 1)), GAIN)


def test_a_change_in_full_and_in_short() -> None:
    assert reasons.explain_decision("slow", [slow()], DEMO) == (
        "link 0 is slow by 6.5 ms one way (forward, 96% sure); predicted per iteration 1.198 s with"
        " the current plan, 1.069 s with warm-up 16-9-4-1 and all links direct; it would save"
        " 4.644 s over the 36 remaining iterations, a change is assumed to cost 299.5 ms"
    )
    line = reasons.summarize_change(1, "slow", [slow()], DEMO)
    assert line == (
        "plan v1: link 0 +6.5 ms | predicted 1.198 -> 1.069 s/it (-11%) | warm-up 16-9-4-1, direct"
        " | gain 4.3 s / 36 it"
    )
    assert len(line) == reasons.SUMMARY_COLUMNS


def test_another_dispatch_is_named() -> None:
    """Change from one dispatch to another, in both forms."""
    chosen = replace(plan((6, 4, 2, 1), (0,)), dispatch=Dispatch.GUIDED)
    made = proposal(chosen)
    full = reasons.explain_decision("slow", [slow()], made)
    assert full.endswith("1.069 s with warm-up 6-4-2-1 and link 0 delegated, guided dispatch")
    assert reasons.summarize_change(3, "slow", [slow()], made) == (
        "plan v3: link 0 +6.5 ms | 1.198 -> 1.069 s/it (-11%) | warm-up 6-4-2-1, link 0 delegated,"
        " guided dispatch"
    )
    again = replace(made, current=PlanOption(chosen, 1.198))
    assert "dispatch" not in reasons.explain_decision("worse", [slow()], again)
    assert "dispatch" not in reasons.summarize_change(4, "worse", [slow()], again)


@pytest.mark.parametrize(
    ("cause", "links", "made", "expected"),
    [
        (
            "recovered",
            [],
            proposal(plan((7, 5, 3, 1))),
            "plan v2: links recovered | predicted 1.198 -> 1.069 s/it (-11%) | warm-up 7-5-3-1,"
            " direct",
        ),
        (
            "restart",
            [slow()],
            proposal(plan((2, 1), (0,)), before=None),
            "plan v2: unknown plan in effect | predicted 1.069 s/it | warm-up 2-1, link 0"
            " delegated",
        ),
        (
            "worse",
            [slow(2, 0.060), slow(5, 0.010), slow(6, 0.020)],
            proposal(plan(tuple(range(16, 0, -1)), (2, 5, 6)), GAIN),
            "plan v2: link 2 +60.0 ms and 2 more | 1.198 -> 1.069 s/it | warm-up 16-15-…-1,"
            " 3 links delegated | gain 4.3 s",
        ),
        (
            "worse",
            [slow(2, 0.0583)],
            proposal(
                replace(plan((12, 11, 10, 1), (2,)), dispatch=Dispatch.GUIDED), GAIN, before=0.877
            ),
            # The gain matters more than the dispatch.
            "plan v2: link 2 +58.3 ms | 0.877 -> 1.069 s/it | warm-up 12-11-10-1, 1 link delegated"
            " | gain 4.3 s",
        ),
        (
            "memory",
            [],
            proposal(plan((2, 1)), before=1.0, after=1.25),
            "plan v2: too little memory | predicted 1.000 -> 1.250 s/it (+25%) | warm-up 2-1,"
            " direct",
        ),
    ],
)
def test_short_lines(cause: Any, links: list[LinkState], made: PlanProposal, expected: str) -> None:
    assert reasons.summarize_change(2, cause, links, made) == expected


@given(st.randoms(use_true_random=False), st.sampled_from(CAUSES))
@settings(max_examples=examples(60), deadline=None)
def test_no_change_is_longer_than_a_line(rng: random.Random, cause: Any) -> None:
    stages = rng.choice([2, 4, 8, 9, 64, 256])
    some = [i for i in range(stages - 1) if rng.random() < 0.5]
    made = proposal(
        plan(tuple(rng.randint(1, 512) for _ in range(stages)), tuple(some)),
        NetSaving(
            10 ** rng.uniform(-3, 7),
            rng.choice([None, rng.randint(1, 10**6)]),
            10 ** rng.uniform(-3, 3),
            True,
        ),
        before=rng.choice([None, 10 ** rng.uniform(-4, 4)]),
        after=10 ** rng.uniform(-4, 4),
    )
    links = [slow(i, 10 ** rng.uniform(-4, 2), rng.random()) for i in some]
    version = rng.randint(1, 10**5)
    line = reasons.summarize_change(version, cause, links, made)
    assert len(line) <= reasons.SUMMARY_COLUMNS
    assert line.startswith(f"plan v{version}: ")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (NoPlanFound("by a delay"), "no plan was found: by a delay"),
        (PlanCheckFailed("no F"), "the new plan fails its check: no F"),
        (
            PlanCheckFailed(MemoryExcess(1, 3, 2, "hostMemory")),
            "the new plan fails its check: stage 1 has 3 microbatches in host memory, hostMemory"
            " has room for 2",
        ),
        (
            PlanExceedsMemory(MemoryExcess(0, 3, 2, "activationMemory")),
            "the current plan must be replaced: stage 0 holds 3 microbatches, activationMemory has"
            " room for 2",
        ),
        (AtBaselinePlan(), "the plan stays: it is the one for healthy links"),
        (
            GainTooSmall(0.5, -0.01, 0.05),
            "the plan stays, predicted 500.0 ms per iteration: the best other one saves 0.0%, less"
            " than minGain 5.0%",
        ),
        (
            NetSaving(0.1, -2, 0.2, True),
            "the plan stays: the best other one would save 100.0 ms over the 0 remaining"
            " iterations, a"
            " change has cost 200.0 ms",
        ),
        (
            NetSaving(0.1, None, 0.2, True),
            "it would save 100.0 ms per iteration, a change has cost 200.0 ms",
        ),
        (
            NetSaving(-0.1, None, 0.2, False),
            "the plan stays: the best other one would save 0.0 ms per iteration, a change is"
            " assumed to cost 200.0 ms",
        ),
        (
            OffloadGain((0, 1), 0.002, None),
            "offload on stages 0, 1 costs 2.0 ms per copied microbatch and is needed to have"
            " a plan",
        ),
        (
            OffloadGain((0,), 0.002, 0.0),
            "offload on stage 0 costs 2.0 ms per copied microbatch and saves nothing",
        ),
        (
            FusedBackwardGain((2,), 0.01),
            "a fused backward on stage 2 makes the best new plan 10.0 ms shorter",
        ),
        (
            MemoryLimitBinds((0, 1, 2), 4, 7),
            "activationMemory has room for 4 to 7 microbatches on stages 0-2",
        ),
    ],
)
def test_every_finding_has_a_sentence(found: Finding, expected: str) -> None:
    said = reasons.explain_decision("profile", [], proposal(None, found))
    assert said == f"op times or wire times differ from the planned ones; {expected}"


@pytest.mark.parametrize(
    ("stages", "expected"),
    [([2], "stage 2"), ([0, 1], "stages 0, 1"), ([0, 1, 2, 5, 7, 8, 9], "stages 0-2, 5, 7-9")],
)
def test_stages_in_a_sentence(stages: list[int], expected: str) -> None:
    assert reasons.format_stages(stages) == expected


def test_a_decision_carries_both() -> None:
    plant = Plant(spec())
    plant.run(6)
    plant.delays[0] = 0.060
    plant.run(4)
    record, decision = plant.only(), plant.controller.decisions[-1]
    assert decision.reason == record.reason
    assert decision.line.startswith("plan v1: link 0 ")
    assert "link 0 delegated" in decision.line
    assert len(decision.line) <= reasons.SUMMARY_COLUMNS


def test_a_link_that_may_be_well_again_is_not_called_slow_by_nothing() -> None:
    """The cause is another link; this one is in a pause, and its delay is unknown."""
    paused = replace(slow(1, 0.0, 0.001), in_doubt=True)
    text = reasons.explain_decision("slow", [slow(), paused], DEMO)
    assert text.startswith(
        "link 0 is slow by 6.5 ms one way (forward, 96% sure), link 1 was slow and may be healthy"
        " again (forward); predicted"
    )
    surely = replace(slow(1, 0.03, 0.9), in_doubt=True)
    text = reasons.explain_decision("slow", [slow(0, 0.0065, 0.996), surely], DEMO)
    assert "(forward, 99% sure), link 1 is slow by 30.0 ms one way (forward, in doubt)" in text
    certain = reasons.explain_decision("slow", [slow(confidence=1.0)], DEMO)
    assert "(forward, over 99% sure)" in certain
