"""A standby answers every route of the ingest with 503, and serves as soon as it leads."""

from __future__ import annotations

from typing import Any

import aiohttp
from ingest_client import TOKEN, Scripted, body

from pipemorph.ingest import BearerAuthenticator, IngestServer, InMemoryJobStore, RestartHandler


async def test_a_standby_answers_all_routes_with_503_and_hangs_up_until_it_leads() -> None:
    leads = False
    answers: list[tuple[str, int]] = []
    job = Scripted()
    store = InMemoryJobStore()
    store.add_job("default", "gpt", job)
    generations: Any = store
    server = IngestServer(
        store,
        BearerAuthenticator(TOKEN),
        restart_handler=RestartHandler(generations),
        on_answer=lambda kind, status, _: answers.append((kind, status)),
        leads=lambda: leads,
    )
    async with server, aiohttp.ClientSession() as session:
        routes = [each for each in server._runner.app.router.routes() if each.method != "HEAD"]
        assert len(routes) >= 5
        for route in routes:
            path = route.resource.canonical.format(namespace="default", name="gpt")
            # The client may have a token or none.
            for headers in ({}, {"Authorization": f"Bearer {TOKEN}"}):
                async with session.request(
                    route.method, server.url + path, json=body(), headers=headers
                ) as answer:
                    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
                    assert "stands by" in (await answer.json())["error"]
                    assert answer.headers["Connection"] == "close"
        assert job.sequences == [], "a standby took a report"
        assert ("report", 503) in answers and ("poll", 503) in answers
        leads = True
        async with session.post(
            f"{server.url}/v1/jobs/default/gpt/reports", json=body(),
            headers={"Authorization": f"Bearer {TOKEN}"},
        ) as answer:  # fmt: skip
            assert answer.status == 200
        assert job.sequences == [1]
