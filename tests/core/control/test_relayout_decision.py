"""Places that ranks should have when a wire is late."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from pipemorph.control.decide.layouts.layout_search import (
    NetworkMeasurements,
    WireDelays,
    propose_places,
)
from pipemorph.planning import StageTimes
from pipemorph.protocol import Health, LinkState, ReductionHealth, SlowestEdge
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.layout import Layout

OP = 0.01
LATE = 0.03


def job(stages: int, replicas: int, **parallelism: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "parallelism": {"stages": stages, "replicas": replicas, **parallelism},
            "schedule": {"microbatches": 12},
            "trainer": {"module": "m", "iterations": 100},
            "failurePolicy": {"maxRestarts": 1},
            "adaptation": {"relayout": True},
        }
    )


def network(spec: JobSpec, slow: dict[int, int], **links: Health) -> NetworkMeasurements:
    """``slow``: by stage, the edge of its ring that is late. A step is on each edge 50 times."""
    stages = spec.parallelism.stages
    return NetworkMeasurements(
        stages=(StageTimes(forward=OP, backward_input=OP, backward_weight=OP),) * stages,
        links=tuple(
            LinkState(i, links.get(f"link{i}", Health.HEALTHY), LATE, wire_time=0.001)
            for i in range(stages - 1)
        ),
        reductions=tuple(
            ReductionHealth(
                stage=stage,
                replica=0,
                where="",
                slow=stage in slow,
                seconds=0.01 + 50 * LATE * (stage in slow),
                normal=0.01,
                exposed=0.005 + 50 * LATE * (stage in slow),
                bytes=1 << 20,
                slowest=SlowestEdge(slow.get(stage, 0), LATE * (stage in slow) + 0.001, 0.001),
            )
            for stage in range(stages)
        ),
        barrier=True,
        iterations_remaining=100,
    )


def test_a_late_edge_of_a_ring_of_four_is_avoided() -> None:
    spec = job(4, 4)
    layout, seen = Layout.from_parallelism(spec.parallelism), WireDelays(spec.adaptation)
    found = network(spec, {1: 2})
    seen.update_from(layout, found)
    # Ranks 4 to 7 have stage 1.
    assert seen.late_seconds == {(6, 7): pytest.approx(LATE)}
    proposal = propose_places(spec, layout, found, seen.late_seconds, 5.0)
    assert proposal is not None and proposal.pays_off
    assert proposal.seconds_before == pytest.approx(proposal.seconds_after + 50 * LATE, rel=0.1)
    for ring in layout.rings:
        assert (6, 7) not in proposal.layout.find_ring_wires(ring)
    # A single exchange of places is enough.
    assert len(layout.find_moved_ranks(proposal.layout)) == 2


def test_a_wire_that_all_rings_need_goes_between_two_stages() -> None:
    """Pods of four ranks have one pipeline each, so every ring crosses."""
    spec = job(4, 2, order=["dp_replicate", "pp"], ranksPerPod=4)
    layout, seen = Layout.from_parallelism(spec.parallelism), WireDelays(spec.adaptation)
    found = network(spec, dict.fromkeys(range(4), 0))
    seen.update_from(layout, found)
    assert seen.late_seconds == {(0, 1): pytest.approx(LATE)}
    proposal = propose_places(spec, layout, found, seen.late_seconds, 5.0)
    assert proposal is not None and proposal.pays_off
    moved = proposal.layout
    assert all(set(moved.find_ring_wires(ring)) <= {(0, 0), (1, 1)} for ring in moved.rings)
    crossing = [
        link for link in range(3) for column in range(2) if moved.find_link_wire(link, column)[1]
    ]
    assert crossing.count(0) <= 2
    assert proposal.seconds_after < 1.15 * (proposal.seconds_before - 50 * LATE)


def test_a_change_has_to_pay_within_the_remaining_iterations() -> None:
    spec = job(2, 2)
    layout, seen = Layout.from_parallelism(spec.parallelism), WireDelays(spec.adaptation)
    found = network(spec, {0: 0})
    seen.update_from(layout, found)
    assert propose_places(spec, layout, found, seen.late_seconds, 5.0).pays_off  # type: ignore[union-attr]
    last = replace(found, iterations_remaining=2)
    assert not propose_places(spec, layout, last, seen.late_seconds, 5.0).pays_off  # type: ignore[union-attr]
    # Links are not late: there is nothing to gain.
    assert propose_places(spec, layout, network(spec, {}), {}, 0.0) is None


def test_ranks_go_back_when_that_pays() -> None:
    """The wire is well again, and another one, of the new places, is late."""
    spec = job(2, 2)
    first = Layout.from_parallelism(spec.parallelism)
    layout = first.swap_places(1, 2)
    found = propose_places(spec, layout, network(spec, {0: 0}), {(0, 2): LATE}, 1.0)
    assert found is not None and found.pays_off
    assert (0, 2) not in [
        wire for ring in found.layout.rings for wire in found.layout.find_ring_wires(ring)
    ]
    # Links are well: another layout would save nothing.
    assert propose_places(spec, layout, network(spec, {}), {}, 0.0) is None


def test_evidence_belongs_to_wires() -> None:
    spec = job(2, 2)
    layout, seen = Layout.from_parallelism(spec.parallelism), WireDelays(spec.adaptation)
    found = network(spec, {0: 0})
    early = tuple(replace(each, slow=False) for each in found.reductions)
    seen.update_from(layout, replace(found, reductions=early))
    assert seen.lacks_measurements(layout, found) and not seen.late_seconds
    seen.update_from(layout, found)
    assert not seen.lacks_measurements(layout, found)
    assert set(seen.late_seconds) == {(0, 1)}
    # Ranks 1 and 2 have changed places: the late wire is that of the link of replica 0.
    moved = layout.swap_places(1, 2)
    seen.update_from(moved, network(spec, {}, link0=Health.SLOW))
    assert set(seen.late_seconds) == {(0, 1)}
    seen.update_from(moved, network(spec, {}, link0=Health.UNKNOWN))
    assert set(seen.late_seconds) == {(0, 1)}
    seen.update_from(moved, network(spec, {}))
    assert seen.late_seconds == {}


def test_a_link_that_is_well_does_not_speak_for_a_ring_on_its_wire() -> None:
    spec = job(2, 2, ranksPerPod=2)
    layout, seen = (
        Layout.from_parallelism(spec.parallelism).read_places("[0, 2, 3, 1]"),
        WireDelays(spec.adaptation),
    )
    assert layout.find_link_wire(0, 0) == next(layout.find_ring_wires(layout.rings[0])) == (0, 1)
    seen.update_from(layout, network(spec, {0: 0}))
    assert seen.late_seconds == {(0, 1): pytest.approx(LATE)}


def measured(
    spec: JobSpec, at: int, seconds: float, usual: float = 0.001, **group: Any
) -> NetworkMeasurements:
    """Measurements in which the ring of stage 0 alone is slow."""
    found = network(spec, {0: at})
    edge = SlowestEdge(at, seconds, usual)
    slow, *rest = found.reductions
    return replace(found, reductions=(replace(slow, slowest=edge, **group), *rest))


def test_a_decision_waits_until_all_rings_are_measured() -> None:
    """Rings are not all measured in the first iterations at other places."""
    spec = job(2, 2)
    layout, seen = Layout.from_parallelism(spec.parallelism), WireDelays(spec.adaptation)
    found = network(spec, {})
    seen.update_from(layout, found)
    assert not seen.lacks_measurements(layout, found)
    assert seen.lacks_measurements(layout, replace(found, reductions=()))
    one, other = found.reductions
    assert seen.lacks_measurements(layout, replace(found, reductions=(one,)))
    assert seen.lacks_measurements(
        layout, replace(found, reductions=(one, replace(other, slowest=None)))
    )


def test_an_edge_that_costs_nothing_is_not_waited_for_for_long() -> None:
    spec = job(2, 4)
    layout, seen = Layout.from_parallelism(spec.parallelism), WireDelays(spec.adaptation)
    doubtful = measured(spec, 0, 0.03, slow=False)
    for remaining in (100, 85):
        seen.update_from(layout, replace(doubtful, iterations_remaining=remaining))
        assert seen.lacks_measurements(layout, replace(doubtful, iterations_remaining=remaining))
    seen.update_from(layout, replace(doubtful, iterations_remaining=84))
    assert not seen.lacks_measurements(layout, replace(doubtful, iterations_remaining=84))
    assert seen.late_seconds == {}
    # The edge of another slow group is known meanwhile.
    slow = network(spec, {1: 2})
    last = replace(doubtful, iterations_remaining=83)
    seen.update_from(layout, replace(last, reductions=(doubtful.reductions[0], slow.reductions[1])))
    assert set(seen.late_seconds) == {(6, 7)}


def test_one_ring_may_have_several_late_wires() -> None:
    spec = job(2, 4)
    layout, seen = Layout.from_parallelism(spec.parallelism), WireDelays(spec.adaptation)
    seen.update_from(layout, measured(spec, 0, 0.031))
    seen.update_from(layout, measured(spec, 2, 0.051))
    assert seen.late_seconds == {(0, 1): pytest.approx(0.03), (2, 3): pytest.approx(0.05)}
    # No other edge is later than the slowest one.
    seen.update_from(layout, measured(spec, 2, 0.021))
    assert seen.late_seconds == {(0, 1): pytest.approx(0.02), (2, 3): pytest.approx(0.02)}
    seen.update_from(layout, measured(spec, 0, 0.001))
    assert seen.late_seconds == {}


def test_a_late_wire_does_not_become_usual_in_a_new_generation() -> None:
    """The usual time in a ring of two is the median of the edges."""
    spec = job(2, 2)
    layout, seen = Layout.from_parallelism(spec.parallelism), WireDelays(spec.adaptation)
    seen.update_from(layout, measured(spec, 0, 0.031))
    seen.update_from(layout, measured(spec, 0, 0.031, usual=0.031, slow=False))
    assert seen.late_seconds == {(0, 1): pytest.approx(0.03)}


def test_a_link_becomes_less_late() -> None:
    spec = job(3, 2, ranksPerPod=2)
    layout, seen = Layout.from_parallelism(spec.parallelism), WireDelays(spec.adaptation)
    found = network(spec, {}, link0=Health.SLOW)
    seen.update_from(layout, found)
    assert seen.late_seconds == {(0, 1): pytest.approx(LATE)}
    links = (replace(found.links[0], delay=0.012), found.links[1])
    seen.update_from(layout, replace(found, links=links))
    assert seen.late_seconds == {(0, 1): pytest.approx(0.012)}


def test_a_search_ends_in_time() -> None:
    spec = job(4, 128)
    layout, seen = Layout.from_parallelism(spec.parallelism), WireDelays(spec.adaptation)
    found = network(spec, {1: 2})
    seen.update_from(layout, found)
    began = time.monotonic()
    assert propose_places(spec, layout, found, seen.late_seconds, 5.0, seconds=0.2) is not None
    # Longer only by the first steps: each start, and its first exchange.
    assert time.monotonic() - began < 4.0
