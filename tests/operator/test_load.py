"""What keeps a thousand jobs cheap: few writes, few turns, small connections."""

from __future__ import annotations

import asyncio.sslproto
import copy
from typing import Any

import pytest

from pipemorph_operator.handlers import Watched
from pipemorph_operator.ingest.pace import BURST, WRITES_PER_SECOND, Budget

KEY = ("default", "gpt")
BODY: dict[str, Any] = {
    "metadata": {"name": "gpt", "namespace": "default", "uid": "u", "generation": 1},
    "spec": {"parallelism": {"stages": 4}},
    "status": {
        "state": "Running",
        "ready": "4/4",
        "attempt": 0,
        "conditions": [
            {"type": "Running", "status": "True"},
            {"type": "LinksHealthy", "status": "True"},
        ],
        "training": {"attempt": 0, "state": "training", "iteration": 5, "slowLinks": []},
        "control": {"attempt": 0, "epoch": 0, "snapshot": "x"},
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
        changed("metadata", "resourceVersion", to="77"),
    ],
    ids=["iteration", "snapshot", "LinksHealthy", "resourceVersion"],
)
def test_figures_of_the_ingest_cost_the_operator_no_turn(body: dict[str, Any]) -> None:
    watched = Watched()
    assert watched.is_news(KEY, None, BODY)
    assert not watched.is_news(KEY, "MODIFIED", BODY)
    assert not watched.is_news(KEY, "MODIFIED", body)


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
    ids=["spec", "labels", "deleted", "ready", "Running", "trained", "slow link"],
)
def test_whatever_a_decision_rests_on_costs_one(body: dict[str, Any]) -> None:
    watched = Watched()
    watched.is_news(KEY, "ADDED", BODY)
    assert watched.is_news(KEY, "MODIFIED", body)
    assert not watched.is_news(KEY, "MODIFIED", body)


def test_a_list_and_a_deletion_always_cost_a_turn() -> None:
    watched = Watched()
    for kind in (None, "ADDED", None, "DELETED", "ADDED"):
        assert watched.is_news(KEY, kind, BODY)


def test_turns_have_what_progress_leaves_and_directives_wait_for_nobody() -> None:
    budget = Budget(0.0)
    written = sum(budget.allows(0.0, turned=False) for _ in range(1000))
    assert written == BURST / 2 + 1
    assert sum(budget.allows(0.0, turned=True) for _ in range(1000)) == BURST / 2 - 1
    for _ in range(10):
        budget.charge(0.0)
    assert not budget.allows(10 / WRITES_PER_SECOND, turned=True), "directives come first"
    assert budget.allows(12 / WRITES_PER_SECOND, turned=True)
    for _ in range(10_000):
        budget.charge(1.0)
    assert budget.allows(1.0 + 2 * BURST / WRITES_PER_SECOND, turned=True), "never starved"


def test_asyncio_still_calls_the_size_of_its_read_buffer_that() -> None:
    """The ingest makes it smaller; under another name, 2,000 connections would take 500 MB."""
    assert asyncio.sslproto.SSLProtocol.max_size >= 16 * 1024
