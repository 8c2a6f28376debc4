"""Jobs in the cache are those of the API server, also after a watch that fell behind."""

from __future__ import annotations

import asyncio
from typing import Any

from pipemorph_operator.reconcile.owned_jobs import OwnedJobs
from pipemorph_operator.reconcile.workqueue import WorkQueue

Key = tuple[str, str]


def job(owner: str = "gpt", **status: Any) -> Any:
    labels = {"pipemorph.io/job-name": owner, "pipemorph.io/job-uid": f"uid-{owner}"}
    return {"metadata": {"labels": labels}, "status": status}


async def test_jobs_are_known_by_their_owner_until_they_are_gone() -> None:
    queue: WorkQueue[Key] = WorkQueue()
    owned = OwnedJobs(queue)

    def changed(namespace: str, body: Any) -> None:
        if body is not None:
            body["metadata"] |= {"name": "gpt-0", "namespace": namespace, "uid": "u"}
        owned.process_change((namespace, "gpt-0"), body)

    changed("team", job())
    changed("other", job(active=1))
    assert len(owned.find_jobs("team", "uid-gpt")) == len(owned.find_jobs("other", "uid-gpt")) == 1
    changed("team", job(active=2))
    assert [each.active for each in owned.find_jobs("team", "uid-gpt")] == [2]
    # Another owner's, by its labels.
    changed("team", job("new"))
    assert owned.find_jobs("team", "uid-gpt") == []
    assert len(owned.find_jobs("team", "uid-new")) == 1
    enqueued = {await queue.get() for _ in range(3)}
    assert enqueued == {("team", "gpt"), ("other", "gpt"), ("team", "new")}
    queue.done(("team", "new"))
    changed("team", None)
    assert owned.find_jobs("team", "uid-new") == []
    async with asyncio.timeout(10):
        assert await queue.get() == ("team", "new"), "its owner gets no turn"
