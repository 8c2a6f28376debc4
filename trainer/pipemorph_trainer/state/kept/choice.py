"""Which iteration a new generation goes on with, and from whose copy each rank does."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_TOLD = 3
"""Most ranks that a reason names."""


class Offer(NamedTuple):
    """A whole copy of a rank: the state before ``iteration``. ``synchronized``: replicas hold the
    same, as not within an accumulation of gradients that are not averaged yet."""

    iteration: int
    synchronized: bool = True


Held = Mapping[int, Sequence[Offer]]
"""Copies of other ranks that a rank holds in its memory, by their rank."""


@dataclass(frozen=True)
class Choice:
    """``sources``: for every rank the one whose memory its state comes from. ``neighbours``: ranks
    whose own copy another holds; others with another source take that rank's state.
    ``why_not_newer``: of a newer iteration that a rank has; empty if there is none."""

    iteration: int
    sources: tuple[int, ...]
    why_not_newer: str = ""
    neighbours: frozenset[int] = frozenset()

    @property
    def exact(self) -> bool:
        """Whether all take their own copy from their own memory."""
        return all(rank == source for rank, source in enumerate(self.sources))

    def own(self, rank: int) -> bool:
        """Whether a rank takes its own state, wherever that is."""
        return self.sources[rank] == rank or rank in self.neighbours


def choose(
    offers: Sequence[Sequence[Offer]],
    slots: Sequence[Hashable],
    held: Sequence[Held] = (),
) -> Choice | str:
    """The newest iteration of which every rank has a copy; else the newest one of which every slot
    has one; else the newest one with what ranks hold of others; else why there is none.

    ``offers``: by rank. ``slots``: of every rank; ranks of one slot hold the same state, apart from
    random state and what the user added. That is why an older iteration that every rank has itself
    goes before a newer one, and the beginning before the state of another rank before iteration 0.
    ``held``: by rank, what it holds of others.
    """
    known = sorted({offer.iteration for mine in offers for offer in mine}, reverse=True)
    if not known:
        return "no rank has kept its state"
    first: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for shared, neighbours in ((False, {}), (True, {}), (True, _by_owner(held))):
        for iteration in known:
            if shared and iteration == 0:
                continue
            found = _sources(offers, slots, iteration, neighbours, shared=shared)
            if isinstance(found, Choice):
                # Of the newest itself, why not from a higher rung.
                why = (first if iteration == known[0] else reasons).get(known[0], "")
                return Choice(iteration, found.sources, why, found.neighbours)
            reasons[iteration] = found
            first.setdefault(iteration, found)
    return reasons[known[0]]


def _by_owner(held: Sequence[Held]) -> dict[int, list[tuple[int, Offer]]]:
    """Of each rank, the copies that others hold of it, with who does."""
    found: dict[int, list[tuple[int, Offer]]] = {}
    for holder, of in enumerate(held):
        for owner, offers in of.items():
            found.setdefault(owner, []).extend((holder, offer) for offer in offers)
    return found


def _sources(
    offers: Sequence[Sequence[Offer]],
    slots: Sequence[Hashable],
    iteration: int,
    neighbours: Mapping[int, Sequence[tuple[int, Offer]]],
    *,
    shared: bool,
) -> Choice | str:
    """From whom each rank takes its state, or why that is not possible."""
    found = [next((o for o in mine if o.iteration == iteration), None) for mine in offers]
    holders: dict[Hashable, list[int]] = {}
    has = []
    for rank, offer in enumerate(found):
        has.append(offer is not None)
        if shared and offer is not None and offer.synchronized:
            holders.setdefault(slots[rank], []).append(rank)
    elsewhere = {
        rank: holder
        for rank, valid in enumerate(has)
        for holder, offer in neighbours.get(rank, ())
        if not valid and offer.iteration == iteration
    }
    lacking = [
        rank
        for rank, valid in enumerate(has)
        if not valid and rank not in elsewhere and not holders.get(slots[rank])
    ]
    if lacking:
        shown = ", ".join(map(str, lacking[:MOST_TOLD]))
        more = f" and {len(lacking) - MOST_TOLD} more" if len(lacking) > MOST_TOLD else ""
        ranks, have = ("rank", "has") if len(lacking) == 1 else ("ranks", "have")
        if shared:
            return f"nobody has the state of {ranks} {shown}{more} before iteration {iteration}"
        return f"{ranks} {shown}{more} {have} no copy of iteration {iteration}"
    sources = []
    for rank, valid in enumerate(has):
        mine = holders.get(slots[rank], [])
        # Its own state first, wherever it is. Each holder serves about as many.
        sources.append(
            rank if valid else elsewhere[rank] if rank in elsewhere else mine[rank % len(mine)]
        )
    return Choice(iteration, tuple(sources), neighbours=frozenset(elsewhere))
