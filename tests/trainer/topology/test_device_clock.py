"""Clock of a device, read through a fake driver."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from pipemorph.protocol import DeviceClockRate
from pipemorph_trainer.executor.local_stage import (
    CLOCK_READ_SECONDS,
    DeviceClockReader,
    open_device_clock,
)

CUDA = torch.device("cuda", 3)


class Nvml:
    """``pynvml`` on a host whose device at 1980 MHz is held at 1005 by its power cap."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.bits, self.refuses, self.read = 0x04, False, 0

    def nvmlInit(self) -> None:
        if self.refuses:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, clock: int) -> int:
        if self.refuses:
            raise self.NVMLError("Not Supported")
        self.read += 1
        return 1005

    def nvmlDeviceGetMaxClockInfo(self, handle: str, clock: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return self.bits


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    played = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", played)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="8a7b"))
    return played


def test_the_clock_and_what_holds_it_down(nvml: Nvml) -> None:
    reader = open_device_clock(CUDA)
    assert reader._handle == "GPU-8a7b"
    assert reader.read() == DeviceClockRate(mhz=1005, most_mhz=1980, held_by=("power cap",))


def test_heat_is_said_once_and_being_idle_not_at_all(nvml: Nvml) -> None:
    nvml.bits = 0x01 | 0x02 | 0x20 | 0x40 | 0x80
    found = DeviceClockReader(nvml, "GPU-8a7b").read()
    assert found.held_by == ("heat", "power brake")


def test_it_is_read_once_a_second_at_most(nvml: Nvml) -> None:
    moments = iter((0.0, 0.1, 0.9 * CLOCK_READ_SECONDS, CLOCK_READ_SECONDS))
    reader = DeviceClockReader(nvml, "GPU-8a7b", monotonic=lambda: next(moments))
    assert [(reader.read(), nvml.read)[1] for _ in range(4)] == [1, 1, 1, 2]


def test_without_a_driver_or_its_answer_nothing_is_said(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = DeviceClockReader(nvml, "GPU-8a7b")
    nvml.refuses = True
    assert reader.read() is None
    assert open_device_clock(CUDA) is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_device_clock(CUDA) is None
    assert open_device_clock(torch.device("cpu")) is None
