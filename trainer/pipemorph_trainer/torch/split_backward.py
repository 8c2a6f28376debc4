"""Split backward for torch's own pipeline schedules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from pipemorph_trainer.autograd_internals import find_missing_features
from pipemorph_trainer.backward import SplitReport, function_patches
from pipemorph_trainer.backward.microbatch_state import DeferringBackward
from pipemorph_trainer.backward.split_report import build_split_report
from pipemorph_trainer.errors import SplitError


class SplitBackward:
    """Separates W of one stage from B, as the ``dw_builder`` of torch's stage.

    torch's stage runs a whole backward, then calls the builder for the W of that backward. Right
    before each backward to split, the stage tests ``if self.dw_builder:``, which marks it. Any
    other backward of the module (torch's inference of shapes, a script's own ``loss.backward()``, a
    chunked loss in F) computes all gradients at once. So would every backward under a torch whose
    stage makes no such test: slower, but never wrong.

    Since torch runs the forwards, torch's functions are replaced until :meth:`close`, or until this
    object is deleted. ``verify``: compare each gradient that waits with that of the original op.
    """

    def __init__(self, module: nn.Module, *, verify: bool = False) -> None:
        if why := find_missing_features():
            raise SplitError(f"this version of torch is not supported: {why}")
        self._module, self._verify = module, verify
        self._deferring = DeferringBackward(module, verify=verify)
        # Parameters register at their first use: torch moves none that has a weak reference, and a
        # trainer may still allocate the module (`to_empty`).
        self._deferring.collector.activate_permanently()
        function_patches.patch_functions()
        self._close = weakref.finalize(self, _close_split, self._deferring)

    def exclude_shared_parameters(self, roots: Sequence[Tensor]) -> None:
        """Find the parameters that are also used in another way, in the graph of a first F.
        Otherwise the first B finds them, which sums them in another order."""
        self._deferring.exclude_shared_parameters(roots)

    def close(self) -> None:
        """Restore torch's functions. Idempotent."""
        self._close()

    def build_report(self) -> SplitReport:
        """Return the report of what was deferred so far, and why the rest was not."""
        return build_split_report(
            self._module, "verify" if self._verify else "auto", self._deferring
        )

    @property
    def deferred(self) -> frozenset[str]:
        """Names of the parameters whose gradients W has computed so far."""
        return frozenset(self._deferring.deferred)

    def __bool__(self) -> bool:
        self._deferring.collector.begin_backward()
        return True

    def __call__(self) -> Callable[[], None]:
        return partial(self._deferring.run_weight_work, self._deferring.collector.take_work())


def _close_split(deferring: DeferringBackward) -> None:
    deferring.collector.close()
    function_patches.restore_functions()


def split_backward(module: nn.Module) -> SplitBackward:
    """Return the ``dw_builder`` of ``module``'s
    :class:`torch.distributed.pipelining.PipelineStage`.

    Use: ``PipelineStage(module, …, dw_builder=split_backward(module))``, with any schedule of torch
    that has I and W actions. I then computes all but the weight gradients that can wait, which W
    computes: once, also under activation checkpointing (full or selective), and bitwise equal to a
    full backward. Call it after ``fully_shard`` and checkpoint wrappers, before the first step.

    Raises :class:`SplitError` if this torch lacks something it needs.
    """
    return SplitBackward(module)
