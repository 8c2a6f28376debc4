"""The module split: W computes weight gradients of Linears, B everything else."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipemorph_trainer.executor.split.deferred import Layer, LinearWork, Sink, run_weight_work
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
        self._before: list[tuple[Layer, nn.Parameter, int | None]] = []
        self._ran: set[int] = set()
        self._names: dict[int, str] = {}
        for layer in layers:
            self._names.update(layer.parameter_names())

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

    def patch_for_good(self) -> None:
        """Patch the layers for good, for a caller that neither runs F nor B."""
        self._patch.install()

    def begin_deferring(self) -> None:
        """From now on a backward of the patched layers leaves its work to W."""
        self._before = self._grad_marks()
        self._sink.work = []

    def end_deferring(self) -> list[LinearWork]:
        """End what :meth:`begin_deferring` began. Returns the work for W; none if it did not
        begin."""
        work, self._sink.work = self._sink.work or [], None
        self._exclude_foreign(self._before, work)
        self._before = []
        return work

    def backward_weight(self, flight: Flight) -> None:
        self.run_weight_work(flight.work)

    def run_weight_work(self, work: list[LinearWork]) -> None:
        """Run the W of one microbatch. Empties ``work``."""
        for item in work:
            if id(item.layer) not in self._ran:
                self._ran.add(id(item.layer))
                kinds = {"weight": item.weight, "bias": item.bias}
                self.deferred.update(
                    item.layer.full_name(kind) for kind, p in kinds.items() if p is not None
                )
        run_weight_work(work)

    def backward(self, flight: Flight, output_grads: Sequence[Tensor | None] | None) -> Grads:
        grads = self.backward_input(flight, output_grads)
        self.backward_weight(flight)
        return grads

    def _grad_marks(self) -> list[tuple[Layer, nn.Parameter, int | None]]:
        """Number of writes to each deferred parameter's ``.grad``; None without a gradient."""
        return [
            (layer, parameter, None if parameter.grad is None else version(parameter.grad))
            for layer in self.layers
            if not layer.excluded
            for parameter in layer.module.parameters(recurse=False)
        ]

    def _exclude_foreign(
        self, before: list[tuple[Layer, nn.Parameter, int | None]], work: list[LinearWork]
    ) -> None:
        """Stop deferring parameters whose gradient autograd also wrote in B: they are used outside
        their Linear, too, so that the sum would depend on when W runs."""
        deferred = {id(item.layer) for item in work}
        for layer, parameter, mark in before:
            now = None if parameter.grad is None else version(parameter.grad)
            if now != mark and id(layer) in deferred:
                name = self._names.get(id(parameter), layer.name)
                layer.excluded = f"{name} is also used outside its own Linear"
                log.warning("split backward: %s; no longer deferred", layer.excluded)
