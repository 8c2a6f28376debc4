"""Whole jobs whose plans run forwards again: same bits, traced, and refused where they cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import same_bits
from launch import Ranks, run_ranks
from pairwise import parametrize_product
from test_offload_pipeline import expected_copies
from torch import Tensor
from trainer_jobs import Job, Record, assert_same, make_plan, reference, train

from pipemorph.planning import Plan
from pipemorph_trainer import EmulatedStage, Options, Part, Pipeline, TrainerContext
from pipemorph_trainer.examples.gpt import Arguments, GPTStage, loss_fn

AUTO = {"recompute": "auto"}


def recomputing(plan: Plan) -> Plan:
    """The plan whose stages with a device limit recompute instead of offloading."""
    return replace(plan, recompute=tuple(limit is not None for limit in plan.device_limits))


@pytest.mark.parametrize(
    ("policy", "dispatch"),
    parametrize_product(["zero-bubble", "1f1b"], ["guided", "static"], test=1, full=2),
)
def test_results_are_those_without(policy: str, dispatch: str) -> None:
    """Also of iterations before and after, since a plan begins and ends at a boundary."""
    job = Job(3, 6, policy=policy, iterations=8, extra=AUTO)
    warmup = (6, 5, 3) if policy == "zero-bubble" else None

    def made(version: int, limit: int | None) -> Plan:
        return make_plan(job, version, policy, dispatch=dispatch, warmup=warmup, device_limit=limit)

    drops = recomputing(made(1, 2))
    assert expected_copies(drops, 0) > 0
    everywhere = range(3)
    switches = ((1, drops, everywhere), (4, made(2, None), everywhere))
    records: list[Record] = run_ranks(3, train, job.with_(switches=switches))
    assert_same(records, reference(Job(3, 6, iterations=8)))
    for record in records:
        assert 1 in record.versions and record.versions[-1] == 2
        assert not any(record.offloaded), "nothing goes to host memory"
        for profile in record.profiles:
            assert profile.activation_bytes and profile.input_bytes is not None


def gpt(context: TrainerContext, plan: Plan, autocast: bool) -> list[Any]:
    """Two iterations of the example's model with dropout: losses and all gradients."""
    arguments = Arguments(width=32, heads=2, sequence=16, microbatch_size=2)
    torch.manual_seed(7 + context.rank)
    module = GPTStage(arguments, Part(context.rank, context.world_size), context.world_size)
    first = module.forward

    def forward(*args: Any) -> Any:
        out = first(*args)
        return torch.nn.functional.dropout(out, 0.2) if isinstance(out, Tensor) else out

    module.forward = forward  # type: ignore[method-assign]
    found: list[Any] = []
    with Pipeline(
        module,
        context=context,
        loss_fn=loss_fn,
        plan=plan,
        options=Options(route="direct"),
        recompute="auto",
    ) as pipe:
        for iteration in range(2):
            tokens = torch.randint(
                0, 256, (12, 17), generator=torch.Generator().manual_seed(iteration)
            )
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found.append(pipe.step(tokens[:, :-1], target=tokens[:, 1:].contiguous()))
            found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
            module.zero_grad()
    return found


@pytest.mark.parametrize(
    "autocast",
    [pytest.param(False, marks=pytest.mark.soak), pytest.param(True, marks=pytest.mark.full)],
)
def test_the_gpt_example_with_dropout(autocast: bool) -> None:
    job = Job(2, 6)
    plain = make_plan(job, 0, "zero-bubble", warmup=(6, 4))
    drops = recomputing(make_plan(job, 0, "zero-bubble", warmup=(6, 4), device_limit=2))
    want = run_ranks(2, gpt, plain, autocast)
    got = run_ranks(2, gpt, drops, autocast)
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(a, Tensor):
                same_bits(a, b)
                continue
            assert len(a) == len(b) > 10
            for x, y in zip(a, b, strict=True):
                same_bits(x, y)


def test_a_plan_is_refused_where_the_job_must_not() -> None:
    job = Job(2, 4)
    drops = recomputing(make_plan(job, 3, "gpipe", device_limit=2))
    for result in Ranks(2, train, job.with_(initial=drops)).wait():
        assert result.exitcode == 1
        assert "plan 3 runs forwards of stage" in result.error
        assert "give schedule.recompute auto" in result.error


def emulated(context: TrainerContext, plan: Plan) -> list[float]:
    stage = EmulatedStage(0.01, 0.004, 0.004, 64, activation_bytes=1000, input_bytes=100)
    with Pipeline(stage, context=context, plan=plan, recompute="auto") as pipe:
        return [float(pipe.step()) for _ in range(3)]


@pytest.mark.full
def test_forwards_that_run_again_take_their_time_and_are_traced(tmp_path: Path) -> None:
    job = Job(2, 6)
    drops = recomputing(make_plan(job, 0, "gpipe", device_limit=2))
    plain = make_plan(job, 0, "gpipe")
    again = run_ranks(2, emulated, drops, context={"trace_dir": tmp_path})
    assert again == run_ranks(2, emulated, plain)
    for rank in range(2):
        text = (tmp_path / f"ops-rank{rank}.jsonl").read_text()
        for line in map(json.loads, text.splitlines()):
            runs = line["copies"]
            assert {run[0] for run in runs} == {"again"}
            assert len(runs) == expected_copies(drops, rank) > 2
            spans = {(kind, m): (start, end) for kind, m, start, end in line["ops"]}
            for _, m, start, end, _ in runs:
                assert end - start >= 0.0075
                assert spans["BW", m][0] <= start and end <= spans["BW", m][1]
