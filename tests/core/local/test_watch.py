"""Who may see the live page of a run, what it costs, and what it is made of."""

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
from pipemorph.control.record.history import Decision
from pipemorph.errors import InputError
from pipemorph.local import watch
from pipemorph.local.results.history import Journal, View
from pipemorph.local.results.traces import TraceIndex
from pipemorph.local.watch import LIMITS, FolderTraces, Observer, Told, WatchServer, listen
from pipemorph.watch import documents
from pipemorph.watch.build import watch_view
from pipemorph.watch.document import WatchView

Answer = tuple[int, bytes, http.client.HTTPMessage]


class Sight:
    """Stands for a run: the same job, whatever is asked for."""

    def __init__(self) -> None:
        self.known, self.traces = watched(4, 12)
        self.asked: list[tuple[int | None, int | None]] = []

    def document(self, *asked: Any) -> WatchView:
        return self.make(*asked)

    def make(self, column: int | None, iteration: int | None, number: int, live: bool) -> WatchView:
        self.asked.append((column, iteration))
        return watch_view(self.known, self.traces, column=0, number=number, live=live)


@pytest.fixture
def sight() -> Sight:
    return Sight()


@pytest.fixture
def server(sight: Sight) -> Iterator[WatchServer]:
    with (
        listen(0) as listener,
        WatchServer(sight.document, listener) as made,
    ):
        yield made


def ask(server: WatchServer, path: str, method: str = "GET", **headers: str) -> Answer:
    address = server.url.split("/")[2]
    connection = http.client.HTTPConnection(address, timeout=DEADLINE)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def own(server: WatchServer, rest: str = "") -> str:
    return "/" + server.url.split("/", 3)[3] + rest


def test_the_page_and_its_documents(server: WatchServer) -> None:
    status, page, headers = ask(server, own(server))
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert b"job-of-4" in page
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    status, body, _ = ask(server, own(server, "view"))
    view = WatchView.model_validate_json(body)
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
def test_anything_else_is_refused_and_told_nothing(
    server: WatchServer, sight: Sight, path: str, method: str
) -> None:
    token = own(server).strip("/")
    status, body, headers = ask(server, path.format(token=token), method, Authorization="Bearer x")
    assert (status, body) == (401, b"")
    assert sight.asked == [] and "WWW-Authenticate" not in headers


def test_strangers_do_not_keep_a_viewer_out(server: WatchServer) -> None:
    """Connections that send nothing, and ones that are refused, and sent again and again."""
    kept = http.client.HTTPConnection(server.url.split("/")[2], timeout=DEADLINE)
    kept.request("GET", own(server))
    assert kept.getresponse().read()
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
        kept.request("GET", own(server, "view"))  # Not displaced by any of them.
        assert kept.getresponse().status == 200
    kept.close()


def test_what_is_no_http_is_told_to_its_sender_only(
    server: WatchServer, sight: Sight, caplog: pytest.LogCaptureFixture
) -> None:
    address = server.url.split("/")[2].split(":")
    for sent, status in ((b"GET /\xff HTTP/1.1\r\n\r\n", b"400"), (b"x\r\n\r\n", b"400"),
                         (b"GET /%ff HTTP/1.1\r\nHost: x\r\n\r\n", b"401")):  # fmt: skip
        with socket.create_connection((address[0], int(address[1])), DEADLINE) as connection:
            connection.sendall(sent)
            assert connection.recv(4096).split()[1] == status, sent
    assert sight.asked == [] and caplog.records == []


