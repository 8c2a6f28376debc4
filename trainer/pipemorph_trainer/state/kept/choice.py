"""Which iteration a new generation goes on with, and from whose copy each rank does."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Step = Literal["final", "early", "pending"]
"""The optimizer's step before the iteration: ``pending`` was taken before its gradient norm was
known, and ``early`` as well, but then it stood."""

MOST_TOLD = 3
"""Most ranks that a reason names."""


class Offer(NamedTuple):
    """A whole copy of a rank: the state before ``iteration``. ``synchronized``: replicas hold the
    same, as not within an accumulation of gradients that are not averaged yet."""

    iteration: int
    step: Step = "final"
    synchronized: bool = True


@dataclass(frozen=True)
class Choice:
    """``sources``: for every rank the one whose copy it takes. ``exact``: all take their own.
    ``why_not_newer``: of a newer iteration that a rank has; empty if there is none."""

    iteration: int
    sources: tuple[int, ...]
    why_not_newer: str = ""

    @property
    def exact(self) -> bool:
        return all(rank == source for rank, source in enumerate(self.sources))


def choose(offers: Sequence[Sequence[Offer]], slots: Sequence[Hashable]) -> Choice | str:
    """The newest iteration of which every rank has a copy; else the newest one of which every slot
    has one; else why there is none.

    ``offers``: by rank. ``slots``: of every rank; ranks of one slot hold the same state, apart from
    random state and what the user added. That is why an older iteration that every rank has itself
    goes before a newer one, and the beginning before the state of another rank before iteration 0.
    """
    known = sorted({offer.iteration for mine in offers for offer in mine}, reverse=True)
    if not known:
        return "no rank has kept its state"
    reasons: dict[int, str] = {}
    for shared in (False, True):
        for iteration in known:
            if shared and iteration == 0:
                continue
            found = _sources(offers, slots, iteration, shared=shared)
            if isinstance(found, tuple):
                return Choice(iteration, found, reasons.get(known[0], ""))
            reasons[iteration] = found
    return reasons[known[0]]


def _sources(
    offers: Sequence[Sequence[Offer]], slots: Sequence[Hashable], iteration: int, *, shared: bool
) -> tuple[int, ...] | str:
    """From whom each rank takes its state, or why that is not possible."""
    found = [next((o for o in mine if o.iteration == iteration), None) for mine in offers]
    stood = any(offer is not None and offer.step == "early" for offer in found)
    holders: dict[Hashable, list[int]] = {}
    has = []
    for rank, offer in enumerate(found):
        valid = offer is not None and (offer.step != "pending" or stood)
        has.append(valid)
        if shared and valid and offer is not None and offer.synchronized:
            holders.setdefault(slots[rank], []).append(rank)
    lacking = [r for r, valid in enumerate(has) if not valid and not holders.get(slots[r])]
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
        # Each holder serves about as many.
        sources.append(rank if valid else mine[rank % len(mine)])
    return tuple(sources)
