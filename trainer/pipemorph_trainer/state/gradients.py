"""Collectives after the ops: gradients and buffers over replicas, the norm over stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemorph.api.mesh import DATA
from pipemorph_trainer.executor.torch_private import version
from pipemorph_trainer.state.weights import bytes_of, comparable

if TYPE_CHECKING:
    from pipemorph_trainer.topology.world import World

BUCKET_BYTES = 25 << 20
Wait = Callable[[Any], None]
"""Waits for a collective on CPU tensors, with a deadline and a description."""


class Replicas:
    """Keeps the replicas of this rank's stage equal: all get the mean gradient and the buffers of
    replica 0.

    Every call is collective over the replicas of the stage.
    """

    def __init__(self, module: nn.Module, world: World, wait: Wait) -> None:
        # Keeps the world and not its group, whose last reference World.leave() drops.
        self._module, self._world, self._wait = module, world, wait
        self._buffered = [m for m in module.modules() if any(True for _ in m.buffers(False))]
        self._marks = [_marks(m) for m in self._buffered]

    def sync(self) -> None:
        """Average the gradients after an iteration, and share the buffers of every module in which
        a rank has written a buffer.

        Whole modules, because torch does not count a batch norm's writes to its running statistics,
        only those to ``num_batches_tracked`` beside them.
        """
        group = self._world.group(DATA)
        assert group is not None
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        written = [_written(m, marks) for m, marks in zip(self._buffered, self._marks, strict=True)]
        mask = [*(p.grad is not None for p in parameters), *written]
        if not mask:
            return
        counts = torch.tensor(mask, dtype=torch.int32)
        self._wait(dist.all_reduce(counts, group=group, async_op=True))
        used, written_by = counts[: len(parameters)], counts[len(parameters) :]
        average(parameters, used.tolist(), group, self._wait)
        for module, count in zip(self._buffered, written_by.tolist(), strict=True):
            if count:
                self._share(module.buffers(recurse=False))

    def share_buffers(self) -> None:
        """Copy every buffer of replica 0 to all replicas, even if torch counted no write to it."""
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


def average(
    parameters: Sequence[nn.Parameter], used: Sequence[int], group: dist.ProcessGroup, wait: Wait
) -> None:
    """Replace every ``.grad`` by its mean over the ranks of ``group``, bitwise equal on each.
    ``used``: number of ranks on which each parameter has a gradient.

    Gradients are sent in flat buckets, in the order of the parameters. A parameter without a
    gradient on any rank keeps none; if only some ranks have one, the others count as zero.
    """
    size = dist.get_world_size(group)
    for parameter, count in zip(parameters, used, strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets(p.grad for p in parameters if p.grad is not None):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        _finish(dist.all_reduce(flat, group=group, async_op=True), flat, wait)
        flat /= size
        offset = 0
        for grad in bucket:
            grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()


def broadcast(value: Tensor, source: int, group: dist.ProcessGroup, wait: Wait) -> None:
    """Copy a tensor of rank ``source`` to all ranks of ``group``. It is sent as bytes, so any dtype
    works."""
    raw = bytes_of(value)
    if not raw.numel():
        return
    _finish(dist.broadcast(raw, source, group=group, async_op=True), raw, wait)
    if raw.data_ptr() != value.data_ptr():
        with torch.no_grad():
            value.copy_(raw.view(value.dtype).view(value.shape))


def _finish(work: Any, tensor: Tensor, wait: Wait) -> None:
    """Wait for a collective. On CUDA the stream waits, not the host."""
    if tensor.is_cuda:
        work.wait()
    else:
        wait(work)


def _buckets(grads: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for grad in grads:
        if bucket and (size >= BUCKET_BYTES or grad.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(grad)
        size += grad.numel() * grad.element_size()
    if bucket:
        yield bucket


def clip_global_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    group: dist.ProcessGroup | None,
    wait: Wait,
) -> Tensor:
    """Scale gradients so that their 2-norm over all stages is at most ``max_norm``.

    Returns the norm before scaling (0-dim float32), bitwise equal on all stages: every rank adds
    the stages' squares in stage order, in float64.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    grads = [p.grad for p in with_grad if p.grad is not None]
    mine = torch.zeros(1, dtype=torch.float64)
    if grads:
        mine[0] = torch.nn.utils.get_total_norm(grads).double().cpu() ** 2
    squares = [mine]
    if group is not None:
        squares = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        wait(dist.all_gather(squares, mine, group=group, async_op=True))
    total = torch.stack(squares).sum().sqrt().float()
    if grads:
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, total.to(grads[0].device))
    return total
