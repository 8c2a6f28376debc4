"""Links that are slow from their first message on, by what was measured before it."""

from __future__ import annotations

from typing import Any

import pytest
from test_observer import BASE, LATE, SETTLED, Job, spec
from test_parts import Observed, World
from test_parts import spec as parts_spec

from pipemorph.api.mesh import MeshShape
from pipemorph.control import Health
from pipemorph.control.observe.fabric_seeds import FabricSeeds
from pipemorph.control.observe.link_book import SEED_MARGIN, SEED_SECONDS
from pipemorph.wire import FabricPair, FabricView

RATE, TRIP = 1e9, 2 * BASE
"""A message of one byte, as these jobs send, takes ``BASE``."""


def view(*pairs: FabricPair, **fields: Any) -> FabricView:
    told: dict[str, Any] = {"pods": 4, "rate": RATE, "round_trip": TRIP, "ports": ("mlx5_0/1",)}
    return FabricView(**told | fields, pairs=pairs)


def pair(first: int, second: int, *, sick: bool = False, **measured: Any) -> FabricPair:
    told: dict[str, Any] = {"rate": RATE, "round_trip": TRIP}
    return FabricPair(first, second, (0, 0), sick, **told | measured)


def checked(job: Job, *pairs: FabricPair) -> Job:
    job.agent.observer.checked(view(*pairs))
    return job


def test_a_seed_is_of_the_pair_if_that_is_well_and_else_of_all() -> None:
    mesh = MeshShape(stages=4, replicas=2)
    a, b, c = (mesh.rank(stage, 0) // 2 for stage in (0, 1, 2))
    ends = (min(a, b), max(a, b))
    found = FabricSeeds(
        view(
            pair(*ends, rate=5e8, round_trip=4e-6),
            pair(*ends, rate=4e8, round_trip=6e-6),
            pair(min(b, c), max(b, c), sick=True, rate=1e6),
            rate=1e9,
            round_trip=2e-6,
            ranks_per_pod=2,
        ),
        mesh,
    )
    seeds = [found.wire_time(link, 0, 1e6) for link in range(3)]
    within = [link for link in range(3) if mesh.rank(link, 0) // 2 == mesh.rank(link + 1, 0) // 2]
    expected: list[float | None] = [3e-6 + 2.5e-3, 1e-6 + 1e-3, 1e-6 + 1e-3]
    for link in within:
        expected[link] = None
    assert seeds == pytest.approx(expected)
    assert FabricSeeds(view(rate=None), mesh).wire_time(0, 0, 1e6) is None, "nothing was measured"


def test_the_one_link_of_a_job_that_is_slow_from_the_start_is_known_as_slow() -> None:
    for seeded in (False, True):
        job = Job(spec(2))
        if seeded:
            checked(job, pair(0, 1))
        job.delays[0, 0] = LATE
        job.run(SETTLED)
        assert job.health() == [Health.SLOW if seeded else Health.HEALTHY]
    (link,) = job.controller.links(job.now)
    assert link.wire_time == pytest.approx(BASE + LATE, rel=0.01), "as measured"
    assert link.delay == pytest.approx(LATE + BASE - SEED_MARGIN * BASE, rel=0.01)
    told = [event.text for event in job.controller.events]
    assert (
        "link 0, forward, is slow from its first message on, by the check of the RDMA ports"
        in (told[0])
    )


def test_a_pair_that_was_sick_at_the_check_is_no_excuse() -> None:
    job = checked(Job(spec(2)), pair(0, 1, sick=True, round_trip=2 * (BASE + LATE)))
    job.delays[0, 0] = LATE
    job.run(SETTLED)
    assert job.health() == [Health.SLOW]
    job = checked(Job(spec(2)), pair(0, 1, round_trip=2 * (BASE + LATE)))
    job.delays[0, 0] = LATE
    job.run(SETTLED)
    assert job.health() == [Health.HEALTHY], "it is as long as it was, and was well"


def test_what_was_measured_takes_the_seed_s_place() -> None:
    """Well again at twice its seed, which is then what is normal."""
    job = checked(Job(spec(2)), pair(0, 1))
    job.delays[0, 0] = LATE
    job.run(SETTLED)
    job.delays[0, 0] = BASE
    job.run(200)
    assert job.health() == [Health.HEALTHY]
    for series in job.agent.observer._links._all():
        assert series.detector.base == pytest.approx(2 * BASE, rel=0.05)
        assert not series.detector.is_seeded
    job.delays[0, 0] = BASE + LATE
    job.run(10)
    assert job.controller.links(job.now)[0].delay == pytest.approx(LATE, rel=0.05)


def test_links_that_are_all_as_far_from_their_seeds_are_well() -> None:
    """The seeds do not know of something that all of them do: many healthy links outvote them."""
    job = checked(Job(spec(8)))
    for link in range(7):
        job.delays[link, 0] = LATE
    job.run(SETTLED)
    assert job.health() == [Health.HEALTHY] * 7
    # And one that is later than that is slow.
    job = checked(Job(spec(8)))
    for link in range(7):
        job.delays[link, 0] = 5 * LATE if link == 3 else LATE
    job.run(SETTLED)
    assert [link for link, found in enumerate(job.health()) if found is Health.SLOW] == [3]


def test_one_that_was_judged_before_the_others_were_known_is_well_when_it_is_like_them() -> None:
    job = checked(Job(spec(4)))
    for link in range(3):
        job.delays[link, 0] = LATE
    for _ in range(20):
        job.now += 0.05
        job.tell(links=[sample for sample in job.windows() if sample.link == 0])
    assert job.health()[0] is Health.SLOW
    job.run(SETTLED)
    assert job.health() == [Health.HEALTHY] * 3
    for series in job.agent.observer._links._all():
        assert series.detector.base == pytest.approx(BASE + LATE, rel=0.01)


def test_a_base_that_has_held_for_long_needs_no_seed() -> None:
    job = Job(spec(2))
    job.agent.observer.checked(view(rate=None))
    job.delays[0, 0] = LATE
    job.run(round(SEED_SECONDS / 0.05) + 30)
    job.agent.observer.checked(view(pair(0, 1)))
    job.run(SETTLED)
    assert job.health() == [Health.HEALTHY]


def test_parts_of_a_job_have_the_seeds_of_their_links() -> None:
    cut = parts_spec(2)
    world, job = World(cut.parallelism.mesh, 1), Observed(cut, 1)
    job.job.checked(view(rate=RATE, round_trip=0.008))
    world.delays = {(0, 0, "forward"): 0.04}
    for _ in range(SETTLED):
        job.step(world.tell(), world.iteration)
    assert job.slow() == {(0, 0, "forward")}, "which the second part receives"
