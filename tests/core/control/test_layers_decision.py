"""Split of the layers that stages should have when one computes slowly."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from pipemorph.control.decide.layouts.layer_split import LayerSplit, propose_layer_split
from pipemorph.control.decide.layouts.layout_search import (
    LayoutProposal,
    LayoutScorer,
    NetworkMeasurements,
)
from pipemorph.control.decide.layouts.stage_overhead import StageOverhead
from pipemorph.planning import StageTimes
from pipemorph.protocol import Health, LinkState
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.layout import Layout

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


def network(*factors: float, remaining: int = 100) -> NetworkMeasurements:
    """Measurements of stages whose ops take ``factors`` times :data:`OP`."""
    return NetworkMeasurements(
        stages=tuple(
            StageTimes(forward=f * OP, backward_input=f * OP, backward_weight=f * OP)
            for f in factors
        ),
        links=tuple(
            LinkState(i, Health.HEALTHY, 0.0, wire_time=0.001) for i in range(len(factors) - 1)
        ),
        reductions=(),
        barrier=True,
        iterations_remaining=remaining,
    )


def seen(spec: JobSpec, *factors: float) -> StageOverhead:
    stages = network(*factors).stages
    return StageOverhead(spec.parallelism.layers).with_measured_times(
        stages, spec.schedule.policy_kind
    )


def proposed(
    spec: JobSpec, layout: Layout, found: NetworkMeasurements, extra: StageOverhead, **options: Any
) -> LayoutProposal | None:
    split = LayerSplit(spec, layout, found.stages, extra)
    return propose_layer_split(split, found, {}, 2.0, **options)


def best_of_all(
    spec: JobSpec, found: NetworkMeasurements, overhead: StageOverhead
) -> tuple[float, float]:
    """Predicted seconds of an iteration with the split of the beginning, and the least of all."""
    layout, layers = Layout.from_parallelism(spec.parallelism), spec.parallelism.layers or 0
    split = LayerSplit(spec, layout, found.stages, overhead)
    score = LayoutScorer(spec, found, {}, layout, split.stage_times_with)
    splits = []
    for cuts in combinations(range(1, layers), spec.parallelism.stages - 1):
        ends = [0, *cuts, layers]
        splits.append([b - a for a, b in pairwise(ends)])
    return score.score_layout(layout)[0], min(
        score.score_layout(layout.with_layers(each))[0] for each in splits
    )


@pytest.mark.parametrize("slow", [0, 1, 3])
@pytest.mark.parametrize("layers", [8, 16])
def test_a_slow_device_gets_fewer_layers(slow: int, layers: int) -> None:
    """Nearly as good as the best of all splits, by the planner."""
    spec = job(4, layers)
    overhead = seen(spec, 1, 1, 1, 1)
    found = network(*(1.5 if stage == slow else 1.0 for stage in range(4)))
    proposal = proposed(spec, Layout.from_parallelism(spec.parallelism), found, overhead)
    before, best = best_of_all(spec, found, overhead)
    if proposal is None:
        assert layers == 8 and best > 0.98 * before
        return
    assert proposal.pays_off is (best < 0.98 * before)
    assert proposal.layout.layers[slow] < layers // 4
    assert proposal.seconds_before == before
    assert before - proposal.seconds_after >= 0.9 * (before - best)


def test_overhead_of_a_stage_stays_there() -> None:
    """The last stage has a head that takes as long as two layers, as measured before."""
    spec = job(4, 16)
    overhead = seen(spec, 1, 1, 1, 1.5)
    assert overhead[3] == pytest.approx(2.0)
    layout = Layout.from_parallelism(spec.parallelism)
    stages = LayerSplit(spec, layout, network(1, 1, 1, 1.5).stages, overhead).stage_times_with(
        (4, 4, 5, 3)
    )
    assert [each.forward / OP for each in stages] == pytest.approx([1, 1, 1.25, 1.25])
    # On a device that is twice as slow the head takes twice as long, too.
    slow = LayerSplit(spec, layout, network(1, 1, 1, 3).stages, overhead)
    assert slow.layer_seconds[3] == pytest.approx(2 * slow.layer_seconds[0])
    assert slow.stage_times_with((5, 5, 5, 1))[3].forward / OP == pytest.approx(1.5)


def test_layers_go_back_when_the_device_is_well_again() -> None:
    spec = job(4, 16)
    overhead = seen(spec, 1, 1, 1, 1)
    moved = Layout.from_parallelism(spec.parallelism).with_layers((5, 3, 4, 4))
    # The stage is as slow as it was: this split is the best.
    slow = network(1.25, 1.5 * 0.75, 1, 1)
    assert proposed(spec, moved, slow, overhead) is None
    back = proposed(spec, moved, network(1.25, 0.75, 1, 1), overhead)
    assert back is not None and back.pays_off
    assert back.layout == Layout.from_parallelism(spec.parallelism)


def test_a_change_has_to_pay_within_the_remaining_iterations() -> None:
    spec = job(4, 16)
    layout, overhead = Layout.from_parallelism(spec.parallelism), seen(spec, 1, 1, 1, 1)
    found = network(1, 1.5, 1, 1)
    assert proposed(spec, layout, found, overhead).pays_off  # type: ignore[union-attr]
    assert not proposed(spec, layout, replace(found, iterations_remaining=4), overhead).pays_off  # type: ignore[union-attr]
    assert proposed(spec, layout, network(1, 1, 1, 1), overhead) is None


def test_a_split_that_failed_is_not_proposed_again() -> None:
    spec = job(4, 16)
    layout, overhead = Layout.from_parallelism(spec.parallelism), seen(spec, 1, 1, 1, 1)
    found = network(1, 1.5, 1, 1)
    first = proposed(spec, layout, found, overhead)
    other = proposed(spec, layout, found, overhead, without={first.layout.to_explicit_layout(16)})
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
    """Memory scales as in the plans after the move."""
    base = job(2, 8).model_dump(by_alias=True, exclude_unset=True, mode="json")
    spec = JobSpec.model_validate(base | {"schedule": {"microbatches": 12, **limits}})
    limited = tuple(
        each.model_copy(update={"in_flight_limit": 4, "activation_bytes": 1000})
        for each in network(1, 2).stages
    )
    split = LayerSplit(spec, Layout.from_parallelism(spec.parallelism), limited, seen(spec, 1, 1))
    found = split.stage_times_with((6, 2))
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
    layout = Layout.from_parallelism(spec.parallelism)
    assert proposed(spec, layout, found, seen(spec, 1, 1, 1, 1)) is None
