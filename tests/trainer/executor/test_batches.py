"""Batches: as microbatches, and with what counts in the mean."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gate import same_bits
from launch import run_ranks
from torch import Tensor, nn
from trainer_jobs import make_batch, make_stage

from pipemorph.errors import InputError
from pipemorph.spec.mesh import MeshShape
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.errors import BatchError
from pipemorph_trainer.executor.inputs import (
    StepArguments,
    check_shared_graphs,
    select_stage_inputs,
    split_batch,
)
from pipemorph_trainer.executor.stage_executor import MicrobatchInputs

N, STAGES, PADDING = 4, 2, -100


def sum_of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        output.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum"
    )


def padded(replica: int) -> tuple[Tensor, Tensor]:
    """Train with few tokens that count in replica 1, and none in its first microbatch."""
    tokens, target = make_batch(replica, 2 * N)
    target[0, 1:] = PADDING
    if replica:
        target[:2] = PADDING
        target[3:, :2] = PADDING
    return tokens, target


def weighted(context: TrainerContext, world: int) -> Any:
    place = context.coordinate(STAGES)
    stage, replica = place.stage, place.replica
    module = make_stage(stage, STAGES, torch.float32)
    tokens, target = padded(replica)
    counts = target != PADDING
    with Pipeline(
        module, context=context, loss_fn=sum_of_tokens, microbatches=N, stages=STAGES,
        deadline_seconds=30.0,
    ) as pipe:  # fmt: skip
        evaluated = pipe.evaluate(tokens, target=target, weight=counts)
        again = pipe.evaluate(tokens, target=target, weight=int(counts.sum()))
        for rank in {world // STAGES, world - 1}:
            for wrong in (torch.zeros(1), math.inf, "many"):
                with pytest.raises(BatchError, match="is refused on all ranks: rank"):
                    pipe.step(
                        tokens, target=target, weight=wrong if rank == context.rank else counts
                    )
        loss = pipe.step(tokens, target=target, weight=counts)
    same_bits(evaluated, loss)
    same_bits(again, loss)
    return loss, {n: p.grad for n, p in module.named_parameters()}


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.full), 2])
def test_padding_counts_nothing(replicas: int) -> None:
    world = replicas * STAGES
    modules = [make_stage(stage, STAGES, torch.float32) for stage in range(STAGES)]
    batches = [padded(replica) for replica in range(replicas)]
    value: Any = (torch.cat([tokens for tokens, _ in batches]),)
    for module in modules:
        value = module(*value)
    expected = nn.functional.cross_entropy(
        value.flatten(0, 1), torch.cat([t for _, t in batches]).flatten(), ignore_index=PADDING
    )
    expected.backward()
    for rank, (loss, grads) in enumerate(run_ranks(world, weighted, world)):
        torch.testing.assert_close(loss, expected.detach())
        for name, parameter in modules[
            MeshShape(STAGES, world // STAGES).find_coordinate(rank).stage
        ].named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7)


def split_already(context: TrainerContext) -> None:
    module = make_stage(context.rank, STAGES, torch.float32)
    tokens, target = make_batch(0, 2 * N)
    x, y = tokens.chunk(N), target.chunk(N)
    named = [{"unused": float(k)} for k in range(N)]

    def grads() -> dict[str, Tensor]:
        found = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
        module.zero_grad()
        return found

    with Pipeline(
        module, context=context, loss_fn=sum_of_tokens, microbatches=N, deadline_seconds=30.0
    ) as pipe:
        loss = pipe.step(tokens, target=target)
        expected = grads()
        for parts in (
            {"arg_mbs": [(each,) for each in x], "target_mbs": list(y)},
            {"arg_mbs": x, "target": target, "kwarg_mbs": named if context.rank == 0 else None},
        ):
            same_bits(pipe.evaluate(**parts), loss)
            same_bits(pipe.step(**parts), loss)
            for name, value in grads().items():
                same_bits(value, expected[name], name)
        for wrong, error in (
            ({"arg_mbs": x[1:], "target": target}, "arg_mbs has 3 microbatches; expected 4"),
            ({"arg_mbs": x, "target_mbs": y[1:]}, "target_mbs has 3 microbatches; expected 4"),
            ({"arg_mbs": (*x[1:], x[0][:1]), "target_mbs": y}, "microbatch 3 has int64[1, 3]; ex"),
        ):
            with pytest.raises(BatchError) as refused:
                pipe.step(**wrong)
            assert error in str(refused.value)
        with pytest.raises(BatchError, match="got arg_mbs and the same as one batch"):
            pipe.step(tokens, arg_mbs=x, target=target)


def test_a_batch_may_be_split_already() -> None:
    run_ranks(STAGES, split_already)


def encoded(shared: bool) -> list[Tensor]:
    """Microbatches with a graph: one of all, or each its own."""
    encoder = nn.Linear(3, 3)
    x = torch.ones(2 * N, 3)
    if shared:
        return list(encoder(x).tanh().chunk(N))
    return [encoder(part).tanh() for part in x.chunk(N)]


@pytest.mark.parametrize("place", ["args", "kwargs", "targets", "nested"])
def test_inputs_with_one_graph_are_refused_before_anything_is_sent(place: str) -> None:
    def inputs(parts: list[Tensor]) -> MicrobatchInputs:
        given: dict[str, list[Any]] = {
            "args": [(part,) for part in parts],
            "kwargs": [{"mask": part} for part in parts],
            "targets": list(parts),
            "nested": [([{"a": part}],) for part in parts],
        }
        return MicrobatchInputs(**{"args" if place == "nested" else place: given[place]})

    with pytest.raises(InputError, match=r"0 and 1 come from one graph \(Tanh.*x\.detach"):
        check_shared_graphs("rank 0", inputs(encoded(shared=True)))
    # Shared graphs that free nothing, and separate graphs.
    leaf = torch.ones(2 * N, 3, requires_grad=True)
    for fine in (encoded(shared=False), leaf.chunk(N), (leaf + 1).view(N, 2, 3).unbind()):
        check_shared_graphs("rank 0", inputs(list(fine)))
    assert len(split_batch((leaf,), {}, N)[0]) == N


def refused(context: TrainerContext) -> list[str]:
    """Run two steps: one with a graph, which all ranks refuse, and one without."""
    module = make_stage(context.rank, STAGES, torch.float32)
    tokens, target = make_batch(0, 2 * N)
    scale = torch.ones(2 * N, 1, 1, requires_grad=True) * torch.tensor(2.0, requires_grad=True)
    errors = []
    with Pipeline(
        module, context=context, loss_fn=lambda out, y: (out * y[1]).sum(), microbatches=N
    ) as pipe:
        try:
            pipe.step(tokens, target=(target, scale.exp()))
        except BatchError as error:
            errors.append(str(error))
        pipe.evaluate(tokens, target=(target, scale))
        pipe.step(tokens, target=(target, scale.detach()))
    return errors


def test_all_ranks_refuse_a_step_with_such_inputs() -> None:
    for (error,) in run_ranks(STAGES, refused):
        assert "(stage 1): the inputs of microbatches 0 and 1 come from one graph" in error


def test_a_keyword_that_is_no_part_of_the_batch_is_said(caplog: pytest.LogCaptureFixture) -> None:
    place = MeshShape(STAGES).find_coordinate(0)
    for mask in (torch.ones(N, N), torch.ones(N, N), torch.ones(2 * N, 1), torch.ones(N, 2)):
        select_stage_inputs(
            place, N, StepArguments((torch.ones(2 * N, 3),), {"mask": mask}), needs_target=False
        )
    assert [record.getMessage() for record in caplog.records] == [
        f"keyword 'mask' has shape [4, {width}], which is not the batch's size; it is cut along"
        " dimension 0 into 4 parts. If every microbatch needs all of it, give kwarg_mbs"
        for width in (4, 2)
    ]
