"""Which iteration ranks go on with, and from whose copy."""

from __future__ import annotations

from pipemorph_trainer.state.kept.choice import Choice, Offer, choose

SLOTS = (0, 1, 0, 1)
"""Of two stages × two replicas."""


def offers(*iterations: tuple[int, ...]) -> list[list[Offer]]:
    return [[Offer(iteration) for iteration in mine] for mine in iterations]


def test_the_newest_that_all_have_begun() -> None:
    found = choose(offers((4, 5), (5, 4), (4, 3), (4, 5)), SLOTS)
    assert found == Choice(4, (0, 1, 2, 3), "rank 2 has no copy of iteration 5")
    assert found.exact


def test_an_older_one_of_their_own_goes_before_that_of_a_replica() -> None:
    """Since random state is the rank's own."""
    found = choose(offers((4, 5), (4, 5), (4,), (4, 5)), SLOTS)
    assert isinstance(found, Choice) and found.iteration == 4


def test_a_rank_without_any_takes_that_of_its_replica() -> None:
    assert choose(offers((4, 5), (4, 5), (), (5,)), SLOTS) == Choice(
        5, (0, 1, 0, 3), "rank 2 has no copy of iteration 5"
    )
    assert choose(offers((4, 5), (4, 5), (), (3, 4)), SLOTS) == Choice(
        5, (0, 1, 0, 1), "ranks 2, 3 have no copy of iteration 5"
    )


def test_the_beginning_goes_before_that_of_a_replica() -> None:
    assert choose(offers((0,), (0,), (), (0,)), SLOTS) == "rank 2 has no copy of iteration 0"


def test_holders_take_turns() -> None:
    found = choose(offers((7,), (7,), *[()] * 4), [0] * 6)
    assert isinstance(found, Choice) and found.sources == (0, 1, 0, 1, 0, 1)


def test_nothing_whole() -> None:
    assert choose(offers((), ()), (0, 1)) == "no rank has kept its state"
    found = choose(offers((5, 4), (), (5,), ()), SLOTS)
    assert found == "nobody has the state of ranks 1, 3 before iteration 5"
    found = choose([[], *[[Offer(2)]] * 2, *[[]] * 5], range(8))
    assert found == "nobody has the state of ranks 0, 3, 4 and 3 more before iteration 2"


def test_gradients_of_an_accumulation_are_each_ranks_own() -> None:
    mine = [Offer(5, synchronized=False), Offer(4)]
    found = choose([mine, mine, [], mine], SLOTS)
    assert isinstance(found, Choice) and (found.iteration, found.sources) == (4, (0, 1, 0, 3))
    found = choose([mine] * 4, SLOTS)
    assert isinstance(found, Choice) and found.iteration == 5
