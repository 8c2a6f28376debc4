"""What a host has been told, and what of it has changed since: the hysteresis of reports."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Change(IntEnum):
    """How soon the host has to know of a difference. LATER: with the next report."""

    NONE = 0
    LATER = 1
    NOW = 2


@dataclass
class Budget:
    """Bytes left in one report."""

    bytes_left: int

    def admit(self, size: int) -> bool:
        """Use ``size`` bytes and one for a comma, if there are enough."""
        if size + 1 > self.bytes_left:
            return False
        self.bytes_left -= size + 1
        return True

    def part(self, size: float) -> Budget:
        """Split off at most ``size`` bytes; the rest of them comes :meth:`back` later."""
        part = Budget(min(int(size), self.bytes_left))
        self.bytes_left -= part.bytes_left
        return part

    def back(self, part: Budget) -> None:
        """Take back the bytes that ``part`` has not used."""
        self.bytes_left += part.bytes_left


class News(Generic[K, V]):
    """Values by key, of one ``kind``, and those of them that the host does not have.

    ``differs(told, new)``: whether a value is news to a host that has been ``told`` another one.
    ``ends``: whether a value is the last of its key: nothing is kept of it once it has been told.
    ``first``: how soon the host has to know of a value of a new key.
    """

    def __init__(
        self,
        kind: Any,
        key: Callable[[V], K],
        differs: Callable[[V, V], Change],
        *,
        ends: Callable[[V], bool] = lambda _: False,
        first: Change = Change.NOW,
    ) -> None:
        self._adapter: TypeAdapter[V] = TypeAdapter(kind)
        self._key, self._differs, self._ends, self._first = key, differs, ends, first
        self._values: dict[K, V] = {}
        self._told: dict[K, V] = {}
        self._now: dict[K, None] = {}
        self._later: dict[K, None] = {}
        """Keys whose values are news; those that wait the longest first."""

    def __len__(self) -> int:
        """Number of news."""
        return len(self._now) + len(self._later)

    @property
    def urgent(self) -> bool:
        return bool(self._now)

    def put(self, value: V) -> None:
        """Note the newest value of a key."""
        key = self._key(value)
        if key not in self._told and key not in self._values and self._ends(value):
            return
        self._values[key] = value
        self._sort(key)

    def _sort(self, key: K) -> None:
        """Put a key where its newest value belongs; it keeps its place if that is the same."""
        value, told = self._values[key], self._told.get(key)
        change = self._first if told is None else self._differs(told, value)
        if change is not Change.NOW:
            self._now.pop(key, None)
        if change is not Change.LATER:
            self._later.pop(key, None)
        if change is Change.NOW:
            self._now[key] = None
        elif change is Change.LATER:
            self._later[key] = None

    def take(self, budget: Budget, most: int) -> list[V]:
        """The news that fit, at most ``most`` of them: what is urgent first. It stays news until it
        is :meth:`delivered`."""
        found: list[V] = []
        for key in chain(self._now, self._later):
            value = self._values[key]
            if len(found) == most or not budget.admit(self._size(value)):
                break
            found.append(value)
        return found

    def _size(self, value: V) -> int:
        return len(self._adapter.dump_json(value, exclude_defaults=True))

    def delivered(self, values: Iterable[V]) -> None:
        """Note that the host has these. Newer ones of their keys are compared with them."""
        for value in values:
            key = self._key(value)
            if self._values.get(key) is value and self._ends(value):
                for each in (self._values, self._told, self._now, self._later):
                    each.pop(key, None)
                continue
            self._told[key] = value
            if key in self._values:
                self._sort(key)

    def again(self) -> None:
        """Everything is news: the host has lost what it was told."""
        self._told.clear()
        for key, value in list(self._values.items()):
            if self._ends(value):
                del self._values[key]
        self._now, self._later = dict.fromkeys(self._values), {}
