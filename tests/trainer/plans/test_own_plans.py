"""Replicas with plans of their own under one version, in real processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from launch import run_ranks
from trainer_jobs import Job, assert_same, make_plan, part, train

from pipemorph.api.mesh import MeshShape
from pipemorph.api.sections.faults import Fault
from pipemorph.errors import InputError
from pipemorph.planning import Route
from pipemorph_trainer.plans.book import PlanBook

REPLICAS, SLOW = 2, 1
JOB = Job(2, 6, policy="1f1b", iterations=7)
ALL = range(JOB.stages * REPLICAS)
NEEDS_ENGINE = pytest.mark.needs_engine


def test_a_plan_of_another_replica_that_does_not_fit_is_no_reason_to_refuse() -> None:
    """This one cannot offload, and need not."""
    first = make_plan(JOB, 0, "1f1b")
    own = make_plan(JOB, 0, "zero-bubble", device_limit=2)
    both = replace(make_plan(JOB, 3, "gpipe"), own=(((SLOW,), own),))
    mesh = MeshShape(JOB.stages, REPLICAS)
    books = [
        PlanBook(
            part(first, rank, mesh),
            mesh.coordinate(rank),
            [],
            no_offload={0: "no room"},
            no_recompute={},
        )
        for rank in (0, 1)
    ]
    assert books[0].prepare(part(both, 0, mesh))
    with pytest.raises(InputError, match="no room"):
        books[1].prepare(part(both, 1, mesh))


@pytest.mark.parametrize(
    "route",
    [pytest.param("direct", marks=pytest.mark.full), pytest.param("delegated", marks=NEEDS_ENGINE)],
)
def test_one_replica_runs_its_own_plan_and_nothing_is_computed_differently(route: str) -> None:
    """pp 2 × dp 2. Link 0 of replica 1 is slow, and its plan and route change: losses and gradients
    are those of an undisturbed run, to the bit."""
    own = make_plan(JOB, 0, "pipemorph", warmup=(5, 1), routes=(Route(route),))
    first = replace(make_plan(JOB, 1, "1f1b"), own=(((SLOW,), own),))
    other = replace(make_plan(JOB, 2, "zero-bubble"), own=(((SLOW,), own),))
    back = make_plan(JOB, 3, "gpipe")
    job = JOB.with_(
        route="auto" if route == "delegated" else "direct",
        engine="tcp",
        faults=[Fault(link=0, replica=SLOW, delay_ms=20.0, from_iteration=1)],
        switches=[(at, plan, ALL) for at, plan in ((0, first), (3, other), (5, back))],
    )
    found = run_ranks(len(ALL), train, job)
    for rank, record in enumerate(found):
        slow = rank % REPLICAS == SLOW
        # Installed right before iterations 0, 3 and 5: in force there or in the next one.
        for at, (plan, version) in {2: (first, 1), 4: (other, 2), 6: (back, 3)}.items():
            wanted = own if slow and plan.own else replace(plan, own=())
            mine = part(replace(wanted, version=version), rank, MeshShape(JOB.stages, REPLICAS))
            assert record.plans[at] == mine, (rank, at)
    assert_same(found, run_ranks(len(ALL), train, JOB))
