"""Copies that a rank holds for ranks of another pod, in its own subfolder.

Each such rank has two files: one stays while the other is received. While a new split of the layers
is on trial, both are of one iteration, before and after the change. So a copy is identified by its
*split* as well: the number of layers of each stage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipemorph_trainer.checkpoint.memory.copy_transfer import CopyHeader
from pipemorph_trainer.checkpoint.memory.source_choice import CopyOffer, NeighbourOffers
from pipemorph_trainer.checkpoint.memory.state_copy import StateCopy, delete_copy

_NAME = re.compile(r"of-(\d+)\.([ab])")


class NeighbourCopies:
    """Copies in ``folder`` for ranks of another pod. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._safe: dict[int, str] = {}
        """File with the copy that stays, by rank."""

    def _get_path(self, owner: int, name: str) -> Path:
        return self._folder / f"of-{owner}.{name}"

    def _list_files(self) -> list[tuple[int, str]]:
        if not self._folder.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted((int(match[1]), match[2]) for match in names if match)

    def list_offers(self, fits: Callable[[Mapping[str, Any]], bool]) -> tuple[NeighbourOffers, int]:
        """List the whole, undamaged copies whose mark ``fits``, by rank; also returns the bytes of
        the largest."""
        found: dict[int, list[CopyOffer]] = {}
        size = 0
        for owner, name in self._list_files():
            path = self._get_path(owner, name)
            copy = StateCopy.open(path)
            if copy is not None and copy.whole and fits(copy.mark) and not copy.damaged:
                found.setdefault(owner, []).append(CopyOffer(*copy.mark["offer"]))
                size = max(size, path.stat().st_size)
        return found, size

    def find_copy(self, owner: int, iteration: int, split: Sequence[int]) -> StateCopy | None:
        """Find the whole copy of a rank's state before an iteration; None if there is none."""
        for name in "ab":
            copy = StateCopy.open(self._get_path(owner, name))
            if copy is not None and _is_copy_of(copy, iteration, split):
                return copy
        return None

    def remove_other_iterations(self, iteration: int, split: Sequence[int]) -> None:
        """Remove all copies except those of an iteration: others are older, or of iterations that
        run again."""
        for owner, name in self._list_files():
            path = self._get_path(owner, name)
            copy = StateCopy.open(path)
            if copy is not None and _is_copy_of(copy, iteration, split):
                self._safe[owner] = name
            else:
                delete_copy(path)

    def remove_other_owners(self, owners: Collection[int]) -> None:
        """Remove the copies of all other ranks, which were neighbours in an earlier layout."""
        for owner, name in self._list_files():
            if owner not in owners:
                delete_copy(self._get_path(owner, name))

    def remove_all(self) -> None:
        self._safe.clear()
        for owner, name in self._list_files():
            delete_copy(self._get_path(owner, name))

    def begin_receive(self, owner: int, head: CopyHeader) -> StateCopy:
        """Return a copy to receive into, next to the one that stays. Raises :class:`OSError` if
        there is no memory for it."""
        path = self._get_path(owner, self._get_spare_name(owner))
        copy = StateCopy.open(path)
        if copy is None or not head.fits_copy(copy):
            copy = head.create_copy(path)
        copy.begin_write()
        return copy

    def finish_receive(self, owner: int) -> None:
        """Make the received copy the one that stays."""
        self._safe[owner] = self._get_spare_name(owner)

    def _get_spare_name(self, owner: int) -> str:
        return "b" if self._safe.get(owner) == "a" else "a"


def _is_copy_of(copy: StateCopy, iteration: int, split: Sequence[int]) -> bool:
    """True if a copy is whole, and of this iteration and split."""
    if not copy.whole:
        return False
    mark = copy.mark
    return mark.get("split") == [*split] and CopyOffer(*mark["offer"]).iteration == iteration
