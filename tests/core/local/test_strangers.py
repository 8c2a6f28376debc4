"""Clients without the token at the ports of ``pipemorph run``: the job goes on."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from local_support import DEADLINE, LocalRun
from waiting import until

OPEN_FILES, CROWD = 1024, 1250
"""Of the run, and connections of each kind to each port."""
MOST_MEMORY, MOST_SECONDS = 30 << 10, 1.0
"""KiB that all of them may cost the host; until a client with the token is served."""
SENT = {
    "idle": b"",
    "half a head": b"GET /v1/job HTTP/1.1\r\nHost: x\r\n",
    "no such method": b"PUT /v1/jobs/a/b/reports HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    "a forged token": b"GET /v1/job HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n\r\n",
}


class LimitedRun(LocalRun):
    """A run that may open :data:`OPEN_FILES` files."""

    def command(self, *extra: str) -> list[str]:
        limited = f'ulimit -n {OPEN_FILES}; exec "$@"'
        return ["sh", "-c", limited, "sh", *super().command(*extra)]


def memory(pid: int) -> int:
    """Resident memory, KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found, status
    return int(found[1])


def crowd(stack: contextlib.ExitStack, port: int, sent: bytes) -> None:
    """Connect :data:`CROWD` strangers from two addresses, each of which sends the same."""
    for number in range(CROWD):
        stranger = stack.enter_context(socket.socket())
        stranger.bind((f"127.0.0.{1 + number % 2}", 0))
        stranger.connect(("127.0.0.1", port))
        with contextlib.suppress(ConnectionError):
            stranger.sendall(sent)


@pytest.fixture
def own_files() -> Iterator[None]:
    """As many open files as the crowd of this test needs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * len(SENT) * CROWD + OPEN_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may open {hard} files; the test needs {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.full
@pytest.mark.usefixtures("own_files")
def test_a_run_goes_on_and_restarts_its_ranks_among_strangers(tmp_path: Path) -> None:
    """At the default limit of open files, with more connections than that at each port, of every
    kind that costs a client nothing."""
    spec = {"failurePolicy": {"maxRestarts": 1}}
    run = LimitedRun(tmp_path, {}, others="cling", stages=2, spec=spec, executed=True)
    with (tmp_path / "output").open("w+") as output, contextlib.ExitStack() as stack:
        host = run.start("--watch")
        seen = run.seen_by(0)
        ingest = int(seen["env"]["PIPEMORPH_INGEST_URL"].rsplit(":", 1)[1])
        token = bytes.fromhex(seen["files"]["PIPEMORPH_TOKEN_FILE"][1]).decode()
        assert host.stdout is not None
        page = None
        while page is None:
            line = host.stdout.readline()
            assert line, "the run ended before it printed the address of its page"
            page = re.search(r"http://127.0.0.1:(\d+)/(\S+)", line)
        before = memory(host.pid)
        for sent in SENT.values():
            for port in (ingest, int(page[1])):
                crowd(stack, port, sent)
        for port, path in ((ingest, "/v1/job?rank=0"), (int(page[1]), f"/{page[2]}")):
            began = time.monotonic()
            client = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
            client.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            status = client.getresponse().status
            client.close()
            # ``run`` has no such route: 404 in answer to a valid token, 401 to others.
            assert status == (404 if port == ingest else 200)
            took = time.monotonic() - began
            assert took < MOST_SECONDS, f"served after {took:.2f} s"
        grown = memory(host.pid) - before
        assert grown < MOST_MEMORY, f"{grown / 1024:.1f} MiB"
        print(f"strangers: served within {took:.2f} s, {grown / 1024:.1f} MiB more")
        os.kill(seen["pid"], signal.SIGKILL)
        until(lambda: run.ended, "the run ends", DEADLINE)
        output.write(host.stdout.read())
        output.seek(0)
        text = output.read()
    assert host.returncode == 0, text
    assert "Traceback" not in text
    assert run.report()["recoveries"]
    assert run.leftovers() == []
