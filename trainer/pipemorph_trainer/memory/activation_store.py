"""Store of activations: moves the tensors that autograd saves to host memory and back.

While the F of such a microbatch runs, autograd passes every tensor that it saves to a hook, and
stores a :class:`_SavedTensor` instead. So the tensors of the graph are known, and their memory can
be freed and later replaced. A tensor with other references is not moved, since that would free no
memory.

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

from pipemorph_trainer.autograd_internals import count_storage_holders, read_version
from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.memory.host_pool import HostBlock, HostPool, align_size
from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent

_PLAIN = (Tensor, nn.Parameter)


class _SavedTensor:
    """Saved tensor, as autograd holds it. ``tensor``: None while it is in host memory."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = read_version(tensor)

    @property
    def current(self) -> Tensor | None:
        """Tensor if it may be moved: on the device, plain, and not written since it was saved."""
        tensor = self.tensor
        if tensor is None or read_version(tensor) != self.version or not _is_movable_tensor(tensor):
            return None
        return tensor

    def release_memory(self) -> None:
        self.tensor = None

    def restore_memory(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, read_version(tensor)


class _InputLeaf:
    """Input of the stage, which the graph refers to directly. While its memory is on the host it
    has no elements, so that a stage that reads it fails instead of computing a wrong result."""

    __slots__ = ("_leaf",)

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = leaf

    @property
    def current(self) -> Tensor | None:
        return self._leaf if _is_movable_tensor(self._leaf) else None

    def release_memory(self) -> None:
        self._leaf.data = torch.empty(0, dtype=self._leaf.dtype, device=self._leaf.device)

    def restore_memory(self, tensor: Tensor) -> None:
        self._leaf.data = tensor


def _is_movable_tensor(tensor: Tensor) -> bool:
    """True if a tensor is fully described by its bytes, shape and strides."""
    return (
        type(tensor) in _PLAIN
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _pack_into(found: list[weakref.ref[_SavedTensor]], tensor: Tensor) -> _SavedTensor:
    # Detached, since an object in the graph must not refer to the graph. Weak, since autograd may
    # drop it again, such as with the graph of an unused branch.
    saved = _SavedTensor(tensor.detach())
    found.append(weakref.ref(saved))
    return saved


def _unpack_saved(saved: _SavedTensor) -> Tensor:
    tensor = saved.tensor
    if tensor is None:
        raise SplitError("the backward needs activations that are in host memory; fetch them first")
    if read_version(tensor) != saved.version:
        raise SplitError(
            f"a tensor of shape {tuple(tensor.shape)} that the backward of this stage needs was"
            " written in place since its forward"
        )
    return tensor


@dataclass(frozen=True)
class _SavedView:
    """Recipe to restore one saved tensor: its owner, and its view of a storage."""

    owner: weakref.ref[_SavedTensor] | _InputLeaf
    storage: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def restore_tensor(self, memory: Sequence[Tensor]) -> None:
        owner = self.owner if isinstance(self.owner, _InputLeaf) else self.owner()
        if owner is not None:
            owner.restore_memory(_view_storage(memory[self.storage], self))


@dataclass
class SavedActivations:
    """Tensors that autograd saved for one microbatch."""

    saved: list[weakref.ref[_SavedTensor]] = field(default_factory=list)
    block: HostBlock | None = None
    """Host memory of its activations; None while they are on the device."""
    parts: list[tuple[int, int]] = field(default_factory=list)
    """Offset and bytes of each storage in the block."""
    views: list[_SavedView] = field(default_factory=list)


@dataclass
class _StorageGroup:
    """Tensors of one storage."""

    storage: torch.UntypedStorage
    owners: list[tuple[weakref.ref[_SavedTensor] | _InputLeaf, Tensor]] = field(
        default_factory=list
    )
    known_references: int = 0


class ActivationStore:
    """Store that moves the activations of a stage's microbatches between ``device`` and a pool of
    host memory of at most ``limit`` bytes. ``accelerator``: that of the device, None on the CPU."""

    def __init__(
        self, device: torch.device, limit: int | None, accelerator: Accelerator | None = None
    ) -> None:
        self.pool = HostPool(limit, accelerator)
        self._device = device
        self._copies = make_copier(device, accelerator)

    @contextmanager
    def record_saved_tensors(self) -> Iterator[SavedActivations]:
        """Context for the F of a microbatch that will be offloaded."""
        self._copies.reclaim_memory()
        flight = SavedActivations()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _pack_into(flight.saved, tensor), _unpack_saved
        ):
            yield flight

    def reclaim_memory(self) -> None:
        """Allow reuse of the freed memory. Call it before an op that needs memory."""
        self._copies.reclaim_memory()

    def offload_activations(
        self, flight: SavedActivations, leaves: Sequence[Tensor | None], sent: Sequence[Tensor]
    ) -> int:
        """Copy the flight's activations to the pool and free their device memory.

        ``leaves``: the stage's inputs, which are moved too; ``sent``: tensors that use the same
        memory only until their message is sent. Returns the bytes moved. Raises
        :class:`PipelineError` if the pool is full; then nothing has changed.
        """
        groups = [
            group
            for group in self._group_saved_tensors(flight, leaves, sent)
            if self._is_private(group)
        ]
        at = 0
        parts: list[tuple[int, int]] = []
        for group in groups:
            parts.append((at, group.storage.nbytes()))
            at += align_size(group.storage.nbytes())
        block = self.pool.take_block(at)
        self._copies.copy_out(
            block,
            [
                (offset, self._view_bytes(group.storage))
                for group, (offset, _) in zip(groups, parts, strict=True)
            ],
        )
        flight.block, flight.parts = block, parts
        for index, group in enumerate(groups):
            for owner, tensor in group.owners:
                flight.views.append(
                    _SavedView(
                        owner, index, tensor.dtype, int(tensor.storage_offset()), tensor.size(),
                        tensor.stride(),
                    )
                )  # fmt: skip
                found = owner if isinstance(owner, _InputLeaf) else owner()
                if found is not None:
                    found.release_memory()
        return sum(nbytes for _, nbytes in parts)

    def fetch_activations(self, flight: SavedActivations) -> int:
        """Copy the flight's activations back to the device. Returns the bytes moved."""
        assert flight.block is not None
        memory = self._copies.copy_back(flight.block, flight.parts)
        for view in flight.views:
            view.restore_tensor(memory)
        moved = sum(nbytes for _, nbytes in flight.parts)
        self.release_block(flight)
        return moved

    def release_block(self, flight: SavedActivations) -> None:
        """Return the flight's host memory to the pool."""
        if flight.block is not None:
            self.pool.return_block(flight.block)
            flight.block = None
        flight.parts, flight.views = [], []

    def close(self) -> None:
        """Free the pool. Flights in it are lost."""
        self._copies.reclaim_memory()
        self.pool.close()

    def _group_saved_tensors(
        self, flight: SavedActivations, leaves: Sequence[Tensor | None], sent: Sequence[Tensor]
    ) -> list[_StorageGroup]:
        """Group the saved tensors that may be moved by storage."""
        groups: dict[int, _StorageGroup] = {}
        owners: list[weakref.ref[_SavedTensor] | _InputLeaf] = [*flight.saved]
        owners += [_InputLeaf(leaf) for leaf in leaves if leaf is not None]
        for owner in owners:
            found = owner if isinstance(owner, _InputLeaf) else owner()
            if found is None or (tensor := found.current) is None:
                continue
            if tensor.device != self._device:
                continue
            storage = tensor.untyped_storage()
            group = groups.setdefault(storage.data_ptr(), _StorageGroup(storage))
            group.owners.append((owner, tensor))
            group.known_references += 1
        for tensor in sent:
            if _is_movable_tensor(tensor) and tensor.untyped_storage().data_ptr() in groups:
                groups[tensor.untyped_storage().data_ptr()].known_references += 1
        return list(groups.values())

    @staticmethod
    def _is_private(group: _StorageGroup) -> bool:
        """True if no other tensor uses the storage, such as a parameter, the batch or a table.

        A saved tensor that may not be moved (:attr:`_SavedTensor.current`) counts as another one.
        """
        return (
            group.storage.nbytes() > 0
            and count_storage_holders(group.storage) == group.known_references
        )

    def _view_bytes(self, storage: torch.UntypedStorage) -> Tensor:
        memory = torch.empty(0, dtype=torch.uint8, device=self._device)
        return memory.set_(storage, 0, (storage.nbytes(),), (1,))


def _view_storage(memory: Tensor, view: _SavedView) -> Tensor:
    made = torch.empty(0, dtype=view.dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), view.offset, view.size, view.stride)


