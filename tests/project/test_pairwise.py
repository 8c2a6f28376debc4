"""The cases that tests/support/pairwise.py chooses of a product."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import cover_pairs, give_tiers, parametrize_product

AXES = [
    [["a", "b", "c", "d"], [1, 2, 3], ["x", "y", "z"], [False, True], [0.5, 1.5]],
    [[0, 1], [0, 1]],
    [[0, 1], [0, 1], [0, 1]],
    [range(6)],
    [["only"], ["x", "y"], [1, 2, 3]],
]


@pytest.mark.parametrize("axes", AXES, ids=len)
def test_every_pair_of_values_occurs(axes: list[list[object]]) -> None:
    chosen = cover_pairs(*axes)
    assert len(set(chosen)) == len(chosen) and set(chosen) <= set(product(*axes))
    for (i, first), (j, second) in combinations(enumerate(axes), 2):
        found = {(case[i], case[j]) for case in chosen}
        assert found == set(product(first, second)), (i, j)
    for i, values in enumerate(axes):
        assert {case[i] for case in chosen} == set(values)


def test_the_cover_is_small_and_the_same_each_time() -> None:
    """Cover of twelve, the least for axes of four and three values; the product has 144."""
    chosen = cover_pairs(*AXES[0])
    assert 12 <= len(chosen) <= 14
    assert chosen == cover_pairs(*AXES[0])
    # The first cases have every value of each axis as soon as they can.
    for axis, values in enumerate(AXES[0]):
        assert len({case[axis] for case in chosen[: len(values)]}) == len(values)


def tiers(parameters: list[object]) -> dict[object, str]:
    return {
        each.values: " ".join(mark.name for mark in each.marks) or "test"  # type: ignore[attr-defined]
        for each in parameters
    }


def test_each_case_of_a_product_is_in_one_tier() -> None:
    found = tiers(parametrize_product(*AXES[0], test=5))
    cover = cover_pairs(*AXES[0])
    assert found.keys() == set(product(*AXES[0])) and len(found) == 144
    assert [case for case in cover if found[case] == "test"] == cover[:5]
    assert {found[case] for case in cover[5:]} == {"full"}
    assert {how for case, how in found.items() if case not in cover} == {"soak"}

    found = tiers(parametrize_product([1, 2, 3], ["x", "y", "z"], test=1, full=2))
    assert list(found.values()) == ["test"] + ["full"] * 2 + ["soak"] * 6
    assert list(found)[:3] == [(1, "x"), (2, "y"), (3, "z")], "every value before any pair twice"


def test_cases_get_the_tier_of_their_place() -> None:
    cases = [("a", 1), ("b", 2), ("c", 3), ("d", 4)]
    assert list(tiers(give_tiers(cases, test=1, full=2)).values()) == [
        "test", "full", "full", "soak",
    ]  # fmt: skip
    assert [each.id for each in give_tiers(cases[:1], test=1, full=0)] == ["a-1"]
    with pytest.raises(ValueError, match="zip"):
        give_tiers(cases, test=3, full=2)
