"""Sends the loss of an iteration from the last stage to every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipemorph_trainer.executor.device_times import LossCopy
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.topology.accelerator import Accelerator
from pipemorph_trainer.topology.hierarchy import Pending
from pipemorph_trainer.topology.world import World


class SharedLoss:
    """Shares the loss of one iteration after another: :meth:`begin`, :meth:`post`, :meth:`wait`.

    The loss is the mean over columns of the sum over microbatches, divided by a divisor. Replicas,
    shards and context ranks have different data, tensor ranks the same loss.
    """

    def __init__(
        self,
        *,
        world: World,
        accelerator: Accelerator | None,
        wait: CollectiveWait,
    ) -> None:
        # Keeps the world and not its groups, whose last references World.leave() drops.
        self._world, self._divisor = world, 1.0
        self._accelerator, self._wait_for = accelerator, wait
        self._loss = torch.zeros(4, dtype=torch.float64)
        self._sum: Pending | None = None
        self._copy: LossCopy | None = None
        self.refused = False
        """Whether a replica refused the step. Valid after :meth:`wait`."""
        self.asked: Callable[[], bool] | None = None
        """Whether this rank is asked to end."""
        self.asked_to_move: Callable[[], bool] | None = None
        self.leaving = False
        """Whether a rank was asked to end when it shared its loss, the same on all ranks. Stays
        True. Valid after :meth:`wait`."""
        self.moving = False
        """Whether a rank was asked to leave for another place when it shared its loss, the same on
        all ranks. Valid after :meth:`wait`."""

    def begin(self, divisor: float) -> None:
        """Begin a call. ``divisor``: of the sum over microbatches; only used on the last stage."""
        self._sum = self._copy = None
        self._divisor = divisor
        if not self._world.coordinate.last:
            self._share([])

    def post(self, losses: list[Tensor]) -> None:
        """Start to share the loss, on the last stage after its last F, so that it arrives long
        before it is needed. Losses of a device are shared when they are on the host; meanwhile
        later ops are launched."""
        if losses and self._accelerator is not None:
            self._copy = LossCopy(self._accelerator, losses)
        else:
            self._share([float(loss) for loss in losses])

    def between_ops(self) -> None:
        """Share the losses of a device if they have reached the host. Pass on what has come from
        other ranks."""
        if self._copy is not None and self._copy.done():
            self._share(self._copy.take())
        if self._sum is not None:
            self._sum.advance()

    def wait(self, call: str, *, refused: bool) -> float:
        """Wait for the loss of ``call``, such as ``iteration 7``: the mean over microbatches and
        replicas. Raises :class:`PipelineError` if it does not arrive.

        ``refused``: this replica refuses the call, so the last stage has no loss."""
        if self._sum is None and refused:
            self._share([], refused=True)
        self._wait_for.waiting.begin(f"the loss of {call} from the last stage")
        if self._copy is not None:
            self._share(self._copy.take())
        assert self._sum is not None, "the last stage has shared no loss"
        self._sum.wait(self._wait_for)
        self._wait_for.waiting.end()
        self.refused = bool(self._loss[1])
        self.leaving = self.leaving or bool(self._loss[2])
        self.moving = bool(self._loss[3])
        return float(self._loss[0]) / self._world.coordinate.mesh.columns

    def _share(self, losses: Sequence[float], *, refused: bool = False) -> None:
        self._copy = None
        total = 0.0
        for loss in losses:
            total += loss
        leaves = self.asked is not None and self.asked()
        moves = self.asked_to_move is not None and self.asked_to_move()
        values = [total / self._divisor, refused, leaves, moves]
        self._loss = torch.tensor(values, dtype=torch.float64)
        self._sum = self._world.everyone.all_reduce(self._loss)
