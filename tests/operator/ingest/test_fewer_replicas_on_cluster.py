"""Fewer replicas in status, conditions and the controller that judges reports: no cluster."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
from operator_status import KEY, Shared, hear, tell

from pipemorph.control.job_state.reports import ReportMismatch
from pipemorph.control.restart.pod_tracker import SILENT_SECONDS
from pipemorph.ingest import RestartHandler
from pipemorph.spec.job_status import JobStatus, find_condition
from pipemorph_operator.ingest.job_store import ClusterJobStore

LOSS = {"reason": "rank 0 lost rank 2", "at": 1.0, "rank": 0, "lost_peer": True}
PATIENCE = 20.0
"""Seconds; far fewer than SILENT_SECONDS, after which a pod is given up without a report."""


def an_ingest(api: Shared, replacement_seconds: int = 0) -> ClusterJobStore:
    api.job["spec"]["parallelism"] = {"stages": 4, "replicas": 2, "minReplicas": 1}
    policy = {"maxRestarts": 5, "replacementSeconds": replacement_seconds}
    api.job["spec"]["failurePolicy"] = policy
    store = ClusterJobStore(api)  # type: ignore[arg-type]
    store.process_change(KEY, copy.deepcopy(api.job))
    return store


async def without_replica_1(store: ClusterJobStore, api: Shared) -> RestartHandler:
    """Pod 7, the last stage of replica 1, is lost. Pods are stages × replicas, in that order."""
    desk = RestartHandler(store)
    store.on_pods_lost = desk.notify_loss
    waiting = [
        asyncio.create_task(tell(desk, pod, "30", loss=LOSS)) for pod in (0, 2, 4, 6, 1, 3, 5)
    ]
    for _ in range(50):
        await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    api.lose(7, "it was deleted")
    store.process_change(KEY, copy.deepcopy(api.job))
    async with asyncio.timeout(PATIENCE):
        answers = await asyncio.gather(*waiting[:4])
    assert {(a["generation"], tuple(a["excluded_replicas"])) for a in answers} == {(1, (1,))}
    for each in waiting[4:]:
        each.cancel()
    return desk


def status(api: Shared) -> JobStatus:
    return JobStatus.model_validate(api.job["status"])


def test_a_reported_loss_lets_the_others_go_on_at_once_and_is_in_status() -> None:
    assert PATIENCE < SILENT_SECONDS
    api = Shared()
    store = an_ingest(api)
    hear(store, 0, 1)
    asyncio.run(without_replica_1(store, api))
    hear(store, 2)
    asyncio.run(store.persist_generations(*KEY))
    found = status(api)
    assert (found.recoveries.excluded_replicas, found.recoveries.last[-1].replicas) == ([1], 1)
    complete = find_condition(found, "ReplicasComplete")
    assert (complete.status, complete.reason) == ("False", "FewerReplicas")
    assert complete.message == "1 of 2 replicas train; replica 1 waits for lost pods to return"
    reduced = find_condition(found, "ReductionsHealthy")
    assert reduced is not None and reduced.status == "Unknown"
    assert found.useful_time is not None and found.useful_time.seconds == 2.5, "half a batch"


def test_reports_are_judged_by_the_replicas_that_run_under_any_ingest() -> None:
    api = Shared()
    store = an_ingest(api)
    slow = {"where": "stage 0", "slow": False, "normal": None, "exposed": 0.0}
    stray = {"reductions": [{"stage": 0, "replica": 1, "bytes": 8, "seconds": 1.0, **slow}]}
    hear(store, 0, 1, **stray)
    asyncio.run(without_replica_1(store, api))
    other = an_ingest(api)
    for each in (store, other):
        with pytest.raises(ReportMismatch, match="is 1; the job has 1 columns"):
            hear(each, 2, **stray)
        hear(each, 2)


def test_a_replica_that_is_back_is_in_status_and_in_the_controller() -> None:
    api = Shared()
    store = an_ingest(api)
    hear(store, 0, 1)

    async def work() -> None:
        desk = await without_replica_1(store, api)
        for pod in (1, 3, 5):
            await tell(desk, pod, generation=1, excluded_replicas=[1])
        await tell(desk, 7, event="joined", launcher="new")
        await tell(desk, 7, generation=1, excluded_replicas=[1], launcher="new")
        query = {"attempt": "0", "generation": "1", "wait": "0"}
        state = json.loads((await desk.handle_poll(*KEY, **query)).body)
        assert (state["leave"], state["over"]) == (True, False)
        for pod in (0, 2, 4, 6):
            answer = await tell(desk, pod, generation=1, excluded_replicas=[1])
        assert (answer["generation"], answer["excluded_replicas"]) == (2, [])

    asyncio.run(work())
    complete = find_condition(status(api), "ReplicasComplete")
    assert complete is not None and complete.message == "all 2 replicas train"
    controller = store.find_job(*KEY)
    assert controller is not None and controller.spec.parallelism.replicas == 2


def test_as_many_other_replicas_are_measured_anew() -> None:
    """Replicas are numbered as those before."""
    api = Shared()
    api.job["spec"]["parallelism"] = {"stages": 4, "replicas": 3, "minReplicas": 1}
    api.job["spec"]["failurePolicy"] = {"maxRestarts": 5, "replacementSeconds": 0}
    store = ClusterJobStore(api)  # type: ignore[arg-type]
    store.process_change(KEY, copy.deepcopy(api.job))
    hear(store, 0, 1)
    generations = store.find_generations(*KEY)
    assert generations is not None
    found = []
    for generation, without in ((1, [1]), (2, [2]), (2, [2])):
        report = {"generation": generation, "excluded_replicas": without}
        asyncio.run(tell(RestartHandler(store), without[0], **report))
        assert generations.excluded_replicas == tuple(without)
        found.append(store.find_job(*KEY))
    assert len({id(each) for each in found}) == 2, "those of each generation"


async def test_of_a_job_that_has_finished_no_replica_is_waited_for() -> None:
    api = Shared()
    store = an_ingest(api)
    hear(store, 0, 1)
    await without_replica_1(store, api)
    api.job["status"]["conditions"] = [
        *api.job["status"].get("conditions", ()),
        {"type": "Complete", "status": "True", "reason": "Done", "message": "",
         "lastTransitionTime": "2026-01-01T00:00:00Z"},
    ]  # fmt: skip
    store.process_change(KEY, copy.deepcopy(api.job))
    await asyncio.gather(*store._final_writes.values())
    complete = find_condition(status(api), "ReplicasComplete")
    assert (complete.status, complete.reason) == ("Unknown", "JobFinished")
    assert complete.message == "the job has finished; 1 of 2 replicas trained last"


async def test_the_reason_why_ranks_do_not_depart_is_reported() -> None:
    api = Shared()
    store = an_ingest(api)
    hear(store, 0, 1)
    desk = await without_replica_1(store, api)
    for pod in (1, 3, 5):
        await tell(desk, pod, generation=1, excluded_replicas=[1])
    await tell(desk, 7, event="joined", launcher="new")
    await tell(desk, 7, generation=1, excluded_replicas=[1], launcher="new")
    stays = {"event": "stays", "why": "rank 2: no copy"}
    await tell(desk, 0, generation=1, excluded_replicas=[1], **stays)
    await store.persist_generations(*KEY)
    complete = find_condition(status(api), "ReplicasComplete")
    assert complete is not None and complete.message == (
        "1 of 2 replicas train; replica 1 could join, but the ranks cannot stop for it (rank 2: no"
        " copy); retrying"
    )


async def test_with_patience_they_wait_for_the_pod() -> None:
    api = Shared()
    store = an_ingest(api, replacement_seconds=300)
    hear(store, 0, 1)
    desk = RestartHandler(store)
    api.lose(7, "it was deleted")
    store.process_change(KEY, copy.deepcopy(api.job))
    for pod in range(7):
        answer = await tell(desk, pod, loss=LOSS)
    assert (answer["generation"], answer["awaits"]) == (0, 7)
    answer = await tell(desk, 7, event="joined", launcher="new")
    assert (answer["generation"], answer["excluded_replicas"]) == (1, [])


def test_a_new_attempt_begins_with_all_replicas() -> None:
    api = Shared()
    store = an_ingest(api)
    hear(store, 0, 1)
    asyncio.run(without_replica_1(store, api))
    api.job["status"] |= {"attempt": 1}
    store.process_change(KEY, copy.deepcopy(api.job))
    controller = store.find_job(*KEY)
    assert (controller.attempt, controller.spec.parallelism.replicas) == (1, 2)
