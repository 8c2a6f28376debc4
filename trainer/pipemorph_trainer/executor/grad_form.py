"""The gradient of a parameter: its form, as autograd makes it, and when it is written.

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

Told = Callable[[Tensor], None]

_told: Told | None = None


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype in which a parameter's gradient adds up. Its own, where any is allowed (None)."""
    found = parameter.grad_dtype
    return parameter.dtype if found is None else found


def told(parameter: Tensor) -> str:
    """A gradient's dtype for messages, after that of its parameter; empty if it is the same."""
    dtype = grad_dtype(parameter)
    if not parameter.requires_grad or dtype == parameter.dtype:
        return ""
    return f", gradients in {str(dtype).removeprefix('torch.')}"


def zero_grad(parameter: Tensor) -> Tensor:
    """A gradient of zeros, distributed as the parameter is."""
    return torch.zeros_like(parameter, dtype=grad_dtype(parameter))


def as_grad(parameter: Tensor, grad: Tensor) -> Tensor:
    """``grad`` in the form of a gradient of the parameter; a copy only if it has another one."""
    dtype = grad_dtype(parameter)
    if grad.stride() == parameter.stride():
        return grad.to(dtype)
    return torch.empty_like(parameter, dtype=dtype).copy_(grad)


def written(parameter: Tensor) -> None:
    """Say that ``parameter.grad`` was written, outside autograd."""
    if _told is not None:
        _told(parameter)


class Watch:
    """Calls ``told(parameter)`` after each write to the ``.grad`` of ``parameters``, while it is
    open. One at a time in a process.

    It hooks autograd's nodes and not the parameters: a split backward leaves parameters with hooks
    to autograd. ``told`` may be called in autograd's thread of a device.
    """

    def __init__(self, parameters: Sequence[Tensor], told: Told) -> None:
        self._parameters, self._tell = parameters, told
        self._known: frozenset[int] = frozenset(map(id, parameters))
        self._handles: list[Any] = []
        self._nodes: list[Any] = []

    def open(self) -> None:
        """Begin to watch."""
        global _told  # noqa: PLW0603  the writers have no way to it
        for parameter in self._parameters:
            if parameter.requires_grad:
                # A node lives as long as somebody holds it.
                node = get_gradient_edge(parameter).node
                self._nodes.append(node)
                self._handles.append(node.register_hook(partial(self._of_autograd, parameter)))
        _told = self._of_ours

    def close(self) -> None:
        """End. Idempotent."""
        global _told  # noqa: PLW0603
        _told = None
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def _of_autograd(self, parameter: Tensor, *_: Any) -> None:
        self._tell(parameter)

    def _of_ours(self, parameter: Tensor) -> None:
        if id(parameter) in self._known:
            self._tell(parameter)
