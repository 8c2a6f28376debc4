"""Which split of the layers stages should have when one computes slowly."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from pipemorph.api.layout import Layout
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.layouts.beside import Beside
from pipemorph.control.decide.layouts.layers import Split, propose_layers
from pipemorph.control.decide.layouts.relayout import Network, Proposal, Score
from pipemorph.planning import StageTimes
from pipemorph.wire import Health, LinkState

OP = 0.01


def job(stages: int, layers: int, **parallelism: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "parallelism": {"stages": stages, "layers": layers, **parallelism},
            "schedule": {"microbatches": 12},
            "trainer": {"module": "m", "iterations": 100},
            "failurePolicy": {"maxRestarts": 1},
            "adaptation": {"relayout": True},
        }
    )


def network(*factors: float, left: int = 100) -> Network:
    """Stages whose ops take so many times :data:`OP`."""
    return Network(
        stages=tuple(
            StageTimes(forward=f * OP, backward_input=f * OP, backward_weight=f * OP)
            for f in factors
        ),
        links=tuple(
            LinkState(i, Health.HEALTHY, 0.0, wire_time=0.001) for i in range(len(factors) - 1)
        ),
        reductions=(),
        barrier=True,
        left=left,
    )


def seen(spec: JobSpec, *factors: float) -> Beside:
    stages = network(*factors).stages
    return Beside(spec.parallelism.layers).seen(stages, spec.schedule.policy_kind)


def proposed(
    spec: JobSpec, layout: Layout, found: Network, beside: Beside, **options: Any
) -> Proposal | None:
    split = Split(spec, layout, found.stages, beside)
    return propose_layers(split, found, {}, 2.0, **options)


def best_of_all(spec: JobSpec, found: Network, beside: Beside) -> tuple[float, float]:
    """Predicted seconds of an iteration with the split of the beginning, and the least of all."""
    layout, layers = Layout.of(spec.parallelism), spec.parallelism.layers or 0
    split = Split(spec, layout, found.stages, beside)
    score = Score(spec, found, {}, layout, split.stages)
    splits = []
    for cuts in combinations(range(1, layers), spec.parallelism.stages - 1):
        ends = [0, *cuts, layers]
        splits.append([b - a for a, b in pairwise(ends)])
    return score.of(layout)[0], min(score.of(layout.with_layers(each))[0] for each in splits)


@pytest.mark.parametrize("slow", [0, 1, 3])
@pytest.mark.parametrize("layers", [8, 16])
def test_a_slow_device_gets_fewer_layers(slow: int, layers: int) -> None:
    """Nearly as good as the best of all splits, by the planner."""
    spec = job(4, layers)
    beside = seen(spec, 1, 1, 1, 1)
    found = network(*(1.5 if stage == slow else 1.0 for stage in range(4)))
    proposal = proposed(spec, Layout.of(spec.parallelism), found, beside)
    before, best = best_of_all(spec, found, beside)
    if proposal is None:
        assert layers == 8 and best > 0.98 * before
        return
    assert proposal.pays is (best < 0.98 * before)
    assert proposal.layout.layers[slow] < layers // 4
    assert proposal.before == before
    assert before - proposal.after >= 0.9 * (before - best)


def test_what_a_stage_does_beside_its_layers_stays_there() -> None:
    """The last stage has a head that takes as long as two layers, as measured before."""
    spec = job(4, 16)
    beside = seen(spec, 1, 1, 1, 1.5)
    assert beside[3] == pytest.approx(2.0)
    layout = Layout.of(spec.parallelism)
    stages = Split(spec, layout, network(1, 1, 1, 1.5).stages, beside).stages((4, 4, 5, 3))
    assert [each.forward / OP for each in stages] == pytest.approx([1, 1, 1.25, 1.25])
    # On a device that is twice as slow the head takes twice as long, too.
    slow = Split(spec, layout, network(1, 1, 1, 3).stages, beside)
    assert slow.each[3] == pytest.approx(2 * slow.each[0])
    assert slow.stages((5, 5, 5, 1))[3].forward / OP == pytest.approx(1.5)


def test_layers_go_back_when_the_device_is_well_again() -> None:
    spec = job(4, 16)
    beside = seen(spec, 1, 1, 1, 1)
    moved = Layout.of(spec.parallelism).with_layers((5, 3, 4, 4))
    # As slow as it was: this split is the best.
    slow = network(1.25, 1.5 * 0.75, 1, 1)
    assert proposed(spec, moved, slow, beside) is None
    back = proposed(spec, moved, network(1.25, 0.75, 1, 1), beside)
    assert back is not None and back.pays
    assert back.layout == Layout.of(spec.parallelism)


def test_a_change_has_to_pay_within_the_iterations_left() -> None:
    spec = job(4, 16)
    layout, beside = Layout.of(spec.parallelism), seen(spec, 1, 1, 1, 1)
    found = network(1, 1.5, 1, 1)
    assert proposed(spec, layout, found, beside).pays  # type: ignore[union-attr]
    assert not proposed(spec, layout, replace(found, left=4), beside).pays  # type: ignore[union-attr]
    assert proposed(spec, layout, network(1, 1, 1, 1), beside) is None


def test_a_split_that_failed_is_not_proposed_again() -> None:
    spec = job(4, 16)
    layout, beside = Layout.of(spec.parallelism), seen(spec, 1, 1, 1, 1)
    found = network(1, 1.5, 1, 1)
    first = proposed(spec, layout, found, beside)
    other = proposed(spec, layout, found, beside, without={first.layout.whole(16)})
    assert other is not None and other.layout != first.layout


@pytest.mark.parametrize(
    ("limits", "more", "fewer"),
    [
        ({"activationMemory": 4000}, 2, 8),
        ({"inFlightLimit": 4}, 4, 4),
        ({"inFlightLimit": 4, "activationMemory": 4000}, 2, 4),
    ],
)
def test_memory_in_bytes_scales_with_the_layers_and_a_stated_number_does_not(
    limits: dict[str, int], more: int, fewer: int
) -> None:
    """As in the plans after the move."""
    base = job(2, 8).model_dump(by_alias=True, exclude_unset=True, mode="json")
    spec = JobSpec.model_validate(base | {"schedule": {"microbatches": 12, **limits}})
    limited = tuple(
        each.model_copy(update={"in_flight_limit": 4, "activation_bytes": 1000})
        for each in network(1, 2).stages
    )
    split = Split(spec, Layout.of(spec.parallelism), limited, seen(spec, 1, 1))
    found = split.stages((6, 2))
    assert [each.in_flight_limit for each in found] == [more, fewer]
    assert [each.activation_bytes for each in found] == [1500, 500]


@pytest.mark.parametrize("memory", [8000, 1000])
def test_a_split_for_which_there_is_no_plan_is_not_proposed(memory: int) -> None:
    """Policy gpipe holds all microbatches; with more layers a stage has no room for them."""
    base = job(4, 16).model_dump(by_alias=True, exclude_unset=True, mode="json")
    policy = "gpipe" if memory == 8000 else "pipemorph"
    schedule = {"microbatches": 8, "policy": policy, "activationMemory": memory}
    spec = JobSpec.model_validate(base | {"schedule": schedule})
    found = network(1, 2, 1, 1)
    limits = {"in_flight_limit": memory // 1000, "activation_bytes": 1000}
    found = replace(found, stages=tuple(each.model_copy(update=limits) for each in found.stages))
    layout = Layout.of(spec.parallelism)
    assert proposed(spec, layout, found, seen(spec, 1, 1, 1, 1)) is None
