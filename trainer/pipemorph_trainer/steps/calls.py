"""Runs the calls of a pipeline, steps and evaluations, and knows what happened between them."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from pipemorph_trainer.executor.dispatch import Inputs
from pipemorph_trainer.executor.inputs import Given, check_graphs
from pipemorph_trainer.steps.parts import Parts

Run = Callable[[int, dict[int, Inputs], dict[int, Any], Exception | None], float]
"""``run`` or ``evaluate`` of :class:`~pipemorph_trainer.steps.iteration.Iterations`."""


class Calls:
    """The calls of one pipeline. ``iteration``: the first one. Main thread only."""

    def __init__(self, parts: Parts, iteration: int) -> None:
        self._parts, self._over = parts, iteration
        self.last_activity = monotonic()
        """When the script was last inside the pipeline."""
        self.met = False
        """Whether all stages have waited for each other since the last step."""

    def run(
        self,
        run: Run,
        iteration: int,
        given: Given,
        *,
        return_outputs: bool,
        needs_target: bool = True,
    ) -> tuple[Tensor, Inputs]:
        """Run an iteration or an evaluation. Returns the loss and the inputs of the last stage
        here, with the outputs."""
        inputs, shapes, refusal = self._inputs(given, needs_target=needs_target)
        final = inputs[self._parts.coordinate.held[-1]]
        self._complete(final, given, refused=refusal is not None, keep=return_outputs)
        loss = run(iteration, inputs, shapes, refusal)
        if self._parts.agent is not None:
            self._parts.agent.tend()
        self.last_activity = monotonic()
        return torch.tensor(loss, dtype=torch.float32), final

    def _inputs(
        self, given: Given, *, needs_target: bool
    ) -> tuple[dict[int, Inputs], dict[int, Any], Exception | None]:
        """The inputs of each stage here, and what changes if their shapes do; and why they do not
        fit, if so."""
        inputs = {stage: Inputs() for stage in self._parts.coordinate.held}
        shapes: dict[int, Any] = dict.fromkeys(inputs)
        try:
            if self._parts.replicas is not None and not given.evaluation:
                self._parts.replicas.check()
            for stage, own in self._parts.stages.items():
                inputs[stage], shapes[stage] = own.inputs(given, needs_target=needs_target)
                if not given.evaluation:
                    check_graphs(self._parts.coordinate.of(stage), inputs[stage])
        except Exception as error:  # noqa: BLE001  all ranks are told of any error
            return inputs, shapes, error
        return inputs, shapes, None

    def _complete(self, final: Inputs, given: Given, *, refused: bool, keep: bool) -> None:
        """Complete the inputs of the last stage, if it is here. ``keep``: its outputs."""
        if not self._parts.coordinate.last:
            return
        if refused and given.weight is not None:
            # The other replicas wait for the weight of this one.
            final.divisor = 0.0
        if keep:
            final.outputs = []
        if self._parts.scaler is not None:
            final.scale = self._parts.scaler.get_scale()

    def end_iteration(self, iteration: int, at: float) -> None:
        """End the iteration before ``iteration`` at the time ``at``, once even if a step is
        refused."""
        if iteration > self._over:
            self._over = iteration
            self._parts.iterations.reports.rounds.end(iteration - 1, at, self.barrier())
            self.met = False

    def barrier(self) -> bool | None:
        """Whether all stages have waited for each other since the last iteration; None if the
        stage's own trainer does what is between two iterations."""
        parts = self._parts
        if self.met or parts.tied is not None or parts.scaler is not None:
            return True
        stages = parts.stages.values()
        return False if all(own.emulated or own.module is not None for own in stages) else None
