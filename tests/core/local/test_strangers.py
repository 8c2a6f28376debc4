"""Clients without the token at the ports of ``pipemorph run``: the job goes on."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import time
from pathlib import Path

import pytest
from local_support import DEADLINE, LocalRun
from strangers import connect_strangers, raised_file_limit, read_resident_kib
from waiting import until

OPEN_FILES, CROWD = 1024, 1250
"""Limit of open files of the run, and connections of each kind to each port."""
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


@pytest.mark.full
def test_a_run_goes_on_and_restarts_its_ranks_among_strangers(tmp_path: Path) -> None:
    """The run has the default limit of open files, and more connections than that at each port, of
    every kind that costs a client nothing."""
    spec = {"failurePolicy": {"maxRestarts": 1}}
    run = LimitedRun(tmp_path, {}, others="cling", stages=2, spec=spec, executed=True)
    with (
        (tmp_path / "output").open("w+") as output,
        raised_file_limit(2 * len(SENT) * CROWD + OPEN_FILES),
        contextlib.ExitStack() as stack,
    ):
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
        before = read_resident_kib(host.pid)
        for sent in SENT.values():
            for port in (ingest, int(page[1])):
                connect_strangers(stack, port, CROWD, sent)
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
        grown = read_resident_kib(host.pid) - before
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
