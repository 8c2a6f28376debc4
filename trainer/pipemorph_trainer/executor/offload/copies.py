"""Copies between a device and a block of host memory, synchronously or in streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pipemorph_trainer.executor.offload.pool import Block
from pipemorph_trainer.topology.accelerator import Accelerator, Event


class Copies(Protocol):
    """Copies bytes. ``parts``: offsets in the block, with device memory of uint8 (n,)."""

    def out(self, block: Block, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Copy device memory to the block. The caller then drops its tensors."""

    def reclaim(self) -> None:
        """Allow new device memory to reuse the memory that the last :meth:`out` freed."""

    def back(self, block: Block, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """New device memory, uint8 (n,) each, with the bytes at ``(offset, n)`` of the block."""


def copies_for(device: torch.device, accelerator: Accelerator | None) -> Copies:
    return HostCopies(device) if accelerator is None else DeviceCopies(accelerator)


class HostCopies:
    """Synchronous copies for a stage on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def out(self, block: Block, parts: Sequence[tuple[int, Tensor]]) -> None:
        for offset, part in parts:
            block.memory[offset : offset + part.numel()].copy_(part)

    def reclaim(self) -> None:
        """Does nothing: copies are synchronous."""

    def back(self, block: Block, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        found = []
        for offset, nbytes in sizes:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            found.append(memory.copy_(block.memory[offset : offset + nbytes]))
        return found


class DeviceCopies:
    """Asynchronous copies: streams wait for events, and the host never waits.

    *Out* runs on a side stream, concurrently to the next ops. The copied tensors are kept until
    :meth:`reclaim`, before the next op that needs memory (an F or a fetch). There the compute
    stream waits for the copy, and the memory returns to the compute stream's pool. With
    :meth:`Accelerator.keep` it would return at an unknown time, and the next F would need memory
    beside it: the device limit could be exceeded.

    *Back* runs in order on the compute stream, for the same reason: it uses memory that earlier ops
    have freed.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._side = accelerator.new_stream()
        self._leaving: list[Tensor] = []
        self._left: Event | None = None

    def out(self, block: Block, parts: Sequence[tuple[int, Tensor]]) -> None:
        device = self._accelerator
        # Waits until the tensors are complete and earlier copies from the block are done.
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
        # Then the copy into the block is done, too: the side stream runs in order.
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
