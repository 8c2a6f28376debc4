"""Goodput: which iterations count, and over which time."""

from __future__ import annotations

import pytest

from pipemorph.control.record.goodput import Useful
from pipemorph.wire import IterationSample


def samples(*indices: int, seconds: float = 2.0) -> list[IterationSample]:
    common = {"seconds": seconds, "plan_version": 0, "loss": None, "bubble_fraction": 0.1}
    return [IterationSample.model_validate({"index": index, **common}) for index in indices]


def test_an_iteration_that_is_run_again_counts_once() -> None:
    useful = Useful()
    useful.take(samples(0, 1, 2, 3))
    useful.take(samples(2, seconds=50.0))
    useful.take(samples(3, seconds=30.0))
    useful.take(samples(4))
    assert useful == Useful(10.0, 5)
    assert useful.goodput(20.0) == 0.5


def test_one_that_nobody_heard_of_counts_like_the_others() -> None:
    useful = Useful()
    useful.take(samples(0))
    useful.take(samples(3, seconds=30.0))
    assert useful == Useful(2.0 * 3 + 30.0, 4)


def test_ranks_that_go_on_report_what_others_had_finished_after_their_first() -> None:
    useful = Useful()
    useful.take(samples(0, 1, 2, 3))
    useful.take(samples(6, seconds=30.0))
    useful.take(samples(4, 5, seconds=1.0))
    useful.take(samples(5, seconds=9.0))
    assert useful == Useful(4 * 2.0 + 30.0 + 2 * 1.0, 7)


def test_the_first_ones_of_a_job_may_be_reported_after_a_recovery() -> None:
    useful = Useful()
    useful.take(samples(3))
    useful.take(samples(0, 1, 2, 2))
    assert useful == Useful(8.0, 4)


def test_what_another_job_has_finished_does_not_count() -> None:
    useful = Useful()
    useful.take(samples(100, 101))
    assert useful == Useful(4.0, 102)


@pytest.mark.parametrize(
    ("useful", "seconds", "goodput"),
    [(Useful(), 10.0, None), (Useful(4.0, 2), 0.0, None), (Useful(4.0, 2), 3.9, 1.0)],
)
def test_it_is_a_fraction_if_it_is_known(
    useful: Useful, seconds: float, goodput: float | None
) -> None:
    assert useful.goodput(seconds) == goodput
