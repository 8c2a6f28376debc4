"""Operation: one row of an op table, the form that every trace is read into.

Op types are those of the published study of stragglers, and three more. See
``docs/reference/op-table.md``.
"""

from __future__ import annotations

from typing import NamedTuple

FORWARD, BACKWARD, WEIGHT = "forward-compute", "backward-compute", "backward-weight"
"""Compute ops. ``backward-compute`` is the whole backward, or, in a step whose trace has
``backward-weight`` for the same microbatch and chunk, the gradient of the input alone."""
LOSS, DATA, GC, CHECKPOINT = "loss", "data", "gc", "checkpoint"
FORWARD_SEND, FORWARD_RECV = "forward-send", "forward-recv"
BACKWARD_SEND, BACKWARD_RECV = "backward-send", "backward-recv"
ALL_GATHER, REDUCE_SCATTER = "params-all-gather", "grads-reduce-scatter"
EMBEDDING_REDUCE, NORM_REDUCE = "embedding-grads-all-reduce", "layernorm-grads-all-reduce"
CLIP, OPTIMIZER = "optimizer-clip-main-grad", "optimizer"

COMPUTE = (FORWARD, BACKWARD, WEIGHT)
TRANSFERS = (FORWARD_SEND, FORWARD_RECV, BACKWARD_SEND, BACKWARD_RECV)
OPTYPES = (
    *COMPUTE, LOSS, DATA, GC, *TRANSFERS, ALL_GATHER, REDUCE_SCATTER, EMBEDDING_REDUCE,
    NORM_REDUCE, CLIP, OPTIMIZER, CHECKPOINT,
)  # fmt: skip
"""All op types, by which rows store them."""


class Operation(NamedTuple):
    """An op of a worker in a step. Times in seconds, by one clock within a step.

    ``stage``: pipeline rank; ``rank``: global rank of the worker, of its tensor rank 0. ``seq_id``:
    number of the op among those of its type, step and worker, in their order. ``model_chunk``:
    chunk within the rank, ``global_chunk``: within the whole model, from the input on, and
    ``microbatch``; -1 where there is none.

    ``bytes``: size of a send or receive, -1 if unknown.

    A receive includes its waiting. It may say when it was ``posted``, when its worker began to wait
    for it (``waited``) and when the data were there (``completed``); None where the trace has no
    such time. ``schedule``: framework and schedule of the job, such as ``torch Schedule1F1B``, on
    some of its ops.
    """

    step: int
    dp_rank: int
    stage: int
    rank: int
    optype: str
    start: float
    duration: float
    seq_id: int
    model_chunk: int = -1
    global_chunk: int = -1
    microbatch: int = -1
    posted: float | None = None
    waited: float | None = None
    completed: float | None = None
    schedule: str = ""
    bytes: int = -1

    @property
    def end(self) -> float:
        return self.start + self.duration
