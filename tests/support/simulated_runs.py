"""A rank on a simulated device that is given the receives of its direct links, as NCCL's are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from simulated_device import Driver, SimulatedDevice, SimulatedEvent

from pipemorph_trainer.schedule import pipeline_builder
from pipemorph_trainer.transport import rendezvous
from pipemorph_trainer.transport.channels.direct import DirectIncoming, DirectOutgoing
from pipemorph_trainer.transport.message import MessageBatch


class _Send:
    """A send of gloo that is polled as one of NCCL is: gloo's own is complete once it was waited
    for."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._failure: RuntimeError | None = None
        self._thread = threading.Thread(target=self._wait, daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._failure = error

    def is_completed(self) -> bool:
        return not self._thread.is_alive()

    def exception(self) -> RuntimeError | None:
        return self._failure


def seat(device: SimulatedDevice) -> None:
    """Put a device in place of the rank's, for the rest of the process."""
    for module in (rendezvous, pipeline_builder):
        vars(module)["get_accelerator"] = lambda _: device
    make = DirectOutgoing.__init__

    def made(self: Any, *, group: dist.ProcessGroup, **options: Any) -> None:
        make(self, group=group, **options)
        self._group = SimpleNamespace(
            send=lambda *message: _Send(group.send(*message)),
            size=group.size, rank=group.rank, recv=group.recv,
        )  # fmt: skip

    DirectOutgoing.__init__ = made  # type: ignore[method-assign]


@contextmanager
def device_with_receives(
    seed: int, patience: float = 10.0
) -> Iterator[tuple[SimulatedDevice, dict[int, SimulatedEvent]]]:
    """Put a strict device (see :class:`SimulatedDevice`) in place of the rank's, for the rest of
    the process. Also the receives that it waits for."""
    device = SimulatedDevice(prompt=True, strict=True, patience=patience)
    driver = Driver(device, seed)
    seat(device)
    post, wait = DirectIncoming._post_receive, DirectIncoming._wait_for_message
    given: dict[int, SimulatedEvent] = {}

    def posted(self: Any, batch: MessageBatch) -> Any:
        found = post(self, batch)
        what = f"{self.direction.letter} of microbatch {self._next} of iteration {batch.iteration}"
        given[id(found[1])] = device.post_receive(what)
        return found

    def waited(self: Any, contents: Any) -> Any:
        event = given.pop(id(contents[0][1]))
        found = wait(self, contents)
        device.deliver(event)
        return found

    DirectIncoming._post_receive = posted  # type: ignore[method-assign]
    DirectIncoming._wait_for_message = waited  # type: ignore[method-assign]
    yield device, given
    driver.close()
    assert not device.registered, "memory stayed page-locked"