class ActivationCopier(Protocol):
    """Copier of bytes. ``parts``: offsets in the block, with device memory of uint8 (n,)."""

    def copy_out(self, block: HostBlock, parts: Sequence[tuple[int, Tensor]]) -> None:
        """Copy device memory to the block. The caller then drops the tensors."""

    def reclaim_memory(self) -> None:
        """Allow new device memory to reuse the memory that the last :meth:`copy_out` freed."""

    def copy_back(self, block: HostBlock, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        """Return new device memory, uint8 (n,), with the bytes at each ``(offset, n)`` of the
        block."""


def make_copier(device: torch.device, accelerator: Accelerator | None) -> ActivationCopier:
    """Make the copier of a device; ``accelerator``: None on the CPU."""
    return HostCopier(device) if accelerator is None else SideStreamCopier(accelerator)


class HostCopier:
    """Copier for a stage on the CPU; synchronous."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy_out(self, block: HostBlock, parts: Sequence[tuple[int, Tensor]]) -> None:
        for offset, part in parts:
            block.memory[offset : offset + part.numel()].copy_(part)

    def reclaim_memory(self) -> None:
        """Do nothing: copies are synchronous."""

    def copy_back(self, block: HostBlock, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        found = []
        for offset, nbytes in sizes:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            found.append(memory.copy_(block.memory[offset : offset + nbytes]))
        return found


class SideStreamCopier:
    """Copier for a device; asynchronous: streams wait for events, and the host never waits.

    **Out* runs on a side stream, concurrently with the next ops. The copied tensors live until
    :meth:`reclaim_memory`, before the next op that needs memory (an F or a fetch). There the
    compute stream waits for the copy, and the memory returns to its pool. With
    :meth:`Accelerator.keep_until_done` it would return at an unknown time, and the next F could
    exceed the device limit.

    **Back* runs in order on the compute stream, for the same reason: it reuses memory that earlier
    ops have freed.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._side = accelerator.new_stream()
        self._leaving: list[Tensor] = []
        self._copied_out: DeviceEvent | None = None

    def copy_out(self, block: HostBlock, parts: Sequence[tuple[int, Tensor]]) -> None:
        device = self._accelerator
        # Waits until the tensors are complete and earlier copies from the block are done.
        device.wait_event(self._side, device.record_event(device.compute_stream()))
        for offset, part in parts:
            device.copy_tensor(self._side, block.memory[offset : offset + part.numel()], part)
            self._leaving.append(part)
        block.used = self._copied_out = device.record_event(self._side)

    def reclaim_memory(self) -> None:
        if self._copied_out is not None:
            self._accelerator.wait_event(self._accelerator.compute_stream(), self._copied_out)
            self._copied_out = None
            self._leaving.clear()

    def copy_back(self, block: HostBlock, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        # Ends the copy into the block, too: the side stream runs in order.
        self.reclaim_memory()
        device = self._accelerator
        compute = device.compute_stream()
        found = []
        for offset, nbytes in sizes:
            memory = device.allocate_empty((nbytes,), torch.uint8, compute)
            device.copy_tensor(compute, memory, block.memory[offset : offset + nbytes])
            found.append(memory)
        block.used = device.record_event(compute)
        return found
