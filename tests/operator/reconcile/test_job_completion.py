"""A job whose ranks have finished while pods without ranks never ran; no cluster, no clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_objects import World, body, job_facts, pod

from pipemorph_operator.reconcile.completion import LATE_POD_SECONDS


def finished(**recoveries: Any) -> World:
    """Ranks 0 and 1, which are replica 0, have finished. Replica 1 was omitted, since pod 3 has no
    node; pod 2, which waited for it, has ended."""
    cut = {"stages": 2, "replicas": 2, "minReplicas": 1, "order": ["dp_replicate", "pp"]}
    world = World(body(failurePolicy={"maxRestarts": 2}, parallelism=cut))
    world.turn()
    world.body["status"]["training"] = {"attempt": 0, "state": "finished"}
    world.body["status"]["recoveries"] = {
        "attempt": 0, "generation": 1, "completed": True, "excludedReplicas": [1],
    } | recoveries  # fmt: skip
    world.pods = [
        *(pod(index, exit_code=0, finished_at=world.now) for index in (0, 1, 2)),
        pod(3, pending_reason="Unschedulable: 0/3 nodes are available"),
    ]
    done = {"stages": 4, "active": 1, "succeeded": 3, "completed_indexes": "0-2"}
    world.jobs[0] = job_facts(replaces_pods=True, **done)
    return world


def test_a_job_that_has_finished_ends_without_pods_that_never_run() -> None:
    world = finished()
    world.turn()
    world.later(LATE_POD_SECONDS - 1.0)
    decision = world.settle()
    assert world.status["state"] != "Complete" and decision.requeue_seconds == pytest.approx(1.1)
    world.later(1.1)
    world.settle()
    assert (world.status["state"], world.jobs) == ("Complete", {})
    assert world.condition("Complete") == ("True", "FinishedWithoutPods")
    late = "rank 3 (stage 1, replica 1): Unschedulable: 0/3 nodes are available"
    assert world.message("Complete") == f"all 4 ranks finished; not waited for: {late}"
    assert world.counts == ["created", "successful"]
    world.later(3600.0)
    world.settle()
    assert world.status["state"] == "Complete" and world.status["attempt"] == 0


def test_an_operator_that_dies_before_it_deletes_such_a_job_deletes_it() -> None:
    world = finished()
    world.turn()
    world.later(LATE_POD_SECONDS + 10.0)
    unfinished = world.jobs[0]
    world.turn()
    assert world.status["state"] == "Complete"
    world.jobs[0] = unfinished
    world.settle()
    assert world.jobs == {}
    world.jobs[0] = replace(unfinished, complete=True, active=0)
    world.settle()
    assert 0 in world.jobs, "it came in the end"


def test_pods_that_never_run_end_no_job_whose_ranks_have_not_finished() -> None:
    """A ready pod may not have learned yet that they have."""
    for changes, recoveries in (
        ({"completed_indexes": "0", "succeeded": 1, "active": 2}, {}),
        ({"completed_indexes": "0,2"}, {}),
        ({"ready": 1}, {}),
        ({}, {"completed": False}),
        ({}, {"attempt": 1}),
    ):
        world = finished(**recoveries)
        world.jobs[0] = replace(world.jobs[0], **changes)
        world.later(3600.0)
        world.settle()
        assert 0 in world.jobs and world.status["state"] != "Complete", (changes, recoveries)


def test_the_pods_of_a_job_that_have_succeeded() -> None:
    facts = job_facts(completed_indexes="0,2-4,7")
    assert facts.completed_pods == {0, 2, 3, 4, 7} and job_facts().completed_pods == set()
