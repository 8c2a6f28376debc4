"""The process whose forks the tests start instead of programs."""

from __future__ import annotations

import socket
import subprocess
import sys

import prepared_processes
import pytest


def test_a_server_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its late answer must not be taken for that to the next request."""
    monkeypatch.setattr(prepared_processes, "FORK_SECONDS", 0.1)
    ours, theirs = socket.socketpair()
    stuck = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    with theirs:
        before = prepared_processes.server()
        server = prepared_processes.Server(ours, stuck.pid)
        prepared_processes._servers.append(server)
        with pytest.raises(OSError, match=r"did not answer in 0\.1 s"):
            server.fork({}, [])
        assert prepared_processes.server() is before
    assert stuck.wait(60) == 0, "it was reaped with the server"
