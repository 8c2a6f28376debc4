"""torch's own pipeline stage as a stage of the executor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.stages.interface import Grads, Split
from pipemorph_trainer.executor.stages.structure import SINGLE, Structure
from pipemorph_trainer.executor.torch_private import version
from pipemorph_trainer.torch.private import StageOps, local


class TorchStageRunner:
    """Runs the ops of one :class:`torch.distributed.pipelining.PipelineStage`.

    The first iteration is fused: B is the whole backward and W is empty. It shows which parameters
    get a gradient. In the first split iteration the same have to get one, or :meth:`end_iteration`
    raises :class:`SplitError`; a lost gradient would otherwise only show as a worse model.

    Args:
        ops, module: of the stage.
        splits: whether the stage can run B and W apart.
        loss_of: makes the loss of the last stage's output, ``(output, microbatch)``; None on other
            stages.
        loss_kept: that loss, with its graph; None if the schedule has no ``loss_fn``.
    """

    def __init__(
        self,
        ops: StageOps,
        module: nn.Module,
        *,
        splits: bool,
        loss_of: Callable[[Any, int], None] | None,
        loss_kept: Callable[[int], Tensor | None],
    ) -> None:
        self._ops, self._module = ops, module
        self._splits, self._loss_of, self._loss_kept = splits, loss_of, loss_kept
        self._first = True
        self._fused: frozenset[str] | None = None
        """Parameters to which the first iteration gave a gradient."""
        self._checked = False
        self._before: dict[str, tuple[Tensor, int] | None] = {}
        self._parted = False
        """Whether this iteration has run a backward in two parts."""
        self.keeps_output = False
        """Whether torch's stage keeps the last stage's outputs for the caller of ``step``."""
        self.evaluating = False
        """Whether the next iteration is an evaluation. FSDP2 then gathers in each forward."""

    structure = SINGLE
    """torch's stages exchange a flat sequence of tensors."""

    @property
    def split(self) -> Split:
        return "module" if self._splits and not self._first else "fused"

    def expect(self, structure: Structure, gradients: Sequence[bool]) -> None:
        """torch's stages have told each other already."""

    def begin_iteration(
        self,
        *,
        fused: Set[int],
        outputs: list[Any] | None = None,
        divisor: float | None = None,
    ) -> None:
        """``outputs`` and ``divisor`` are torch's schedule's to keep and to apply."""
        self._parted = False
        if self.evaluating:
            return
        if not self._checked:
            self._before = self._marks()
        self._ops.gather()

    def end_iteration(self, scale: int | None) -> None:
        """Reduce the gradients and divide them by ``scale``; None: a later iteration does."""
        if not self._checked:
            # Before the reduction, after which FSDP2's parameters are others.
            self._check()
        if scale is not None:
            self._ops.reduce(scale)
        self._first = False

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
        output = self._ops.forward(microbatch, args, kwargs, keep_output=self.keeps_output)
        if self._loss_of is None:
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            return tuple(
                local(each.detach()).requires_grad_(each.requires_grad) for each in outputs
            )
        self._loss_of(output, microbatch)
        loss = self._loss_kept(microbatch)
        if loss is None:
            return (torch.full((), math.nan),)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise SplitError(f"loss_fn returned {what}; expected a scalar loss")
        return (local(loss.detach()),)

    def backward_input(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        if self.split != "fused" and not self._parted:
            self._parted = True
            if not self._checked:
                # Whole backwards that ran before in this iteration give every gradient.
                self._before = self._marks()
        return self._backward(microbatch, output_grads, whole=self.split == "fused")

    def backward_weight(self, microbatch: int) -> None:
        if self.split != "fused":
            self._ops.weight(microbatch)

    def backward(
        self, microbatch: int, output_grads: Sequence[Tensor | None] | None = None
    ) -> Grads:
        return self._backward(microbatch, output_grads, whole=True)

    def _backward(
        self, microbatch: int, grads: Sequence[Tensor | None] | None, *, whole: bool
    ) -> Grads:
        return self._ops.backward(microbatch, grads, self._loss_kept(microbatch), whole=whole)

    def evaluate(
        self,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        target: Any = None,
    ) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return self.forward(microbatch, args, kwargs, target)

    def discard(self) -> None:
        self._ops.clear()

    def offload(self, microbatch: int) -> int:
        raise SplitError("the activations of torch's stage cannot be moved to host memory")

    def reclaim(self) -> None:
        """Nothing is ever moved."""

    def fetch(self, microbatch: int) -> int:
        raise SplitError("the activations of torch's stage cannot be moved to host memory")

    def recompute(self, microbatch: int) -> None:
        raise SplitError("the activations of torch's stage cannot be computed again")

    def _marks(self) -> dict[str, tuple[Tensor, int] | None]:
        """Each gradient and the number of writes to it; None for a parameter without one. It is
        kept, since a new one could otherwise be where it was, and be taken for it."""
        return {
            name: None if p.grad is None else (p.grad, version(p.grad))
            for name, p in self._module.named_parameters()
        }

    def _check(self) -> None:
        before, self._before = self._before, {}
        got = frozenset(n for n, mark in self._marks().items() if _is_new(mark, before.get(n)))
        if self._fused is None:
            self._fused = got
        elif self._parted:
            self._checked = True
            if lost := sorted(self._fused - got):
                more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
                raise SplitError(
                    f"the split backward gives no gradient to {lost[0]!r}{more}, which a whole"
                    " backward gives one; leave out the stage's dw_builder, or give split='fused'"
                )


def _is_new(mark: tuple[Tensor, int] | None, before: tuple[Tensor, int] | None) -> bool:
    """Whether there is a gradient that was not there before, or that has been written to."""
    if mark is None or before is None:
        return mark is not None
    return mark[0] is not before[0] or mark[1] != before[1]
