"""Host memory for activations: registered once, used again for every microbatch after."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.topology.accelerator import Accelerator, Event

log = logging.getLogger("pipemorph.trainer")

ALIGNMENT = 256
"""Bytes at which each storage begins within a block: what copy engines like."""


def aligned(nbytes: int) -> int:
    """``nbytes``, rounded up to where the next storage may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Block:
    """Host memory of one microbatch. ``memory``: uint8 (bytes,).

    ``used``: behind the newest copy from or to it, which has to be over before the memory goes.
    None: nothing to wait for.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used: Event | None = None

    @property
    def nbytes(self) -> int:
        return self.memory.numel()


class HostPool:
    """Blocks of host memory, one per microbatch that is there at a time.

    Grows on demand or ahead of it (:meth:`grow`), up to ``limit`` bytes (None: as much as the
    host has). A block goes back to the pool, not to the system: registering memory with a device
    costs more than a copy into it. With an accelerator the blocks are page-locked, to the byte
    and not in powers of two as torch's own pool, so that ``limit`` is one; without they are plain
    memory.
    """

    def __init__(self, limit: int | None, accelerator: Accelerator | None = None) -> None:
        self._limit = limit
        self._accelerator = accelerator
        self._free: list[Block] = []
        self._out = 0
        self.nbytes = 0
        """Bytes of all blocks there are, in use or not."""

    @property
    def blocks_in_use(self) -> int:
        return self._out

    def grow(self, blocks: int) -> None:
        """Have so many blocks of the largest size there is, as far as the limit allows. Before the
        first microbatch went to host memory, no size is known."""
        free = self._free
        nbytes = max((block.nbytes for block in free), default=0)
        while nbytes and len(free) + self._out < blocks:
            if self._limit is not None and self.nbytes + nbytes > self._limit:
                break
            free.append(self._grow(nbytes))

    def take(self, nbytes: int) -> Block:
        """The smallest free block of at least ``nbytes``, else a new one.

        Raises :class:`PipelineError` where that would go beyond the limit.
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
        """Take a block back. Copies that still read it are waited for by the next one."""
        self._out -= 1
        self._free.append(block)

    def close(self) -> None:
        """Give the free blocks back to the system; nothing may be copied any more."""
        while self._free:
            self._drop(self._free.pop())

    def _grow(self, nbytes: int) -> Block:
        if self._limit is not None:
            # Blocks too small for what is asked now: shapes have grown since.
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
