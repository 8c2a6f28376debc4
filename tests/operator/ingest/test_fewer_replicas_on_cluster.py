"""Fewer replicas in status, conditions and the controller that judges reports: no cluster."""

from __future__ import annotations

import asyncio
import copy
import json

import pytest
from operator_status import KEY, Shared, hear, tell

from pipemorph.api.status import JobStatus, condition
from pipemorph.control.observed.reports import ReportMismatch
from pipemorph.control.pods.presence import SILENT_SECONDS
from pipemorph.ingest import GenerationDesk
from pipemorph_operator.ingest.store import ClusterStore

LOSS = {"reason": "rank 0 lost rank 2", "at": 1.0, "rank": 0, "lost_peer": True}
PATIENCE = 20.0
"""Much less than SILENT_SECONDS, after which a pod would be given up without word of its loss."""


def an_ingest(api: Shared, replacement_seconds: int = 0) -> ClusterStore:
    api.job["spec"]["parallelism"] = {"stages": 4, "replicas": 2, "minReplicas": 1}
    policy = {"maxRestarts": 5, "replacementSeconds": replacement_seconds}
    api.job["spec"]["failurePolicy"] = policy
    store = ClusterStore(api)  # type: ignore[arg-type]
    store.changed(KEY, copy.deepcopy(api.job))
    return store


async def without_replica_1(store: ClusterStore, api: Shared) -> GenerationDesk:
    """Pod 7, the last stage of replica 1, is lost. Pods are stages × replicas, in that order."""
    desk = GenerationDesk(store)
    store.on_lost = desk.hurry
    waiting = [
        asyncio.create_task(tell(desk, pod, "30", loss=LOSS)) for pod in (0, 2, 4, 6, 1, 3, 5)
    ]
    for _ in range(50):
        await asyncio.sleep(0)
    assert not any(each.done() for each in waiting)
    api.lose(7, "it was deleted")
    store.changed(KEY, copy.deepcopy(api.job))
    async with asyncio.timeout(PATIENCE):
        told = await asyncio.gather(*waiting[:4])
    assert {(each["generation"], tuple(each["left_out"])) for each in told} == {(1, (1,))}
    for each in waiting[4:]:
        each.cancel()
    return desk


def status(api: Shared) -> JobStatus:
    return JobStatus.model_validate(api.job["status"])


def test_word_of_a_loss_lets_the_others_go_on_at_once_and_is_told() -> None:
    assert PATIENCE < SILENT_SECONDS
    api = Shared()
    store = an_ingest(api)
    hear(store, 0, 1)
    asyncio.run(without_replica_1(store, api))
    hear(store, 2)
    asyncio.run(store.persist_generations(*KEY))
    found = status(api)
    assert (found.recoveries.left_out, found.recoveries.last[-1].replicas) == ([1], 1)
    told = condition(found, "ReplicasComplete")
    assert (told.status, told.reason) == ("False", "FewerReplicas")
    assert told.message == "1 of 2 replicas train; replica 1 waits for lost pods to be back"
    reduced = condition(found, "ReductionsHealthy")
    assert reduced is not None and reduced.status == "Unknown"
    assert found.useful_time is not None and found.useful_time.seconds == 2.5, "half a batch"


def test_reports_are_judged_by_the_replicas_that_run_whoever_serves_the_job() -> None:
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


def test_a_replica_that_is_back_is_told_and_the_controller_has_it() -> None:
    api = Shared()
    store = an_ingest(api)
    hear(store, 0, 1)

    async def work() -> None:
        desk = await without_replica_1(store, api)
        for pod in (1, 3, 5):
            await tell(desk, pod, generation=1, left_out=[1])
        await tell(desk, 7, event="joined", launcher="new")
        await tell(desk, 7, generation=1, left_out=[1], launcher="new")
        query = {"attempt": "0", "generation": "1", "wait": "0"}
        state = json.loads((await desk.poll(*KEY, **query)).body)
        assert (state["leave"], state["over"]) == (True, False)
        for pod in (0, 2, 4, 6):
            told = await tell(desk, pod, generation=1, left_out=[1])
        assert (told["generation"], told["left_out"]) == (2, [])

    asyncio.run(work())
    told = condition(status(api), "ReplicasComplete")
    assert told is not None and told.message == "all 2 replicas train"
    controller = store.lookup(*KEY)
    assert controller is not None and controller.spec.parallelism.replicas == 2


def test_as_many_other_replicas_are_measured_anew() -> None:
    """They are numbered as those before."""
    api = Shared()
    api.job["spec"]["parallelism"] = {"stages": 4, "replicas": 3, "minReplicas": 1}
    api.job["spec"]["failurePolicy"] = {"maxRestarts": 5, "replacementSeconds": 0}
    store = ClusterStore(api)  # type: ignore[arg-type]
    store.changed(KEY, copy.deepcopy(api.job))
    hear(store, 0, 1)
    generations = store.generations(*KEY)
    assert generations is not None
    found = []
    for generation, without in ((1, [1]), (2, [2]), (2, [2])):
        asked = {"generation": generation, "left_out": without}
        asyncio.run(tell(GenerationDesk(store), without[0], **asked))
        assert generations.left_out == tuple(without)
        found.append(store.lookup(*KEY))
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
    store.changed(KEY, copy.deepcopy(api.job))
    await asyncio.gather(*store._final_writes.values())
    told = condition(status(api), "ReplicasComplete")
    assert (told.status, told.reason) == ("Unknown", "JobFinished")
    assert told.message == "the job has finished; 1 of 2 replicas trained last"


async def test_why_ranks_do_not_leave_is_told() -> None:
    api = Shared()
    store = an_ingest(api)
    hear(store, 0, 1)
    desk = await without_replica_1(store, api)
    for pod in (1, 3, 5):
        await tell(desk, pod, generation=1, left_out=[1])
    await tell(desk, 7, event="joined", launcher="new")
    await tell(desk, 7, generation=1, left_out=[1], launcher="new")
    stays = {"event": "stays", "why": "rank 2: no copy"}
    await tell(desk, 0, generation=1, left_out=[1], **stays)
    await store.persist_generations(*KEY)
    told = condition(status(api), "ReplicasComplete")
    assert told is not None and told.message == (
        "1 of 2 replicas train; replica 1 could join, but the ranks cannot leave, and are asked"
        " again: rank 2: no copy"
    )


async def test_with_patience_they_wait_for_the_pod() -> None:
    api = Shared()
    store = an_ingest(api, replacement_seconds=300)
    hear(store, 0, 1)
    desk = GenerationDesk(store)
    api.lose(7, "it was deleted")
    store.changed(KEY, copy.deepcopy(api.job))
    for pod in range(7):
        told = await tell(desk, pod, loss=LOSS)
    assert (told["generation"], told["awaits"]) == (0, 7)
    told = await tell(desk, 7, event="joined", launcher="new")
    assert (told["generation"], told["left_out"]) == (1, [])


def test_a_new_attempt_begins_with_all_replicas() -> None:
    api = Shared()
    store = an_ingest(api)
    hear(store, 0, 1)
    asyncio.run(without_replica_1(store, api))
    api.job["status"] |= {"attempt": 1}
    store.changed(KEY, copy.deepcopy(api.job))
    controller = store.lookup(*KEY)
    assert (controller.attempt, controller.spec.parallelism.replicas) == (1, 2)
