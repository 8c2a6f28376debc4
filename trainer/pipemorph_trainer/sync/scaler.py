"""Gradient scaler with a common verdict over all stages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from pipemorph_trainer.executor.waiting import CollectiveWaiter
    from pipemorph_trainer.topology.world import World


class GradScaler(torch.amp.GradScaler):
    """torch's ``GradScaler`` for a model divided over ranks. If gradients of any rank are not
    finite, all ranks skip the optimizer's step. All ranks have the same scale.

    Give it to ``Pipeline(scaler=...)``, which multiplies each loss by the scale before its backward
    and returns the unscaled loss. Use it on every rank like torch's: ``unscale_(optimizer)`` before
    clipping, ``step(optimizer)``, ``update()``. Its state is saved if ``Pipeline(state=...)`` has
    it as well.
    """

    def attach_world(self, world: World, device: torch.device, wait: CollectiveWaiter) -> None:
        """Use the ranks of ``world`` from now on. Called by the pipeline."""
        self._world, self._wait = world, wait
        # torch makes the scale with the first loss, and only the last stage has one.
        self.scale(torch.zeros((), device=device))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale gradients as torch's method does. Collective over all ranks, also when called by
        :meth:`step`."""
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        # An entry per device with gradients; none if no parameter of this rank has a gradient.
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        verdict = torch.tensor([float(any(bool(mine) for mine in found.values()))])
        collective = self._world.all_ranks.all_reduce(verdict, dist.ReduceOp.MAX)
        collective.wait(
            partial(self._wait, what="all ranks to say whether their gradients are finite")
        )
        for device in list(found) or [torch.device("cpu")]:
            found[device] = torch.tensor(float(verdict), device=device)
