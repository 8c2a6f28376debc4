"""Parameters of tests from axes of values: a few cases in ``make test``, a pairwise cover in
``make test-all``, the whole product in ``make soak``.

Most defects that only a combination of settings shows need two settings, so a cover of all pairs
finds almost what the product finds, with a fraction of the runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

Case = tuple[Any, ...]


def cover_pairs(*axes: Sequence[Any]) -> list[Case]:
    """Cases in which every pair of values of two axes occurs. Greedy and deterministic: each case
    covers the most pairs that those before it do not, with the values that they have the least, so
    the first few differ the most. A single axis is covered value by value."""
    every = list(product(*axes))
    missing = set().union(*map(_pairs, every))
    chosen: list[Case] = []
    uses: Counter[Any] = Counter()

    def gain(case: Case) -> tuple[int, int]:
        return len(_pairs(case) & missing), -sum(uses[value] for value in enumerate(case))

    while missing:
        case = max(every, key=gain)
        chosen.append(case)
        missing -= _pairs(case)
        uses.update(enumerate(case))
    return chosen


def give_tiers(cases: Sequence[Case], *, test: int, full: int) -> list[Any]:
    """Parameters of the cases: the first ``test`` for ``make test``, the next ``full`` for
    ``make test-all``, all others for ``make soak``."""
    tiers = [()] * test + [(pytest.mark.full,)] * full
    tiers += [(pytest.mark.soak,)] * (len(cases) - len(tiers))
    return [
        pytest.param(*case, marks=marks, id="-".join(map(str, case)))
        for case, marks in zip(cases, tiers, strict=True)
    ]


def parametrize_product(*axes: Sequence[Any], test: int, full: int | None = None) -> list[Any]:
    """Parameters of the product of the axes: ``test`` cases of its pairwise cover for
    ``make test``, the next ``full`` (by default the rest of the cover) for ``make test-all``, all
    others for ``make soak``. The cover of two axes is their product, so these need ``full``."""
    cover = cover_pairs(*axes)
    others = [case for case in product(*axes) if case not in cover]
    full = len(cover) - test if full is None else full
    return give_tiers([*cover, *others], test=test, full=full)


def _pairs(case: Case) -> set[Any]:
    """The pairs of (axis, value) that a case has."""
    numbered = list(enumerate(case))
    return set(combinations(numbered, 2)) if len(numbered) > 1 else set(numbered)
