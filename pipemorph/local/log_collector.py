"""Shows log messages of the ingest between the lines of progress."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipemorph.errors import one_line
from pipemorph.local.progress import LONGEST_MESSAGE, ProgressDisplay

MOST_LINES = 100


class _LogCollector(logging.Handler):
    """Collects records from all threads; the main thread, which owns the display, shows them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: deque[str] = deque(maxlen=MOST_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(one_line(f"{record.name}: {record.getMessage()}", LONGEST_MESSAGE))


@contextmanager
def collect_logs(progress: ProgressDisplay) -> Iterator[Callable[[], None]]:
    """Collect the core's warnings. Yields a function that shows them and the progress."""
    collector, logger = _LogCollector(), logging.getLogger("pipemorph")

    def show_logs() -> None:
        while collector.lines:
            progress.print_note(collector.lines.popleft())
        progress.show_changes()

    logger.addHandler(collector)
    try:
        yield show_logs
    finally:
        logger.removeHandler(collector)
        show_logs()
