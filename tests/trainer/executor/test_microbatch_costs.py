"""Costs of microbatches: what is refused, and what every stage gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gate import same_bits
from launch import run_ranks
from trainer_jobs import Record, RecordingClient, loss_fn, make_batch, make_stage

from pipemorph.errors import InputError
from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.executor.microbatch_costs import MOST_COSTS, compute_costs, read_costs
from pipemorph_trainer.transport.control_socket import StepToken

N = 4
ITERATIONS = 4


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        (3.0, "costs is a float; expected 4 numbers, one per microbatch"),
        ("1234", "costs is a str; expected 4 numbers"),
        ([1, 2, 3], "costs has 3 numbers; expected 4, one per microbatch"),
        (torch.ones(2, 2), "costs has 2 numbers; expected 4"),
        ([1, 2, -1, 4], r"costs\[2\] is -1; expected a number from 0 to 1e\+30"),
        ([1, float("nan"), 1, 4], r"costs\[1\] is nan; expected a number from 0"),
        ([1, 1, 1, float("inf")], r"costs\[3\] is inf; expected a number from 0"),
        ([None, 1, 1, 1], r"costs\[0\] is None; expected a number from 0"),
        ([[1, 2], 1, 1, 1], r"costs\[0\] is \[1, 2\]; expected a number from 0"),
        ([0, 0.0, 0, 0], "costs are all 0; expected at least one above 0"),
    ],
)
def test_costs_that_are_none(costs: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_costs(costs, N)


def test_costs_of_many_types() -> None:
    for costs in ([1, 0, 2.5, 3], (1.0, 0.0, 2.5, 3.0), torch.tensor([1, 0, 2.5, 3])):
        assert read_costs(costs, N) == (1.0, 0.0, 2.5, 3.0)
    with pytest.raises(InputError, match="costs are for at most 4096 microbatches"):
        read_costs([1.0] * (MOST_COSTS + 1), MOST_COSTS + 1)


def test_costs_of_a_function() -> None:
    args = [(torch.ones(k + 1),) for k in range(N)]

    def count(tokens: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return scale * tokens.sum()

    assert compute_costs(count, args, (), N) == (1.0, 2.0, 3.0, 4.0)
    assert compute_costs(count, args, [{"scale": 2.0}] * N, N) == (2.0, 4.0, 6.0, 8.0)
    with pytest.raises(InputError, match=r"cost_fn raised TypeError: .* for microbatch 0"):
        compute_costs(count, (), (), N)
    with pytest.raises(InputError, match=r"the results of cost_fn\[0\] is None; expected a number"):
        compute_costs(lambda tokens: None, args, (), N)


@pytest.mark.parametrize("costs", [(), (1.5, 0.0, 1e30)])
def test_a_token_carries_costs(costs: tuple[float, ...]) -> None:
    token = StepToken(7, 3, 1, True, False, 0xFFFFFFFF, costs)
    assert StepToken.unpack(token.pack()) == token


def train(context: TrainerContext, *, given: str) -> Record:
    """Iterations whose costs are ``given`` by the script, by a function, or not at all."""
    stage = context.coordinate(2).stage
    record, module = Record(), make_stage(stage, 2, torch.float32)
    options = Options(
        control=RecordingClient(record),
        cost_fn=None if given != "function" else lambda tokens: float(tokens[0, 0]) + 1,
    )
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=N, stages=2, options=options
    ) as pipe:
        for iteration in range(ITERATIONS):
            tokens, target = make_batch(iteration, N)
            costs = (tokens[:, 0] + 1) if given == "script" and stage == 0 else None
            record.losses.append(pipe.step(tokens, target=target, costs=costs))
    record.parameters = {
        name: p.grad for name, p in module.named_parameters() if p.grad is not None
    }
    return record


def entry(context: TrainerContext) -> list[float | None]:
    """Train with and without costs. Returns the costs in the last profiles."""
    plain = train(context, given="")
    assert all(profile.cost is None for profile in plain.profiles)
    found = []
    for given in ("script", "function"):
        record = train(context, given=given)
        for mine, theirs in zip(record.losses, plain.losses, strict=True):
            same_bits(mine, theirs, "loss")
        for name, grad in record.parameters.items():
            same_bits(grad, plain.parameters[name], name)
        found.append(record.profiles[-1].cost)
    return found


def test_every_stage_gets_the_costs_of_stage_0() -> None:
    """Costs change nothing else by default, to the bit."""
    tokens, _ = make_batch(ITERATIONS - 1, N)
    wanted = float(tokens[:, 0].double().mean()) + 1
    for rank, found in enumerate(run_ranks(2, entry)):
        assert found == [pytest.approx(wanted)] * 2, rank