@pytest.mark.parametrize("error", [KeyError("ops"), TimeoutError()])
def test_a_document_that_cannot_be_made_is_said_once(
    server: WatchServer,
    sight: Sight,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    made = sight.make

    def fail(*args: Any, **more: Any) -> WatchView:
        raise error

    monkeypatch.setattr(sight, "make", fail)
    for _ in range(3):
        status, body, headers = ask(server, own(server, "view"))
        assert (status, body, headers["X-Frame-Options"]) == (503, b"", "DENY")
    late = isinstance(error, TimeoutError)
    told = "the control loop does not answer" if late else "KeyError('ops')"
    assert caplog.messages == [f"the page of the job cannot be made now: {told}"]
    monkeypatch.setattr(sight, "make", made)
    assert ask(server, own(server, "view"))[0] == 200


def test_each_run_has_another_token(sight: Sight) -> None:
    with listen(0) as one, listen(0) as other:
        urls = {WatchServer(sight.document, each).url for each in (one, other)}
    tokens = {url.split("/")[3] for url in urls}
    assert len(tokens) == 2 and all(len(token) >= 32 for token in tokens)


def test_only_this_machine_reaches_it() -> None:
    with listen(0) as found:
        assert found.getsockname()[0] == "127.0.0.1"


def test_a_port_in_use_is_said_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = LocalRun(tmp_path, {})
    with listen(0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"--watch {port}: port {port}.*cannot be used"):
            listen(port)
        os.chdir(tmp_path)
        assert main(["run", "job.yaml", "--out", "out", "--watch", str(port)]) == 2
    assert "cannot be used" in capsys.readouterr().err and not run.out.exists()


def test_a_job_after_watch_is_not_its_port(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--out", "out", "--watch", "job.yaml"])
    assert "put the job before --watch" in capsys.readouterr().err


def test_all_who_look_share_a_document(server: WatchServer, sight: Sight) -> None:
    numbers = {json.loads(ask(server, own(server, "view"))[1])["number"] for _ in range(20)}
    assert len(sight.asked) == len(numbers) <= 2  # A second may begin meanwhile.


def test_documents_have_a_budget(
    server: WatchServer, sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these takes two seconds of a core; the next one has to wait for 20 times as long."""
    now = {"wall": time.monotonic(), "cpu": 0.0}
    monkeypatch.setattr(documents.time, "monotonic", lambda: now["wall"])
    monkeypatch.setattr(documents.time, "thread_time", lambda: now["cpu"])
    made = sight.make

    def costly(*args: Any, **more: Any) -> WatchView:
        now["cpu"] += 2.0
        return made(*args, **more)

    monkeypatch.setattr(sight, "make", costly)
    for second in range(600):
        now["wall"] += 1.0
        assert server.documents.get((None, None)) is not None
        server.documents.get((None, second))  # Of those that are not there, too.
    # What may be taken at once, and five per cent of ten minutes.
    assert 15 <= len(sight.asked) <= (3 + 0.05 * 600) / 2 + 2


@pytest.fixture
def costly(sight: Sight, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the clocks say. A document takes ``each`` seconds of a core."""
    now = {"wall": time.monotonic(), "cpu": 0.0, "each": 0.4}
    monkeypatch.setattr(documents.time, "monotonic", lambda: now["wall"])
    monkeypatch.setattr(documents.time, "thread_time", lambda: now["cpu"])
    made = sight.make

    def document(*args: Any, **more: Any) -> WatchView:
        now["cpu"] += now["each"]
        return made(*args, **more)

    monkeypatch.setattr(sight, "make", document)
    return now


def test_who_steps_through_iterations_is_paced(
    server: WatchServer, sight: Sight, costly: dict[str, float]
) -> None:
    """Somebody holds an arrow key down for a minute, another one looks at the newest iteration."""
    looked = set()
    for step in range(600):
        costly["wall"] += 0.1
        server.documents.get((None, 38 - step % 38))
        live = server.documents.get(documents.NEWEST)
        assert live is not None and sight.asked[live.number - 1] == documents.NEWEST
        looked.add(live.number)
    assert costly["cpu"] <= documents.BURST + documents.SHARE * 60 + 2 * costly["each"]
    assert len(looked) >= 4 and server.documents.number - len(looked) >= 4, "they take turns"


def test_one_document_stops_the_page_for_a_minute_at_most(
    server: WatchServer, sight: Sight, costly: dict[str, float]
) -> None:
    costly["each"] = 1000.0
    server.documents.get(documents.NEWEST)
    costly["wall"] += documents.BURST / documents.SHARE + 1
    server.documents.get(documents.NEWEST)
    assert len(sight.asked) == 2


def test_to_write_a_document_counts_too(
    server: WatchServer, costly: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(view: str) -> str:
        costly["cpu"] += 1.0
        return "page"

    def dump(view: WatchView) -> str:
        costly["cpu"] += 0.5
        return "{}"

    monkeypatch.setattr(documents, "page_of", render)
    monkeypatch.setattr(WatchView, "model_dump_json", dump)
    for _ in range(5):  # Each is written once.
        server.documents.get(documents.NEWEST, page=True)
    assert server.documents.budget.left == pytest.approx(documents.BURST - 0.4 - 0.5 - 1.0)


@pytest.mark.parametrize("asked", [(7, None), (None, 12345), (9, 40)])
def test_what_is_not_there_is_the_newest_document(
    server: WatchServer, sight: Sight, asked: tuple[int | None, int | None]
) -> None:
    newest = server.documents.get(documents.NEWEST)
    assert server.documents.get(asked) is newest and len(sight.asked) == 1


def test_who_asks_for_too_much_is_asked_to_wait(server: WatchServer) -> None:
    ask(server, own(server, "view"))
    server.documents.budget.left = -100.0
    status, body, headers = ask(server, own(server, "view?iteration=7"))
    assert (status, body, headers["Retry-After"]) == (429, b"", "1")
    assert ask(server, own(server, "view"))[0] == 200, "there is one of before"
    assert ask(server, own(server))[0] == 200
    assert ask(server, own(server, "?iteration=7"))[0] == 200, "a page begins with what there is"


def test_who_looks_is_told_of_the_end(server: WatchServer) -> None:
    ask(server, own(server, "view"))
    last: list[WatchView] = []

    def look() -> None:
        while not last or last[-1].live:
            last.append(WatchView.model_validate_json(ask(server, own(server, "view"))[1]))

    looking = threading.Thread(target=look)
    looking.start()
    began = time.monotonic()
    server.finish()
    looking.join(DEADLINE)
    assert not last[-1].live and time.monotonic() - began < watch.LAST_WORD + DEADLINE


def test_last_documents_have_a_budget_too(server: WatchServer, costly: dict[str, float]) -> None:
    """Who steps through all that there is of a job that is over does not get each at once."""
    server.documents.get(documents.NEWEST)
    server.documents.budget.left = -1.0
    server.documents.finish()
    last = server.documents.get(documents.NEWEST)
    assert last is not None and not last.live
    assert server.documents.get((None, 20)) is not None, "one of another iteration"
    made = server.documents.number
    for each in range(5, 20):
        server.documents.get((None, each))
    assert server.documents.number == made
    costly["wall"] += 1000.0
    assert server.documents.get(documents.NEWEST) is last, "nothing follows"
    assert server.documents.get((None, 5)) is not None and server.documents.number == made + 1


def test_who_waits_for_the_end_is_told_nothing_before_it(
    server: WatchServer, sight: Sight, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "LOOKING", -1.0)  # Nobody else looks.
    answers: list[Answer] = []
    waits = threading.Thread(
        target=lambda: answers.append(ask(server, own(server, "view?until=end")))
    )
    waits.start()
    while not server._waiting_for_end:
        time.sleep(0.01)
    assert answers == [] and sight.asked == []
    server.finish()
    waits.join(DEADLINE)
    ((status, body, _),) = answers
    assert status == 200 and not WatchView.model_validate_json(body).live


def test_nobody_is_waited_for_if_nobody_looks(server: WatchServer) -> None:
    began = time.monotonic()
    server.finish()
    assert time.monotonic() - began < watch.LAST_WORD / 2


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
        view = WatchView.model_validate_json(connection.getresponse().read())
        connection.close()
        assert (view.job, view.status.state, view.measured) == ("fake", "Starting", None)
    finally:
        host.terminate()
        host.communicate(timeout=DEADLINE)
        for pid in run.processes():
            os.kill(pid, 9)


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [("keep", "keep"), ("keep outcome", "keep"), ("adapt outcome", ""), ("outcome", ""), ("", "")],
)
def test_what_a_change_brought_is_no_refusal(tmp_path: Path, kinds: str, kept: str) -> None:
    decisions = tuple(
        Decision(at=0.0, iteration=9, kind=kind, reason=kind, line="")  # type: ignore[arg-type]
        for kind in kinds.split()
    )
    known, _ = watched(4, 12)
    observer = Observer(
        known.job,
        Journal(view=View(decisions=decisions)),
        FolderTraces(tmp_path),
        lambda: Told(known.status, None),
    )
    assert observer.look().kept == kept


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
    index.update(tmp_path)
    assert index.iterations() == []
    write(0, 0, 1)
    write(1, 0)
    index.update(tmp_path)
    assert index.iterations() == [0]
    write(1, 1, 2)
    write(0, 2, end="")  # It is still written.
    index.update(tmp_path)
    assert index.iterations() == [0, 1]
    with (tmp_path / "ops-rank0.jsonl").open("a") as file:
        file.write("\n")
    index.update(tmp_path)
    assert index.iterations() == [0, 1, 2]
    assert [trace.ops[0].start for trace in index.read([2])[2]] == [2, 2]


def test_an_index_notices_a_file_that_was_shortened(
    tmp_path: Path, write: Callable[..., None]
) -> None:
    write(0, *range(20))
    index = TraceIndex()
    index.update(tmp_path)
    path = tmp_path / "ops-rank0.jsonl"
    shorter = path.with_suffix(".tmp")
    shorter.write_text("".join(path.read_text().splitlines(keepends=True)[15:]))
    shorter.replace(path)
    write(0, *range(20, 60))  # Longer than before.
    index.update(tmp_path)
    assert index.iterations() == list(range(15, 60))
    assert index.read([30])[30][0].iteration == 30


def test_an_index_skips_what_has_grown_too_much(tmp_path: Path, write: Callable[..., None]) -> None:
    index = TraceIndex(newest=1500)
    write(0, *range(10))
    index.update(tmp_path)
    write(0, *range(10, 1000))
    index.update(tmp_path)
    found = index.iterations()
    assert found[-1] == 999 and len(found) < 40
    assert index.read([999])[999][0].iteration == 999


def test_an_index_may_begin_near_the_end(tmp_path: Path, write: Callable[..., None]) -> None:
    write(0, *range(1000))
    index = TraceIndex(newest=1500)
    index.update(tmp_path)
    found = index.iterations()
    assert 5 < len(found) < 20 and found[-1] == 999
    assert index.read([found[0]])[found[0]][0].iteration == found[0]
