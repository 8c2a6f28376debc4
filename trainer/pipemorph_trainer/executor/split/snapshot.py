"""Restores a stage, its gradients and the random state after the self-test."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """State that a forward and backward of a stage may change.

    It covers gradients, buffers (values and identity), plain attributes of every submodule (such as
    a step counter or a saved input), and the random state of torch, Python and, if loaded, NumPy.
    It does not cover state elsewhere, such as in globals.
    """

    def __init__(self, stage: nn.Module) -> None:
        self._attributes = [(module, dict(module.__dict__)) for module in stage.modules()]
        self._buffers = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in stage.modules()
            for name, buffer in module._buffers.items()
        ]
        self._grads = [(parameter, parameter.grad) for parameter in stage.parameters()]
        tensors = [*stage.parameters(), *stage.buffers()]
        self._random = _random_state({t.device for t in tensors if t.is_cuda})

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
        _set_random_state(self._random)

    def restore(self) -> None:
        """Restore everything, including gradients."""
        self.rewind()
        for parameter, grad in self._grads:
            parameter.grad = grad


def _random_state(devices: set[torch.device]) -> dict[str, Any]:
    """Random state, on these devices only: a query creates a context on a device."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if devices:
        state["cuda"] = {device: torch.cuda.get_rng_state(device) for device in devices}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
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
