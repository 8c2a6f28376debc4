"""Copies of a state on a device, made during compute through page-locked memory.

A side stream copies the tensors into page-locked memory, after all work given to the compute stream
so far. A thread waits for the copy and writes the file. Tensors that forwards and backwards change
(buffers, gradients) are copied first, and the compute stream waits for them. It waits for
parameters and optimizer state only before the next step. The host waits only if the previous file
is still being written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from pipemorph_trainer.errors import PipelineError, first_sentence
from pipemorph_trainer.topology.accelerator import Accelerator, DeviceEvent


class DeviceCopier:
    """Copies a state at a time. The training thread calls all methods; ``write`` runs in another
    thread."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._side = accelerator.new_stream()
        self._pinned: dict[str, Tensor] = {}
        self._before_step: DeviceEvent | None = None
        """Event after the copies of all tensors that a step changes."""
        self._thread: threading.Thread | None = None
        self._error: str | None = None

    def begin_copy(
        self,
        values: Mapping[str, Tensor],
        changes_soon: Callable[[str], bool],
        write: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        """Copy ``values``, and call ``write`` in a thread with the copies in host memory. Call it
        after :meth:`finish_copy` of the previous copy. ``changes_soon``: true for names of values
        that change before the next step."""
        device = self._accelerator
        # Tensors that are not contiguous are copied in the compute stream.
        there = {n: v.detach() for n, v in values.items() if not _is_in_host_memory(v, device)}
        whole = {name: value.contiguous() for name, value in there.items()}
        # The host changes tensors in its memory itself, so they are copied at once.
        host = {n: v.detach().clone() for n, v in values.items() if n not in there}
        for name, value in whole.items():
            pinned = self._pinned.get(name)
            if pinned is None or (pinned.shape, pinned.dtype) != (value.shape, value.dtype):
                self._pinned[name] = device.allocate_pinned(tuple(value.shape), value.dtype)
        device.wait_event(self._side, device.record_event(device.compute_stream()))
        soon = [name for name in whole if changes_soon(name)]
        self._copy_tensors(whole, soon)
        if soon:
            device.wait_event(device.compute_stream(), device.record_event(self._side))
        self._copy_tensors(whole, [name for name in whole if not changes_soon(name)])
        done = self._before_step = device.record_event(self._side)
        copied = {name: self._pinned[name] for name in whole}

        def run() -> None:
            try:
                device.enter_thread()
                done.synchronize()
                whole.clear()  # Referenced until copied, since their owners may drop them.
                write({**host, **copied})
            except Exception as error:  # noqa: BLE001  raised by finish()
                self._error = first_sentence(error)

        self._thread = threading.Thread(target=run, name="pipemorph-copies", daemon=True)
        self._thread.start()

    def _copy_tensors(self, values: Mapping[str, Tensor], names: list[str]) -> None:
        for name in names:
            if values[name].numel():
                self._accelerator.copy_tensor(self._side, self._pinned[name], values[name])

    def before_step(self) -> None:
        """Make the compute stream wait for the copy of the tensors that the next step changes."""
        if self._before_step is not None:
            device = self._accelerator
            device.wait_event(device.compute_stream(), self._before_step)
            self._before_step = None

    def finish_copy(self, seconds: float) -> None:
        """Wait for the file that is being written. Raises :class:`PipelineError` if writing failed
        or takes longer than ``seconds``."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)
            if thread.is_alive():
                raise PipelineError(
                    f"the copy of the state was not written after {seconds:g} s; the device may"
                    " hang"
                )
            self._thread = None
        if self._error is not None:
            raise PipelineError(f"the copy of the state could not be written: {self._error}")


def _is_in_host_memory(value: Tensor, device: Accelerator) -> bool:
    return value.device != device.device
