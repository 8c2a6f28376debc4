"""Deals of samples to replicas and microbatches, and the model of their costs."""

from __future__ import annotations

import random
from itertools import chain, permutations
from math import exp

import pytest

from pipemorph.errors import InputError
from pipemorph.planning import Link, Problem, StageTimes, plan, predict
from pipemorph_trainer.data import CostModel, Deal, balance, fit_costs


def draw_costs(count: int, seed: int = 0, sigma: float = 0.4) -> list[float]:
    rng = random.Random(seed)
    return [exp(rng.gauss(0, sigma)) for _ in range(count)]


def make_problem(stages: int, microbatches: int, scale: float = 1.0) -> Problem:
    times = StageTimes(forward=scale, backward_input=scale, backward_weight=scale)
    return Problem(
        microbatches=microbatches, stages=(times,) * stages, links=(Link(),) * (stages - 1)
    )


def list_dealt(deal: Deal) -> list[int]:
    return sorted(chain.from_iterable(chain.from_iterable(deal.samples)))


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("count", [32, 33, 100])
def test_every_sample_is_dealt_once_and_no_microbatch_is_empty(count: int, padded: bool) -> None:
    costs = draw_costs(count, count, sigma=1.0)
    deal = balance(costs, 4, 8, stages=4, base=0.25, padded=padded)
    assert list_dealt(deal) == list(range(count))
    assert [len(replica) for replica in deal.samples] == [8] * 4
    for samples, dealt in zip(deal.samples, deal.costs, strict=True):
        for each, cost in zip(samples, dealt, strict=True):
            own = [costs[i] for i in each]
            if padded:
                rows = max(map(len, samples))
                assert rows - 1 <= len(own)
                assert cost == pytest.approx(0.25 + rows * max(costs[i] for i in chain(*samples)))
            else:
                assert cost == pytest.approx(0.25 + sum(own))
            assert own
    assert deal == balance(costs, 4, 8, stages=4, base=0.25, padded=padded)


def test_one_stage_has_about_equal_sums() -> None:
    for seed in range(5):
        deal = balance(draw_costs(64, seed), 4, 4)
        sums = [sum(row) for row in deal.costs]
        assert deal.times == pytest.approx(sums)
        assert max(sums) < 1.01 * min(sums)


def test_times_are_those_of_the_simulator_in_the_order_of_the_deal() -> None:
    problem = make_problem(3, 6, scale=0.5)
    costs = draw_costs(12, 3)
    deal = balance(costs, 2, 6, problem=problem)
    schedule, unit = plan(problem).schedule, sum(costs) / 12
    for row, time in zip(deal.costs, deal.times, strict=True):
        factors = tuple(cost / unit for cost in row)
        varied = problem.model_copy(update={"microbatch_costs": (factors,)})
        assert predict(schedule, varied.with_microbatch_order(())) == pytest.approx(time)
    assert deal.makespan == max(deal.times)


def test_a_deal_is_near_the_best_of_all() -> None:
    """Five samples for two replicas: one has two microbatches, and two more samples than that."""
    problem = make_problem(3, 2)
    for seed in range(3):
        costs = draw_costs(5, seed, sigma=0.7)
        unit, schedule = sum(costs) / 4, plan(problem).schedule
        best = min(
            max(
                predict(
                    schedule,
                    problem.model_copy(
                        update={"microbatch_costs": (tuple(c / unit for c in row),)}
                    ).with_microbatch_order(()),
                )
                for row in ((a, b), (c, d))
            )
            for p in permutations(costs)
            for a, b, c, d in [(p[0], p[1], p[2], p[3] + p[4])]
        )
        assert balance(costs, 2, 2, problem=problem).makespan <= 1.05 * best


def test_a_deal_is_shorter_than_one_of_equal_sums_in_any_order() -> None:
    """Sums alone do not see that stages wait for a long microbatch."""
    costs = draw_costs(32, 1)
    problem = make_problem(4, 8)
    by_sums = balance(costs, 4, 8)
    schedule, unit = plan(problem).schedule, sum(costs) / 32

    def simulate_row(row: tuple[float, ...]) -> float:
        factors = tuple(cost / unit for cost in row)
        varied = problem.model_copy(update={"microbatch_costs": (factors,)})
        return predict(schedule, varied.with_microbatch_order(()))

    shuffled = [tuple(random.Random(2).sample(row, 8)) for row in by_sums.costs]
    assert balance(costs, 4, 8, problem=problem).makespan < 0.95 * max(map(simulate_row, shuffled))


def test_a_slow_replica_gets_less_work() -> None:
    problems = [make_problem(2, 4), make_problem(2, 4, scale=2.0)]
    deal = balance(draw_costs(64, 5), 2, 4, problem=problems)
    assert sum(deal.costs[0]) > 1.8 * sum(deal.costs[1])
    assert min(deal.times) > 0.9 * max(deal.times)


def test_replicas_may_have_other_numbers_of_microbatches() -> None:
    deal = balance(draw_costs(30), 3, [2, 4, 3], stages=2)
    assert [len(row) for row in deal.costs] == [2, 4, 3]
    assert list_dealt(deal) == list(range(30))


