"""The only place of the testbed that waits."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

from testbed.errors import TestbedError

T = TypeVar("T")


class NotYet(Exception):
    """Raised by a check, with the condition that is still missing."""


MOST_PATIENCE = 4.0


def patience() -> float:
    """Factor by which a deadline is longer here and now than on an idle machine: the number of
    programs to each processor. A deadline is there to end what will not come; it costs nothing
    where it comes, and a busy machine must not fail a test."""
    return min(MOST_PATIENCE, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def wait_for(
    what: str,
    check: Callable[[], T | None],
    deadline: float,
    *,
    interval: float = 0.1,
    details: Callable[[], str] = str,
    patient: bool = True,
) -> T:
    """Call `check` until it returns something, for at most `deadline` seconds: times
    `patience`, unless it is not `patient`.

    A check that returns None or False, or raises `NotYet`, is called again. The error of a missed
    deadline names `what`, what the last check missed, and `details()`, such as a log's end. Any
    other exception of the check ends the wait: what cannot come any more is not waited for.
    """
    start = time.monotonic()
    missing = ""
    while True:
        # Before the check: one that comes late, since nothing ran for a while, still counts.
        waited = time.monotonic() - start
        try:
            found = check()
            if found is not None and found is not False:
                return found
        except NotYet as error:
            missing = str(error)
        if waited > deadline * (patience() if patient else 1.0):
            parts = [f"waited {waited:.1f} s for {what}", missing, details()]
            raise TestbedError("; ".join(part for part in parts if part))
        time.sleep(interval)
