"""The process beside the ingest that makes pages: starts, ends, lags, and is replaced."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from ingest_client import PATIENCE
from waiting import until_async
from watch_site import (
    LINKS,
    SLOW,
    Site,
    ops_of,
    serve,
)
from watched_jobs import record

from pipemorph.control import JobController
from pipemorph.ingest import (
    WatchProcessLost,
)
from pipemorph.ingest.watch import desk as watching
from pipemorph.ingest.watch import process as watch_process
from pipemorph.ingest.watch.messages import Check, Forget, Look, Marks, Sight, Verdict
from pipemorph.ingest.watch.pipes import HEADER_BYTES, frame
from pipemorph.watch.access import HEADER
from pipemorph.watch.document import WatchView

pytestmark = pytest.mark.usefixtures("at_once")


def test_a_process_of_its_own_makes_the_documents_and_takes_ops() -> None:
    async def look(site: Site) -> None:
        await site.report(0, 1, iteration=2)
        assert site.process.pid is None, "while nobody watches there is none"
        status, page, headers = await site.get("")
        assert status == 200 and b"gpt" in page and headers["Content-Encoding"] == "gzip"
        assert await site.ops(ops_of(1)) == 200
        await site.report(2, iteration=3, directions=SLOW, links=LINKS)
        plain = {HEADER: "viewer", "Accept-Encoding": "identity"}
        while True:  # Documents are made once a second.
            status, found, headers = await site.get("view", **plain)
            assert status == 200 and "Content-Encoding" not in headers
            view = WatchView.model_validate_json(found)
            if view.steps.index == [0, 1, 2]:
                break
        assert view.links[1].kind == "slow" and view.measured is not None
        assert await site.ops(b"[" * 5000) == 422

    serve(look, own_process=True)


def test_a_process_that_is_killed_is_started_again_and_viewers_ask_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look(site: Site) -> None:
        await site.report(*range(4), iteration=4)
        before = await site.view()
        pid = site.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        waits = asyncio.create_task(site.get())
        await until_async(lambda: bool(site.process._open), "a viewer is connected")
        os.kill(pid, signal.SIGKILL)
        status, said, _ = await waits
        assert status == 503 and b"ask again" in said
        assert await site.report(4, iteration=5), "reports go on"
        monkeypatch.setattr(watch_process, "START_SECONDS", 3600.0)
        assert (await site.get())[0] == 503, "not started again and again"
        assert site.process.pid is None
        monkeypatch.setattr(watch_process, "START_SECONDS", 0.0)
        found = await site.view()
        assert site.process.pid not in (None, pid)
        assert found.steps.index == [*range(5)], "what the controller remembers is told anew"
        assert found.number > before.number, "a page knows that it is another document"

    serve(look, own_process=True)


@pytest.mark.full
def test_a_process_that_lags_is_told_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        before, most = await site.view(), watch_process.MOST_UNREAD
        monkeypatch.setattr(watch_process, "MOST_UNREAD", -1)
        assert await site.report(1, iteration=2)
        assert (await site.get())[0] == 503 and await site.ops(ops_of(1)) == 503
        monkeypatch.setattr(watch_process, "MOST_UNREAD", most)
        while (found := await site.view()).number == before.number:
            pass  # Documents are made once a second.
        assert found.steps.index == [0]

    serve(look, own_process=True)


@pytest.mark.full
def test_a_process_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        monkeypatch.setattr(watch_process, "ANSWER_SECONDS", 0.2)
        os.kill(site.process.pid or 0, signal.SIGSTOP)
        assert (await site.get())[0] == 503
        assert site.process.pid is None

    serve(look, own_process=True)


@pytest.mark.full
def test_what_the_process_cannot_answer_ends_nothing_else(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        pid = site.process.pid
        with pytest.raises(WatchProcessLost, match="see the log of the ingest"):
            await site.process.ask(Check("a token", "default", "gpt"))
        assert (await site.get())[0] == 200 and site.process.pid == pid

    serve(look, own_process=True)
    log = capfd.readouterr().err
    assert "a Check could not be answered" in log and "its host does" in log
    assert "a token" not in log


@pytest.mark.full
def test_an_ingest_that_stops_does_not_wait_for_the_process() -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        os.kill(site.process.pid or 0, signal.SIGSTOP)
        waits = asyncio.create_task(site.get())
        await until_async(lambda: bool(site.process._open), "a viewer is connected")
        began = time.monotonic()
        await site.server.stop()
        assert time.monotonic() - began < PATIENCE / 2, "less than requests in progress may take"
        assert (await waits)[0] == 503
        with pytest.raises(WatchProcessLost, match="the ingest stops"):
            await site.process.ask(Look(1, Marks(), outlook=False))
        await site.process.close()
        assert site.process.pid is None

    serve(look, own_process=True)


@pytest.mark.full
def test_a_process_that_is_to_end_is_told_nothing_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is the next one told what this one has asked."""
    monkeypatch.setattr(watch_process, "START_SECONDS", 0.0)

    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        answers = site.process.on_look

        def end_meanwhile(asked: Look) -> Sight | None:
            site.process.on_look = answers
            site.process.end_idle(-1.0)
            return answers(asked)

        site.process.on_look = end_meanwhile
        assert (await site.get())[0] == 503
        assert (await site.view()).steps.index == [0]

    serve(look, own_process=True)
    assert not [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]


