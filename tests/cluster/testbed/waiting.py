"""The only place of the testbed that waits."""

import time
from collections.abc import Callable
from typing import TypeVar

from testbed.errors import TestbedError

T = TypeVar("T")


class NotYet(Exception):
    """Raised by a check to say what is still missing."""


def wait_for(
    what: str,
    check: Callable[[], T | None],
    deadline: float,
    *,
    interval: float = 0.1,
    details: Callable[[], str] = str,
) -> T:
    """Call `check` until it returns something, for at most `deadline` seconds.

    A check that returns None or False, or raises `NotYet`, is called again. The error of a missed
    deadline names `what`, what the last check missed, and `details()`, such as a log's end. Any
    other exception of the check ends the wait: what cannot come any more is not waited for.
    """
    start = time.monotonic()
    missing = ""
    while True:
        try:
            found = check()
            if found is not None and found is not False:
                return found
        except NotYet as error:
            missing = str(error)
        waited = time.monotonic() - start
        if waited > deadline:
            parts = [f"waited {waited:.1f} s for {what}", missing, details()]
            raise TestbedError("; ".join(part for part in parts if part))
        time.sleep(min(interval, deadline - waited + 0.01))
