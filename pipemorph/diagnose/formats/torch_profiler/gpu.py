"""Times of ops on a GPU: those of the kernels that an op launched.

The processor runs ahead of the GPU, and a wait for a message returns at once there. So an op begins
with the first and ends with the last kernel whose launch lies in the op, and a message is complete
when its kernel ends. A kernel of a message also runs while it waits for the other rank.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from pipemorph.diagnose.formats.torch_profiler.compute_ops import ComputeOp
from pipemorph.diagnose.formats.torch_profiler.messages import TracedMessage
from pipemorph.diagnose.formats.torch_profiler.rank_trace import Kernel, RankTrace

_COLLECTIVE = re.compile(r"^(?:nccl|rccl|ncclDevKernel)", re.IGNORECASE)
_MESSAGE = re.compile(r"SendRecv", re.IGNORECASE)


def move_to_gpu(
    trace: RankTrace, ops: Sequence[ComputeOp], messages: Sequence[TracedMessage]
) -> list[ComputeOp]:
    """Set the times of ops and messages to those of their kernels. Return the ops that launched
    kernels; the others took no time of the GPU."""
    by_launch = sorted(trace.kernels, key=lambda kernel: kernel.launch)
    computing = [kernel for kernel in by_launch if not _COLLECTIVE.match(kernel.name)]
    exchanging = [kernel for kernel in by_launch if _MESSAGE.search(kernel.name)]
    launches = [kernel.launch for kernel in exchanging]
    for message in messages:
        # The kernel of a batch is launched once all its messages are issued.
        place = bisect_left(launches, message.posted)
        if place < len(launches):
            kernel = exchanging[place]
            message.posted = message.issued = message.waited = kernel.begin
            message.complete = kernel.end
    return [op for op in ops if _move_op(op, computing)]


def _move_op(op: ComputeOp, kernels: Sequence[Kernel]) -> bool:
    first = bisect_left(kernels, op.begin, key=lambda kernel: kernel.launch)
    last = bisect_right(kernels, op.end, key=lambda kernel: kernel.launch)
    mine = kernels[first:last]
    if not mine:
        return False
    op.begin = min(kernel.begin for kernel in mine)
    op.end = max(kernel.end for kernel in mine)
    return True
