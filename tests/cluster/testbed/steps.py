"""Step of `make testbeds`: a program that takes minutes, with progress and a limit."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from testbed.errors import TestbedError
from testbed.processes import Process
from testbed.waiting import wait_for

REPORT_EVERY = 15.0

Say = Callable[[str], None]


class LimitReached(TestbedError):
    """The limit of `make testbeds` is over; the message names the step that was under way."""


def run_step(
    title: str,
    command: Sequence[str | Path],
    log: Path,
    say: Say,
    end: float,
    *,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a program to its end, with a progress line every 15 s.

    `end` is a time of `time.monotonic`. Raises LimitReached then, and TestbedError with the end of
    `log` if the program fails.
    """
    log.unlink(missing_ok=True)
    child = Process(title, command, log, environment=environment)
    start = time.monotonic()
    report = start + REPORT_EVERY

    def ended() -> bool:
        nonlocal report
        now = time.monotonic()
        if not child.running:
            return True
        if now >= end:
            raise LimitReached(f"{title}, for {now - start:.0f} s")
        if now >= report:
            say(f"{title}: {now - start:.0f} s so far")
            report = now + REPORT_EVERY
        return False

    say(title)
    child.start()
    try:
        wait_for(f"the end of {title}", ended, math.inf, interval=0.5)
        if child.returncode != 0:
            raise TestbedError(
                f"{title} failed with exit status {child.returncode}; {child.log_end(30)}"
            )
    finally:
        child.stop(grace=1.0)
    say(f"{title}: done in {time.monotonic() - start:.0f} s")
