"""Whole jobs whose plans move activations to host memory or run forwards again: same bits, counted,
traced, and refused where they cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gate import same_bits
from launch import Ranks, run_ranks
from pairwise import give_tiers, parametrize_product
from torch import Tensor
from trainer_jobs import Job, Record, assert_same, make_plan, reference, train

from pipemorph.planning import Plan
from pipemorph.planning.offload import find_copying_ops
from pipemorph_trainer import EmulatedStage, ModelShard, Options, Pipeline, TrainerContext
from pipemorph_trainer.examples.gpt import GPTArguments, GPTStage, loss_fn

PLENTY = 1 << 30


def expected_copies(plan: Plan, stage: int) -> int:
    """Microbatches that go to host memory in a fixed order."""
    ops = plan.schedule.stages[stage]
    return sum(find_copying_ops(ops, plan.device_limits[stage])) // 2


@pytest.mark.parametrize(
    ("policy", "dispatch"),
    parametrize_product(["zero-bubble", "1f1b", "gpipe"], ["static", "guided"], test=1, full=2),
)
def test_results_are_those_without(policy: str, dispatch: str) -> None:
    job = Job(3, 6, policy=policy, host_memory=PLENTY)
    warmup = (6, 5, 3) if policy == "zero-bubble" else None
    offloads = make_plan(job, 0, policy, dispatch=dispatch, warmup=warmup, device_limit=2)
    assert expected_copies(offloads, 0) > 0
    records: list[Record] = run_ranks(3, train, job.with_(initial=offloads))
    assert_same(records, reference(Job(3, 6)))
    for stage, record in enumerate(records):
        copies = expected_copies(offloads, stage)
        for index, copied in enumerate(record.offloaded):
            if dispatch == "static":
                assert (copied.microbatches if copied else 0) == copies, (stage, index)
            if copied is not None:
                assert 0 < copied.bytes // copied.microbatches <= copied.host_bytes
                assert copied.seconds > 0
        assert any(record.offloaded) or not copies
        for profile in record.profiles:
            assert profile.activation_bytes and profile.offload_copy
    # Every tensor of a microbatch went, in every iteration alike, and nothing else held one now
    # and then, as the link that brought it might. Besides what is saved goes an input of 4 bytes
    # that the stage does not use; the number of microbatches, 8 bytes, stays.
    for stage, record in enumerate(records[1:]) if dispatch == "static" else ():
        for profile, copied in zip(record.profiles, record.offloaded, strict=True):
            one = profile.activation_bytes + 4 - 8 * stage
            assert copied is None or copied.bytes == copied.microbatches * one


def gpt(
    context: TrainerContext, plan: Plan, dropout: float, autocast: bool, **more: Any
) -> list[Tensor]:
    """Train the example's model for two iterations: losses and all gradients."""
    arguments = GPTArguments(width=32, heads=2, sequence=16, microbatch_size=2)
    torch.manual_seed(7 + context.rank)
    module = GPTStage(arguments, ModelShard(context.rank, context.world_size), context.world_size)
    first = module.forward

    def forward(*args: Any) -> Any:
        out = first(*args)
        return torch.nn.functional.dropout(out, dropout) if isinstance(out, Tensor) else out

    module.forward = forward
    found: list[Tensor] = []
    with Pipeline(module, context=context, loss_fn=loss_fn, plan=plan, **more) as pipe:
        for iteration in range(2):
            draw = torch.Generator().manual_seed(iteration)
            tokens = torch.randint(0, 256, (12, 17), generator=draw)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = pipe.step(tokens[:, :-1], target=tokens[:, 1:].contiguous())
            gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
            assert len(gradients) > 10
            found += [loss, *gradients]
            module.zero_grad()
    return found


