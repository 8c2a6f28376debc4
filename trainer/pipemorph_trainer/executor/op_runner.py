"""Interface of a stage, which the executor uses to run ops."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pipemorph_trainer.backward.output_structure import SINGLE_TENSOR, OutputStructure
from pipemorph_trainer.errors import SplitError

Split = Literal["deferred", "fused", "emulated"]
Grads = tuple[Tensor | None, ...]
ACTIVATIONS_FIXED = (
    "the activations of this stage can be neither moved to host memory nor computed again"
)


class OpRunner(ABC):
    """Runner of one stage's ops. Ops of one kind run in microbatch order. Methods that are not
    abstract suit a stage that needs no preparation, and whose activations stay in place.

    Implemented by :class:`~.module_runner.ModuleRunner` for a module, by
    :class:`pipemorph_trainer.executor.emulated_stage.EmulatedRunner` for an emulated stage, and by
    :class:`pipemorph_trainer.torch.stage_runner.TorchStageRunner` for one of torch's.
    """

    @property
    @abstractmethod
    def split(self) -> Split:
        """Way in which B and W are split; ``fused``: B is the whole backward, W is empty."""

    @property
    def structure(self) -> OutputStructure:
        """Structure of the outputs of the newest F or evaluation."""
        return SINGLE_TENSOR

    def expect_inputs(self, structure: OutputStructure, gradients: Sequence[bool]) -> None:  # noqa: B027
        """Set the structure in which the module gets the tensors that are the arguments of F, and
        which of them need a gradient. Called on a stage with a stage above."""

    def begin_iteration(  # noqa: B027
        self,
        *,
        fused: Set[int],
        outputs: list[Any] | None = None,
        divisor: float | None = None,
        microbatches: int | None = None,
    ) -> None:
        """Begin an iteration. ``fused``: the microbatches whose backward on this stage is BW.
        ``outputs``: the last stage appends its output for each microbatch, detached; None: outputs
        are dropped. ``divisor``: divides each loss before its backward; None: N. ``microbatches``:
        number of this iteration; None: N, that of a replica if all have as many."""

    @abstractmethod
    def run_forward(
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

        ``offload``: :meth:`offload_activations` of this microbatch follows. ``recompute``: only the
        inputs of this F remain, and :meth:`recompute_forward` precedes its backward."""

    @abstractmethod
    def evaluate_microbatch(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
    ) -> tuple[Tensor, ...]:
        """Run a forward without gradients or a saved graph. Returns the same as
        :meth:`run_forward`."""

    @abstractmethod
    def discard_microbatches(self) -> None:
        """Drop every microbatch in flight. Gradients stay as they are."""

    def offload_activations(self, microbatch: int) -> int:
        """Move the activations of the newest F to host memory. Returns the bytes moved."""
        raise SplitError(ACTIVATIONS_FIXED)

    def reclaim_memory(self) -> None:  # noqa: B027
        """Make the device wait for copies to the host, before an op that needs memory."""

    def fetch_activations(self, microbatch: int) -> int:
        """Copy activations back, before the microbatch's backward. Returns the bytes moved."""
        raise SplitError(ACTIVATIONS_FIXED)

    def recompute_forward(self, microbatch: int) -> None:
        """Run the forward of a microbatch again, whose F was run with ``recompute``."""
        raise SplitError(ACTIVATIONS_FIXED)

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
    def run_fused_backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        """Run B and W as one op (BW)."""


@dataclass(frozen=True)
class ExternalStage:
    """Stage of another trainer, which also splits batches, and owns parameters and replicas.

    ``index``, ``stages``: its place in the pipeline. ``step`` is called with ``arg_mbs``,
    ``kwarg_mbs`` and ``target_mbs``.
    """

    runner: OpRunner
    device: torch.device
    index: int
    stages: int
