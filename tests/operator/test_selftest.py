"""``helm test``: it waits for an ingest that is still starting, and for nothing else."""

from __future__ import annotations

import ssl
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from certificates import self_signed

from pipemorph_operator import selftest


class Answers(BaseHTTPRequestHandler):
    """Gives the answers that its server is set to, and logs nothing."""

    def do_GET(self) -> None:
        self.send_response(self.server.answer)  # type: ignore[attr-defined]
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class Ingest(ThreadingHTTPServer):
    """Has its port from the beginning, and listens there from ``start`` on."""

    answer = 401

    def __init__(self, certificate: Path, key: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answers, bind_and_activate=False)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.server_bind()
        self.url = f"https://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._context = context

    def start(self) -> None:
        self.server_activate()
        self.socket = self._context.wrap_socket(self.socket, server_side=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()


@pytest.fixture
def authority(tmp_path: Path) -> tuple[Path, Path]:
    return self_signed(tmp_path, name="ingest")


@pytest.fixture
def ingest(authority: tuple[Path, Path]) -> Iterator[Ingest]:
    server = Ingest(*authority)
    yield server
    server.stop()


def run(monkeypatch: pytest.MonkeyPatch, url: str, authority: Path, *more: str) -> None:
    arguments = ["selftest", f"--ingest-url={url}", f"--ingest-ca={authority}", *more]
    monkeypatch.setattr(sys, "argv", arguments)
    selftest.main()


def test_an_ingest_that_starts_late_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
    ingest: Ingest,
    authority: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    starting = threading.Timer(0.3, ingest.start)
    starting.start()
    run(monkeypatch, ingest.url, authority[0])
    starting.join()
    assert capsys.readouterr().out == f"{ingest.url} answers and requires a token\n"


def test_a_missing_ingest_is_waited_for_no_longer_than_requested(
    monkeypatch: pytest.MonkeyPatch, ingest: Ingest, authority: tuple[Path, Path]
) -> None:
    with pytest.raises(SystemExit, match=f"{ingest.url} cannot be reached: .*Connect call failed"):
        run(monkeypatch, ingest.url, authority[0], "--wait=0")


def test_a_certificate_of_another_authority_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, ingest: Ingest, tmp_path: Path
) -> None:
    ingest.start()
    began = time.monotonic()
    other, _ = self_signed(tmp_path, name="other")
    with pytest.raises(SystemExit, match="is not trusted"):
        run(monkeypatch, ingest.url, other)
    assert time.monotonic() - began < selftest.WAIT_SECONDS / 2


def test_an_ingest_that_takes_strangers_fails(
    monkeypatch: pytest.MonkeyPatch, ingest: Ingest, authority: tuple[Path, Path]
) -> None:
    ingest.answer = 200
    ingest.start()
    with pytest.raises(SystemExit, match="returned 200 to a request without token; expected 401"):
        run(monkeypatch, ingest.url, authority[0])
