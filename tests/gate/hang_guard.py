"""Ends a process of pytest that hangs, with the stacks of all its threads in its output.

pytest-timeout raises an exception in a test that takes too long. That does not end a process whose
main thread waits in a system call, whose event loop passes the exception to another task, or which
waits at its exit for a thread: a run of all tests would wait for it until its own end.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Generator
from typing import IO

import pytest

SECONDS_MORE = 180.0
"""Time that a test has after its limit, for what it cleans up."""
LONGEST = 1200.0
"""Seconds for a test without a limit: for ``@pytest.mark.timeout(0)``."""
SECONDS_TO_EXIT = 120.0
"""Seconds from the end of the last test until the process has to be gone."""


class HangGuard:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self._stderr: IO[str] | None = None

    @pytest.hookimpl
    def pytest_sessionstart(self) -> None:
        # While a test runs, descriptor 2 is pytest's own file.
        self._stderr = os.fdopen(os.dup(2), "w")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        limit = _limit_of(item)
        self._exit_after(limit + SECONDS_MORE if limit > 0 else LONGEST)
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._exit_after(SECONDS_TO_EXIT)

    def _exit_after(self, seconds: float) -> None:
        file = self._stderr or sys.__stderr__
        assert file is not None
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)


def _limit_of(item: pytest.Item) -> float:
    """Seconds that pytest-timeout gives a test; 0 for no limit."""
    marker = item.get_closest_marker("timeout")
    if marker is None:
        return float(item.config.getini("timeout") or 0)
    return float(marker.args[0] if marker.args else marker.kwargs["timeout"])
