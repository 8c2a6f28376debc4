"""Ops and copies that ran, with when."""

from __future__ import annotations

from typing import NamedTuple

from pipemorph.planning.ir import OpKind


class TimedOp(NamedTuple):
    """One op that ran; wall-clock seconds."""

    kind: OpKind
    microbatch: int
    start: float
    end: float


class TimedCopy(NamedTuple):
    """Activations on their way to host memory, as part of an F, or back, as part of a B or BW;
    wall-clock seconds. On CUDA those of the compute stream: nothing for a way out beside it."""

    kind: OpKind
    microbatch: int
    start: float
    end: float
    nbytes: int

    @property
    def out(self) -> bool:
        return self.kind is OpKind.F
