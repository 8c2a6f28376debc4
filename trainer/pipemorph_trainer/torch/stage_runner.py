"""Stage of the executor that is torch's own pipeline stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from pipemorph_trainer.backward.microbatch_state import detach_for_send
from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.op_runner import Grads, OpRunner, Split
from pipemorph_trainer.torch.pipelining_internals import TorchStageOps, to_local_tensor


class TorchStageRunner(OpRunner):
    """Runner of one :class:`torch.distributed.pipelining.PipelineStage`.

    Args:
        ops: those of the stage.
        splits: the stage can run B and W apart.
        walk: gets the outputs of the first F, or the loss, with their graph.
        loss_of: computes the loss of the last stage's output, ``(output, microbatch, target)``;
            None on other stages.
        loss_kept: returns that loss, with its graph; None if the schedule has no ``loss_fn``.
    """

    def __init__(
        self,
        ops: TorchStageOps,
        *,
        splits: bool,
        walk: Callable[[Sequence[Tensor]], None] | None,
        loss_of: Callable[[Any, int, Any], None] | None,
        loss_kept: Callable[[int], Tensor | None],
    ) -> None:
        self._ops = ops
        self._splits, self._loss_of, self._loss_kept = splits, loss_of, loss_kept
        self._walk = walk
        self.keeps_output = False
        """True if torch's stage keeps the last stage's outputs for the caller of ``step``."""
        self.evaluating = False
        """True if the next iteration is an evaluation. FSDP2 then gathers in each forward."""

    @property
    def split(self) -> Split:
        return "deferred" if self._splits else "fused"

    def begin_iteration(
        self,
        *,
        fused: Set[int],
        outputs: list[Any] | None = None,
        divisor: float | None = None,
        microbatches: int | None = None,
    ) -> None:
        """Begin an iteration. torch's schedule applies ``outputs`` and ``divisor`` itself."""
        if not self.evaluating:
            self._ops.gather_parameters()

    def end_iteration(self, scale: int | None) -> None:
        """Reduce the gradients and divide them by ``scale``; None: a later iteration does."""
        if scale is not None:
            self._ops.reduce_gradients(scale)

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
        output = self._ops.run_forward(microbatch, args, kwargs, keep_output=self.keeps_output)
        if self._loss_of is None:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            self._walk_first_outputs(outputs)
            return tuple(
                to_local_tensor(detach_for_send(each)).requires_grad_(each.requires_grad)
                for each in outputs
            )
        self._loss_of(output, microbatch, target)
        loss = self._loss_kept(microbatch)
        if loss is None:
            return (torch.full((), math.nan),)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise SplitError(f"loss_fn returned {what}; expected a scalar loss")
        self._walk_first_outputs((loss,))
        return (to_local_tensor(loss.detach()),)

    def _walk_first_outputs(self, outputs: Sequence[Any]) -> None:
        roots = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
        if roots and self._walk is not None:
            self._walk(roots)
            self._walk = None

    def backward_input(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        return self._run_backward(microbatch, output_grads, whole=not self._splits)

    def backward_weight(self, microbatch: int) -> None:
        if self._splits:
            self._ops.run_backward_weight(microbatch)

    def run_fused_backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        return self._run_backward(microbatch, output_grads, whole=True)

    def _run_backward(
        self, microbatch: int, grads: Sequence[Tensor | None] | None, *, whole: bool
    ) -> Grads:
        return self._ops.run_backward(microbatch, grads, self._loss_kept(microbatch), whole=whole)

    def evaluate_microbatch(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
    ) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.run_forward(microbatch, args, kwargs, target)

    def discard_microbatches(self) -> None:
        self._ops.discard_microbatches()
