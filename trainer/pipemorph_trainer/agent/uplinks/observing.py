"""Lets an observer look at what ranks have told, soon after they have."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from pipemorph.control.observe.observer import Observer
from pipemorph_trainer.agent.merge import TelemetryMerger

OBSERVE_SECONDS = 0.05
GATHER_SECONDS = 0.003
"""Wait after the first message, so that ranks that report at the same time are judged together."""
IDLE_SECONDS = 1.0
"""Between two looks when ranks tell nothing."""


class Observing:
    """Lets ``observer`` observe what ``merger`` has. ``on_observed`` is called after each look."""

    def __init__(
        self, merger: TelemetryMerger, observer: Observer, on_observed: Callable[[], None]
    ) -> None:
        self.merger, self.observer, self._on_observed = merger, observer, on_observed
        self._news = asyncio.Event()

    def notify(self) -> None:
        """Look soon: the merger has something."""
        self._news.set()

    @property
    def has_news(self) -> bool:
        """Whether anything is left to be reported."""
        return self.merger.dirty or self.observer.has_news

    async def run(self) -> None:
        """Look every :data:`OBSERVE_SECONDS`, or when there is something, until cancelled."""
        while True:
            await wait(self._news, IDLE_SECONDS)
            await asyncio.sleep(GATHER_SECONDS)
            started = time.monotonic()
            self.observe()
            left = OBSERVE_SECONDS - (time.monotonic() - started)
            await asyncio.sleep(max(0.0, left))

    def observe(self, *, refresh: bool = False) -> None:
        """Look now. ``refresh``: at everything."""
        self._news.clear()
        self.observer.observe(self.merger.take(), time.time(), refresh=refresh)
        self._on_observed()


async def wait(event: asyncio.Event, seconds: float) -> None:
    """Wait for an event, or so long. Unlike ``asyncio.wait_for`` before Python 3.12, this can be
    cancelled in the very moment in which the event comes."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
