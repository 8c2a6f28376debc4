"""Clock of a rank's time outside its ops."""

from __future__ import annotations

import pytest
import torch

from pipemorph.protocol.op_traces import RankTimes
from pipemorph_trainer.telemetry.window_clock import WindowClock


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_each_second_is_in_one_part() -> None:
    clock = Clock()
    window = WindowClock(clock=clock)
    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    # The optimizer takes as long as reading the clock advances it.
    optimizer.register_step_pre_hook(lambda *_: clock.advance(0.5))
    clock.advance(1.0)
    optimizer.step()
    with window.measure_part("checkpoint"):
        clock.advance(0.25)
    window.begin_step()
    with window.measure_part("drawn"):
        clock.advance(0.125)
    clock.advance(10.0)  # Ops.
    times = window.end_window(paused=0.0625, reduction=2.0)
    assert times == RankTimes(
        window=11.875, optimizer=0.5, checkpoint=0.25, data=1.0 - 0.0625, drawn=0.125, gc=0.0625,
        reduction=2.0,
    )  # fmt: skip
    # The norm after the step belongs to it, with what the script does before.
    clock.advance(0.5)
    optimizer.step()
    clock.advance(4.0)
    norm = window.extend_window(times, 4.0)
    assert (norm.window, norm.norm, norm.optimizer) == (16.875, 4.0, 1.0)
    assert norm.data == pytest.approx(times.data + 0.5)
    clock.advance(3.0)
    window.restart()  # After an evaluation.
    clock.advance(1.0)
    window.begin_step()
    assert window.end_window() == RankTimes(window=1.0, data=1.0)
    window.close()
    optimizer.step()
    assert window.end_window().optimizer == 0.0
