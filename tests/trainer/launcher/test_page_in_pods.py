"""The live page of a job of four stages in two pods: real launchers, ranks, agent and page."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch import free_port
from manifests import manifest_of
from pods import Job
from prepared_processes import EXECUTE

from pipemorph.views.live_page.page_document import PageDocument
from pipemorph_trainer.launcher.page.gateway import PageGateway

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

TOKEN = "the-token-of-the-page"
STAGES = 4
SPEC = {"parallelism": {"stages": STAGES, "ranksPerPod": 2}}


class Watched:
    """A job with its page."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        token = folder / "page-token"
        token.write_text(TOKEN)
        env = {
            "PIPEMORPH_PAGE_PORT": str(self.port),
            "PIPEMORPH_PAGE_TOKEN_FILE": str(token),
            # A fork of a process with torch has more memory than the page may have.
            EXECUTE: "1",
        }
        self.job = Job(folder / "job", spec=SPEC, env=env, iterations=10_000)

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except ConnectionError:
            return 0, b""
        finally:
            connection.close()

    def view(self) -> PageDocument | None:
        status, body = self.get(f"/{TOKEN}/view")
        return PageDocument.model_validate_json(body) if status == 200 else None

    def until(self, what: str, found: Callable[[PageDocument], bool]) -> PageDocument:
        newest: list[PageDocument] = []

        def look() -> bool:
            view = self.view()
            newest[:] = [] if view is None else [view]
            return view is not None and found(view)

        self.job.wait(what, look)
        return newest[0]

    def pages(self) -> list[Path]:
        """The processes of the page, in /proc."""
        launcher = self.job.pods[0].pid
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if int(parent) == launcher and b"launcher.page" in command:
                found.append(entry)
        return found


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.job.close()


def test_the_page_of_a_pod_goes_on_after_the_ranks_started_again(watched: Watched) -> None:
    job = watched.job
    job.wait("the pod listens", lambda: watched.get("/x/")[0] == 401)
    job.wait_for_iterations(10)
    assert watched.pages() == [], "no page is open"

    view = watched.until("ops of an iteration", lambda view: view.measured is not None)
    assert (view.job, view.status.state, view.columns) == ("pods", "Running", [""])
    assert view.measured is not None and len(view.measured.rows) == STAGES
    assert {row.name for row in view.measured.rows} == {f"stage {i}" for i in range(STAGES)}
    assert len(view.links) == STAGES - 1 and view.seconds is not None and view.done > 9
    assert view.steps.index[0] < view.measured.iteration - 1, "iterations from before are shown"
    status, page = watched.get(f"/{TOKEN}/")
    assert status == 200 and b"<!doctype html>" in page.lower()

    (process,) = watched.pages()
    assert (process / "oom_score_adj").read_text() == "1000\n"
    assert int((process / "stat").read_text().rpartition(")")[2].split()[16]) == 10, "nice"
    limit, _ = resource.prlimit(int(process.name), resource.RLIMIT_DATA)
    assert limit == 512 << 20

    os.kill(job.rank(1), signal.SIGKILL)
    view = watched.until("it recovers", lambda view: any(each.seconds for each in view.recoveries))
    (recovery,) = view.recoveries
    assert "rank 1 (stage 1) was killed by SIGKILL" in recovery.cause
    assert recovery.went_on_with is not None and recovery.repeated is not None
    at = view.done
    view = watched.until(
        "ops of the new ranks",
        lambda view: view.measured is not None and view.measured.iteration > at,
    )
    assert view.status.state == "Running" and len(watched.pages()) == 1
    assert watched.pages() == [process], "the same process"

    assert watched.get("/wrong/view") == (401, b"")
    job.pods[0].send_signal(signal.SIGTERM)
    last = watched.until("the end", lambda view: not view.live)
    assert last.status.state in ("Suspended", "Failed")
    job.ends()
    assert watched.pages() == []


def test_viewers_see_the_end_of_a_job_without_iterations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real process, without ranks."""
    (tmp_path / "page").mkdir()
    spec = {
        "parallelism": {"stages": STAGES},
        "schedule": {"microbatches": 4},
        "trainer": {"module": "m", "iterations": 9},
    }
    job = manifest_of(spec, namespace="team")
    (tmp_path / "job.json").write_text(json.dumps(job))
    monkeypatch.setenv("PIPEMORPH_JOB_FILE", str(tmp_path / "job.json"))
    monkeypatch.setenv(EXECUTE, "1")
    gate = PageGateway(0, TOKEN, tmp_path / "page", print)
    gate.start_listening()

    def view() -> PageDocument:
        with urllib.request.urlopen(f"http://127.0.0.1:{gate.port}/{TOKEN}/view") as answer:
            return PageDocument.model_validate_json(answer.read())

    before = view()
    assert (before.status.state, before.live, before.namespace) == ("Starting", True, "team")
    ends = threading.Thread(target=gate.close, args=("failed", "rank 3 was killed by SIGKILL"))
    ends.start()
    last = before
    while last.live:
        last = view()
    assert (
        last.status.state == "Failed" and "rank 3 was killed by SIGKILL" in last.explanation[0][1]
    )
    ends.join()
