"""Wall clock of a run, which does not step when the machine's clock is set: the difference of two
times is a true duration."""

from __future__ import annotations

import time

_STARTED = time.time() - time.monotonic()


def now() -> float:
    """Seconds since the Unix epoch, as of the start of this process."""
    return _STARTED + time.monotonic()
