"""Access to the live page of a pod, and programs that start for it."""

from __future__ import annotations

import contextlib
import errno
import http.client
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from launch import free_port
from waiting import until

from pipemorph_trainer.agent.page_feed import SOCKET_VARIABLE
from pipemorph_trainer.launcher.page import gateway
from pipemorph_trainer.launcher.page.gateway import PageGateway

TOKEN = "the-token-of-the-page"
DEADLINE = 30.0
ANSWERS = """
import json, os, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as control:
    token = sys.stdin.read()
    while True:
        body, fds, _, _ = socket.recv_fds(control, 65536, 1)
        message = json.loads(body) if body else {}
        for fd in fds:
            with socket.socket(fileno=fd) as connection:
                said = json.dumps([token, message["head"], os.environ["SOCKET"]]).encode()
                connection.sendall(
                    b"HTTP/1.1 200 OK\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n%s"
                    % (len(said), said)
                )
        if not body or "state" in message or "die" in message.get("head", ""):
            open(os.environ["SOCKET"] + ".end", "w").write(json.dumps(message))
            break
""".replace("SOCKET", SOCKET_VARIABLE)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageGateway]:
    monkeypatch.setattr(gateway, "PROCESS", (sys.executable, "-c", ANSWERS))
    monkeypatch.setattr(gateway, "HEAD_SECONDS", 0.5)
    folder = tmp_path / "page"
    folder.mkdir()
    made = PageGateway(0, TOKEN, folder, print)
    made.start_listening()
    yield made
    made.close("completed", "")
    assert not folder.exists()


def ask(page: PageGateway, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=DEADLINE)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


PATH = f"/{TOKEN}/"


@pytest.mark.parametrize(
    "path", ["/", "/x/", f"{PATH[:-2]}/view", f"{PATH}../x/view", f"/{PATH}", "/view?token=" + PATH]
)
def test_who_has_no_token_gets_401_and_starts_nothing(page: PageGateway, path: str) -> None:
    assert ask(page, path) == (401, b"")
    assert page._process is None


@pytest.mark.parametrize("sent", [b"", b"x" * 8192, b"\x00\xff\r\n", b"GET /\r\n"])
def test_what_is_no_request_is_refused(page: PageGateway, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", page.port), DEADLINE) as connection:
        connection.sendall(sent)
        with contextlib.suppress(OSError):  # The socket is closed already.
            connection.shutdown(socket.SHUT_WR)
        assert connection.recv(4096).startswith(b"HTTP/1.1 401 ")
    assert page._process is None


def test_strangers_hold_a_few_connections_for_a_moment(
    page: PageGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "HEAD_SECONDS", DEADLINE)
    silent = [socket.create_connection(("127.0.0.1", page.port), DEADLINE) for _ in range(40)]
    assert ask(page, "/x/")[0] == 401
    closed = [each for each in silent[:20] if each.recv(1) == b""]
    assert len(closed) == 20, "the oldest of them"
    for each in silent:
        each.close()


def test_without_a_free_file_descriptor_it_pauses_and_goes_on(
    page: PageGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "EXHAUSTED_SECONDS", 0.2)
    accept, tried = socket.socket.accept, [0]

    def exhausted(self: socket.socket) -> object:
        if self is not page._listener:
            return accept(self)
        tried[0] += 1
        if tried[0] <= 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", exhausted)
    assert ask(page, "/x/")[0] == 401
    assert tried == [3], "one try a pause"


def test_a_request_that_does_not_come_is_not_waited_for(page: PageGateway) -> None:
    with socket.create_connection(("127.0.0.1", page.port), DEADLINE) as connection:
        connection.sendall(b"GET /x")
        assert connection.recv(1) == b""


def test_the_first_viewer_with_the_token_starts_the_process(page: PageGateway) -> None:
    status, body = ask(page, PATH + "view?after=3")
    assert status == 200 and b"GET " + PATH.encode() + b"view?after=3 HTTP/1.1" in body
    assert TOKEN.encode() in body and page.environ[SOCKET_VARIABLE].encode() in body
    first = page._process
    assert ask(page, PATH)[0] == 200 and page._process is first


def test_a_process_that_has_ended_is_started_again_after_a_pause(
    page: PageGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(page, PATH + "view?die")[0] == 200
    first = page._process
    assert first is not None and first.wait(DEADLINE) == 0
    assert ask(page, PATH)[0] == 503
    monkeypatch.setattr(gateway, "START_PAUSE_SECONDS", 0.0)
    assert ask(page, PATH)[0] == 200 and page._process is not first


def test_the_process_hears_of_the_end(tmp_path: Path, page: PageGateway) -> None:
    assert ask(page, PATH)[0] == 200
    page.show_restart_cause("rank 3 was killed by SIGKILL")
    end = Path(page.environ[SOCKET_VARIABLE] + ".end")
    page._send_message({"state": "failed", "reason": "x"})
    until(end.exists, "the end")
    assert end.read_text() == '{"state": "failed", "reason": "x"}'


def test_a_port_in_use_is_noted(tmp_path: Path) -> None:
    notes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made = PageGateway(taken.getsockname()[1], TOKEN, tmp_path, notes.append)
        made.start_listening()
        made.close("failed", "")
    (said,) = notes
    assert said.startswith("no live page: port ") and "cannot be used" in said


def test_it_listens_on_loopback_only(page: PageGateway) -> None:
    assert page._listener is not None and page._listener.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("token", "noted"), [("short", "is too short"), (None, "No such file"), (TOKEN, "")]
)
def test_the_operators_variables(token: str | None, noted: str, tmp_path: Path) -> None:
    notes: list[str] = []
    file = tmp_path / "token"
    if token is not None:
        file.write_text(token)
    environ = {gateway.PORT_VARIABLE: str(free_port()), gateway.TOKEN_VARIABLE: str(file)}
    made = PageGateway.from_env(environ, notes.append)
    assert (made is None) is bool(noted) and noted in "".join(notes)
    if made is not None:
        made.close("completed", "")
    assert PageGateway.from_env({}, notes.append) is None
