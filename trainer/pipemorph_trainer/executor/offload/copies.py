"""Copies between a device and a block of host memory: at once, or in streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipemorph_trainer.executor.offload.pool import Block
from pipemorph_trainer.topology.accelerator import Accelerator, Event


class Copies(Protocol):
    """Moves bytes; ``parts`` are places in the block and device memory, uint8 (n,)."""

    def out(self, block: Block, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Copy device memory to the block. The caller drops its tensors right after."""

    def reclaim(self) -> None:
        """From here on, new memory on the device may be what the last :meth:`out` left."""

    def back(self, block: Block, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """New device memory, uint8 (n,) each, with what is at ``(offset, n)`` of the block."""


def copies_for(device: torch.device, accelerator: Accelerator | None) -> Copies:
    return HostCopies(device) if accelerator is None else DeviceCopies(accelerator)


class HostCopies:
    """Copies that are over when they return: the device is the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def out(self, block: Block, parts: Sequence[tuple[int, Tensor]]) -> None:
        for offset, part in parts:
            block.memory[offset : offset + part.numel()].copy_(part)

    def reclaim(self) -> None:
        """Nothing is on its way."""

    def back(self, block: Block, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        found = []
        for offset, nbytes in sizes:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            found.append(memory.copy_(block.memory[offset : offset + nbytes]))
        return found


class DeviceCopies:
    """The host waits for nothing: streams wait for events.

    *Out* goes over a side stream, beside whatever compute comes next. What leaves is kept
    until :meth:`reclaim`, before the next op that needs memory (an F, a fetch): there the
    compute stream waits for the copy, and the memory goes back to the compute stream's own
    pool. With :meth:`Accelerator.keep` it would go back at a time nobody knows, and the next F
    would have to find room beside it: the device limit would not be a limit.

    *Back* is in order on the compute stream, for the same reason: its memory is what the ops
    before it have freed.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._side = accelerator.new_stream()
        self._leaving: list[Tensor] = []
        self._left: Event | None = None

    def out(self, block: Block, parts: Sequence[tuple[int, Tensor]]) -> None:
        device = self._accelerator
        # The tensors are complete, and a way back out of the block is over: both are behind.
        device.wait(self._side, device.record(device.compute_stream()))
        for offset, part in parts:
            device.copy(self._side, block.memory[offset : offset + part.numel()], part)
            self._leaving.append(part)
        block.used = self._left = device.record(self._side)

    def reclaim(self) -> None:
        if self._left is not None:
            self._accelerator.wait(self._accelerator.compute_stream(), self._left)
            self._left = None
            self._leaving.clear()

    def back(self, block: Block, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        # Also the copy into the block is over then: the side stream keeps its order.
        self.reclaim()
        device = self._accelerator
        compute = device.compute_stream()
        found = []
        for offset, nbytes in sizes:
            memory = device.empty((nbytes,), torch.uint8, compute)
            device.copy(compute, memory, block.memory[offset : offset + nbytes])
            found.append(memory)
        block.used = device.record(compute)
        return found
