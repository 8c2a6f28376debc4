"""Access to the live page of a run, its cost, and its parts."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_support import DEADLINE, LocalRun
from watched_jobs import watched

from pipemorph.cli import main
from pipemorph.control.history.job_history import DecisionRecord
from pipemorph.diagnose.formats.rank_traces import TraceIndex
from pipemorph.errors import InputError
from pipemorph.local import live_page
from pipemorph.local.live_page import LIMITS, LivePageServer, open_page_listener
from pipemorph.local.results.journal import find_keep_reason
from pipemorph.views.live_page import document_cache
from pipemorph.views.live_page.page_builder import build_page_document
from pipemorph.views.live_page.page_document import PageDocument

Answer = tuple[int, bytes, http.client.HTTPMessage]


class Sight:
    """Fake of a run: the same job for every request."""

    def __init__(self) -> None:
        self.known, self.traces = watched(4, 12)
        self.requests: list[tuple[int | None, int | None]] = []

    def document(self, *key: Any) -> PageDocument:
        return self.make(*key)

    def make(
        self, column: int | None, iteration: int | None, number: int, live: bool
    ) -> PageDocument:
        self.requests.append((column, iteration))
        return build_page_document(self.known, self.traces, column=0, number=number, live=live)


@pytest.fixture
def sight() -> Sight:
    return Sight()


@pytest.fixture
def server(sight: Sight) -> Iterator[LivePageServer]:
    with (
        open_page_listener(0) as listener,
        LivePageServer(sight.document, listener) as made,
    ):
        yield made


def ask(server: LivePageServer, path: str, method: str = "GET", **headers: str) -> Answer:
    address = server.url.split("/")[2]
    connection = http.client.HTTPConnection(address, timeout=DEADLINE)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def own(server: LivePageServer, rest: str = "") -> str:
    return "/" + server.url.split("/", 3)[3] + rest


def test_the_page_and_its_documents(server: LivePageServer) -> None:
    status, page, headers = ask(server, own(server))
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert b"job-of-4" in page
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    status, body, _ = ask(server, own(server, "view"))
    view = PageDocument.model_validate_json(body)
    assert status == 200 and view.live
    assert ask(server, own(server, f"view?after={view.number}"))[:2] == (200, b"null")


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/", "GET"),
        ("/x/", "GET"),
        ("/x/view", "GET"),
        ("/{token}x/", "GET"),
        ("/{token}", "GET"),
        ("/{token}/report.json", "GET"),
        ("/{token}/view/", "GET"),
        ("/view?token={token}", "GET"),
        ("/{token}/", "POST"),
        ("/{token}/view", "PUT"),
        ("/favicon.ico", "GET"),
        ("/v1/job", "GET"),
    ],
)
def test_anything_else_is_refused_without_details(
    server: LivePageServer, sight: Sight, path: str, method: str
) -> None:
    token = own(server).strip("/")
    status, body, headers = ask(server, path.format(token=token), method, Authorization="Bearer x")
    assert (status, body) == (401, b"")
    assert sight.requests == [] and "WWW-Authenticate" not in headers


def test_strangers_do_not_keep_a_viewer_out(server: LivePageServer) -> None:
    """Connections that send nothing, and ones that are refused, and sent again and again."""
    connection = http.client.HTTPConnection(server.url.split("/")[2], timeout=DEADLINE)
    connection.request("GET", own(server))
    assert connection.getresponse().read()
    address = ("127.0.0.1", int(server.url.split(":")[2].split("/")[0]))
    with contextlib.ExitStack() as stack:
        for number in range(400):
            stranger = stack.enter_context(socket.create_connection(address, DEADLINE))
            if number % 2:
                stranger.sendall(b"GET /x/ HTTP/1.1\r\nHost: x\r\n\r\n")
        acceptor = server._acceptor
        assert acceptor is not None
        began = time.monotonic()
        assert ask(server, own(server))[0] == 200
        assert time.monotonic() - began < DEADLINE / 2
        assert len(acceptor._open) <= LIMITS.unauthenticated + 2
        connection.request("GET", own(server, "view"))  # The connection was not displaced.
        assert connection.getresponse().status == 200
    connection.close()


def test_input_that_is_no_http_is_reported_to_its_sender_only(
    server: LivePageServer, sight: Sight, caplog: pytest.LogCaptureFixture
) -> None:
    address = server.url.split("/")[2].split(":")
    for sent, status in ((b"GET /\xff HTTP/1.1\r\n\r\n", b"400"), (b"x\r\n\r\n", b"400"),
                         (b"GET /%ff HTTP/1.1\r\nHost: x\r\n\r\n", b"401")):  # fmt: skip
        with socket.create_connection((address[0], int(address[1])), DEADLINE) as connection:
            connection.sendall(sent)
            assert connection.recv(4096).split()[1] == status, sent
    assert sight.requests == [] and caplog.records == []


@pytest.mark.parametrize("error", [KeyError("ops"), TimeoutError()])
def test_a_document_that_cannot_be_made_is_reported_once(
    server: LivePageServer,
    sight: Sight,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    made = sight.make

    def fail(*args: Any, **more: Any) -> PageDocument:
        raise error

    monkeypatch.setattr(sight, "make", fail)
    for _ in range(3):
        status, body, headers = ask(server, own(server, "view"))
        assert (status, body, headers["X-Frame-Options"]) == (503, b"", "DENY")
    late = isinstance(error, TimeoutError)
    reason = "the control loop does not answer" if late else "KeyError('ops')"
    assert caplog.messages == [f"the page of the job cannot be made now: {reason}"]
    monkeypatch.setattr(sight, "make", made)
    assert ask(server, own(server, "view"))[0] == 200


def test_each_run_has_another_token(sight: Sight) -> None:
    with open_page_listener(0) as one, open_page_listener(0) as other:
        urls = {LivePageServer(sight.document, each).url for each in (one, other)}
    tokens = {url.split("/")[3] for url in urls}
    assert len(tokens) == 2 and all(len(token) >= 32 for token in tokens)


def test_only_this_machine_reaches_it() -> None:
    with open_page_listener(0) as found:
        assert found.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_is_reported_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = LocalRun(tmp_path, {})
    with open_page_listener(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--watch {port}: port {port}.*cannot be used"):
            open_page_listener(port)
        os.chdir(tmp_path)
        assert main(["run", "job.yaml", "--out", "out", "--watch", str(port)]) == 2
    assert "cannot be used" in capsys.readouterr().err and not run.out.exists()


def test_a_job_after_watch_is_not_its_port(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--out", "out", "--watch", "job.yaml"])
    assert "put the job before --watch" in capsys.readouterr().err


def test_all_viewers_share_a_document(server: LivePageServer, sight: Sight) -> None:
    numbers = {json.loads(ask(server, own(server, "view"))[1])["number"] for _ in range(20)}
    assert len(sight.requests) == len(numbers) <= 2  # A second may begin meanwhile.


def test_documents_have_a_budget(
    server: LivePageServer, sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents take two seconds of a core each; the next one has to wait for 20 times as long."""
    now = {"wall": time.monotonic(), "cpu": 0.0}
    monkeypatch.setattr(document_cache.time, "monotonic", lambda: now["wall"])
    monkeypatch.setattr(document_cache.time, "thread_time", lambda: now["cpu"])
    made = sight.make

    def costly(*args: Any, **more: Any) -> PageDocument:
        now["cpu"] += 2.0
        return made(*args, **more)

    monkeypatch.setattr(sight, "make", costly)
    for second in range(600):
        now["wall"] += 1.0
        assert server.documents.get((None, None)) is not None
        server.documents.get((None, second))  # Absent iterations count, too.
    # The burst, and five per cent of ten minutes.
    assert 15 <= len(sight.requests) <= (3 + 0.05 * 600) / 2 + 2