def test_padded_samples_of_one_length_go_to_one_replica() -> None:
    """Long rows cost four times as much as short ones: a replica with them has a quarter."""
    costs = [4.0] * 8 + [1.0] * 32
    deal = balance(costs, 2, 4, padded=True)
    assert deal.costs == ((8.0,) * 4, (8.0,) * 4)
    assert [{costs[i] for each in replica for i in each} for replica in deal.samples] == [
        {4.0}, {1.0}
    ]  # fmt: skip


def test_packed_microbatches_fit_the_capacity() -> None:
    rng = random.Random(0)
    sizes = [rng.randint(64, 1024) for _ in range(60)]
    costs = [size**2 / 1e6 for size in sizes]
    capacity = sum(sizes) / 16 * 1.06
    deal = balance(costs, 2, 8, sizes=sizes, capacity=capacity, stages=3)
    packed = [[sizes[i] for i in each] for replica in deal.samples for each in replica]
    assert max(map(sum, packed)) <= capacity and list_dealt(deal) == list(range(60))
    assert max(map(sum, deal.costs)) < 1.05 * min(map(sum, deal.costs))
    with pytest.raises(
        InputError, match="do not fit 16 microbatches of capacity 1000: their sizes"
    ):
        balance(costs, 2, 8, sizes=sizes, capacity=1000)
    with pytest.raises(InputError, match="capacity is given, and padded"):
        balance(costs, 2, 8, sizes=sizes, capacity=1000, padded=True)
    with pytest.raises(InputError, match="sizes are of 1 samples, and costs of 60"):
        balance(costs, 2, 8, sizes=[1], capacity=1000)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0, -1.0], 1, 1), r"costs\[1\] is -1.0; expected a number from 0 on"),
        (([1.0, float("nan")], 1, 1), r"costs\[1\] is nan"),
        (([1.0] * 3, 2, 2), "costs are of 3 samples; 4 microbatches need at least as many"),
        (([1.0], 0, 1), "replicas is 0; expected at least 1"),
        (([1.0] * 4, 2, [1, 2, 1]), "microbatches is .*; expected .* one for each of 2 replicas"),
        (([1.0], 1, 0), "microbatches is 0"),
    ],
)
def test_unusable_arguments_are_refused(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        balance(*arguments)  # type: ignore[arg-type]


def test_stages_and_problem_exclude_each_other() -> None:
    with pytest.raises(InputError, match="stages and problem are given; expected one of them"):
        balance([1.0], 1, 1, stages=1, problem=make_problem(1, 1))
    with pytest.raises(InputError, match="problem is a list of 1; expected one for each of 2"):
        balance([1.0] * 2, 2, 1, problem=[make_problem(1, 1)])
    with pytest.raises(InputError, match="stages is 0"):
        balance([1.0], 1, 1, stages=0)


def test_costs_of_zero_are_dealt() -> None:
    assert list_dealt(balance([0.0] * 4, 2, 2, stages=2)) == [0, 1, 2, 3]


# --- costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True])
def test_a_fit_finds_the_model_that_made_the_times(padded: bool) -> None:
    rng = random.Random(0)
    true = CostModel(base=0.003, per_token=2e-6, per_square=3e-9)
    lengths = [[rng.randint(64, 1024) for _ in range(rng.randint(1, 6))] for _ in range(60)]
    times = [true.price_microbatch(row, padded=padded) * rng.uniform(0.98, 1.02) for row in lengths]
    found = fit_costs(lengths, times, padded=padded)
    for row in lengths:
        expected = true.price_microbatch(row, padded=padded)
        assert found.price_microbatch(row, padded=padded) == pytest.approx(expected, rel=0.03)
    assert found.per_square == pytest.approx(true.per_square, rel=0.2)


def test_a_fit_has_no_coefficient_below_zero() -> None:
    """Times that grow slower than the tokens would need squares below 0."""
    found = fit_costs([[64], [256], [1024]], [1.0, 3.0, 9.0])
    assert min(found.base, found.per_token, found.per_square) == 0
    assert found.price_microbatch([256]) == pytest.approx(3.0, rel=0.2)


def test_equal_microbatches_have_the_simplest_model() -> None:
    assert fit_costs([[100, 100]] * 3, [2.0, 2.0, 2.0]) == CostModel(per_token=0.01)


@pytest.mark.parametrize(
    ("lengths", "seconds", "words"),
    [
        ([[1]], [0.0], r"seconds\[0\] is 0.0; expected a time above 0"),
        ([[1]], [1.0, 2.0], "lengths are of 1 microbatches, and seconds of 2"),
        ([], [], "expected one list of lengths and one time"),
        ([[]], [1.0], r"lengths\[0\] is \[\]"),
        ([[-1]], [1.0], r"lengths\[0\] is \[-1\]; expected lengths from 0 on"),
    ],
)
def test_unusable_times_are_refused(
    lengths: list[list[float]], seconds: list[float], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        fit_costs(lengths, seconds)


def test_a_model_without_costs_is_refused() -> None:
    with pytest.raises(InputError, match="are 0; expected one above 0"):
        CostModel()
    with pytest.raises(InputError, match="per_token is -1; expected a number from 0 on"):
        CostModel(per_token=-1)
