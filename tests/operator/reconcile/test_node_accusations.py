"""Nodes that slow links of several jobs accuse."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_api import FakeCluster
from operator_objects import CONFIG, UID, World, body
from prometheus_client import REGISTRY
from set_clock import Clock

from pipemorph_operator import names
from pipemorph_operator.reconcile.node_accusations import (
    MAX_JOBS,
    MAX_NODES,
    WINDOW_SECONDS,
    NodeAccusations,
)
from pipemorph_operator.reconcile.reconciler import Reconciler


def metric(node: str) -> float | None:
    return REGISTRY.get_sample_value("pipemorph_node_accusing_jobs", {"node": node})


def test_a_node_that_two_jobs_accuse_within_a_day_gets_an_event_and_a_metric() -> None:
    clock = Clock()
    accusations = NodeAccusations(clock)
    assert accusations.add_accusations("a/one", {"n1": "link 0 is 20 ms late", "n2": "…"}) == {}
    assert accusations.add_accusations("a/one", {"n1": "link 0 is 21 ms late"}) == {}, (
        "it is one job"
    )
    clock.now += WINDOW_SECONDS / 2
    events = accusations.add_accusations("b/two", {"n1": "link 3 is 9 ms late", "n3": "…"})
    assert {node: event.reason for node, event in events.items()} == {"n1": "NodeAccused"}
    assert events["n1"].message == (
        "links of 2 jobs at this node were slow within a day:"
        " a/one: link 0 is 21 ms late; b/two: link 3 is 9 ms late"
    )
    assert (metric("n1"), metric("n2"), metric("n3")) == (2.0, None, None)
    assert accusations.add_accusations("c/three", {"n1": "…"}) == {}, "it is said once"
    assert metric("n1") == 3.0
    accusations.clear()
    assert metric("n1") is None


def test_accusations_count_for_a_day() -> None:
    clock = Clock()
    accusations = NodeAccusations(clock)
    accusations.add_accusations("a/one", {"n1": "…"})
    clock.now += WINDOW_SECONDS + 1
    assert accusations.add_accusations("b/two", {"n1": "…"}) == {}
    clock.now += WINDOW_SECONDS / 2
    assert accusations.add_accusations("a/one", {"n1": "…"}).keys() == {"n1"}
    clock.now += WINDOW_SECONDS / 2 + 1
    assert metric("n1") == 1.0, "although no job accuses any node since"
    assert accusations.add_accusations("c/three", {"n2": "…"}) == {}
    assert metric("n1") is None
    assert accusations.add_accusations("b/two", {"n1": "…"}).keys() == {"n1"}, "it is said again"
    accusations.clear()


def test_accusations_are_bounded_and_the_oldest_are_dropped() -> None:
    accusations = NodeAccusations(Clock())
    for job in range(MAX_JOBS + 2):
        accusations.add_accusations(f"a/{job}", {"n": "…"})
    assert (accusations.count_jobs("n"), metric("n")) == (MAX_JOBS, MAX_JOBS)
    accusations.add_accusations("a/0", {f"other-{number}": "…" for number in range(MAX_NODES)})
    assert (accusations.count_jobs("n"), metric("n")) == (0, None)
    assert accusations.count_jobs(f"other-{MAX_NODES - 1}") == 1


def pod(index: int, node: str, made_by: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{node}-{index}",
            "namespace": "team",
            "labels": {names.LABEL_JOB_UID: UID, names.LABEL_ATTEMPT: "0"},
            "annotations": {names.COMPLETION_INDEX: str(index)},
            "ownerReferences": [{"kind": "Job", "controller": True, "uid": made_by}],
        },
        "spec": {"nodeName": node},
        "status": {"phase": "Running"},
    }


@pytest.mark.parametrize("faults", [[], [{"link": 0, "fromIteration": 0, "delayMs": 20}]])
def test_a_job_accuses_the_nodes_of_its_slow_links_as_read_from_its_own_pods(
    faults: list[dict[str, Any]],
) -> None:
    world = World(body(faults=faults))
    world.running()
    slow = {"link": 0, "name": "link 0 (stage 0 to 1)", "direction": "forward"}
    slow |= {"delayMs": 20.04, "wireTimeMs": 20.1, "confidence": 0.99}
    world.body["status"]["training"] = {"attempt": 0, "state": "training", "slowLinks": [slow]}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": world.jobs[0].name, "namespace": "team", "uid": world.jobs[0].uid},
        "spec": {"parallelism": 2},
        "status": {"active": 2, "ready": 2, "startTime": "2026-01-01T00:00:00Z"},
    }
    uid = world.jobs[0].uid
    pods = pod(0, "n1", uid), pod(1, "n2", uid), pod(1, "z-innocent", "of a stranger")
    api = FakeCluster(world.body, job, *pods)
    reconciler = Reconciler(api, lambda: CONFIG, lambda *_: [])
    reconciler.accusations.add_accusations("other/job", {"n2": "link 5 is late", "z-innocent": "…"})
    asyncio.run(reconciler.reconcile("team", "gpt"))
    accused = [
        each
        for each in api.objects.values()
        if each["kind"] == "Event" and each["involvedObject"]["kind"] == "Node"
    ]
    if faults:
        assert accused == [], "the job itself slows its link"
        return
    (event,) = accused
    assert event["metadata"]["namespace"] == "default"
    assert event["involvedObject"] == {
        "apiVersion": "v1", "kind": "Node", "name": "n2", "uid": "n2",
    }  # fmt: skip
    assert event["reason"] == "NodeAccused"
    assert event["message"].endswith(
        "other/job: link 5 is late;"
        " team/gpt: link 0 (stage 0 to 1) forward takes 20 ms more than normal"
    )
    reconciler.accusations.clear()
