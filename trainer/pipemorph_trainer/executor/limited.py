"""Ops of a stage whose plan limits the activations on its device: some move to host memory and
back, or are dropped and computed again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from time import time
from typing import Any

from pipemorph.planning import OpKind
from pipemorph.planning.offload import Residency
from pipemorph_trainer.executor.device_times import DeviceTimes
from pipemorph_trainer.executor.stages.interface import Runner
from pipemorph_trainer.executor.timed import TimedCopy


class LimitedOps:
    """Computes the ops of one iteration. ``residency``: says what leaves; ``copies``: gets each
    copy, and each forward that runs again; ``recompute``: what leaves is computed again."""

    def __init__(
        self,
        runner: Runner,
        residency: Residency,
        copies: list[TimedCopy],
        device_times: DeviceTimes | None,
        *,
        recompute: bool,
    ) -> None:
        self._runner, self._residency, self._copies = runner, residency, copies
        self._device_times, self._recompute = device_times, recompute
        self._leaves = False
        self.computes: dict[OpKind, Callable[..., Any]] = {
            OpKind.F: self._forward,
            OpKind.B: self._returning(OpKind.B, runner.backward_input),
            OpKind.BW: self._returning(OpKind.BW, runner.backward),
            OpKind.W: self._weight,
        }
        """What computes each kind of op."""

    def before_forward(self, microbatch: int) -> None:
        """Prepare for an F, before it starts, so that this wait is not part of its time."""
        self._leaves = self._residency.run(OpKind.F, microbatch)
        if self._leaves and not self._recompute:
            self._runner.reclaim()

    def _forward(self, microbatch: int, args: Any, kwargs: Any, target: Any) -> Any:
        leaves, again = self._leaves, self._recompute
        return self._runner.forward(
            microbatch, args, kwargs, target,
            offload=leaves and not again, recompute=leaves and again,
        )  # fmt: skip

    def after_forward(self, microbatch: int) -> None:
        """Move the activations of an F to host memory, if they leave, at the end of the op. Its
        arguments must have no other references."""
        if self._leaves and not self._recompute:
            self._copy(OpKind.F, microbatch, self._runner.offload)

    def _returning(self, kind: OpKind, backward: Callable[..., Any]) -> Callable[..., Any]:
        """A backward that begins with the return of what has left."""

        def run(microbatch: int, grads: Any) -> Any:
            if self._residency.run(kind, microbatch):
                if self._recompute:
                    self._copy(kind, microbatch, self._run_again)
                else:
                    self._copy(kind, microbatch, self._runner.fetch)
            return backward(microbatch, grads)

        return run

    def _weight(self, microbatch: int) -> None:
        self._residency.run(OpKind.W, microbatch)
        self._runner.backward_weight(microbatch)

    def _run_again(self, microbatch: int) -> int:
        self._runner.recompute(microbatch)
        return 0

    def _copy(self, kind: OpKind, microbatch: int, copy: Callable[[int], int]) -> None:
        """Copy activations, or run a forward again, as part of an op."""
        start = time()
        with nullcontext() if self._device_times is None else self._device_times.copy():
            nbytes = copy(microbatch)
        again = self._recompute
        self._copies.append(TimedCopy(kind, microbatch, start, time(), nbytes, again=again))
