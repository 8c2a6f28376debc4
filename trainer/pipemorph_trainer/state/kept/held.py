"""The copies that a rank holds of ranks of another pod, in its own subfolder.

There are two files of each such rank: while one is received, the other stays. With new parts of
the model on trial these are of one iteration, before and after the change of parts: a copy is known
by its *split* as well, how many layers each stage holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipemorph_trainer.state.kept.choice import Held, Offer
from pipemorph_trainer.state.kept.copies import Copy, remove
from pipemorph_trainer.state.kept.exchange import Head

_NAME = re.compile(r"of-(\d+)\.([ab])")


class HeldCopies:
    """Those in ``folder``. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._safe: dict[int, str] = {}
        """By rank, the file with the copy that stays."""

    def _path(self, owner: int, name: str) -> Path:
        return self._folder / f"of-{owner}.{name}"

    def _found(self) -> list[tuple[int, str]]:
        if not self._folder.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted((int(match[1]), match[2]) for match in names if match)

    def offers(self, fits: Callable[[Mapping[str, Any]], bool]) -> tuple[Held, int]:
        """The whole copies whose mark ``fits``, by rank, but no damaged ones; and the bytes of the
        largest."""
        found: dict[int, list[Offer]] = {}
        size = 0
        for owner, name in self._found():
            path = self._path(owner, name)
            copy = Copy.open(path)
            if copy is not None and copy.whole and fits(copy.mark) and not copy.damaged:
                found.setdefault(owner, []).append(Offer(*copy.mark["offer"]))
                size = max(size, path.stat().st_size)
        return found, size

    def of(self, owner: int, iteration: int, split: Sequence[int]) -> Copy | None:
        """The whole copy of a rank before an iteration."""
        for name in "ab":
            copy = Copy.open(self._path(owner, name))
            if copy is not None and _is_of(copy, iteration, split):
                return copy
        return None

    def keep_only(self, iteration: int, split: Sequence[int]) -> None:
        """Remove all copies but those of an iteration: others are of iterations that run again, or
        older."""
        for owner, name in self._found():
            path = self._path(owner, name)
            copy = Copy.open(path)
            if copy is not None and _is_of(copy, iteration, split):
                self._safe[owner] = name
            else:
                remove(path)

    def keep_of(self, owners: Collection[int]) -> None:
        """Remove the copies of all other ranks: these were neighbours in an earlier layout."""
        for owner, name in self._found():
            if owner not in owners:
                remove(self._path(owner, name))

    def remove(self) -> None:
        self._safe.clear()
        for owner, name in self._found():
            remove(self._path(owner, name))

    def room(self, owner: int, head: Head) -> Copy:
        """A copy to receive into, beside the one that stays. Raises :class:`OSError` if there is no
        memory for it."""
        path = self._path(owner, self._other(owner))
        copy = Copy.open(path)
        if copy is None or not head.fits(copy):
            copy = head.make(path)
        copy.begin()
        return copy

    def received(self, owner: int) -> None:
        """The copy that was received is the one that stays from now on."""
        self._safe[owner] = self._other(owner)

    def _other(self, owner: int) -> str:
        return "b" if self._safe.get(owner) == "a" else "a"


def _is_of(copy: Copy, iteration: int, split: Sequence[int]) -> bool:
    """Whether a copy is whole, and of an iteration and a split."""
    if not copy.whole:
        return False
    mark = copy.mark
    return mark.get("split") == [*split] and Offer(*mark["offer"]).iteration == iteration
