"""Schedules as tests write them: ``"F0 F1 B0 W0 B1 W1"``, in any order, valid or not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipemorph.planning.ir import Op, OpKind, Schedule

_TOKEN = re.compile(r"(F|BW|B|W)(\d+)")


def ops_of(text: str) -> tuple[Op, ...]:
    ops = []
    for token in text.split():
        match = _TOKEN.fullmatch(token)
        assert match is not None, token
        ops.append(Op(OpKind(match.group(1)), int(match.group(2))))
    return tuple(ops)


def schedule_of(microbatches: int, stages: Sequence[str]) -> Schedule:
    return Schedule(microbatches, tuple(map(ops_of, stages)))
