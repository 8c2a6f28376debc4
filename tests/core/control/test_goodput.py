"""Goodput: which iterations count, and over which time."""

from __future__ import annotations

import pytest

from pipemorph.control.history.goodput import GoodputMeter
from pipemorph.protocol import IterationSample


def samples(*indices: int, seconds: float = 2.0) -> list[IterationSample]:
    common = {"seconds": seconds, "plan_version": 0, "loss": None, "bubble_fraction": 0.1}
    return [IterationSample.model_validate({"index": index, **common}) for index in indices]


def test_an_iteration_that_is_run_again_counts_once() -> None:
    useful = GoodputMeter()
    useful.add_iterations(samples(0, 1, 2, 3))
    useful.add_iterations(samples(2, seconds=50.0))
    useful.add_iterations(samples(3, seconds=30.0))
    useful.add_iterations(samples(4))
    assert useful == GoodputMeter(10.0, 5)
    assert useful.compute_goodput(20.0) == 0.5


def test_an_unreported_one_counts_like_the_others() -> None:
    useful = GoodputMeter()
    useful.add_iterations(samples(0))
    useful.add_iterations(samples(3, seconds=30.0))
    assert useful == GoodputMeter(2.0 * 3 + 30.0, 4)


def test_ranks_that_go_on_report_iterations_of_others_after_their_first() -> None:
    useful = GoodputMeter()
    useful.add_iterations(samples(0, 1, 2, 3))
    useful.add_iterations(samples(6, seconds=30.0))
    useful.add_iterations(samples(4, 5, seconds=1.0))
    useful.add_iterations(samples(5, seconds=9.0))
    assert useful == GoodputMeter(4 * 2.0 + 30.0 + 2 * 1.0, 7)


def test_the_first_ones_of_a_job_may_be_reported_after_a_recovery() -> None:
    useful = GoodputMeter()
    useful.add_iterations(samples(3))
    useful.add_iterations(samples(0, 1, 2, 2))
    assert useful == GoodputMeter(8.0, 4)


def test_iterations_of_another_job_do_not_count() -> None:
    useful = GoodputMeter()
    useful.add_iterations(samples(100, 101))
    assert useful == GoodputMeter(4.0, 102)


@pytest.mark.parametrize(
    ("useful", "seconds", "goodput"),
    [
        (GoodputMeter(), 10.0, None),
        (GoodputMeter(4.0, 2), 0.0, None),
        (GoodputMeter(4.0, 2), 3.9, 1.0),
    ],
)
def test_it_is_a_fraction_if_it_is_known(
    useful: GoodputMeter, seconds: float, goodput: float | None
) -> None:
    assert useful.compute_goodput(seconds) == goodput
