"""Waits with a deadline, for tests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
DEADLINE = 60.0
"""Seconds. Long, since a machine may be busy: only a test that fails waits for so long."""


def until(what: Callable[[], T], why: str | Callable[[], str], seconds: float = DEADLINE) -> T:
    """Poll until ``what()`` is true, and return it. Raises AssertionError after ``seconds`` with
    ``why``, a description of what was awaited and how far it got."""
    end = time.monotonic() + seconds
    while not (found := what()):
        _check(end, why, seconds)
        time.sleep(0.01)
    return found


async def until_async(
    what: Callable[[], T], why: str | Callable[[], str], seconds: float = DEADLINE
) -> T:
    """Run the event loop until ``what()`` is true, and return it. Raises as :func:`until`."""
    end = time.monotonic() + seconds
    while not (found := what()):
        _check(end, why, seconds)
        await asyncio.sleep(0.001)
    return found


def _check(end: float, why: str | Callable[[], str], seconds: float) -> None:
    if time.monotonic() >= end:
        said = why if isinstance(why, str) else why()
        raise AssertionError(f"not within {seconds:g} s: {said}")
