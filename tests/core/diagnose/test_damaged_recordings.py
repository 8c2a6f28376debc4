"""Damaged recordings: each is diagnosed, or refused in a line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from op_traces import PlayedJob, make_table

from pipemorph.diagnose.diagnosis import diagnose
from pipemorph.diagnose.diagnosis_json import diagnosis_to_json
from pipemorph.diagnose.diagnosis_text import format_diagnosis
from pipemorph.diagnose.formats.registry import Recording
from pipemorph.diagnose.operation import OPTYPES, Operation
from pipemorph.errors import InputError
from pipemorph.planning.ir import Policy

Ops = list[Operation]
JOBS = (
    PlayedJob(2, 4, 4, 3, Policy.GPIPE),
    PlayedJob(1, 2, 4, 3, Policy.ONE_F_ONE_B),
    PlayedJob(2, 3, 4, 3, Policy.ZERO_BUBBLE),
    PlayedJob(1, 4, 4, 3, Policy.ZERO_BUBBLE_V, 2),
)


def change_one(ops: Ops, draw: random.Random, **fields: object) -> Ops:
    ops = list(ops)
    at = draw.randrange(len(ops))
    ops[at] = ops[at]._replace(**fields)  # type: ignore[arg-type]
    return ops


def drop_type(ops: Ops, draw: random.Random) -> Ops:
    name = draw.choice(OPTYPES)
    return [op for op in ops if op.optype != name]


def empty_half(ops: Ops, draw: random.Random) -> Ops:
    return [op._replace(duration=0.0) if draw.random() < 0.5 else op for op in ops]


DAMAGES: tuple[Callable[[Ops, random.Random], Ops], ...] = (
    drop_type,
    empty_half,
    lambda ops, draw: [op for op in ops if draw.random() > 0.02],
    lambda ops, draw: change_one(ops, draw, microbatch=draw.randint(-1, 6)),
    lambda ops, draw: change_one(ops, draw, optype=draw.choice(OPTYPES)),
    lambda ops, draw: change_one(ops, draw, start=draw.uniform(0, 2)),
    lambda ops, draw: [op._replace(global_chunk=-1, microbatch=-1) for op in ops],
    lambda ops, draw: [op._replace(posted=None, waited=None) for op in ops],
    lambda ops, draw: [op for op in ops if op.step or op.stage],
    lambda ops, draw: ops + ops[: draw.randint(1, 5)],
)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: str(job.policy))
def test_damaged_recordings(job: PlayedJob) -> None:
    whole = list(job.operations())
    outcomes = set()
    for seed in range(25):
        draw = random.Random(seed)
        ops = whole
        for damage in draw.sample(DAMAGES, draw.randint(1, 3)):
            ops = damage(ops, draw)
        try:
            found = diagnose(Recording(make_table(ops), "tables", []))
        except InputError as error:
            assert "\n" not in str(error)
            outcomes.add("refused")
            continue
        assert json.dumps(diagnosis_to_json(found), allow_nan=False) and format_diagnosis(found)
        outcomes.add("diagnosed")
    assert outcomes == {"refused", "diagnosed"}
