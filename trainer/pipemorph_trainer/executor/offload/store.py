"""Moves the tensors that autograd saves for one microbatch to host memory and back.

While the F of such a microbatch runs, autograd passes every tensor that it saves to a hook, and
keeps a :class:`_Saved` instead. So the tensors of the graph are known, and their memory can be
freed and later be replaced by other memory. A tensor with other references is not moved, since that
would free nothing.

With such hooks torch does not check for in-place writes; the hooks here do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor, nn

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.offload.pool import Block, HostPool, aligned
from pipemorph_trainer.executor.torch_private import holders, version
from pipemorph_trainer.topology.accelerator import Accelerator, Event

_PLAIN = (Tensor, nn.Parameter)


class _Saved:
    """One saved tensor, as autograd holds it. ``tensor``: None while it is in host memory."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = version(tensor)

    @property
    def current(self) -> Tensor | None:
        """The tensor if it may be moved: on the device, plain, and not written since it was
        saved."""
        tensor = self.tensor
        if tensor is None or version(tensor) != self.version or not _movable(tensor):
            return None
        return tensor

    def leave(self) -> None:
        self.tensor = None

    def come_back(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, version(tensor)


class _Leaf:
    """An input of the stage, which the graph refers to directly. While its memory is on the host it
    has no elements, so that a stage that reads it fails instead of computing a wrong result."""

    __slots__ = ("_leaf",)

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = leaf

    @property
    def current(self) -> Tensor | None:
        return self._leaf if _movable(self._leaf) else None

    def leave(self) -> None:
        self._leaf.data = torch.empty(0, dtype=self._leaf.dtype, device=self._leaf.device)

    def come_back(self, tensor: Tensor) -> None:
        self._leaf.data = tensor


def _movable(tensor: Tensor) -> bool:
    """Whether a tensor is fully described by its bytes, shape and strides."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _pack_into(found: list[weakref.ref[_Saved]], tensor: Tensor) -> _Saved:
    # Detached, since what autograd keeps must not refer to the graph. Weak, since autograd may
    # drop it again, such as with the graph of an unused branch.
    saved = _Saved(tensor.detach())
    found.append(weakref.ref(saved))
    return saved


def _unpack(saved: _Saved) -> Tensor:
    tensor = saved.tensor
    if tensor is None:
        raise SplitError("the backward needs activations that are in host memory; fetch them first")
    if version(tensor) != saved.version:
        raise SplitError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward of this stage needs was"
            " written in place since its forward"
        )
    return tensor


@dataclass(frozen=True)
class _View:
    """How to restore one saved tensor: its owner, and its view of a storage."""

    of: weakref.ref[_Saved] | _Leaf
    storage: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def restore(self, memory: Sequence[Tensor]) -> None:
        owner = self.of if isinstance(self.of, _Leaf) else self.of()
        if owner is not None:
            owner.come_back(_view(memory[self.storage], self))


@dataclass
class SavedFlight:
    """The tensors that autograd saved for one microbatch."""

    saved: list[weakref.ref[_Saved]] = field(default_factory=list)
    block: Block | None = None
    """The host memory of its activations; None while they are on the device."""
    parts: list[tuple[int, int]] = field(default_factory=list)
    """Offset and bytes of each storage in the block."""
    views: list[_View] = field(default_factory=list)


@dataclass
class _Group:
    """The tensors of one storage."""

    storage: torch.UntypedStorage
    owners: list[tuple[weakref.ref[_Saved] | _Leaf, Tensor]] = field(default_factory=list)
    known: int = 0


class ActivationStore:
    """Moves the activations of a stage's microbatches between ``device`` and a pool of host memory
    of at most ``limit`` bytes. ``accelerator``: of the device, None on the CPU."""

    def __init__(
        self, device: torch.device, limit: int | None, accelerator: Accelerator | None = None
    ) -> None:
        self.pool = HostPool(limit, accelerator)
        self._device = device
        self._copies = copies_for(device, accelerator)

    @contextmanager
    def recording(self) -> Iterator[SavedFlight]:
        """Context for the F of a microbatch that is offloaded afterwards."""
        self._copies.reclaim()
        flight = SavedFlight()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _pack_into(flight.saved, tensor), _unpack
        ):
            yield flight

    def reclaim(self) -> None:
        """Allow reuse of the freed memory. Call before an op that needs memory."""
        self._copies.reclaim()

    def offload(
        self, flight: SavedFlight, leaves: Sequence[Tensor | None], sent: Sequence[Tensor]
    ) -> int:
        """Copy the flight's activations to the pool and free their device memory.

        ``leaves``: the stage's inputs, which are moved too; ``sent``: tensors that use the same
        memory only until their message is sent. Returns the bytes moved. Raises
        :class:`PipelineError` if the pool is full; then nothing has changed.
        """
        groups = [group for group in self._groups(flight, leaves, sent) if self._private(group)]
        at = 0
        parts: list[tuple[int, int]] = []
        for group in groups:
            parts.append((at, group.storage.nbytes()))
            at += aligned(group.storage.nbytes())
        block = self.pool.take(at)
        self._copies.out(
            block,
            [
                (offset, self._bytes_of(group.storage))
                for group, (offset, _) in zip(groups, parts, strict=True)
            ],
        )
        flight.block, flight.parts = block, parts
        for index, group in enumerate(groups):
            for owner, tensor in group.owners:
                flight.views.append(
                    _View(
                        owner, index, tensor.dtype, int(tensor.storage_offset()), tensor.size(),
                        tensor.stride(),
                    )
                )  # fmt: skip
                found = owner if isinstance(owner, _Leaf) else owner()
                if found is not None:
                    found.leave()
        return sum(nbytes for _, nbytes in parts)

    def fetch(self, flight: SavedFlight) -> int:
        """Bring the flight's activations back to the device. Returns the bytes moved."""
        assert flight.block is not None
        memory = self._copies.back(flight.block, flight.parts)
        for view in flight.views:
            view.restore(memory)
        moved = sum(nbytes for _, nbytes in flight.parts)
        self.forget(flight)
        return moved

    def forget(self, flight: SavedFlight) -> None:
        """Return the flight's host memory to the pool."""
        if flight.block is not None:
            self.pool.give(flight.block)
            flight.block = None
        flight.parts, flight.views = [], []

    def close(self) -> None:
        """Free the pool. Flights that are in it are lost."""
        self._copies.reclaim()
        self.pool.close()

    def _groups(
        self, flight: SavedFlight, leaves: Sequence[Tensor | None], sent: Sequence[Tensor]
    ) -> list[_Group]:
        """The saved tensors that may be moved, grouped by storage."""
        groups: dict[int, _Group] = {}
        owners: list[weakref.ref[_Saved] | _Leaf] = [*flight.saved]
        owners += [_Leaf(leaf) for leaf in leaves if leaf is not None]
        for owner in owners:
            found = owner if isinstance(owner, _Leaf) else owner()
            if found is None or (tensor := found.current) is None:
                continue
            if tensor.device != self._device:
                continue
            storage = tensor.untyped_storage()
            group = groups.setdefault(storage.data_ptr(), _Group(storage))
            group.owners.append((owner, tensor))
            group.known += 1
        for tensor in sent:
            if _movable(tensor) and tensor.untyped_storage().data_ptr() in groups:
                groups[tensor.untyped_storage().data_ptr()].known += 1
        return list(groups.values())

    @staticmethod
    def _private(group: _Group) -> bool:
        """Whether no other tensor uses the storage, such as a parameter, the batch or a table.

        A saved tensor that is not :attr:`_Saved.current` counts as another one, too.
        """
        return group.storage.nbytes() > 0 and holders(group.storage) == group.known

    def _bytes_of(self, storage: torch.UntypedStorage) -> Tensor:
        memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        return memory.set_(storage, 0, (storage.nbytes(),), (1,))


def _view(memory: Tensor, view: _View) -> Tensor:
    made = torch.empty(0, dtype=view.dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), view.offset, view.size, view.stride)


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
