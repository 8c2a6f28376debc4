"""What a host has been told, and what of it has changed since: the hysteresis of reports.

Which differences are worth telling, and how soon, is said at the end, for each kind of value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from pipemorph.wire import Health, LinkState, ReductionHealth, StageState, StragglersView

MATERIAL = 1 / 16
"""Relative change of a delay that the host has to know at once: one of a quarter may ask for
another plan, and it need not be since the last report."""
NOTICEABLE, PLANNED = 0.05, 0.01
"""Relative changes of a time, and of one that plans are made of, that are worth telling at all."""
OTHER_PACE = 0.1
"""Relative change of the time of a stage's newest iterations that may make it slow, or well."""

ENOUGH_PROFILES = 5, 9
"""Iterations in the medians of a rank from which it is compared with others, and with its past."""

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
    """

    def __init__(
        self,
        kind: Any,
        key: Callable[[V], K],
        differs: Callable[[V, V], Change],
        *,
        ends: Callable[[V], bool] = lambda _: False,
    ) -> None:
        self._adapter: TypeAdapter[V] = TypeAdapter(kind)
        self._key, self._differs, self._ends = key, differs, ends
        self._values: dict[K, V] = {}
        self._told: dict[K, V] = {}
        self._now: dict[K, None] = {}
        self._later: dict[K, None] = {}
        """Keys whose values are news; those that wait the longest first."""

    def __len__(self) -> int:
        """Number of news."""
        return len(self._now) + len(self._later)

    def has(self, key: K) -> bool:
        """Whether there is a value of a key."""
        return key in self._values

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
        change = Change.NOW if told is None else self._differs(told, value)
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


def link_differs(told: LinkState, new: LinkState, min_delay: float) -> Change:
    """``min_delay``: seconds below which a change of a delay is noise."""
    for name in ("health", "failed_over", "route", "transport"):
        if getattr(new, name) != getattr(told, name):
            return Change.NOW
    if new.health is not Health.HEALTHY:
        least = max(min_delay / 4, MATERIAL * told.delay)
        moved = max(abs(new.delay - told.delay), abs(new.transfer - told.transfer))
        if bool(new.recent) != bool(told.recent):
            return Change.NOW
        if moved > least or (told.in_doubt and not new.in_doubt):
            return Change.NOW
        return Change.NONE if new == told else Change.LATER
    same = new.since_iteration == told.since_iteration
    same = same and abs(new.confidence - told.confidence) <= NOTICEABLE
    same = same and all(
        abs(base - told.bases.get(route, 0.0)) <= PLANNED * base
        for route, base in new.bases.items()
    )
    moved = abs(new.wire_time - told.wire_time)
    return Change.NONE if same and moved <= PLANNED * told.wire_time else Change.LATER


def stage_differs(told: StageState, new: StageState) -> Change:
    scale = max(told.forward, told.backward_input + told.backward_weight)
    names = ("forward", "backward_input", "backward_weight", "fused_backward")
    pairs = [(getattr(told, name), getattr(new, name)) for name in names]
    longer = [now - before for before, now in pairs if None not in (before, now)]
    if min(longer) < -OTHER_PACE * scale:
        return Change.NOW  # The plan may be one for a stage that was slow.
    if max(map(abs, longer)) > PLANNED * scale or pairs[-1].count(None) == 1:
        return Change.LATER
    exact = ("activation_bytes", "input_bytes", "peak_memory", "crowding", "clock")
    if any(getattr(told, name) != getattr(new, name) for name in exact):
        return Change.LATER
    if abs(new.recent - told.recent) > OTHER_PACE * told.recent:
        return Change.LATER
    if any(told.profiles < enough <= new.profiles for enough in ENOUGH_PROFILES):
        return Change.LATER
    copy = _near(told.offload_copy or 0.0, new.offload_copy or 0.0)
    return Change.NONE if copy else Change.LATER


def reduction_differs(told: ReductionHealth, new: ReductionHealth) -> Change:
    if new.slow != told.slow or new.slowest != told.slowest:
        return Change.NOW
    same = (new.bytes, new.normal is None) == (told.bytes, told.normal is None)
    pairs = (
        (told.seconds, new.seconds),
        (told.exposed, new.exposed),
        (told.normal or 0.0, new.normal or 0.0),
    )
    return Change.NONE if same and all(_near(*pair) for pair in pairs) else Change.LATER


def stragglers_differ(told: StragglersView, new: StragglersView) -> Change:
    if (told.known, told.count) != (new.known, new.count):
        return Change.LATER
    named = [[(s.stage, s.column, s.clock) for s in view.slowest] for view in (told, new)]
    if named[0] != named[1]:
        return Change.LATER
    times = [
        [time for s in view.slowest for time in (s.seconds, s.usual)] + list(view.paces)
        for view in (told, new)
    ]
    same = all(map(_near, *times)) if len(times[0]) == len(times[1]) else False
    return Change.NONE if same else Change.LATER


def unlike(told: object, new: object) -> Change:
    return Change.NONE if told == new else Change.LATER


def _near(told: float, new: float) -> bool:
    return abs(new - told) <= NOTICEABLE * told
