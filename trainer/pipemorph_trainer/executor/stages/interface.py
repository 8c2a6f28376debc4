"""The interface of a stage: what the executor asks of whatever runs the ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from torch import Tensor

Split = Literal["module", "graph", "fused", "emulated"]
Grads = tuple[Tensor | None, ...]


class Runner(Protocol):
    """Runs the ops of one stage; ops of one kind come in microbatch order.

    :class:`pipemorph_trainer.executor.split.StageRunner` does so for a module and
    :class:`pipemorph_trainer.executor.stages.emulated.EmulatedRunner` for an emulated stage.
    """

    @property
    def split(self) -> Split:
        """How B and W are kept apart; ``fused``: B is the whole backward, W empty."""

    def begin_iteration(self, *, only_fused: bool) -> None:
        """``only_fused``: the backwards of this iteration are all BW on this stage."""

    def forward(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
        *,
        offload: bool = False,
    ) -> tuple[Tensor, ...]:
        """Outputs to send, detached; on the last stage ``(loss,)``, of this microbatch alone.

        ``offload``: :meth:`offload` of this microbatch follows."""

    def discard(self) -> None:
        """Drop every microbatch in flight. Gradients stay as they are."""

    def offload(self, microbatch: int) -> int:
        """Move the activations of the newest F to host memory; returns the bytes moved."""

    def reclaim(self) -> None:
        """Before an op that needs memory: the device waits for what is still leaving."""

    def fetch(self, microbatch: int) -> int:
        """Bring them back, before the microbatch's backward; returns the bytes moved."""

    def backward_input(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        """One gradient per argument of F. ``output_grads`` is None on the last stage."""

    def backward_weight(self, microbatch: int) -> None:
        """Adds to ``.grad`` and forgets the microbatch."""

    def backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        """B and W at once."""
