"""Restores a stage, its gradients and the random state after the self-test."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pipemorph_trainer.executor.torch_private import version


class Snapshot:
    """State that a forward and backward of a stage may change.

    It covers gradients, buffers (values and identity), plain attributes of every submodule (such as
    a step counter or a saved input), and the random state of torch, Python and, if loaded, NumPy.
    It does not cover state elsewhere, such as in globals.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._attributes = [(module, dict(module.__dict__)) for module in stage.modules()]
        self._buffers = _copies(
            (module, name) for module in stage.modules() for name in module._buffers
        )
        self._grads = [(parameter, parameter.grad) for parameter in stage.parameters()]
        tensors = [*stage.parameters(), *stage.buffers()]
        self._random = random_state({t.device for t in tensors if t.is_cuda})

    def rewind(self) -> None:
        """Restore everything, but without gradients."""
        for module, attributes in self._attributes:
            for name in [name for name in module.__dict__ if name not in attributes]:
                del module.__dict__[name]
            module.__dict__.update(attributes)
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                if buffer is not None and value is not None:
                    buffer.copy_(value)
                module._buffers[name] = buffer
        for parameter, _ in self._grads:
            parameter.grad = None
        set_random_state(self._random)

    def restore(self) -> None:
        """Restore everything, including gradients."""
        self.rewind()
        for parameter, grad in self._grads:
            parameter.grad = grad


_Buffer = tuple[nn.Module, str, Tensor | None, Tensor | None]
"""A buffer: its module, its name, the tensor and a copy of it."""


@dataclass
class Begun:
    """What a forward began with, beside its arguments: random state, and buffers that it
    changed."""

    random: dict[str, Any]
    buffers: list[_Buffer]


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


def copy_tensors(value: Any) -> Any:
    """A copy of nested tuples, lists and dicts, with every tensor cloned."""
    return map_tensors(value, lambda tensor: tensor.detach().clone())


def map_tensors(value: Any, function: Any) -> Any:
    """Apply ``function`` to every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(item, function) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    return value
