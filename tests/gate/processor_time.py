"""Records the processor seconds of each test: its own, and those of the processes that it started.

A plugin of ``tests/conftest.py``. The seconds are a property of each report, one for each phase of
a test, and so get into the log that :mod:`gate.results` reads.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import resource
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

PROPERTY = "processor_seconds"
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessorTime:
    """Attributes processor time to the test that runs while it is used."""

    def __init__(self) -> None:
        self._before = _used()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, None]:
        outcome = yield
        now = _used()
        outcome.get_result().user_properties.append((PROPERTY, max(0.0, now - self._before)))
        self._before = now


def _used() -> float:
    """Processor seconds of this process, of its ended children, and of the servers that fork ranks
    and programs with their ended children, which are not ours until they end themselves."""
    own, ended = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    seconds = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    servers = [multiprocessing.forkserver._forkserver._forkserver_pid]  # type: ignore[attr-defined]
    # Imported where a test uses it.
    if prepared := sys.modules.get("prepared_processes"):
        servers.append(prepared.server_pid())
    return seconds + sum(_of_process(server) for server in servers if server is not None)


def _of_process(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended
        return 0.0
    # Fields 14 to 17 of proc(5): user and system time, its own and that of its ended children.
    return sum(int(field) for field in stat.rpartition(")")[2].split()[11:15]) / _TICKS
