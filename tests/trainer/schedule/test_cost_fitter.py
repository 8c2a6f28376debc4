"""Costs that the trainer fits to op times, where the script gives lengths of samples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gate import same_bits
from launch import run_ranks
from trainer_jobs import Record, RecordingClient, loss_fn, make_batch, make_stage

from pipemorph.errors import InputError
from pipemorph.planning.ir import OpKind
from pipemorph.protocol import FittedCosts
from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.data.cost_model import CostModel
from pipemorph_trainer.executor.device_times import MeasuredCopy, MeasuredOp
from pipemorph_trainer.executor.microbatch_costs import SampleSizes, compute_costs, read_costs
from pipemorph_trainer.executor.stage_executor import StageRecord
from pipemorph_trainer.schedule.cost_fitter import FITTED_ITERATIONS, CostFitter

N = 4
MODEL = CostModel(base=0.002, per_token=3e-6, per_square=5e-9)


def test_lengths_of_many_types() -> None:
    wanted = (SampleSizes(3, 5), SampleSizes(4, 16), SampleSizes(0, 0))
    for given in (
        [[1, 2], (4,), []],
        (torch.tensor([1, 2]), [torch.tensor(4)], []),
        torch.tensor([[1, 2], [4, 0], [0, 0]]),
    ):
        assert read_costs(given, 3) == wanted
    assert compute_costs(lambda x: [x, 2 * x], [(k,) for k in range(2)], (), 2) == (
        SampleSizes(0, 0),
        SampleSizes(3, 5),
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([[1], [2]], "costs has 2 numbers; expected 3"),
        ([[1], [2], 3], r"costs\[0\] is \[1\]; expected a number"),
        ([[1], [-2], [3]], r"costs\[1\]\[0\] is -2; expected a number from 0 to 1e\+09"),
        ([[1], [2], ["x"]], r"costs\[2\]\[0\] is 'x'; expected a number"),
        ([[0], [], [0]], "costs are lengths that are all 0; expected at least one above 0"),
    ],
)
def test_lengths_that_are_none(given: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_costs(given, 3)


class Replica:
    """Rank with stage 0. ``pace``: factor of its op times."""

    def __init__(self, pace: float, seed: int) -> None:
        self.fitter, self.pace, self.rng = CostFitter(), pace, random.Random(seed)
        self.costs: tuple[float, ...] = ()
        self.lengths: list[list[int]] = []

    def measure(self, noise: float = 0.0) -> None:
        """Run the ops of an iteration: F, which contains a copy, and BW."""
        self.lengths = [
            [self.rng.randint(64, 1024) for _ in range(self.rng.randint(1, 4))] for _ in range(N)
        ]
        self.costs = self.fitter.price_microbatches(read_costs(self.lengths, N))
        outcome, at = StageRecord(), 5.0
        for k, lengths in enumerate(self.lengths):
            took = MODEL.price_microbatch(lengths) * self.pace
            took *= self.rng.uniform(1 - noise, 1 + noise)
            for kind, share, copied in ((OpKind.F, 0.3, 0.01), (OpKind.BW, 0.7, 0.0)):
                end = at + share * took + copied
                outcome.ops.append(MeasuredOp(kind, k, at, end))
                if copied:
                    outcome.copies.append(MeasuredCopy(kind, k, at, at + copied, 100))
                at = end
        self.fitter.measure_microbatches(outcome)


def share_moments(replicas: Sequence[Replica]) -> list[FittedCosts | None]:
    """Add up the moments of all ranks, as with their loss."""
    rows = [each.fitter.take_moments() for each in replicas]
    total = [sum(column) for column in zip(*rows, strict=True)]
    return [each.fitter.add_moments(total) for each in replicas]


def test_all_ranks_fit_one_model_after_the_same_iteration() -> None:
    """The unit of costs is that of all replicas, so a slow one has no smaller costs."""
    replicas = [Replica(1.0, 1), Replica(1.1, 2)]
    other_stage = Replica(1.0, 3)
    assert share_moments([*replicas, other_stage]) == [None] * 3, "nothing measured yet"
    for iteration in range(FITTED_ITERATIONS):
        for each in replicas:
            each.measure(noise=0.02)
            assert each.costs == ()
        found = share_moments([*replicas, other_stage])
        assert (found[0] is None) is (iteration < FITTED_ITERATIONS - 1)
    assert found[0] is not None
    assert found[1] == found[2] == found[0]
    assert found[0].microbatches == 2 * N * FITTED_ITERATIONS
    assert found[0].error == pytest.approx(0.05, abs=0.01), "half of the difference in pace"
    assert found[0].equal_error > 5 * found[0].error
    for each in replicas:
        each.measure()
        wanted = [1.05 * MODEL.price_microbatch(lengths) for lengths in each.lengths]
        assert each.costs == pytest.approx(wanted, rel=0.04), "in any replica"
    assert share_moments([*replicas, other_stage]) == [None] * 3, "fitted once"
    assert replicas[0].fitter.price_microbatches((1.0, 2.0)) == (1.0, 2.0), "costs are as given"


def test_the_text_of_a_fit() -> None:
    replica = Replica(1.0, 1)
    for _ in range(FITTED_ITERATIONS):
        replica.measure()
        (found,) = share_moments([replica])
    assert found is not None
    assert found.format_text() == (
        "costs are 0.002 s + 3e-06 s per token + 5e-09 s per squared length, fitted to 32"
        f" microbatches with an error of 0.0% (equal costs: {found.equal_error:.0%})"
    )


def train(context: TrainerContext, *, lengths: bool) -> Record:
    """Iterations on two stages."""
    place = context.coordinate(2)
    record, module = Record(), make_stage(place.stage, 2, torch.float32)
    options = Options(
        control=RecordingClient(record),
        cost_fn=(lambda tokens: [tokens[0, 0] + 1, tokens.shape[1]]) if lengths else None,
    )
    with Pipeline(
        module, context=context, loss_fn=loss_fn, microbatches=N, stages=2, options=options
    ) as pipe:
        for iteration in range(FITTED_ITERATIONS + 4):
            tokens, target = make_batch(iteration, N)
            record.losses.append(pipe.step(tokens, target=target))
    return record


def entry(context: TrainerContext) -> list[float | None]:
    """Train with and without lengths. Returns the costs in the profiles."""
    plain, fitted = (train(context, lengths=lengths) for lengths in (False, True))
    for mine, theirs in zip(fitted.losses, plain.losses, strict=True):
        same_bits(mine, theirs, "loss")
    return [profile.cost for profile in fitted.profiles]


def test_all_stages_get_fitted_costs_in_the_same_iteration() -> None:
    """The model changes no bit."""
    for rank, found in enumerate(run_ranks(2, entry)):
        known = [cost is not None for cost in found]
        assert known[-2:] == [True, True], rank
        assert known.index(True) == len(known) - 2, "one after the last that was measured"
