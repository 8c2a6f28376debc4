"""Delivered values and their changes since: the hysteresis of reports.

The functions at the end classify differences by urgency, for each kind of value.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

from pipemorph.protocol import Health, LinkState, ReductionHealth, StageState, StragglersView

MATERIAL_CHANGE = 1 / 16
"""Relative change of a delay that is reported at once: a change by a quarter may require another
plan, and it may add up over several reports."""
NOTICEABLE_CHANGE, PLANNED_TIME_CHANGE = 0.05, 0.01
"""Least relative changes that are reported: of a time, and of a time that plans are made of."""
PACE_CHANGE = 0.1
"""Relative change of a stage's newest times that may make it slow or healthy."""

ENOUGH_PROFILES = 5, 9
"""Iterations in a rank's medians from which it is compared with others, and with its past."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ChangeUrgency(IntEnum):
    """Urgency of a difference. LATER: with the next report."""

    NONE = 0
    LATER = 1
    NOW = 2


@dataclass
class ByteBudget:
    """Budget of the remaining bytes in one report."""

    bytes_remaining: int

    def reserve_bytes(self, size: int) -> bool:
        """Use ``size`` bytes and one for a comma, if there are enough."""
        if size + 1 > self.bytes_remaining:
            return False
        self.bytes_remaining -= size + 1
        return True

    def split_off(self, size: float) -> ByteBudget:
        """Split off at most ``size`` bytes; :meth:`return_unused` takes the rest back."""
        part = ByteBudget(min(int(size), self.bytes_remaining))
        self.bytes_remaining -= part.bytes_remaining
        return part

    def return_unused(self, part: ByteBudget) -> None:
        """Return the bytes that ``part`` has not used."""
        self.bytes_remaining += part.bytes_remaining


class DeltaTracker(Generic[K, V]):
    """Values of one ``kind`` by key, and the changes that the host does not have.

    ``differs(sent, new)``: urgency of a new value for a host that has the ``sent`` one. ``ends``:
    True for the last value of a key, which is dropped once it is delivered.
    """

    def __init__(
        self,
        kind: Any,
        key: Callable[[V], K],
        differs: Callable[[V, V], ChangeUrgency],
        *,
        ends: Callable[[V], bool] = lambda _: False,
    ) -> None:
        self._adapter: TypeAdapter[V] = TypeAdapter(kind)
        self._key, self._classify_change, self._is_final = key, differs, ends
        self._values: dict[K, V] = {}
        self._delivered_values: dict[K, V] = {}
        self._urgent_keys: dict[K, None] = {}
        self._later_keys: dict[K, None] = {}
        """Keys whose values have changed; those that wait the longest first."""

    def __len__(self) -> int:
        """Number of changes."""
        return len(self._urgent_keys) + len(self._later_keys)

    def has_value(self, key: K) -> bool:
        """True if there is a value of a key."""
        return key in self._values

    @property
    def has_urgent(self) -> bool:
        return bool(self._urgent_keys)

    def update_value(self, value: V) -> None:
        """Update the newest value of a key."""
        key = self._key(value)
        if key not in self._delivered_values and key not in self._values and self._is_final(value):
            return
        self._values[key] = value
        self._classify_key(key)

    def _classify_key(self, key: K) -> None:
        """Queue a key by the urgency of its newest value; in the same queue its place stays."""
        value, sent = self._values[key], self._delivered_values.get(key)
        change = ChangeUrgency.NOW if sent is None else self._classify_change(sent, value)
        if change is not ChangeUrgency.NOW:
            self._urgent_keys.pop(key, None)
        if change is not ChangeUrgency.LATER:
            self._later_keys.pop(key, None)
        if change is ChangeUrgency.NOW:
            self._urgent_keys[key] = None
        elif change is ChangeUrgency.LATER:
            self._later_keys[key] = None

    def take_changes(self, budget: ByteBudget, most: int) -> list[V]:
        """Take the changes that fit, at most ``most``, urgent first; pending until delivered."""
        found: list[V] = []
        for key in chain(self._urgent_keys, self._later_keys):
            value = self._values[key]
            if len(found) == most or not budget.reserve_bytes(self._count_bytes(value)):
                break
            found.append(value)
        return found

    def _count_bytes(self, value: V) -> int:
        return len(self._adapter.dump_json(value, exclude_defaults=True))

    def record_delivered(self, values: Iterable[V]) -> None:
        """Record that the host has these values, with which newer ones are compared."""
        for value in values:
            key = self._key(value)
            if self._values.get(key) is value and self._is_final(value):
                for each in (
                    self._values,
                    self._delivered_values,
                    self._urgent_keys,
                    self._later_keys,
                ):
                    each.pop(key, None)
                continue
            self._delivered_values[key] = value
            if key in self._values:
                self._classify_key(key)

    def mark_all_changed(self) -> None:
        """Mark everything as changed: the host has lost the delivered values."""
        self._delivered_values.clear()
        for key, value in list(self._values.items()):
            if self._is_final(value):
                del self._values[key]
        self._urgent_keys, self._later_keys = dict.fromkeys(self._values), {}


def classify_link_change(sent: LinkState, new: LinkState, min_delay: float) -> ChangeUrgency:
    """Urgency of a link's change. ``min_delay``: seconds below which one of a delay is noise."""
    for name in ("health", "failed_over", "route", "transport"):
        if getattr(new, name) != getattr(sent, name):
            return ChangeUrgency.NOW
    if new.health is not Health.HEALTHY:
        least = max(min_delay / 4, MATERIAL_CHANGE * sent.delay)
        moved = max(abs(new.delay - sent.delay), abs(new.transfer - sent.transfer))
        if bool(new.recent) != bool(sent.recent):
            return ChangeUrgency.NOW
        if moved > least or (sent.in_doubt and not new.in_doubt):
            return ChangeUrgency.NOW
        return ChangeUrgency.NONE if new == sent else ChangeUrgency.LATER
    same = new.since_iteration == sent.since_iteration
    same = same and abs(new.confidence - sent.confidence) <= NOTICEABLE_CHANGE
    same = same and all(
        abs(base - sent.bases.get(route, 0.0)) <= PLANNED_TIME_CHANGE * base
        for route, base in new.bases.items()
    )
    moved = abs(new.wire_time - sent.wire_time)
    return (
        ChangeUrgency.NONE
        if same and moved <= PLANNED_TIME_CHANGE * sent.wire_time
        else ChangeUrgency.LATER
    )


