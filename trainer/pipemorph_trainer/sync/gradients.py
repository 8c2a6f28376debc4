"""Collectives after the ops: gradients and buffers over replicas, gradient norm over stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemorph.errors import InputError
from pipemorph.spec.mesh import DATA_DIMENSIONS, DIMENSIONS, LOCKSTEP_DIMENSIONS, Dimension
from pipemorph_trainer.autograd_internals import read_version
from pipemorph_trainer.executor.sharded_modules import is_sharded
from pipemorph_trainer.sync.fingerprints import is_comparable, view_tensor_bytes
from pipemorph_trainer.sync.reduction import GradientReducer, WaitForCollective, finish_collective
from pipemorph_trainer.topology.placement import TensorPlacement, find_placement, to_local

if TYPE_CHECKING:
    from pipemorph_trainer.topology.accelerator import Accelerator
    from pipemorph_trainer.topology.world import World
    from pipemorph_trainer.transport.fault_injection import ReductionFaults


def get_averaged_dimensions(spread: TensorPlacement) -> tuple[Dimension, ...]:
    """Return the dimensions over which a parameter's gradient is averaged here: those with other
    data, except those of the parameter's own mesh, over which its backward reduces it (FSDP)."""
    return tuple(name for name in DATA_DIMENSIONS if name not in spread.spanned)


def get_replicated_dimensions(spread: TensorPlacement) -> tuple[Dimension, ...]:
    """Return the dimensions along which ranks hold the same elements of a tensor."""
    return tuple(name for name in DATA_DIMENSIONS if name not in spread.sharded)


def get_norm_dimensions(spreads: Iterable[TensorPlacement]) -> tuple[Dimension, ...]:
    """Return the dimensions over which the gradient norm is summed: those of a replica, and those
    over replicas along which a parameter is sharded."""
    sharded = {name for spread in spreads for name in spread.sharded}
    return ("pp", *sorted(sharded | set(LOCKSTEP_DIMENSIONS), key=DIMENSIONS.index))


class ReplicaSynchronizer:
    """Keeps equal all ranks that hold the same elements of this rank's stage: they get the mean
    gradient and the buffers of the first.

    Every call is collective over the ranks with the same stage and tensor coordinate.
    """

    def __init__(
        self,
        module: nn.Module,
        world: World,
        wait: WaitForCollective,
        *,
        accelerator: Accelerator | None = None,
        faults: ReductionFaults | None = None,
    ) -> None:
        # References the world and not its groups: World.leave() must drop their last references.
        self._module, self._world, self._wait = module, world, wait
        self._buffered = [m for m in module.modules() if any(True for _ in m.buffers(False))]
        self._marks = [_count_buffer_writes(m) for m in self._buffered]
        self.sharded = is_sharded(module)
        """True if FSDP reduces the gradients of the shards itself, after the last op."""
        parameters = [
            (parameter, get_averaged_dimensions(find_placement(name, parameter, world.coordinate)))
            for name, parameter in module.named_parameters()
        ]
        self._averaged = {id(parameter) for parameter, _ in parameters}
        self.reducer = GradientReducer(
            parameters, world, wait,
            accelerator=accelerator, late=self.sharded, marks=self._list_written_modules,
            faults=faults,
        )  # fmt: skip

    def check_parameters(self) -> None:
        """Raise :class:`InputError` if the module has other parameters than those averaged."""
        named = () if self.sharded else self._module.named_parameters()
        new = [name for name, parameter in named if id(parameter) not in self._averaged]
        if new:
            raise InputError(
                f"the parameter {new[0]!r} was added to the stage or replaced after Pipeline was"
                " made, so that replicas would not average its gradient; make the Pipeline anew"
            )

    def sync_replicas(self) -> None:
        """Wait until the gradients of an iteration are averaged, and share all buffers of every
        module in which a rank has written a buffer. torch does not count a batch norm's writes to
        its running statistics, only those to its ``num_batches_tracked``.
        """
        for module, count in zip(self._buffered, self.reducer.finish_iteration(), strict=True):
            if count:
                self._broadcast_buffers(module.buffers(recurse=False))

    def _list_written_modules(self) -> list[bool]:
        return [
            _was_written(m, marks) for m, marks in zip(self._buffered, self._marks, strict=True)
        ]

    def share_buffers(self) -> None:
        """Copy every buffer of the first rank to all, even without a counted write."""
        self._broadcast_buffers(self._module.buffers())

    def _broadcast_buffers(self, buffers: Iterable[Tensor]) -> None:
        group = self._world.get_group(DATA_DIMENSIONS)
        assert group is not None
        for buffer in buffers:
            if is_comparable(buffer):
                broadcast_tensor(
                    buffer,
                    self._world.coordinate.find_first_along(DATA_DIMENSIONS),
                    group,
                    self._wait,
                )
        self._marks = [_count_buffer_writes(m) for m in self._buffered]


BufferWrites = list[tuple[Tensor, int]]


def _count_buffer_writes(module: nn.Module) -> BufferWrites:
    """Count the in-place writes to each buffer of a module."""
    return [(buffer, read_version(buffer)) for buffer in module.buffers(recurse=False)]


def _was_written(module: nn.Module, before: BufferWrites) -> bool:
    """True if a buffer was written or replaced since ``before``."""
    now = _count_buffer_writes(module)
    return len(now) != len(before) or any(
        new is not old or counted != was
        for (new, counted), (old, was) in zip(now, before, strict=True)
    )


def broadcast_tensor(
    value: Tensor, source: int, group: dist.ProcessGroup, wait: WaitForCollective
) -> None:
    """Copy a tensor of rank ``source`` to all ranks of ``group``, as bytes: any dtype works."""
    raw = view_tensor_bytes(value)
    if not raw.numel():
        return
    finish_collective(dist.broadcast(raw, source, group=group, async_op=True), raw, wait)
    if raw.data_ptr() != value.data_ptr():
        with torch.no_grad():
            value.copy_(raw.view(value.dtype).view(value.shape))


def clip_grad_norm(
    parameters: Iterable[tuple[str, nn.Parameter]],
    max_norm: float,
    world: World,
    spreads: Iterable[TensorPlacement],
    wait: WaitForCollective,
    *,
    uncounted: Collection[int] = (),
) -> Tensor:
    """Clip this rank's gradients by their 2-norm over all stages, as
    ``torch.nn.utils.clip_grad_norm_``. Returns the unclipped norm, 0-dim float32, bitwise equal on
    all ranks, since each adds the squares of all in rank order, in float64.

    Every element counts once: among ranks that hold it, the first along each dimension counts it.
    ``spreads``: placements of the parameters of all stages. ``uncounted``: ids of parameters that
    another stage counts. Collective over the ranks that contribute to the norm.
    """
    over = get_norm_dimensions(spreads)
    coordinate = world.coordinate
    grads, counted = [], []
    for name, parameter in parameters:
        if parameter.grad is None:
            continue
        grads.append(to_local(parameter.grad))
        if id(parameter) in uncounted:
            continue
        sharded = find_placement(name, parameter, coordinate).sharded
        if not any(coordinate.index_along(n) for n in over if n != "pp" and n not in sharded):
            counted.append(grads[-1])
    square = torch.zeros(1, dtype=torch.float64)
    if counted:
        square[0] = torch.nn.utils.get_total_norm(counted).double().cpu() ** 2
    squares = [square]
    if ranks := world.get_hierarchy(over):
        squares = []
        ranks.all_gather(square, squares).wait(wait)
    norm = torch.cat(squares).sum().sqrt().float()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad.device))
    return norm
