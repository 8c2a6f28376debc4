"""What keeps a thousand jobs cheap: few writes, few turns, small connections."""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import copy
from typing import Any

import pytest

from pipemorph_operator.ingest.__main__ import TLS_READ_BYTES
from pipemorph_operator.ingest.store import MOST_WRITES, ClusterStore
from pipemorph_operator.ingest.write_budget import BURST, WRITES_PER_SECOND, Budget
from pipemorph_operator.reconcile.watches import Watched

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
        "control": {"attempt": 0, "planVersion": 0, "snapshot": "x"},
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
        changed("status", "control", "snapshot", to="y"),
        changed("status", "conditions", 1, "status", to="False"),
        changed("status", "training", "slowLinks", to=[{"link": 0, "replica": 0}]),
        changed("metadata", "resourceVersion", to="77"),
    ],
    ids=["iteration", "snapshot", "LinksHealthy", "slow link that is noted", "resourceVersion"],
)
def test_figures_of_the_ingest_cost_the_operator_no_turn(body: dict[str, Any]) -> None:
    watched = Watched()
    assert watched.delivered(KEY, None, BODY)
    assert not watched.delivered(KEY, "MODIFIED", BODY)
    assert not watched.delivered(KEY, "MODIFIED", body)


@pytest.mark.parametrize(
    "body",
    [
        changed("metadata", "generation", to=2),
        changed("metadata", "labels", to={"a": "b"}),
        changed("metadata", "deletionTimestamp", to="2026-01-01T00:00:00Z"),
        changed("status", "ready", to="9/9"),
        changed("status", "conditions", 0, "status", to="False"),
        changed("status", "training", "state", to="finished"),
        changed("status", "training", "slowLinks", to=[{"link": 1, "replica": 0}]),
    ],
    ids=["spec", "labels", "deleted", "ready", "Running", "trained", "another slow link"],
)
def test_whatever_a_decision_rests_on_costs_one(body: dict[str, Any]) -> None:
    watched = Watched()
    watched.delivered(KEY, "ADDED", BODY)
    assert watched.delivered(KEY, "MODIFIED", body)
    assert not watched.delivered(KEY, "MODIFIED", body)


def test_a_list_and_a_deletion_always_cost_a_turn() -> None:
    watched = Watched()
    for kind in (None, "ADDED", None, "DELETED", "ADDED"):
        assert watched.delivered(KEY, kind, BODY)


def test_turns_have_what_progress_leaves_and_directives_wait_for_nobody() -> None:
    budget = Budget(0.0)
    written = sum(budget.allows(0.0, state_changed=False) for _ in range(1000))
    assert written == BURST / 2 + 1
    assert sum(budget.allows(0.0, state_changed=True) for _ in range(1000)) == BURST / 2 - 1
    for _ in range(10):
        budget.charge(0.0)
    assert not budget.allows(10 / WRITES_PER_SECOND, state_changed=True), "directives come first"
    assert budget.allows(12 / WRITES_PER_SECOND, state_changed=True)
    for _ in range(10_000):
        budget.charge(1.0)
    assert budget.allows(1.0 + 2 * BURST / WRITES_PER_SECOND, state_changed=True), "never starved"


def test_asyncio_still_calls_the_size_of_its_read_buffer_that() -> None:
    """The ingest makes it smaller; under another name, 2,000 connections would take 500 MB."""
    assert asyncio.sslproto.SSLProtocol.max_size > TLS_READ_BYTES


class SlowApi:
    """An API server that answers when the test says so."""

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


def test_a_slow_api_server_is_asked_for_few_things_at_a_time_and_for_directives_first() -> None:
    async def run() -> None:
        api: Any = SlowApi()
        store = ClusterStore(api, clock=lambda: 1000.0)
        op = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}
        for i in range(100):
            spec = {
                "parallelism": {"stages": 2},
                "schedule": {"microbatches": 4, "stageTimes": [op] * 2},
                "trainer": {"module": "m", "iterations": 1},
            }
            metadata = {"name": f"j{i}", "namespace": "d", "uid": f"u{i}", "generation": 1}
            job = {"metadata": metadata, "spec": spec, "status": {"attempt": 0}}
            store.changed(("d", f"j{i}"), job)
        persisted = [
            asyncio.create_task(store.persist("d", f"j{i}", controller_of(store, i).snapshot()))
            for i in range(50)
        ]
        await asyncio.sleep(0)
        for i in range(50, 100):
            await asyncio.wait_for(store.look(("d", f"j{i}")), 5)
        api.go.set()
        await asyncio.gather(*persisted)
        assert sorted(api.applied) == sorted(f"j{i}" for i in range(50)), "progress held them up"
        assert api.most == MOST_WRITES
        await store.look(("d", "j50"))
        assert api.applied[-1] == "j50", "what waited is written when there is room"

    asyncio.run(run())


def controller_of(store: ClusterStore, i: int) -> Any:
    return store.lookup("d", f"j{i}")
