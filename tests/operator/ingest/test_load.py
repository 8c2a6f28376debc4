"""Costs of a thousand jobs: few writes, few turns, small connections."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import copy
from typing import Any

import pytest
from observing import trained

from pipemorph.control.first_plan import make_initial_schedule
from pipemorph.ingest.connections import TLS_READ_BYTES
from pipemorph.planning import Schedule
from pipemorph.protocol import LinkHealthReport
from pipemorph.spec.job_spec import JobSpec
from pipemorph_operator.ingest.job_store import ClusterJobStore
from pipemorph_operator.ingest.status.status_writer import MAX_WRITES
from pipemorph_operator.ingest.status.write_schedule import (
    DECIDING_SECONDS,
    FLOOR_SECONDS,
    PROGRESS_SECONDS,
)
from pipemorph_operator.reconcile.job_watch import WatchedJobs

KEY = ("default", "gpt")
BODY: dict[str, Any] = {
    "metadata": {
        "name": "gpt",
        "namespace": "default",
        "uid": "u",
        "generation": 1,
        "resourceVersion": "76",
    },
    "spec": {"parallelism": {"stages": 4}},
    "status": {
        "state": "Running",
        "ready": "4/4",
        "attempt": 0,
        "attemptNodes": {"links": [{"link": 0, "replica": 0, "nodes": ["a", "b"]}]},
        "conditions": [
            {"type": "Running", "status": "True"},
            {"type": "LinksHealthy", "status": "True"},
        ],
        "training": {"attempt": 0, "state": "training", "iteration": 5, "slowLinks": []},
        "control": {"attempt": 0, "planVersion": 0, "reserved": 96},
    },
}


def changed(*way: str | int, to: Any) -> dict[str, Any]:
    body = copy.deepcopy(BODY)
    node: Any = body
    for part in way[:-1]:
        node = node[part]
    node[way[-1]] = to
    return body


@pytest.mark.parametrize(
    "body",
    [
        changed("status", "training", "iteration", to=6),
        changed("status", "control", "reserved", to=192),
        changed("status", "conditions", 1, "status", to="False"),
        changed("status", "training", "slowLinks", to=[{"link": 0, "replica": 0}]),
        changed("metadata", "resourceVersion", to="77"),
        changed("status", "attemptNodes", to={"links": []}),
    ],
    ids=[
        "iteration", "versions", "LinksHealthy", "slow link that is noted", "resourceVersion",
        "noted nodes",
    ],
)  # fmt: skip
def test_figures_of_the_ingest_cost_the_operator_no_turn(body: dict[str, Any]) -> None:
    watched = WatchedJobs()
    assert watched.process_event(KEY, None, BODY)
    assert not watched.process_event(KEY, "MODIFIED", BODY)
    assert not watched.process_event(KEY, "MODIFIED", body)


@pytest.mark.parametrize(
    "body",
    [
        changed("metadata", "generation", to=2),
        changed("metadata", "labels", to={"a": "b"}),
        changed("metadata", "deletionTimestamp", to="2026-01-01T00:00:00Z"),
        changed("status", "ready", to="9/9"),
        changed("status", "conditions", 0, "status", to="False"),
        changed("status", "training", "state", to="finished"),
        changed("status", "conditions", 1, "reason", to="ReportsStale"),
        changed("status", "training", "slowLinks", to=[{"link": 1, "replica": 0}]),
    ],
    ids=["spec", "labels", "deleted", "ready", "Running", "trained", "no reports", "slow"],
)
def test_whatever_a_decision_rests_on_costs_one(body: dict[str, Any]) -> None:
    watched = WatchedJobs()
    watched.process_event(KEY, "ADDED", BODY)
    assert watched.process_event(KEY, "MODIFIED", body)
    assert not watched.process_event(KEY, "MODIFIED", body)


def test_a_slow_link_costs_one_turn_however_it_is_reported() -> None:
    slow = changed("status", "training", "slowLinks", to=[{"link": 1, "replica": 0}])
    noted = copy.deepcopy(slow)
    noted["status"]["attemptNodes"]["links"].append({"link": 1, "replica": 0, "nodes": ["b", "c"]})
    watched = WatchedJobs()
    watched.process_event(KEY, "ADDED", BODY)
    turns = [
        watched.process_event(KEY, "MODIFIED", body) for body in (slow, slow, noted, BODY, slow)
    ]
    assert turns == [True, False, False, False, True]


def test_a_list_and_a_deletion_always_cost_a_turn() -> None:
    watched = WatchedJobs()
    for kind in (None, "ADDED", None, "DELETED", "ADDED"):
        assert watched.process_event(KEY, kind, BODY)


def test_asyncio_still_calls_the_size_of_its_read_buffer_that() -> None:
    """The ingest makes it smaller; under another name, 2,000 connections would take 500 MB."""
    assert asyncio.sslproto.SSLProtocol.max_size >= TLS_READ_BYTES


class SlowApi:
    """API server that answers when the test lets it."""

    def __init__(self) -> None:
        self.applied: list[str] = []
        self.most = self.now = 0
        self.go = asyncio.Event()

    async def apply(self, obj: dict[str, Any], owner: str, *, subresource: str = "") -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        await self.go.wait()
        self.now -= 1
        self.applied.append(obj["metadata"]["name"])
        return obj

    async def create(self, obj: dict[str, Any], owner: str) -> Any:
        return obj


async def test_a_slow_api_server_gets_few_requests_at_a_time_and_directives_first() -> None:
    api: Any = SlowApi()
    store = ClusterJobStore(api, clock=lambda: 1000.0)
    op = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}
    for i in range(100):
        spec = {
            "parallelism": {"stages": 2},
            "schedule": {"microbatches": 4, "stageTimes": [op] * 2},
            "trainer": {"module": "m", "iterations": 1},
        }
        metadata = {"name": f"j{i}", "namespace": "d", "uid": f"u{i}", "generation": 1}
        job = {"metadata": metadata, "spec": spec, "status": {"attempt": 0}}
        store.process_change(("d", f"j{i}"), job)
    persisted = [asyncio.create_task(store.persist_status("d", f"j{i}")) for i in range(30)]
    await asyncio.sleep(0)
    for i in range(30, 100):
        await asyncio.wait_for(store.write_status_if_due(("d", f"j{i}")), 5)
    api.go.set()
    await asyncio.gather(*persisted)
    assert sorted(api.applied) == sorted(f"j{i}" for i in range(30)), "progress held them up"
    assert api.most == MAX_WRITES
    await store.write_status_if_due(("d", "j50"))
    assert api.applied[-1] == "j50", "what waited is written when there is room"


async def test_what_may_wait_takes_half_of_the_writes_at_a_time() -> None:
    api: Any = SlowApi()
    store = ClusterJobStore(api, clock=lambda: 1000.0)
    keys = [("d", f"j{i}") for i in range(30)]
    for _, name in keys:
        metadata = {"name": name, "namespace": "d", "uid": name, "generation": 1}
        store.process_change(("d", name), JOB | {"metadata": metadata})
    looks = [asyncio.create_task(store.write_status_if_due(key)) for key in keys]
    for _ in range(5):
        await asyncio.sleep(0)
    assert api.now == MAX_WRITES // 2
    api.go.set()
    await asyncio.wait_for(asyncio.gather(*looks), 5)


SPEC: dict[str, Any] = {
    "parallelism": {"stages": 2},
    "schedule": {
        "microbatches": 4,
        "stageTimes": [{"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}] * 2,
    },
    "trainer": {"module": "m", "iterations": 1000},
}
JOB: dict[str, Any] = {
    "metadata": {"name": "gpt", "namespace": "default", "uid": "u", "generation": 1},
    "spec": SPEC,
    "status": {"attempt": 0, "jobUid": "job"},
}


def reported(sequence: int, **more: Any) -> LinkHealthReport:
    """A report of one iteration."""
    return trained(sequence, sequence=sequence, iteration=sequence, job="gpt", **more)


async def test_a_heartbeat_costs_no_look_at_the_job_and_news_is_written_at_once() -> None:
    api: Any = SlowApi()
    api.go.set()
    now = 1000.0
    store = ClusterJobStore(api, clock=lambda: now, monotonic=lambda: now)
    store.process_change(KEY, JOB)
    controller: Any = store.find_job(*KEY)
    views = 0

    def view(at: float, seen: Any = controller.get_job_view) -> Any:
        nonlocal views
        views += 1
        return seen(at)

    controller.get_job_view = view
    rows = [{"link": 0, "health": "healthy", "wire_time": 0.001, "confidence": 1.0}]
    controller.process_report(reported(1, links=rows), now)
    await store.write_status_if_due(KEY)
    await store.write_status_if_due(KEY)
    assert len(api.applied) == 1
    views = 0
    for beat in range(2, 5):
        now += 1
        controller.process_report(reported(beat), now)
        await store.write_status_if_due(KEY)
    assert (views, len(api.applied)) == (0, 1)
    now += FLOOR_SECONDS
    await store.write_status_if_due(KEY)
    assert (views, len(api.applied)) == (1, 1), "for the metrics alone"
    now += PROGRESS_SECONDS - FLOOR_SECONDS
    controller.process_report(reported(5), now)
    await store.write_status_if_due(KEY)
    assert len(api.applied) == 2, "progress is written now and then"
    now += PROGRESS_SECONDS
    slow = {
        "link": 0,
        "health": "slow",
        "replica": 0,
        "direction": "forward",
        "delay": 0.05,
        "wire_time": 0.051,
    }
    controller.process_report(reported(6, directions=[slow]), now)
    await store.write_status_if_due(KEY)
    assert len(api.applied) == 2, "the directive for it is written with it"
    now += DECIDING_SECONDS
    await store.write_status_if_due(KEY)
    assert len(api.applied) == 3, "but it does not wait for ever"
    now += FLOOR_SECONDS - 1
    controller.process_report(reported(7, applied_plan_version=1, observed_plan_version=1), now)
    await store.write_status_if_due(KEY)
    assert len(api.applied) == 3, "what follows at once is written with it"
    now += 1
    await store.write_status_if_due(KEY)
    assert len(api.applied) == 4
    now += 60
    await store.write_status_if_due(KEY)
    assert len(api.applied) == 5, "an agent that is silent is noticed"


class LaterPlan:
    """Planner of first plans that answers when the test lets it."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, spec: JobSpec) -> Schedule:
        await self.go.wait()
        return make_initial_schedule(spec)


