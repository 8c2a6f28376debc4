"""The pod that leads has the label that the Service selects, and no other one of its Deployment."""

from __future__ import annotations

import asyncio

import pytest
from operator_leases import Leases
from waiting import until_async

from pipemorph_operator.kube import election
from pipemorph_operator.kube.client import build_path
from pipemorph_operator.kube.election import LeaderLabel

SELECTOR = "app.kubernetes.io/component=ingest"
PATIENCE = 15.0


def label_of(api: Leases, pod: str) -> LeaderLabel:
    return LeaderLabel(api, "system", pod, SELECTOR, owner="ingest")


async def test_a_new_leader_takes_the_label_of_a_dead_one_before_it_has_its_own() -> None:
    api = Leases()
    api.add("dead", leads=True)
    api.add("next")
    api.add("stranger", leads=True, app="another")
    order: list[list[str]] = []

    async def arrives(verb: str, url: str) -> None:
        if verb == "patch":
            order.append(api.labelled())

    api.arrives = arrives  # type: ignore[method-assign]
    holding = asyncio.create_task(label_of(api, "next").maintain_label(api))
    await until_async(lambda: "next" in api.labelled(), "the leader's label")
    holding.cancel()
    assert api.labelled() == ["next", "stranger"]
    assert order == [["dead", "stranger"], ["stranger"]]


async def test_labels_are_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are edited by users, or a write of a former leader arrives late."""
    monkeypatch.setattr(election, "CHECK_SECONDS", 0.01)
    monkeypatch.setattr(election, "RETRY_SECONDS", 0.01)
    api = Leases()
    api.add("former")
    api.add("leader")
    holding = asyncio.create_task(label_of(api, "leader").maintain_label(api))
    await until_async(lambda: api.labelled() == ["leader"], "the leader's label")
    api.add("former", leads=True)
    api.add("leader")
    await until_async(lambda: api.labelled() == ["leader"], "its label again")
    api.away = True
    api.add("former", leads=True)
    await until_async(lambda: api.made("list")[-1:] != [], "another check")
    assert not holding.done(), "an API server that is away ends it"
    api.away = False
    await until_async(lambda: api.labelled() == ["leader"], "its label alone")
    holding.cancel()


async def test_a_leader_that_stops_removes_its_label_within_a_second(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(election, "REMOVE_SECONDS", 0.02)
    api = Leases()
    api.add("a", leads=True)
    label = label_of(api, "a")
    await label.remove_label()
    assert api.labelled() == []
    await label.remove_label()

    async def hangs(verb: str, url: str) -> None:
        await asyncio.Event().wait()

    api.arrives = hangs  # type: ignore[method-assign]
    await label.remove_label()
    assert "the leader's label could not be removed: TimeoutError" in caplog.text
    assert build_path("Pod", "system", "a") in api.made("patch")
