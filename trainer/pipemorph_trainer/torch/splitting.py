"""The split backward for torch's own pipeline schedules."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split import SplitReport, calls
from pipemorph_trainer.executor.split.flight import Deferring
from pipemorph_trainer.executor.split.report import report_of
from pipemorph_trainer.executor.torch_private import missing


class SplitBackward:
    """Separates W of one stage from B, as the ``dw_builder`` of torch's stage.

    torch's stage runs a whole backward, then calls the builder for the W of that backward. The
    backwards that are to be split are found by the stage's own test ``if self.dw_builder:`` right
    before each of them. Any other backward of the module (torch's inference of shapes, a script's
    own ``loss.backward()``, a chunked loss in F) computes all gradients at once, and so would every
    backward under a torch whose stage makes no such test: it could be slower, but never wrong.

    Since torch runs the forwards, torch's functions are replaced until :meth:`close`, or until this
    is gone. ``verify``: compare each gradient that waits with that of the original op.
    """

    def __init__(self, module: nn.Module, *, verify: bool = False) -> None:
        if why := missing():
            raise SplitError(f"this version of torch is not supported: {why}")
        self._module, self._verify = module, verify
        self._deferring = Deferring(module, verify=verify)
        self._deferring.sink.own_all()
        self._deferring.sink.catch_for_good()
        calls.patch()
        self._close = weakref.finalize(self, _close, self._deferring)

    def walk(self, roots: Sequence[Tensor]) -> None:
        """Find in the graph of a first F the parameters that are used in another way, too. Without
        it, they are found in the first B, in which they are summed in another order."""
        self._deferring.walk(roots)

    def close(self) -> None:
        """Give torch's functions back. Idempotent."""
        self._close()

    def report(self) -> SplitReport:
        """What was deferred so far, and why the rest was not."""
        return report_of(self._module, "verify" if self._verify else "auto", self._deferring)

    @property
    def deferred(self) -> frozenset[str]:
        """Names of the parameters whose gradients W has computed so far."""
        return frozenset(self._deferring.deferred)

    def __bool__(self) -> bool:
        self._deferring.sink.open()
        return True

    def __call__(self) -> Callable[[], None]:
        return partial(self._deferring.run_weight_work, self._deferring.sink.take())


def _close(deferring: Deferring) -> None:
    deferring.sink.close()
    calls.unpatch()


def split_backward(module: nn.Module) -> SplitBackward:
    """The ``dw_builder`` of a :class:`torch.distributed.pipelining.PipelineStage` of ``module``.

    Use: ``PipelineStage(module, …, dw_builder=split_backward(module))``, with any schedule of torch
    that has I and W actions. I then computes all but the weight gradients that can wait, which W
    computes: once, also under activation checkpointing (full or selective), and bitwise equal to a
    full backward. Call it after ``fully_shard`` and checkpoint wrappers, before the first step.

    Raises :class:`SplitError` if this torch lacks something it needs.
    """
    return SplitBackward(module)
