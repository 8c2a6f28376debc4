"""Choice of the iteration that ranks go on with, and of the copy."""

from __future__ import annotations

from pipemorph_trainer.checkpoint.memory.source_choice import (
    CopyOffer,
    SourceChoice,
    choose_sources,
)

SLOTS = (0, 1, 0, 1)
"""Stages of the ranks of two stages × two replicas."""


def offers(*iterations: tuple[int, ...]) -> list[list[CopyOffer]]:
    return [[CopyOffer(iteration) for iteration in mine] for mine in iterations]


def test_the_newest_that_all_have_begun() -> None:
    found = choose_sources(offers((4, 5), (5, 4), (4, 3), (4, 5)), SLOTS)
    assert found == SourceChoice(4, (0, 1, 2, 3), "rank 2 has no copy of iteration 5")
    assert found.all_local


def test_an_older_one_of_their_own_goes_before_that_of_a_replica() -> None:
    """Random state is the rank's own."""
    found = choose_sources(offers((4, 5), (4, 5), (4,), (4, 5)), SLOTS)
    assert isinstance(found, SourceChoice) and found.iteration == 4


def test_a_rank_without_any_takes_that_of_its_replica() -> None:
    assert choose_sources(offers((4, 5), (4, 5), (), (5,)), SLOTS) == SourceChoice(
        5, (0, 1, 0, 3), "rank 2 has no copy of iteration 5"
    )
    assert choose_sources(offers((4, 5), (4, 5), (), (3, 4)), SLOTS) == SourceChoice(
        5, (0, 1, 0, 1), "ranks 2, 3 have no copy of iteration 5"
    )


def test_the_beginning_goes_before_that_of_a_replica() -> None:
    assert (
        choose_sources(offers((0,), (0,), (), (0,)), SLOTS) == "rank 2 has no copy of iteration 0"
    )


def test_holders_take_turns() -> None:
    found = choose_sources(offers((7,), (7,), *[()] * 4), [0] * 6)
    assert isinstance(found, SourceChoice) and found.sources == (0, 1, 0, 1, 0, 1)


def test_nothing_whole() -> None:
    assert choose_sources(offers((), ()), (0, 1)) == "no rank has a copy of its state"
    found = choose_sources(offers((5, 4), (), (5,), ()), SLOTS)
    assert found == "no rank has the state of ranks 1, 3 before iteration 5"
    found = choose_sources([[], *[[CopyOffer(2)]] * 2, *[[]] * 5], range(8))
    assert found == "no rank has the state of ranks 0, 3, 4 and 3 more before iteration 2"


def test_gradients_of_an_accumulation_are_each_ranks_own() -> None:
    mine = [CopyOffer(5, synchronized=False), CopyOffer(4)]
    found = choose_sources([mine, mine, [], mine], SLOTS)
    assert isinstance(found, SourceChoice) and (found.iteration, found.sources) == (4, (0, 1, 0, 3))
    found = choose_sources([mine] * 4, SLOTS)
    assert isinstance(found, SourceChoice) and found.iteration == 5
