"""Copies of a state on a device: beside the compute, through page-locked memory.

A side stream copies what the device holds into page-locked memory, behind all work that was given
to the compute stream so far. A thread waits for that and writes the file. What the forwards and
backwards of the iteration change (buffers, gradients) is copied first, and the compute stream waits
for it; for the parameters and the optimizer's state the compute stream waits before the next step.
The host waits only if the file before is still being written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from pipemorph_trainer.errors import PipelineError, first_sentence
from pipemorph_trainer.topology.accelerator import Accelerator, Event


class LateCopies:
    """One copy at a time. The training thread calls everything; ``write`` runs in a thread."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._side = accelerator.new_stream()
        self._pinned: dict[str, Tensor] = {}
        self._left: Event | None = None
        """Behind the copies of what a step changes."""
        self._thread: threading.Thread | None = None
        self._error: str | None = None

    def begin(
        self,
        values: Mapping[str, Tensor],
        changes_soon: Callable[[str], bool],
        write: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        """Copy ``values``, and call ``write`` with them in host memory, in a thread. After
        :meth:`finish` of the copy before. ``changes_soon``: which change before the next step."""
        device = self._accelerator
        # Makes copies of those that are not contiguous in the compute stream.
        there = {n: v.detach() for n, v in values.items() if not _in_host_memory(v, device)}
        whole = {name: value.contiguous() for name, value in there.items()}
        # What the host changes itself is taken at once.
        host = {n: v.detach().clone() for n, v in values.items() if n not in there}
        for name, value in whole.items():
            pinned = self._pinned.get(name)
            if pinned is None or (pinned.shape, pinned.dtype) != (value.shape, value.dtype):
                self._pinned[name] = device.pinned_empty(tuple(value.shape), value.dtype)
        device.wait(self._side, device.record(device.compute_stream()))
        soon = [name for name in whole if changes_soon(name)]
        self._copy(whole, soon)
        if soon:
            device.wait(device.compute_stream(), device.record(self._side))
        self._copy(whole, [name for name in whole if not changes_soon(name)])
        done = self._left = device.record(self._side)
        copied = {name: self._pinned[name] for name in whole}

        def run() -> None:
            try:
                device.enter_thread()
                done.synchronize()
                whole.clear()  # Held until they were copied: their owners may drop them.
                write({**host, **copied})
            except Exception as error:  # noqa: BLE001  told by finish()
                self._error = first_sentence(error)

        self._thread = threading.Thread(target=run, name="pipemorph-kept", daemon=True)
        self._thread.start()

    def _copy(self, values: Mapping[str, Tensor], names: list[str]) -> None:
        for name in names:
            if values[name].numel():
                self._accelerator.copy(self._side, self._pinned[name], values[name])

    def before_step(self) -> None:
        """The next work of the compute stream changes parameters: it waits for their copy."""
        if self._left is not None:
            device = self._accelerator
            device.wait(device.compute_stream(), self._left)
            self._left = None

    def finish(self, seconds: float) -> None:
        """Wait for the file that is being written. Raises :class:`PipelineError` if it could not
        be, or is not within ``seconds``."""
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


def _in_host_memory(value: Tensor, device: Accelerator) -> bool:
    return value.device != device.device
