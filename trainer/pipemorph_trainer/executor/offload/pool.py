"""Host memory for activations: registered once, and reused for later microbatches."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.topology.accelerator import Accelerator, Event

log = logging.getLogger("pipemorph.trainer")

ALIGNMENT = 256
"""Alignment in bytes of each storage within a block, for fast copies."""


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Block:
    """Host memory of one microbatch. ``memory``: uint8 (bytes,).

    ``used``: event behind the newest copy from or to the block, which must be done before the
    memory is freed. None: nothing to wait for.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used: Event | None = None

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class HostPool:
    """Blocks of host memory, one per offloaded microbatch.

    Grows on demand or in advance (:meth:`grow`), up to ``limit`` bytes (None: no limit). Blocks
    return to the pool and not to the system, since registering memory with a device costs more than
    a copy into it. With an accelerator the blocks are page-locked. Their sizes are not rounded up
    to powers of two as in torch's pool, so that ``limit`` is exact.
    """

    def __init__(self, limit: int | None, accelerator: Accelerator | None = None) -> None:
        self._limit = limit
        self._accelerator = accelerator
        self._free: list[Block] = []
        self._out = 0
        self.nbytes = 0
        """Bytes of all blocks, in use or free."""

    @property
    def blocks_in_use(self) -> int:
        return self._out

    def grow(self, blocks: int) -> None:
        """Grow to ``blocks`` blocks of the largest size, as far as the limit allows. Before the
        first microbatch was offloaded, no size is known."""
        free = self._free
        nbytes = max((block.nbytes for block in free), default=0)
        while nbytes and len(free) + self._out < blocks:
            if self._limit is not None and self.nbytes + nbytes > self._limit:
                break
            free.append(self._grow(nbytes))

    def take(self, nbytes: int) -> Block:
        """The smallest free block of at least ``nbytes``, else a new one.

        Raises :class:`PipelineError` if that would exceed the limit.
        """
        nbytes = aligned(max(nbytes, 1))
        fitting = [block for block in self._free if block.nbytes >= nbytes]
        if fitting:
            block = min(fitting, key=lambda each: each.nbytes)
            self._free.remove(block)
        else:
            block = self._grow(nbytes)
        self._out += 1
        return block

    def give(self, block: Block) -> None:
        """Take a block back. Its next user waits for copies that still read it."""
        self._out -= 1
        self._free.append(block)

    def close(self) -> None:
        """Return the free blocks to the system. No copy may use them any more."""
        while self._free:
            self._drop(self._free.pop())

    def _grow(self, nbytes: int) -> Block:
        if self._limit is not None:
            # Drop blocks that are too small: shapes have grown.
            while self._free and self.nbytes + nbytes > self._limit:
                self._drop(self._free.pop())
            if self.nbytes + nbytes > self._limit:
                raise PipelineError(
                    f"host memory for activations: {nbytes} bytes more are needed beside"
                    f" {self.nbytes} bytes of {self._out} microbatches; expected at most"
                    f" {self._limit} bytes. Raise adaptation.hostMemory (host_memory of"
                    " Pipeline), or plan with fewer microbatches in flight"
                )
        block = Block(torch.empty(nbytes, dtype=torch.uint8))
        if self._accelerator is not None:
            why = self._accelerator.register(block.memory.data_ptr(), nbytes)
            if why is not None:
                raise PipelineError(
                    f"host memory for activations: {nbytes} bytes cannot be page-locked: {why};"
                    " check `ulimit -l` and the memory limit of the pod"
                )
        self.nbytes += nbytes
        log.debug("host memory for activations: %d bytes", self.nbytes)
        return block

    def _drop(self, block: Block) -> None:
        if self._accelerator is not None:
            if block.used is not None:
                block.used.synchronize()
            self._accelerator.unregister(block.memory.data_ptr())
        self.nbytes -= block.nbytes
