"""Host memory for activations: registered once, and reused for later microbatches."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent

log = logging.getLogger("pipemorph.trainer")

ALIGNMENT = 256
"""Alignment in bytes of each storage within a block, for fast copies."""


def align_size(nbytes: int) -> int:
    """Round ``nbytes`` up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class HostBlock:
    """Host memory of one microbatch. ``memory``: uint8 (bytes,).

    ``used``: event after the newest copy from or to the block, which must be done before the memory
    is freed; None: no copy.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used: DeviceEvent | None = None

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class HostPool:
    """Pool of host memory blocks, one per offloaded microbatch.

    Grows on demand or in advance (:meth:`grow_to`), up to ``limit`` bytes (None: no limit). Blocks
    return to the pool, not to the system: registering memory with a device costs more than a copy
    into it. With an accelerator the blocks are page-locked. Sizes are not rounded up to powers of
    two as in torch's pool, so ``limit`` is exact.
    """

    def __init__(self, limit: int | None, accelerator: Accelerator | None = None) -> None:
        self._limit = limit
        self._accelerator = accelerator
        self._free: list[HostBlock] = []
        self._out = 0
        self.nbytes = 0
        """Total bytes of the blocks, in use or free."""

    @property
    def blocks_in_use(self) -> int:
        """Number of blocks that hold activations."""
        return self._out

    def grow_to(self, blocks: int) -> None:
        """Grow to ``blocks`` blocks of the largest size, as far as the limit allows; does nothing
        before the first microbatch was offloaded, when no size is known."""
        free = self._free
        nbytes = max((block.nbytes for block in free), default=0)
        while nbytes and len(free) + self._out < blocks:
            if self._limit is not None and self.nbytes + nbytes > self._limit:
                break
            free.append(self._allocate_block(nbytes))

    def take_block(self, nbytes: int) -> HostBlock:
        """Take the smallest free block of at least ``nbytes``, else a new one.

        Raises :class:`PipelineError` if that would exceed the limit.
        """
        nbytes = align_size(max(nbytes, 1))
        fitting = [block for block in self._free if block.nbytes >= nbytes]
        if fitting:
            block = min(fitting, key=lambda each: each.nbytes)
            self._free.remove(block)
        else:
            block = self._allocate_block(nbytes)
        self._out += 1
        return block

    def return_block(self, block: HostBlock) -> None:
        """Return a block to the pool. Its next user waits for copies that still read it."""
        self._out -= 1
        self._free.append(block)

    def close(self) -> None:
        """Return the free blocks to the system. No copy may still use them."""
        while self._free:
            self._free_block(self._free.pop())

    def _allocate_block(self, nbytes: int) -> HostBlock:
        if self._limit is not None:
            # Free blocks that are too small: shapes have grown.
            while self._free and self.nbytes + nbytes > self._limit:
                self._free_block(self._free.pop())
            if self.nbytes + nbytes > self._limit:
                raise PipelineError(
                    f"host memory for activations: {nbytes} bytes are needed in addition to"
                    f" {self.nbytes} bytes of {self._out} microbatches; expected at most"
                    f" {self._limit} bytes. Raise adaptation.hostMemory (host_memory of"
                    " Pipeline), or plan with fewer microbatches in flight"
                )
        block = HostBlock(torch.empty(nbytes, dtype=torch.uint8))
        if self._accelerator is not None:
            why = self._accelerator.lock_pages(block.memory.data_ptr(), nbytes)
            if why is not None:
                raise PipelineError(
                    f"host memory for activations: {nbytes} bytes cannot be page-locked: {why};"
                    " check `ulimit -l` and the memory limit of the pod"
                )
        self.nbytes += nbytes
        log.debug("host memory for activations: %d bytes", self.nbytes)
        return block

    def _free_block(self, block: HostBlock) -> None:
        if self._accelerator is not None:
            if block.used is not None:
                block.used.synchronize()
            self._accelerator.unlock_pages(block.memory.data_ptr())
        self.nbytes -= block.nbytes
