"""The benchmark of many jobs reports what an ingest and an agent did, and notices each failure."""

from __future__ import annotations

import asyncio
import ssl
import sys
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from certificates import self_signed

from pipemorph.control import JobController
from pipemorph.ingest import BearerAuthenticator, IngestServer, InMemoryJobStore
from pipemorph.manifest import parse_job
from pipemorph.protocol import LinkHealthReport

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import scale

TOKEN = "token"


@pytest.mark.parametrize("stages", [2, 64])
def test_reports_are_those_of_an_agent(stages: int) -> None:
    """Reports begin with all states, then an iteration, and in an alarm the link that is slow in
    both directions; the numbers are those of the report."""
    reports, found = scale.RecordedReports(stages), {}
    for sequence, kind in enumerate(("first", "quiet", "alarm", "slow"), 1):
        body = reports.make_body("team", "llama", sequence, 7, kind)
        report = found[kind] = LinkHealthReport.model_validate_json(body)
        assert (report.namespace, report.job, report.sequence) == ("team", "llama", sequence)
        assert (report.observed_plan_version, report.applied_plan_version) == (7, 7)
    assert {row.link for row in found["first"].links} == set(range(stages - 1))
    assert {row.stage for row in found["first"].stages} == set(range(stages))
    assert [len(found[kind].iterations) for kind in ("first", "quiet", "alarm", "slow")] == [
        1, 1, 0, 1
    ]  # fmt: skip
    rows = {(row.link, row.direction): row.health for row in found["alarm"].directions}
    (link,) = {link for link, _ in rows}
    assert rows == {(link, "forward"): "slow", (link, "backward"): "slow"}
    assert found["quiet"].is_progress and not found["first"].is_progress


@pytest.mark.full
def test_agents_report_to_a_real_ingest_that_is_replaced(tmp_path: Path) -> None:
    """Agents are answered again, and no version comes twice. Only the API server is missing."""
    cert, key = self_signed(tmp_path, "localhost", "127.0.0.1")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    sizes = [2, 8, 2]
    jobs: list[dict[str, Any]] = [
        {"namespace": "n", "name": f"j{i}", "token": TOKEN, "stages": stages, "seed": i + 1}
        for i, stages in enumerate(sizes)
    ]
    for job, slow_at in zip(jobs, (2.0, 2.5, 11.0), strict=True):
        job |= {
            "slow_at": slow_at,
            "slow_iteration": scale.compute_gain(job["stages"], job["seed"]),
        }

    @asynccontextmanager
    async def ingest(port: int = 0) -> Any:
        store = InMemoryJobStore()
        for number, stages in enumerate(sizes):
            text = yaml.safe_dump(scale.make_job(stages, f"j{number}"))
            store.add_job("n", f"j{number}", JobController(parse_job(text).spec))
        async with IngestServer(store, BearerAuthenticator(TOKEN), port=port, tls=tls) as server:
            yield server

    async def run() -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            async with ingest() as server:
                port = int(server.url.rpartition(":")[2])
                load = scale.run_load(
                    "agents", port=port, server_name="localhost", ca_file=str(cert), jobs=jobs,
                    period=1.0, seconds=14.0, gone_at=5.0, first=scale.FIRST,
                )  # fmt: skip
                figures = await asyncio.to_thread(stack.enter_context, load)
                began = loop.time()
                await asyncio.sleep(5.2 + began - loop.time())
            async with ingest(port):
                return await asyncio.to_thread(figures)
        raise AssertionError

    found = asyncio.run(run())
    assert sorted(each[:2] for each in found["directives"]) == [[2, 2.0], [2, 11.0], [8, 2.5]]
    assert (found["twice"], found["unasked"], found["reconnects"]) == ([], [], 0)
    assert len(found["back"]) == 3


@pytest.mark.full
def test_the_agent_of_a_large_job_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host receives the slow links, and answers with a plan."""
    monkeypatch.setattr(scale, "SETTLE", 1.5)
    monkeypatch.setattr(scale, "FAULT", 2.0)
    found = asyncio.run(scale.measure_large_job(32, 4, 1.5))
    assert all(0 <= found[phase] < 1 for phase in ("well", "one_slow", "half_slow"))
    assert found["plan_version"] >= 1 and found["reports"] > 3
    assert found["sent"] > 1000 and found["answered"] > 1000
