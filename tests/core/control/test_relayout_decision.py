"""Which places ranks should have when a wire is late."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from pipemorph.api.layout import Layout
from pipemorph.api.spec import JobSpec
from pipemorph.control.decide.layouts.relayout import Network, Wires, propose
from pipemorph.planning import StageTimes
from pipemorph.wire import Health, LinkState, ReductionHealth, SlowestEdge

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


def network(spec: JobSpec, slow: dict[int, int], **links: Health) -> Network:
    """``slow``: by stage, the edge of its ring that is late. A step is on each edge 50 times."""
    stages = spec.parallelism.stages
    return Network(
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
        left=100,
    )


def test_a_late_edge_of_a_ring_of_four_is_avoided() -> None:
    spec = job(4, 4)
    layout, seen = Layout.of(spec.parallelism), Wires(spec.adaptation)
    found = network(spec, {1: 2})
    seen.see(layout, found)
    # Ranks 4 to 7 have stage 1.
    assert seen.late == {(6, 7): pytest.approx(LATE)}
    proposal = propose(spec, layout, found, seen.late, 5.0)
    assert proposal is not None and proposal.pays
    assert proposal.before == pytest.approx(proposal.after + 50 * LATE, rel=0.1)
    for ring in layout.rings:
        assert (6, 7) not in proposal.layout.edges(ring)
    # One exchange of places is enough.
    assert len(layout.moved(proposal.layout)) == 2


def test_a_wire_that_all_rings_need_goes_between_two_stages() -> None:
    """Two pods of four ranks: each has one pipeline, so every ring crosses."""
    spec = job(4, 2, order=["dp_replicate", "pp"], ranksPerPod=4)
    layout, seen = Layout.of(spec.parallelism), Wires(spec.adaptation)
    found = network(spec, dict.fromkeys(range(4), 0))
    seen.see(layout, found)
    assert seen.late == {(0, 1): pytest.approx(LATE)}
    proposal = propose(spec, layout, found, seen.late, 5.0)
    assert proposal is not None and proposal.pays
    moved = proposal.layout
    assert all(set(moved.edges(ring)) <= {(0, 0), (1, 1)} for ring in moved.rings)
    crossing = [link for link in range(3) for column in range(2) if moved.link(link, column)[1]]
    assert crossing.count(0) <= 2
    assert proposal.after < 1.15 * (proposal.before - 50 * LATE)


def test_a_change_has_to_pay_within_the_iterations_left() -> None:
    spec = job(2, 2)
    layout, seen = Layout.of(spec.parallelism), Wires(spec.adaptation)
    found = network(spec, {0: 0})
    seen.see(layout, found)
    assert propose(spec, layout, found, seen.late, 5.0).pays  # type: ignore[union-attr]
    last = replace(found, left=2)
    assert not propose(spec, layout, last, seen.late, 5.0).pays  # type: ignore[union-attr]
    # Nothing is late: there is nothing to gain.
    assert propose(spec, layout, network(spec, {}), {}, 0.0) is None


def test_ranks_go_back_when_that_pays() -> None:
    """The wire is well again, and another one, of the new places, is late."""
    spec = job(2, 2)
    first = Layout.of(spec.parallelism)
    layout = first.swapped(1, 2)
    found = propose(spec, layout, network(spec, {0: 0}), {(0, 2): LATE}, 1.0)
    assert found is not None and found.pays
    assert (0, 2) not in [wire for ring in found.layout.rings for wire in found.layout.edges(ring)]
    # All is well: another layout would save nothing.
    assert propose(spec, layout, network(spec, {}), {}, 0.0) is None


def test_evidence_belongs_to_wires() -> None:
    spec = job(2, 2)
    layout, seen = Layout.of(spec.parallelism), Wires(spec.adaptation)
    found = network(spec, {0: 0})
    early = tuple(replace(each, slow=False) for each in found.reductions)
    seen.see(layout, replace(found, reductions=early))
    assert seen.waits(layout, found) and not seen.late
    seen.see(layout, found)
    assert not seen.waits(layout, found)
    assert set(seen.late) == {(0, 1)}
    # Ranks 1 and 2 have changed places: the late wire is that of the link of replica 0.
    moved = layout.swapped(1, 2)
    seen.see(moved, network(spec, {}, link0=Health.SLOW))
    assert set(seen.late) == {(0, 1)}
    seen.see(moved, network(spec, {}, link0=Health.UNKNOWN))
    assert set(seen.late) == {(0, 1)}
    seen.see(moved, network(spec, {}))
    assert seen.late == {}


def test_a_link_that_is_well_does_not_speak_for_a_ring_on_its_wire() -> None:
    spec = job(2, 2, ranksPerPod=2)
    layout, seen = Layout.of(spec.parallelism).read("[0, 2, 3, 1]"), Wires(spec.adaptation)
    assert layout.link(0, 0) == next(layout.edges(layout.rings[0])) == (0, 1)
    seen.see(layout, network(spec, {0: 0}))
    assert seen.late == {(0, 1): pytest.approx(LATE)}


def measured(spec: JobSpec, at: int, seconds: float, usual: float = 0.001, **group: Any) -> Network:
    """Only stage 0 has a ring that is slow."""
    found = network(spec, {0: at})
    edge = SlowestEdge(at, seconds, usual)
    slow, *rest = found.reductions
    return replace(found, reductions=(replace(slow, slowest=edge, **group), *rest))


def test_a_decision_waits_until_all_rings_are_measured() -> None:
    """As in the first iterations at other places."""
    spec = job(2, 2)
    layout, seen = Layout.of(spec.parallelism), Wires(spec.adaptation)
    found = network(spec, {})
    seen.see(layout, found)
    assert not seen.waits(layout, found)
    assert seen.waits(layout, replace(found, reductions=()))
    one, other = found.reductions
    assert seen.waits(layout, replace(found, reductions=(one,)))
    assert seen.waits(layout, replace(found, reductions=(one, replace(other, slowest=None))))


def test_an_edge_that_costs_nothing_is_not_waited_for_for_long() -> None:
    spec = job(2, 4)
    layout, seen = Layout.of(spec.parallelism), Wires(spec.adaptation)
    doubtful = measured(spec, 0, 0.03, slow=False)
    for left in (100, 85):
        seen.see(layout, replace(doubtful, left=left))
        assert seen.waits(layout, replace(doubtful, left=left))
    seen.see(layout, replace(doubtful, left=84))
    assert not seen.waits(layout, replace(doubtful, left=84))
    assert seen.late == {}
    # Of another group that is slow, the edge is known meanwhile.
    slow = network(spec, {1: 2})
    seen.see(
        layout, replace(doubtful, left=83, reductions=(doubtful.reductions[0], slow.reductions[1]))
    )
    assert set(seen.late) == {(6, 7)}


def test_one_ring_may_have_several_late_wires() -> None:
    spec = job(2, 4)
    layout, seen = Layout.of(spec.parallelism), Wires(spec.adaptation)
    seen.see(layout, measured(spec, 0, 0.031))
    seen.see(layout, measured(spec, 2, 0.051))
    assert seen.late == {(0, 1): pytest.approx(0.03), (2, 3): pytest.approx(0.05)}
    # No other edge is later than the slowest one.
    seen.see(layout, measured(spec, 2, 0.021))
    assert seen.late == {(0, 1): pytest.approx(0.02), (2, 3): pytest.approx(0.02)}
    seen.see(layout, measured(spec, 0, 0.001))
    assert seen.late == {}


def test_a_late_wire_does_not_become_usual_in_a_new_generation() -> None:
    """In a ring of two it is the median of the edges."""
    spec = job(2, 2)
    layout, seen = Layout.of(spec.parallelism), Wires(spec.adaptation)
    seen.see(layout, measured(spec, 0, 0.031))
    seen.see(layout, measured(spec, 0, 0.031, usual=0.031, slow=False))
    assert seen.late == {(0, 1): pytest.approx(0.03)}


def test_a_link_becomes_less_late() -> None:
    spec = job(3, 2, ranksPerPod=2)
    layout, seen = Layout.of(spec.parallelism), Wires(spec.adaptation)
    found = network(spec, {}, link0=Health.SLOW)
    seen.see(layout, found)
    assert seen.late == {(0, 1): pytest.approx(LATE)}
    links = (replace(found.links[0], delay=0.012), found.links[1])
    seen.see(layout, replace(found, links=links))
    assert seen.late == {(0, 1): pytest.approx(0.012)}


def test_a_search_ends_in_time() -> None:
    spec = job(4, 128)
    layout, seen = Layout.of(spec.parallelism), Wires(spec.adaptation)
    found = network(spec, {1: 2})
    seen.see(layout, found)
    began = time.monotonic()
    assert propose(spec, layout, found, seen.late, 5.0, seconds=0.2) is not None
    # Longer than that only by what it looks at first: each start, and its first exchange.
    assert time.monotonic() - began < 4.0
