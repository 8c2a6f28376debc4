"""Gradients across ranks: the mean over replicas and the norm over all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 << 20
Wait = Callable[[Any], None]
"""Waits for a collective on CPU tensors, with a deadline and a name."""


def average_over_replicas(
    parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, wait: Wait
) -> None:
    """Replace every ``.grad`` by its mean over the replicas, the same to the bit on each.

    Gradients travel in flat buckets, in the order of the parameters. A parameter that has no
    gradient on any replica keeps none; where only some replicas used it, the others count
    as zero.
    """
    size = dist.get_world_size(group)
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        return
    used = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32)
    wait(dist.all_reduce(used, group=group, async_op=True))
    for parameter, count in zip(trainable, used.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets(p.grad for p in trainable if p.grad is not None):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        work: Any = dist.all_reduce(flat, group=group, async_op=True)
        # On CUDA the stream waits, not the host.
        if flat.is_cuda:
            work.wait()
        else:
            wait(work)
        flat /= size
        offset = 0
        for grad in bucket:
            grad.copy_(flat[offset : offset + grad.numel()].view_as(grad))
            offset += grad.numel()


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
    parameters: Iterable[nn.Parameter], max_norm: float, group: dist.ProcessGroup, wait: Wait
) -> Tensor:
    """Scale gradients so that their 2-norm over all stages is at most ``max_norm``.

    Returns the norm before scaling (0-dim float32), the same to the bit on all stages: every
    rank adds the stages' squares in stage order, in float64.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    grads = [p.grad for p in with_grad if p.grad is not None]
    mine = torch.zeros(1, dtype=torch.float64)
    if grads:
        mine[0] = torch.nn.utils.get_total_norm(grads).double().cpu() ** 2
    squares = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    wait(dist.all_gather(squares, mine, group=group, async_op=True))
    total = torch.stack(squares).sum().sqrt().float()
    if grads:
        torch.nn.utils.clip_grads_with_norm_(with_grad, max_norm, total.to(grads[0].device))
    return total