def classify_stage_change(sent: StageState, new: StageState) -> ChangeUrgency:
    """Urgency of a stage's change: NOW if it became faster."""
    scale = max(sent.forward, sent.backward_input + sent.backward_weight)
    names = ("forward", "backward_input", "backward_weight", "fused_backward")
    pairs = [(getattr(sent, name), getattr(new, name)) for name in names]
    longer = [now - before for before, now in pairs if None not in (before, now)]
    if min(longer) < -PACE_CHANGE * scale:
        return ChangeUrgency.NOW  # The plan may still be one for a slow stage.
    if max(map(abs, longer)) > PLANNED_TIME_CHANGE * scale or pairs[-1].count(None) == 1:
        return ChangeUrgency.LATER
    exact = ("activation_bytes", "input_bytes", "peak_memory", "crowding", "clock")
    if any(getattr(sent, name) != getattr(new, name) for name in exact):
        return ChangeUrgency.LATER
    if abs(new.recent - sent.recent) > PACE_CHANGE * sent.recent:
        return ChangeUrgency.LATER
    if any(sent.profiles < enough <= new.profiles for enough in ENOUGH_PROFILES):
        return ChangeUrgency.LATER
    copy = _is_near(sent.offload_copy or 0.0, new.offload_copy or 0.0)
    return ChangeUrgency.NONE if copy else ChangeUrgency.LATER


def classify_reduction_change(sent: ReductionHealth, new: ReductionHealth) -> ChangeUrgency:
    """Urgency of a reduction's change: NOW if it became slow, healthy, or has another edge."""
    if new.slow != sent.slow or new.slowest != sent.slowest:
        return ChangeUrgency.NOW
    same = (new.bytes, new.normal is None) == (sent.bytes, sent.normal is None)
    pairs = (
        (sent.seconds, new.seconds),
        (sent.exposed, new.exposed),
        (sent.normal or 0.0, new.normal or 0.0),
    )
    return (
        ChangeUrgency.NONE
        if same and all(_is_near(*pair) for pair in pairs)
        else ChangeUrgency.LATER
    )


def classify_straggler_change(sent: StragglersView, new: StragglersView) -> ChangeUrgency:
    """Urgency of a change of stragglers: NOW if other stages are slow, since their replicas may get
    fewer microbatches."""
    if {(s.stage, s.column) for s in sent.slowest} != {(s.stage, s.column) for s in new.slowest}:
        return ChangeUrgency.NOW
    if (sent.known, sent.count) != (new.known, new.count):
        return ChangeUrgency.LATER
    named = [[(s.stage, s.column, s.clock) for s in view.slowest] for view in (sent, new)]
    if named[0] != named[1]:
        return ChangeUrgency.LATER
    times = [
        [time for s in view.slowest for time in (s.seconds, s.usual)] + list(view.paces)
        for view in (sent, new)
    ]
    same = all(map(_is_near, *times)) if len(times[0]) == len(times[1]) else False
    return ChangeUrgency.NONE if same else ChangeUrgency.LATER


def classify_any_change(sent: object, new: object) -> ChangeUrgency:
    """Urgency of any change of a value: LATER."""
    return ChangeUrgency.NONE if sent == new else ChangeUrgency.LATER


def _is_near(sent: float, new: float) -> bool:
    return abs(new - sent) <= NOTICEABLE_CHANGE * sent
