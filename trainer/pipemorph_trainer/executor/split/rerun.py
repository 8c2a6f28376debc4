"""Runs the forward of a microbatch for a second time, instead of keeping its activations."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split.flight import Flight, Splitter, StageCall
from pipemorph_trainer.executor.torch_private import version

_Buffer = tuple[nn.Module, str, Tensor | None, Tensor | None]
"""A buffer: its module, its name, the tensor and a copy of it."""


@dataclass
class Begun:
    """What a forward began with, beside its arguments: random state, and buffers that it
    changed."""

    random: dict[str, Any]
    buffers: list[_Buffer]


@dataclass(frozen=True)
class Kept:
    """What is kept of a microbatch to run its forward again: the arguments of its F, what else it
    began with, and digests of what it sent."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    target: Any
    begun: Begun
    sent: Sequence[Tensor]

    def run(self, splitter: Splitter, call: StageCall, microbatch: int, rerun: Rerun) -> Flight:
        """Run the forward again. Raises :class:`SplitError` if it gives something else."""
        outputs, call.outputs = call.outputs, None
        try:
            with rerun.second(self.begun):
                flight = splitter.forward(call, microbatch, self.args, self.kwargs, self.target)
        finally:
            call.outputs = outputs
        for index, (before, now) in enumerate(zip(self.sent, flight.sent, strict=True)):
            if not torch.equal(before, digest(now)):
                what = "loss" if call.is_last else f"output {index}"
                raise SplitError(
                    f"the forward of microbatch {microbatch} ran again and gave another {what} than"
                    " the one that was sent: the stage depends on more than its inputs, parameters,"
                    " buffers and the random state of torch, Python and NumPy. Give"
                    " schedule.recompute: never (recompute of Pipeline)"
                )
        flight.sent = ()
        return flight


def digest(tensor: Tensor) -> Tensor:
    """A 64-bit digest of a tensor's bytes: the sum of its 8-byte words, each multiplied by an odd
    number of its position, modulo 2⁶⁴. Integers, so that it does not depend on their order."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 8:
        data = torch.cat([data, data.new_zeros(-data.numel() % 8)])
    words = data.view(torch.int64)
    places = torch.arange(len(words), dtype=torch.int64, device=words.device)
    return (words * (2 * places + 1) * -0x61C8864680B583EB).sum()


class Rerun:
    """Lets a stage run a forward for a second time as it ran for the first time.

    The second time begins with the random state of the first time and with the values that buffers
    had then. It leaves both as it found them, so that a running statistic counts each microbatch
    once.
    """

    def __init__(self, stage: nn.Module) -> None:
        tensors = [*stage.parameters(), *stage.buffers()]
        self._devices = {t.device for t in tensors if t.is_cuda}
        self._buffers = [(module, name) for module in stage.modules() for name in module._buffers]
        self._changing: list[tuple[nn.Module, str]] | None = None
        """Buffers that forwards have changed so far, and those of norms, whose kernels write
        without a trace; None before the first one."""

    @contextmanager
    def first(self) -> Iterator[Begun]:
        """Context for the first time. Gives what :meth:`second` needs."""
        before = [_mark(module, name) for module, name in self._buffers]
        known = self._buffers if self._changing is None else self._changing
        begun = Begun(random_state(self._devices), _copies(known))
        yield begun
        changed = [
            place
            for place, mark in zip(self._buffers, before, strict=True)
            if _mark(*place) != mark
            or isinstance(place[0], _NormBase)
            or (self._changing and place in self._changing)
        ]
        if self._changing is None:
            # By value, only once: a device would have to be waited for.
            written = [each[:2] for each in begun.buffers if not _as_before(each)]
            changed += [place for place in written if place not in changed]
        self._changing = changed
        begun.buffers = [each for each in begun.buffers if each[:2] in changed]

    @contextmanager
    def second(self, begun: Begun) -> Iterator[None]:
        """Context for the second time."""
        state, buffers = random_state(self._devices), _copies(self._changing or ())
        set_random_state(begun.random)
        # Other tensors in their place, since the graph may keep what a forward has written to.
        values = {each[:2]: each[3] for each in (*buffers, *begun.buffers)}
        for (module, name), value in values.items():
            module._buffers[name] = value
        try:
            yield
        finally:
            set_random_state(state)
            for module, name, buffer, _ in buffers:
                module._buffers[name] = buffer


def _copies(places: Iterable[tuple[nn.Module, str]]) -> list[_Buffer]:
    found = []
    for module, name in places:
        buffer = module._buffers.get(name)
        found.append((module, name, buffer, None if buffer is None else buffer.detach().clone()))
    return found


def _as_before(copied: _Buffer) -> bool:
    """Whether a buffer has the value that was copied."""
    module, name, _, value = copied
    now = module._buffers.get(name)
    if now is None or value is None:
        return now is value
    return now.shape == value.shape and torch.equal(now, value)


def _mark(module: nn.Module, name: str) -> tuple[int, int] | None:
    """Identity and number of writes of a buffer; None if there is none."""
    buffer = module._buffers.get(name)
    return None if buffer is None else (id(buffer), version(buffer))


def random_state(devices: set[torch.device]) -> dict[str, Any]:
    """Random state, on these devices only: a query creates a context on a device."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if devices:
        state["cuda"] = {device: torch.cuda.get_rng_state(device) for device in devices}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    for device, found in state.get("cuda", {}).items():
        torch.cuda.set_rng_state(found, device)
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
