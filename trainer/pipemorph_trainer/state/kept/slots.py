"""The files of one rank's copies: which is written next, and which somebody still needs.

Two are enough while nobody else reads them: the newest stays while the other is written. A *pin*
keeps a copy for a reader in another thread; then further files are made, at most six in all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipemorph_trainer.state.kept.choice import Offer
from pipemorph_trainer.state.kept.copies import Copy, Form, remove

NAMES = "abcdef"


class Slot:
    """A file. ``offer``: what its copy is of; None: nothing whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.copy: Copy | None = None
        self.offer: Offer | None = None
        self.pins = 0
        self.order = 0
        """The higher, the later it was finished."""


class Slots:
    """The files in ``folder``. ``whole``: so many finished copies stay while another is written.
    :meth:`pin`, :meth:`unpin` and :meth:`newest` are for any thread, the others for one."""

    def __init__(self, folder: Path, *, whole: int = 1) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._whole = whole
        self._slots = [Slot(folder / name) for name in NAMES]
        self._order = 0
        self.damaged = False
        """Whether :meth:`find` has found a damaged copy."""

    def find(
        self, fits: Callable[[Mapping[str, Any]], bool], *, compared: bool = False
    ) -> list[Offer]:
        """Take over the whole copies whose mark ``fits``, but no damaged ones. Returns what they
        are of. ``compared``: whose they are has compared them."""
        for slot in self._slots:
            copy = Copy.open(slot.path)
            if copy is None or not copy.whole or not fits(copy.mark):
                continue
            if not compared and copy.damaged:
                self.damaged = True
            else:
                slot.copy, slot.offer = copy, Offer(*copy.mark["offer"])
        with self._lock:
            for slot in sorted(self._finished(), key=_iteration):
                self._order += 1
                slot.order = self._order
            return [slot.offer for slot in self._slots if slot.offer is not None]

    @property
    def pinned(self) -> bool:
        return any(slot.pins for slot in self._slots)

    @property
    def size(self) -> int:
        """Bytes of the largest copy."""
        found = [slot.path.stat().st_size for slot in self._slots if slot.copy is not None]
        return max(found, default=0)

    def _finished(self) -> list[Slot]:
        """Slots with a whole copy, the newest first."""
        found = [slot for slot in self._slots if slot.offer is not None]
        return sorted(found, key=lambda slot: -slot.order)

    def begin(self, form: Form, object_bytes: int) -> Slot:
        """A slot to write a copy of this form to. It is not whole until :meth:`finish`.

        Raises :class:`OSError` if there is no memory for it.
        """
        with self._lock:
            needed = self._finished()[: self._whole]
            free = [slot for slot in self._slots if not slot.pins and slot not in needed]
            if not free:
                raise RuntimeError(f"all {len(self._slots)} copies of the state are in use")
            # One that has been made already, then the oldest.
            slot = min(free, key=lambda each: (each.copy is None, each.order))
            slot.offer = None
            if slot.copy is not None:
                slot.copy.begin()
        if slot.copy is None or not slot.copy.fits(form, object_bytes):
            slot.copy = None
            slot.copy = Copy.create(slot.path, form, object_bytes)
        return slot

    def finish(self, slot: Slot, offer: Offer, mark: Mapping[str, Any]) -> None:
        """A slot holds a whole copy from now on, the newest if it was being written."""
        assert slot.copy is not None
        slot.copy.finish({**mark, "offer": list(offer)})
        with self._lock:
            if slot.offer is None:
                self._order += 1
                slot.order = self._order
            slot.offer = offer

    def of(self, iteration: int) -> Slot | None:
        """The newest whole copy of an iteration."""
        with self._lock:
            found = [s for s in self._finished() if s.offer and s.offer.iteration == iteration]
            return found[0] if found else None

    def pin(self) -> list[Slot]:
        """The two newest whole copies, the newest first; each until :meth:`unpin`."""
        with self._lock:
            found = self._finished()[:2]
            for slot in found:
                slot.pins += 1
            return found

    def unpin(self, slot: Slot) -> None:
        with self._lock:
            slot.pins = max(0, slot.pins - 1)

    def unpin_all(self, but: Slot | None = None) -> None:
        """Forget all pins ``but`` that of one slot: what their readers read may change."""
        with self._lock:
            for slot in self._slots:
                slot.pins = int(slot is but)

    def keep_only(self, *kept: Slot) -> None:
        """Remove all copies but these, also those that were not taken over."""
        self.remove(lambda slot: slot not in kept)

    def remove(self, which: Callable[[Slot], bool] = lambda _: True) -> None:
        with self._lock:
            for slot in filter(which, self._slots):
                slot.copy = slot.offer = None
                remove(slot.path)


def _iteration(slot: Slot) -> int:
    assert slot.offer is not None
    return slot.offer.iteration
