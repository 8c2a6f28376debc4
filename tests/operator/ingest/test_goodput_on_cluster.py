"""Goodput in status: no cluster."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

from operator_status import KEY, Shared
from test_recoveries_on_cluster import progress

from pipemorph.spec.job_status import JobStatus, UsefulTime
from pipemorph_operator.ingest.job_store import ClusterJobStore
from pipemorph_operator.kube.job_object import read_operator_status

BEGAN = 1767323400.0
"""2026-01-02T03:10:00Z"""


def status(api: Shared) -> JobStatus:
    return JobStatus.model_validate(api.job["status"])


def write(api: Shared, store: ClusterJobStore) -> None:
    asyncio.run(store.persist_generations(*KEY))


def an_ingest(api: Shared, now: list[float]) -> ClusterJobStore:
    cluster: Any = api
    store = ClusterJobStore(cluster, clock=lambda: now[0])
    store.process_change(KEY, copy.deepcopy(api.job))
    return store


def test_the_time_of_iterations_over_that_since_the_start_and_the_next_ingest_counts_on() -> None:
    api, now = Shared(), [BEGAN + 1.0]
    api.job["status"] |= {"startTime": "2026-01-02T03:10:00Z"}
    store = an_ingest(api, now)
    write(api, store)
    assert status(api).goodput is None, "nothing was reported"
    progress(store, 0, 1, 2)
    write(api, store)
    assert status(api).goodput == 0.3 and status(api).useful_time == UsefulTime(
        seconds=0.3, iterations=3
    )
    now[0] += 100.0
    write(api, store)
    assert status(api).goodput == 0.3, "as of the newest report"
    now[0] = BEGAN + 2.0
    other = an_ingest(api, now)
    progress(other, 2, 3)
    write(api, other)
    assert status(api).goodput == 0.2
    own = read_operator_status(api.job)
    assert own.goodput is None and own.useful_time is None, "each writer has its own fields"


def test_the_time_in_which_it_is_suspended_does_not_count() -> None:
    api, now = Shared(), [BEGAN + 0.5]
    api.job["status"] |= {"startTime": "2026-01-02T03:10:00Z"}
    store = an_ingest(api, now)
    progress(store, 0, 1)
    del api.job["status"]["startTime"]
    api.job["status"] |= {"ranSeconds": 2}
    now[0] += 1000.0
    store.process_change(KEY, copy.deepcopy(api.job))
    write(api, store)
    assert status(api).goodput == 0.1
    api.job["status"] |= {"startTime": "2026-01-02T04:10:00Z", "attempt": 1}
    store.process_change(KEY, copy.deepcopy(api.job))
    now[0] = BEGAN + 3602.0
    progress(store, 2, 3, attempt=1)
    write(api, store)
    assert status(api).goodput == 0.1, "0.4 s of 2 s and 2 s"