@pytest.mark.full
def test_a_process_that_lags_is_told_nevertheless_what_it_need_not_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        assert await site.ops(ops_of(1)) == 200
        told: list[Any] = []
        monkeypatch.setattr(site.process, "_write", told.append)
        monkeypatch.setattr(watch_process, "MOST_UNREAD", -1)
        desk = site.server._watch.desk  # type: ignore[union-attr]
        monkeypatch.setattr(watching, "OPS_SECONDS", -1.0)
        desk.sweep()
        monkeypatch.setattr(watching, "KEPT_SECONDS", -1.0)
        desk.sweep()
        assert told == [(0, Forget(1, ops=True)), (0, Forget(1, ops=False))]

    serve(look, own_process=True)


@pytest.mark.full
def test_the_process_ends_when_nobody_watches_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        desk = site.server._watch.desk  # type: ignore[union-attr]
        desk.sweep()
        running = site.process._process
        assert running is not None
        monkeypatch.setattr(watching, "KEPT_SECONDS", -1.0)
        desk.sweep()
        assert site.process.pid is None
        assert await asyncio.wait_for(running.wait(), PATIENCE) == 0, "it ends with its input"

    serve(look, own_process=True)


def test_what_seldom_changes_is_told_once_and_changes_of_plan_as_they_are() -> None:
    async def look(site: Site) -> None:
        await site.report(0, iteration=1)
        await site.view()
        desk = site.server._watch.desk  # type: ignore[union-attr]
        (each,) = desk._watching.values()
        running = site.store.lookup("default", "gpt")
        assert isinstance(running, JobController)
        change = record(1, "adapt", 3, running.running)
        running._ledger.records.append(change)
        first = each.sight(Look(each.number, Marks(), outlook=False))
        (told,) = first.changes.values()
        assert first.job is not None and told.plan_version == 1
        again = each.sight(Look(each.number, first.marks, outlook=False))
        assert again.job is None and not again.changes and again.order == first.order
        change.measured = 0.25
        (told,) = each.sight(Look(each.number, first.marks, outlook=False)).changes.values()
        assert told.measured == 0.25
        assert [each.measured for each in (await site.view()).changes] == [0.25]

    serve(look)


def worker(script: str) -> subprocess.Popen[bytes]:
    script = f"from pipemorph.ingest.watch import messages, worker\n{script}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", script], **pipes)  # type: ignore[call-overload]


@pytest.mark.full
def test_a_process_that_takes_too_much_memory_ends() -> None:
    script = """
async def serving():
    bytearray(worker.MEMORY_BYTES)
worker.run(serving)
"""
    with worker(script) as process:
        _, said = process.communicate(timeout=4 * PATIENCE)
    assert process.returncode == 1 and b"MemoryError" in said


@pytest.mark.full
def test_what_is_printed_in_the_process_is_no_answer() -> None:
    script = """
async def check(asked):
    print("printed", flush=True)
    return messages.Verdict(200, "me")
worker.run(lambda: worker.serve(check))
"""
    with worker(script) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(frame((7, Check("token", "default", "gpt"))))
        process.stdin.flush()
        length = int.from_bytes(process.stdout.read(HEADER_BYTES), "big")
        assert pickle.loads(process.stdout.read(length)) == (7, Verdict(200, "me"))
        rest, said = process.communicate(timeout=4 * PATIENCE)
    assert (process.returncode, rest) == (0, b"") and b"printed" in said
