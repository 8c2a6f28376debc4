"""A rank on a simulated device that is given the receives of its direct links, as NCCL's are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from simulated_device import Driver, SimulatedDevice, SimulatedEvent

from pipemorph_trainer.links import rendezvous
from pipemorph_trainer.links.channels import direct
from pipemorph_trainer.links.channels.direct import DirectIncoming
from pipemorph_trainer.links.message import Batch
from pipemorph_trainer.steps import parts


@contextmanager
def device_with_receives(
    seed: int, patience: float = 10.0
) -> Iterator[tuple[SimulatedDevice, dict[int, SimulatedEvent]]]:
    """Put a strict device (see :class:`SimulatedDevice`) in place of the rank's, for the rest of
    the process. Also the receives that it waits for."""
    device = SimulatedDevice(prompt=True, strict=True, patience=patience)
    driver = Driver(device, seed)
    for module in (rendezvous, parts):
        vars(module)["accelerator_of"] = lambda _: device
    make, post, wait = DirectIncoming.__init__, DirectIncoming._post, DirectIncoming._wait
    given: dict[int, SimulatedEvent] = {}

    def made(self: Any, **options: Any) -> None:
        make(self, **options | {"posted": direct.POSTED_ON_DEVICE})

    def posted(self: Any, batch: Batch) -> Any:
        found = post(self, batch)
        what = f"{self.direction.letter} of microbatch {self._next} of iteration {batch.iteration}"
        given[id(found[1])] = device.post_receive(what)
        return found

    def waited(self: Any, contents: Any) -> Any:
        event = given.pop(id(contents[0][1]))
        found = wait(self, contents)
        device.deliver(event)
        return found

    vars(direct)["DirectIncoming"].__init__ = made
    vars(direct)["DirectIncoming"]._post = posted
    DirectIncoming._wait = waited  # type: ignore[method-assign]
    yield device, given
    driver.close()
    assert not device.registered, "memory stayed page-locked"
