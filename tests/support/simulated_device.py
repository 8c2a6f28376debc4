"""An accelerator that is not there: streams that do their copies later, in any order.

Addresses are real and copies are by address, as a copy engine's are: a copy neither keeps a tensor
alive nor sees that it is gone. Memory is written over as early as a caching allocator could give it
to another owner, so code that reads too late or writes too early is found by what it reads:

* device memory, once the tensor is gone, after what its own stream was given until then and after
  the streams that :meth:`SimulatedDevice.keep_until_done` named, but not after others;
* page-locked memory, once the tensor is gone and the copies that use it are done.

A device may be *strict*: what page-locks memory waits for all that the device was given until then,
as drivers may. Receives are given to it with :meth:`SimulatedDevice.post_receive`, so one that
waits for this host makes such a call wait for ever; it ends after ``patience`` and names them.

Nothing happens by itself: :meth:`SimulatedDevice.step` does the next work of one stream, and
:class:`Driver` does so from a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

SCRIBBLE = 0xEE
LONGEST_WAIT = 30.0


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self.passed_at: float | None = None

    def query(self) -> bool:
        return self.passed_at is not None

    def synchronize(self) -> None:
        device = self._device
        with device.progress:
            if not device.progress.wait_for(
                lambda: self.query() or device.broken is not None, LONGEST_WAIT
            ):
                raise RuntimeError(f"no event has passed in {LONGEST_WAIT} s of waiting")
            if device.broken is not None:
                raise RuntimeError(device.broken)


@dataclass(eq=False)
class SimulatedStream:
    name: str
    work: deque[Callable[[], None] | SimulatedEvent] = field(default_factory=deque)
    """Work, or an event that has to pass before what follows."""

    def query(self) -> bool:
        return not self.work


@dataclass(eq=False)
class _Block:
    memory: np.ndarray
    home: SimulatedStream | None
    """The stream it was allocated in; None for page-locked memory."""
    streams: set[SimulatedStream] = field(default_factory=set)
    copies: int = 0
    free: bool = False

    @property
    def address(self) -> int:
        return self.memory.__array_interface__["data"][0]

    def scribble(self) -> None:
        self.memory[:] = SCRIBBLE


class SimulatedDevice:
    """See the module. ``register_refuses``: why memory of others cannot be page-locked.
    ``strict``: page-locking waits for everything, at most ``patience`` seconds.

    ``clock``: of the device, seconds, see :meth:`elapsed_seconds`.

    ``prompt``: ops are run by the host as they are launched, as those of torch on the CPU. Then
    the compute stream is where the host is, and to wait in it is to wait on the host.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        *,
        register_refuses: str | None = None,
        prompt: bool = False,
        strict: bool = False,
        patience: float = LONGEST_WAIT,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._prompt = prompt
        self._strict, self._patience = strict, patience
        self.waited_for_all: list[str] = []
        """The calls that did, in order."""
        self.receives: list[tuple[str, SimulatedEvent]] = []
        """Receives that are posted and not complete, by name."""
        self.progress = threading.Condition(threading.RLock())
        self.compute = SimulatedStream("compute")
        self.streams = [self.compute]
        self.registered: dict[int, int] = {}
        self.ever_registered: list[int] = []
        self.register_refuses = register_refuses
        self.broken: str | None = None
        """Error that every wait for the device raises from now on."""
        self.copied: list[tuple[str, int]] = []
        """Stream and bytes of every copy done, in order."""
        self.pinned_blocks: list[_Block] = []
        self._blocks: list[_Block] = []
        self._gone: deque[_Block] = deque()

    # --- the seat ---------------------------------------------------------------------------

    def enter_thread(self) -> None:
        """Threads need nothing."""

    def compute_stream(self) -> SimulatedStream:
        return self.compute

    def new_stream(self) -> SimulatedStream:
        stream = SimulatedStream(f"side {len(self.streams)}")
        self.streams.append(stream)
        return stream

    def use_stream(self, stream: SimulatedStream) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record_event(self, stream: SimulatedStream, *, timed: bool = False) -> SimulatedEvent:
        event = SimulatedEvent(self)

        def passed() -> None:
            event.passed_at = self._clock()

        self._enqueue(stream, passed)
        return event

    def wait_event(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        if self._prompt and stream is self.compute:
            event.synchronize()
        else:
            self._enqueue(stream, event)

    def copy_tensor(self, stream: SimulatedStream, destination: Tensor, source: Tensor) -> None:
        assert destination.is_contiguous() and source.is_contiguous()
        assert destination.shape == source.shape and destination.dtype == source.dtype
        to, at = destination.data_ptr(), source.data_ptr()
        nbytes = source.numel() * source.element_size()
        with self.progress:
            self._sweep()
            assert any(self._page_locked(a, nbytes) for a in (to, at)), "would make the host wait"
            used = [b for b in (self._block(to), self._block(at)) if b is not None and not b.home]
            for block in used:
                block.copies += 1

        def copy() -> None:
            ctypes.memmove(to, at, nbytes)
            self.copied.append((stream.name, nbytes))
            for block in used:
                block.copies -= 1
                self._recycle(block)

        self._enqueue(stream, copy)

    def keep_until_done(self, tensor: Tensor, stream: SimulatedStream) -> None:
        block = self._block(tensor.data_ptr())
        if block is not None:
            block.streams.add(stream)
            return
        # Memory of torch's own allocator is not tracked here: held until the stream gets here.
        held = [tensor]
        self._enqueue(stream, held.clear)

    def allocate_empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, stream: SimulatedStream
    ) -> Tensor:
        return self._allocate(shape, dtype, stream)

    def allocate_pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._allocate(shape, dtype, None)

    def lock_pages(self, address: int, nbytes: int) -> str | None:
        if self.register_refuses is not None:
            return self.register_refuses
        assert address not in self.registered, "cudaErrorHostMemoryAlreadyRegistered"
        self._wait_for_all("cudaHostRegister")
        self.registered[address] = nbytes
        self.ever_registered.append(address)
        return None

    def unlock_pages(self, address: int) -> None:
        with self.progress:
            assert not any(stream.work for stream in self.streams[1:]), "a copy is under way"
        del self.registered[address]

    def elapsed_seconds(self, start: SimulatedEvent, end: SimulatedEvent) -> float:
        assert start.passed_at is not None and end.passed_at is not None
        return end.passed_at - start.passed_at

    def post_receive(self, name: str) -> SimulatedEvent:
        """A receive on the device, which is complete once :meth:`deliver` has been called."""
        event = SimulatedEvent(self)
        with self.progress:
            self.receives.append((name, event))
        return event

    def deliver(self, event: SimulatedEvent) -> None:
        with self.progress:
            event.passed_at = self._clock()
            self.receives = [each for each in self.receives if each[1] is not event]
            self.progress.notify_all()

    def _wait_for_all(self, call: str) -> None:
        """A call that returns once the device has done all that it was given before."""
        if not self._strict:
            return
        self.waited_for_all.append(call)
        given = [self.record_event(stream) for stream in self.streams]
        given += [event for _, event in self.receives]
        with self.progress:
            done = self.progress.wait_for(lambda: all(e.query() for e in given), self._patience)
            if not done:
                pending = ", ".join(name for name, _ in self.receives) or "work in streams"
                raise RuntimeError(
                    f"{call} waited {self._patience:g} s for all that the device was given; not"
                    f" complete: {pending}"
                )

    # --- what a test does -------------------------------------------------------------------

    def launch(self, kernel: Callable[[], None]) -> None:
        """An op on the compute stream. It keeps what it refers to until it has run."""
        self._enqueue(self.compute, kernel)

    def work(self, stream: SimulatedStream, kernel: Callable[[], object]) -> None:
        """Other work of a stream, in its turn."""
        self._enqueue(stream, kernel)

    def tensor(self, values: Tensor) -> Tensor:
        """Device memory that an op on the compute stream fills: wrong until that has run."""
        made = self._allocate(tuple(values.shape), values.dtype, self.compute)
        address, nbytes = made.data_ptr(), values.numel() * values.element_size()
        values = values.contiguous()

        def fill() -> None:
            ctypes.memmove(address, values.data_ptr(), nbytes)

        self.launch(fill)
        return made

    def runnable(self) -> list[SimulatedStream]:
        with self.progress:
            self._sweep()
            return [s for s in self.streams if s.work and self._may_run(s.work[0])]

    def step(self, stream: SimulatedStream) -> None:
        """Do the next work of a runnable stream."""
        with self.progress:
            work = stream.work.popleft()
            if not isinstance(work, SimulatedEvent):
                work()
            self.progress.notify_all()

    def run(self, *streams: SimulatedStream) -> None:
        """Run all possible work of these streams, or of all; the first stream first."""
        while ready := [s for s in self.runnable() if not streams or s in streams]:
            self.step(ready[0])

    def fail(self, why: str) -> None:
        """Break the device: everything is over, and waiting callers get the reason."""
        with self.progress:
            self.broken = why
            for stream in self.streams:
                stream.work.clear()
            self.progress.notify_all()

    # --- memory -------------------------------------------------------------------------------

    def _allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, home: SimulatedStream | None
    ) -> Tensor:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        size = 1 << max(6, nbytes - 1).bit_length() if nbytes else 64
        with self.progress:
            self._sweep()
            free = [b for b in self._blocks if b.free and b.home is home and b.memory.size == size]
            if home is None and not free:
                self._wait_for_all("cudaHostAlloc")
            if free:
                block = free[0]
                block.free = False
            else:
                block = _Block(np.full(size, SCRIBBLE, dtype=np.uint8), home)
                self._blocks.append(block)
                if home is None:
                    self.pinned_blocks.append(block)
            block.streams = set()
        array = (ctypes.c_uint8 * size).from_address(block.address)
        weakref.finalize(array, self._gone.append, block)
        whole = torch.frombuffer(array, dtype=torch.uint8)
        return whole[:nbytes].view(dtype).view(shape)

    def _sweep(self) -> None:
        """Give back the memory of tensors that are gone. They may go in any thread."""
        while self._gone:
            block = self._gone.popleft()
            block.free = True
            if block.home is None:
                self._recycle(block)
                continue
            # In stream order, as its next user there would come.
            for stream in block.streams:
                event = SimulatedEvent(self)
                stream.work.append(_passing(event))
                block.home.work.append(event)
            block.home.work.append(_scribbling(block))

    def _recycle(self, block: _Block) -> None:
        if block.free and not block.copies:
            block.scribble()

    def _block(self, address: int) -> _Block | None:
        for block in self._blocks:
            if block.address <= address < block.address + block.memory.size:
                return block
        return None

    def _page_locked(self, address: int, nbytes: int) -> bool:
        block = self._block(address)
        if block is not None:
            return block.home is None
        return any(a <= address and address + nbytes <= a + n for a, n in self.registered.items())

    # --- streams ------------------------------------------------------------------------------

    def _enqueue(self, stream: SimulatedStream, work: Callable[[], None] | SimulatedEvent) -> None:
        with self.progress:
            self._sweep()
            stream.work.append(work)
            self.progress.notify_all()

    @staticmethod
    def _may_run(work: Callable[[], None] | SimulatedEvent) -> bool:
        return not isinstance(work, SimulatedEvent) or work.query()


def _passing(event: SimulatedEvent) -> Callable[[], None]:
    def passed() -> None:
        event.passed_at = time.perf_counter()

    return passed


def _scribbling(block: _Block) -> Callable[[], None]:
    def scribble() -> None:
        if block.free:
            block.scribble()

    return scribble


class Driver:
    """Does the device's work from a thread: each time that of a random stream."""

    def __init__(self, device: SimulatedDevice, seed: int) -> None:
        self._device, self._random = device, random.Random(seed)
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="simulated-device", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            ready = self._device.runnable()
            if ready:
                self._device.step(self._random.choice(ready))
            else:
                with self._device.progress:
                    self._device.progress.wait(0.01)

    def close(self) -> None:
        deadline = time.monotonic() + LONGEST_WAIT
        while self._device.runnable():
            assert time.monotonic() < deadline, "the device's work does not end"
            time.sleep(0.001)
        self._ended = True
        self._thread.join(LONGEST_WAIT)
