"""Agreement of all ranks on the copies from which a new generation resumes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from pipemorph.exits import LAYERS_FIXED_PREFIX, drain_refusal_file_name
from pipemorph_trainer.checkpoint.memory.composition import ComposedState, StageCopy, compose_state
from pipemorph_trainer.checkpoint.memory.copy_slots import CopySlot, CopySlots
from pipemorph_trainer.checkpoint.memory.copy_transfer import CopyHeader, receive_copy, send_copy
from pipemorph_trainer.checkpoint.memory.layer_loans import (
    LayerNeeds,
    copy_lent_layers,
    create_unnamed_copy,
    find_memory_shortage,
    identify_memory,
    list_nearest_stages,
    plan_loans,
)
from pipemorph_trainer.checkpoint.memory.neighbour_copies import NeighbourCopies
from pipemorph_trainer.checkpoint.memory.rank_state import RankState
from pipemorph_trainer.checkpoint.memory.source_choice import (
    CopyOffer,
    NeighbourOffers,
    SourceChoice,
    choose_sources,
)
from pipemorph_trainer.checkpoint.memory.state_copy import (
    StateCopy,
    find_available_bytes,
    parse_form,
)
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.executor.waiting import CollectiveWaiter
from pipemorph_trainer.topology.world import World

LAYOUT_KEYS = ("split", "rank")
"""Keys of a mark whose values differ between layouts."""


class _CopyInventory(NamedTuple):
    """Copies that a rank has. ``owner``: the rank whose copies are at its ``place``; ``offers``:
    these copies; ``neighbour_offers``: copies for ranks of another pod; ``largest_bytes``: of the
    largest copy; ``free_bytes``: where copies are; ``checkpoint_iteration``: of the newest one;
    ``reason``: why there are none; ``moved``: this generation has another layout; ``damaged``: a
    copy has other bytes than were written."""

    owner: int
    place: int
    offers: tuple[CopyOffer, ...]
    neighbour_offers: NeighbourOffers
    largest_bytes: int
    free_bytes: int
    checkpoint_iteration: int
    reason: str
    moved: bool = False
    damaged: bool = False


class ResumeAgreement:
    """Agreement of all ranks on the copies to resume from (:meth:`agree_on_sources`), and their
    :meth:`state`.

    ``slots``, ``held``: the copies at the ``place`` of this rank, and those that it holds for
    another pod. ``part``: required mark of its own copies. ``state_keys``: by rank, see
    :func:`~.source_choice.choose_sources`.
    """

    def __init__(
        self,
        folder: Path,
        slots: CopySlots,
        held: NeighbourCopies,
        values: RankState,
        *,
        world: World,
        wait: CollectiveWaiter,
        part: Mapping[str, Any],
        state_keys: Sequence[Hashable],
        generation: int,
        place: int,
    ) -> None:
        self._folder, self._slots, self._held = folder, slots, held
        self._place = place
        self._values, self._world, self._wait = values, world, wait
        self._part, self._state_keys, self._generation = part, state_keys, generation
        self.moved = False
        """True if this generation has another layout than the previous one."""
        self.previous_slot: CopySlot | None = None
        """Slot with the copy of the previous layout at this place; None if it is unchanged."""
        self.split: list[int] = list(part["split"])
        """Split of the copies that ranks resume from."""
        self._at: list[tuple[int, int]] = []
        """Location of each rank's copies: a place, preceded by the rank that now runs there."""
        self._borrowed: dict[int, StateCopy] = {}
        """Layers borrowed from ranks of other pods for this rank's new part, by rank."""

    def agree_on_sources(self, saved: int, why: str) -> SourceChoice | str:
        """Choose the iteration and each rank's source, or return why there is none. Collective over
        all ranks. ``saved``: the iteration of the newest checkpoint, which is preferred to older
        copies; ``why``: why this rank makes no copies, else empty.

        Raises :class:`PipelineError` on all ranks if the layout has just changed and some rank
        lacks its own copy.
        """
        ranks = self._world.gather_all(self._take_inventory(saved, why), _CopyInventory)
        self.moved = any(each.moved for each in ranks)
        of = {each.owner: (rank, each.place) for rank, each in enumerate(ranks)}
        self._at = [of.get(rank, (rank, ranks[rank].place)) for rank in range(len(ranks))]
        found = self._choose_sources(ranks)
        if self.moved and (isinstance(found, str) or not found.all_local):
            lacking = found if isinstance(found, str) else describe_shortfall(found)
            raise PipelineError(f"ranks do not have their copies in their new layout: {lacking}")
        return found

    def obtain_state(self, found: SourceChoice) -> StateCopy | ComposedState | str:
        """Get the state of this rank's present part, or return why that of some rank does not fit,
        the same on all. Collective over all ranks. If the layout has just changed, a misfit raises
        :class:`PipelineError` on all ranks instead."""
        rank, control = self._world.coordinate.rank, self._world.control
        here = self._slots.find_newest(found.iteration)
        previous = here.copy if here is not None else None
        if self.moved:
            assert previous is not None, "all ranks have their copies"
            self.previous_slot, self.split = here, previous.mark["split"]
        # The same order on all ranks, so that no two wait for each other.
        for to, source in enumerate(found.sources):
            at = source if to in found.neighbours else self._at[source][0]
            if at == rank != to:
                self._wait.waiting.begin_wait(f"rank {to} to receive its state")
                # `previous`, and not the copy that this rank may have received meanwhile.
                copy = (
                    self._get_neighbour_copy(found.iteration, to)
                    if to in found.neighbours
                    else previous
                )
                assert copy is not None, "this rank has announced the copy"
                send_copy(copy, to, control, self._wait)
                self._wait.waiting.end_wait()
            elif to == rank != at:
                self._wait.waiting.begin_wait(f"its state from rank {at}")
                self._receive_state(at)
                self._wait.waiting.end_wait()
        copy = self._get_own_copy(found.iteration)
        relaid = copy.mark["split"] != self._part["split"]
        if relaid:
            self._borrow_layers(copy)
        state: StateCopy | ComposedState | str = copy
        if relaid:
            state = self._compose_state(copy, found.iteration)
        if not isinstance(state, str):
            state = self._values.find_misfit(state.form, state.pickled_object) or state
        if text := self._agree_on_misfit(state if isinstance(state, str) else "", relaid=relaid):
            return text
        assert not isinstance(state, str), "all ranks learn of a misfit"
        return state

    def _agree_on_misfit(self, why: str, *, relaid: bool = False) -> str:
        """Share why the state of this rank does not fit, if so. Returns the reason of the first
        rank with a misfit, the same on all. If the layout has just changed, raises
        :class:`PipelineError` instead; with another split of the layers (``relaid``), rank 0 first
        records that the job must keep its split."""
        for each, reason in enumerate(self._world.gather_all(why, str)):
            if reason:
                text = f"the copied state of rank {each} does not fit its stage: {reason}"
                if self.moved and relaid and self._world.coordinate.rank == 0:
                    # Any other split would fail as well.
                    (self._folder / drain_refusal_file_name(self._generation)).write_text(
                        f"{LAYERS_FIXED_PREFIX}{reason}"
                    )
                if self.moved:
                    raise PipelineError(text)
                return text
        return ""

    def _borrow_layers(self, copy: StateCopy) -> None:
        """Borrow the layers that only ranks in other pods hold. Collective over all ranks, whose
        copies have one split. ``copy``: of this rank. Raises :class:`PipelineError`, on all ranks
        if one lacks memory."""
        place, world = self._world.coordinate, self._world
        own, path = StageCopy(copy, place.stage), self._folder / f"lent.rank-{place.rank}"
        needs = LayerNeeds(identify_memory(self._folder), find_available_bytes(path))
        if place.column == 0:
            needs = replace(
                needs,
                held_bytes=own.bytes_by_name,
                wanted_names=tuple(self._values.list_wanted().names),
            )
        ranks, waiting = world.gather_all(needs, LayerNeeds), self._wait.waiting
        found = plan_loans(ranks, place.mesh)
        if why := find_memory_shortage(found, ranks):
            raise PipelineError(why)
        for loan in found:
            try:
                if loan.lender == place.rank:
                    waiting.begin_wait(f"rank {loan.borrower} to receive layers")
                    made = copy_lent_layers(own, loan.names, path)
                    send_copy(made, loan.borrower, world.control, self._wait)
                    waiting.end_wait()
                elif loan.borrower == place.rank:
                    waiting.begin_wait(f"layers from rank {loan.lender}")
                    self._borrowed[loan.lender] = self._receive_loan(loan.lender, path)
                    waiting.end_wait()
            except OSError as error:
                raise PipelineError(
                    f"{place} has no memory for layers that rank {loan.lender} lends to rank"
                    f" {loan.borrower}: {error.strerror}"
                ) from error

    def _receive_loan(self, source: int, path: Path) -> StateCopy:
        """Receive the layers that another rank lends."""
        made: list[StateCopy] = []

        def create_copy(head: CopyHeader) -> StateCopy:
            made.append(create_unnamed_copy(path, parse_form(head.entries), head.length))
            return made[0]

        mark = receive_copy(source, self._world.control, self._wait, create_copy)
        made[0].finish_write(mark)
        return made[0]

    def _compose_state(self, own: StateCopy, iteration: int) -> ComposedState | str:
        """Compose the state of this rank's new part, or return why that is not possible."""
        place, generation = self._world.coordinate, self._generation
        split = own.mark["split"]

        def has_same_split(mark: Mapping[str, Any]) -> bool:
            return bool(mark.get("split") == split)

        def iterate_other_stages() -> Iterator[StageCopy]:
            """Yield the copies of other stages of the column, nearest first."""
            for stage in list_nearest_stages(place):
                rank = place.find_rank_at_stage(stage)
                if rank in self._borrowed:
                    yield StageCopy(self._borrowed[rank], stage)
                    continue
                where = f"rank-{self._at[rank][1]}.generation-{generation}"
                slots = CopySlots(self._folder / where)
                slots.adopt_copies(has_same_split, compared=True)
                slot = slots.find_newest(iteration)
                if slot is not None and slot.copy is not None:
                    yield StageCopy(slot.copy, stage)

        wanted = self._values.list_wanted()
        return compose_state(StageCopy(own, wanted.stage), iterate_other_stages(), wanted)

    def _take_inventory(self, saved: int, why: str) -> _CopyInventory:
        """Describe the copies that this rank has; ``saved``, ``why``: of
        :meth:`agree_on_sources`."""
        rank = self._world.coordinate.rank
        if why:
            return _CopyInventory(rank, self._place, (), {}, 0, 0, saved, why)
        before, part = self._generation - 1, self._part

        def matches_part(mark: Mapping[str, Any], but: Collection[str]) -> bool:
            return all(mark.get(name) == part[name] for name in part if name not in but)

        def fits_rank(mark: Mapping[str, Any]) -> bool:
            # Ranks that stopped for a new layout have copies of the previous one.
            return matches_part(mark, LAYOUT_KEYS if mark.get("sealed_by") == before else ())

        offers = tuple(self._slots.adopt_copies(fits_rank))
        held, size = self._held.list_offers(
            lambda mark: matches_part(
                mark, LAYOUT_KEYS if mark.get("sealed_by") == before else ("rank",)
            )
        )
        free = find_available_bytes(self._slots.folder / "a")
        marks = [self._get_own_copy(offer.iteration).mark for offer in offers]
        # If a pod was lost meanwhile, the layout is the previous one: any copies will do.
        moved = any(not matches_part(mark, ()) for mark in marks)
        of = next((mark["rank"] for mark in marks if mark.get("sealed_by") == before), part["rank"])
        return _CopyInventory(
            of if moved else rank,
            self._place,
            offers,
            held,
            max(size, self._slots.largest_bytes),
            free,
            saved,
            "",
            moved,
            self._slots.damaged,
        )

    def _choose_sources(self, ranks: Sequence[_CopyInventory]) -> SourceChoice | str:
        """Choose sources, unless a checkpoint is newer or some rank lacks memory."""
        # The copies at the place of a rank may be of another rank.
        offers = [
            ranks[holder].offers if ranks[holder].owner == rank else ()
            for rank, (holder, _) in enumerate(self._at)
        ]
        found = choose_sources(offers, self._state_keys, [each.neighbour_offers for each in ranks])
        damaged = [f"a copy of rank {r} is damaged" for r, each in enumerate(ranks) if each.damaged]
        if isinstance(found, str):
            reasons = [f"rank {r}: {each.reason}" for r, each in enumerate(ranks) if each.reason]
            return "; ".join([found, *reasons[:1], *damaged[:1]])
        if damaged:
            why = "; ".join(filter(None, [found.why_not_newer, damaged[0]]))
            found = replace(found, why_not_newer=why)
        if ranks[0].checkpoint_iteration > found.iteration:
            return f"the newest copy that all ranks have is of iteration {found.iteration}"
        for rank, source in enumerate(found.sources):
            size, free = ranks[source].largest_bytes, ranks[rank].free_bytes
            if rank != source and size > free // 2:
                return (
                    f"rank {rank} has no memory for its state: it takes {size:,} bytes of the"
                    f" {free:,} that are free"
                )
        return found

    def _get_own_copy(self, iteration: int) -> StateCopy:
        """Return the newest copy of an iteration at the place of this rank."""
        slot = self._slots.find_newest(iteration)
        if slot is None or slot.copy is None:
            where = self._world.coordinate
            raise PipelineError(f"{where} has no copy of iteration {iteration} at its place")
        return slot.copy

    def _get_neighbour_copy(self, iteration: int, owner: int) -> StateCopy:
        """Return the copy of an iteration that this rank holds for a rank of another pod."""
        found = self._held.find_copy(owner, iteration, self._part["split"])
        if found is None:
            where = self._world.coordinate
            raise PipelineError(f"{where} has no copy of iteration {iteration} of rank {owner}")
        return found

    def _receive_state(self, source: int) -> None:
        """Receive a copy from another rank."""
        slots = []

        def create_copy(head: CopyHeader) -> StateCopy:
            slots.append(self._slots.begin_slot(parse_form(head.entries), head.length))
            made = slots[0].copy
            assert made is not None
            return made

        mark = receive_copy(source, self._world.control, self._wait, create_copy)
        # The copy may still have the previous split.
        part = {**self._part, "split": mark["split"]}
        self._slots.finish_slot(slots[0], CopyOffer(*mark["offer"]), part)


def describe_shortfall(choice: SourceChoice) -> str:
    """Describe what was lost: the state that differs on ranks without their own copies, and why no
    newer iteration was resumed."""
    ranks = [str(rank) for rank in range(len(choice.sources)) if not choice.has_own_state(rank)]
    inexact = (
        f"rank {', '.join(ranks)} had no copy: random state is new there, and objects of state= are"
        " those of another replica"
    )
    return "; ".join(filter(None, (inexact if ranks else "", choice.why_not_newer)))
