"""Copies of a state on a device during its work: they are of the moment they began at.

On a simulated device, whose copies are done as late as a test likes; see ``simulated_device.py``.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks, run_ranks
from simulated_device import Driver, SimulatedDevice
from simulated_runs import seat
from test_checkpointer import Case, compare, train
from torch import Tensor

from pipemorph_trainer import TrainerContext
from pipemorph_trainer.checkpoint.memory.device_copy import DeviceCopier
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.topology.accelerator import CudaAccelerator

SECONDS = 30.0


def soon(name: str) -> bool:
    return name.startswith("buffer.")


class Written:
    """Copy of what was written."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def __call__(self, values: Mapping[str, Tensor]) -> None:
        self.values = {name: value.tolist() for name, value in values.items()}


def begin(
    device: SimulatedDevice, late: DeviceCopier, value: float
) -> tuple[Written, list[Tensor]]:
    """Begin a copy of a parameter and a buffer that work which is not done yet fills."""
    parameter = device.tensor(torch.full((5,), value))
    buffer = device.tensor(torch.full((3,), value))
    written = Written()
    late.begin_copy({"parameter.w": parameter, "buffer.b": buffer}, soon, written)
    return written, [parameter, buffer]


def test_a_copy_is_of_the_moment_it_began_at() -> None:
    device = SimulatedDevice()
    late = DeviceCopier(device)
    for value in (1.0, 2.0):
        written, (parameter, buffer) = begin(device, late, value)
        # A forward changes the buffer, and a step the parameter.
        device.launch(lambda b=buffer: b.fill_(-1.0))  # type: ignore[misc]
        late.before_step()
        device.launch(lambda p=parameter: p.fill_(-1.0))  # type: ignore[misc]
        # The compute stream first, as far as it gets.
        device.run(device.compute)
        assert parameter.tolist() == [value] * 5 and buffer.tolist() == [value] * 3
        assert not written.values, "before the copy was done"
        device.run(device.compute, *device.streams)
        late.finish_copy(SECONDS)
        assert written.values == {"parameter.w": [value] * 5, "buffer.b": [value] * 3}
        assert parameter.tolist() == [-1.0] * 5 and buffer.tolist() == [-1.0] * 3


def test_what_is_dropped_is_held_until_it_is_copied() -> None:
    """Gradients, for one: the next work of the compute stream gets their memory."""
    device = SimulatedDevice()
    late = DeviceCopier(device)
    written, tensors = begin(device, late, 4.0)
    tensors.clear()
    others = [device.tensor(torch.full((size,), -1.0)) for size in (5, 3)]
    device.run(device.compute, *device.streams)
    late.finish_copy(SECONDS)
    assert written.values == {"parameter.w": [4.0] * 5, "buffer.b": [4.0] * 3}
    assert [tensor.tolist() for tensor in others] == [[-1.0] * 5, [-1.0] * 3]
    device.runnable()
    assert sum(block.free for block in device._blocks if block.home) == 2, "held for ever"


def test_the_copies_wait_for_the_work_before() -> None:
    device = SimulatedDevice()
    late = DeviceCopier(device)
    written, _ = begin(device, late, 3.0)
    device.run(*device.streams[1:])
    assert not device.copied, "copied before the parameter was there"
    device.run()
    late.finish_copy(SECONDS)
    assert written.values["parameter.w"] == [3.0] * 5


def test_forwards_do_not_wait_for_parameters() -> None:
    device = SimulatedDevice()
    late = DeviceCopier(device)
    parameter = device.tensor(torch.ones(5))
    late.begin_copy({"parameter.w": parameter}, soon, Written())
    ran: list[int] = []
    device.launch(lambda: ran.append(1))
    device.run(device.compute)
    assert ran and not device.copied
    device.run()
    late.finish_copy(SECONDS)


def test_a_copy_that_is_not_contiguous_has_the_values() -> None:
    device = SimulatedDevice()
    late, written = DeviceCopier(device), Written()
    late.begin_copy({"parameter.w": torch.arange(6.0).view(2, 3).t()}, soon, written)
    device.run()
    late.finish_copy(SECONDS)
    assert written.values["parameter.w"] == torch.arange(6.0).view(2, 3).t().tolist()


def test_a_device_that_fails_is_reported() -> None:
    device = SimulatedDevice()
    late = DeviceCopier(device)
    begin(device, late, 1.0)
    device.fail("CUDA error: uncorrectable ECC error encountered")
    with pytest.raises(PipelineError, match="could not be written: CUDA error: uncorrectable ECC"):
        late.finish_copy(SECONDS)


def test_a_device_that_hangs_is_reported() -> None:
    device = SimulatedDevice()
    late = DeviceCopier(device)
    begin(device, late, 1.0)
    with pytest.raises(PipelineError, match=r"was not written after 0\.01 s; the device may hang"):
        late.finish_copy(0.01)
    device.fail("over")


def on_device(
    context: TrainerContext, case: Case, kill: dict[int, tuple[str, int]]
) -> dict[str, Any]:
    device = SimulatedDevice(prompt=True)
    driver = Driver(device, context.rank)
    seat(device)
    found = train(context, case, kill)
    driver.close()
    return {**found, "copies": len(device.copied)}


@pytest.mark.timeout(300)
def test_a_rank_on_a_device_is_killed(tmp_path: Path) -> None:
    """A copy that was not finished is one of the iteration before."""
    case = Case({"pp": 2}, every=2)
    whole = run_ranks(case.ranks, train, case, {})
    context = {"memory_dir": tmp_path, "generation": 0}
    ended = Ranks(case.ranks, on_device, case, {1: ("stepped", 6)}, context=context).wait()
    assert ended[1].exitcode == -signal.SIGKILL, ended[1].error
    found = run_ranks(case.ranks, on_device, case, {}, context={**context, "generation": 1})
    word = json.loads((tmp_path / "resumed.generation-1").read_text())
    assert word["rung"] == "kept" and word["iteration"] in (4, 6), word
    assert all(each["copies"] > 0 for each in found), "nothing was copied during the compute"
    compare(found, whole, word["iteration"])


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    device = CudaAccelerator(torch.device("cuda", 0))
    late = DeviceCopier(device)
    parameter = torch.zeros(1 << 24, device="cuda")
    buffer = torch.zeros(1 << 20, device="cuda")
    for value in range(1, 4):
        parameter.fill_(value), buffer.fill_(value)
        sums: dict[str, float] = {}

        def write(values: Mapping[str, Tensor], sums: dict[str, float] = sums) -> None:
            sums |= {name: float(each.double().sum()) for name, each in values.items()}

        late.begin_copy({"parameter.w": parameter, "buffer.b": buffer}, soon, write)
        buffer.fill_(-1)
        late.before_step()
        parameter.fill_(-1)
        late.finish_copy(SECONDS)
        assert sums == {"parameter.w": value * float(1 << 24), "buffer.b": value * float(1 << 20)}
