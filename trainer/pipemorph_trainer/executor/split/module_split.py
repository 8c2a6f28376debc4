"""The module split: W computes weight gradients of Linears, B everything else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipemorph_trainer.executor.split.deferred import (
    CompiledLayer,
    Layer,
    Sink,
    Work,
    run_weight_work,
)
from pipemorph_trainer.executor.split.flight import Flight, Grads
from pipemorph_trainer.executor.split.linears import Patch
from pipemorph_trainer.executor.split.report import Split
from pipemorph_trainer.executor.split.splitters import Splitter
from pipemorph_trainer.executor.torch_private import version

log = logging.getLogger(__name__)


class ModuleSplit(Splitter):
    """The module split. B frees every activation except the inputs of the deferred Linears.

    On the first stage B has no input gradient to compute, but still runs the backward of everything
    that is not deferred, so that activations are freed as early as on other stages.
    """

    split: Split = "module"

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = layers
        self._sink = Sink()
        self._patch = Patch(layers, self._sink)
        self._held: list[tuple[Layer, str, nn.Parameter]] | None = None
        self._before: list[tuple[Layer, str, nn.Parameter, int | None]] = []
        self._whole: dict[str, str] = {}
        """Parameters of compiled code whose gradients B has computed, each with the reason."""

    def forward(self, *args: Any) -> Flight:
        with self._patch():
            return super().forward(*args)

    def backward_input(self, flight: Flight, output_grads: Sequence[Tensor | None] | None) -> Grads:
        tensors, grads = flight.roots(output_grads)
        flight.outputs = ()
        flight.work = []
        if tensors:
            self.begin_deferring()
            try:
                # Patched here, too, since activation checkpointing calls the layers again.
                with self._patch():
                    torch.autograd.backward(tensors, grads)
            finally:
                flight.work = self.end_deferring()
        return flight.take_input_grads()

    def not_deferred(self) -> dict[str, str]:
        """Parameters of compiled modules whose gradients W has not computed, with the reasons."""
        unknown = "in a compiled module, but not in compiled code that ran"
        return {
            name: self._whole.get(name, unknown)
            for layer in self.layers
            if isinstance(layer, CompiledLayer)
            for name, _ in layer.parameters()
            if name not in self.deferred
        }

    def hold_parameters(self) -> None:
        self._held = self._parameters()

    @property
    def uses_values(self) -> bool:
        """That of a Linear is a product of its input and the output's gradient."""
        return any(
            isinstance(layer, CompiledLayer) or not isinstance(layer.module, nn.Linear)
            for layer in self.layers
        )

    def _parameters(self) -> list[tuple[Layer, str, nn.Parameter]]:
        return [(layer, *each) for layer in self.layers for each in layer.parameters()]

    def patch_for_good(self) -> None:
        """Patch the layers for good, for a caller that neither runs F nor B."""
        self._patch.install()

    def begin_deferring(self) -> None:
        """From now on a backward of the layers leaves its work to W."""
        # Number of writes to each deferred parameter's `.grad`; None without a gradient.
        self._before = [
            (layer, name, parameter, None if parameter.grad is None else version(parameter.grad))
            for layer, name, parameter in self._held or self._parameters()
        ]
        self._sink.open({id(each[2]): each[:2] for each in self._before})

    def end_deferring(self) -> list[Work]:
        """End what :meth:`begin_deferring` began. Returns the work for W; none if it did not
        begin."""
        work = self._sink.close()
        self._exclude_foreign(work)
        self.tolerance = max(self.tolerance, self._sink.tolerance)
        for key, why in self._sink.whole.items():
            if key in self._sink.owned:
                self._whole[self._sink.owned[key][1]] = why
        self._before = []
        return work

    def backward_weight(self, flight: Flight) -> None:
        self.run_weight_work(flight.work)

    def run_weight_work(self, work: list[Work]) -> None:
        """Run the W of one microbatch. Empties ``work``."""
        for item in work:
            self.deferred.update(item.names.values())
        run_weight_work(work)

    def backward(self, flight: Flight, output_grads: Sequence[Tensor | None] | None) -> Grads:
        grads = self.backward_input(flight, output_grads)
        self.backward_weight(flight)
        return grads

    def _exclude_foreign(self, work: list[Work]) -> None:
        """Stop deferring parameters whose gradient autograd also wrote in B: they are used outside
        their Linear, too, so that the sum would depend on when W runs."""
        deferred = {key for item in work for key in item.names}
        for layer, name, parameter, mark in self._before:
            now = None if parameter.grad is None else version(parameter.grad)
            if now != mark and id(parameter) in deferred and not layer.excluded:
                layer.excluded = f"{name} is also used outside its own Linear"
                log.warning("split backward: %s; no longer deferred", layer.excluded)
