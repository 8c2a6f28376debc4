"""Streams, events and page-locked memory of a device, behind one narrow interface.

All copies between device and host that are not part of ops go through an :class:`Accelerator`:
messages of the delegated route and offloaded activations. Only this module uses ``torch.cuda`` for
them, so that the code around it is tested on machines without a GPU, where a simulated accelerator
runs the same copies late and in any order.

Only :meth:`Event.synchronize` blocks the host.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

_torch_cuda: Any = torch.cuda  # its stubs are partly untyped
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
USUAL_QUEUES = 8
"""Hardware queues that CUDA spreads streams over, unless :data:`QUEUES` says otherwise."""
PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every device of the process."""


class Event(Protocol):
    """A point in a stream: all work given to the stream before the event was recorded."""

    def query(self) -> bool:
        """Whether the device has reached the event. Does not wait."""

    def synchronize(self) -> None:
        """Wait until the device has reached it, without holding the interpreter or spinning. Not
        in the executor's thread, except to pace it."""


class Stream(Protocol):
    """Handle of a queue of a device's work. Its work runs in order, concurrently to other
    streams."""

    def query(self) -> bool:
        """Whether all work given to it is done."""


class Accelerator(Protocol):
    """One device. Every call but :meth:`pinned_empty` and :meth:`register` returns at once.

    How a tensor is copied to the host (the other way is similar, with :meth:`empty` first)::

        side.wait ◀── event ◀── compute stream        the tensor is complete
        side: copy(pinned_empty(...), tensor)
        done = record(side)                           once reached, the bytes are on the host

    The tensor is held until ``done``: then its memory is used again at a moment that the host
    knows, and not when an allocator happens to look.
    """

    @property
    def device(self) -> torch.device:
        """The device of all streams."""

    def enter_thread(self) -> None:
        """Make the device the current one of a thread. Call it once, before other uses."""

    def compute_stream(self) -> Stream:
        """The stream of the calling thread's ops."""

    def new_stream(self) -> Stream:
        """A stream beside the compute stream."""

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        """A context in which the calling thread launches its work on ``stream``."""

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """An event behind all work of ``stream`` so far. ``timed``: for :meth:`seconds`."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of ``stream`` wait for ``event``. The host does not wait."""

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        """Copy in ``stream``. Both tensors have the same shape and dtype and are contiguous. The
        host tensor must be page-locked (:meth:`pinned_empty`, :meth:`register`), or else the host
        may wait. Both must be held until an event behind the copy is reached."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Keep ``tensor``'s device memory until ``stream`` has done its current work, even if the
        last reference to the tensor goes earlier. For what was received, which a stage drops."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: Stream) -> Tensor:
        """Device memory that ``stream`` may write at once. Another stream must :meth:`wait` before
        it reads it, and :meth:`keep` it."""

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Page-locked host memory from a pool, which grows in powers of two. The memory is reused
        when the tensor is gone and no copy uses it. Growing may wait for the device."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock existing host memory. Returns None, or why it cannot be locked. May wait for
        the device, so only at the start or when shapes change."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`, after the last copy and before the memory is unmapped."""

    def seconds(self, start: Event, end: Event) -> float:
        """Device time between two timed events that were reached."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator of ``device``; None for the CPU, which needs no copies."""
    return CudaAccelerator(device) if device.type == "cuda" else None


def too_few_queues() -> str:
    """Text: the environment gives the streams of a device too few hardware queues; empty if not."""
    value = os.environ.get(QUEUES, "").strip()
    if not value.isdecimal() or not 0 < int(value) < USUAL_QUEUES:
        return ""
    return (
        f"{QUEUES}={value}: streams of the device share {value} of the usual {USUAL_QUEUES} queues,"
        " so ops wait behind copies and receives that wait for something else; unset it, or set it"
        f" to {USUAL_QUEUES} or more"
    )


class CudaAccelerator:
    """CUDA through torch. Page-locked memory comes from torch's caching host allocator, which does
    not reuse a block before the copies that use it are done."""

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def compute_stream(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> Stream:
        stream: Stream = _torch_cuda.Stream(self._device)
        return stream

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        with torch.cuda.stream(_cuda(stream)):
            yield

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        # `blocking`: the host sleeps while it waits, instead of spinning.
        event: Any = _torch_cuda.Event(enable_timing=timed, blocking=True)
        event.record(stream)
        made: Event = event
        return made

    def wait(self, stream: Stream, event: Event) -> None:
        _cuda(stream).wait_event(event)

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(_cuda(stream)):
            destination.copy_(source, non_blocking=True)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        tensor.record_stream(_cuda(stream))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: Stream) -> Tensor:
        with torch.cuda.stream(_cuda(stream)):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def register(self, address: int, nbytes: int) -> str | None:
        with torch.cuda.device(self._device):
            runtime = _torch_cuda.cudart()
            result = runtime.cudaHostRegister(address, nbytes, PORTABLE)
            if result == runtime.cudaError.success:
                return None
            self._forget_last_error()
        return str(runtime.cudaGetErrorString(result))

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self._device):
            runtime = _torch_cuda.cudart()
            if runtime.cudaHostUnregister(address) != runtime.cudaError.success:
                self._forget_last_error()

    def seconds(self, start: Event, end: Event) -> float:
        begun: Any = start
        return float(begun.elapsed_time(end)) / 1e3

    def _forget_last_error(self) -> None:
        """Clear the runtime's last error: torch would raise it at the next kernel launch, so launch
        one here."""
        try:
            torch.ones(1, device=self._device)
        except RuntimeError:
            return


def _cuda(stream: Stream) -> Any:
    """The handle as torch's class, whose stubs are partly untyped."""
    return stream
