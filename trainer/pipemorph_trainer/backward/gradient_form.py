"""Gradients of parameters: their form, as autograd makes it, and a watch of writes to them.

The form is its dtype and its memory layout. The dtype is the parameter's own, unless its
``grad_dtype`` says otherwise: float32 for a bfloat16 parameter whose gradients add up in float32,
or the dtype in which FSDP2 reduces. torch refuses to assign a gradient of another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

GradientWriteCallback = Callable[[Tensor], None]

_on_gradient_write: GradientWriteCallback | None = None


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """Return the dtype in which a parameter's gradient adds up: its own unless one is set."""
    found = parameter.grad_dtype
    return parameter.dtype if found is None else found


def describe_grad_dtype(parameter: Tensor) -> str:
    """Describe a gradient's dtype for messages; empty if it is that of its parameter."""
    dtype = grad_dtype(parameter)
    if not parameter.requires_grad or dtype == parameter.dtype:
        return ""
    return f", gradients in {str(dtype).removeprefix('torch.')}"


def make_zero_grad(parameter: Tensor) -> Tensor:
    """Return a gradient of zeros, distributed as the parameter is."""
    return torch.zeros_like(parameter, dtype=grad_dtype(parameter))


def to_grad_form(parameter: Tensor, grad: Tensor) -> Tensor:
    """Return ``grad`` in the form of the parameter's gradient; a copy only if its form differs."""
    dtype = grad_dtype(parameter)
    if grad.stride() == parameter.stride():
        return grad.to(dtype)
    return torch.empty_like(parameter, dtype=dtype).copy_(grad)


def notify_gradient_written(parameter: Tensor) -> None:
    """Notify the open :class:`GradientWriteWatch` of a write outside autograd to ``.grad``."""
    if _on_gradient_write is not None:
        _on_gradient_write(parameter)


class GradientWriteWatch:
    """Calls ``callback(parameter)`` after each write to the ``.grad`` of ``parameters``, while it
    is open. A process has at most one open.

    It hooks autograd's nodes, not the parameters: a split backward defers no gradient of a
    parameter with hooks. ``callback`` may run in autograd's thread of a device.
    """

    def __init__(self, parameters: Sequence[Tensor], callback: GradientWriteCallback) -> None:
        self._parameters, self._callback = parameters, callback
        self._known: frozenset[int] = frozenset(map(id, parameters))
        self._handles: list[Any] = []
        self._nodes: list[Any] = []

    def open(self) -> None:
        """Start watching."""
        global _on_gradient_write  # noqa: PLW0603  the writers have no way to it
        for parameter in self._parameters:
            if parameter.requires_grad:
                # A node lives as long as something refers to it.
                node = get_gradient_edge(parameter).node
                self._nodes.append(node)
                self._handles.append(
                    node.register_hook(partial(self._on_autograd_write, parameter))
                )
        _on_gradient_write = self._on_own_write

    def close(self) -> None:
        """Stop watching. Idempotent."""
        global _on_gradient_write  # noqa: PLW0603
        _on_gradient_write = None
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def _on_autograd_write(self, parameter: Tensor, *_: Any) -> None:
        self._callback(parameter)

    def _on_own_write(self, parameter: Tensor) -> None:
        if id(parameter) in self._known:
            self._callback(parameter)
