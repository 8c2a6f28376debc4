"""Shows log messages of the ingest between the lines of progress."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipemorph.errors import one_line
from pipemorph.local.progress import LONGEST_TOLD, Progress

KEPT = 100


class _Collector(logging.Handler):
    """Collects records from all threads; the main thread, which owns the display, shows them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=KEPT)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(one_line(f"{record.name}: {record.getMessage()}", LONGEST_TOLD))


@contextmanager
def collected_logs(progress: Progress) -> Iterator[Callable[[], None]]:
    """Collect the core's warnings. Yields a function that shows them and the progress."""
    collector, logger = _Collector(), logging.getLogger("pipemorph")

    def refresh() -> None:
        while collector.lines:
            progress.note(collector.lines.popleft())
        progress.update()

    logger.addHandler(collector)
    try:
        yield refresh
    finally:
        logger.removeHandler(collector)
        refresh()
