"""Marks in a CUDA stream instead of the host's clock: the host only launches work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import time
from typing import Any

ANCHOR_READS = 100
"""Steps after which the device's clock is compared with the host's again: they drift, by some
microseconds per second."""


class DeviceMarks:
    """Events in the current stream of a device, and their wall-clock times."""

    def __init__(self, device: Any) -> None:
        import torch

        cuda: Any = torch.cuda
        self._make_event = partial(cuda.Event, enable_timing=True)
        self._find_stream = partial(cuda.current_stream, device)
        self._anchor: Any = None
        self._anchor_time = 0.0
        self._reads = 0

    def record(self) -> Any:
        """Record an event where the stream is now."""
        event = self._make_event()
        event.record(self._find_stream())
        return event

    def read_times(self) -> Callable[[Any], float]:
        """Return the function from an event to its time, in seconds since 1970. The function waits
        for the event, which a step later has passed; every :data:`ANCHOR_READS` calls this one
        waits for the device."""
        if self._reads % ANCHOR_READS == 0:
            self._anchor = self.record()
            self._anchor.synchronize()
            self._anchor_time = time()
        self._reads += 1

        def read_time(event: Any) -> float:
            event.synchronize()
            return self._anchor_time + float(self._anchor.elapsed_time(event)) / 1e3

        return read_time
