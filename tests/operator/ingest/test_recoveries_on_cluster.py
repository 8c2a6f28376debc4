"""Generations of pods in status and events: no cluster."""

from __future__ import annotations

import asyncio
import copy
from functools import partial
from typing import Any

import pytest
from operator_status import KEY, Shared, hear, tell

from pipemorph.ingest import RestartHandler
from pipemorph.spec.job_status import JobStatus
from pipemorph.spec.status_recoveries import Recoveries, RecoveryRecord
from pipemorph_operator.ingest.job_store import ClusterJobStore
from pipemorph_operator.ingest.status.recovery_events import RecoveryEventFilter
from pipemorph_operator.ingest.status.status_fence import StatusOvertakenError
from pipemorph_operator.kube.job_object import read_operator_status

LOSS = {"reason": "rank 1 was killed by SIGKILL", "at": 1.0, "rank": 1}
PODS = 4
progress = partial(hear, now=1000.0, seconds=0.1)


def an_ingest(api: Shared, *, restarts: int = 5) -> ClusterJobStore:
    api.job["spec"]["failurePolicy"] = {"maxRestarts": restarts}
    cluster: Any = api
    store = ClusterJobStore(cluster)
    store.process_change(KEY, copy.deepcopy(api.job))
    return store


async def lose(store: ClusterJobStore, generation: int, attempt: int = 0) -> dict[str, Any]:
    """End the ranks of all pods; return what the last launcher receives."""
    desk = RestartHandler(store)
    answer: dict[str, Any] = {}
    for pod in range(PODS):
        of = {"attempt": attempt, "generation": generation}
        answer = await tell(desk, pod, **of, loss=LOSS if pod == 1 else None)
    return answer


def in_status(api: Shared) -> Recoveries:
    found = JobStatus.model_validate(api.job["status"]).recoveries
    assert found is not None
    return found


def test_the_generation_is_in_status_before_it_begins_and_the_next_ingest_counts_on() -> None:
    api = Shared()
    store = an_ingest(api)
    progress(store, 0, 1)
    answer = asyncio.run(lose(store, 0))
    assert (answer["generation"], answer["verdict"]) == (1, "")
    assert (in_status(api).generation, in_status(api).count) == (1, 1)
    other = an_ingest(api)
    answer = asyncio.run(lose(other, 1))
    assert (answer["generation"], answer["verdict"]) == (2, "")
    assert (in_status(api).count, in_status(api).counted, in_status(api).idle) == (2, 1, 1)
    assert asyncio.run(lose(other, 2))["verdict"] == "attempt", "twice no iteration"
    assert read_operator_status(api.job).recoveries is None, "each writer has its own fields"


def test_an_ingest_that_has_lost_the_job_takes_no_recovery_back() -> None:
    """Plans are missing in both ingests: only the count of failures tells them apart."""
    api = Shared()
    behind = an_ingest(api)
    progress(behind, 0, 1)
    other = an_ingest(api)
    progress(other, 0, 1)
    asyncio.run(lose(other, 0))
    with pytest.raises(StatusOvertakenError):
        asyncio.run(behind.persist_generations(*KEY))
    assert in_status(api).generation == 1
    taken = behind.find_generations(*KEY)
    assert taken is not None and taken.saved.generation == 1


def test_all_pods_of_a_large_job_may_ask_at_once() -> None:
    expected = an_ingest(Shared()).find_token_requirements(*KEY)
    assert expected is not None and expected.pod_count == PODS


@pytest.mark.parametrize("attempt", [0, 1])
def test_a_new_ingest_knows_that_iterations_were_finished(attempt: int) -> None:
    api = Shared()
    api.job["status"] |= {"attempt": attempt, "training": {"attempt": 0, "iteration": 17}}
    answer = asyncio.run(lose(an_ingest(api), 0, attempt=attempt))
    assert answer["verdict"] == ("attempt" if attempt else ""), "those of this attempt"


def test_restarts_of_the_operator_and_an_edit_of_the_spec_are_minded() -> None:
    api = Shared()
    store = an_ingest(api, restarts=2)
    progress(store, 0)
    api.job["status"] |= {"restarts": 2, "attempt": 1}
    store.process_change(KEY, copy.deepcopy(api.job))
    progress(store, 1, attempt=1)
    asyncio.run(lose(store, 0, attempt=1))
    answer = asyncio.run(lose(store, 1, attempt=1))
    assert answer["verdict"] == "attempt" and "maxRestarts is 2" in answer["why"]

    store.process_change(KEY, None)
    api.job["spec"]["failurePolicy"] = {"maxRestarts": 0}
    store.process_change(KEY, copy.deepcopy(api.job))
    api.job["spec"]["failurePolicy"] = {"maxRestarts": 9}
    api.job["metadata"]["generation"] += 1
    store.process_change(KEY, copy.deepcopy(api.job))
    progress(store, 2, attempt=1)
    answer = asyncio.run(lose(store, 1, attempt=1))
    assert answer["verdict"] == "" and answer["generation"] == 2


def test_a_write_that_fails_does_not_keep_ranks_waiting(caplog: pytest.LogCaptureFixture) -> None:
    api = Shared()
    store = an_ingest(api)
    progress(store, 0)

    async def refuse(*_: Any, **__: Any) -> None:
        raise OSError("connection refused")

    api.apply = refuse  # type: ignore[method-assign]
    assert asyncio.run(lose(store, 0))["generation"] == 1
    assert "a generation was begun and not persisted: connection refused" in caplog.text
    tracked = store._tracked[KEY]
    assert tracked.has_unwritten_recoveries and tracked.has_changes, "the next round writes it"


async def test_jobs_whose_ranks_are_well_have_no_recoveries() -> None:
    api = Shared()
    store = an_ingest(api)
    progress(store, 0)
    await store.write_status_if_due(KEY)
    assert "training" in api.job["status"] and "recoveries" not in api.job["status"]


def test_events_tell_of_each_recovery_once() -> None:
    begun = RecoveryRecord(generation=1, lost_at="2026-01-01T00:00:00Z", cause="rank 1 is gone")
    done = begun.model_copy(update={"seconds": 2.04, "went_on_with": 17, "repeated": 0})
    event_filter = RecoveryEventFilter(None)
    assert event_filter.select_events(None) == []
    started = event_filter.select_events(Recoveries(count=1, last=[begun]))
    assert [(e.kind, e.reason, e.message) for e in started] == [
        ("Warning", "RanksRestarted", "the ranks start again as generation 1: rank 1 is gone")
    ]
    assert event_filter.select_events(Recoveries(count=1, last=[begun])) == []
    recovered = event_filter.select_events(Recoveries(count=1, last=[done]))
    assert [(e.kind, e.reason, e.message) for e in recovered] == [
        (
            "Normal",
            "Recovered",
            "generation 1 went on with iteration 17 after 2.0 s; 0 iterations were repeated",
        )
    ]
    assert event_filter.select_events(Recoveries(count=1, last=[done])) == []
    assert (
        RecoveryEventFilter(Recoveries(count=1, last=[done])).select_events(
            Recoveries(count=1, last=[done])
        )
        == []
    ), "nor after a restart of the ingest"