async def test_after_a_restart_requests_wait_for_their_jobs_to_be_read_and_planned() -> None:
    api: Any = SlowApi()
    first = LaterPlan()
    store = ClusterJobStore(api, first_plan=first)
    large = copy.deepcopy(JOB)
    large["metadata"]["name"] = "large"
    large["spec"]["parallelism"]["stages"] = 64
    large["spec"]["schedule"] = {"microbatches": 72}
    waiting = {
        name: asyncio.create_task(store.wait_for_job("default", name))
        for name in ("gpt", "large", "none")
    }
    await asyncio.sleep(0)
    assert not any(each.done() for each in waiting.values())
    store.process_change(KEY, JOB)
    await asyncio.wait_for(waiting["gpt"], 5)
    store.process_change(("default", "large"), large)
    store.mark_all_listed()
    await asyncio.wait_for(waiting["none"], 5)
    late = asyncio.create_task(store.wait_for_job("default", "large"))
    await asyncio.sleep(0)
    assert not (waiting["large"].done() or late.done())
    assert store.find_token_requirements("default", "large") is None
    first.go.set()
    await asyncio.wait_for(asyncio.gather(waiting["large"], late), 5)
    assert store.find_token_requirements("default", "large") is not None
    await asyncio.wait_for(store.wait_for_job("default", "another"), 5)
