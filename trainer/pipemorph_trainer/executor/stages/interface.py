"""The interface of a stage, which the executor uses to run ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.stages.structure import SINGLE, Structure

Split = Literal["deferred", "fused", "emulated"]
Grads = tuple[Tensor | None, ...]
STAY = "the activations of this stage can be neither moved to host memory nor computed again"


class Runner(ABC):
    """Runs the ops of one stage. Ops of one kind come in microbatch order. What follows is for a
    stage that needs no preparation, and whose activations stay where they are.

    Implemented by :class:`pipemorph_trainer.executor.split.StageRunner` for a module, by
    :class:`pipemorph_trainer.executor.stages.emulated.EmulatedRunner` for an emulated stage, and by
    :class:`pipemorph_trainer.torch.stage.TorchStageRunner` for one of torch's.
    """

    @property
    @abstractmethod
    def split(self) -> Split:
        """How B and W are split; ``fused``: B is the whole backward, W is empty."""

    @property
    def structure(self) -> Structure:
        """The structure of the outputs of the newest F or evaluation."""
        return SINGLE

    def expect(self, structure: Structure, gradients: Sequence[bool]) -> None:  # noqa: B027
        """Say, on a stage with a stage above, how the module gets the tensors that are the
        arguments of F, and which of them need a gradient."""

    def begin_iteration(  # noqa: B027
        self,
        *,
        fused: Set[int],
        outputs: list[Any] | None = None,
        divisor: float | None = None,
    ) -> None:
        """Begin an iteration. ``fused``: the microbatches whose backward on this stage is BW.
        ``outputs``: the last stage appends what it returns for each microbatch, detached; None: it
        is not kept. ``divisor``: of each loss before its backward; None: the number of
        microbatches."""

    @abstractmethod
    def forward(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
        *,
        offload: bool = False,
        recompute: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run F. Returns the outputs to send, detached, with ``requires_grad`` where a gradient has
        to come back; on the last stage ``(loss,)`` of this microbatch.

        ``offload``: :meth:`offload` of this microbatch follows. ``recompute``: only what this F
        began with is kept, and :meth:`recompute` precedes its backward."""

    @abstractmethod
    def evaluate(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
    ) -> tuple[Tensor, ...]:
        """Run a forward without gradients, of which nothing is kept. Returns what :meth:`forward`
        returns."""

    @abstractmethod
    def discard(self) -> None:
        """Drop every microbatch in flight. Gradients stay as they are."""

    def offload(self, microbatch: int) -> int:
        """Move the activations of the newest F to host memory. Returns the bytes moved."""
        raise SplitError(STAY)

    def reclaim(self) -> None:  # noqa: B027
        """Make the device wait for copies to the host, before an op that needs memory."""

    def fetch(self, microbatch: int) -> int:
        """Bring activations back, before the microbatch's backward. Returns the bytes moved."""
        raise SplitError(STAY)

    def recompute(self, microbatch: int) -> None:
        """Run the forward of a microbatch again, whose F was run with ``recompute``."""
        raise SplitError(STAY)

    @abstractmethod
    def backward_input(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        """Run B. Returns one gradient per argument of F. ``output_grads``: None on the last
        stage."""

    @abstractmethod
    def backward_weight(self, microbatch: int) -> None:
        """Run W: add to ``.grad``, and drop the microbatch."""

    @abstractmethod
    def backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        """Run B and W as one op (BW)."""


@dataclass(frozen=True)
class GivenStage:
    """A stage of another trainer, which also splits batches, and owns parameters and replicas.

    ``index``, ``stages``: its place in the pipeline. ``step`` is called with ``arg_mbs``,
    ``kwarg_mbs`` and ``target_mbs``.
    """

    runner: Runner
    device: torch.device
    index: int
    stages: int
