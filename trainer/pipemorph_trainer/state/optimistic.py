"""Clips and steps without waiting for the gradient norm of all stages.

A stage whose ops have ended steps at once, as if the norm of all stages were within bounds, and
begins the forwards of the next iteration. Meanwhile the other stages finish, and their norms are
added up. Each stage knows the result before its first backward, which is the first op that changes
gradients, and which no stage can reach before all others have ended the iteration before.

If the gradients should have been clipped, or were not finite, every stage knows it, and undoes the
step from a copy of what it changed, drops those forwards, and steps again with the clipped
gradients. Then the iteration begins again. So results are always those of a step that waits.

After a step that was undone, stages wait for the norm until it is within bounds again: where each
iteration is clipped, nothing is lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipemorph_trainer.executor.split.snapshot import Snapshot
from pipemorph_trainer.state.gradients import GlobalNorm, clip_factor
from pipemorph_trainer.topology.placement import Placement, local

if TYPE_CHECKING:
    from pipemorph_trainer.executor.waiting import CollectiveWait
    from pipemorph_trainer.state.scaler import GradScaler
    from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

Hyperparameters = list[dict[str, Any]]
"""Of each group of an optimizer, what it has beside its parameters."""


class Undo:
    """Undoes a step of an optimizer: parameters, state and groups are as they were, to the bit.

    The copies have the size of the parameters and the state, three times that of the parameters for
    Adam, and are kept from one step to the next.
    """

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what a step changes."""
        self._optimizer = optimizer
        self._leaves, self._form = tree_flatten(dict(optimizer.state))
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._tensors = [local(each) for each in (*parameters, *states)]
        if list(map(_kind, self._copies)) != list(map(_kind, self._tensors)):
            self._copies = [torch.empty_like(each) for each in self._tensors]
        if self._tensors:
            torch._foreach_copy_(self._copies, self._tensors)
        self._before = self._after = hyperparameters(optimizer)

    def stepped(self) -> None:
        """Say that the step was taken: a later change of a group, such as by a learning-rate
        scheduler, is another's."""
        self._after = hyperparameters(self._optimizer)

    @torch.no_grad()
    def undo(self) -> Callable[[], None]:
        """Undo the step. Returns what makes the later changes of groups again; call it after the
        step that replaces this one."""
        if self._tensors:
            torch._foreach_copy_(self._tensors, self._copies)
        state = self._optimizer.state
        state.clear()
        state.update(tree_unflatten(self._leaves, self._form))
        later = [
            {name: value for name, value in now.items() if not _same(value, after.get(name))}
            for now, after in zip(hyperparameters(self._optimizer), self._after, strict=True)
        ]
        assign_hyperparameters(self._optimizer, self._before)
        return lambda: assign_hyperparameters(self._optimizer, later)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def hyperparameters(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)


def assign_hyperparameters(optimizer: torch.optim.Optimizer, values: Hyperparameters) -> None:
    for group, mine in zip(optimizer.param_groups, values, strict=True):
        for name, value in mine.items():
            if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


@dataclass
class _Step:
    """A step whose norm is not known yet. ``early``: it was taken all the same; then ``undo_scale``
    puts the gradient scaler back."""

    iteration: int
    optimizer: torch.optim.Optimizer | None
    max_norm: float
    norm: GlobalNorm
    grads: list[tuple[nn.Parameter, Tensor]]
    early: bool = False
    undo_scale: Callable[[], None] | None = None


