"""Choice of the iteration that a new generation resumes, and of the copy that each rank loads."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_NAMED_RANKS = 3
"""Highest number of ranks that a reason names."""


class CopyOffer(NamedTuple):
    """Complete copy of a rank's state before ``iteration``. ``synchronized``: replicas hold the
    same state; False while they accumulate gradients that are not averaged yet."""

    iteration: int
    synchronized: bool = True


NeighbourOffers = Mapping[int, Sequence[CopyOffer]]
"""Copies that a rank holds for ranks of another pod, by their rank."""


@dataclass(frozen=True)
class SourceChoice:
    """Source of every rank's state. ``sources``: by rank, the rank whose memory holds it.
    ``neighbours``: ranks that get their own copy from another rank; all others with a source other
    than themselves get that rank's state. ``why_not_newer``: why a newer iteration of some rank
    cannot be resumed; empty if there is none."""

    iteration: int
    sources: tuple[int, ...]
    why_not_newer: str = ""
    neighbours: frozenset[int] = frozenset()

    @property
    def all_local(self) -> bool:
        """True if every rank loads its own copy from its own memory."""
        return all(rank == source for rank, source in enumerate(self.sources))

    def has_own_state(self, rank: int) -> bool:
        """True if a rank gets its own state, from whichever memory."""
        return self.sources[rank] == rank or rank in self.neighbours


def choose_sources(
    offers: Sequence[Sequence[CopyOffer]],
    state_keys: Sequence[Hashable],
    held: Sequence[NeighbourOffers] = (),
) -> SourceChoice | str:
    """Choose the newest iteration of which every rank has its own copy; else the newest of which
    every rank, or one with the same key, has a copy; else the newest including copies held for
    other ranks. Returns the reason if there is none.

    ``offers``: by rank. ``state_keys``: by rank; ranks with equal keys hold the same state, except
    random state and objects of the user. Therefore an older iteration that every rank has itself is
    preferred to a newer one, and a new start to another rank's state before iteration 0. ``held``:
    by rank, the copies it holds for others.
    """
    known = sorted({offer.iteration for copies in offers for offer in copies}, reverse=True)
    if not known:
        return "no rank has a copy of its state"
    first: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for shared, neighbours in ((False, {}), (True, {}), (True, _group_by_owner(held))):
        for iteration in known:
            if shared and iteration == 0:
                continue
            found = _assign_sources(offers, state_keys, iteration, neighbours, shared=shared)
            if isinstance(found, SourceChoice):
                # For the newest iteration, the reason why the preferred source was not possible.
                why = (first if iteration == known[0] else reasons).get(known[0], "")
                return SourceChoice(iteration, found.sources, why, found.neighbours)
            reasons[iteration] = found
            first.setdefault(iteration, found)
    return reasons[known[0]]


def _group_by_owner(held: Sequence[NeighbourOffers]) -> dict[int, list[tuple[int, CopyOffer]]]:
    """Group the copies that ranks hold for others by their owner: pairs of holder and offer."""
    found: dict[int, list[tuple[int, CopyOffer]]] = {}
    for holder, of in enumerate(held):
        for owner, offers in of.items():
            found.setdefault(owner, []).extend((holder, offer) for offer in offers)
    return found


def _assign_sources(
    offers: Sequence[Sequence[CopyOffer]],
    state_keys: Sequence[Hashable],
    iteration: int,
    neighbours: Mapping[int, Sequence[tuple[int, CopyOffer]]],
    *,
    shared: bool,
) -> SourceChoice | str:
    """Assign a source to each rank for one iteration; a reason if that is not possible."""
    found = [next((o for o in copies if o.iteration == iteration), None) for copies in offers]
    holders: dict[Hashable, list[int]] = {}
    has = []
    for rank, offer in enumerate(found):
        has.append(offer is not None)
        if shared and offer is not None and offer.synchronized:
            holders.setdefault(state_keys[rank], []).append(rank)
    elsewhere = {
        rank: holder
        for rank, valid in enumerate(has)
        for holder, offer in neighbours.get(rank, ())
        if not valid and offer.iteration == iteration
    }
    lacking = [
        rank
        for rank, valid in enumerate(has)
        if not valid and rank not in elsewhere and not holders.get(state_keys[rank])
    ]
    if lacking:
        shown = ", ".join(map(str, lacking[:MOST_NAMED_RANKS]))
        more = (
            f" and {len(lacking) - MOST_NAMED_RANKS} more"
            if len(lacking) > MOST_NAMED_RANKS
            else ""
        )
        ranks, have = ("rank", "has") if len(lacking) == 1 else ("ranks", "have")
        if shared:
            return f"no rank has the state of {ranks} {shown}{more} before iteration {iteration}"
        return f"{ranks} {shown}{more} {have} no copy of iteration {iteration}"
    sources = []
    for rank, valid in enumerate(has):
        copies = holders.get(state_keys[rank], [])
        # A rank's own state comes first, from any memory. Each holder serves about equally many.
        sources.append(
            rank if valid else elsewhere[rank] if rank in elsewhere else copies[rank % len(copies)]
        )
    return SourceChoice(iteration, tuple(sources), neighbours=frozenset(elsewhere))