def assert_same_training(
    plan: Plan, plain: Plan, *, dropout: float = 0.0, autocast: bool = False, **more: Any
) -> None:
    """Compare the example trained with ``plan``, whose ranks get ``more``, and without."""
    direct = Options(route="direct")
    want = run_ranks(2, partial(gpt, options=direct), plain, dropout, autocast)
    got = run_ranks(2, partial(gpt, **{"options": direct} | more), plan, dropout, autocast)
    for mine, theirs in zip(got, want, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("dispatch", give_tiers([("guided",), ("static",)], test=0, full=1))
def test_the_gpt_example(dispatch: str) -> None:
    job, warmup = Job(2, 6), (6, 4)
    plain = make_plan(job, 0, "zero-bubble", dispatch=dispatch, warmup=warmup)
    offloads = make_plan(job, 0, "zero-bubble", dispatch=dispatch, warmup=warmup, device_limit=2)
    options = Options(route="direct", host_memory=PLENTY)
    assert_same_training(offloads, plain, options=options)


@pytest.mark.parametrize(
    ("recomputes", "does", "give"),
    [
        (False, "moves activations of stage", "give adaptation.allowOffload and hostMemory"),
        (True, "runs forwards of stage", "set schedule.recompute: auto"),
    ],
)
def test_a_plan_is_refused_where_the_job_must_not(recomputes: bool, does: str, give: str) -> None:
    job = Job(2, 4)
    made = make_plan(job, 3, "gpipe", device_limit=2)
    made = recomputing(made) if recomputes else made
    for result in Ranks(2, train, job.with_(initial=made)).wait():
        assert result.exitcode == 1
        assert f"plan 3 {does}" in result.error
        assert give in result.error


def test_too_little_host_memory_is_said_in_the_first_iteration() -> None:
    job = Job(2, 4, host_memory=100)
    offloads = make_plan(job, 0, "gpipe", device_limit=2)
    errors = [r.error for r in Ranks(2, train, job.with_(initial=offloads)).wait()]
    assert any("PipelineError: host memory for activations" in error for error in errors)


def emulated(context: TrainerContext, plan: Plan, copy: float) -> list[float]:
    stage = EmulatedStage(0.004, 0.004, 0.004, 64, offload_copy=copy, activation_bytes=1000)
    with Pipeline(stage, context=context, plan=plan, options=Options(host_memory=PLENTY)) as pipe:
        return [float(pipe.step()) for _ in range(3)]


@pytest.mark.full
def test_emulated_copies_take_their_time_and_are_traced(tmp_path: Path) -> None:
    job = Job(2, 6)
    offloads = make_plan(job, 0, "gpipe", device_limit=2)
    plain = make_plan(job, 0, "gpipe")
    settings = {"trace_dir": tmp_path}
    with_copies = run_ranks(2, emulated, offloads, 0.01, context=settings)
    assert with_copies == run_ranks(2, emulated, plain, 0.01)
    for rank in range(2):
        text = (tmp_path / f"ops-rank{rank}.jsonl").read_text()
        for line in map(json.loads, text.splitlines()):
            assert line["emulated"]
            copies = line["copies"]
            there = [copy for copy in copies if copy[0] == "out"]
            assert len(copies) == 2 * len(there) == 2 * expected_copies(offloads, rank) > 4
            assert all(nbytes == 1000 for *_, nbytes in copies)
            # At most two ran over by the scheduler of a busy machine; none was shorter.
            assert all(end - start >= 0.0075 for _, _, start, end, _ in copies)
            spans = {(kind, m): (start, end) for kind, m, start, end in line["ops"]}
            for direction, m, start, end, _ in copies:
                op = spans["F" if direction == "out" else "BW", m]
                assert op[0] <= start and end <= op[1]
                assert op[1] - op[0] >= 0.011


# --- forwards that run again ---------------------------------------------------------------------


def recomputing(plan: Plan) -> Plan:
    """The plan whose stages with a device limit recompute instead of offloading."""
    return replace(plan, recompute=tuple(limit is not None for limit in plan.device_limits))


@pytest.mark.parametrize(
    ("policy", "dispatch"),
    parametrize_product(["zero-bubble", "1f1b"], ["guided", "static"], test=1, full=2),
)
def test_results_are_those_without_recomputation(policy: str, dispatch: str) -> None:
    """Iterations before and after agree, too, since a plan begins and ends at a boundary."""
    job = Job(3, 6, policy=policy, iterations=8, extra={"recompute": "auto"})
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


@pytest.mark.parametrize(
    "autocast",
    [pytest.param(False, marks=pytest.mark.soak), pytest.param(True, marks=pytest.mark.full)],
)
def test_the_gpt_example_with_dropout(autocast: bool) -> None:
    job = Job(2, 6)
    plain = make_plan(job, 0, "zero-bubble", warmup=(6, 4))
    drops = recomputing(make_plan(job, 0, "zero-bubble", warmup=(6, 4), device_limit=2))
    assert_same_training(drops, plain, dropout=0.2, autocast=autocast, recompute="auto")


def recomputing_stage(context: TrainerContext, plan: Plan) -> list[float]:
    stage = EmulatedStage(0.01, 0.004, 0.004, 64, activation_bytes=1000, input_bytes=100)
    with Pipeline(stage, context=context, plan=plan, recompute="auto") as pipe:
        return [float(pipe.step()) for _ in range(3)]


@pytest.mark.full
def test_forwards_that_run_again_take_their_time_and_are_traced(tmp_path: Path) -> None:
    job = Job(2, 6)
    drops = recomputing(make_plan(job, 0, "gpipe", device_limit=2))
    plain = make_plan(job, 0, "gpipe")
    again = run_ranks(2, recomputing_stage, drops, context={"trace_dir": tmp_path})
    assert again == run_ranks(2, recomputing_stage, plain)
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
