"""Clock of a rank's time outside its ops."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest
import torch
from launch import run_ranks
from torch import nn

from pipemorph.diagnose.analysis.idle_time import attribute_idle_time
from pipemorph.protocol import OpsTrace
from pipemorph.protocol.op_traces import RankTimes
from pipemorph_trainer import Checkpoint, Options, Pipeline, TrainerContext
from pipemorph_trainer.agent.messages import NullControlClient, RankTelemetry
from pipemorph_trainer.telemetry.window_clock import WindowClock


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Collector:
    """Pauses of a garbage collector, which also advance the clock."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.paused = clock, 0.0

    def __call__(self) -> float:
        return self.paused

    def pause(self, seconds: float) -> None:
        self.paused += seconds
        self._clock.advance(seconds)


PAUSE = 0.0625


@pytest.mark.parametrize("paused", [None, "script", "optimizer", "checkpoint", "call", "drawn"])
def test_each_second_is_in_one_part(paused: str | None) -> None:
    clock = Clock()
    collector = Collector(clock)
    window = WindowClock(clock=clock)
    window.count_paused = collector

    def run(part: str, seconds: float) -> None:
        clock.advance(seconds)
        if part == paused:
            collector.pause(PAUSE)

    parameter = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    # The optimizer takes as long as reading the clock advances it.
    optimizer.register_step_pre_hook(lambda *_: run("optimizer", 0.5))
    run("script", 1.0)
    optimizer.step()
    with window.measure_part("checkpoint"):
        run("checkpoint", 0.25)
    window.begin_step()
    run("call", 0.0)
    # A pause in the step is not before it, and in the time of what it interrupts.
    drawn = PAUSE if paused == "drawn" else 0.0
    before = PAUSE if paused not in (None, "drawn") else 0.0
    with window.measure_part("drawn"):
        run("drawn", 0.125)
    clock.advance(10.0)  # Ops.
    times = window.end_window(paused=drawn, reduction=2.0)
    assert times == RankTimes(
        window=11.875 + before + drawn, optimizer=0.5, checkpoint=0.25, data=1.0,
        drawn=0.125 + drawn, gc=before, reduction=2.0,
    )  # fmt: skip
    # The norm after the step belongs to it, with what the script does before.
    run("script", 0.5)
    optimizer.step()
    run("norm", 4.0)
    between = PAUSE if paused in ("script", "optimizer") else 0.0
    norm = window.extend_window(times, 4.0)
    assert norm.window == times.window + 5.0 + between
    assert (norm.norm, norm.optimizer, norm.data) == (4.0, 1.0, 1.5)
    assert norm.gc == times.gc + between
    # A pause in the norm is a part of it.
    collector.pause(2 * PAUSE)
    again = window.extend_window(norm, 2 * PAUSE, paused=2 * PAUSE)
    assert (again.norm, again.gc, again.data) == (2 * PAUSE, norm.gc, norm.data)
    collector.pause(3.0)
    window.restart()  # After an evaluation.
    clock.advance(1.0)
    window.begin_step()
    assert window.end_window() == RankTimes(window=1.0, data=1.0)
    window.close()
    optimizer.step()
    assert window.end_window().optimizer == 0.0


class OpsRecorder(NullControlClient):
    """Agent that requests the ops of every iteration from the second on."""

    requested_ops_iteration = 1

    def __init__(self) -> None:
        self.ops: list[OpsTrace] = []

    def publish(self, telemetry: RankTelemetry) -> None:
        if telemetry.report is not None and (found := telemetry.report.ops) is not None:
            self.ops.append(found)
            self.requested_ops_iteration = found.iteration + 1


LOADING, PAUSING, SAVING = 0.05, 0.1, 0.2
"""Seconds; so long that no rank of a busy machine is late by a half of them."""


def train(context: TrainerContext, folder: str, norm: bool) -> list[OpsTrace]:
    """Train two stages. Rank 0 loads data, and garbage is collected in its third iteration only. A
    checkpoint is saved after the fifth."""
    gc.disable()
    recorder, stage = OpsRecorder(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def draw() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            sleep(LOADING / 4 if context.rank == 0 else 0.0)
            yield torch.ones(2, 4), torch.zeros(2, 4)

    def pause(*_: object) -> None:
        if context.rank == 0 and pipe.iteration == 3:
            gc.callbacks.append(slow)
            gc.collect()
            gc.callbacks.remove(slow)

    def slow(phase: str, _: object) -> None:
        sleep(PAUSING / 4 if phase == "stop" else 0.0)

    stage.register_forward_hook(pause)
    optimizer.register_state_dict_pre_hook(lambda _: sleep(SAVING))
    source = draw()
    with Pipeline(
        stage, context=context, loss_fn=nn.functional.mse_loss, microbatches=4, policy="1f1b",
        optimizer=optimizer, options=Options(control=recorder, gc="off"),
        checkpoint=Checkpoint(directory=folder, every=5),
    ) as pipe:  # fmt: skip
        for _ in range(6):
            pipe.step(microbatches=source)
            if norm:
                pipe.clip_grad_norm_(1.0)
            optimizer.step()
            sleep(LOADING if context.rank == 0 else 0.0)
    return recorder.ops


@pytest.mark.parametrize("norm", [True, False])
def test_a_rank_measures_its_time_outside_ops(tmp_path: Path, norm: bool) -> None:
    ranks = run_ranks(2, train, str(tmp_path), norm)
    for traces in ranks:
        assert [each.iteration for each in traces] == [1, 2, 3, 4, 5]
        for trace in traces:
            times = trace.rank_times
            assert times is not None and (times.norm is not None) is norm
            parts = times.optimizer + times.data + times.drawn + times.checkpoint + times.gc
            parts += (times.norm or 0.0) + sum(trace.durations) / 1e6
            assert parts <= times.window + 1e-3 and times.optimizer > 0
            assert (times.checkpoint >= SAVING) is (trace.iteration == 5)
            assert all(wait <= gap for wait, gap in zip(trace.waits, trace.gaps, strict=False))
    first = [each.rank_times for each in ranks[0]]
    assert all(each is not None and each.data >= LOADING <= each.drawn + 1e-3 for each in first), (
        first
    )
    paused = sum(first[2].pauses[0][1:]) / 1e6 if first[2] is not None else 0.0
    assert paused > 0
    # The second rank waits for the loader of the first one.
    for pair in zip(*ranks, strict=True):
        found = attribute_idle_time(pair)
        assert found is not None
        # Ranks wait for each other in a checkpoint, too.
        assert found["data"] >= LOADING or pair[0].iteration == 5
        assert (found["gc"] > PAUSING / 4) is (pair[0].iteration == 3)
        assert (found["checkpoint"] > SAVING / 4) is (pair[0].iteration == 5)
