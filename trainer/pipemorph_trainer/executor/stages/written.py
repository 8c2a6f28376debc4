"""Tells when a gradient is written, whether by autograd or by a W that adds it up itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge

Told = Callable[[Tensor], None]

_told: Told | None = None


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
