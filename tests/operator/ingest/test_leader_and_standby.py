"""Leader and standby: ingests in one process; the standby takes over, however the leader ends."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from operator_leases import Leases
from operator_objects import body
from waiting import until_async

from pipemorph.ingest import IngestServer, PlannerPool
from pipemorph_operator.ingest import __main__ as ingest
from pipemorph_operator.kube.client import build_path
from pipemorph_operator.names import LABEL_LEADER

KEY = ("team", "gpt")
REPORTS = "/v1/jobs/team/gpt/reports"

Object = dict[str, Any]


class Api(Leases):
    """Leases, pods of the ingest and a job, and a client that writes only by its permit."""

    _permit = None

    def __init__(self, *pods: str) -> None:
        super().__init__()
        self.changes: set[asyncio.Queue[Object]] = set()
        """Unseen changes of each watch."""
        self.history: list[str] = []
        """Writes of labels and of the Lease's holder."""
        for name in pods:
            self.add(name)
        self.put(body() | {"status": {"attempt": 0}})

    def _write(self, url: str, obj: Object) -> Object:
        made = super()._write(url, obj)
        name = made["metadata"]["name"]
        if "/pods/" in url:
            leads = LABEL_LEADER in made["metadata"]["labels"]
            self.history.append(f"{name} {'has' if leads else 'has no'} label")
        elif "/leases/" in url:
            said = f"{made['spec']['holderIdentity'] or 'none'} has the Lease"
            self.history += [] if self.history[-1:] == [said] else [said]
        elif "/pipemorphjobs/" in url:
            for each in self.changes:
                each.put_nowait(copy.deepcopy(made))
        return made

    async def arrives(self, verb: str, url: str) -> None:
        if self._permit is not None and verb not in ("get", "list"):
            self._permit()
        await super().arrives(verb, url)

    async def list_pages(self, url: str, **_: Any) -> AsyncIterator[Object]:
        items = await self.list(url)
        yield {"metadata": {"resourceVersion": "1"}, "items": items}

    async def watch(
        self, url: str, version: str, *, labels: str | None = None, fields: str | None = None
    ) -> AsyncIterator[tuple[str, Object]]:
        queue: asyncio.Queue[Object] = asyncio.Queue()
        self.changes.add(queue)
        try:
            while True:
                yield "MODIFIED", await queue.get()
        finally:
            self.changes.discard(queue)


class Ingest:
    """A container of a pod with a client of its own."""

    def __init__(self, api: Api, pod: str, made: list[IngestServer]) -> None:
        self.client = api.another()
        self.stop = asyncio.Event()
        options = ingest.build_parser().parse_args([
            "--lease=system/ingest", "--lease-seconds=1", f"--identity={pod}",
            "--pods=app.kubernetes.io/component=ingest", "--plain-http", "--host=127.0.0.1",
            "--port=0", "--metrics-port=0", "--planners=1",
        ])  # fmt: skip
        self._made, self._number = made, len(made)
        self.running = asyncio.create_task(ingest.serve(options, self.client, self.stop))

    @property
    def server(self) -> IngestServer:
        return self._made[self._number]

    async def serves(self) -> int:
        """Status code of the answer to a report without a token."""
        await until_async(lambda: len(self._made) > self._number, "a server")
        await until_async(lambda: self.server._acceptor is not None, "a socket")
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.server.url + REPORTS, data=b"{}") as answer,
        ):
            return answer.status

    def tracks(self) -> bool:
        return self.server.handler._store.find_job(*KEY) is not None

    async def kill(self) -> None:
        """End it as SIGKILL does: none of its later writes reaches the API server."""
        self.client.away = True
        self.running.cancel()
        await asyncio.wait([self.running])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[IngestServer]:
    """The servers of all ingests."""
    found: list[IngestServer] = []

    class Recorded(IngestServer):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            found.append(self)

    async def nothing(*_: object) -> None:
        pass

    monkeypatch.setattr(ingest, "IngestServer", Recorded)
    monkeypatch.setattr(PlannerPool, "start_workers", nothing)
    return found


async def test_one_leads_and_the_other_takes_over_however_the_leader_ends(
    made: list[IngestServer],
) -> None:
    api = Api("a", "b")
    first = Ingest(api, "a", made)
    await until_async(lambda: api.labelled() == ["a"], "the first to lead")
    second = Ingest(api, "b", made)
    assert await second.serves() == 503
    assert await first.serves() == 401 and first.tracks()
    # The job changes: the standby follows, and tracks nothing.
    api.put(api.objects[build_path("PipeMorphJob", *KEY)] | {"status": {"attempt": 1}})
    assert await second.serves() == 503 and not second.tracks()

    # The leader is killed, with its label on, and its container starts again in its pod.
    await first.kill()
    assert api.labelled() == ["a"] and api.holders() == {"ingest": "a"}
    await until_async(lambda: api.labelled() == ["b"], "the second to lead")
    assert await second.serves() == 401
    await until_async(second.tracks, "the job")
    controller = second.server.handler._store.find_job(*KEY)
    assert controller is not None and controller.attempt == 1
    again = Ingest(api, "a", made)
    assert await again.serves() == 503

    # SIGTERM: the label goes before the Lease, and the other one leads at once.
    api.history.clear()
    second.stop.set()
    await until_async(lambda: api.labelled() == ["a"], "the first to lead again")
    await second.running
    assert api.history == [
        "b has no label", "none has the Lease", "a has the Lease", "a has label"
    ]  # fmt: skip
    assert await again.serves() == 401

    # The Lease is deleted; then the leader is cut off, and finds that another one leads.
    term = api.spec("ingest")["leaseTransitions"]
    api.lose("ingest")
    await until_async(lambda: bool(api.holders()), "the Lease again")
    assert api.holders() == {"ingest": "a"} and api.spec("ingest")["leaseTransitions"] > term
    assert await again.serves() == 401 and not again.running.done()
    again.client.away = True
    other = Ingest(api, "b", made)
    await until_async(lambda: api.labelled() == ["b"], "the other to lead")
    # Work that needs no API server goes on: the former leader cannot know.
    assert await again.serves() == 401
    again.client.away = False
    await again.running
    assert api.labelled() == ["b"] and api.holders() == {"ingest": "b"}
    assert await other.serves() == 401
    other.stop.set()
    await other.running
    assert api.labelled() == [] and api.holders() == {}
