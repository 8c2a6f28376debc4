"""Streams, events and page-locked memory of a device, behind a narrow interface.

All copies between device and host that are not part of ops go through an :class:`Accelerator`:
messages of the delegated route, and offloaded activations. Only this module uses ``torch.cuda`` for
them. So the code around it is tested on machines without a GPU, with a simulated accelerator that
runs the copies late and in any order.

Only :meth:`DeviceEvent.synchronize` blocks the host.
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
"""Default number of hardware queues that CUDA spreads streams over; :data:`QUEUES` changes it."""
PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every device of the process."""


class DeviceEvent(Protocol):
    """Point in a stream, after all work given to the stream before the event was recorded."""

    def query(self) -> bool:
        """Return True if the device has reached the event. Does not wait."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event, without holding the interpreter or spinning.
        The executor's thread calls it only to pace itself."""


class DeviceStream(Protocol):
    """Handle of a queue of a device's work, which runs in order and concurrently to other
    streams."""

    def query(self) -> bool:
        """Return True if all work given to the stream is done."""


class Accelerator(Protocol):
    """Device for copies. All calls except :meth:`allocate_pinned` and :meth:`lock_pages` return at
    once.

    How a tensor is copied to the host (the other way is similar, with :meth:`allocate_empty`
    first)::

        side.wait ◀── event ◀── compute stream        the tensor is complete
        side: copy_tensor(allocate_pinned(...), tensor)
        done = record_event(side)                     once reached, the bytes are on the host

    The tensor is referenced until ``done``: so the host determines when its memory may be reused,
    and not an allocator.
    """

    @property
    def device(self) -> torch.device:
        """Device of all streams."""

    def enter_thread(self) -> None:
        """Make the device the current one of the calling thread. Call it once, before other
        uses."""

    def compute_stream(self) -> DeviceStream:
        """Return the stream of the calling thread's ops."""

    def new_stream(self) -> DeviceStream:
        """Create a stream that is concurrent to the compute stream."""

    def use_stream(self, stream: DeviceStream) -> AbstractContextManager[None]:
        """Return a context in which the calling thread launches its work on ``stream``."""

    def record_event(self, stream: DeviceStream, *, timed: bool = False) -> DeviceEvent:
        """Record an event after all work of ``stream`` so far. ``timed``: for
        :meth:`elapsed_seconds`."""

    def wait_event(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """Make later work of ``stream`` wait for ``event``. The host does not wait."""

    def copy_tensor(self, stream: DeviceStream, destination: Tensor, source: Tensor) -> None:
        """Copy in ``stream``. Both tensors have the same shape and dtype and are contiguous. If the
        host tensor is not page-locked (:meth:`allocate_pinned`, :meth:`lock_pages`), the host may
        wait. Both must be referenced until an event after the copy is reached."""

    def keep_until_done(self, tensor: Tensor, stream: DeviceStream) -> None:
        """Keep ``tensor``'s device memory until ``stream`` has done its current work, even if the
        last reference is dropped earlier: stages drop the tensors that they received."""

    def allocate_empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, stream: DeviceStream
    ) -> Tensor:
        """Allocate device memory that ``stream`` may write at once. Another stream must
        :meth:`wait_event` before it reads the tensor, and :meth:`keep_until_done` it."""

    def allocate_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate page-locked host memory from a pool, which grows in powers of two. The memory is
        reused when the tensor is freed and no copy uses it. Growing may wait for the device."""

    def lock_pages(self, address: int, nbytes: int) -> str | None:
        """Page-lock existing host memory. Returns None, or the reason why it cannot be locked. It
        may wait for the device, so call it only at the start or when shapes change."""

    def unlock_pages(self, address: int) -> None:
        """Undo :meth:`lock_pages`, after the last copy and before the memory is unmapped."""

    def elapsed_seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        """Return the device time between two timed events that were reached, seconds."""


def get_accelerator(device: torch.device) -> Accelerator | None:
    """Create the accelerator of ``device``; None for the CPU, which needs no copies."""
    return CudaAccelerator(device) if device.type == "cuda" else None


def describe_queue_shortage() -> str:
    """Describe the shortage if the environment sets too few hardware queues; else empty."""
    value = os.environ.get(QUEUES, "").strip()
    if not value.isdecimal() or not 0 < int(value) < USUAL_QUEUES:
        return ""
    return (
        f"{QUEUES}={value}: streams of the device share {value} of the usual {USUAL_QUEUES} queues,"
        " so ops wait behind copies and receives that wait for something else; unset it, or set it"
        f" to {USUAL_QUEUES} or more"
    )


class CudaAccelerator:
    """CUDA device, through torch. Page-locked memory comes from torch's caching host allocator,
    which reuses a block only after the copies that use it are done."""

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._device)

    def compute_stream(self) -> DeviceStream:
        return torch.cuda.current_stream(self._device)

    def new_stream(self) -> DeviceStream:
        stream: DeviceStream = _torch_cuda.Stream(self._device)
        return stream

    @contextmanager
    def use_stream(self, stream: DeviceStream) -> Iterator[None]:
        with torch.cuda.stream(_as_torch_stream(stream)):
            yield

    def record_event(self, stream: DeviceStream, *, timed: bool = False) -> DeviceEvent:
        # `blocking`: the host sleeps while it waits, instead of spinning.
        event: Any = _torch_cuda.Event(enable_timing=timed, blocking=True)
        event.record(stream)
        made: DeviceEvent = event
        return made

    def wait_event(self, stream: DeviceStream, event: DeviceEvent) -> None:
        _as_torch_stream(stream).wait_event(event)

    def copy_tensor(self, stream: DeviceStream, destination: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(_as_torch_stream(stream)):
            destination.copy_(source, non_blocking=True)

    def keep_until_done(self, tensor: Tensor, stream: DeviceStream) -> None:
        tensor.record_stream(_as_torch_stream(stream))

    def allocate_empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, stream: DeviceStream
    ) -> Tensor:
        with torch.cuda.stream(_as_torch_stream(stream)):
            return torch.empty(shape, dtype=dtype, device=self._device)

    def allocate_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def lock_pages(self, address: int, nbytes: int) -> str | None:
        with torch.cuda.device(self._device):
            runtime = _torch_cuda.cudart()
            result = runtime.cudaHostRegister(address, nbytes, PORTABLE)
            if result == runtime.cudaError.success:
                return None
            self._clear_last_error()
        return str(runtime.cudaGetErrorString(result))

    def unlock_pages(self, address: int) -> None:
        with torch.cuda.device(self._device):
            runtime = _torch_cuda.cudart()
            if runtime.cudaHostUnregister(address) != runtime.cudaError.success:
                self._clear_last_error()

    def elapsed_seconds(self, start: DeviceEvent, end: DeviceEvent) -> float:
        begun: Any = start
        return float(begun.elapsed_time(end)) / 1e3

    def _clear_last_error(self) -> None:
        """Clear the runtime's last error by a kernel launch, at which torch raises it."""
        try:
            torch.ones(1, device=self._device)
        except RuntimeError:
            return


def _as_torch_stream(stream: DeviceStream) -> Any:
    """Return the handle as torch's class, whose stubs are partly untyped."""
    return stream
