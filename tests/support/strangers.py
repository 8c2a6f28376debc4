"""Clients without a token, in numbers, and what they cost the process that they connect to."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest


def connect_strangers(
    stack: contextlib.ExitStack, port: int, count: int, sent: bytes
) -> list[socket.socket]:
    """Connect ``count`` strangers from two addresses, each of which sends the same."""
    strangers = []
    for number in range(count):
        stranger = stack.enter_context(socket.socket())
        stranger.bind((f"127.0.0.{1 + number % 2}", 0))
        stranger.connect(("127.0.0.1", port))
        with contextlib.suppress(ConnectionError):
            stranger.sendall(sent)
        strangers.append(stranger)
    return strangers


def read_resident_kib(pid: int) -> int:
    """Resident memory of a process, KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found, status
    return int(found[1])


@contextlib.contextmanager
def raised_file_limit(wanted: int) -> Iterator[None]:
    """Let this process open ``wanted`` files; skip the test where that is not allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may open {hard} files; the test needs {wanted}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
