"""Which split of the layers stages should have when one computes slowly."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from pipemorph.api.layout import Layout
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.layers import Beside, Split, propose_layers
from pipemorph.control.decide.relayout import Network, Proposal, Score
from pipemorph.control.observed.links import Health, LinkHealth
from pipemorph.planning import StageTimes

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
            LinkHealth(i, Health.HEALTHY, 0.0, wire_time=0.001) for i in range(len(factors) - 1)
        ),
        reductions=(),
        barrier=True,
        left=left,
    )


def seen(spec: JobSpec, *factors: float) -> Beside:
    beside = Beside(spec)
    beside.see(Layout.of(spec.parallelism), network(*factors).stages)
    return beside


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
    beside.see(moved, slow.stages)
    assert beside[1] == 0
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
    assert first is not None
    other = proposed(spec, layout, found, beside, without={first.layout.layers})
    assert other is not None and other.layout != first.layout


def test_memory_of_activations_scales_with_the_layers() -> None:
    spec = job(2, 8)
    limited = replace(
        network(1, 2),
        stages=tuple(
            each.model_copy(update={"in_flight_limit": 4, "activation_bytes": 1000})
            for each in network(1, 2).stages
        ),
    )
    beside = seen(spec, 1, 1)
    split = Split(spec, Layout.of(spec.parallelism), limited.stages, beside)
    more, fewer = split.stages((6, 2))
    assert (more.in_flight_limit, more.activation_bytes) == (2, 1500)
    assert (fewer.in_flight_limit, fewer.activation_bytes) == (8, 500)
