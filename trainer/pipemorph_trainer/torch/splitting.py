"""The split backward for torch's own pipeline schedules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from torch import nn

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split.linears import find_layers
from pipemorph_trainer.executor.split.module_split import ModuleSplit
from pipemorph_trainer.executor.torch_private import missing

log = logging.getLogger(__name__)


class SplitBackward:
    """Separates W of one stage's Linears from B, as the ``dw_builder`` of torch's stage.

    torch's stage runs a whole backward, then calls the builder for the W of that backward. The
    backwards that are to be split are found by the stage's own test ``if self.dw_builder:`` right
    before each of them. Any other backward of the module (torch's inference of shapes, a script's
    own ``loss.backward()``, a chunked loss in F) computes all gradients at once, and so would every
    backward under a torch whose stage makes no such test: it could be slower, but never wrong.
    """

    def __init__(self, module: nn.Module) -> None:
        if why := missing():
            raise SplitError(f"this version of torch is not supported: {why}")
        layers, self.not_deferred = find_layers(module, wrapped=True)
        self._split = ModuleSplit(layers)
        self._split.patch_for_good()

    not_deferred: Mapping[str, str]
    """Parameters whose gradients B computes, by name, each with the reason."""

    @property
    def deferred(self) -> frozenset[str]:
        """Names of the parameters whose gradients W has computed so far."""
        return frozenset(self._split.deferred)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the Linears whose gradients W computes."""
        return tuple(layer.name for layer in self._split.layers)

    def __bool__(self) -> bool:
        self._split.begin_deferring()
        return True

    def __call__(self) -> Callable[[], None]:
        return partial(self._split.run_weight_work, self._split.end_deferring())


def split_backward(module: nn.Module) -> SplitBackward:
    """The ``dw_builder`` of a :class:`torch.distributed.pipelining.PipelineStage` of ``module``.

    Use: ``PipelineStage(module, …, dw_builder=split_backward(module))``, with any schedule of torch
    that has I and W actions. I then computes all but the weight gradients of ``nn.Linear``, which W
    computes: once, also under activation checkpointing (full or selective), and bitwise equal to a
    full backward. Call it after ``fully_shard`` and checkpoint wrappers, before the first step.

    Gradients of other parameters are computed in I. If no Linear can be deferred, one warning tells
    why, and W is empty. Raises :class:`SplitError` if this torch lacks something it needs.
    """
    split = SplitBackward(module)
    if not split.layers:
        reasons = sorted(set(split.not_deferred.values()))
        why = f": {reasons[0]}" if reasons else ""
        log.warning("split_backward: the stage has no nn.Linear to defer%s; W is empty", why)
    return split
