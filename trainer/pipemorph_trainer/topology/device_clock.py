"""The clock of a GPU and what holds it down, as its driver's NVML says.

Optional: without the package ``nvidia-ml-py`` nothing is read, and stages that compute slowly are
named without a reason.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from pipemorph.wire import DeviceClock

EVERY_SECONDS = 1.0
"""Least time between two readings, each of which may take a millisecond."""
THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "power brake",
}
"""Bits of NVML's clock event reasons that make a device slower than it could be. The others say
that it is idle, or that its user has set its clocks."""

log = logging.getLogger(__name__)


class DeviceClockReader:
    """Reads the clock of one device. ``nvml``: the module ``pynvml``, initialized; ``handle``: its
    handle of the device."""

    def __init__(
        self, nvml: Any, handle: Any, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml, self._handle, self._monotonic = nvml, handle, monotonic
        self._read_at: float | None = None
        self._newest: DeviceClock | None = None

    def read(self) -> DeviceClock | None:
        """The newest clock, read anew at most every :data:`EVERY_SECONDS`; None once the driver
        has refused."""
        now = self._monotonic()
        if self._read_at is None or now - self._read_at >= EVERY_SECONDS:
            self._read_at, self._newest = now, self._clock()
        return self._newest

    def _clock(self) -> DeviceClock | None:
        nvml, handle = self._nvml, self._handle
        try:
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            return DeviceClock(
                mhz=nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                most_mhz=nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
                held_by=tuple(dict.fromkeys(why for bit, why in THROTTLES.items() if bits & bit)),
            )
        except nvml.NVMLError as error:
            log.debug("NVML says nothing of this device's clock: %s", error)
            return None


def device_clock_reader(device: torch.device) -> DeviceClockReader | None:
    """The reader for ``device``; None for the CPU, without NVML, and where it does not know the
    device."""
    if device.type != "cuda":
        return None
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        # By its UUID: NVML numbers all devices of the host, torch those that it may use.
        uuid = torch.cuda.get_device_properties(device).uuid
        return DeviceClockReader(nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except nvml.NVMLError as error:
        log.debug("NVML does not know %s: %s", device, error)
        return None
