"""Files of a rank's copies: which of them is written next, and which is still needed.

Two files are enough without other readers: the newest stays while the other is written. A *pin*
reserves a copy for a reader in another thread; then more files are made, at most six in all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipemorph_trainer.checkpoint.memory.source_choice import CopyOffer
from pipemorph_trainer.checkpoint.memory.state_copy import CopyForm, StateCopy, delete_copy

NAMES = "abcdef"


class CopySlot:
    """File for a copy. ``offer``: describes its whole copy; None if it has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.copy: StateCopy | None = None
        self.offer: CopyOffer | None = None
        self.pins = 0
        self.order = 0
        """Sort key: a copy that was finished later has a higher one."""


class CopySlots:
    """Slots in ``folder``. ``whole``: number of finished copies that stay while another is written.
    Any thread may call :meth:`pin_newest` and the unpin methods; a single thread all others."""

    def __init__(self, folder: Path, *, whole: int = 1) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._whole = whole
        self._slots = [CopySlot(folder / name) for name in NAMES]
        self._order = 0
        self.damaged = False
        """True if :meth:`adopt_copies` has found a damaged copy."""

    def adopt_copies(
        self, fits: Callable[[Mapping[str, Any]], bool], *, compared: bool = False
    ) -> list[CopyOffer]:
        """Take over the whole, undamaged copies whose mark ``fits``, and return their offers.
        ``compared``: their owner has already compared the checksums."""
        for slot in self._slots:
            copy = StateCopy.open(slot.path)
            if copy is None or not copy.whole or not fits(copy.mark):
                continue
            if not compared and copy.damaged:
                self.damaged = True
            else:
                slot.copy, slot.offer = copy, CopyOffer(*copy.mark["offer"])
        with self._lock:
            for slot in sorted(self._list_finished(), key=_get_iteration):
                self._order += 1
                slot.order = self._order
            return [slot.offer for slot in self._slots if slot.offer is not None]

    @property
    def pinned(self) -> bool:
        return any(slot.pins for slot in self._slots)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest copy."""
        found = [slot.path.stat().st_size for slot in self._slots if slot.copy is not None]
        return max(found, default=0)

    def _list_finished(self) -> list[CopySlot]:
        """List the slots with a whole copy, newest first."""
        found = [slot for slot in self._slots if slot.offer is not None]
        return sorted(found, key=lambda slot: -slot.order)

    def begin_slot(self, form: CopyForm, object_bytes: int) -> CopySlot:
        """Return a slot to write a copy of this form to. It is not whole until :meth:`finish_slot`.

        Raises :class:`OSError` if there is no memory for it.
        """
        with self._lock:
            needed = self._list_finished()[: self._whole]
            free = [slot for slot in self._slots if not slot.pins and slot not in needed]
            if not free:
                raise RuntimeError(f"all {len(self._slots)} copies of the state are in use")
            # Prefers a file that exists, then the oldest copy.
            slot = min(free, key=lambda each: (each.copy is None, each.order))
            slot.offer = None
            if slot.copy is not None:
                slot.copy.begin_write()
        if slot.copy is None or not slot.copy.can_hold(form, object_bytes):
            slot.copy = None
            slot.copy = StateCopy.create(slot.path, form, object_bytes)
        return slot

    def finish_slot(self, slot: CopySlot, offer: CopyOffer, mark: Mapping[str, Any]) -> None:
        """Mark the copy in a slot as whole, and as the newest if it was being written."""
        assert slot.copy is not None
        slot.copy.finish_write({**mark, "offer": list(offer)})
        with self._lock:
            if slot.offer is None:
                self._order += 1
                slot.order = self._order
            slot.offer = offer

    def find_newest(self, iteration: int) -> CopySlot | None:
        """Find the slot with the newest whole copy of an iteration; None if there is none."""
        with self._lock:
            found = [s for s in self._list_finished() if s.offer and s.offer.iteration == iteration]
            return found[0] if found else None

    def pin_newest(self) -> list[CopySlot]:
        """Pin the two newest whole copies until :meth:`unpin_slot` of each. Newest first."""
        with self._lock:
            found = self._list_finished()[:2]
            for slot in found:
                slot.pins += 1
            return found

    def unpin_slot(self, slot: CopySlot) -> None:
        with self._lock:
            slot.pins = max(0, slot.pins - 1)

    def unpin_all(self, but: CopySlot | None = None) -> None:
        """Remove all pins ``but`` that of one slot: the other copies may be overwritten."""
        with self._lock:
            for slot in self._slots:
                slot.pins = int(slot is but)

    def remove_others(self, *slots: CopySlot) -> None:
        """Remove all other copies, also those that were not taken over."""
        self.remove_slots(lambda slot: slot not in slots)

    def remove_slots(self, which: Callable[[CopySlot], bool] = lambda _: True) -> None:
        with self._lock:
            for slot in filter(which, self._slots):
                slot.copy = slot.offer = None
                delete_copy(slot.path)


def _get_iteration(slot: CopySlot) -> int:
    assert slot.offer is not None
    return slot.offer.iteration
