"""The base class of splits; see :data:`pipemorph_trainer.executor.split.report.Split`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipemorph_trainer.executor.split.flight import Flight, Grads, StageCall
from pipemorph_trainer.executor.split.report import Split
from pipemorph_trainer.executor.split.snapshot import Begun, Rerun


class Splitter:
    """Runs F, B and W of one stage without a split: B is the whole backward, W is empty. The caller
    is responsible for the order of ops.

    Tensors passed to :meth:`forward` and :meth:`backward_input` may be kept until
    :meth:`backward_weight` of the same microbatch, and must not change before.
    """

    split: Split = "fused"

    def __init__(self) -> None:
        self.deferred: set[str] = set()
        """Names of the parameters whose gradients W has computed so far."""
        self.tolerance = 0.0
        """How much gradients may differ from those of an unsplit backward, relative to the largest
        element: 0 unless compiled code was cut, which may round elsewhere then."""

    def hold_parameters(self) -> None:
        """Go on with the stage's parameters as they are now: later they may be other objects, while
        FSDP has them sharded."""

    @property
    def uses_values(self) -> bool:
        """Whether W may use the values of parameters."""
        return False

    def forward(
        self,
        call: StageCall,
        microbatch: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        target: Any,
    ) -> Flight:
        return call(microbatch, args, kwargs, target)

    def backward_input(self, flight: Flight, output_grads: Sequence[Tensor | None] | None) -> Grads:
        return self.backward(flight, output_grads)

    def backward_weight(self, flight: Flight) -> None:
        """Does nothing: B was the whole backward."""

    def backward(self, flight: Flight, output_grads: Sequence[Tensor | None] | None) -> Grads:
        tensors, grads = flight.roots(output_grads)
        flight.outputs = ()
        if tensors:
            torch.autograd.backward(tensors, grads)
        return flight.take_input_grads()


@dataclass(frozen=True)
class Kept:
    """What is kept of a microbatch to run its forward again: the arguments of its F, and what else
    it began with."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any] | None
    target: Any
    begun: Begun

    def run(self, splitter: Splitter, call: StageCall, microbatch: int, rerun: Rerun) -> Flight:
        """Run the forward again."""
        outputs, call.outputs = call.outputs, None
        try:
            with rerun.second(self.begun):
                flight = splitter.forward(call, microbatch, self.args, self.kwargs, self.target)
        finally:
            call.outputs = outputs
        flight.sent = ()
        return flight
