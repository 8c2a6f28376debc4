"""What is known of Jobs is what the API server has, also after a watch that fell behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from kubernetes.aio.client import Configuration

from pipemorph_operator.cluster.client import ApiRefused, Cluster
from pipemorph_operator.reconcile.watches import OwnedJobs
from pipemorph_operator.reconcile.workqueue import WorkQueue

Key = tuple[str, str]


def job(name: str, namespace: str = "team", owner: str = "gpt", **status: Any) -> Any:
    labels = {"pipemorph.io/job-name": owner, "pipemorph.io/job-uid": f"uid-{owner}"}
    metadata = {"name": name, "namespace": namespace, "uid": f"u-{name}", "labels": labels}
    metadata["resourceVersion"] = "1"
    return {"metadata": metadata, "status": status}


class Behind(Cluster):
    """An API server whose watch has fallen behind after its first event."""

    def __init__(self, *lists: list[Any]) -> None:
        super().__init__(Configuration())
        self.lists = [*lists]
        self.asked: list[Mapping[str, str]] = []

    async def _json(self, method: str, url: str, query: Any = None, *_: Any, **__: Any) -> Any:
        self.asked.append(query)
        return {"metadata": {"resourceVersion": "1"}, "items": self.lists.pop(0)}

    async def _watch_once(
        self, url: str, version: str, selected: Mapping[str, str]
    ) -> AsyncIterator[tuple[str, Any]]:
        self.asked.append(selected)
        if not self.lists:
            await asyncio.Event().wait()
        event = job("gpt-0", active=1)
        event["metadata"]["resourceVersion"] = "2"
        yield "MODIFIED", event
        raise ApiRefused(410, "Expired", "too old resource version")


def within(scenario: Callable[[WorkQueue[Key]], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await scenario(WorkQueue())

    asyncio.run(main())


def test_a_job_that_went_while_the_watch_was_broken_is_gone() -> None:
    async def scenario(queue: WorkQueue[Key]) -> None:
        cluster = Behind([job("gpt-0", active=2), job("gpt-1")], [job("gpt-1")])
        owned = OwnedJobs(queue)
        task = asyncio.create_task(owned.follow(cluster, None))
        assert await queue.get() == ("team", "gpt")
        assert owned.synced.is_set()
        queue.done(("team", "gpt"))
        while [each.name for each in owned.jobs("team", "uid-gpt")] != ["gpt-1"]:
            assert await queue.get() == ("team", "gpt"), "its owner is not asked a turn for"
            queue.done(("team", "gpt"))
        task.cancel()
        selected = {query["labelSelector"] for query in cluster.asked}
        assert selected == {"pipemorph.io/job-name"}, "Jobs of all the world are listed"

    within(scenario)


def test_jobs_are_known_by_their_owner_until_they_are_deleted() -> None:
    async def scenario(queue: WorkQueue[Key]) -> None:
        owned = OwnedJobs(queue, ["team", "other"])
        owned.changed("LISTED", job("gpt-0"), "team")
        owned.changed("SYNCED", {}, "team")
        assert not owned.synced.is_set(), "one namespace is not listed yet"
        owned.changed("LISTED", job("gpt-0", "other", active=1), "other")
        owned.changed("SYNCED", {}, "other")
        assert owned.synced.is_set()
        assert len(owned.jobs("team", "uid-gpt")) == len(owned.jobs("other", "uid-gpt")) == 1
        owned.changed("MODIFIED", job("gpt-0", active=2), "team")
        assert [each.active for each in owned.jobs("team", "uid-gpt")] == [2]
        # Another job under the name of one that is gone.
        owned.changed("ADDED", job("gpt-0", owner="new"), "team")
        assert owned.jobs("team", "uid-gpt") == []
        assert len(owned.jobs("team", "uid-new")) == 1
        owned.changed("DELETED", job("gpt-0", owner="new"), "team")
        assert owned.jobs("team", "uid-new") == []
        asked = {await queue.get() for _ in range(3)}
        assert asked == {("team", "gpt"), ("other", "gpt"), ("team", "new")}

    within(scenario)