@pytest.fixture
def costly(sight: Sight, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Simulate the clocks. A document takes ``each`` seconds of a core."""
    now = {"wall": time.monotonic(), "cpu": 0.0, "each": 0.4}
    monkeypatch.setattr(document_cache.time, "monotonic", lambda: now["wall"])
    monkeypatch.setattr(document_cache.time, "thread_time", lambda: now["cpu"])
    made = sight.make

    def document(*args: Any, **more: Any) -> PageDocument:
        now["cpu"] += now["each"]
        return made(*args, **more)

    monkeypatch.setattr(sight, "make", document)
    return now


def test_a_viewer_that_steps_through_iterations_is_paced(
    server: LivePageServer, sight: Sight, costly: dict[str, float]
) -> None:
    """A viewer holds an arrow key down for a minute, another one reads the newest iteration."""
    looked = set()
    for step in range(600):
        costly["wall"] += 0.1
        server.documents.get((None, 38 - step % 38))
        live = server.documents.get(document_cache.NEWEST_KEY)
        assert live is not None and sight.requests[live.number - 1] == document_cache.NEWEST_KEY
        looked.add(live.number)
    assert (
        costly["cpu"]
        <= document_cache.BURST_SECONDS + document_cache.MOST_CORE_SHARE * 60 + 2 * costly["each"]
    )
    assert len(looked) >= 4 and server.documents.number - len(looked) >= 4, "they take turns"


def test_one_document_stops_the_page_for_a_minute_at_most(
    server: LivePageServer, sight: Sight, costly: dict[str, float]
) -> None:
    costly["each"] = 1000.0
    server.documents.get(document_cache.NEWEST_KEY)
    costly["wall"] += document_cache.BURST_SECONDS / document_cache.MOST_CORE_SHARE + 1
    server.documents.get(document_cache.NEWEST_KEY)
    assert len(sight.requests) == 2


def test_to_write_a_document_counts_too(
    server: LivePageServer, costly: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(view: str) -> str:
        costly["cpu"] += 1.0
        return "page"

    def dump(view: PageDocument) -> str:
        costly["cpu"] += 0.5
        return "{}"

    monkeypatch.setattr(document_cache, "render_page_json", render)
    monkeypatch.setattr(PageDocument, "model_dump_json", dump)
    for _ in range(5):  # Pages are written once.
        server.documents.get(document_cache.NEWEST_KEY, page=True)
    assert server.documents.budget.seconds_remaining == pytest.approx(
        document_cache.BURST_SECONDS - 0.4 - 0.5 - 1.0
    )


@pytest.mark.parametrize("key", [(7, None), (None, 12345), (9, 40)])
def test_a_missing_document_is_replaced_by_the_newest(
    server: LivePageServer, sight: Sight, key: tuple[int | None, int | None]
) -> None:
    newest = server.documents.get(document_cache.NEWEST_KEY)
    assert server.documents.get(key) is newest and len(sight.requests) == 1


def test_a_client_with_too_many_requests_has_to_wait(server: LivePageServer) -> None:
    ask(server, own(server, "view"))
    server.documents.budget.seconds_remaining = -100.0
    status, body, headers = ask(server, own(server, "view?iteration=7"))
    assert (status, body, headers["Retry-After"]) == (429, b"", "1")
    assert ask(server, own(server, "view"))[0] == 200, "there is one of before"
    assert ask(server, own(server))[0] == 200
    assert ask(server, own(server, "?iteration=7"))[0] == 200, "a page begins with what there is"


def test_a_viewer_receives_the_end(server: LivePageServer) -> None:
    ask(server, own(server, "view"))
    last: list[PageDocument] = []

    def look() -> None:
        while not last or last[-1].live:
            last.append(PageDocument.model_validate_json(ask(server, own(server, "view"))[1]))

    looking = threading.Thread(target=look)
    looking.start()
    began = time.monotonic()
    server.announce_end()
    looking.join(DEADLINE)
    assert not last[-1].live and time.monotonic() - began < live_page.END_NOTICE_SECONDS + DEADLINE


def test_last_documents_have_a_budget_too(server: LivePageServer, costly: dict[str, float]) -> None:
    """A client that steps through all of a completed job does not get each document at once."""
    server.documents.get(document_cache.NEWEST_KEY)
    server.documents.budget.seconds_remaining = -1.0
    server.documents.mark_finished()
    last = server.documents.get(document_cache.NEWEST_KEY)
    assert last is not None and not last.live
    assert server.documents.get((None, 20)) is not None, "one of another iteration"
    made = server.documents.number
    for each in range(5, 20):
        server.documents.get((None, each))
    assert server.documents.number == made
    costly["wall"] += 1000.0
    assert server.documents.get(document_cache.NEWEST_KEY) is last, "nothing follows"
    assert server.documents.get((None, 5)) is not None and server.documents.number == made + 1


def test_a_client_that_waits_for_the_end_receives_nothing_before_it(
    server: LivePageServer, sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "VIEWER_TIMEOUT", -1.0)  # There is no other viewer.
    answers: list[Answer] = []
    waits = threading.Thread(
        target=lambda: answers.append(ask(server, own(server, "view?until=end")))
    )
    waits.start()
    while not server._end_waiters:
        time.sleep(0.01)
    assert answers == [] and sight.requests == []
    server.announce_end()
    waits.join(DEADLINE)
    ((status, body, _),) = answers
    assert status == 200 and not PageDocument.model_validate_json(body).live


def test_the_end_does_not_wait_without_viewers(server: LivePageServer) -> None:
    began = time.monotonic()
    server.announce_end()
    assert time.monotonic() - began < live_page.END_NOTICE_SECONDS / 2


def test_a_run_prints_the_address_of_its_page(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, {})
    host = run.start("--watch")
    try:
        assert host.stdout is not None
        line = next(line for line in host.stdout if line.startswith("watch: "))
        found = re.fullmatch(r"watch: http://(127\.0\.0\.1:\d+)(/[\w-]{32}/)\n", line)
        assert found is not None, line
        connection = http.client.HTTPConnection(found.group(1), timeout=DEADLINE)
        connection.request("GET", found.group(2) + "view")
        view = PageDocument.model_validate_json(connection.getresponse().read())
        connection.close()
        assert (view.job, view.status.state, view.measured) == ("fake", "Starting", None)
    finally:
        host.terminate()
        host.communicate(timeout=DEADLINE)
        for pid in run.processes():
            os.kill(pid, 9)


@pytest.mark.parametrize(
    ("kinds", "reason"),
    [("keep", "keep"), ("keep outcome", "keep"), ("adapt outcome", ""), ("outcome", ""), ("", "")],
)
def test_the_result_of_a_change_is_no_refusal(kinds: str, reason: str) -> None:
    decisions = [
        DecisionRecord(at=0.0, iteration=9, kind=kind, reason=kind, line="")  # type: ignore[arg-type]
        for kind in kinds.split()
    ]
    assert find_keep_reason(decisions) == reason


# --- traces that grow -------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., None]:
    def write(rank: int, *iterations: int, mode: str = "a", end: str = "\n") -> None:
        with (tmp_path / f"ops-rank{rank}.jsonl").open(mode) as file:
            for iteration in iterations:
                line = {
                    "rank": rank,
                    "stage": rank,
                    "replica": 0,
                    "iteration": iteration,
                    "plan_version": 0,
                    "origin": 0.0,
                    "ops": [["F", 0, iteration, 99]],
                }
                file.write(json.dumps(line) + end)

    return write


def test_an_index_follows_its_files(tmp_path: Path, write: Callable[..., None]) -> None:
    index = TraceIndex()
    index.index_new_lines(tmp_path)
    assert index.list_iterations() == []
    write(0, 0, 1)
    write(1, 0)
    index.index_new_lines(tmp_path)
    assert index.list_iterations() == [0]
    write(1, 1, 2)
    write(0, 2, end="")  # The file is still being written.
    index.index_new_lines(tmp_path)
    assert index.list_iterations() == [0, 1]
    with (tmp_path / "ops-rank0.jsonl").open("a") as file:
        file.write("\n")
    index.index_new_lines(tmp_path)
    assert index.list_iterations() == [0, 1, 2]
    assert [trace.ops[0].start for trace in index.read_iterations([2])[2]] == [2, 2]


def test_an_index_notices_a_file_that_was_shortened(
    tmp_path: Path, write: Callable[..., None]
) -> None:
    write(0, *range(20))
    index = TraceIndex()
    index.index_new_lines(tmp_path)
    path = tmp_path / "ops-rank0.jsonl"
    shorter = path.with_suffix(".tmp")
    shorter.write_text("".join(path.read_text().splitlines(keepends=True)[15:]))
    shorter.replace(path)
    write(0, *range(20, 60))  # Longer than before.
    index.index_new_lines(tmp_path)
    assert index.list_iterations() == list(range(15, 60))
    assert index.read_iterations([30])[30][0].iteration == 30


def test_an_index_skips_files_that_grew_too_much(
    tmp_path: Path, write: Callable[..., None]
) -> None:
    index = TraceIndex(newest=1500)
    write(0, *range(10))
    index.index_new_lines(tmp_path)
    write(0, *range(10, 1000))
    index.index_new_lines(tmp_path)
    found = index.list_iterations()
    assert found[-1] == 999 and len(found) < 40
    assert index.read_iterations([999])[999][0].iteration == 999


def test_an_index_may_begin_near_the_end(tmp_path: Path, write: Callable[..., None]) -> None:
    write(0, *range(1000))
    index = TraceIndex(newest=1500)
    index.index_new_lines(tmp_path)
    found = index.list_iterations()
    assert 5 < len(found) < 20 and found[-1] == 999
    assert index.read_iterations([found[0]])[found[0]][0].iteration == found[0]
