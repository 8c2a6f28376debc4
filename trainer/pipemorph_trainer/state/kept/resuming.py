"""Finds the state that a new generation goes on with, in what ranks before it have kept."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pipemorph.exits import PARTS_STAY, stay_file
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.state.kept.choice import Choice, Held, Offer, choose
from pipemorph_trainer.state.kept.composed import Composed, Source, compose
from pipemorph_trainer.state.kept.copies import Copy, form_of, room
from pipemorph_trainer.state.kept.exchange import Head, receive, send
from pipemorph_trainer.state.kept.held import HeldCopies
from pipemorph_trainer.state.kept.lending import (
    Needs,
    lent,
    loans,
    memory_of,
    nameless,
    nearest,
    no_room,
)
from pipemorph_trainer.state.kept.slots import Slot, Slots
from pipemorph_trainer.state.kept.values import Values
from pipemorph_trainer.topology.world import World

LAYOUT = ("split", "rank")
"""Of what a copy is of, what differs between layouts."""


class _Told(NamedTuple):
    """What a rank tells of its copies. ``of``: the rank that those at its ``place`` are of;
    ``held``: of ranks of another pod; ``size``: bytes of the largest; ``room``: that it has;
    ``saved``: the iteration of the newest checkpoint; ``moved``: ranks have left one for this
    generation, which has another layout; ``damaged``: another copy has other bytes than were
    written."""

    of: int
    place: int
    offers: tuple[Offer, ...]
    held: Held
    size: int
    room: int
    saved: int
    reason: str
    moved: bool = False
    damaged: bool = False


class Resuming:
    """All ranks agree on what they go on with (:meth:`agree`), and each gets it (:meth:`state`).

    ``slots``, ``held``: the copies at the ``place`` of this rank, and those of another pod that it
    holds. ``part``: what its own copies have to be of. ``alike``: of every rank, what its state
    depends on.
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
        place: int,
    ) -> None:
        self._folder, self._slots, self._held = folder, slots, held
        self._place = place
        self._values, self._world, self._wait = values, world, wait
        self._part, self._alike, self._generation = part, alike, generation
        self.moved = False
        """Whether ranks have just left for a new layout."""
        self.left: Slot | None = None
        """Then the copy that was left at this place: of another rank, or of another part."""
        self.split: list[int] = list(part["split"])
        """The split of the copies that ranks go on with."""
        self._at: list[tuple[int, int]] = []
        """By rank, where its copies are: the rank whose place that is now, and that place."""
        self._borrowed: dict[int, Copy] = {}
        """By rank, what this one's new part takes of the copy of one in another pod."""

    def agree(self, saved: int, why: str) -> Choice | str:
        """From whose copy of which iteration each rank goes on; or why there is none. Collective
        over all ranks. ``saved``: the iteration of the newest checkpoint, which goes before what is
        older; ``why``: this rank keeps nothing.

        Raises :class:`PipelineError` on all ranks if some have just moved and not all have their
        own copy.
        """
        told = self._world.tell_all(self._told(saved, why), _Told)
        self.moved = any(each.moved for each in told)
        of = {each.of: (rank, each.place) for rank, each in enumerate(told)}
        self._at = [of.get(rank, (rank, told[rank].place)) for rank in range(len(told))]
        found = self._choose(told)
        if self.moved and (isinstance(found, str) or not found.exact):
            lacking = found if isinstance(found, str) else shortfall(found)
            raise PipelineError(f"ranks do not have their copies in their new layout: {lacking}")
        return found

    def state(self, found: Choice) -> Copy | Composed | str:
        """The state that this rank goes on with, of its present part; or why that of a rank does
        not fit, the same on all. Collective over all ranks. Raises :class:`PipelineError` on all
        ranks instead if they have just moved."""
        rank, control = self._world.coordinate.rank, self._world.control
        here = self._slots.of(found.iteration)
        left = here.copy if here is not None else None
        if self.moved:
            assert left is not None, "all ranks have their copies"
            self.left, self.split = here, left.mark["split"]
        # In one order on all ranks, so that no two wait for each other.
        for to, source in enumerate(found.sources):
            at = source if to in found.neighbours else self._at[source][0]
            if at == rank != to:
                self._wait.waiting.begin(f"rank {to} to take its state")
                # Not what this rank has taken meanwhile.
                copy = self._held_of(found.iteration, to) if to in found.neighbours else left
                assert copy is not None, "this rank has said that it has one"
                send(copy, to, control, self._wait)
                self._wait.waiting.end()
            elif to == rank != at:
                self._wait.waiting.begin(f"its state from rank {at}")
                self._take(at)
                self._wait.waiting.end()
        copy = self._own(found.iteration)
        relaid = copy.mark["split"] != self._part["split"]
        if relaid:
            self._borrow(copy)
        state: Copy | Composed | str = copy
        if relaid:
            state = self._composed(copy, found.iteration)
        if not isinstance(state, str):
            state = self._values.misfit(state.form, state.object) or state
        if text := self._misfit(state if isinstance(state, str) else "", relaid=relaid):
            return text
        assert not isinstance(state, str), "all ranks hear of a misfit"
        return state

    def _misfit(self, why: str, *, relaid: bool = False) -> str:
        """Tell all ranks why the state of this one does not fit, if so. Returns that of the first
        such rank, the same on all. Raises :class:`PipelineError` instead if ranks have just moved:
        then rank 0 says that the parts stay, if other parts (``relaid``) would be no better."""
        for each, told in enumerate(self._world.tell_all(why, str)):
            if told:
                text = f"the kept state of rank {each} does not fit its stage: {told}"
                if self.moved and relaid and self._world.coordinate.rank == 0:
                    # So it would be with any other parts.
                    (self._folder / stay_file(self._generation)).write_text(f"{PARTS_STAY}{told}")
                if self.moved:
                    raise PipelineError(text)
                return text
        return ""

    def _borrow(self, copy: Copy) -> None:
        """Take what this rank's part lacks, and ranks in other pods have. Collective over all
        ranks: all have left with the same split. ``copy``: of this rank. Raises
        :class:`PipelineError`, on all ranks if one has no room for it."""
        place, world = self._world.coordinate, self._world
        own, path = Source(copy, place.stage), self._folder / f"lent.rank-{place.rank}"
        needs = Needs(memory_of(self._folder), room(path))
        if place.column == 0:
            needs = replace(needs, held=own.sizes, wanted=tuple(self._values.wanted().names))
        told, waiting = world.tell_all(needs, Needs), self._wait.waiting
        found = loans(told, place.mesh)
        if why := no_room(found, told):
            raise PipelineError(why)
        for loan in found:
            try:
                if loan.source == place.rank:
                    waiting.begin(f"rank {loan.to} to take layers")
                    made = lent(own, loan.names, path)
                    send(made, loan.to, world.control, self._wait)
                    waiting.end()
                elif loan.to == place.rank:
                    waiting.begin(f"layers from rank {loan.source}")
                    self._borrowed[loan.source] = self._received(loan.source, path)
                    waiting.end()
            except OSError as error:
                raise PipelineError(
                    f"{place} has no memory for layers that rank {loan.source} lends to rank"
                    f" {loan.to}: {error.strerror}"
                ) from error

    def _received(self, source: int, path: Path) -> Copy:
        """What another rank lends."""
        made: list[Copy] = []

        def make_room(head: Head) -> Copy:
            made.append(nameless(path, form_of(head.entries), head.length))
            return made[0]

        mark = receive(source, self._world.control, self._wait, make_room)
        made[0].finish(mark)
        return made[0]

    def _composed(self, own: Copy, iteration: int) -> Composed | str:
        """The state of this rank's new part; or why there is none."""
        place, generation = self._world.coordinate, self._generation
        split = own.mark["split"]

        def of_split(mark: Mapping[str, Any]) -> bool:
            return bool(mark.get("split") == split)

        def others() -> Iterator[Source]:
            """Those of the same column, the nearest stages first."""
            for stage in nearest(place):
                rank = place.at_stage(stage)
                if rank in self._borrowed:
                    yield Source(self._borrowed[rank], stage)
                    continue
                where = f"rank-{self._at[rank][1]}.generation-{generation}"
                slots = Slots(self._folder / where)
                slots.find(of_split, compared=True)
                slot = slots.of(iteration)
                if slot is not None and slot.copy is not None:
                    yield Source(slot.copy, stage)

        wanted = self._values.wanted()
        return compose(Source(own, wanted.stage), others(), wanted)

    def _told(self, saved: int, why: str) -> _Told:
        rank = self._world.coordinate.rank
        if why:
            return _Told(rank, self._place, (), {}, 0, 0, saved, why)
        before, part = self._generation - 1, self._part

        def alike(mark: Mapping[str, Any], but: Collection[str]) -> bool:
            return all(mark.get(name) == part[name] for name in part if name not in but)

        def fits(mark: Mapping[str, Any]) -> bool:
            # Ranks that have just left may have had another layout.
            return alike(mark, LAYOUT if mark.get("left") == before else ())

        offers = tuple(self._slots.find(fits))
        held, size = self._held.offers(
            lambda mark: alike(mark, LAYOUT if mark.get("left") == before else ("rank",))
        )
        left = room(self._slots.folder / "a")
        marks = [self._own(offer.iteration).mark for offer in offers]
        # If a pod was lost as they left, they are back where they were: any copies will do.
        moved = any(not alike(mark, ()) for mark in marks)
        of = next((mark["rank"] for mark in marks if mark.get("left") == before), part["rank"])
        return _Told(
            of if moved else rank,
            self._place,
            offers,
            held,
            max(size, self._slots.size),
            left,
            saved,
            "",
            moved,
            self._slots.damaged,
        )

    def _choose(self, told: Sequence[_Told]) -> Choice | str:
        # What is at the place of a rank may be another one's.
        offers = [
            told[holder].offers if told[holder].of == rank else ()
            for rank, (holder, _) in enumerate(self._at)
        ]
        found = choose(offers, self._alike, [each.held for each in told])
        damaged = [f"a copy of rank {r} is damaged" for r, each in enumerate(told) if each.damaged]
        if isinstance(found, str):
            reasons = [f"rank {r}: {each.reason}" for r, each in enumerate(told) if each.reason]
            return "; ".join([found, *reasons[:1], *damaged[:1]])
        if damaged:
            why = "; ".join(filter(None, [found.why_not_newer, damaged[0]]))
            found = replace(found, why_not_newer=why)
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

    def _own(self, iteration: int) -> Copy:
        """The newest copy of an iteration at the place of this rank."""
        slot = self._slots.of(iteration)
        if slot is None or slot.copy is None:
            where = self._world.coordinate
            raise PipelineError(f"{where} has no copy of iteration {iteration} at its place")
        return slot.copy

    def _held_of(self, iteration: int, owner: int) -> Copy:
        """The copy of an iteration that this rank holds of one of another pod."""
        found = self._held.of(owner, iteration, self._part["split"])
        if found is None:
            where = self._world.coordinate
            raise PipelineError(f"{where} has no copy of iteration {iteration} of rank {owner}")
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
        # Its layers may still be others.
        part = {**self._part, "split": mark["split"]}
        self._slots.finish(slots[0], Offer(*mark["offer"]), part)


def shortfall(choice: Choice) -> str:
    """What is not as it was if ranks took the state of others, and why none goes on from a newer
    iteration."""
    ranks = [str(rank) for rank in range(len(choice.sources)) if not choice.own(rank)]
    inexact = (
        f"of rank {', '.join(ranks)} nothing was left: random state is new there, and what"
        " state= has is another replica's"
    )
    return "; ".join(filter(None, (inexact if ranks else "", choice.why_not_newer)))
