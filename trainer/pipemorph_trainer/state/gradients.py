"""Collectives after the ops: gradients and buffers over replicas, the norm over stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemorph.api.mesh import DATA, DIMENSIONS, LOCKSTEP, Dimension
from pipemorph.errors import InputError
from pipemorph_trainer.executor.stages.sharded import is_sharded
from pipemorph_trainer.executor.torch_private import version
from pipemorph_trainer.state.reduction import Reducer, Wait, finish
from pipemorph_trainer.state.weights import bytes_of, comparable
from pipemorph_trainer.topology.placement import Placement, local, placement

if TYPE_CHECKING:
    from pipemorph_trainer.links.faults import ReductionFaults
    from pipemorph_trainer.topology.accelerator import Accelerator
    from pipemorph_trainer.topology.world import World


def averaged_over(spread: Placement) -> tuple[Dimension, ...]:
    """Dimensions over which a parameter's gradient is averaged here: those with other data, without
    those along which the parameter itself is distributed, whose ranks reduce it as part of its
    backward (FSDP does)."""
    return tuple(name for name in DATA if name not in spread.spanned)


def levelled_over(spread: Placement) -> tuple[Dimension, ...]:
    """Dimensions along which ranks hold the same elements of a tensor."""
    return tuple(name for name in DATA if name not in spread.sharded)


def measured_over(spreads: Iterable[Placement]) -> tuple[Dimension, ...]:
    """Dimensions of the ranks that add up the gradient norm: all of a replica, and the replicas if
    a parameter is sharded over them."""
    sharded = {name for spread in spreads for name in spread.sharded}
    return ("pp", *sorted(sharded | set(LOCKSTEP), key=DIMENSIONS.index))


class Replicas:
    """Keeps the ranks equal that hold the same elements of this rank's stage: all get the mean
    gradient and the buffers of the first.

    Every call is collective over the ranks with the same stage and tensor coordinate.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        wait: Wait,
        *,
        accelerator: Accelerator | None = None,
        faults: ReductionFaults | None = None,
    ) -> None:
        # Keeps the world and not its groups, whose last references World.leave() drops.
        self._module, self._world, self._wait = module, world, wait
        self._buffered = [m for m in module.modules() if any(True for _ in m.buffers(False))]
        self._marks = [_marks(m) for m in self._buffered]
        self.sharded = is_sharded(module)
        """Whether FSDP reduces the gradients of the shards itself, after the last op."""
        parameters = [
            (parameter, averaged_over(placement(name, parameter, world.coordinate)))
            for name, parameter in module.named_parameters()
        ]
        self._averaged = {id(parameter) for parameter, _ in parameters}
        self.reducer = Reducer(
            parameters, world, wait,
            accelerator=accelerator, late=self.sharded, marks=self._written, faults=faults,
        )  # fmt: skip

    def check(self) -> None:
        """Raise :class:`InputError` if the module has other parameters than those averaged."""
        named = () if self.sharded else self._module.named_parameters()
        new = [name for name, parameter in named if id(parameter) not in self._averaged]
        if new:
            raise InputError(
                f"the parameter {new[0]!r} was added to the stage or replaced after Pipeline was"
                " made, so that replicas would not average its gradient; make the Pipeline anew"
            )

    def sync(self) -> None:
        """Wait until the gradients are averaged after an iteration, and share the buffers of every
        module in which a rank has written a buffer.

        Whole modules, because torch does not count a batch norm's writes to its running statistics,
        only those to ``num_batches_tracked`` beside them.
        """
        for module, count in zip(self._buffered, self.reducer.finish(), strict=True):
            if count:
                self._share(module.buffers(recurse=False))

    def _written(self) -> list[bool]:
        return [_written(m, marks) for m, marks in zip(self._buffered, self._marks, strict=True)]

    def share_buffers(self) -> None:
        """Copy every buffer of the first rank to all, even if torch counted no write to it."""
        self._share(self._module.buffers())

    def _share(self, buffers: Iterable[Tensor]) -> None:
        group = self._world.group(DATA)
        assert group is not None
        for buffer in buffers:
            if comparable(buffer):
                broadcast(buffer, self._world.coordinate.first_along(DATA), group, self._wait)
        self._marks = [_marks(m) for m in self._buffered]


Marks = list[tuple[Tensor, int]]


def _marks(module: nn.Module) -> Marks:
    """The buffers of a module, with the number of in-place writes to each."""
    return [(buffer, version(buffer)) for buffer in module.buffers(recurse=False)]


def _written(module: nn.Module, before: Marks) -> bool:
    """Whether a buffer was written or replaced since ``before``."""
    now = _marks(module)
    return len(now) != len(before) or any(
        new is not old or counted != was
        for (new, counted), (old, was) in zip(now, before, strict=True)
    )


def broadcast(value: Tensor, source: int, group: dist.ProcessGroup, wait: Wait) -> None:
    """Copy a tensor of rank ``source`` to all ranks of ``group``. It is sent as bytes, so any dtype
    works."""
    raw = bytes_of(value)
    if not raw.numel():
        return
    finish(dist.broadcast(raw, source, group=group, async_op=True), raw, wait)
    if raw.data_ptr() != value.data_ptr():
        with torch.no_grad():
            value.copy_(raw.view(value.dtype).view(value.shape))


def clip_grad_norm(
    parameters: Iterable[tuple[str, nn.Parameter]],
    max_norm: float,
    world: World,
    spreads: Iterable[Placement],
    wait: Wait,
    *,
    uncounted: Collection[int] = (),
) -> Tensor:
    """Clip this rank's gradients by their 2-norm over all stages, as
    ``torch.nn.utils.clip_grad_norm_``. Returns the norm before, 0-dim float32, bitwise equal on all
    ranks, since each adds the squares of all in rank order, in float64.

    Every element counts once: of ranks that hold the same one, the first along each dimension
    counts it. ``spreads``: placements of the parameters of all stages. ``uncounted``: ids of
    parameters that another stage counts. Collective over the ranks that add up the norm.
    """
    over = measured_over(spreads)
    coordinate = world.coordinate
    grads, counted = [], []
    for name, parameter in parameters:
        if parameter.grad is None:
            continue
        grads.append(local(parameter.grad))
        if id(parameter) in uncounted:
            continue
        sharded = placement(name, parameter, coordinate).sharded
        if not any(coordinate.along(n) for n in over if n != "pp" and n not in sharded):
            counted.append(grads[-1])
    square = torch.zeros(1, dtype=torch.float64)
    if counted:
        square[0] = torch.nn.utils.get_total_norm(counted).double().cpu() ** 2
    squares = [square]
    if ranks := world.hierarchy(over):
        squares = []
        ranks.all_gather(square, squares).wait(wait)
    norm = torch.cat(squares).sum().sqrt().float()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
    return norm
