"""Ops and copies with their times."""

from __future__ import annotations

from typing import NamedTuple

from pipemorph.planning.ir import OpKind


class TimedOp(NamedTuple):
    """One op that ran. Wall-clock seconds."""

    kind: OpKind
    microbatch: int
    start: float
    end: float


class TimedCopy(NamedTuple):
    """A copy of activations to host memory, as part of an F, or back, as part of a B or BW; or
    (``again``) a forward that ran again in place of the copy back. Wall-clock seconds. On CUDA the
    time on the compute stream: none for a copy on a side stream."""

    kind: OpKind
    microbatch: int
    start: float
    end: float
    nbytes: int
    again: bool = False

    @property
    def out(self) -> bool:
        return self.kind is OpKind.F
