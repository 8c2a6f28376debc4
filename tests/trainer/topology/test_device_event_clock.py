"""The host's time of events on a device, whose clock runs as it likes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from pipemorph_trainer.topology import device_event_clock
from pipemorph_trainer.topology.device_event_clock import (
    MOST_DRIFT,
    RENEWED_AFTER,
    STALE_AFTER,
    DeviceEventClock,
)


@dataclass
class _Event:
    reached_at: float
    """Time by the host's clock."""


class _Device:
    """Device whose clock runs faster than the host's by ``drift``. It reaches an event some time
    after it was recorded, and the host sees that some time later."""

    def __init__(self, dice: random.Random, drift: float, lag: float) -> None:
        self._dice, self._drift, self._lag = dice, drift, lag
        self.now = 1e9
        self.references: list[_Event] = []

    def new_stream(self) -> None:
        return None

    def record_event(self, stream: Any, *, timed: bool = False) -> Any:
        assert timed
        self.now += self._dice.expovariate(1 / self._lag)
        self.references.append(_Event(self.now))
        return SimpleNamespace(synchronize=self.pause, mine=self.references[-1])

    def pause(self) -> None:
        self.now += self._dice.expovariate(1 / self._lag)

    def elapsed_seconds(self, start: Any, end: Any) -> float:
        first = getattr(start, "mine", start)
        return (end.reached_at - first.reached_at) * (1 + self._drift)


def _clock(monkeypatch: pytest.MonkeyPatch, device: _Device) -> None:
    clock = SimpleNamespace(time=lambda: device.now, monotonic=lambda: device.now)
    monkeypatch.setattr(device_event_clock, "time", clock)


@pytest.mark.parametrize("lag", [1e-5, 1e-3])
@pytest.mark.parametrize("drift", [-MOST_DRIFT, 0.0, 3e-5, MOST_DRIFT])
def test_the_error_is_at_most_what_is_stated(
    lag: float, drift: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(7)
    device = _Device(dice, drift=drift, lag=lag)
    _clock(monkeypatch, device)
    found: Any = DeviceEventClock(device)  # type: ignore[arg-type]
    within = []
    for _ in range(500):
        event = _Event(device.now - dice.uniform(0.0, 2 * RENEWED_AFTER))
        at, error = found.time_event(event)
        assert abs(at - event.reached_at) <= error + 1e-6  # a float's error at 1e9 s
        within.append(error)
        device.now += dice.uniform(0.0, 0.4)
    assert max(within) <= 20 * lag + MOST_DRIFT * (STALE_AFTER + 2 * RENEWED_AFTER)


def test_a_reference_serves_until_it_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(random.Random(7), drift=0.0, lag=1e-6)
    _clock(monkeypatch, device)
    found: Any = DeviceEventClock(device)  # type: ignore[arg-type]
    found.time_event(_Event(device.now))
    assert len(device.references) == 1, "it is close enough"
    device.now += RENEWED_AFTER / 2
    found.refresh_reference()
    assert len(device.references) == 1
    device.now += RENEWED_AFTER
    found.time_event(_Event(device.now))
    assert len(device.references) == 1, "somebody waits for the time"
    found.refresh_reference()
    assert len(device.references) == 2
    device.now += STALE_AFTER + RENEWED_AFTER
    found.time_event(_Event(device.now))
    assert len(device.references) == 3


def test_the_closest_of_a_few_references_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for the interpreter sees one late."""
    device = _Device(random.Random(7), drift=0.0, lag=1e-6)
    _clock(monkeypatch, device)
    waits = iter([0.02, 0.004, 0.01])
    monkeypatch.setattr(device, "pause", lambda: setattr(device, "now", device.now + next(waits)))
    found: Any = DeviceEventClock(device)  # type: ignore[arg-type]
    _, within = found.time_event(_Event(device.now))
    assert within == pytest.approx(0.002, abs=1e-4)