class OptimisticSteps:
    """The steps of a rank: :meth:`clip_and_step` after an iteration, :meth:`begin` and
    :meth:`stands` in the next one, :meth:`settle` wherever parameters are needed as they stay.
    Main thread only.

    ``modules``: of the rank's stages, none if they are emulated. ``spreads``: placements of the
    parameters of all stages. ``uncounted``: ids of parameters that another stage counts.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        world: World,
        spreads: Iterable[Placement],
        wait: CollectiveWait,
        *,
        uncounted: Collection[int] = (),
        scaler: GradScaler | None = None,
    ) -> None:
        self._modules, self._world, self._spreads = modules, world, frozenset(spreads)
        self._wait, self._uncounted, self._scaler = wait, uncounted, scaler
        self._pending: _Step | None = None
        self._undo = Undo()
        self._within = False
        """Whether the newest norm that is known was within bounds. The same on all ranks."""
        self._undone = False
        self._snapshots: list[Snapshot] = []
        self.norm: Tensor | None = None
        """The newest norm that is known."""
        self.on_stood: Callable[[], None] = lambda: None
        """Called when a step that did not wait turns out to stand."""
        self.on_taken_again: Callable[[], None] = lambda: None
        """Called after a step was taken again."""

    @property
    def pending(self) -> bool:
        """Whether the norm of the newest step is not known yet."""
        return self._pending is not None

    def clip_and_step(
        self, optimizer: torch.optim.Optimizer | None, max_norm: float, iteration: int
    ) -> bool:
        """Clip the gradients of an iteration and step; the gradients are gone afterwards. Returns
        whether this waited for the norm of all stages."""
        self.settle()
        overflows = False
        if self._scaler is not None and optimizer is not None:
            overflows = self._scaler.unscale_own(optimizer)
        norm = GlobalNorm(
            [pair for module in self._modules for pair in module.named_parameters()],
            self._world, self._spreads, uncounted=self._uncounted, overflows=overflows,
        )  # fmt: skip
        step = _Step(iteration, optimizer, max_norm, norm, _gradients(optimizer))
        step.early = self._within and not norm.known
        if step.early:
            if optimizer is not None:
                self._undo.keep(optimizer)
                if self._scaler is not None:
                    step.undo_scale = self._scaler.keep(optimizer)
            self._take(step, overflows=False)
            if optimizer is not None:
                self._undo.stepped()
        self._pending = step
        if not step.early:
            self.settle()
        return not step.early

    def _take(self, step: _Step, *, overflows: bool) -> None:
        """Step with the gradients as they are now, and remove them."""
        for parameter, grad in step.grads:
            parameter.grad = grad
        if step.optimizer is None:
            return
        if self._scaler is None:
            step.optimizer.step()
        else:
            self._scaler.decide(step.optimizer, overflows=overflows)
            self._scaler.step(step.optimizer)
            self._scaler.update()
        for parameter, _ in step.grads:
            parameter.grad = None

    def settle(self) -> None:
        """Wait for the norm of the newest step, if it is not known yet. If the gradients had to be
        clipped, or were not finite, take the step again."""
        step, self._pending = self._pending, None
        if step is None:
            return
        self._wait.waiting.begin(f"the gradient norm of iteration {step.iteration} of all stages")
        self.norm, overflows = step.norm.wait(self._wait)
        self._wait.waiting.end()
        factor = clip_factor(self.norm, step.max_norm)
        # Not so if it is NaN.
        self._within = bool(factor == 1.0) and not overflows
        if step.early and self._within:
            self.on_stood()
            return
        later = None
        if step.early:
            self._undone = True
            log.info(
                "%s: the step of iteration %d is taken again, its gradient norm is %g",
                self._world.coordinate, step.iteration, float(self.norm),
            )  # fmt: skip
            if step.optimizer is not None:
                later = self._undo.undo()
            if step.undo_scale is not None:
                step.undo_scale()
        step.norm.clip(factor)
        self._take(step, overflows=overflows)
        if later is not None:
            later()
        if step.early:
            self.on_taken_again()

    def begin(self) -> None:
        """Begin an iteration, or begin it again."""
        self._undone = False
        # Forwards may change buffers and random state.
        self._snapshots = [Snapshot(module) for module in self._modules] if self.pending else []

    def stands(self) -> bool:
        """Whether the forwards since :meth:`begin` ran on the right parameters. Waits for the norm
        of all stages, if it is not known yet."""
        self.settle()
        if not self._undone:
            self._snapshots = []
        return not self._undone

    def rewind(self) -> None:
        """Put buffers, random state and plain attributes of the modules back as they were at
        :meth:`begin`."""
        for snapshot in self._snapshots:
            snapshot.restore()
        self._snapshots = []


def _gradients(optimizer: torch.optim.Optimizer | None) -> list[tuple[nn.Parameter, Tensor]]:
    if optimizer is None:
        return []
    return [
        (parameter, parameter.grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
