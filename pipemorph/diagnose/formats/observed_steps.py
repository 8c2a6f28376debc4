"""Steps that the ranks of an observed job report live, as operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipemorph.detection.observed_steps import AlignedStep
from pipemorph.diagnose.adapting import predict_adapting
from pipemorph.diagnose.operation import (
    BACKWARD,
    BACKWARD_RECV,
    BACKWARD_SEND,
    DATA,
    FORWARD,
    FORWARD_RECV,
    FORWARD_SEND,
    OPTIMIZER,
    REDUCE_SCATTER,
    WEIGHT,
    Operation,
)
from pipemorph.planning.ir import OpKind
from pipemorph.spec.mesh import MeshShape

_OPTYPES = {OpKind.F: FORWARD, OpKind.B: BACKWARD, OpKind.BW: BACKWARD, OpKind.W: WEIGHT}
_SENDS = {"F": FORWARD_SEND, "B": BACKWARD_SEND}
_RECEIVES = {"F": FORWARD_RECV, "B": BACKWARD_RECV}


def list_operations(
    mesh: MeshShape, steps: Sequence[Mapping[int, AlignedStep]], schedule: str
) -> Iterator[Operation]:
    """Operations of steps, each with the steps of all ranks by their number in ``mesh``, by the
    host's clock. ``schedule``: framework and schedule of the job."""
    for ranks in steps:
        for rank, aligned in ranks.items():
            yield from _list_rank_operations(mesh, rank, aligned, schedule)


def _list_rank_operations(
    mesh: MeshShape, rank: int, aligned: AlignedStep, schedule: str
) -> Iterator[Operation]:
    step, shift = aligned.step, aligned.shift
    replica = mesh.find_coordinate(rank).column

    def make(optype: str, start: float, end: float, stage: int, **more: float | int) -> Operation:
        return Operation(
            step.step, replica, mesh.pp_indices[stage], rank, optype, start, max(0.0, end - start),
            -1, schedule=schedule, **more,  # type: ignore[arg-type]
        )  # fmt: skip

    for chunk, observed in enumerate(sorted(step.stages, key=lambda each: each.ops.stage)):
        stage, origin = observed.ops.stage, observed.ops.origin + shift
        ids = {"model_chunk": chunk, "global_chunk": stage}
        for op in observed.ops.ops:
            times = op.start + shift, op.end + shift
            yield make(_OPTYPES[op.kind], *times, stage, microbatch=op.microbatch, **ids)
        for kind, microbatch, at in observed.sends:
            sent = origin + at / 1e6
            yield make(_SENDS[kind], sent, sent, stage, microbatch=microbatch, **ids)
        for kind, microbatch, *moments in observed.receives:
            posted, waited, end = (origin + at / 1e6 for at in moments)
            yield make(
                _RECEIVES[kind], posted, end, stage, microbatch=microbatch, posted=posted,
                waited=waited, **ids,
            )  # fmt: skip
        if (outside := observed.ops.rank_times) is not None:
            last = max(each.ops.ops[-1].end for each in step.stages) + shift
            if stage == 0:
                # Other stages may wait for the end of stage 0's step, as in a barrier.
                yield make(DATA, origin - outside.data, origin, stage)
            if outside.reduction is not None:
                yield make(REDUCE_SCATTER, last, last + outside.reduction, stage)
            last += outside.reduction or 0.0
            yield make(OPTIMIZER, last, last + outside.optimizer, stage)


def predict_observed(
    mesh: MeshShape, steps: Sequence[Mapping[int, AlignedStep]], schedule: str
) -> dict[str, Any]:
    """Predict what adapting would give: fields of an
    :class:`~pipemorph.diagnose.adapting.AdaptingPrediction`. Raises
    :class:`~pipemorph.errors.InputError` if there is no whole step of a pipeline."""
    return predict_adapting(list_operations(mesh, steps, schedule))._asdict()
