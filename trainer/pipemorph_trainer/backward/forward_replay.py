"""Recomputation: runs the forward of a microbatch a second time, instead of storing activations."""

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

from pipemorph_trainer.autograd_internals import read_version
from pipemorph_trainer.backward.microbatch_state import MicrobatchState, StageCall, WholeBackward
from pipemorph_trainer.errors import SplitError

_Buffer = tuple[nn.Module, str, Tensor | None, Tensor | None]
"""Buffer: its module, its name, the tensor and a copy of it."""


@dataclass
class ForwardStart:
    """State with which a forward began, in addition to its arguments: random state, and buffers
    that it changed."""

    random: dict[str, Any]
    buffers: list[_Buffer]


@dataclass(frozen=True)
class RecomputeRecord:
    """Record of a microbatch to run its forward again: the arguments of its F, the state with which
    it began, and digests of the tensors that it sent."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    target: Any
    forward_start: ForwardStart
    sent: Sequence[Tensor]

    def rerun_forward(
        self, splitter: WholeBackward, call: StageCall, microbatch: int, rerun: ForwardReplay
    ) -> MicrobatchState:
        """Run the forward again. Raises :class:`SplitError` if its results differ."""
        outputs, call.outputs = call.outputs, None
        try:
            with rerun.restore_first_run(self.forward_start):
                flight = splitter.run_forward(call, microbatch, self.args, self.kwargs, self.target)
        finally:
            call.outputs = outputs
        for index, (before, now) in enumerate(zip(self.sent, flight.sent, strict=True)):
            if not torch.equal(before, digest_tensor(now)):
                what = "loss" if call.is_last else f"output {index}"
                raise SplitError(
                    f"the forward of microbatch {microbatch} ran again and gave another {what} than"
                    " the one that was sent: the stage depends on more than its inputs, parameters,"
                    " buffers and the random state of torch, Python and NumPy. Give"
                    " schedule.recompute: never (recompute of Pipeline)"
                )
        flight.sent = ()
        return flight


def digest_tensor(tensor: Tensor) -> Tensor:
    """Return a 64-bit digest of a tensor's bytes: the sum of its 8-byte words, each multiplied by
    an odd number of its position, modulo 2⁶⁴. Sums of integers do not depend on their order."""
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 8:
        data = torch.cat([data, data.new_zeros(-data.numel() % 8)])
    words = data.view(torch.int64)
    places = torch.arange(len(words), dtype=torch.int64, device=words.device)
    return (words * (2 * places + 1) * -0x61C8864680B583EB).sum()


class ForwardReplay:
    """Replay of a stage's forward: its second run equals the first one.

    The second run begins with the random state and the buffer values of the first run. It restores
    both at the end, so that a running statistic counts each microbatch once.
    """

    def __init__(self, stage: nn.Module) -> None:
        tensors = [*stage.parameters(), *stage.buffers()]
        self._devices = {t.device for t in tensors if t.is_cuda}
        self._buffers = [(module, name) for module in stage.modules() for name in module._buffers]
        self._changing: list[tuple[nn.Module, str]] | None = None
        """Buffers that forwards have changed so far, and those of norms, whose writes are not
        counted; None before the first forward."""

    @contextmanager
    def record_first_run(self) -> Iterator[ForwardStart]:
        """Context for the first run. Yields the state for :meth:`restore_first_run`."""
        before = [_buffer_version(module, name) for module, name in self._buffers]
        known = self._buffers if self._changing is None else self._changing
        begun = ForwardStart(read_random_state(self._devices), _copy_buffers(known))
        yield begun
        changed = [
            place
            for place, mark in zip(self._buffers, before, strict=True)
            if _buffer_version(*place) != mark
            or isinstance(place[0], _NormBase)
            or (self._changing and place in self._changing)
        ]
        if self._changing is None:
            # Compared by value only once, since that waits for the device.
            written = [each[:2] for each in begun.buffers if not _is_unchanged(each)]
            changed += [place for place in written if place not in changed]
        self._changing = changed
        begun.buffers = [each for each in begun.buffers if each[:2] in changed]

    @contextmanager
    def restore_first_run(self, begun: ForwardStart) -> Iterator[None]:
        """Context for the second run."""
        state, buffers = read_random_state(self._devices), _copy_buffers(self._changing or ())
        set_random_state(begun.random)
        # Buffers are replaced, since the graph may hold the tensors that a forward has written to.
        values = {each[:2]: each[3] for each in (*buffers, *begun.buffers)}
        for (module, name), value in values.items():
            module._buffers[name] = value
        try:
            yield
        finally:
            set_random_state(state)
            for module, name, buffer, _ in buffers:
                module._buffers[name] = buffer


def _copy_buffers(places: Iterable[tuple[nn.Module, str]]) -> list[_Buffer]:
    found = []
    for module, name in places:
        buffer = module._buffers.get(name)
        found.append((module, name, buffer, None if buffer is None else buffer.detach().clone()))
    return found


def _is_unchanged(copied: _Buffer) -> bool:
    """True if a buffer has the value that was copied."""
    module, name, _, value = copied
    now = module._buffers.get(name)
    if now is None or value is None:
        return now is value
    return now.shape == value.shape and torch.equal(now, value)


def _buffer_version(module: nn.Module, name: str) -> tuple[int, int] | None:
    """Return the identity and number of writes of a buffer; None if it is absent."""
    buffer = module._buffers.get(name)
    return None if buffer is None else (id(buffer), read_version(buffer))


def read_random_state(devices: set[torch.device]) -> dict[str, Any]:
    """Return the random state, on these devices only: a query creates a context on a device."""
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
