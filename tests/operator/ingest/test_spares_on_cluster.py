"""Spares in status, in the condition that tells of them, and where pods are looked for."""

from __future__ import annotations

import asyncio
import copy

from operator_status import KEY, Shared, hear, tell

from pipemorph.api.status import JobStatus, condition
from pipemorph.ingest import GenerationDesk
from pipemorph_operator.ingest.store import ClusterStore

LOSS = {"reason": "rank 0 lost rank 2", "at": 1.0, "rank": 0, "lost_peer": True}
PATIENCE = 20.0


def an_ingest(api: Shared) -> ClusterStore:
    """Of a job with four pods that have ranks, and a spare, pod 4."""
    api.job["spec"]["parallelism"] = {"stages": 4, "replicas": 1, "spares": 1}
    api.job["spec"]["failurePolicy"] = {"maxRestarts": 5}
    store = ClusterStore(api)  # type: ignore[arg-type]
    store.changed(KEY, copy.deepcopy(api.job))
    return store


def seen(api: Shared) -> tuple[JobStatus, tuple[str, str, str]]:
    found = JobStatus.model_validate(api.job["status"])
    told = condition(found, "SparesReady")
    assert told is not None
    return found, (told.status, told.reason, told.message)


def test_a_spare_stands_by_takes_a_place_and_another_stands_by() -> None:
    api = Shared()
    store = an_ingest(api)
    hear(store, 0, 1)

    async def work() -> None:
        desk = GenerationDesk(store)
        store.on_lost = desk.hurry
        assert (await tell(desk, 4, event="joined"))["generation"] == 0
        await store.persist_generations(*KEY)
        few = "0 of 1 spare stands by; the others are not there, or not ready yet"
        assert seen(api)[1] == ("False", "FewerSpares", few)
        spare = asyncio.create_task(tell(desk, 4, "30"))
        await asyncio.sleep(0)
        assert store.jobs()[0].recovers and store.jobs()[0].has_news, "status is written soon"
        await store.persist_generations(*KEY)
        found, told = seen(api)
        assert told == ("True", "AllSpares", "1 of 1 spare stands by")
        assert found.recoveries is not None and found.recoveries.spares_ready == 1

        waiting = [asyncio.create_task(tell(desk, pod, "30", loss=LOSS)) for pod in (0, 1, 3)]
        for _ in range(50):
            await asyncio.sleep(0)
        api.lose(2, "node n2 is lost")
        store.changed(KEY, copy.deepcopy(api.job))
        async with asyncio.timeout(PATIENCE):
            answers = await asyncio.gather(spare, *waiting)
        assert {each["generation"] for each in answers} == {1}
        assert [each["places"] for each in answers] == [[[2, 4]]] * 4

        await tell(desk, 2, event="joined", launcher="new")
        await tell(desk, 2, generation=1, launcher="new", places=[[2, 4]])
        await store.persist_generations(*KEY)

    asyncio.run(work())
    found, told = seen(api)
    assert told[0] == "True"
    assert found.recoveries is not None
    assert found.recoveries.moved == ((2, 4),)
    (record,) = found.recoveries.last
    assert record.cause == "node n2 is lost"
    assert [(each.pod, each.instead_of) for each in record.spares] == [(4, 2)]
    assert store.jobs()[0].running.pods == (0, 1, 4, 3)
    expected = store.expected(*KEY)
    assert expected is not None and expected.pods == 5
    # Another ingest goes on from that.
    again = ClusterStore(api)  # type: ignore[arg-type]
    again.changed(KEY, copy.deepcopy(api.job))
    generations = again.generations(*KEY)
    assert generations is not None and generations.state.places == ((2, 4),)


def test_how_long_a_late_pod_is_waited_for_is_the_specs_also_as_edited() -> None:
    api = Shared()
    api.job["spec"]["parallelism"] = {"stages": 4, "replicas": 1, "spares": 1}
    api.job["spec"]["failurePolicy"] = {"maxRestarts": 5, "latePodSeconds": 7}
    store = ClusterStore(api)  # type: ignore[arg-type]
    store.changed(KEY, copy.deepcopy(api.job))
    generations = store.generations(*KEY)
    assert generations is not None

    def waits() -> float:
        """Seconds until a spare takes the place of pod 3."""
        now = generations.presence._came_at
        due = generations.due(now)
        assert due is not None
        return round(due - now, 3)

    async def work() -> None:
        for pod in (0, 1, 2, 4):
            await tell(GenerationDesk(store), pod, event="joined")
        assert waits() == 7
        api.job["spec"]["failurePolicy"]["latePodSeconds"] = 90
        api.job["metadata"]["generation"] += 1
        store.changed(KEY, copy.deepcopy(api.job))
        assert waits() == 90

    asyncio.run(work())
