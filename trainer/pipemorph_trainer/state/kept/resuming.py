"""Finds the state that a new generation goes on with, in what ranks before it have kept."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipemorph.exits import PARTS_STAY, stay_file
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.state.kept.choice import Choice, Held, Offer, choose
from pipemorph_trainer.state.kept.composed import Composed, Source, compose
from pipemorph_trainer.state.kept.copies import Copy, form_of, room
from pipemorph_trainer.state.kept.exchange import Head, digest, receive, send
from pipemorph_trainer.state.kept.held import HeldCopies
from pipemorph_trainer.state.kept.slots import Slots
from pipemorph_trainer.state.kept.values import Values
from pipemorph_trainer.topology.world import World

DAMAGED = "its bytes are not those that the rank had when it left"


class _Told(NamedTuple):
    """What a rank tells of its copies. ``held``: of other ranks; ``size``: bytes of the largest;
    ``room``: that it has; ``saved``: the iteration of the newest checkpoint; ``moved``: ranks have
    left one for this generation, which has another layout."""

    offers: tuple[Offer, ...]
    held: Held
    size: int
    room: int
    saved: int
    reason: str
    moved: bool = False


class Resuming:
    """All ranks agree on what they go on with (:meth:`agree`), and each gets it (:meth:`state`).

    ``slots``, ``held``: the copies of this rank, and those of others that it holds. ``part``: what
    its copies have to be of. ``alike``: of every rank, what its state depends on.
    """

    def __init__(
        self,
        folder: Path,
        slots: Slots,
        held: HeldCopies,
        values: Values,
        *,
        world: World,
        wait: CollectiveWait,
        part: Mapping[str, Any],
        alike: Sequence[Hashable],
        generation: int,
    ) -> None:
        self._folder, self._slots, self._held = folder, slots, held
        self._values, self._world, self._wait = values, world, wait
        self._part, self._alike, self._generation = part, alike, generation
        self._moved = False
        """Whether ranks have just left for a new layout."""

    def agree(self, saved: int, why: str) -> Choice | str:
        """From whose copy of which iteration each rank goes on; or why there is none. Collective
        over all ranks. ``saved``: the iteration of the newest checkpoint, which goes before what is
        older; ``why``: this rank keeps nothing.

        Raises :class:`PipelineError` on all ranks if some have just moved and not all have their
        own copy.
        """
        told = self._world.tell_all(self._told(saved, why))
        found = self._choose(told)
        self._moved = any(each.moved for each in told)
        if self._moved and (isinstance(found, str) or not found.exact):
            lacking = found if isinstance(found, str) else inexact(found)
            raise PipelineError(f"ranks do not have their copies in their new layout: {lacking}")
        return found

    def state(self, found: Choice) -> Copy | Composed | str:
        """The state that this rank goes on with, of its present part; or why that of a rank does
        not fit, the same on all. Collective over all ranks. Raises :class:`PipelineError` on all
        ranks instead if they have just moved."""
        rank, control = self._world.coordinate.rank, self._world.control
        # In one order on all ranks, so that no two wait for each other.
        for to, other in enumerate(found.sources):
            if other == rank != to:
                self._wait.waiting.begin(f"rank {to} to take its state")
                copy = self._of(found.iteration, to if to in found.neighbours else rank)
                send(copy, to, control, self._wait)
                self._wait.waiting.end()
            elif to == rank != other:
                self._wait.waiting.begin(f"its state from rank {other}")
                self._take(other)
                self._wait.waiting.end()
        copy = self._of(found.iteration, rank)
        relaid = copy.mark["split"] != self._part["split"]
        state = self._fitting(copy, found.iteration, relaid=relaid)
        misfit = state if isinstance(state, str) else ""
        for each, why in enumerate(self._world.tell_all(misfit)):
            if why:
                text = f"the kept state of rank {each} does not fit its stage: {why}"
                if self._moved and relaid and why != DAMAGED and rank == 0:
                    # So it would be with any other parts.
                    (self._folder / stay_file(self._generation)).write_text(f"{PARTS_STAY}{why}")
                if self._moved:
                    raise PipelineError(text)
                return text
        assert not isinstance(state, str), "all ranks hear of a misfit"
        return state

    def _fitting(self, copy: Copy, iteration: int, *, relaid: bool) -> Copy | Composed | str:
        """The state in a copy of this rank, composed anew if its part is another now (``relaid``);
        or why it does not fit."""
        if copy.mark.get("hash") not in (None, digest(copy)):
            return DAMAGED
        state = self._composed(copy, iteration) if relaid else copy
        if isinstance(state, str):
            return state
        return self._values.misfit(state.form, state.object) or state

    def _composed(self, own: Copy, iteration: int) -> Composed | str:
        """The state of this rank's new part; or why there is none."""
        place, generation = self._world.coordinate, self._generation

        def others() -> Iterator[Source]:
            """Those of the same column, the nearest stages first."""
            for stage in sorted(range(place.stages), key=lambda each: abs(each - place.stage)):
                rank = place.at_stage(stage)
                if stage == place.stage:
                    continue
                slots = Slots(self._folder / f"rank-{rank}.generation-{generation}")
                slots.find(lambda mark: mark.get("split") == own.mark["split"])
                slot = slots.of(iteration)
                if slot is not None and slot.copy is not None:
                    yield Source(slot.copy, stage)

        wanted = self._values.wanted()
        return compose(Source(own, wanted.stage), others(), wanted)

    def _told(self, saved: int, why: str) -> _Told:
        if why:
            return _Told((), {}, 0, 0, saved, why)
        before, part = self._generation - 1, self._part

        def fits(mark: Mapping[str, Any]) -> bool:
            # Ranks that have just left may have had another split.
            names = [n for n in part if n != "split" or mark.get("left") != before]
            return all(mark.get(name) == part[name] for name in names)

        offers = tuple(self._slots.find(fits))
        held, size = self._held.offers(fits)
        left = room(self._slots.folder / "a")
        marks = [self._of(offer.iteration, self._world.coordinate.rank).mark for offer in offers]
        moved = any(mark.get("left") == before for mark in marks)
        return _Told(offers, held, max(size, self._slots.size), left, saved, "", moved)

    def _choose(self, told: Sequence[_Told]) -> Choice | str:
        found = choose([each.offers for each in told], self._alike, [each.held for each in told])
        if isinstance(found, str):
            reasons = [f"rank {r}: {each.reason}" for r, each in enumerate(told) if each.reason]
            return "; ".join([found, *reasons[:1]])
        saved = told[0].saved
        if saved > found.iteration:
            return f"the newest that all ranks have kept is iteration {found.iteration}"
        for rank, source in enumerate(found.sources):
            if rank != source and told[source].size > told[rank].room // 2:
                return (
                    f"rank {rank} has no memory for its state: it takes {told[source].size:,} bytes"
                    f" of the {told[rank].room:,} that are left"
                )
        return found

    def _of(self, iteration: int, owner: int) -> Copy:
        """The copy of an iteration of a rank: of this one, or one that this one holds."""
        rank = self._world.coordinate.rank
        if owner != rank:
            found = self._held.of(owner, iteration)
        else:
            slot = self._slots.of(iteration)
            found = slot.copy if slot is not None else None
        if found is None:
            raise PipelineError(
                f"{self._world.coordinate} has no copy of iteration {iteration} of rank {owner}"
            )
        return found

    def _take(self, source: int) -> None:
        """Take a copy from another rank."""
        slots = []

        def make_room(head: Head) -> Copy:
            slots.append(self._slots.begin(form_of(head.entries), head.length))
            made = slots[0].copy
            assert made is not None
            return made

        mark = receive(source, self._world.control, self._wait, make_room)
        self._slots.finish(slots[0], Offer(*mark["offer"]), self._part)


def inexact(choice: Choice) -> str:
    """What is not as it was if ranks took the state of others."""
    ranks = [str(rank) for rank in range(len(choice.sources)) if not choice.own(rank)]
    if not ranks:
        return ""
    return (
        f"of rank {', '.join(ranks)} nothing was left: random state is new there, and what"
        " state= has is another replica's"
    )
