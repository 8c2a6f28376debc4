"""The agent and a standby of the ingest, and the recipients of the agent's token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from observing import Agent
from plant_support import spec
from played_ingest import PlayedIngest, certificate
from waiting import until_async

from pipemorph.protocol import DirectiveEnvelope
from pipemorph_trainer.agent.ingest_client import IngestClient

ANSWER: dict[str, object] = DirectiveEnvelope(memory="m").model_dump(mode="json")


@asynccontextmanager
async def agent_of(url: str, folder: Path) -> AsyncIterator[None]:
    """An agent that reports and polls."""
    (folder / "token").write_text("secret")
    uplink = IngestClient(
        base_url=url, namespace="default", job="j", attempt=0, token_file=folder / "token",
        observer=Agent(spec()).observer,
        on_directive=lambda _: None,
    )  # fmt: skip
    working = asyncio.create_task(uplink.run())
    try:
        yield
    finally:
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def test_a_standby_is_tried_again_when_it_says_and_is_no_failure(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "pipemorph.agent")
    ingest = PlayedIngest(None)
    ingest.says, ingest.status = {"error": "this replica stands by"}, 503
    # A backoff that grows would reach so many requests after half a minute.
    ingest.headers = {"Retry-After": "0"}
    async with ingest.running(), agent_of(f"http://127.0.0.1:{ingest.port}", tmp_path):
        await until_async(lambda: len(ingest.tokens) > 60, "requests", seconds=15)
        ingest.says, ingest.status = ANSWER, 200
        await until_async(lambda: "report works again" in caplog.text, "an answer")
    assert "report failed" in caplog.text
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_the_token_is_sent_only_to_the_ingests_certificate(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ingest has a certificate of another authority, or speaks no TLS."""
    made = certificate(tmp_path, "localhost")
    (tmp_path / "stranger").mkdir()
    monkeypatch.setenv("PIPEMORPH_CA_FILE", str(made[0]))
    strangers = PlayedIngest(certificate(tmp_path / "stranger", "localhost")), PlayedIngest(None)
    ingest = PlayedIngest(made)
    ingest.says = ANSWER
    for each in strangers:
        caplog.clear()
        async with each.running(), agent_of(f"https://localhost:{each.port}", tmp_path):
            await until_async(lambda: caplog.text.count("failed (") >= 2, "two failures")
            assert each.tokens == []
    async with ingest.running(), agent_of(f"https://localhost:{ingest.port}", tmp_path):
        await until_async(lambda: "Bearer secret" in ingest.tokens, "a report")
