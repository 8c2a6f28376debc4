"""Streams, events and page-locked memory of a device, behind one narrow interface.

Everything that moves bytes between device and host beside the ops goes through an
:class:`Accelerator`: messages of the delegated route and offloaded activations. It is the only
place that says ``torch.cuda`` for that, so the logic around it is tested on machines without a
GPU, where a simulated accelerator runs the same copies late and in any order.

Nothing here waits on the host except :meth:`Event.synchronize`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

_torch_cuda: Any = torch.cuda  # its stubs are partly untyped
PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every device of the process."""


class Event(Protocol):
    """A point in a stream: everything the stream was given before it was recorded."""

    def query(self) -> bool:
        """Whether the device has passed it. Does not wait."""

    def synchronize(self) -> None:
        """Wait until it has, without the interpreter and without a busy core. Not in the
        executor's thread, except to pace it."""


class Stream(Protocol):
    """Handle of a queue of a device's work: done in order, beside other streams."""

    def query(self) -> bool:
        """Whether all that it was given is done."""


class Accelerator(Protocol):
    """One device. Every call but :meth:`pinned_empty` and :meth:`register` returns at once.

    How a tensor leaves the device (the other way is alike, with :meth:`empty` first)::

        side.wait ◀── event ◀── compute stream        the tensor is complete
        side: copy(pinned_empty(...), tensor), keep(tensor, side)
        done = record(side)                           when it has passed, the bytes are there
    """

    @property
    def device(self) -> torch.device:
        """The device all streams belong to."""

    def enter_thread(self) -> None:
        """Call once in a thread before it uses the device: the current one is per thread."""

    def compute_stream(self) -> Stream:
        """Where the calling thread's ops run now."""

    def new_stream(self) -> Stream:
        """A stream beside the compute stream."""

    def using(self, stream: Stream) -> AbstractContextManager[None]:
        """What the calling thread launches in it goes to ``stream``."""

    def record(self, stream: Stream, *, timed: bool = False) -> Event:
        """An event behind all that ``stream`` was given so far. ``timed`` for :meth:`seconds`."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What ``stream`` is given from now on begins after ``event``. The host goes on."""

    def copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        """Copy in ``stream``, of the same shape and dtype, both contiguous. The host side has
        to be page-locked (:meth:`pinned_empty`, :meth:`register`), or the host may wait, and to
        stay until an event behind the copy has passed."""

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """``tensor``'s device memory is used in ``stream``: when the last reference is gone, it
        is not given to another tensor before ``stream`` has done what it was given by then."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, stream: Stream) -> Tensor:
        """Device memory that ``stream`` may write at once. Before another stream reads it:
        :meth:`wait` there, and :meth:`keep`."""

    def pinned_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Page-locked host memory from a pool, which grows in size classes (powers of two) and
        is used again once the tensor is gone and no copy uses it. Growing may wait for the
        device."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock host memory that somebody else allocated. Returns why it cannot be, or
        None. May wait for the device: at start-up, or when shapes change."""

    def unregister(self, address: int) -> None:
        """Undo :meth:`register`, before the memory is unmapped and after its last copy."""

    def seconds(self, start: Event, end: Event) -> float:
        """Device time between two timed events that have passed."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator behind ``device``; None for the CPU, which needs no copies."""
    return CudaAccelerator(device) if device.type == "cuda" else None


class CudaAccelerator:
    """CUDA through torch. Page-locked memory comes from torch's caching host allocator, which
    does not hand a block out again before the copies that used it are done."""

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
        # `blocking`: a host that waits sleeps instead of spinning.
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
        """The runtime keeps the last error, and torch would raise it at the next kernel it
        launches, whoever's that is. So launch one here."""
        try:
            torch.ones(1, device=self._device)
        except RuntimeError:
            return


def _cuda(stream: Stream) -> Any:
    """The handle as torch has it; its stubs are partly untyped."""
    return stream
