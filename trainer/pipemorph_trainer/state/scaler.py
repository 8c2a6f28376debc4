"""A gradient scaler with one verdict over all stages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from pipemorph_trainer.executor.waiting import CollectiveWait
    from pipemorph_trainer.topology.world import World


class GradScaler(torch.amp.GradScaler):
    """torch's ``GradScaler`` for a model that is divided over ranks: if gradients of one rank are
    not finite, all ranks skip the optimizer's step, and all keep one scale.

    Give it to ``Pipeline(scaler=...)``, which multiplies each loss by the scale before its backward
    and returns the loss without it. Then use it on every rank as torch's: ``unscale_(optimizer)``
    before clipping, ``step(optimizer)``, ``update()``. It has state to save: give it to
    ``Pipeline(state=...)`` as well.
    """

    def attach(self, world: World, device: torch.device, wait: CollectiveWait) -> None:
        """Use the ranks of ``world`` from now on. Called by the pipeline."""
        self._world, self._wait = world, wait
        # torch makes the scale with the first loss, and only the last stage has one.
        self.scale(torch.zeros((), device=device))

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """As torch's. Collective over all ranks, also where :meth:`step` calls it."""
        super().unscale_(optimizer)
        if not self.is_enabled():
            return
        # Per device with gradients; where nothing on this rank has one, there is none.
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        verdict = torch.tensor([float(any(bool(mine) for mine in found.values()))])
        collective = self._world.everyone.all_reduce(verdict, dist.ReduceOp.MAX)
        collective.wait(
            partial(self._wait, what="all ranks to say whether their gradients are finite")
        )
        for device in list(found) or [torch.device("cpu")]:
            found[device] = torch.tensor(float(verdict), device=device)
