"""Times of ops on a GPU: those of the kernels that an op launched.

The processor runs ahead of the GPU, and a wait for a message returns at once there. So an op begins
with the first and ends with the last kernel whose launch lies in the op, and a message is complete
when its kernel ends. A kernel of a message also runs while it waits for the other rank.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from pipemorph.diagnose.formats.torch_profiler.compute_ops import ComputeOp
from pipemorph.diagnose.formats.torch_profiler.messages import TracedMessage
from pipemorph.diagnose.formats.torch_profiler.rank_trace import RankTrace

_COLLECTIVE = re.compile(r"^(?:nccl|rccl|ncclDevKernel)", re.IGNORECASE)
_MESSAGE = re.compile(r"SendRecv", re.IGNORECASE)


class _ComputeKernels(NamedTuple):
    """Times of kernels that compute, in order of their launches."""

    launches: array[float]
    begins: array[float]
    ends: array[float]


def move_to_gpu(
    trace: RankTrace, ops: Sequence[ComputeOp], messages: Sequence[TracedMessage]
) -> list[ComputeOp]:
    """Set the times of ops and messages to those of their kernels. Return the ops that launched
    kernels; the others took no time of the GPU."""
    computing = _ComputeKernels(array("d"), array("d"), array("d"))
    exchanging = []
    for kernel in trace.kernels:
        if not _COLLECTIVE.match(kernel.name):
            computing.launches.append(kernel.launch)
            computing.begins.append(kernel.begin)
            computing.ends.append(kernel.end)
        if _MESSAGE.search(kernel.name):
            exchanging.append(kernel)
    launches = [kernel.launch for kernel in exchanging]
    for message in messages:
        # The kernel of a batch is launched once all its messages are issued.
        place = bisect_left(launches, message.posted)
        if place < len(launches):
            kernel = exchanging[place]
            message.posted = message.issued = message.waited = kernel.begin
            message.complete = kernel.end
    return [op for op in ops if _move_op(op, computing)]


def _move_op(op: ComputeOp, kernels: _ComputeKernels) -> bool:
    first = bisect_left(kernels.launches, op.begin)
    last = bisect_right(kernels.launches, op.end)
    if first == last:
        return False
    op.begin = min(kernels.begins[first:last])
    op.end = max(kernels.ends[first:last])
    return True
